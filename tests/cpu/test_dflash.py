"""The DFlash drafter against its definition: no cache, naive attention over context features and block."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwood.drafters.base import Request
from draftwood.drafters.dflash import PENDING, DFlashDrafter
from draftwood.drafters.dflash_config import parse_config
from draftwood.drafters.dflash_layers import BlockLayers, NativeLayers, TorchLayers
from draftwood.drafters.lattice import candidates
from draftwood.errors import BadInput, BadModel
from draftwood.noise import Ahead, keys
from draftwood.packing import linear
from draftwood.tree import Lattice
from draftwood.trellis import Block, Trellis

HIDDEN, INNER, VOCAB, MASK, LAYERS = 24, 40, 101, 7, 2
BASE = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 8, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None,
    "num_target_layers": 6, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]},
    "vocab_size": VOCAB, "max_position_embeddings": 512, "something_unknown": [1, 2],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
FORMS: dict[str, dict[str, object]] = {
    "nested": {},
    "top-level": {"dflash_config": None, "mask_token_id": MASK, "target_layer_ids": [0, 5]},
    "layers by formula": {"dflash_config": {"mask_token_id": MASK}},
    "no architectures": {"architectures": None},
    "block 10 without GQA": {"block_size": 10, "num_key_value_heads": 4},
    "block 16, one key head": {"block_size": 16, "num_key_value_heads": 1},
    "rope_parameters": {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "llama3": {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    "bias": {"attention_bias": True},
    "sliding": SLIDING,
    "sliding, block larger than window": {**SLIDING, "sliding_window": 5},
    "sliding, bidirectional": {**SLIDING, "sliding_window": 5, "is_causal": False},
    "causal everywhere": {"is_causal": True},
    "max_window_layers": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
    "use_swa": {
        "dflash_config": {
            "mask_token_id": MASK, "target_layer_ids": [2], "use_swa": True, "swa_window_size": 11,
            "causal": False,
        },
    },
    "scaled embedding": {"input_embedding_scale": 3.0},
}  # fmt: skip


@dataclass
class TinyTarget:
    """What a drafter uses of a target: its embedding, its head and its shapes."""

    name: str = "tiny"
    hidden_size: int = HIDDEN
    num_layers: int = 6
    vocab_size: int = VOCAB
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    finishes: bool = False

    def __post_init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        shape = (self.vocab_size, self.hidden_size)
        self.embedding, self._rows = (
            torch.randn(shape, generator=numbers, dtype=torch.float64).to(self.dtype) for _ in range(2)
        )
        self.output = linear(self._rows)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def head_rows(self, tokens: Tensor | None = None) -> tuple[Tensor, None]:
        return self._rows if tokens is None else self._rows[tokens], None

    def finish(self, logits: Tensor) -> Tensor:
        return logits


def make_tensors(config: dict, qk_norm: bool = True) -> dict[str, Tensor]:
    """Random weights under the names of z-lab's checkpoints."""
    fields = parse_config(config, "made")
    hidden, inner = fields.hidden_size, fields.intermediate_size
    heads, keys = fields.num_heads * fields.head_dim, fields.num_kv_heads * fields.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(fields.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }  # fmt: skip
    for i in range(fields.num_layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {f"layers.{i}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        for name, rows, columns in (
            ("q", heads, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, heads),
        ):  # fmt: skip
            shapes[f"{attention}{name}_proj.weight"] = (rows, columns)
            if fields.attention_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        if qk_norm:
            shapes |= {f"{attention}{n}_norm.weight": (fields.head_dim,) for n in "qk"}
        shapes |= {f"{mlp}{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{mlp}down_proj.weight"] = (hidden, inner)
    numbers = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=numbers, dtype=torch.float64) * 0.4 + float("norm" in name)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def some_taps(drafter: DFlashDrafter, count: int, seed: int = 3) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count, drafter.config.tap_width, generator=numbers, dtype=torch.float64).to(
        drafter._target.dtype
    )


# --- the definition ----------------------------------------------------------------------------------------


