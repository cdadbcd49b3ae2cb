"""The latency model starts at counted work, ends at what was measured, and shrugs at outliers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import BadInput
from draftwood.latency import BUCKET, LatencyModel, Machine, Work
from draftwood.learned import reach
from draftwood.offline_profile import (
    ConvexCosts,
    Profile,
    fit_convex,
    measure_profile,
    nonnegative_least_squares,
)
from draftwood.policies.base import Costs, expected
from draftwood.policies.bastion import Bastion
from draftwood.probe import probe
from draftwood.store import cached_file, read_json, write_json
from draftwood.trace import Round

MACHINE = Machine("made up", peak=1e12, bandwidth=1e10, launch_s=1e-5)
# Measured on a processor: flat, a jump at 4 and a step at 8 tokens, then compute-bound.
TRUE_S = {1: 0.033, 2: 0.034, 4: 0.040, 8: 0.041, 16: 0.045, 32: 0.057, 64: 0.083, 128: 0.141}


def verify_work(n_tokens: int, context: int) -> Work:
    return Work(flops=2.7e8 * n_tokens, bytes=2.7e8 + 2e4 * context, launches=300)


def draft_work(context: int) -> Work:
    return Work(flops=4e8, bytes=2.4e7, launches=60)


def model() -> LatencyModel:
    return LatencyModel(MACHINE, verify_work, draft_work)


def a_round(n: int, verify_s: float, drafted: bool = True, context: int = 100, host_s: float = 4e-4) -> Round:
    seconds = {"choose": host_s, "verify": verify_s} | ({"draft": 0.007} if drafted else {})
    return Round(context, n, drafted, np.zeros(n, np.float32), np.ones(n, np.int64), [], seconds, {})


def trained(
    widths: list[int], rounds: int = 40, noise: float = 0.03, latency: LatencyModel | None = None
) -> LatencyModel:
    latency, rng = latency or model(), np.random.default_rng(0)
    for i in range(rounds):
        width = widths[i % len(widths)]
        latency.observe(a_round(width - 1, TRUE_S[width] * np.exp(noise * rng.normal())))
    return latency


# --- the prior ------------------------------------------------------------------------------------


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


# --- learning -------------------------------------------------------------------------------------


def test_what_was_run_is_predicted_as_measured() -> None:
    latency = trained([1, 2, 4, 8, 16, 32, 64, 128], rounds=200)
    for width, seconds in TRUE_S.items():
        assert latency.costs(127, 100).verify_s[width - 1] == pytest.approx(seconds, rel=0.05)
    assert latency.costs(127, 100).draft_s == pytest.approx(0.007, rel=0.02)
    assert latency.costs(127, 100).aux_s[31] == pytest.approx(4e-4, rel=0.02)


def test_a_cliff_that_was_measured_stays() -> None:
    latency = model()
    for _ in range(20):
        latency.observe(a_round(7, 0.060))
        latency.observe(a_round(15, 0.030))  # faster although wider: kernels do that
    verify = latency.costs(15, 100).verify_s
    assert verify[15] < 0.6 * verify[7]


def test_a_width_from_a_bad_moment_is_not_believed_dearer_than_wider_ones_that_run_now() -> None:
    """A machine that paused, and a policy that has kept away from plain decoding since: as if that were slow."""
    paused = model()
    for _ in range(5):
        paused.observe(a_round(0, 2.0))
        paused.observe(a_round(11, 2.0))
    latency = model()
    latency.restore(paused.to_json())
    for i in range(150):
        latency.observe(a_round(11 if i % 50 else 0, 0.030))
    assert latency.costs(15, 100).plain_s < 0.035


def test_a_width_that_ran_once_is_not_believed_dearer_than_a_wider_one_that_ran_often() -> None:
    latency = trained([1, 4, 8])
    before = latency.costs(7, 100).verify_s
    for _ in range(2):
        latency.observe(a_round(2, 0.5))
    verify = latency.costs(7, 100).verify_s
    assert verify[2] <= verify[3] < 1.1 * before[3]


def test_another_size_of_batch_starts_as_far_from_its_prior() -> None:
    known = trained([1, 4, 8])
    alike = known.resembling(lambda n, context: verify_work(2 * n, context), None)
    theirs, ours = alike.costs(7, 100).verify_s, model().costs(15, 100).verify_s
    ratio = known.costs(0, 100).verify_s[0] / ours[0]
    assert theirs[0] / ours[1] == pytest.approx(ratio, rel=0.1) and abs(ratio - 1) > 0.1
    alike.observe(a_round(0, 0.5))
    assert known.costs(0, 100).verify_s[0] / ours[0] == ratio, "and learns for itself"


def test_widths_between_two_knots_are_learned_too() -> None:
    latency = model()
    for _ in range(30):
        latency.observe(a_round(39, 0.070))
    assert latency.costs(64, 100).verify_s[39] == pytest.approx(0.070, rel=0.02)


def test_widths_never_run_follow_their_neighbours() -> None:
    """The prior is 4 times too fast here; what was learned at 8 to 32 must halve the error at 64."""
    prior, learned = model().costs(63, 100).verify_s[63], trained([8, 16, 32]).costs(63, 100).verify_s[63]
    assert abs(learned - TRUE_S[64]) < 0.5 * abs(prior - TRUE_S[64])


def test_a_width_that_does_not_run_follows_those_that_do() -> None:
    """What it learned was of a machine as it was then: of what happens to its neighbours it takes a part."""
    latency = trained([4, 8, 16], rounds=60)
    before = latency.costs(15, 100).verify_s
    for i in range(150):
        latency.observe(a_round(3 + 4 * (i % 2), 2 * TRUE_S[4 + 4 * (i % 2)]))
    after = latency.costs(15, 100).verify_s
    assert after[7] / before[7] == pytest.approx(2, rel=0.05) and after[15] / before[15] > 1.25


def test_widths_beside_each_other_are_told_apart() -> None:
    """A kernel that steps from 5 to 6 tokens: a policy must see what the sixth one costs."""
    latency = model()
    for i in range(60):
        latency.observe(a_round(3 + i % 4, 0.040 if i % 4 < 2 else 0.050))
    assert latency.costs(8, 100).verify_s[3:7] == pytest.approx([0.040, 0.040, 0.050, 0.050], rel=0.02)


def test_moods_of_the_machine_leave_the_ratio_of_two_widths_alone() -> None:
    """Spells of ten rounds, each a tenth slower or faster, in which other widths happen to run."""
    latency, rng = trained([2, 4], rounds=60, noise=0.0), np.random.default_rng(0)
    for _ in range(40):
        width, mood = int(rng.choice([2, 4])), np.exp(0.1 * rng.normal())
        for _ in range(10):
            latency.observe(a_round(width - 1, TRUE_S[width] * mood * np.exp(0.05 * rng.normal())))
        costs = latency.costs(3, 100).verify_s
        assert costs[3] / costs[1] == pytest.approx(TRUE_S[4] / TRUE_S[2], rel=0.06)


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


def test_a_width_that_comes_late_is_learned_at_once() -> None:
    """However far off its neighbours led, and however little rounds have wavered before."""
    latency = trained([1, 8], rounds=200, noise=0.01)
    for _ in range(12):
        latency.observe(a_round(255, 1.5))
    assert latency.costs(255, 100).verify_s[255] == pytest.approx(1.5, rel=0.1)


def test_a_forward_wider_than_all_that_is_learned_teaches_the_widest() -> None:
    latency = trained([1, 8])
    for _ in range(60):
        latency.observe(a_round(9000, 0.5))
    assert latency.costs(9000, 100).verify_s[9000] == pytest.approx(0.5, rel=0.05)


def test_widths_beyond_those_known_go_on_to_rise() -> None:
    """As the last doubling did: a width where arithmetic has become dear says so of the next."""
    latency = model()
    for _ in range(20):
        for width, seconds in ((8, 0.020), (16, 0.036)):
            latency.observe(a_round(width - 1, seconds))
    verify = latency.costs(63, 100).verify_s
    assert verify[31] >= 0.065 and np.all(np.diff(verify[15:]) >= 0)


def rounds_of(widths: dict[int, float], rounds: int = 20) -> LatencyModel:
    latency = model()
    for _ in range(rounds):
        for width, seconds in widths.items():
            latency.observe(a_round(width - 1, seconds))
    return latency


def test_the_next_width_is_believed_to_take_no_more_until_it_is_run() -> None:
    """Else a policy that chooses by price would never find out; one step further nothing is given away."""
    latency = rounds_of({1: 0.010, 4: 0.015, 8: 0.020})
    verify = latency.costs(63, 100).verify_s  # of n nodes: a width of n + 1
    assert verify[9] == pytest.approx(verify[7])
    assert verify[11] > 1.2 * verify[7] and (np.diff(verify[11:]) >= 0).all()


def test_the_next_width_is_as_dear_as_it_turns_out_to_be() -> None:
    """Within a few rounds: the first one makes kernels, and one alone may have met a bad moment."""
    latency = rounds_of({1: 0.010, 4: 0.015, 8: 0.020})
    found = []
    for _ in range(6):
        latency.observe(a_round(9, 0.040))
        found.append(latency.costs(63, 100).verify_s)
    assert found[-1][9] > 1.4 * found[-1][7] and found[-1][7] == pytest.approx(0.020, rel=0.05)
    assert all(verify[11] == pytest.approx(verify[9]) for verify in found[2:]), "then the one behind it is tried"


def test_the_next_width_is_as_cheap_as_it_turns_out_to_be() -> None:
    """Though it ran only once: what narrower ones say of it no longer counts."""
    latency = rounds_of({1: 0.010, 4: 0.015, 8: 0.020})
    for _ in range(2):  # the first one makes kernels
        latency.observe(a_round(9, 0.020))
    verify = latency.costs(63, 100).verify_s
    assert verify[9] == pytest.approx(verify[7], rel=0.01) and verify[11] == pytest.approx(verify[7], rel=0.01)
    assert verify[15] > 1.2 * verify[7]


def test_a_forward_that_is_little_of_a_width_does_not_count_as_its_try() -> None:
    latency = rounds_of({4: 0.015, 8: 0.020, 12: 0.020})
    before = latency.costs(63, 100).verify_s
    for _ in range(2):
        latency.observe(a_round(12, 0.020))  # a quarter of 16
    verify = latency.costs(63, 100).verify_s
    assert before[15] == pytest.approx(before[11]) and verify[15] == pytest.approx(verify[11], rel=0.05)


MASS = (0.8 * 0.85 ** np.arange(40)).astype(np.float32)


def tried(true_s: Callable[[int], float], rounds: int = 200, seed: int = 0) -> list[int]:
    """The widths that `bastion` runs where up to 8 tokens are known and the prior says 2.7 ms for each further one."""
    latency, rng = LatencyModel(replace(MACHINE, peak=1e11), verify_work, draft_work), np.random.default_rng(seed)
    known, widths = [1, 4, 8] * 20, []
    for i in range(len(known) + rounds):
        n = known[i] - 1 if i < len(known) else Bastion().choose(MASS, latency.costs(40, 100))
        latency.observe(a_round(n, true_s(1 + n) * np.exp(0.03 * rng.normal())))
        widths.append(1 + n)
    return widths[len(known) :]


def test_where_arithmetic_is_cheap_ever_wider_trees_are_tried() -> None:
    """On a GPU a forward of 64 tokens takes little more than one of 16, though a rise up to 16 says otherwise."""
    latency = LatencyModel(replace(MACHINE, peak=1e15), verify_work, draft_work)
    mass = np.sort(np.append(0.5 * 0.75 ** np.arange(15), np.full(48, 0.012)))[::-1].astype(np.float32)
    known, widths = [0, 3, 7, 15] * 20, []
    for i in range(len(known) + 40):
        n = known[i] if i < len(known) else Bastion().choose(mass, latency.costs(63, 100))
        latency.observe(a_round(n, 0.030 + 4e-4 * min(n, 15)))
        widths.append(1 + n)
    assert max(widths[: len(known) + 2]) <= 24 and min(widths[-20:]) > 60


def test_wide_forwards_are_not_tried_for_their_price() -> None:
    verify = rounds_of({8: 0.020, 16: 0.036}).costs(63, 100).verify_s
    assert verify[23] >= 0.050


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flat_to", [12, 16])
@pytest.mark.parametrize("slope", [0.0, 0.001, 0.002, 0.0035])
def test_bastion_finds_that_wider_trees_cost_nothing(slope: float, flat_to: int, seed: int) -> None:
    """Whatever the prior, and a rise up to 8 tokens, say of them."""
    true_s = np.array([0.025 + slope * min(w, 8) + 0.004 * max(0, w - flat_to) for w in range(1, 42)])
    widths = tried(lambda width: float(true_s[width - 1]), seed=seed)
    rate = expected(MASS) / Costs(0.0, 0.007, np.full(41, 4e-4), true_s).round_s
    late = [rate[width - 1] for width in widths[-100:]]
    assert min(late) > 0.92 * rate.max() > rate[7], "10 tokens at least: one try of each leaves some doubt"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("step", [1.6, 2.0])
def test_bastion_loses_few_rounds_to_wider_trees_that_are_dear(step: float, seed: int) -> None:
    widths = tried(lambda width: (0.025 + 0.001 * min(width, 8)) * (1 if width <= 8 else step), seed=seed)
    assert sum(width > 8 for width in widths) <= 10 and max(widths[-150:]) <= 8


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


def test_drafts_that_are_all_as_deep_say_nothing_of_what_a_position_takes() -> None:
    latency = model()
    for factor in (1.0, 1.1, 0.9, 50.0) * 10:
        round = a_round(4, 0.02)
        latency.observe(replace(round, seconds={**round.seconds, "draft": factor * 0.007}, positions=8))
    assert latency.costs(8, 100).position_s == 0


def test_a_width_never_run_is_not_believed_cheaper_than_a_narrower_one_that_was() -> None:
    latency = model()
    for _ in range(20):
        latency.observe(a_round(15, 0.5))
    verify = latency.costs(511, 100).verify_s
    assert (verify[15:] >= 0.99 * verify[15]).all()


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


def test_long_contexts_learn_apart_and_begin_like_the_nearest() -> None:
    latency = trained([8], rounds=60)
    near, far = latency.costs(8, 100).verify_s[7], latency.costs(8, 6000).verify_s[7]
    prior = [model().costs(8, context).verify_s[7] for context in (100, 6000)]
    assert far / prior[1] == pytest.approx(near / prior[0], rel=0.01)
    for _ in range(30):
        latency.observe(a_round(7, 3 * far, context=6000))
    assert latency.costs(8, 6000).verify_s[7] == pytest.approx(3 * far, rel=0.1)
    for _ in range(60):
        latency.observe(a_round(7, TRUE_S[8]))
    assert latency.costs(8, 100).verify_s[7] == pytest.approx(near, rel=0.05)
    assert latency.costs(8, 6000).verify_s[7] == pytest.approx(3 * far, rel=0.25)
    assert [reach(c) for c in (0, 1023, 1024, 2047, 2048, 8191)] == [0, 0, 1, 1, 2, 3]


@pytest.mark.parametrize(("factor", "kept"), [(1.1, True), (3.0, False)])
def test_a_kept_profile_that_no_longer_fits_is_dropped(factor: float, kept: bool) -> None:
    old, new = trained([8, 16, 32], rounds=60), model()
    for _ in range(20):
        old.observe(a_round(63, 0.5))  # what is not run again tells whose profile it is
    new.restore(json.loads(json.dumps(old.to_json())))
    for width in (8, 16, 32) * 4:
        new.observe(a_round(width - 1, factor * TRUE_S[width]))
    assert bool(new.costs(63, 100).verify_s[63] > 0.3) is kept


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


def test_a_lasting_change_is_followed() -> None:
    latency = trained([16])
    for _ in range(100):
        latency.observe(a_round(15, 0.090))
    assert latency.costs(15, 100).verify_s[15] == pytest.approx(0.090, rel=0.05)


def test_plain_rounds_do_not_teach_what_drafted_ones_cost() -> None:
    latency = trained([8])
    before = latency.costs(8, 100)
    for _ in range(30):
        latency.observe(a_round(0, 0.033, drafted=False, host_s=5e-5))
    after = latency.costs(8, 100)
    np.testing.assert_allclose(after.aux_s / after.draft_s, before.aux_s / before.draft_s)
    assert after.draft_s == pytest.approx(before.draft_s, rel=0.02), "only the machine's pace is shared"
    assert after.plain_s == pytest.approx(0.033 + 5e-5, rel=0.02)


def test_a_copy_knows_the_same_and_then_learns_alone() -> None:
    latency = trained([1, 8])
    copy = latency.copy()
    before = latency.costs(8, 100).round_s
    np.testing.assert_array_equal(copy.costs(8, 100).round_s, before)
    for _ in range(20):
        copy.observe(a_round(7, 0.2))
    assert copy.costs(8, 100).verify_s[7] > 0.1
    np.testing.assert_array_equal(latency.costs(8, 100).round_s, before)


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


def test_one_of_several_rounds_may_be_paused() -> None:
    latency = model()
    for _ in range(20):
        latency.observe(*(a_round(7, 0.041) for _ in range(3)), a_round(7, 3.0))
    assert latency.costs(8, 100).verify_s[7] == pytest.approx(0.041, rel=0.02)


def test_a_widths_first_forward_is_no_word_on_those_beside_it() -> None:
    latency = model()
    latency.observe(a_round(7, 0.5), *(a_round(7, 0.041) for _ in range(3)))
    assert latency.costs(8, 100).verify_s[7] == pytest.approx(0.041, rel=0.05)


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


# --- the offline profile --------------------------------------------------------------------------


def profile() -> Profile:
    return measure_profile(
        lambda width, context: TRUE_S[width] + 1e-6 * context * width,
        0.007,
        "made up",
        {"torch": "9"},
        tuple(TRUE_S),
        (0, 1000),
    )


def test_measuring_takes_medians_and_reports_progress() -> None:
    calls: list[tuple[int, int]] = []
    seconds = iter([9.0, 1.0, 7.0, 2.0] * 6)
    done: list[tuple[int, int]] = []

    def forward(width: int, context: int) -> float:
        calls.append((width, context))
        return next(seconds)

    taken = measure_profile(
        forward, 0.1, "m", {}, (1, 2, 4), (0, 8), repeats=3, progress=lambda d, of: done.append((d, of))
    )
    assert taken.seconds == ((2.0, 2.0),) * 3  # the median of 1, 7 and 2: the first call warms up
    assert calls == [(w, c) for c in (0, 8) for w in (1, 2, 4) for _ in range(4)]
    assert done == [(i, 6) for i in range(1, 7)]


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=14))
def test_the_fit_never_falls_and_is_convex(seconds: list[float]) -> None:
    widths = np.cumsum(1 + np.arange(len(seconds))).astype(float)
    slopes = np.diff(fit_convex(widths, np.array(seconds))) / np.diff(widths)
    assert (slopes >= -1e-9).all() and (np.diff(slopes) >= -1e-9).all()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10))
def test_the_fit_leaves_a_convex_curve_alone(slopes: list[float]) -> None:
    widths = np.arange(1.0, 2 + len(slopes))
    curve = 0.5 + np.concatenate([[0], np.cumsum(np.sort(slopes))])
    np.testing.assert_allclose(fit_convex(widths, curve), curve, atol=1e-7)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 10))
def test_nonnegative_least_squares_is_optimal(seed: int, rows: int, columns: int) -> None:
    """Karush, Kuhn and Tucker: no free weight wants to move, none at 0 wants to rise."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = nonnegative_least_squares(a, b)
    downhill = a.T @ (b - a @ x)
    assert (x >= 0).all() and (downhill <= 1e-8).all() and np.abs(downhill[x > 0]).max(initial=0) <= 1e-8


