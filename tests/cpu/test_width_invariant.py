"""With `width_invariant` a token has the bits of plain decoding: at every width and place in a tree, in all layers.

On a CPU the lean path does that by itself; here its form for a GPU runs, through the kernel in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from draftwood import registry
from draftwood.attention import dispatch, triton_backend
from draftwood.device.view import View
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel, Machine
from draftwood.lean import Lean
from draftwood.target import Target
from draftwood.tree import Tree
from draftwood.uniform import ROWS, UniformLinear
from tests.attention_cases import random_tree
from tests.reference import Tabled, Truthful, tiny_model

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs it on a device")
PROMPT = [(11 * i + 5) % 97 for i in range(13)]
SLOTS = 64


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "BACKENDS", (dataclasses.replace(triton_backend.TRITON, declines=lambda args: None),))


def target(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Target:
    return Target(tiny_model(family, dtype), family, width_invariant=True)


@torch.inference_mode()
def forward(model: Lean, kv: torch.Tensor, context: int, tree: Tree) -> torch.Tensor:
    """Logits `[N, V]` of a tree behind `context` slots of `kv`, as a captured stage computes them."""
    seen, depths = torch.from_numpy(tree.ancestors()), torch.from_numpy(tree.depths)
    line = torch.zeros(len(tree) + 1, 1 + int(depths.max()), dtype=torch.int64)
    for node in range(len(tree) + 1):
        path = torch.nonzero(seen[node])[:, 0].flip(0)
        line[node, : len(path)] = path
    view = View(torch.tensor(context), depths, seen, None, SLOTS, kv.dtype, lineage=line)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return view.attend(kv[layer], model.scale, model.windows[layer], q, k, v)

    return model.forward(torch.from_numpy(tree.tokens), context + depths, attend).logits


@interpreted
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_every_node_of_a_tree_is_plain_decoding_to_the_bit(family: str, kernel: None) -> None:
    made = target(family)
    model = made.path
    assert isinstance(model, Lean)
    shape, context = model.shape, 20
    start = torch.randn(3, 2, shape.kv_heads, SLOTS, shape.head_dim).to(made.dtype)
    tree = random_tree(6)
    wide = forward(model, start.clone(), context, tree)
    for width in (1, 4):
        assert torch.equal(forward(model, start.clone(), context, tree[: width - 1]), wide[:width])
    for node in range(6):
        kv, path = start.clone(), torch.nonzero(torch.from_numpy(tree.ancestors()[node]))[:, 0].tolist()
        for depth, step in enumerate(path):
            alone = Tree(tree.tokens[[step]], tree.parents[:1], tree.depths[:1], tree.mass[:1])
            logits = forward(model, kv, context + depth, alone)
        assert torch.equal(logits[0], wide[node])


@interpreted
@torch.inference_mode()
def test_trees_of_more_nodes_than_a_launch_takes_are_attended_in_parts(
    kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = target()
    model, tree = made.path, random_tree(6)
    assert isinstance(model, Lean)
    start = torch.randn(3, 2, model.shape.kv_heads, SLOTS, model.shape.head_dim).to(made.dtype)
    whole = forward(model, start.clone(), 20, tree)
    monkeypatch.setattr(triton_backend, "MOST_NODES", 4)
    assert torch.equal(forward(model, start.clone(), 20, tree), whole)


@interpreted
@pytest.mark.parametrize("policy", ["dflash:3", "ddtree:4"])
def test_texts_in_half_precision_are_plain_decoding_s(
    policy: str, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.device.rounds.LEAST_CAPACITY", 32)  # each empty split costs the interpreter time
    made = target()
    plain = write(made, None, "autoregressive")
    assert write(made, Tabled(Truthful("truthful", truth=PROMPT + plain)), policy) == plain


def write(made: Target, drafter: object, policy: str) -> list[int]:
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), made.work, None)
    engine = Engine(made, drafter, registry.policy(policy), latency, backend="device")  # type: ignore[arg-type]
    return [token for step in engine.run(PROMPT, 7) for token in step.tokens]


@pytest.mark.parametrize("rows", [1, 2, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_products_have_one_number_of_rows(rows: int) -> None:
    seen: list[int] = []
    linear = torch.nn.Linear(8, 5, dtype=torch.float64)
    linear.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    x = torch.randn(rows, 8, dtype=torch.float64)
    torch.testing.assert_close(UniformLinear(linear)(x), x @ linear.weight.T + linear.bias)
    assert set(seen) == {ROWS}


def test_the_universal_path_cannot() -> None:
    with pytest.raises(BadInput, match="cannot be width-invariant"):
        Target(tiny_model("gpt2"), "gpt2", width_invariant=True)
