"""Sampling: the processed distribution of transformers, drawn by position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood.errors import BadInput
from draftwood.noise import keys
from draftwood.sampling import HARSH, LENIENT, Sampler, Sampling


def theirs(s: Sampling) -> LogitsProcessorList:
    """transformers' processors in the order of its own `generate`."""
    rules = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(s.repetition_penalty)])
    if not s.greedy:
        rules.append(TemperatureLogitsWarper(s.temperature))
        rules.extend([TopKLogitsWarper(s.top_k)] if s.top_k else [])
        rules.extend([TopPLogitsWarper(s.top_p)] if s.top_p < 1 else [])
        rules.extend([MinPLogitsWarper(s.min_p)] if s.min_p else [])
    return rules


@given(
    st.integers(0, 2**31),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 3, 50]),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 0.5]),
        repetition_penalty=st.sampled_from([0.8, 1.0, 1.5]),
    ),
)
def test_scores_are_those_of_transformers_up_to_a_constant(seed: int, sampling: Sampling) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(scale=3, size=31))
    committed, path = rng.integers(0, 31, 5).tolist(), rng.integers(0, 31, 3).tolist()
    ours = Sampler(sampling, committed).process(logits, path)
    expected = theirs(sampling)(torch.tensor([committed + path]), logits[None].clone())[0]
    torch.testing.assert_close(ours.log_softmax(-1), expected.log_softmax(-1))


def test_greedy_is_the_first_of_the_largest() -> None:
    assert Sampler(Sampling(), [1]).draw(torch.tensor([0.0, 2.0, 2.0, 1.0])) == 1


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_impossible_tokens_are_never_drawn(seed: int, case: int) -> None:
    rng = np.random.default_rng(case)
    dead = torch.tensor(rng.random(9) < 0.6)
    dead[int(rng.integers(9))] = False
    logits = torch.tensor(rng.normal(size=9)).masked_fill(dead, -math.inf)
    assert not dead[Sampler(Sampling(1.0, seed=seed), [0]).draw(logits)]


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits, draws = torch.tensor([0.0, -1.0, 1.5, -3.0, 0.5]), 4000
    sampler, counts = Sampler(Sampling(0.8, seed=3), []), np.zeros(5)
    for _ in range(draws):
        token = sampler.draw(logits)
        counts[token] += 1
        sampler.commit([token])
    expected = draws * (logits.double() / 0.8).softmax(-1).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees: false alarm 1 in 1000


def test_a_position_is_drawn_alike_however_it_is_reached() -> None:
    """Behind committed tokens, along a path, and again."""
    sampler = Sampler(Sampling(1.0, seed=9), [1] * 7)
    expected = keys(9, 7, 90).tolist()
    for _ in range(20):
        found = [sampler.keys(ahead, count).tolist() for ahead, count in ((30, 1), (0, 4), (5, 60), (1, 2), (31, 3))]
        assert found == [expected[a : a + n] for a, n in ((30, 1), (0, 4), (5, 60), (1, 2), (31, 3))]
        sampler.commit([4])
        expected.pop(0)


@pytest.mark.parametrize("penalty", [LENIENT, HARSH])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_penalty_undoes_what_a_rule_forbids(penalty: float, temperature: float) -> None:
    """Scores as large as float32 has them in a model, and zero, stay scores; what is cut stays cut."""
    scores = torch.tensor([1e4, -1e4, 0.0, -math.inf])
    sampler = Sampler(Sampling(temperature, repetition_penalty=penalty), range(4), lambda _, scores: scores)
    found = sampler.process(scores)
    assert found.isfinite().tolist() == [True, True, True, False] and found[3] == -math.inf
    assert sampler.draw(scores) == 0


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-0.1), dict(temperature=math.nan), dict(temperature=math.inf), dict(top_k=-1),
        dict(top_p=0.0), dict(top_p=1.5), dict(top_p=math.nan), dict(min_p=-0.1), dict(min_p=2),
        dict(repetition_penalty=0), dict(repetition_penalty=-1), dict(repetition_penalty=1e-300),
        dict(repetition_penalty=1e39), dict(seed=-1), dict(top_k=1.5), dict(temperature="x"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(bad: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=next(iter(bad))):
        Sampling(**bad)


def test_numbers_of_other_kinds_are_what_they_say() -> None:
    found = Sampling(np.float32(0.5), top_k=50.0, top_p=1, seed=np.int64(3))
    assert found == Sampling(0.5, top_k=50, top_p=1.0, seed=3)
    assert [type(value) for value in (found.temperature, found.top_k, found.top_p, found.seed)] == [
        float,
        int,
        float,
        int,
    ]


@pytest.mark.parametrize("temperature", [5e-324, 1e-185, 1e-45, 1e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([-3.0, 17.0, 16.5, -40.0], dtype=dtype)
    assert Sampler(Sampling(temperature, top_p=0.9), [0]).draw(logits) == 1
