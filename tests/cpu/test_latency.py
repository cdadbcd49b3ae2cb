"""The latency model starts at counted work, ends at what was measured, and shrugs at outliers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import BadInput
from draftwood.latency import BUCKET, LatencyModel, Work
from draftwood.trace import Round
from tests.latency_cases import MACHINE, TRUE_S, a_round, draft_work, model, trained, verify_work

# --- the prior -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "seconds"), [(0.0, 5.0), (0.5, 4.0), (1.0, 3.0)])
def test_of_arithmetic_and_traffic_the_shorter_passes_behind_the_longer(overlap: float, seconds: float) -> None:
    machine = replace(MACHINE, overlap=overlap)
    assert machine.seconds(Work(flops=2e12, bytes=3e10, launches=100)) == pytest.approx(seconds + 1e-3)
    assert machine.seconds(Work(flops=3e12, bytes=2e10, launches=0)) == pytest.approx(seconds)


def test_before_any_round_the_prior_is_believed() -> None:
    costs = model().costs(127, 0)
    for width in (1, 2, 48, 128):
        assert costs.verify_s[width - 1] == pytest.approx(MACHINE.seconds(verify_work(width, BUCKET // 2)))
    assert costs.draft_s == pytest.approx(MACHINE.seconds(draft_work(0)))
    assert len(costs.verify_s) == len(costs.aux_s) == 128


def test_a_longer_context_costs_more() -> None:
    assert (model().costs(15, 8000).verify_s > model().costs(15, 100).verify_s).all()


def test_forwards_wider_than_all_that_are_learned_apart_go_on_to_cost_more() -> None:
    latency = model()
    costs = latency.costs(12287, 0)
    for width in (6144, 8192, 12288):
        assert costs.verify_s[width - 1] == pytest.approx(MACHINE.seconds(verify_work(width, BUCKET // 2)), rel=1e-3)
        assert latency.predict(width - 1, 0, drafted=True)["verify"] == pytest.approx(costs.verify_s[width - 1])
    for width, seconds in ((2048, 3.0), (4096, 1.0)):
        for _ in range(9):
            latency.observe(a_round(width - 1, seconds))
    assert latency.costs(8191, 0).verify_s[-1] == pytest.approx(latency.costs(4095, 0).verify_s[-1]), "never falls"


def test_a_round_is_the_sum_of_its_parts() -> None:
    latency = trained([8, 32])
    costs = latency.costs(64, 100)
    for n in (0, 7, 20, 64):
        assert sum(latency.predict(n, 100, drafted=True).values()) == pytest.approx(costs.round_s[n])
    assert sum(latency.predict(0, 100, drafted=False).values()) == pytest.approx(costs.plain_s)


# --- what is learned -----------------------------------------------------------------------------------------


def test_what_was_run_is_predicted_as_measured() -> None:
    latency = trained([1, 2, 4, 8, 16, 32, 64, 128], rounds=200)
    for width, seconds in TRUE_S.items():
        assert latency.costs(127, 100).verify_s[width - 1] == pytest.approx(seconds, rel=0.05)
    assert latency.costs(127, 100).draft_s == pytest.approx(0.007, rel=0.02)
    assert latency.costs(127, 100).aux_s[31] == pytest.approx(4e-4, rel=0.02)


def test_another_size_of_batch_starts_as_far_from_its_prior() -> None:
    known = trained([1, 4, 8])
    alike = known.resembling(lambda n, context: verify_work(2 * n, context), None)
    theirs, ours = alike.costs(7, 100).verify_s, model().costs(15, 100).verify_s
    ratio = known.costs(0, 100).verify_s[0] / ours[0]
    assert theirs[0] / ours[1] == pytest.approx(ratio, rel=0.1) and abs(ratio - 1) > 0.1
    alike.observe(a_round(0, 0.5))
    assert known.costs(0, 100).verify_s[0] / ours[0] == ratio, "and learns for itself"


def test_drafts_after_a_pause_are_learned_apart_once_others_are_known() -> None:
    latency = model()
    for _ in range(12):
        latency.observe(a_round(4, 0.02))
    before = latency.costs(8, 100)
    late = a_round(4, 0.02)
    late = replace(late, seconds={**late.seconds, "draft": 10 * late.seconds["draft"], "grow": 0.01})
    for _ in range(12):
        latency.observe(late, first=True)
    after = latency.costs(8, 100)
    assert after.draft_s == pytest.approx(before.draft_s, rel=0.02)
    np.testing.assert_allclose(after.aux_s, before.aux_s, rtol=0.02)
    assert before.resume_s == 0 and after.resume_s == pytest.approx(9 * before.draft_s, rel=0.02)
    restored = model()
    restored.restore(latency.to_json())
    assert restored.costs(8, 100).resume_s == pytest.approx(after.resume_s)
    latency.observe(late)
    assert latency.costs(8, 100).draft_s > 1.01 * before.draft_s


def test_what_one_more_position_takes_is_learned_from_drafts_of_different_depths() -> None:
    latency, rng = model(), np.random.default_rng(0)
    assert latency.costs(8, 100).position_s == 0
    for i in range(300):
        round, positions = a_round(4, 0.02), 3 + i % 6
        draft_s = (2e-3 + 1e-4 * positions) * np.exp(0.05 * rng.normal())
        latency.observe(replace(round, seconds={**round.seconds, "draft": draft_s}, positions=positions))
    costs = latency.costs(8, 100)
    assert costs.position_s == pytest.approx(1e-4, rel=0.3)
    assert costs.beside(2).position_s == costs.position_s and costs.position == costs.position_s / costs.plain_s
    restored = model()
    restored.restore(json.loads(json.dumps(latency.to_json())))
    assert restored.costs(8, 100).position_s == pytest.approx(costs.position_s, rel=0.1)


def test_drafts_that_are_all_as_deep_say_nothing_of_what_a_position_takes() -> None:
    latency = model()
    for factor in (1.0, 1.1, 0.9, 50.0) * 10:
        round = a_round(4, 0.02)
        latency.observe(replace(round, seconds={**round.seconds, "draft": factor * 0.007}, positions=8))
    assert latency.costs(8, 100).position_s == 0


def test_a_prediction_goes_with_what_is_known_and_with_the_round() -> None:
    latency = trained([8])
    before = latency.predict(7, 100, drafted=True)
    assert latency.predict(7, 100, drafted=True) == before != latency.predict(7, 100, drafted=True, padding=8)
    for _ in range(20):
        latency.observe(a_round(7, 2 * TRUE_S[8]))
    assert latency.predict(7, 100, drafted=True)["verify"] > 1.5 * before["verify"]


def test_errors_are_those_of_predictions_made_beforehand() -> None:
    latency = trained([8], rounds=60, noise=0.0)
    assert np.isnan(latency.errors()["verify"].median), "no round said what was expected of it"
    for _ in range(20):
        expected = latency.predict(7, 100, drafted=True)
        latency.observe(replace(a_round(7, TRUE_S[8] / 1.1), predicted={**expected, "verify": TRUE_S[8]}))
    assert latency.errors()["verify"].median == pytest.approx(0.1, rel=0.01)
    assert latency.to_json()["errors"]["verify"] == pytest.approx([0.1, 0.1], rel=0.01)  # type: ignore[index]
    assert latency.errors()["draft"].median < 0.1


def test_plain_rounds_do_not_teach_what_drafted_ones_cost() -> None:
    latency = trained([8])
    before = latency.costs(8, 100)
    for _ in range(30):
        latency.observe(a_round(0, 0.033, drafted=False, host_s=5e-5))
    after = latency.costs(8, 100)
    np.testing.assert_allclose(after.aux_s / after.draft_s, before.aux_s / before.draft_s)
    assert after.draft_s == pytest.approx(before.draft_s, rel=0.02), "only the machine's pace is shared"
    assert after.plain_s == pytest.approx(0.033 + 5e-5, rel=0.02)


def test_a_drafter_that_counts_no_work_is_learned_from_its_time() -> None:
    latency = LatencyModel(MACHINE, verify_work)
    for _ in range(5):
        latency.observe(a_round(7, 0.041))
    assert latency.costs(8, 100).draft_s == pytest.approx(0.007, rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 600), st.floats(1e-6, 100), st.booleans()), max_size=25))
@settings(max_examples=40)
def test_costs_stay_positive_and_finite(history: list[tuple[int, float, bool]]) -> None:
    latency = model()
    for n, seconds, drafted in history:
        latency.observe(a_round(n if drafted else 0, seconds, drafted))
    costs = latency.costs(700, 100)
    for array in (costs.verify_s, costs.aux_s, np.array([costs.plain_s, costs.draft_s])):
        assert np.isfinite(array).all() and (array > 0).all()


def test_rounds_that_are_alike_teach_at_once_what_they_teach_one_by_one() -> None:
    one_by_one, at_once, rng = model(), model(), np.random.default_rng(1)
    for i in range(60):
        n, drafted = (7, True) if i % 2 else (0, False)
        four = [a_round(n, TRUE_S[1 + n] * np.exp(0.02 * rng.normal()), drafted) for _ in range(4)]
        for round in four:
            one_by_one.observe(round)
        at_once.observe(*four)
    slow, quick = one_by_one.costs(8, 100), at_once.costs(8, 100)
    np.testing.assert_allclose(quick.round_s, slow.round_s, rtol=0.02)
    assert quick.plain_s == pytest.approx(slow.plain_s, rel=0.02)
    assert {part: e.median for part, e in at_once.errors().items()} == pytest.approx(
        {part: e.median for part, e in one_by_one.errors().items()}, nan_ok=True
    )


# --- outliers, spells and changes ----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.1, 10, 1000])
def test_one_outlier_barely_moves_anything(factor: float) -> None:
    latency = trained([8, 16, 32])
    before = latency.costs(64, 100)
    latency.observe(replace_seconds(a_round(15, 0.045), factor))
    after = latency.costs(64, 100)
    np.testing.assert_allclose(after.verify_s, before.verify_s, rtol=0.06)
    np.testing.assert_allclose(after.round_s, before.round_s, rtol=0.06)
    ratios = [costs.verify_s / costs.plain_s for costs in (after, before)]
    np.testing.assert_allclose(*ratios, rtol=0.025)  # 65 tokens lie a doubling beyond what has run
    np.testing.assert_allclose(*(ratio[:32] for ratio in ratios), rtol=0.015)


def replace_seconds(round: Round, factor: float) -> Round:
    return replace(round, seconds={verb: factor * s for verb, s in round.seconds.items()})


def test_a_bad_first_observation_is_forgotten() -> None:
    latency = model()
    latency.observe(a_round(15, 0.45))
    for _ in range(15):
        latency.observe(a_round(15, 0.045))
    assert latency.costs(15, 100).verify_s[15] == pytest.approx(0.045, rel=0.1)


def test_one_of_several_rounds_may_be_paused() -> None:
    latency = model()
    for _ in range(20):
        latency.observe(*(a_round(7, 0.041) for _ in range(3)), a_round(7, 3.0))
    assert latency.costs(8, 100).verify_s[7] == pytest.approx(0.041, rel=0.02)


def test_a_slow_spell_of_the_machine_is_not_blamed_on_the_width_in_use() -> None:
    latency = trained([8, 16], rounds=80)
    before = latency.costs(15, 100).verify_s
    for _ in range(20):  # half as fast for a while, whatever the width
        latency.observe(a_round(15, 2 * float(before[15])))
    after = latency.costs(15, 100).verify_s
    blame = np.log(after[15] / before[15]) - np.log(after[7] / before[7])
    assert blame < 0.6 * np.log(2), "a plain average would put nearly all of it on the width in use"


def test_a_slow_spell_is_expected_to_go_on_and_then_forgotten() -> None:
    latency = trained([8, 16], rounds=80)
    usual = latency.costs(15, 100).round_s[15]
    for _ in range(12):
        latency.observe(replace_seconds(a_round(15, TRUE_S[16]), 1.5))
    assert latency.costs(15, 100).round_s[15] > 1.2 * usual
    for _ in range(40):
        latency.observe(a_round(15, TRUE_S[16]))
    assert latency.costs(15, 100).round_s[15] == pytest.approx(usual, rel=0.06)


def test_a_lasting_change_is_followed() -> None:
    latency = trained([16])
    for _ in range(100):
        latency.observe(a_round(15, 0.090))
    assert latency.costs(15, 100).verify_s[15] == pytest.approx(0.090, rel=0.05)


@pytest.mark.parametrize("change", [0.85, 1.15])
def test_a_few_plain_steps_tell_who_always_drafts_what_all_of_them_would_take(change: float) -> None:
    """Memory that others share is quicker now and slower then: a plain step waits for it, and a tree of one node, which
    does not run meanwhile; trees that wait for arithmetic do not."""
    latency = LatencyModel(replace(MACHINE, peak=3e10), verify_work, draft_work)
    latency, rng = trained([1, 2, 4, 8], rounds=120, latency=latency), np.random.default_rng(1)
    for i in range(320):
        width, drafted = (1, False) if i % 40 == 39 else (int(rng.choice([4, 8])), True)
        seconds = TRUE_S[width] * np.exp(0.03 * rng.normal())
        latency.observe(a_round(width - 1, seconds * (1 if drafted else change), drafted))
    costs = latency.costs(8, 100).verify_s
    assert costs[0] / costs[7] == pytest.approx(change * TRUE_S[1] / TRUE_S[8], rel=0.05)
    assert 0.4 < np.log(costs[1] / TRUE_S[2]) / np.log(change) < 1.1


def test_of_a_change_of_memory_a_forward_takes_what_it_waits_for() -> None:
    """By how many percents its seconds rise where memory's rise by one, if T⁴ = arithmetic⁴ + traffic⁴."""
    for width in (1, 60, 100, 160, 1000):
        work = verify_work(width, 100)
        arithmetic, traffic = work.flops / MACHINE.peak, work.bytes / MACHINE.bandwidth
        seconds = [(arithmetic**4 + (traffic * (1 + step)) ** 4) ** 0.25 for step in (-1e-5, 1e-5)]
        assert MACHINE.waits(work) == pytest.approx((np.log(seconds[1]) - np.log(seconds[0])) / 2e-5, rel=1e-3)
    assert MACHINE.waits(Work(0.0, 0.0, 10)) == 1.0


