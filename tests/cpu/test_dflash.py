"""The DFlash drafter against its definition: no cache, naive attention over context features and block."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_state import PENDING
from draftwood.drafters.lattice import candidates
from draftwood.errors import BadInput
from draftwood.tree import Lattice
from tests.dflash_cases import (
    BASE,
    FORMS,
    HIDDEN,
    LAYERS,
    MASK,
    SLIDING,
    VOCAB,
    TinyTarget,
    make_tensors,
    some_taps,
    write,
)

# --- the definition ------------------------------------------------------------------------------------------


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
    """Whether the block token at position `query` sees position `key`, spelled out for every one of `FORMS`."""
    nested = config.get("dflash_config") or {}
    kinds = config.get("layer_types") or ["full_attention"] * LAYERS
    slides = kinds[layer] == "sliding_attention"
    slides |= bool(config.get("use_sliding_window")) and layer >= config["max_window_layers"]
    causal = slides if config.get("is_causal") is None else config["is_causal"]
    if nested.get("use_swa"):
        slides, causal = True, nested["causal"]
    window = nested.get("swa_window_size") or config.get("sliding_window")
    return (not slides or abs(query - key) < window) and (not causal or key <= query)


def convolved(x: Tensor, y: Tensor, t: dict[str, Tensor], part: str, side: int) -> Tensor:
    """DFlash 2's convolution of `x` by the kernels of `y`, number by number; `x` itself in a drafter without any."""
    if f"{part}.base_kernel" not in t:
        return x
    base = t[f"{part}.base_kernel"][side]
    kernels = (y @ t[f"{part}.kernel_projection.weight"].T).view(len(y), 2, len(base), -1)[:, side]
    channels, out = x.shape[1] // kernels.shape[-1], torch.zeros_like(x)
    for n, c in itertools.product(range(len(x)), range(x.shape[1])):
        for tap in range(min(len(base), n + 1)):
            out[n, c] += (base[tap, c] + kernels[n, tap, c // channels]) * x[n - tap, c]
    return out


def reference(config: dict, tensors: dict[str, Tensor], target: TinyTarget, taps: Tensor, root: int) -> Tensor:
    """Log-probabilities [B - 1, V] by recomputing everything from the raw taps of the whole context."""
    states = last_states(config, tensors, target, taps, [root])
    return torch.log_softmax(target.output(states.to(target.dtype)).double(), -1)


def last_states(config: dict, tensors: dict[str, Tensor], target: TinyTarget, taps: Tensor, known: list[int]) -> Tensor:
    """What the head reads [B - 1, hidden] in a block that begins with the `known` tokens; in DSpark [B, hidden]."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    size, heads, groups, context = config["block_size"], 4, config["num_key_value_heads"], len(taps)
    features = norm(taps.double() @ t["fc.weight"].T, t["hidden_norm.weight"])
    block = [*known, *[MASK] * (size - len(known))]
    x = target.embed(torch.tensor(block)).double() * config.get("input_embedding_scale", 1.0)
    positions = torch.arange(context + size).double()
    for i in range(LAYERS):
        p = f"layers.{i}."

        def project(part: str, y: Tensor, p: str = p) -> Tensor:
            y = y @ t[f"{p}self_attn.{part}_proj.weight"].T
            return y + t.get(f"{p}self_attn.{part}_proj.bias", 0.0)

        into = norm(x, t[p + "input_layernorm.weight"])
        y = convolved(into, into, t, p + "attention_conv", 0)
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
        x = x + convolved(project("o", out.flatten(1)), into, t, p + "attention_conv", 1)
        into = norm(x, t[p + "post_attention_layernorm.weight"])
        y = convolved(into, into, t, p + "mlp_conv", 0)
        gate, up = (y @ t[f"{p}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + convolved((F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T, into, t, p + "mlp_conv", 1)
    from_root = config.get("sample_from_anchor") or "DSpark" in str(config["architectures"])
    return norm(x if from_root else x[1:], t["norm.weight"])


def check(found, expected: Tensor, tolerance: float = 1e-5) -> None:
    """The lattice holds exactly the K best of each row, in falling order."""
    values, _ = expected.topk(found.tokens.shape[1])
    assert found.logp.dtype == np.float32 and found.tokens.dtype == np.int64
    np.testing.assert_allclose(found.logp, values.numpy(), atol=tolerance)
    np.testing.assert_allclose(found.logp, expected.gather(1, torch.from_numpy(found.tokens)), atol=tolerance)


# --- what it computes ----------------------------------------------------------------------------------------


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