def rotation(config: dict) -> tuple[Tensor, float]:
    """Inverse frequencies and scaling: by formula where it is short, else transformers' own."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta") or config["rope_theta"]
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind in ("yarn", "llama3"):
        told = Qwen3Config(head_dim=8, max_position_embeddings=512, rope_parameters={**given, "rope_theta": theta})
        return ROPE_INIT_FUNCTIONS[kind](told, torch.device("cpu"))
    return 1 / (theta ** (torch.arange(0, 8, 2) / 8)) / given.get("factor", 1.0), 1.0


def norm(x: Tensor, weight: Tensor | None, eps: float = 1e-5) -> Tensor:
    return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, positions: Tensor, config: dict) -> Tensor:
    """Rotate pairs (i, i + D/2) of `[N, heads, D]` as complex numbers."""
    frequencies, scale = rotation(config)
    a, b = x.chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(
        torch.tensor(scale, dtype=torch.float64), positions[:, None, None] * frequencies.double()
    )
    return torch.cat([turned.real, turned.imag], -1)


def visible(config: dict, layer: int, query: int, key: int, context: int) -> bool:
    """Whether the block token at position `query` sees position `key`, spelled out for every form above."""
    nested = config.get("dflash_config") or {}
    kinds = config.get("layer_types") or ["full_attention"] * LAYERS
    slides = kinds[layer] == "sliding_attention"
    slides |= bool(config.get("use_sliding_window")) and layer >= config["max_window_layers"]
    causal = slides if config.get("is_causal") is None else config["is_causal"]
    if nested.get("use_swa"):
        slides, causal = True, nested["causal"]
    window = nested.get("swa_window_size") or config.get("sliding_window")
    return (not slides or abs(query - key) < window) and (not causal or key <= query)


def reference(config: dict, tensors: dict[str, Tensor], target: TinyTarget, taps: Tensor, root: int) -> Tensor:
    """Log-probabilities [B - 1, V] by recomputing everything from the raw taps of the whole context."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    size, heads, groups, context = config["block_size"], 4, config["num_key_value_heads"], len(taps)
    features = norm(taps.double() @ t["fc.weight"].T, t["hidden_norm.weight"])
    x = target.embed(torch.tensor([root] + [MASK] * (size - 1))).double() * config.get("input_embedding_scale", 1.0)
    positions = torch.arange(context + size).double()
    for i in range(LAYERS):
        p = f"layers.{i}."

        def project(part: str, y: Tensor, p: str = p) -> Tensor:
            y = y @ t[f"{p}self_attn.{part}_proj.weight"].T
            return y + t.get(f"{p}self_attn.{part}_proj.bias", 0.0)

        y = norm(x, t[p + "input_layernorm.weight"])
        q = norm(project("q", y).view(size, heads, 8), t.get(p + "self_attn.q_norm.weight"))
        both = torch.cat([features, y])
        k = norm(project("k", both).view(-1, groups, 8), t.get(p + "self_attn.k_norm.weight"))
        v = project("v", both).view(-1, groups, 8)
        q, k = turn(q, positions[context:], config), turn(k, positions, config)
        out = torch.zeros(size, heads, 8, dtype=torch.float64)
        for n in range(size):
            seen = [j for j in range(context + size) if visible(config, i, context + n, j, context)]
            for h in range(heads):
                g = h // (heads // groups)
                weights = torch.softmax(k[seen, g] @ q[n, h] / math.sqrt(8), 0)
                out[n, h] = weights @ v[seen, g]
        x = x + project("o", out.flatten(1))
        y = norm(x, t[p + "post_attention_layernorm.weight"])
        gate, up = (y @ t[f"{p}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T
    return torch.log_softmax(target.output(norm(x[1:], t["norm.weight"]).to(target.dtype)).double(), -1)


def check(found, expected: Tensor, tolerance: float = 1e-5) -> None:
    """The lattice holds exactly the K best of each row, in falling order."""
    values, _ = expected.topk(found.tokens.shape[1])
    assert found.logp.dtype == np.float32 and found.tokens.dtype == np.int64
    np.testing.assert_allclose(found.logp, values.numpy(), atol=tolerance)
    np.testing.assert_allclose(found.logp, expected.gather(1, torch.from_numpy(found.tokens)), atol=tolerance)


# --- what it computes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_equals_its_definition_through_extends_and_rewinds(form: str, tmp_path: Path) -> None:
    config, target = {**BASE, **FORMS[form]}, TinyTarget()
    tensors = make_tensors(config)
    drafter = DFlashDrafter.load(write(tmp_path, config, tensors), target)
    taps, state = some_taps(drafter, 30), drafter.open(capacity=4)
    for start, stop in ((0, 9), (9, 10), (10, 14)):
        drafter.extend(state, [1] * (stop - start), taps[start:stop])
    check(drafter.draft([Request(state, root=5, width=6)])[0], reference(config, tensors, target, taps[:14], 5))
    drafter.extend(state, [1, 1], taps[20:22])
    drafter.rewind(state, 11)
    drafter.extend(state, [1] * 9, taps[11:20])
    drafter.rewind(state, 18)
    check(drafter.draft([Request(state, root=6, width=6)])[0], reference(config, tensors, target, taps[:18], 6))


def test_long_prompts_and_growth(tmp_path: Path) -> None:
    config, target = {**BASE, **SLIDING}, TinyTarget()
    tensors = make_tensors(config)
    drafter = DFlashDrafter.load(write(tmp_path, config, tensors), target)
    length = 2 * PENDING + 40
    taps, state = some_taps(drafter, length), drafter.open(capacity=16)
    for start, stop in ((0, PENDING - 1), (PENDING - 1, PENDING + 1), (PENDING + 1, length)):
        drafter.extend(state, [1] * (stop - start), taps[start:stop])
    assert len(state) == length
    check(drafter.draft([Request(state, root=5, width=3)])[0], reference(config, tensors, target, taps, 5))


@pytest.mark.parametrize("context", [0, 1])
def test_hardly_any_context(context: int, tmp_path: Path) -> None:
    config, target = {**BASE, **SLIDING}, TinyTarget()
    tensors = make_tensors(config)
    drafter = DFlashDrafter.load(write(tmp_path, config, tensors), target)
    taps, state = some_taps(drafter, context), drafter.open(capacity=8)
    drafter.extend(state, [1] * context, taps)
    check(drafter.draft([Request(state, root=5, width=3)])[0], reference(config, tensors, target, taps, 5))


def test_without_qk_norm(tmp_path: Path) -> None:
    target, tensors = TinyTarget(), make_tensors(BASE, qk_norm=False)
    drafter = DFlashDrafter.load(write(tmp_path, BASE, tensors), target)
    taps, state = some_taps(drafter, 5), drafter.open(capacity=8)
    drafter.extend(state, [1] * 5, taps)
    check(drafter.draft([Request(state, root=5, width=3)])[0], reference(BASE, tensors, target, taps, 5))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.8)])