# --- what is kept --------------------------------------------------------------------------------------------


def test_what_a_long_life_taught_is_found_again() -> None:
    latency = model()
    for _ in range(20):
        latency.observe(a_round(4, 0.02))
    young = json.dumps(latency.to_json())
    learned = latency._learned
    for part in (learned.plain_host, learned.host, learned.position, learned.draft_at(100), learned.verify_at(100)):
        for name in ("seen", "_seen"):
            if hasattr(part, name):
                setattr(part, name, getattr(part, name) * 1e8)
    restored = model()
    restored.restore(json.loads(json.dumps(latency.to_json())))
    again = model()
    again.restore(json.loads(young))
    assert restored.costs(8, 100).round_s.tolist() == again.costs(8, 100).round_s.tolist()


@pytest.mark.parametrize(("factor", "kept"), [(1.1, True), (3.0, False)])
def test_a_kept_profile_that_no_longer_fits_is_dropped(factor: float, kept: bool) -> None:
    old, new = trained([8, 16, 32], rounds=60), model()
    for _ in range(20):
        old.observe(a_round(63, 0.5))  # what is not run again tells whose profile it is
    new.restore(json.loads(json.dumps(old.to_json())))
    for width in (8, 16, 32) * 4:
        new.observe(a_round(width - 1, factor * TRUE_S[width]))
    assert bool(new.costs(63, 100).verify_s[63] > 0.3) is kept


