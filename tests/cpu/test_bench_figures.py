"""The bench's figures by definition: rates, ratios and their intervals, and what rounds were made of."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import norm, t

from draftwood.bench.stats import PLAIN, TRANSFORMERS, bootstrap, compare, jsonable, summarize, tail_of, what_if
from tests.bench_cases import METHODS, TREE, a_round, a_run


def test_speed_counts_tokens_after_the_first_and_leaves_the_prefill_out() -> None:
    runs = [a_run(p, m, 11, s) for p, s in (("a", 1.0), ("b", 3.0)) for m in METHODS]
    stats = summarize(runs, METHODS)[TREE]
    assert stats.tokens_per_s == pytest.approx(20 / 4)
    assert stats.end_to_end_tokens_per_s == pytest.approx(22 / (4 + 2 * 0.5))


def test_speedups_are_ratios_of_total_rates_not_means_of_ratios() -> None:
    seconds = {TRANSFORMERS: (2.0, 6.0), PLAIN: (1.0, 5.0), TREE: (1.0, 1.0)}
    runs = [a_run(p, m, 11, seconds[m][i]) for i, p in enumerate("ab") for m in METHODS]
    stats = summarize(runs, METHODS)
    assert stats[TREE].speedup_vs_transformers == pytest.approx(8 / 2)
    assert stats[TREE].speedup_vs_plain == pytest.approx(6 / 2)
    assert stats[PLAIN].speedup_vs_plain == 1
    assert stats[TRANSFORMERS].speedup_vs_plain == pytest.approx(6 / 8)


def test_the_interval_of_a_method_against_itself_has_no_width() -> None:
    runs = [a_run(str(i), m, 11, 1.0 + i) for i in range(5) for m in METHODS]
    low, high = summarize(runs, METHODS)[PLAIN].speedup_vs_plain_interval or (0, 0)
    assert low == pytest.approx(1) and high == pytest.approx(1)


@pytest.mark.parametrize("prompts", [8, 40])
def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says(prompts: int) -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(500):
        tokens = rng.integers(50, 150, prompts).astype(float)
        slow = tokens * 0.02 * rng.lognormal(0, 0.2, prompts)
        fast = tokens * 0.01 * rng.lognormal(0, 0.2, prompts)
        low, high = bootstrap(np.stack([tokens, fast], 1), np.stack([tokens, slow], 1), trial) or (0, 0)
        hits += low <= 2.0 <= high
    assert 460 <= hits <= 490  # 475 are to be expected; plain percentiles of 8 prompts cover 440


@pytest.mark.parametrize("count", [4, 8, 16, 400])
def test_an_interval_of_few_prompts_is_as_wide_as_students(count: int) -> None:
    reach = -norm.ppf(tail_of(count)) / np.sqrt(count / (count - 1))
    assert reach == pytest.approx(t.ppf(0.975, count - 1), rel=0.01)


def test_one_prompt_has_no_interval_and_the_same_seed_gives_the_same_one() -> None:
    many = np.random.default_rng(0).random((9, 2)) + 1
    assert bootstrap(many[:1], many[:1], 0) is None
    assert bootstrap(many, many[::-1], 3) == bootstrap(many, many[::-1], 3)


def test_a_prompt_is_identical_only_if_all_its_turns_are() -> None:
    runs = [
        a_run("a", TREE, 5, 1.0, identical=True),
        a_run("a", TREE, 5, 1.0, identical=False),
        a_run("b", TREE, 5, 1.0, identical=True),
    ]
    runs += [a_run(p, m, 5, 1.0, identical=None) for p in "ab" for m in (TRANSFORMERS, PLAIN)]
    stats = summarize(runs, METHODS)
    assert (stats[TREE].identical, stats[TREE].prompts) == (1, 2)
    assert stats[TRANSFORMERS].identical is None


def test_rounds_give_tau_width_verbs_host_share_and_latency_error() -> None:
    wide, silent = a_round(accepted=3, n=6, predicted=0.02), a_round(accepted=1, n=0, predicted=0)
    rounds = [a_round(accepted=0, n=2), wide, silent]
    runs = [a_run("a", m, 5, 1.0, rounds=rounds if m == TREE else ()) for m in METHODS]
    stats = summarize(runs, METHODS)[TREE]
    assert stats.tau == pytest.approx((1 + 4 + 2) / 3)
    assert stats.mean_width == pytest.approx((3 + 7 + 1) / 3)
    assert stats.widths == {1: 1, 3: 1, 7: 1} and stats.accepted == {0: 1, 1: 1, 3: 1}
    assert stats.verb_ms["verify"] == pytest.approx(30) and stats.round_ms == pytest.approx(40)
    assert stats.host_share == pytest.approx(0.25)
    assert stats.draftless_rounds == 1
    errors = stats.latency_errors
    assert errors["round"].median == pytest.approx((0.25 + 0.5) / 2)  # 50 and 20 ms expected of 40
    assert errors["verify"].median == pytest.approx((10 / 30 + 14 / 30) / 2)  # 40 and 16 of 30
    assert math.isnan(errors["draft"].median)


def test_without_rounds_every_forward_emits_one_token() -> None:
    stats = summarize([a_run("a", m, 5, 1.0) for m in METHODS], METHODS)[TRANSFORMERS]
    assert stats.tau == 1 and stats.mean_width == 1
    assert stats.to_json()["round_ms"] is None


def test_answers_of_one_token_have_no_speed_rather_than_a_wrong_one() -> None:
    stats = summarize([a_run("a", m, 1, 0.0) for m in METHODS], METHODS)[TREE]
    assert math.isnan(stats.tokens_per_s) and math.isnan(stats.speedup_vs_plain)
    json.dumps(stats.to_json(), allow_nan=False)


def test_drafters_are_compared_by_totals() -> None:
    ours = [a_run(p, "a", 11, s, rounds=[a_round(accepted=4)] * 2) for p, s in (("x", 1.0), ("y", 3.0))]
    theirs = [a_run(p, "b", 11, 4.0, rounds=[a_round(accepted=1)] * 5) for p in ("x", "y")]
    found = compare(ours, theirs)
    assert found["speed"] == pytest.approx(8 / 4) and found["tau"] == pytest.approx(5 / 2)
    assert found["end_to_end"] == pytest.approx((22 / 5) / (22 / 9))


def test_what_if_divides_tau_by_the_measured_round_and_leaves_out_the_impossible() -> None:
    rounds = [a_round(n=4, seconds=0.1)] * 5 + [a_round(n=15, seconds=0.2)] * 5 + [a_round(n=7)] * 4
    table = what_if([*rounds, *[a_round(n=0)] * 9], plain_tokens_per_s=10)
    assert set(table) == {5, 16}  # width 8 was seen too rarely, width 1 drafted nothing
    assert table[5]["tokens_per_s"] == {3: pytest.approx(30), 5: pytest.approx(50)}
    assert table[16]["speedup_vs_plain"][7] == pytest.approx(3.5)


def test_json_has_text_keys_and_no_nan() -> None:
    found = jsonable({1: float("nan"), "a": (float("inf"), 2.5, {3: None})})
    assert found == {"1": None, "a": [None, 2.5, {"3": None}]}
