"""Masses become probabilities: what is learned brings expected and accepted lengths together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import acceptance
from draftwood.acceptance import (
    BETWEEN,
    CARRIED,
    HOPE,
    KINDS,
    LEAST_GROWN,
    RECALLED,
    TOGETHER,
    TRIAL_NODES,
    TRIALS,
    AcceptanceModel,
    temperature_bucket,
)
from draftwood.bench.reliability import reliability
from draftwood.grow import grow
from draftwood.ledger import ADVANCE, AFRESH, ODD, SHARE, Ledger
from draftwood.policies.base import OPTIMISM, Costs
from draftwood.policies.bastion import Bastion
from draftwood.predictability import MEMORY, MOST, POWER, SLOW, Predictability
from draftwood.recent import KEPT, features_of
from draftwood.trace import Round
from draftwood.tree import Lattice, Tree

Truth = Callable[[np.ndarray, np.ndarray], np.ndarray]
COSTS = Costs(1.0, 0.2, np.full(65, 0.05), 1 + 0.02 * np.arange(65))


def a_tree(rng: np.random.Generator, n: int = 16) -> Tree:
    """A best-first tree; some lattices are sharp, some flat."""
    logits = rng.normal(size=(12, 30)) * rng.uniform(0.5, 4)
    logp = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True))), axis=1)
    return grow(Lattice(np.arange(360).reshape(12, 30), logp.astype(np.float32)), 0, n)


def walk(tree: Tree, p: np.ndarray, rng: np.random.Generator) -> list[int]:
    """The path of one walk in which node i is reached with probability p[i], the root with 1."""
    path = [0]
    while True:
        node = path[-1]
        children = np.flatnonzero(tree.parents == node)
        chosen = np.searchsorted(np.cumsum(p[children]) / p[node], rng.uniform())
        if chosen >= len(children):
            return path[1:]
        path.append(int(children[chosen]))


def a_round(tree: Tree, accepted: int | list[int] = 0, drafted: bool = True) -> Round:
    """`accepted` is a path, or how deep the likeliest node was that was."""
    if isinstance(accepted, int):
        accepted = tree.path(int(np.flatnonzero(tree.depths == accepted)[0]))
    return Round(0, len(tree), drafted, tree.mass[1:], tree.depths[1:], accepted, {}, {})


def train(model: AcceptanceModel, truth: Truth, rng: np.random.Generator, rounds: int = 400) -> None:
    for _ in range(rounds):
        tree = a_tree(rng)
        p = np.append(1.0, truth(tree.mass[1:].astype(float), tree.depths[1:]))
        model.observe(a_round(tree, walk(tree, p, rng)))


TRUTHS: dict[str, Truth] = {
    "mass ** 1.5": lambda mass, depth: mass**1.5,
    "mass / 2": lambda mass, depth: mass / 2,
    "0.7 for each depth": lambda mass, depth: mass * 0.7 ** (depth - 1),
}


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


# --- the outlook ----


def sure(n: int, mass: float) -> Tree:
    """n children of the root, each of this mass."""
    parents = np.array([-1] + [0] * n)
    return Tree(np.arange(1 + n), parents, (parents >= 0) * 1, np.array([1.0] + [mass] * n, np.float32))


def test_there_is_no_outlook_before_a_few_trials() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert np.isnan(model.outlook(COSTS).gain)
        model.observe(a_round(sure(4, 0.1)))
    assert np.isfinite(model.outlook(COSTS).gain)


def test_the_gain_is_tokens_per_second_over_plain_decodings() -> None:
    model = AcceptanceModel()
    model.weights[1] = 1.0
    for _ in range(TRIALS + 20):
        model.observe(a_round(sure(0, 0.0)))  # verifies nothing: one token for a draft and a step
    assert model.outlook(COSTS).gain == pytest.approx(1 / (0.2 + 0.05 + 1))


def test_rounds_are_priced_each_at_its_size() -> None:
    """Half of two nodes and half of six take what these take, where four would be cheap or dear."""
    cliff = Costs(1.0, 0.0, np.zeros(9), np.array([1, 1, 1, 1, 1, 3, 3, 3, 3.0]))
    model = AcceptanceModel()
    for i in range(120):
        model.observe(a_round(sure(2 + 4 * (i % 2), 1e-6)))
    assert model.outlook(cliff).gain == pytest.approx(1 / 2, rel=0.02)


def test_a_gain_goes_with_the_prices_that_it_is_asked_at_and_with_the_rounds_behind_it() -> None:
    dear, model = replace(COSTS, draft_s=1.0), AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(sure(2, 0.5)))
    first = [model.outlook(costs).gain for costs in (COSTS, dear, COSTS)]
    assert first[0] == first[2] > first[1]
    for _ in range(TRIALS):
        model.observe(a_round(sure(2, 0.5), accepted=1))
    assert model.outlook(COSTS).gain > first[0]


def test_a_good_drafter_has_a_gain_above_one_and_a_bad_one_below() -> None:
    good, bad, rng = AcceptanceModel(), AcceptanceModel(), np.random.default_rng(5)
    for _ in range(60):
        tree = a_tree(rng)
        good.observe(a_round(tree, accepted=min(3, int(tree.depths.max()))))
        bad.observe(a_round(tree, accepted=0))
    assert good.outlook(COSTS).gain > 1 > bad.outlook(COSTS).gain


def test_idle_rounds_are_counted_and_one_look_after_a_long_pause_counts_much() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(sure(0, 0.0)))
    low = model.outlook(COSTS).gain
    for _ in range(200):
        model.observe(a_round(sure(0, 0.0), drafted=False))
    assert model.outlook(COSTS).idle == 200 and model.outlook(COSTS).gain == low
    model.observe(a_round(sure(4, 0.25), accepted=1))  # expects 2 tokens; half of the way from 1 to 2
    assert model.outlook(COSTS).idle == 0
    prospect = model.prospect()
    assert prospect is not None and prospect.tokens == pytest.approx(1.5, rel=1e-5)
    outlook, seconds = model.outlook(COSTS), 0.2 + 0.05 + 1 + 0.02 * 2
    assert outlook.gain * seconds == pytest.approx(1.5, rel=1e-5)
    assert outlook.hope * seconds == pytest.approx(HOPE * prospect.doubt)


def test_doubt_is_small_where_rounds_are_alike_and_never_moves_what_is_expected() -> None:
    steady, moody = AcceptanceModel(), AcceptanceModel()
    for i in range(40):
        steady.observe(a_round(sure(4, 0.25), accepted=1))
        moody.observe(a_round(a_tree(np.random.default_rng(3)), accepted=3 * (i % 2)))
    doubts = []
    for model in (steady, moody):
        prospect = model.prospect()
        assert prospect is not None
        doubts.append(prospect.doubt)
        seconds = COSTS.draft_s + COSTS.aux_s[0] + COSTS.verify_s[round(prospect.nodes)]
        outlook = model.outlook(COSTS)
        assert outlook.gain * seconds == pytest.approx(prospect.tokens)
        assert outlook.hope * seconds == pytest.approx(HOPE * prospect.doubt)
    assert 0 < doubts[0] < 0.1 and 0.2 < doubts[1] < 0.5


def test_a_look_that_fails_after_a_pause_adds_no_doubt() -> None:
    model = AcceptanceModel()
    for _ in range(12):
        model.observe(a_round(sure(4, 0.25)))
    before = model.prospect()
    for _ in range(200):
        model.observe(a_round(sure(0, 0.0), drafted=False))
    model.observe(a_round(sure(4, 0.25)))
    after = model.prospect()
    assert before is not None and after is not None and 0 < after.doubt < before.doubt


def test_a_text_behind_others_is_looked_at_afresh() -> None:
    """What all others brought counts as a few rounds: that leaves doubt, and is soon outweighed."""
    same, turned = AcceptanceModel(), AcceptanceModel()
    for model in (same, turned):
        for _ in range(128):
            model.observe(a_round(sure(4, 0.25)))
    before = turned.prospect()
    turned.turn()
    after = turned.prospect()
    assert before is not None and after is not None
    assert after.doubt > 2 * before.doubt and after.nodes == pytest.approx(before.nodes)
    for model in (same, turned):
        for _ in range(int(CARRIED)):
            model.observe(a_round(sure(4, 0.25), accepted=1))
    slow, quick = same.prospect(), turned.prospect()
    assert slow is not None and quick is not None and quick.tokens > slow.tokens + 0.2


def test_a_few_rounds_carry_over_as_they_are_but_another_text_may_differ() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(sure(4, 0.25), accepted=1))
    before = model.prospect()
    assert before is not None
    doubts = []
    for _ in range(4):
        model.turn()
        after = model.prospect()
        assert after is not None and (after.tokens, after.nodes) == (before.tokens, before.nodes)
        doubts.append(after.doubt)
    between = [BETWEEN**2, BETWEEN**2, BETWEEN**2 / 2, BETWEEN**2 / 3]
    assert doubts == pytest.approx(np.sqrt(before.doubt**2 + np.array(between)))


# --- another process ------------------------------------------------------------------------------------------


def experienced(rounds: int = 200) -> AcceptanceModel:
    model, rng = AcceptanceModel(), np.random.default_rng(6)
    train(model, TRUTHS["mass / 2"], rng, rounds)
    return model


def recalled(model: AcceptanceModel) -> AcceptanceModel:
    data = model.to_json()
    assert data is not None
    return AcceptanceModel.of_json(json.loads(json.dumps(data)))


def test_another_process_goes_on_as_with_another_text() -> None:
    before = experienced()
    after, tree = recalled(before), a_tree(np.random.default_rng(7))
    known, new = before.prospect(), after.prospect()
    assert known is not None and new is not None
    assert new.tokens == pytest.approx(known.tokens, rel=0.05) and new.nodes == pytest.approx(known.nodes, rel=0.05)
    assert new.doubt > max(2 * known.doubt, KINDS), "its texts may be of another kind"
    assert (after.depth, after.width, after.nodes) == (before.depth, before.width, before.nodes)
    masses = tree.mass[1:], tree.depths[1:]
    np.testing.assert_allclose(after.calibrate(*masses), before.calibrate(*masses), atol=1e-3)
    hopes = before.calibrate(*masses, 1.0), after.calibrate(*masses, 1.0)
    assert (hopes[1] > hopes[0]).all(), "and what it knows of nodes is less certain"


def test_how_another_process_differs_is_seen_from_its_own_rounds() -> None:
    after, rng, doubts = recalled(experienced()), np.random.default_rng(10), []
    for _ in range(4):
        prospect = after.prospect()
        assert prospect is not None
        doubts.append(prospect.doubt)
        train(after, TRUTHS["mass / 2"], rng, 10)
    assert doubts[-1] < doubts[1] < doubts[0] and doubts[-1] < doubts[0] / 2


def test_a_few_rounds_stand_for_all() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(8)
    for accepted in rng.integers(0, 5, 300):
        model.observe(replace(a_round(chain(6), int(accepted)), confidence=0.2 + 0.1 * int(accepted)))
    all_of_them, few = model._recent, recalled(model)._recent
    shares = np.array(all_of_them.shares) / all_of_them.weight
    mean, spread = (
        shares @ all_of_them.emitted,
        np.sqrt(shares @ np.square(all_of_them.emitted) - (shares @ all_of_them.emitted) ** 2),
    )
    assert few.weight == pytest.approx(RECALLED) and len(few) < len(all_of_them)
    assert np.mean(few.emitted) == pytest.approx(mean, abs=0.1) and np.std(few.emitted) == pytest.approx(
        spread, rel=0.1
    )
    assert few.confidence == pytest.approx(all_of_them.confidence, rel=0.05)


def test_there_is_nothing_to_recall_before_a_few_trials() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.to_json() is None
        model.observe(a_round(sure(4, 0.1)))
    assert model.to_json() is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [("weights", [1.0]), ("information", [[float("nan")] * 4] * 4), ("rounds", [{"logits": [1.0]}]), ("rounds", 3),
     ("weight", None), ("paths", ["x"])],
)  # fmt: skip
def test_damaged_experience_is_an_error(key: str, value: object) -> None:
    data = experienced(20).to_json()
    assert data is not None
    with pytest.raises((KeyError, TypeError, ValueError)):
        AcceptanceModel.of_json(data | {key: value})


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


def test_an_outlook_of_a_policy_that_never_drafts_is_defined() -> None:
    plain = Costs(1.0, 0.0, np.zeros(1), np.ones(1))
    model = AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(sure(4, 0.1)))
    assert np.isfinite(model.outlook(plain).gain)


# --- what hope may cost ----


def after_rounds(every: int, plain_s: float | None) -> bool:
    """Whether `bastion` drafts on behind 96 drafted rounds, of which one in so many accepted all of a chain of 4."""
    model = AcceptanceModel()
    for i in range(96):
        tree, seconds = chain(4), float(COSTS.round_s[4])
        record = replace(a_round(tree, 4 * (i % every == 0)), seconds={"verify": seconds})
        model.observe(record)
        if plain_s is not None:
            model.charge(record, plain_s)
    return Bastion().drafts(model.outlook(COSTS))


def test_hope_goes_on_until_it_has_cost_its_share() -> None:
    """1.25 tokens in 1.33 s are a gain of 0.94, which could be bad luck; the drafter lost 7.7 s of 128."""
    assert after_rounds(16, None), "hope alone never ends"
    assert not after_rounds(16, COSTS.plain_s)


def test_what_pays_needs_no_hope() -> None:
    assert after_rounds(8, COSTS.plain_s)


def test_a_machine_that_was_paused_is_no_loss() -> None:
    ledger, slept = Ledger(), replace(a_round(sure(1, 0.5)), seconds={"verify": 3600.0}, predicted={"verify": 1.0})
    ledger.enter(slept, plain_s=1.0)
    assert ledger.saved == 1 - ODD and ledger.affords


def test_what_was_lost_is_forgiven_as_plain_rounds_pass() -> None:
    ledger, lost = Ledger(), replace(a_round(sure(1, 0.5)), seconds={"verify": 1.5})
    while ledger.affords:
        ledger.enter(lost, plain_s=1.0)
    assert ledger.spent / 1.5 >= SHARE * ADVANCE / 0.5
    for _ in range(200):
        ledger.enter(replace(a_round(sure(0, 0.0), drafted=False), seconds={"verify": 1.0}), plain_s=1.0)
    assert ledger.affords


def test_another_text_may_lose_a_little_whatever_was_lost_before() -> None:
    ledger, lost = Ledger(), replace(a_round(sure(1, 0.5)), seconds={"verify": 1.25})
    for _ in range(100):
        ledger.enter(lost, plain_s=1.0)
    assert not ledger.affords
    ledger.turn()
    rounds = 0
    while ledger.affords:
        ledger.enter(lost, plain_s=1.0)
        rounds += 1
    assert rounds == 1 + int(AFRESH / 0.25)


def test_where_drafting_has_saved_much_more_is_hoped_for_and_never_more_than_twice_as_much() -> None:
    ledger, won = Ledger(), replace(a_round(sure(1, 1.0), [1]), seconds={"verify": 1.5})
    afforded = [ledger.affords]
    for _ in range(300):
        ledger.enter(won, plain_s=1.0)
        afforded.append(ledger.affords)
    assert afforded[0] == 1.0 and afforded[-1] == 2.0 and afforded == sorted(afforded)
    assert ledger.wealth == pytest.approx(ledger.saved / (ledger.spent + ADVANCE))


def test_a_text_that_may_lose_more_is_not_cut_short_by_another() -> None:
    ledger = Ledger(spent=100.0, saved=5.0)
    ledger.turn()
    assert ledger.saved == 5.0


# --- how deep to draft ----


def chain(depth: int, step: float = 0.5) -> Tree:
    steps = np.arange(1 + depth)
    return Tree(steps, steps - 1, steps, (step**steps).astype(np.float32))


def test_the_depth_worth_drafting_follows_how_long_paths_are() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.depth is None
        model.observe(a_round(chain(8), 4))
    assert model.depth == 5, "one more than any path had"
    model.observe(a_round(chain(5), 5))
    assert model.depth == 8, "all of it was used: there may be more"
    model.observe(a_round(chain(8), 3))
    assert model.depth == 6
    for _ in range(60):
        model.observe(a_round(chain(3), 0))
    assert model.depth == 3, "a look must be able to show better"


def test_paths_that_no_drafter_was_asked_for_say_nothing_of_how_deep_to_draft() -> None:
    model = AcceptanceModel()
    for _ in range(60):
        model.observe(a_round(chain(8), 2))
    model.observe(replace(a_round(chain(8), 8), positions=0))
    assert model.depth == 3


def test_drafts_are_shallower_where_positions_are_dear() -> None:
    depths = []
    for price in (0.0, 0.002, 0.02, 0.2):  # plain steps
        model = AcceptanceModel()
        for accepted in [7] + [6] * 2 + [4] * 8 + [2] * 24:
            model.observe(a_round(chain(12), accepted), position=price)
        depths.append(model.depth)
    assert depths == [8, 7, 3, 3], "one more than the longest path; the second longest; the longest but eleven; any"


def test_the_width_worth_drafting_follows_what_trees_use() -> None:
    siblings = Tree(np.arange(5), np.array([-1, 0, 0, 0, 1]), np.array([0, 1, 1, 1, 2]), np.full(5, 0.2, np.float32))
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.width is None
        model.observe(a_round(siblings))
    assert model.width == 6
    model.observe(a_round(chain(0)))
    assert model.width == 6
    for _ in range(60):
        model.observe(a_round(chain(3)))
    assert model.width == 2


def test_what_is_worth_growing_follows_what_trees_end_with() -> None:
    model = AcceptanceModel()
    assert model.faint == 0.0
    for _ in range(48):
        model.observe(a_round(chain(3)))
    assert 0.125 / 2.5 < model.faint < 0.125 / 2, "somewhat less than half of what trees end with"
    for _ in range(48):
        model.observe(a_round(chain(6)))
    assert model.faint < 0.016


def test_how_much_is_worth_growing_follows_what_trees_verify() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert model.nodes == TRIAL_NODES, "more are never verified"
        model.observe(a_round(chain(6)))
    assert model.nodes == 9
    for nodes in (9, 13):
        model.observe(a_round(chain(9)))
        assert model.nodes == nodes, "all of it was used twice: there may be more"
    for _ in range(KEPT):
        model.observe(a_round(chain(2)))
    assert model.nodes == LEAST_GROWN


def test_trees_that_are_verified_whole_are_grown_further() -> None:
    """Growth that ends too early must not look like trees that end there."""
    model, chosen = AcceptanceModel(), []
    for _ in range(100):
        worth_growing = sum(0.5**d >= model.faint for d in range(1, 20))
        chosen.append(min(5, worth_growing))
        model.observe(replace(a_round(chain(chosen[-1])), grown=worth_growing))
    assert min(chosen) == 5 and 0 < model.faint < 0.5**5


def test_rounds_of_the_chosen_few_teach_what_nodes_are_worth_and_nothing_about_others() -> None:
    rng = np.random.default_rng(0)
    model = AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(a_tree(rng), 1))
    before, weights = model.prospect(), model.weights.copy()
    for _ in range(20):
        model.observe(a_round(a_tree(rng, 30), [1]), typical=False)
    after = model.prospect()
    assert before is not None and after is not None and after.nodes == pytest.approx(before.nodes)
    assert not np.allclose(model.weights, weights)


# --- how predictable a text is ----


def behind(confidence: float | None, rounds: int = 60) -> float:
    """Tokens to expect of a draft where the target was so sure in plain rounds, after texts where it was 0.5 sure."""
    model = AcceptanceModel()
    model.turn()
    for _ in range(40):
        model.observe(replace(a_round(sure(4, 0.25), accepted=1), confidence=0.5))
    model.turn()
    for _ in range(rounds):
        model.observe(replace(a_round(sure(0, 0.0), drafted=False), confidence=confidence))
    prospect = model.prospect()
    assert prospect is not None
    return prospect.tokens


def test_a_text_that_is_not_drafted_for_says_when_it_is_worth_a_look() -> None:
    usual = behind(None) - 1
    assert behind(np.nan) == behind(np.inf) == behind(None), "a target that writes no numbers says nothing"
    assert behind(0.5) - 1 == pytest.approx(usual)
    rounds = 1 / (1 - MEMORY)  # that a long text counts as, beside what is usual
    own = rounds / (rounds + SLOW)
    assert behind(0.6) - 1 == pytest.approx(usual * (1 + 0.2 * own) ** POWER, rel=0.01)
    assert behind(0.4) - 1 == pytest.approx(usual * (1 - 0.2 * own) ** POWER, rel=0.01)
    assert behind(0.6, rounds=2) < behind(0.6, rounds=8) < behind(0.6), "a few tokens say little"
    assert behind(1.0) - 1 <= usual * MOST**POWER + 1e-6


def test_a_sure_target_does_not_make_a_drafter_better_that_never_hits() -> None:
    model = AcceptanceModel()
    for i in range(200):
        model.observe(replace(a_round(sure(1, 0.01) if i < 40 else sure(0, 0.0), drafted=i < 40), confidence=i / 200))
    assert model.outlook(COSTS).gain < 0.9


@given(st.lists(st.floats(0.01, 1.0), max_size=40), st.floats(0.01, 1.0))
def test_what_is_usual_changes_nothing_and_more_is_never_worse(seen: list[float], usual: float) -> None:
    even, text, surer = Predictability(), Predictability(), Predictability()
    for confidence in seen:
        even.see(usual)
        text.see(confidence)
        surer.see(min(1.0, 1.1 * confidence))
    assert even.factor(usual) == pytest.approx(1.0)
    assert MOST**-POWER <= text.factor(usual) <= surer.factor(usual) <= MOST**POWER
    assert text.factor(float("nan")) == 1.0
    text.turn()
    assert text.factor(usual) == 1.0