def test_a_copy_knows_the_same_and_then_learns_alone() -> None:
    latency = trained([1, 8])
    copy = latency.copy()
    before = latency.costs(8, 100).round_s
    np.testing.assert_array_equal(copy.costs(8, 100).round_s, before)
    for _ in range(20):
        copy.observe(a_round(7, 0.2))
    assert copy.costs(8, 100).verify_s[7] > 0.1
    np.testing.assert_array_equal(latency.costs(8, 100).round_s, before)


def test_a_learned_profile_survives_a_restart() -> None:
    old, new = trained([8, 16, 32], rounds=60), model()
    new.restore(json.loads(json.dumps(old.to_json())))
    np.testing.assert_allclose(new.costs(127, 100).round_s, old.costs(127, 100).round_s, rtol=0.05)


@pytest.mark.parametrize("data", [None, [], {}, {"widths": [1]}, "x", {"widths": None, "levels": 3}])
def test_a_damaged_profile_is_refused_and_changes_nothing(data: object) -> None:
    latency = model()
    with pytest.raises(BadInput, match="learned"):
        latency.restore(data)
    good = trained([8]).to_json()
    for damage in ({"host": [["x", 1.0]] * 21}, {"verify": {"0": [None]}}, {"draft": {"x": None}}, {"plain_host": [1]}):
        with pytest.raises(BadInput):
            latency.restore(good | damage)
    assert np.array_equal(latency.costs(9, 0).verify_s, model().costs(9, 0).verify_s)
