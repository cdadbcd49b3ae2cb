"""Masses become probabilities: what is learned brings expected and accepted lengths together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import acceptance
from draftwood.acceptance import TOGETHER, TRIALS, AcceptanceModel, temperature_bucket
from draftwood.bench.reliability import reliability
from draftwood.policies.base import OPTIMISM
from draftwood.recent import features_of
from draftwood.tree import Tree
from tests.acceptance_cases import TRUTHS, a_round, a_tree, chain, sure, train, walk


@pytest.mark.parametrize("name", TRUTHS)
def test_calibration_halves_the_error_of_the_expected_length(name: str) -> None:
    rng, model, truth = np.random.default_rng(1), AcceptanceModel(), TRUTHS[name]
    train(model, truth, rng)
    raw, calibrated = 0.0, 0.0
    for _ in range(100):
        mass, depths = (a := a_tree(rng)).mass[1:], a.depths[1:]
        right = truth(mass.astype(float), depths).sum()
        raw += abs(mass.sum() - right)
        calibrated += abs(model.calibrate(mass, depths).sum() - right)
    assert calibrated < raw / 2


@pytest.mark.parametrize("name", TRUTHS)
def test_calibration_halves_the_expected_calibration_error(name: str) -> None:
    rng, model, truth = np.random.default_rng(1), AcceptanceModel(), TRUTHS[name]
    train(model, truth, rng)
    raw, calibrated, accepted = [], [], []
    for _ in range(300):
        tree = a_tree(rng)
        path = walk(tree, np.append(1.0, truth(tree.mass[1:].astype(float), tree.depths[1:])), rng)
        raw.append(tree.mass[1:])
        calibrated.append(model.calibrate(tree.mass[1:], tree.depths[1:]))
        accepted.append(np.isin(np.arange(1, 1 + len(tree)), path))
    happened = np.concatenate(accepted)
    assert (
        reliability(np.concatenate(calibrated), happened).error < reliability(np.concatenate(raw), happened).error / 2
    )


def test_a_drafter_that_is_right_or_random_by_turns_is_seen_through_at_both_ends() -> None:
    """What it is sure of comes half of the time, and what it thinks unlikely does not come more often for that."""
    rng, model = np.random.default_rng(1), AcceptanceModel()
    for mass in rng.choice([0.99, 0.9, 0.5, 0.1, 0.03], 800):
        model.observe(a_round(sure(1, mass), accepted=int(rng.random() < mass / 2)))
    certain, even, rare = model.calibrate(np.array([0.99, 0.5, 0.03], np.float32), np.ones(3, np.int64))
    assert certain == pytest.approx(0.5, abs=0.08) and even == pytest.approx(0.25, abs=0.08) and rare < 0.04


def test_reliability_compares_what_was_said_with_what_happened() -> None:
    said, happened = np.array([0.05, 0.05, 0.95, 0.95]), np.array([False, True, True, True])
    found = reliability(said, happened)
    assert found.count.sum() == 4 and found.count[0] == 2 and found.count[9] == 2
    assert found.said[0] == pytest.approx(0.05) and found.happened[0] == 0.5 and np.isnan(found.said[5])
    assert found.error == pytest.approx(0.5 * 0.45 + 0.5 * 0.05)


@pytest.mark.parametrize("outcomes", [50, 500, 50_000])
def test_reliability_says_what_error_right_probabilities_would_show(outcomes: int) -> None:
    rng = np.random.default_rng(3)
    said = rng.random(outcomes)
    seen = [reliability(said, rng.random(outcomes) < said) for _ in range(30)]
    assert np.mean([found.error for found in seen]) == pytest.approx(seen[0].chance, rel=0.15)


def test_temperatures_share_a_bucket_with_their_like_and_greedy_has_its_own() -> None:
    assert [temperature_bucket(t) for t in (0.0, 0.01, 0.6, 0.7, 1.0, 1.1, 2.0)] == [0, 0.5, 0.5, 0.5, 1, 1, 2]


def test_a_drafter_that_is_right_about_itself_is_left_alone() -> None:
    rng, model = np.random.default_rng(2), AcceptanceModel()
    train(model, lambda mass, depth: mass, rng)
    tree = a_tree(rng)
    calibrated = model.calibrate(tree.mass[1:], tree.depths[1:])
    assert abs(calibrated.sum() - tree.mass[1:].sum()) < 0.15


def test_a_new_model_believes_the_drafter() -> None:
    tree = a_tree(np.random.default_rng(3))
    np.testing.assert_allclose(AcceptanceModel().calibrate(tree.mass[1:], tree.depths[1:]), tree.mass[1:], rtol=1e-5)


def test_rounds_that_come_while_others_are_learned_from_are_learned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that share an engine share its model."""
    model, round = AcceptanceModel(), a_round(a_tree(np.random.default_rng(0)), 1)

    def interrupted(*of: np.ndarray) -> np.ndarray:
        model._unlearned += 2 * [round]
        return features_of(*of)

    monkeypatch.setattr(acceptance, "features_of", interrupted)
    for _ in range(100):
        model._unlearned.append(round)
        model.observe(round)
        assert len(model._unlearned) <= TOGETHER