def test_follows_the_targets_dtype(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    target, tensors = TinyTarget(dtype=dtype), make_tensors(BASE)
    drafter = DFlashDrafter.load(write(tmp_path, BASE, tensors), target)
    taps, state = some_taps(drafter, 20), drafter.open(capacity=8)
    drafter.extend(state, [1] * 20, taps)
    assert state.kv.dtype == dtype
    found = drafter.draft([Request(state, root=5, width=4)])[0]
    expected = reference(BASE, tensors, target, taps, 5)
    np.testing.assert_allclose(found.logp, expected.gather(1, torch.from_numpy(found.tokens)), atol=tolerance)


COMPILED = [
    "nested",
    "scaled embedding",
    "block 16, one key head",
    "bias",
    "sliding",
    "sliding, block larger than window",
    "causal everywhere",
]


@pytest.mark.usefixtures("compiled")
@torch.inference_mode()
@pytest.mark.parametrize(("gap", "depth"), [(0, 7), (3, 2)])
@pytest.mark.parametrize("form", [*COMPILED, "sliding, bidirectional"])
def test_compiled_layers_are_as_close_to_the_truth_as_pytorchs(
    form: str, gap: int, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**BASE, **FORMS[form], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    folder = write(tmp_path, config, make_tensors(config))

    def run(dtype: torch.dtype) -> tuple[BlockLayers, Tensor]:
        """Two blocks behind contexts of 3 and 40 tokens."""
        drafter = DFlashDrafter.load(folder, TinyTarget(hidden_size=64, dtype=dtype))
        states = [drafter.open(capacity=60) for _ in range(2)]
        for state, length in zip(states, (3, 40), strict=True):
            drafter.extend(state, [1] * length, some_taps(drafter, length))
            drafter._project_pending(state)
        blocks = torch.randint(VOCAB, (2 * config["block_size"],), generator=torch.Generator().manual_seed(5))
        return drafter._layers, drafter._layers(blocks.tolist(), states, gap, depth).double()

    _, truth = run(torch.float64)
    layers, compiled = run(torch.bfloat16)
    assert isinstance(layers, NativeLayers if form in COMPILED else TorchLayers)
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    layers, torchs = run(torch.bfloat16)
    assert isinstance(layers, TorchLayers)
    assert (compiled - truth).abs().mean() <= 1.25 * (torchs - truth).abs().mean()


@pytest.mark.usefixtures("compiled", "changing_threads")
@torch.inference_mode()
@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize(("kept", "paired"), [(None, False), ([*range(3, 60, 2)], True), (None, True)])
def test_a_draft_in_one_call_is_the_one_in_many(
    form: str, kept: list[int] | None, paired: bool, tmp_path: Path
) -> None:
    """Behind contexts of any length, of which any number of tokens wait: the same draft, and the same state."""
    config = {**BASE, **FORMS[form], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    target = TinyTarget(hidden_size=64, dtype=torch.bfloat16)
    read = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), target)
    pairs = (torch.randn(16, 64), torch.randn(16, 64)) if paired else None
    drafter = DFlashDrafter(read.config, read._weights, target, "made", draft_tokens=kept, pairs=pairs)
    one, many = drafter.open(capacity=10), drafter.open(capacity=10)
    for step, count in enumerate((1, 0, 9, PENDING, 40)):
        for state in (one, many):
            drafter.extend(state, [1] * count, some_taps(drafter, count, step))
        for depth, width, ahead in ((1, 4, None), (5, 40, lambda n: Ahead(keys(1, 7, n), 1.0)), (None, 16, None)):
            (found,) = drafter.draft([Request(one, 5 + step, width, depth, ahead)])
            (expected,) = drafter.draft_behind([(Request(many, 5 + step, width, depth, ahead), ())])
            for mine, theirs in zip(parts(found), parts(expected), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            assert len(one) == len(many) == one.projected == many.projected
            assert torch.equal(
                one.kv[..., : len(one), :].view(torch.int16), many.kv[..., : len(one), :].view(torch.int16)
            )


def parts(draft: Block) -> list[np.ndarray]:
    if isinstance(draft, Trellis):
        return [draft.lattice.tokens, draft.lattice.logp, draft.pairs]
    return [draft.tokens, draft.logp]


@pytest.mark.usefixtures("compiled")
@torch.inference_mode()
def test_blocks_of_one_context_share_one_draft_and_nothing_else_in_compiled_layers(tmp_path: Path) -> None:
    config = {**BASE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    target = TinyTarget(hidden_size=64, dtype=torch.bfloat16)
    drafter = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), target)
    assert isinstance(drafter._layers, NativeLayers)
    asked = []
    for length in (20, 9):
        state = drafter.open(capacity=40)
        drafter.extend(state, [1] * length, some_taps(drafter, length))
        asked.append(Request(state, root=5 + length, width=4))
    blocks = [(asked[0], ()), (asked[0], (11,)), (asked[1], (7, 8)), (asked[0], (11, 12)), (asked[1], ())]
    for block, found in zip(blocks, drafter.draft_behind(blocks), strict=True):
        (alone,) = drafter.draft_behind([block])
        np.testing.assert_array_equal(found.tokens, alone.tokens)
        np.testing.assert_array_equal(found.logp, alone.logp)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_copied_state_is_one_of_its_own(dtype: torch.dtype, tmp_path: Path) -> None:
    config = {**BASE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    target = TinyTarget(hidden_size=64, dtype=dtype)
    drafter = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), target)
    state = drafter.open(capacity=40)
    drafter.extend(state, [1] * 20, some_taps(drafter, 20))
    expected = drafter.draft([Request(state, root=5, width=4)])[0]
    copied = copy.deepcopy(state)
    state.kv.zero_()
    found = drafter.draft([Request(copied, root=5, width=4)])[0]
    assert not state.kv.any()
    np.testing.assert_array_equal(found.logp, expected.logp)


