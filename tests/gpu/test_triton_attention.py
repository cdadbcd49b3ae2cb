"""The Triton kernel on a CUDA device, against PyTorch's fused attention in float32. Skipped without one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood.attention import explain
from draftwood.attention.sdpa import SDPA
from draftwood.tree import chain_tree
from tests.attention_cases import Case, a_tree, make_case, random_tree, texts_of_one_token

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]


def assert_right(case: Case, found: torch.Tensor) -> None:
    wide = replace(case, query=case.query.float(), keys=case.keys.float(), values=case.values.float())
    near = 3e-2 if case.query.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(found.float(), wide.truth(SDPA), rtol=near, atol=near)


@pytest.mark.parametrize("window", [None, 5, 700])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 128, 1000, 5000])
@pytest.mark.parametrize(("kind", "nodes"), [("one", 1), ("chain", 17), ("tree", 17), ("tree", 64), ("tree", 256)])
@pytest.mark.parametrize("dtype", HALVES)
def test_equal_to_sdpa(kind: str, nodes: int, context: int, window: int | None, dtype: torch.dtype) -> None:
    case = make_case(
        a_tree(kind, nodes), context, kv_heads=2, groups=4, size=128, dtype=dtype, window=window, device="cuda"
    )
    assert_right(case, case.attend())


@pytest.mark.parametrize("groups", [1, 3, 4, 8])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_head_sizes_and_groups(size: int, groups: int, dtype: torch.dtype) -> None:
    for window in (None, 100):
        tree = random_tree(33)
        case = make_case(tree, 300, kv_heads=2, groups=groups, size=size, dtype=dtype, window=window, device="cuda")
        assert_right(case, case.attend())


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("groups", "size"), [(3, 64), (1, 80), (4, 128), (20, 16)])
@pytest.mark.parametrize("dtype", HALVES)
def test_texts_of_one_token_each_see_their_own(dtype: torch.dtype, groups: int, size: int, window: int | None) -> None:
    lengths = [1, 64, 65, 7, 500, *range(1, 300, 7)]
    found, truth = texts_of_one_token(lengths, groups, size, dtype, window, "cuda")
    near = 3e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(found.float(), truth, rtol=near, atol=near)


@pytest.mark.parametrize("splits", [1, 3, 64])
def test_any_number_of_splits(splits: int) -> None:
    case = make_case(random_tree(64), 9000, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda")
    assert_right(case, case.attend(splits=splits))


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_node_has_the_same_bits_at_every_width(size: int, window: int | None) -> None:
    wide = make_case(
        random_tree(256), 3000, kv_heads=2, groups=4, size=size, dtype=torch.bfloat16, window=window, device="cuda"
    )
    found = wide.attend(splits=8)
    for n in (0, 1, 15, 16, 63, 64, 200):
        narrow = replace(wide, tree=wide.tree[:n], query=wide.query[: 1 + n])
        assert torch.equal(narrow.attend(splits=8), found[: 1 + n])


def test_a_node_of_a_chain_has_the_bits_of_plain_decoding() -> None:
    chain = make_case(chain_tree(range(16)), 1000, groups=4, size=128, dtype=torch.bfloat16, device="cuda")
    found = chain.attend(splits=4)
    for i in range(16):
        plain = replace(chain, tree=chain_tree([0]), context=1000 + i, query=chain.query[i : i + 1])
        assert torch.equal(plain.attend(splits=4), found[i : i + 1])


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("context", [60, 250, 1000, 5000])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_nodes_alone_are_plain_decoding_to_the_bit(
    dtype: torch.dtype, size: int, context: int, window: int | None
) -> None:
    wide = make_case(
        random_tree(64), context, kv_heads=2, groups=4, size=size, dtype=dtype, window=window, device="cuda"
    )
    found = wide.alone()
    assert_right(wide, found)
    for node in range(0, 64, 7):
        assert torch.equal(wide.plain(node).alone(), found[node : node + 1])
    narrow = replace(wide, tree=wide.tree[:20], query=wide.query[:21])
    assert torch.equal(narrow.alone(), found[:21])


@pytest.mark.parametrize("context", [0, 100, 3000])
@pytest.mark.parametrize("block", [10, 16])
def test_tokens_of_a_block_see_each_other(block: int, context: int) -> None:
    """DFlash's own attention: every query sees the context and the whole block, so SDPA needs no mask."""
    from draftwood.attention.triton_tree import tree_attention
    from draftwood.device.ancestors import bitmask

    case = make_case(chain_tree(range(block)), context, 8, 4, 128, torch.bfloat16, device="cuda")
    bits = bitmask(torch.ones(block, block, dtype=torch.bool, device="cuda"))
    at, depths = torch.tensor(context, device="cuda"), torch.arange(block, device="cuda")
    found = tree_attention(case.query, case.keys, case.values, at, bits, depths, case.scale, ahead=True)
    keys, values = (part[:, : context + block].float() for part in (case.keys, case.values))
    query = case.query.float().transpose(0, 1).unflatten(0, (8, 4)).flatten(1, 2)
    seen = torch.nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], scale=case.scale)
    expected = seen[0].unflatten(1, (4, block)).flatten(0, 1).transpose(0, 1)
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)


def test_one_graph_serves_every_context() -> None:
    """Captured once, replayed after context, keys and queries changed in place; nothing waits for the device."""
    from draftwood.attention.triton_tree import default_splits, tree_attention, workspace_size

    nodes, heads, kv_heads, size = 33, 8, 2, 128
    splits = default_splits(nodes, heads, kv_heads, torch.device("cuda"))
    query = torch.zeros(nodes, heads, size, dtype=torch.bfloat16, device="cuda")
    keys, values = torch.zeros(2, kv_heads, 4096, size, dtype=torch.bfloat16, device="cuda")
    context = torch.zeros((), dtype=torch.int32, device="cuda")
    bits = torch.zeros(nodes, 2, dtype=torch.int32, device="cuda")
    depths = torch.zeros(nodes, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)
    workspace = torch.empty(workspace_size(nodes, heads, size, splits), device="cuda")

    def step() -> None:
        tree_attention(query, keys, values, context, bits, depths, size**-0.5, 900, out, workspace, splits)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, at in enumerate((0, 7, 1000, 4000)):
        case = make_case(
            random_tree(nodes, seed), at, kv_heads, heads // kv_heads, size, torch.bfloat16, 900, "cuda", seed
        )
        sight = case.plan.sight(0)
        extent = at + nodes
        query.copy_(case.query)
        keys[:, :extent], values[:, :extent] = case.keys[:, :extent], case.values[:, :extent]
        context.copy_(sight.context), depths.copy_(sight.depths)
        bits.copy_(sight.ancestors)
        graph.replay()
        assert_right(case, out)


def test_it_is_chosen() -> None:
    assert list(explain(torch.device("cuda"), torch.bfloat16, 128)) == ["triton"]