def test_a_change_of_text_is_followed() -> None:
    rng, model = np.random.default_rng(4), AcceptanceModel()
    train(model, lambda mass, depth: mass, rng)
    train(model, lambda mass, depth: mass / 2, rng, rounds=600)
    tree = a_tree(rng)
    assert model.calibrate(tree.mass[1:], tree.depths[1:]).sum() < 0.7 * tree.mass[1:].sum()


@st.composite
def histories(draw: st.DrawFn) -> tuple[AcceptanceModel, Tree]:
    """A model after any outcomes, however unlikely, and a tree it has not seen."""
    rng, model = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), AcceptanceModel()
    for accepted in draw(st.lists(st.integers(0, 12), max_size=40)):
        tree = a_tree(rng, draw(st.sampled_from([0, 1, 8, 60])))
        model.observe(a_round(tree, min(accepted, int(tree.depths.max())), draw(st.booleans())))
    return model, a_tree(rng, 60)


@given(histories())
@settings(max_examples=40)
def test_probabilities_rise_along_a_path_by_no_more_than_the_depth_adds(case: tuple[AcceptanceModel, Tree]) -> None:
    model, tree = case
    before = tree.mass.copy()
    p = model.calibrate(tree.mass[1:], tree.depths[1:])
    assert (p >= 0).all() and (p <= 1).all() and p.dtype == np.float32
    with np.errstate(divide="ignore"):
        odds = np.append(np.inf, p.astype(float) / (1 - p.astype(float)))
    most = np.exp(max(float(model.weights[3]), 0.0)) * odds[tree.parents[1:]]
    assert (odds[1:] <= most * (1 + 1e-5) + 1e-9).all()
    assert np.array_equal(tree.mass, before)


def test_a_greedy_target_takes_more_of_a_long_path_than_its_mass_says() -> None:
    """Each step is likelier to be right than its probability, so the longer a path, the more so."""
    rng, model = np.random.default_rng(1), AcceptanceModel()
    path = chain(6, 0.7)
    for _ in range(400):
        right = np.append(rng.random(6) < 0.8, False)
        model.observe(a_round(path, accepted=int(right.argmin())))
    depths = path.depths[1:]
    np.testing.assert_allclose(model.calibrate(path.mass[1:], depths), 0.8**depths, atol=0.07)


def test_masses_of_nothing_and_of_almost_nothing_are_harmless() -> None:
    model = AcceptanceModel()
    assert model.calibrate(np.zeros(0, np.float32), np.zeros(0, np.int64)).shape == (0,)
    for mass in (0.0, 1e-45, 1e-38):
        dim = Tree(np.arange(2), np.array([-1, 0]), np.arange(2), np.array([1, mass], np.float32))
        model.observe(a_round(dim, accepted=1))
        assert np.isfinite(model.calibrate(dim.mass[1:], dim.depths[1:])).all()
    assert np.isfinite(model.weights).all()


def test_one_bad_round_does_not_end_what_could_be_learned() -> None:
    """One sure chain that fails makes every node look hopeless; if none were verified, none could prove to be good."""
    model, even = AcceptanceModel(), chain(2)
    model.observe(a_round(Tree(np.arange(6), np.arange(6) - 1, np.arange(6), np.full(6, 0.9, np.float32))))
    mass, depths = even.mass[1:], even.depths[1:]
    assert model.likely(mass, depths, OPTIMISM)[0] > 4 * model.calibrate(mass, depths)[0]
    for _ in range(300):
        model.observe(a_round(even))
    hopes, known = model.likely(mass, depths, OPTIMISM), model.calibrate(mass, depths)
    assert (known < hopes).all() and (hopes < known + 0.02).all(), "what is known needs no hope"
    np.testing.assert_allclose(model.likely(mass, depths), known, rtol=1e-5)


def test_hope_is_shared_among_recent_rounds() -> None:
    """Of nodes unlike any that were verified little is known however many rounds there were; not each pays for it."""
    unlike, hopes = (np.full(1, 0.02, np.float32), np.full(1, 6)), []
    for rounds in (TRIALS, 60):
        model = AcceptanceModel()
        for _ in range(rounds):
            model.observe(a_round(sure(4, 0.5), accepted=1))
        hopes.append(float(model.likely(*unlike, OPTIMISM)[0] / model.calibrate(*unlike)[0]))
    alone = float(model.calibrate(*unlike, OPTIMISM)[0] / model.calibrate(*unlike)[0])
    assert 1 < hopes[1] < hopes[0] < alone


def test_rounds_learned_from_together_teach_what_they_teach_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for together in (1, TOGETHER):
        monkeypatch.setattr("draftwood.acceptance.TOGETHER", together)
        models.append(AcceptanceModel())
        train(models[-1], lambda mass, depths: mass**2, np.random.default_rng(0), rounds=200)
    mass, depths = np.linspace(0.1, 0.9, 9, dtype=np.float32), np.ones(9, np.int64)
    one_by_one, at_once = (model.calibrate(mass, depths) for model in models)
    assert at_once == pytest.approx(one_by_one, abs=0.02)
    assert abs(at_once - mass).max() > 0.1