@torch.inference_mode()
@pytest.mark.parametrize("length", [0, 1, 20, PENDING])
def test_a_copied_state_takes_no_room_that_it_does_not_need_and_goes_on(length: int, tmp_path: Path) -> None:
    target = TinyTarget()
    drafter = DFlashDrafter.load(write(tmp_path, BASE, make_tensors(BASE)), target)
    state, taps = drafter.open(capacity=999), some_taps(drafter, length + 30)
    drafter.extend(state, [1] * length, taps[:length])
    copies = [copy.deepcopy(state)]
    drafter.draft([Request(state, root=5, width=4)])  # projects what waits
    copies.append(copy.deepcopy(state))
    for copied in copies:
        assert copied.kv.shape[3] + len(copied.pending) == len(copied) == length
    for going_on in (state, *copies):
        drafter.extend(going_on, [1] * 30, taps[length:])
    expected, *found = (drafter.draft([Request(one, root=5, width=4)])[0] for one in (state, *copies))
    for one in found:
        np.testing.assert_allclose(one.logp, expected.logp, atol=1e-9)


@pytest.mark.parametrize("form", ["nested", "causal everywhere"])
def test_a_shorter_draft_is_the_beginning_of_the_whole_one(form: str, tmp_path: Path) -> None:
    config = {**BASE, **FORMS[form]}
    drafter = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), TinyTarget())
    state = drafter.open(capacity=8)
    drafter.extend(state, [1] * 20, some_taps(drafter, 20))
    whole = drafter.draft([Request(state, root=5, width=4)])[0]
    for depth in (1, 2, 99):
        short = drafter.draft([Request(state, root=5, width=4, depth=depth)])[0]
        assert len(short.tokens) == min(depth, drafter.max_depth)
        assert np.array_equal(short.tokens, whole.tokens[:depth])
        np.testing.assert_allclose(short.logp, whole.logp[:depth], atol=1e-9)


