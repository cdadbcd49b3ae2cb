"""The EAGLE-3 drafter against its definition: one layer over the whole sequence, without caches and trees."""

from __future__ import annotations

import math
import pickle
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from draftwood import registry
from draftwood.drafters.base import Request
from draftwood.drafters.checkpoint import read_pickle, weight_files
from draftwood.drafters.eagle3 import Eagle3Drafter
from draftwood.errors import BadInput, BadModel
from draftwood.rotary import rotate
from tests.reference import eagle3_files, tiny_eagle3, tiny_target

CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6]
FORMS = [
    ("safeailab", 40, {}),
    ("specforge", 40, {}),
    ("speculators", None, {}),
    ("speculators", 40, {"norm_before_residual": True, "embed_tokens.weight": torch.randn(97, 32)}),
    ("specforge", 40, {"hidden_size": 48, "target_hidden_size": 32, "embed_tokens.weight": torch.randn(97, 48)}),
    ("speculators", 40, {"hidden_size": 16, "target_hidden_size": 32, "embed_tokens.weight": torch.randn(97, 16)}),
]


def opened(drafter: Eagle3Drafter, target, tokens=CONTEXT):
    target.tap(drafter.tap_layers)
    state = drafter.open(32)
    taps = target.prefill(tokens, target.new_cache(32)).taps
    drafter.extend(state, list(tokens), taps)
    return state, taps


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@torch.inference_mode()
def definition(drafter: Eagle3Drafter, target, taps: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Log-probabilities over the drafted vocabulary behind CONTEXT, the root 7 and `path`."""
    w, c = drafter._weights, drafter.config
    tokens, outputs = [*CONTEXT[1:], 7], w.fc(taps)
    last = outputs
    for drafted in [None, *path]:
        if drafted is not None:  # the next row's feature is the last row's output
            tokens, outputs = [*tokens, drafted], torch.cat([outputs, last[-1:]])
        size = len(tokens)
        normed = rms(outputs, w.hidden_norm)
        embedded = target.embed(torch.tensor(tokens)) if w.embedding is None else w.embedding[tokens]
        x = torch.cat([rms(embedded, w.input_norm), normed], -1)
        qkv = w.qkv(x).view(size, -1, c.head_dim)
        cos, sin = drafter._rotary(0, size)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = c.num_heads // c.num_kv_heads
        heads = []
        for head in range(c.num_heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(c.head_dim)
            scores = scores.masked_fill(torch.ones(size, size).triu(1) > 0, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, head // group])
        hidden = (normed if c.normed else outputs) + w.output(torch.cat(heads, -1))
        gate, up = w.gate_up(rms(hidden, w.post_norm)).chunk(2, -1)
        last = hidden + w.down(F.silu(gate) * up)
    return w.head(rms(last[-1], w.norm)).log_softmax(-1)


@pytest.mark.parametrize(("form", "draft_vocab", "more"), FORMS)
def test_masses_are_the_layers_own_along_every_path(form: str, draft_vocab: int | None, more: dict) -> None:
    target = tiny_target()
    drafter = tiny_eagle3(target, form=form, draft_vocab=draft_vocab, **more)
    assert drafter.config.normed == ("norm_before_residual" in more)
    assert (drafter._weights.embedding is not None) == ("embed_tokens.weight" in more)
    assert drafter.config.hidden_size == more.get("hidden_size", 32)
    assert drafter.tap_layers == (0, 1, 2)
    state, taps = opened(drafter, target)
    drafter.draft([Request(state, 50, 4)])  # another root first: nothing of it may stay
    tree = drafter.draft([Request(state, 7, 4)])[0]
    assert len(tree) == 3 + 9 + 9 and tree.depths.max() == 3
    ids = list(range(97)) if draft_vocab is None else [2 * i + 1 for i in range(40)]
    for node in range(1, len(tree) + 1):
        path = tree.tokens[tree.path(node)].tolist()
        logp = sum(float(definition(drafter, target, taps, path[:i])[ids.index(token)]) for i, token in enumerate(path))
        assert math.log(tree.mass[node]) == pytest.approx(logp, abs=1e-4)
    best = definition(drafter, target, taps, []).topk(3).indices.tolist()
    assert tree.tokens[1:4].tolist() == [ids[i] for i in best]


def test_rewinding_is_as_if_it_had_never_been() -> None:
    target = tiny_target()
    drafter = tiny_eagle3(target)
    state, taps = opened(drafter, target)
    drafter.draft([Request(state, 7, 4)])
    drafter.rewind(state, 5)
    drafter.draft([Request(state, 30, 4)])
    drafter.extend(state, CONTEXT[5:], taps[5:])
    again = drafter.draft([Request(state, 7, 4)])[0]
    fresh = drafter.draft([Request(opened(drafter, target)[0], 7, 4)])[0]
    assert again.tokens.tolist() == fresh.tokens.tolist()
    assert again.mass == pytest.approx(fresh.mass, rel=1e-5)


def test_a_copy_keeps_what_a_prefix_needs_and_drafts_the_same() -> None:
    target = tiny_target()
    drafter = tiny_eagle3(target)
    state, _ = opened(drafter, target)
    kept = deepcopy(state)
    assert len(kept.features) == kept.kv.shape[2] == len(CONTEXT) < len(state.features)
    again, fresh = (drafter.draft([Request(each, 7, 4)])[0] for each in (kept, state))
    assert again.tokens.tolist() == fresh.tokens.tolist() and again.mass == pytest.approx(fresh.mass)


def test_long_texts_need_more_room_than_was_thought() -> None:
    target = tiny_target()
    drafter = tiny_eagle3(target)
    target.tap(drafter.tap_layers)
    state = drafter.open(1)
    tokens = [(7 * i) % 97 for i in range(60)]
    taps = target.prefill(tokens, target.new_cache(64)).taps
    for i in range(0, 60, 7):
        drafter.extend(state, tokens[i : i + 7], taps[i : i + 7])
        tree = drafter.draft([Request(state, 7, 4)])[0]
    whole, _ = opened(drafter, target, tokens)
    assert tree.tokens.tolist() == drafter.draft([Request(whole, 7, 4)])[0].tokens.tolist()


def test_checkpoints_that_do_not_fit(tmp_path) -> None:
    target = tiny_target()
    eagle3_files(target, tmp_path, "specforge")
    with pytest.raises(BadModel, match="hidden size is 32"):
        registry.drafter(f"eagle3:{tmp_path}", tiny_target(hidden_size=64, vocab_size=97))
    with pytest.raises(BadModel, match=r"vocabulary has 97 tokens, the target's 32 and 900"):
        registry.drafter(f"eagle3:{tmp_path}", tiny_target(vocab_size=900))
    with pytest.raises(BadModel, match="leads out of"):
        registry.drafter(f"eagle3:{tmp_path}", tiny_target(vocab_size=50))
    with pytest.raises(BadInput, match="'beam'"):
        registry.drafter(f"eagle3:{tmp_path},bem=3", target)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("[0, 1, 2]", "[0, 1, 9]"))
    with pytest.raises(BadModel, match="three of the target's layers"):
        registry.drafter(f"eagle3:{tmp_path}", target)
    (tmp_path / "config.json").write_text(config.replace('"draft_vocab_size": 40', '"draft_vocab_size": 41'))
    with pytest.raises(BadModel, match="lm_head"):
        registry.drafter(f"eagle3:{tmp_path}", target)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"attention_bias": True}, "attention_bias = True instead of false"),
        ({"norm_before_fc": True}, "norm_before_fc = True instead of false"),
        ({"norm_output": True}, "norm_output = True instead of false"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rotary settings .*yarn.* cannot be used"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' instead of silu"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "a tensor midlayer.self_attn.q_norm.weight that"),
        ({"embed_tokens.weight": torch.ones(97, 16)}, "embed_tokens.weight is "),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "layers 1 to 3"),
        ({"hidden_size": 48, "target_hidden_size": 32}, "hidden size of 48 and .* one of 32, so it needs"),
        ({"target_hidden_size": 48}, "does not fit .*: its hidden size is 48"),
    ],
)
def test_what_another_architecture_would_read_is_refused(tmp_path, changed: dict, told: str) -> None:
    """It would draft nonsense without a word."""
    target = tiny_target()
    eagle3_files(target, tmp_path, "specforge", **changed)
    with pytest.raises(BadModel, match=told):
        registry.drafter(f"eagle3:{tmp_path}", target)


def test_a_trimmed_list_needs_a_head_of_its_own(tmp_path) -> None:
    target = tiny_target()
    eagle3_files(target, tmp_path, "specforge")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match=r"no lm_head\.weight"):
        registry.drafter(f"eagle3:{tmp_path}", target)


def test_layers_are_counted_as_their_config_does_and_the_targets_own_embedding_is_no_second_one() -> None:
    target = tiny_target()
    own = target.embed(torch.arange(97)).clone()
    inputs = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "embed_tokens.weight": own}
    drafter = tiny_eagle3(target, form="specforge", **inputs)
    assert drafter.tap_layers == (0, 1, 2) and drafter._weights.embedding is None


def test_one_of_two_formats_is_read_and_no_trainers_own_file(tmp_path) -> None:
    for name in ("training_args.bin", "pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert [file.name for file in weight_files(tmp_path)] == ["pytorch_model.bin"]


def test_pickles_run_no_code(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}, protocol=2))
    with pytest.raises(BadModel, match="fetch it again"):
        read_pickle(tmp_path / "pytorch_model.bin")
