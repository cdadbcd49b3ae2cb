"""Draws on the device are those of `sampling.py`, token for token."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.device.ancestors import lineage
from draftwood.device.draw import FEW, Dice, Kind
from draftwood.noise import keys, noisiest
from draftwood.sampling import Sampler, Sampling

VOCAB = 31
# (parent, token) of a small tree; the root is its own parent
PARENTS, TOKENS = [0, 0, 0, 1, 3, 2], [4, 5, 6, 5, 9, 4]
PATHS: list[list[int]] = [[], [5], [6], [5, 5], [5, 5, 9], [6, 4]]


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 30, 31, 50]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 0.8, 1.0, 1.5, 100.0]),
    seed=st.integers(0, 2**63 - 1),
)


def drawn_on_device(logits: torch.Tensor, sampling: Sampling, committed: list[int]) -> list[int]:
    dice = Dice(64, VOCAB, logits.device)
    dice.reset(sampling, committed)
    tokens, parents = torch.tensor(TOKENS), torch.tensor(PARENTS)
    positions = torch.tensor([len(committed) + len(path) for path in PATHS])
    return dice.draw(logits, positions, tokens, lineage(parents, 3)).tolist()


@given(st.integers(0, 2**32 - 1), SAMPLINGS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=300)
def test_the_same_token_at_every_node(seed: int, sampling: Sampling, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(scale=3, size=(6, VOCAB)).round(1)).to(dtype)  # rounded: ties happen
    committed = [*rng.integers(0, VOCAB, 5).tolist(), TOKENS[0]]
    sampler = Sampler(sampling, committed)
    expected = [sampler.draw(row, path) for row, path in zip(logits, PATHS, strict=True)]
    assert drawn_on_device(logits, sampling, committed) == expected


@pytest.mark.parametrize("top_k", [1, 50, FEW, FEW + 1])
def test_a_small_top_k_needs_no_sort(top_k: int) -> None:
    rng, size, committed = np.random.default_rng(top_k), 20_000, [1, 2, 3]
    logits = torch.tensor(rng.normal(scale=3, size=(12, size)).round(1)).bfloat16()  # many equal ones
    sampling, dice = Sampling(0.7, top_k=top_k, seed=2), Dice(64, size, logits.device)
    dice.reset(sampling, committed)
    assert (dice.kind.few, dice.kind.cut) == (top_k <= FEW, top_k > FEW)
    positions, roots = torch.full((12,), len(committed)), torch.zeros(12, dtype=torch.int64)
    expected = [Sampler(sampling, committed).draw(row) for row in logits]
    assert dice.draw(logits, positions, roots, roots[:, None]).tolist() == expected


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel needs its interpreter here")
@pytest.mark.parametrize("size", [1, 31, 2048, 5000])
def test_a_kernel_draws_the_same(size: int) -> None:
    from draftwood.device.triton_draw import noisiest as by_kernel

    rng = np.random.default_rng(size)
    scores = torch.tensor(rng.normal(scale=3, size=(9, size)))
    scores[2, 1:] = scores[3, : size // 2] = -torch.inf
    under = torch.from_numpy(keys(4, 0, 9))
    assert by_kernel(scores, under).tolist() == noisiest(scores, under).tolist()
    assert by_kernel(scores.float(), under).tolist() == noisiest(scores.float(), under).tolist()
    scores[0] = torch.nan
    scores[1, size // 2] = torch.nan
    assert by_kernel(scores, under).tolist() == noisiest(scores, under).tolist()


def test_rows_in_several_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampling = Sampling(1.0, top_p=0.9, repetition_penalty=1.3, seed=5)
    whole = drawn_on_device(logits, sampling, [1, 2, 4])
    monkeypatch.setattr("draftwood.device.draw.ROWS", 4)
    assert drawn_on_device(logits, sampling, [1, 2, 4]) == whole


def test_a_reset_forgets_the_answer_before() -> None:
    dice = Dice(64, VOCAB, torch.device("cpu"))
    dice.reset(Sampling(1.0, top_k=3, seed=1), [1, 2])
    dice.observe(torch.tensor([7, 7, 9]))
    assert dice.seen.nonzero().flatten().tolist() == [1, 2, 7, 9]
    dice.reset(Sampling(repetition_penalty=2.0), [3])
    assert dice.seen.nonzero().flatten().tolist() == [3]
    assert dice.kind == Kind(greedy=True, penalty=True, cut=False)