@pytest.mark.parametrize(("form", "tokens"), [("nested", 8), ("causal everywhere", 3)])
def test_only_a_block_whose_tokens_see_those_behind_them_is_run_whole(
    form: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**BASE, **FORMS[form]}
    drafter, ran = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), TinyTarget()), []
    layers = drafter._layers
    monkeypatch.setattr(drafter, "_layers", lambda tokens, *more: ran.append(len(tokens)) or layers(tokens, *more))
    drafter.draft([Request(drafter.open(capacity=8), root=5, width=4, depth=2)])
    assert ran == [tokens]


def test_requests_meet_only_in_products(tmp_path: Path) -> None:
    config = {**BASE, **SLIDING}
    drafter = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), TinyTarget())
    requests = []
    for i, length in enumerate((3, 17, 30)):
        state = drafter.open(capacity=8)
        drafter.extend(state, [1] * length, some_taps(drafter, length, seed=i))
        requests.append(Request(state, root=10 + i, width=2 + i))
    together = drafter.draft(requests)
    for found, request in zip(together, requests, strict=True):
        alone = drafter.draft([request])[0]
        assert found.tokens.shape == (7, request.width)
        np.testing.assert_array_equal(found.tokens, alone.tokens)
        np.testing.assert_allclose(found.logp, alone.logp, atol=1e-6)


def test_taps_may_be_overwritten_after_extend(tmp_path: Path) -> None:
    drafter = DFlashDrafter.load(write(tmp_path, BASE, make_tensors(BASE)), TinyTarget())
    taps = some_taps(drafter, 6)
    kept, reused = drafter.open(8), drafter.open(8)
    buffer = taps.clone()
    drafter.extend(kept, [1] * 6, taps)
    drafter.extend(reused, [1] * 6, buffer)
    buffer.zero_()
    a, b = drafter.draft([Request(kept, 5, 4), Request(reused, 5, 4)])
    np.testing.assert_array_equal(a.logp, b.logp)


def test_depth_limits_the_logits_and_not_the_block(tmp_path: Path) -> None:
    folder, target = write(tmp_path, BASE, make_tensors(BASE)), TinyTarget()
    whole, short = DFlashDrafter.load(folder, target), DFlashDrafter.load(folder, target, depth=3)
    assert (whole.max_depth, short.max_depth) == (7, 3)
    found = []
    for drafter in (whole, short):
        state = drafter.open(8)
        drafter.extend(state, [1] * 6, some_taps(drafter, 6))
        found.append(drafter.draft([Request(state, 5, 4)])[0])
    np.testing.assert_array_equal(found[0].tokens[:3], found[1].tokens)
    assert short.work(10).flops < whole.work(10).flops
    for depth in (0, 8):
        with pytest.raises(BadInput, match="1 to 7"):
            DFlashDrafter.load(folder, target, depth=depth)


