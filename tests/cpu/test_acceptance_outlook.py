"""The outlook: what drafting gains over plain decoding, how doubtful that is, and how predictable a text is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.acceptance import BETWEEN, CARRIED, HOPE, TRIALS, AcceptanceModel
from draftwood.policies.base import Costs
from draftwood.predictability import MEMORY, MOST, POWER, SLOW, Predictability
from tests.acceptance_cases import COSTS, a_round, a_tree, sure


def test_there_is_no_outlook_before_a_few_trials() -> None:
    model = AcceptanceModel()
    for _ in range(TRIALS):
        assert np.isnan(model.outlook(COSTS).gain)
        model.observe(a_round(sure(4, 0.1)))
    assert np.isfinite(model.outlook(COSTS).gain)


def test_an_outlook_of_a_policy_that_never_drafts_is_defined() -> None:
    plain = Costs(1.0, 0.0, np.zeros(1), np.ones(1))
    model = AcceptanceModel()
    for _ in range(TRIALS):
        model.observe(a_round(sure(4, 0.1)))
    assert np.isfinite(model.outlook(plain).gain)


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


# --- how predictable a text is -------------------------------------------------------------------------------


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
