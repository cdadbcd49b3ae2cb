"""The Triton kernel in Triton's interpreter, against attention by its formula; and compiled, where nothing can run it.

Every case has NaN in the slots behind its tree, so a kernel that reads one of them fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwood.attention import dispatch, explain, triton_backend
from draftwood.attention.args import AttentionArgs, Backend
from draftwood.attention.reference import REFERENCE
from draftwood.lean import Lean
from draftwood.plan import lineage_of, make_plan, pack_bits
from draftwood.tree import chain_tree
from tests.attention_cases import a_tree, make_case, random_tree, texts_of_one_token
from tests.reference import tiny_target

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs the kernel where there is a device"
)
pytest.importorskip("triton", reason="Triton exists for Linux only")

EXACT = dict(rtol=1e-5, atol=2e-6)
LOOSE = {torch.float32: EXACT, torch.float16: dict(rtol=4e-3, atol=4e-3), torch.bfloat16: dict(rtol=3e-2, atol=3e-2)}


# --- against the formula ---------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("kind", ["tree", "chain", "one"])
def test_equal_to_the_reference(kind: str, context: int, window: int | None) -> None:
    case = make_case(a_tree(kind, 9), context, window=window, seed=context)
    torch.testing.assert_close(case.attend(), case.truth(), **EXACT)


@interpreted
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize(("groups", "size"), [(3, 64), (1, 80), (20, 16)])
@pytest.mark.parametrize("dtype", LOOSE)
def test_texts_of_one_token_each_see_their_own(dtype: torch.dtype, groups: int, size: int, window: int | None) -> None:
    found, truth = texts_of_one_token([1, 64, 65, 7, 200], groups, size, dtype, window)
    torch.testing.assert_close(found.float(), truth, **LOOSE[dtype])


@interpreted
@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_any_number_of_query_heads_shares_a_key_head(groups: int) -> None:
    case = make_case(random_tree(19), 70, kv_heads=2, groups=groups)  # 8 · 19 rows need three tiles
    torch.testing.assert_close(case.attend(), case.truth(), **EXACT)


@interpreted
@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("size", [8, 64, 80, 128, 256])
def test_head_sizes_and_number_formats(size: int, dtype: torch.dtype) -> None:
    case = make_case(random_tree(7), 90, size=size, dtype=dtype)
    found = case.attend()
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), case.truth().float(), **LOOSE[dtype])


@interpreted
@pytest.mark.parametrize("nodes", [31, 32, 33, 64, 65])
def test_ancestors_beyond_one_word(nodes: int) -> None:
    case = make_case(random_tree(nodes), 37, groups=1)
    torch.testing.assert_close(case.attend(), case.truth(), **EXACT)


@interpreted
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("context", [428, 1100])
def test_contexts_longer_than_a_split(context: int, splits: int, window: int | None) -> None:
    case = make_case(random_tree(5), context, window=window)
    torch.testing.assert_close(case.attend(splits=splits), case.truth(), **EXACT)


@interpreted
def test_a_tree_that_fills_splits_of_its_own() -> None:
    case = make_case(random_tree(140), 120, groups=1, window=90)
    torch.testing.assert_close(case.attend(splits=1), case.truth(), **EXACT)


# --- the same bits ---------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("window", [None, 150])
def test_a_node_has_the_same_bits_at_every_width(window: int | None) -> None:
    wide = make_case(random_tree(40), 600, groups=3, dtype=torch.bfloat16, window=window)
    found = wide.attend(splits=3)
    for n in (0, 1, 5, 20):
        narrow = replace(wide, tree=wide.tree[:n], query=wide.query[: 1 + n])
        assert torch.equal(narrow.attend(splits=3), found[: 1 + n])


@interpreted
def test_a_node_of_a_chain_has_the_bits_of_plain_decoding() -> None:
    chain = make_case(chain_tree(range(6)), 300, groups=3, dtype=torch.bfloat16)
    found = chain.attend(splits=4)
    for i in range(6):
        plain = replace(chain, tree=chain_tree([0]), context=300 + i, query=chain.query[i : i + 1])
        assert torch.equal(plain.attend(splits=4), found[i : i + 1])


@interpreted
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("context", [0, 63, 253, 520])
@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_the_kernel_that_keeps_bits_is_equal_to_the_reference(kind: str, context: int, window: int | None) -> None:
    case = make_case(a_tree(kind, 9), context, window=window, seed=context)
    torch.testing.assert_close(case.alone(), case.truth(), **EXACT)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("context", "window"), [(60, None), (250, None), (250, 70)])
@pytest.mark.parametrize("kind", ["tree", "chain"])
def test_bits_are_those_of_plain_decoding_at_every_place(
    kind: str, context: int, window: int | None, dtype: torch.dtype
) -> None:
    """Also where the tree lies on a border of blocks and splits, which in plain decoding come at other slots."""
    wide = make_case(a_tree(kind, 9), context, groups=3, size=80, dtype=dtype, window=window, seed=context)
    found = wide.alone()
    for node in range(9):
        assert torch.equal(wide.plain(node).alone(), found[node : node + 1])


@interpreted
def test_bits_are_the_same_at_every_width() -> None:
    wide = make_case(random_tree(20), 130, groups=4, dtype=torch.bfloat16)
    found = wide.alone()
    for n in (0, 1, 5):
        narrow = replace(wide, tree=wide.tree[:n], query=wide.query[: 1 + n])
        assert torch.equal(narrow.alone(), found[: 1 + n])


def test_a_lineage_goes_from_a_node_to_the_root() -> None:
    tree = random_tree(30)
    line = lineage_of(tree.ancestors())
    for node in range(30):
        expected, at = [], node
        while at >= 0:
            expected.append(at)
            at = int(tree.parents[at])
        assert line[node, : len(expected)].tolist() == expected and not line[node, len(expected) :].any()


# --- blocks that see ahead ---------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize(("context", "splits"), [(0, 1), (120, 1), (400, 3)])
@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("size", [10, 30])
def test_tokens_of_a_block_see_each_other(size: int, window: int | None, context: int, splits: int) -> None:
    from draftwood.attention.triton_tree import tree_attention
    from draftwood.decoder import Sight
    from draftwood.device.view import View
    from draftwood.drafters.dflash_static import block_sight

    case = make_case(chain_tree(range(size)), context, kv_heads=1, groups=3, seed=size)
    at, depths = torch.tensor(context), torch.arange(size)
    seen, bits = block_sight(Sight(window, causal=False), size, CPU)
    keys, values = (torch.nan_to_num(part) for part in (case.keys, case.values))  # the reference masks what is behind
    view = View(at, depths, seen, bits, keys.shape[1], torch.float32, ahead=True)
    folded = case.query.transpose(0, 1).unflatten(0, (1, -1))
    args = AttentionArgs(folded, keys, values, case.scale, window, None, None, view, 0)
    expected = REFERENCE.run(args).flatten(0, 1).transpose(0, 1)
    found = tree_attention(
        case.query, case.keys, case.values, at, bits, depths, case.scale, window, splits=splits, ahead=True
    )
    torch.testing.assert_close(found, expected, **EXACT)


# --- the static round ------------------------------------------------------------------------------------------
@interpreted
def test_buffers_may_be_given_and_the_context_changes_in_place() -> None:
    from draftwood.attention.triton_tree import tree_attention, workspace_size

    short, long = (make_case(random_tree(6), context) for context in (20, 200))
    context = torch.tensor(20)  # int64
    out = torch.full((8, 2, 64), torch.nan)[1:-1]  # with strides, the rest must stay
    workspace = torch.full((workspace_size(6, 2, 64, splits=2),), torch.nan)
    for case in (short, long):
        context.fill_(case.context)
        sight = case.plan.sight(0)
        found = tree_attention(
            case.query, case.keys, case.values, context, sight.ancestors, None, case.scale, None, out, workspace, 2
        )
        assert found is out
        torch.testing.assert_close(out, case.truth(), **EXACT)
    with pytest.raises(AssertionError, match="workspace"):
        short.attend(workspace=workspace[:-1], splits=2)


# --- in the engine's hands -------------------------------------------------------------------------------------
@pytest.fixture
def triton_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel serves every forward, on the CPU too."""
    served = []
    willing = Backend("triton", lambda args: None, lambda args: served.append(1) or triton_backend.attend(args))
    monkeypatch.setattr(dispatch, "BACKENDS", (willing,))
    monkeypatch.setattr(Lean, "exact_cache", False)  # as on a GPU: a CPU has its own attention
    yield
    assert served, "the kernel was never asked"