def test_reads_what_it_says(tmp_path: Path) -> None:
    drafter = DFlashDrafter.load(write(tmp_path, BASE, make_tensors(BASE)), TinyTarget())
    assert drafter.tap_layers == (1, 3, 4)
    formula = {
        **BASE,
        "dflash_config": {"mask_token_id": MASK},
        "num_target_layers": 36,
        "num_hidden_layers": 5,
    }
    assert parse_config(formula, "made").target_layer_ids == (1, 9, 17, 25, 33)


def test_work_grows_with_the_context_until_the_window_is_full(tmp_path: Path) -> None:
    config = {**BASE, "layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
    full = DFlashDrafter.load(write(tmp_path / "a", BASE, make_tensors(BASE)), TinyTarget())
    sliding = DFlashDrafter.load(write(tmp_path / "b", config, make_tensors(config)), TinyTarget())
    weights = sum(t.numel() for n, t in make_tensors(BASE).items() if "norm" not in n) + 2 * 2 * 2 * 8 * HIDDEN
    assert full.work(0).bytes == 8 * (weights + VOCAB * HIDDEN + 2 * 8 * 2 * 2 * 8)  # weights, head, the block's KV
    assert full.work(100).bytes > full.work(50).bytes and full.work(100).flops > full.work(50).flops
    assert sliding.work(100) == sliding.work(50)


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans())
def test_lattice_is_the_exact_top_k(vocab: int, width: int, seed: int, coarse: bool) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    logits = logits.round() if coarse else logits  # ties
    found = Lattice(*(part.numpy() for part in candidates(logits.bfloat16(), width)))
    expected = torch.log_softmax(logits.bfloat16().double(), -1)
    assert found.tokens.shape == (3, min(width, vocab)) and found.tokens.max() < vocab
    assert all(len(set(row)) == len(row) for row in found.tokens.tolist())
    assert (np.diff(found.logp, axis=1) <= 0).all()
    check(found, expected)


# --- what it refuses ---------------------------------------------------------------------------------------

REFUSED_CONFIGS = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
    "no mask": ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
    "text for a number": ({"hidden_size": "24"}, "hidden_size = '24'"),
    "tiny block": ({"block_size": 1}, "block_size = 1"),
    "a factor of its own": ({"output_multiplier": 0.5}, "output_multiplier = 0.5 instead of 1"),
    "odd heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "linear attention": ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
    "no window": ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    "no theta": ({"rope_theta": None}, "rope_theta"),
    "dynamic rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "bad layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, "2"]}}, "target_layer_ids"),
}
REFUSED_FITS = {
    "hidden size": ({"hidden_size": 32}, "hidden size 24"),
    "layers": ({"num_layers": 5}, "number of target layers 6"),
    "vocabulary": ({"vocab_size": 200}, "vocabulary size 101"),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_refuses_configs_by_key(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED_CONFIGS[case]
    with pytest.raises(BadModel, match=message):
        DFlashDrafter.load(write(tmp_path, {**BASE, **changes}, make_tensors(BASE)), TinyTarget())


@pytest.mark.parametrize("case", REFUSED_FITS)
def test_refuses_other_targets_by_name(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED_FITS[case]
    with pytest.raises(BadModel, match=message) as error:
        DFlashDrafter.load(write(tmp_path, BASE, make_tensors(BASE)), replace(TinyTarget(), **changes))
    assert "tiny" in str(error.value)


def test_refuses_layers_and_masks_outside_the_target(tmp_path: Path) -> None:
    for nested, message in (
        ({"mask_token_id": 101, "target_layer_ids": [1, 3, 4]}, "mask token 101"),
        ({"mask_token_id": MASK, "target_layer_ids": [1, 3, 6]}, "target layer 6"),
    ):
        config = {**BASE, "dflash_config": nested}
        with pytest.raises(BadModel, match=message):
            DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), TinyTarget())


def test_refuses_tensors_by_name(tmp_path: Path) -> None:
    good = make_tensors(BASE)
    without = {name: tensor for name, tensor in good.items() if name != "layers.1.mlp.up_proj.weight"}
    half_normed = {name: tensor for name, tensor in good.items() if "layers.1.self_attn.q_norm" not in name}
    one_normed = {name: t for name, t in good.items() if not name.startswith("layers.1.self_attn.") or "proj" in name}
    for tensors, message in (
        (without, "lacks the tensor layers.1.mlp.up_proj.weight"),
        (half_normed, "lacks the tensor layers.1.self_attn.q_norm.weight"),
        (one_normed, "some layers only"),
        ({**good, "fc.weight": torch.zeros(HIDDEN, HIDDEN)}, r"fc.weight is \[24, 24\]"),
        ({**good, "layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "q_proj.bias"),
        ({**good, "layers.0.attention_conv.base_kernel": torch.zeros(2)}, "DFlash 2"),
        ({**good, "candidate_selector.successor_codebook": torch.zeros(2)}, "DFlash 2"),
    ):
        with pytest.raises(BadModel, match=message):
            DFlashDrafter.load(write(tmp_path, BASE, tensors), TinyTarget())
    DFlashDrafter.load(write(tmp_path, BASE, {**good, "embed_tokens.weight": torch.zeros(2)}), TinyTarget())


def test_shards(tmp_path: Path) -> None:
    tensors = make_tensors(BASE)
    whole = DFlashDrafter.load(write(tmp_path / "whole", BASE, tensors), TinyTarget())
    folder = tmp_path / "shards"
    folder.mkdir()
    names = sorted(tensors)
    places = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "config.json").write_text(json.dumps(BASE))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    sharded = DFlashDrafter.load(str(folder), TinyTarget())
    a, b = (drafter.draft([Request(drafter.open(4), 5, 4)])[0] for drafter in (whole, sharded))
    np.testing.assert_array_equal(a.logp, b.logp)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadModel, match="lacks model-00002-of-00002"):
        DFlashDrafter.load(str(folder), TinyTarget())
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadModel, match="weight_map"):
        DFlashDrafter.load(str(folder), TinyTarget())


