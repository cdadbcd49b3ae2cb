"""Growth, ancestors, walk and compaction with static shapes equal their plain forms."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import registry
from draftwood.accept import accept
from draftwood.device.ancestors import lineage
from draftwood.device.growth import DeviceTree, Grower
from draftwood.device.walk import compact, compaction, walk
from draftwood.drafters.base import Candidates
from draftwood.grow import Growth, beam, grow
from draftwood.tree import Lattice, Tree

ROOT = 7
CPU = torch.device("cpu")
# Few distinct values, so that masses tie often; -800 underflows, -inf and NaN are dead, 1e-7 is a rounding accident.
LOGP = st.sampled_from([1e-7, 0.0, -0.25, -0.5, -1.0, -2.0, -40.0, -800.0, -np.inf, np.nan])


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    depth, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rows = [draw(st.lists(LOGP, min_size=width, max_size=width)) for _ in range(depth)]
    logp = -np.sort(-np.array(rows, np.float32), axis=1)  # NaN last
    return Lattice(np.arange(10, 10 + depth * width).reshape(depth, width), logp)


def growers() -> list[type[Grower]]:
    """torch's, and the kernel's where Triton has its interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"):
        return [Grower]
    from draftwood.device.triton_growth import TritonGrower

    return [Grower, TritonGrower]


every_grower = pytest.mark.parametrize("grower", growers())


def grown(grower: type[Grower], draft: Lattice, growth: Growth, limit: int = 99, most: int = 9999) -> DeviceTree:
    given = Candidates(torch.from_numpy(draft.tokens), torch.from_numpy(draft.logp))
    numbers = torch.tensor([ROOT]), torch.tensor(limit), torch.tensor(most)
    return grower(growth, *draft.tokens.shape, CPU)(given, *numbers)


def check_same(found: DeviceTree, expected: Tree) -> None:
    count, size = int(found.count), len(found.tokens)
    assert count == len(expected)
    assert found.tokens[: 1 + count].tolist() == expected.tokens.tolist()
    assert found.parents[1 : 1 + count].tolist() == expected.parents[1:].tolist()
    assert found.depths[: 1 + count].tolist() == expected.depths.tolist()
    np.testing.assert_allclose(found.mass[: 1 + count].numpy(), expected.mass, rtol=2**-22)
    absent = size - 1 - count
    assert found.tokens[1 + count :].tolist() == [ROOT] * absent and not found.mass[1 + count :].any()
    assert found.parents[1 + count :].tolist() == [0] * absent and found.depths[1 + count :].tolist() == [1] * absent
    assert (found.parents[0], found.depths[0], found.mass[0]) == (0, 0, 1)


@every_grower
@given(lattices(), st.integers(0, 60))
@settings(max_examples=80)
def test_it_grows_the_same_tree(grower: type[Grower], draft: Lattice, n_max: int) -> None:
    check_same(grown(grower, draft, Growth(n_max)), grow(draft, ROOT, n_max))


@every_grower
@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
@settings(max_examples=8)
def test_it_grows_the_same_tree_from_untied_lattices(grower: type[Grower], seed: int, n_max: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(15, 64)) * 2
    logp = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True))), axis=1).astype(np.float32)
    draft = Lattice(np.arange(15 * 64).reshape(15, 64), logp)
    check_same(grown(grower, draft, Growth(n_max)), grow(draft, ROOT, n_max))


@every_grower
@given(lattices(), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=40)
def test_it_grows_the_same_beam(grower: type[Grower], draft: Lattice, width: int, depth: int) -> None:
    growth = Growth(width * depth, width, depth)
    check_same(grown(grower, draft.narrow(width), growth), beam(draft, ROOT, width, depth))