def test_convex_costs_interpolate_between_contexts_and_go_on_beyond_widths() -> None:
    convex = ConvexCosts.of(profile())
    near, middle, far = (convex.costs(255, c) for c in (0, 500, 1000))
    np.testing.assert_allclose(middle.verify_s, (near.verify_s + far.verify_s) / 2)
    assert np.array_equal(convex.costs(255, 10**6).verify_s, far.verify_s)
    assert near.verify_s[255] == pytest.approx(near.verify_s[127] + 128 * (near.verify_s[127] - near.verify_s[63]) / 64)
    assert near.draft_s == 0.007 and near.plain_s == near.verify_s[0] and not near.aux_s.any()
    assert (np.diff(near.verify_s, n=2) >= -1e-12).all()


def test_a_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    assert Profile.load(tmp_path / "none.json") is None
    profile().save(tmp_path / "new folder" / "p.json")
    assert Profile.load(tmp_path / "new folder" / "p.json") == profile()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [[1.0]]},
        {"widths": "x"},
        {"contexts": [1000, 0]},
        {"draft_s": None},
        {"versions": 3},
        {"seconds": None},
    ],
)
def test_a_damaged_offline_profile_is_one_sentence(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    profile().save(path)
    write_json(path, read_json(path) | change)
    with pytest.raises(BadInput, match=r"p\.json is not a profile.*calibrate"):
        Profile.load(path)
    path.write_text("{")
    with pytest.raises(BadInput):
        Profile.load(path)


# --- the probe and its cache ----------------------------------------------------------------------


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    file = cached_file(tmp_path / "deep", "machine", "A/B: c")
    assert read_json(file) is None and "/" not in file.name
    assert file != cached_file(tmp_path / "deep", "machine", "A/B: d")
    write_json(file, {"x": 1})
    assert read_json(file) == {"x": 1} and [f.name for f in file.parent.iterdir()] == [file.name]
    with pytest.raises(TypeError):
        write_json(file, {"x": object()})
    assert read_json(file) == {"x": 1} and [f.name for f in file.parent.iterdir()] == [file.name]


@pytest.fixture
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of milliseconds: the same code on small matrices."""
    from draftwood import probe as module

    monkeypatch.setattr(module, "ON_CPU", module.Sizes(side=64, rows=8))
    monkeypatch.setattr(module, "STREAM_BYTES", 1 << 16)
    monkeypatch.setattr(module, "BUDGET_S", 0.002)


@pytest.mark.usefixtures("small_probe")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_probe_measures_something_for_every_figure(dtype: torch.dtype) -> None:
    machine = probe(torch.device("cpu"), dtype)
    assert min(machine.peak, machine.bandwidth, machine.launch_s) > 0
    assert str(dtype) in machine.name and torch.__version__ in machine.name


@pytest.mark.usefixtures("small_probe")
def test_a_machine_is_measured_once_and_again_when_its_file_is_damaged(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    first = probe(cpu, torch.float32, tmp_path)
    assert probe(cpu, torch.float32, tmp_path) == first
    (file,) = tmp_path.iterdir()
    for damage in (
        "{",
        "[]",
        json.dumps({"name": first.name, "peak": -1.0, "bandwidth": 1.0, "launch_s": 1.0}),
    ):
        file.write_text(damage)
        assert probe(cpu, torch.float32, tmp_path).peak > 0
    probe(cpu, torch.float64, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("small_probe")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert probe(torch.device("cpu"), torch.float32, tmp_path / "file" / "below").peak > 0