def test_refuses_folders_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, message: str) -> None:
        with pytest.raises(BadModel, match=message):
            DFlashDrafter.load(name, TinyTarget())

    def offline(name: str, **_: object) -> str:
        # Errors of the network are of whatever library brings them.
        raise RuntimeError if name == "someone/cut-off" else FileNotFoundError(f"{name} is out of reach")

    monkeypatch.setattr("draftwood.drafters.checkpoint.snapshot_download", offline)
    refused("someone/no-such-drafter", "neither a folder here nor")
    refused("someone/cut-off", "neither a folder here nor .*RuntimeError")
    refused("", "No checkpoint was named")
    refused("x" * 5000, "File name too long")
    folder = tmp_path / "drafter"
    folder.mkdir()
    refused(str(folder), "has no config.json")
    (folder / "config.json").write_text("{")
    refused(str(folder / "config.json"), "is a file")
    refused(str(folder), "cannot be read as JSON")
    (folder / "config.json").write_text("[]")
    refused(str(folder), "not an object")
    (folder / "config.json").write_text(json.dumps(BASE))
    refused(str(folder), "no weights")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(str(folder), "only pytorch_model.bin, a pickle")
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")
    refused(str(folder), "is damaged")
    whole = write(tmp_path / "cut", BASE, make_tensors(BASE))
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(whole, "is damaged")


def test_loads_hub_names_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return write(tmp_path, BASE, make_tensors(BASE))

    monkeypatch.setattr("draftwood.drafters.checkpoint.snapshot_download", download)
    assert DFlashDrafter.load("z-lab/some-drafter", TinyTarget()).name == "z-lab/some-drafter"
    assert asked["name"] == "z-lab/some-drafter"
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith((".py", ".bin", "*"))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
NESTED = ("mask_token_id", "target_layer_ids", "use_swa", "swa_window_size", "causal")


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*BASE, *NESTED, "layer_types", "is_causal", "rope_parameters"]), JSON))
def test_any_config_parses_or_is_refused_in_a_sentence(changes: dict) -> None:
    try:
        config = parse_config({**BASE, **changes}, "odd")
    except BadModel as error:
        assert "\n" not in str(error)
    else:
        assert config.block_size >= 2 and config.num_heads % config.num_kv_heads == 0