@interpreted
@pytest.mark.parametrize(("family", "path"), [("llama", "universal"), ("qwen3_sliding", "lean")])
def test_a_target_verifies_trees_with_it(family: str, path: str, triton_only: None) -> None:
    def verified() -> torch.Tensor:
        target = tiny_target(family, path, dtype=torch.float32)
        cache = target.new_cache(capacity=4, requests=2)
        target.prefill(range(1, 12), cache, row=0)
        target.prefill(range(20, 26), cache, row=1)
        return target.verify(target.plan([random_tree(8), chain_tree([5, 9])], cache, rows=[0, 1]), cache).logits

    found = verified()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "BACKENDS", (dispatch.REFERENCE,))
        expected = verified()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_bits_are_the_ancestors() -> None:
    for size in (1, 31, 32, 33, 70):
        seen = random_tree(size).ancestors()
        words = pack_bits(seen)
        assert words.dtype == np.int32 and words.shape == (size, -(-size // 32))
        unpacked = [[bool(int(words[i, j // 32]) >> (j % 32) & 1) for j in range(size)] for i in range(size)]
        assert np.array_equal(unpacked, seen)


def test_a_chain_needs_no_bits() -> None:
    plan = make_plan([chain_tree(range(4))], [17], torch.float32, torch.device("cpu"), [0])
    sight = plan.sight(0)
    assert sight.ancestors is None and int(sight.context) == 17 and sight.depths.tolist() == [0, 1, 2, 3]
    assert plan.sight(0) is sight, "built once a round"


# --- declining -------------------------------------------------------------------------------------------------
def fake_args(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, size: int = 128, nodes: int = 4, **changes):
    """Arguments without memory behind them, so a CUDA device need not exist."""
    plan = make_plan([chain_tree(range(4))], [0], dtype, torch.device("cpu"), [0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        query = torch.empty(2, 3, nodes, size, dtype=dtype, device=device)
        key = torch.empty(2, nodes, size, dtype=dtype, device=device)
    return replace(AttentionArgs(query, key, key, 1.0, None, None, None, plan, 0), **changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(device="cpu"), "CUDA"),
        (dict(softcap=50.0), "soft-cap"),
        (dict(sinks=torch.zeros(6)), "sinks"),
        (dict(dtype=torch.float64), "float64"),
        (dict(dtype=torch.float32), "float32"),
        (dict(size=512), "512"),
        (dict(nodes=4096), "4096"),
    ],
)
def test_it_declines_with_a_reason(change: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "missing", lambda device: None)
    assert triton_backend.declines(fake_args()) is None
    found = triton_backend.declines(fake_args(**change))
    assert found is not None and reason in found


def test_it_declines_where_triton_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = triton_backend.missing.__wrapped__  # without the memory
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_backend.shutil, "which", lambda name: "/usr/bin/" + name)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *_, **__: 1 / 0)  # as a kernel that finds no Python.h: whatever is raised
        assert missing(torch.device("cuda")) == "a first kernel failed (division by zero)"
    monkeypatch.setattr(triton_backend, "_failure", lambda device: None)
    assert missing(torch.device("cuda")) is None
    monkeypatch.setattr(triton_backend.shutil, "which", lambda name: None)
    assert "C compiler" in missing(torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "not installed" in missing(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5" in missing(torch.device("cuda"))


def test_the_choice_is_explained() -> None:
    here = torch.device("cpu")
    plain, capped = explain(here, torch.float32, 64), explain(here, torch.float32, 64, softcap=50.0)
    assert list(plain) == ["triton", "cascade", "sdpa"] and "CUDA" in str(plain["triton"]) and plain["sdpa"] is None
    assert list(capped) == ["triton", "cascade", "sdpa", "reference"] and "soft-cap" in str(capped["sdpa"])


# --- compiled --------------------------------------------------------------------------------------------------
def test_it_compiles_for_devices_that_are_not_here(tmp_path: Path) -> None:
    """And but for growth once: neither the width nor where a plan's arrays happen to lie asks for another kernel."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), "80", "90"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]).values():
        kernels = found["kernels"]
        assert (kernels.pop("_best_first"), kernels.pop("_relate")) == (6, 3), "of three sizes; growth also with pairs"
        assert kernels.pop("_attend_row") == 2, "with a window and without"
        assert kernels.pop("_noisiest") == 2, "of scores in double and in single precision"
        assert set(kernels.values()) == {1}, "one kernel for the tree and one to merge, and both again for nodes alone"
        assert found["shared_bytes"] <= 99 * 1024, "more than consumer devices have"
