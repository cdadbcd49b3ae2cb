"""Another process goes on from what an acceptance model has learned in earlier ones."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from draftwood import registry
from draftwood.acceptance import KINDS, RECALLED, TRIALS, AcceptanceModel
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel, Machine
from draftwood.target import Target
from tests.acceptance_cases import TRUTHS, a_round, a_tree, chain, sure, train


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


@pytest.mark.parametrize("damage", [{"depth": float("inf")}, {"paths": [float("inf")]}, {"weights": None}])
def test_an_engine_begins_anew_instead_of_going_on_from_it(target: Target, damage: dict[str, object]) -> None:
    data = experienced(20).to_json()
    assert data is not None
    made = Engine(target, None, registry.policy("bastion"), LatencyModel(Machine("m", 1e12, 1e10, 1e-6), target.work))
    with pytest.raises(BadInput, match="learned anew"):
        made.recall([["bastion", 0.0, data | damage]])
    assert made.experience() == []
