"""Cascade attention: context and tree apart, merged to what attention over both gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.attention import cascade, dispatch
from draftwood.attention.args import AttentionArgs
from draftwood.attention.cascade import CASCADE, LEAST_CONTEXT, LEAST_NODES
from draftwood.attention.sdpa import SDPA
from draftwood.sampling import Sampling
from tests.attention_cases import a_tree, make_case, random_tree
from tests.cpu.test_conformance import PROMPT, plain, run
from tests.reference import Branching, tiny_target

CLOSE = {
    torch.float64: dict(rtol=1e-12, atol=1e-12),
    torch.float32: dict(rtol=1e-5, atol=2e-6),
    torch.bfloat16: dict(rtol=3e-2, atol=3e-2),
}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("context", [1, 63, 300])
@pytest.mark.parametrize("kind", ["tree", "chain", "one"])
def test_equal_to_sdpa_and_to_the_formula(kind: str, context: int, dtype: torch.dtype) -> None:
    case = make_case(a_tree(kind, 19), context, kv_heads=2, groups=3, dtype=dtype, seed=context)
    found = case.truth(CASCADE)
    torch.testing.assert_close(found, case.truth(SDPA), **CLOSE[dtype])
    torch.testing.assert_close(found, case.truth(), **CLOSE[dtype])


def test_parts_that_are_much_heavier_than_the_other_stay_finite() -> None:
    case = make_case(random_tree(9), 40)
    for slots in (slice(0, 40), slice(40, None)):
        keys = case.keys.clone()
        keys[:, slots] *= 60
        heavy = replace(case, keys=keys)
        torch.testing.assert_close(heavy.truth(CASCADE), heavy.truth(), rtol=1e-4, atol=1e-5)


def args_of(nodes: int, context: int, **changes) -> AttentionArgs:
    query, states = torch.zeros(1, 1, nodes, 8), torch.zeros(1, context + nodes, 8)
    plan = make_case(random_tree(nodes), context).plan
    return replace(AttentionArgs(query, states, states, 1.0, None, None, None, plan, 0), **changes)


def test_it_takes_wide_trees_behind_long_contexts_and_leaves_the_rest_to_sdpa() -> None:
    assert dispatch.choose(args_of(LEAST_NODES, LEAST_CONTEXT)) is CASCADE
    assert dispatch.choose(args_of(LEAST_NODES, LEAST_CONTEXT, window=10**6)) is CASCADE
    for other in (
        args_of(LEAST_NODES - 1, LEAST_CONTEXT),
        args_of(LEAST_NODES, LEAST_CONTEXT - 1),
        args_of(LEAST_NODES, LEAST_CONTEXT, window=100),
        args_of(LEAST_NODES, LEAST_CONTEXT, value=torch.zeros(1, LEAST_CONTEXT + LEAST_NODES, 4)),
    ):
        assert dispatch.choose(other) is SDPA
    assert dispatch.choose(args_of(LEAST_NODES, LEAST_CONTEXT, softcap=5.0)).name == "reference"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "T = 1"])
def test_texts_are_plain_decodings(monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    """The whole round, with every tree of two nodes or more handed to it."""
    monkeypatch.setattr(cascade, "LEAST_CONTEXT", len(PROMPT))
    monkeypatch.setattr(cascade, "LEAST_NODES", 2)
    taken: list[int] = []
    spied = replace(CASCADE, run=lambda args: taken.append(args.query.shape[2]) or CASCADE.run(args))
    backends = [spied if b is CASCADE else b for b in dispatch.BACKENDS]
    monkeypatch.setattr(dispatch, "BACKENDS", tuple(backends))
    target = tiny_target("llama", path="universal")
    assert run(target, Branching("branching"), "ddtree:7", sampling) == plain(target, sampling)
    assert max(taken) > 2