@every_grower
@pytest.mark.parametrize("spec", ["dflash", "dflash:3", "ddtree:9", "beam:3x4", "caddtree", "bastion", "bastion:paper"])
@given(draft=lattices())
@settings(max_examples=8)
def test_every_policy_grows_the_same_tree(grower: type[Grower], spec: str, draft: Lattice) -> None:
    policy = registry.policy(spec)
    assert isinstance(policy.grow, Growth)
    draft = draft.narrow(policy.width)
    check_same(grown(grower, draft, policy.grow), policy.grow(draft, ROOT))


@every_grower
@given(lattices(), st.integers(0, 60), st.integers(-1, 6))
@settings(max_examples=40)
def test_nodes_that_are_too_deep_leave_their_place_to_others(
    grower: type[Grower], draft: Lattice, n_max: int, limit: int
) -> None:
    shallow = Lattice(draft.tokens[: max(limit, 0)], draft.logp[: max(limit, 0)])
    found, expected = grown(grower, draft, Growth(n_max), limit), grow(shallow, ROOT, n_max)
    assert found.tokens[: 1 + int(found.count)].tolist() == expected.tokens.tolist()


@every_grower
@given(lattices(), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=50)
def test_no_more_nodes_are_grown_than_asked_for(grower: type[Grower], draft: Lattice, n_max: int, most: int) -> None:
    check_same(grown(grower, draft, Growth(n_max), most=most), grow(draft, ROOT, min(n_max, most)))


# --- ancestors ------------------------------------------------------------------------------------------------


def random_tree(seed: int, size: int) -> Tree:
    """A tree whose siblings have different tokens."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, size))])
    depths = np.zeros(size, int)
    for i in range(1, size):
        depths[i] = depths[parents[i]] + 1
    rank = [int((parents[:i] == p).sum()) for i, p in enumerate(parents)]
    return Tree(np.array(rank), parents, depths, np.ones(size, np.float32))


def on_device(tree: Tree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parents, depths and lineage."""
    parents = torch.from_numpy(np.maximum(tree.parents, 0))
    line = lineage(parents, int(tree.depths.max()))
    return torch.from_numpy(tree.tokens), parents, torch.from_numpy(tree.depths), line


@every_grower
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 97])
def test_ancestors_as_lineage_mask_and_bits(size: int, grower: type[Grower]) -> None:
    tree = random_tree(size, size)
    _, parents, _, known = on_device(tree)
    line, seen = torch.full_like(known, -1), torch.ones(size, size, dtype=torch.bool)
    bits = torch.full((size, -(-size // 32)), -1, dtype=torch.int32)
    grower(Growth(size - 1), 1, 1, CPU).relate(parents, line, seen, bits)
    assert torch.equal(line, known)
    for node in range(size):
        assert set(line[node].tolist()) == {0, node, *tree.path(node)}
    assert np.array_equal(seen.numpy(), tree.ancestors())
    back = (bits[:, :, None] >> torch.arange(32)) & 1
    assert np.array_equal(back.flatten(1)[:, :size].bool().numpy(), tree.ancestors())


# --- walk and compaction --------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_the_walk_is_that_of_accept(seed: int, size: int) -> None:
    tree, rng = random_tree(seed, size), np.random.default_rng(seed)
    n = int(rng.integers(0, size))
    drawn = rng.integers(0, 2, size)  # mostly a child's token
    expected = accept(tree[:n], lambda node, _: int(drawn[node]))
    most = int(tree.depths.max()) + 1
    found = walk(*on_device(tree), torch.from_numpy(drawn), torch.tensor(n), most)
    length = int(found.length)
    assert found.path[:length].tolist() == expected.path and found.bonus.tolist() == [expected.bonus]
    assert found.tokens.tolist() == expected.accepted + [expected.bonus] * (most - length)

    context = 5
    kv = torch.arange(3.0 * (context + size + most))[:, None].view(3, -1, 1).repeat(1, 1, 2)
    before = kv.clone()
    compact(kv, *compaction(found, torch.tensor(context)))
    assert torch.equal(kv[:, : context + 1], before[:, : context + 1])
    moved = before[:, [context + node for node in expected.path]]
    assert torch.equal(kv[:, context + 1 : context + 1 + length], moved)
