"""What the latency model learns of one width from others, and that wider trees are tried where they may be cheap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from draftwood.latency import LatencyModel
from draftwood.learned import reach
from draftwood.policies.base import Costs, expected
from draftwood.policies.bastion import Bastion
from tests.latency_cases import MACHINE, TRUE_S, a_round, draft_work, model, trained, verify_work

# --- widths and their neighbours -----------------------------------------------------------------------------


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


def test_a_width_never_run_is_not_believed_cheaper_than_a_narrower_one_that_was() -> None:
    latency = model()
    for _ in range(20):
        latency.observe(a_round(15, 0.5))
    verify = latency.costs(511, 100).verify_s
    assert (verify[15:] >= 0.99 * verify[15]).all()


def test_a_widths_first_forward_is_no_word_on_those_beside_it() -> None:
    latency = model()
    latency.observe(a_round(7, 0.5), *(a_round(7, 0.041) for _ in range(3)))
    assert latency.costs(8, 100).verify_s[7] == pytest.approx(0.041, rel=0.05)


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


# --- the next width is tried ---------------------------------------------------------------------------------


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


def test_wide_forwards_are_not_tried_for_their_price() -> None:
    verify = rounds_of({8: 0.020, 16: 0.036}).costs(63, 100).verify_s
    assert verify[23] >= 0.050


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
