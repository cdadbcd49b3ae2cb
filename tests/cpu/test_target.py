"""The target: trees through any family's own forward, equal to plain attention along each branch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood import doctor, packing
from draftwood.cache import MOST_SPARE, KVCache, Row
from draftwood.errors import BadInput, BadModel
from draftwood.loading import load_target
from draftwood.native import slots
from draftwood.packing import can_pack
from draftwood.target import Target
from draftwood.tree import Tree, chain_tree
from tests.reference import FAMILIES, LEAN, ON_PATHS, SHAPE, plain_logits, tiny_model, tiny_target

PROMPT = [(7 * i + 3) % 97 for i in range(21)]


def close(family: str, path: str) -> dict[str, float]:
    """Tolerances. transformers computes norms and soft-capped attention in fp32 whatever the model's dtype."""
    exact = path == "universal" and family != "gemma2"
    return dict(rtol=1e-9, atol=1e-9) if exact else dict(rtol=1e-4, atol=1e-4)


def rope(rope_type: str, **options: float) -> dict[str, object]:
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=1e4, **options))


def random_tree(seed: int, size: int = 13) -> Tree:
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(int(rng.integers(0, i)) for i in range(1, size))])
    depths = np.zeros(size, int)
    for i in range(1, size):
        depths[i] = depths[parents[i]] + 1
    return Tree(rng.integers(0, 97, size), parents, depths, np.ones(size, np.float32))


def prefilled(target: Target, tokens: list[int], chunk: int = 8):
    cache = target.new_cache(capacity=4)
    for at in range(0, len(tokens), chunk):
        target.prefill(tokens[at : at + chunk], cache)
    return cache


@pytest.mark.parametrize("path", ["lean", "universal"])
def test_a_sibling_that_overflows_in_fp16_reaches_no_other_node(path: str) -> None:
    target = tiny_target(path=path, dtype=torch.float16)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[5] = torch.inf
    found = []
    for tokens in ([1, 7, 5, 8], [1, 7, 6, 8]):
        cache = prefilled(target, PROMPT[2:])
        tree = Tree(np.array(tokens), np.array([-1, 0, 0, 1]), np.array([0, 1, 1, 2]), np.ones(4, np.float32))
        found.append(target.verify(target.plan([tree], cache), cache).logits[[0, 1, 3]])
    assert found[0].isfinite().all() and torch.equal(*found)


@pytest.mark.parametrize(("family", "path"), ON_PATHS)
def test_a_tree_equals_plain_attention_along_each_branch(family: str, path: str) -> None:
    target = tiny_target(family, path)
    cache = prefilled(target, PROMPT)
    for seed in range(2):
        tree = random_tree(seed)
        found = target.verify(target.plan([tree], cache), cache).logits
        for node in range(len(tree) + 1):
            branch = [int(tree.tokens[i]) for i in (0, *tree.path(node))]
            expected = plain_logits(target, PROMPT + branch)[-1]
            torch.testing.assert_close(found[node], expected, **close(family, path))


LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{family: (family, {}) for family in LEAN},
    "linear rope": ("llama", rope("linear", factor=2.0)),
    "llama3 rope": ("llama", rope(**LLAMA3, factor=8.0, original_max_position_embeddings=64)),
    "yarn rope": ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "biases and q/k norm": ("qwen3", dict(attention_bias=True)),
    "tied head": ("qwen2", dict(tie_word_embeddings=True)),
    "one key head": ("mistral", dict(num_key_value_heads=1)),
    "a key head each": ("llama", dict(num_key_value_heads=4)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lean_path_is_the_universal_one(variant: str) -> None:
    """In all the forms that Llama-shaped models have: rotary scaling, biases, a tied head, groups of any size."""
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()  # they begin as zeros
    found = [both_of(Target(deepcopy(model), variant, path=path, tap_layers=(0, 2))) for path in ("lean", "universal")]
    for lean, universal in zip(*found, strict=True):
        torch.testing.assert_close(lean, universal, **close(family, "lean"))


def both_of(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and taps of a tree behind a prompt."""
    cache = prefilled(target, PROMPT)
    found = target.verify(target.plan([random_tree(5)], cache), cache)
    assert found.taps is not None
    return found.logits, found.taps


def test_rotary_frequencies_that_depend_on_the_length_are_left_to_the_model() -> None:
    changes = rope("dynamic", factor=2.0)
    assert tiny_target("llama", **changes).path.name == "universal"
    with pytest.raises(BadInput, match=r"rotary frequencies \(dynamic\) depend on the length"):
        tiny_target("llama", "lean", **changes)


def test_texts_end_where_longer_ones_would_turn_all_their_positions_otherwise() -> None:
    factors = rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    sizes = dict(original_max_position_embeddings=64, max_position_embeddings=256)
    assert tiny_target("phi3", **factors, **sizes).context_limit == 64


@pytest.mark.parametrize(("family", "path"), ON_PATHS)
def test_kv_after_commit_is_kv_recomputed(family: str, path: str) -> None:
    target = tiny_target(family, path)
    cache = prefilled(target, PROMPT)
    tree = random_tree(3)
    target.verify(target.plan([tree], cache), cache)
    path = tree.path(int(tree.depths.argmax()))
    assert path != list(range(1, 1 + len(path))), "the path must not be a prefix, or nothing is moved"
    cache.commit(0, path)
    text = PROMPT + [int(tree.tokens[i]) for i in (0, *path)]
    fresh = prefilled(target, text)
    assert cache.lengths == fresh.lengths == [len(text)]
    (row,), (truth,) = cache.rows, fresh.rows
    for found, expected in zip([*row.keys, *row.values], [*truth.keys, *truth.values], strict=True):
        torch.testing.assert_close(found[:, : len(text)], expected[:, : len(text)], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "path"), ON_PATHS)
def test_taps_are_the_hidden_states_after_each_layer(family: str, path: str) -> None:
    target = tiny_target(family, path)
    target.tap((0, 1))
    cache = prefilled(target, PROMPT)
    tree = chain_tree([5, 6, 7])
    taps = target.verify(target.plan([tree], cache), cache).taps
    with target.plain_transformers() as model, torch.inference_mode():
        states = model(torch.tensor([[*PROMPT, 5, 6, 7]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[1][0, -3:], states[2][0, -3:]], dim=-1)
    torch.testing.assert_close(taps, expected, **close(family, path))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_turns_final_hidden_states_into_the_models_logits(family: str) -> None:
    target = tiny_target(family)
    with target.plain_transformers() as model, torch.inference_mode():
        out = model(torch.tensor([PROMPT]), output_hidden_states=True)
        torch.testing.assert_close(target.head(out.hidden_states[-1][0]), out.logits[0])


def test_a_batch_of_trees_equals_single_trees() -> None:
    target = tiny_target("qwen3_sliding")
    prompts = [PROMPT, PROMPT[:5], PROMPT[::-1]]
    trees = [random_tree(1), chain_tree([9]), random_tree(2, size=6)]
    cache = target.new_cache(capacity=4, requests=3)
    singles = []
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        target.prefill(prompt, cache, row)
        alone = prefilled(target, prompt)
        singles.append(target.verify(target.plan([tree], alone), alone).logits)
    together = target.verify(target.plan(trees, cache, rows=[0, 1, 2]), cache).logits
    torch.testing.assert_close(together, torch.cat(singles), rtol=1e-9, atol=1e-9)


def test_a_path_that_is_a_prefix_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    cache = prefilled(target, PROMPT)
    target.verify(target.plan([chain_tree([1, 2, 3])], cache), cache)
    monkeypatch.setattr(type(cache.rows[0]), "_move", lambda *_: pytest.fail("moved"))
    cache.commit(0, [1, 2])
    assert cache.lengths == [len(PROMPT) + 3]


def test_rewinding_forgets() -> None:
    target = tiny_target()
    cache = prefilled(target, PROMPT)
    cache.rewind(0, 10)
    found = target.verify(target.plan([chain_tree([4])], cache), cache).logits[0]
    torch.testing.assert_close(found, plain_logits(target, [*PROMPT[:10], 4])[-1], **close("llama", target.path.name))


@pytest.mark.parametrize("path", ["universal", "lean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_give_the_same_choices(dtype: torch.dtype, path: str) -> None:
    before, after = (logits_of(tiny_target("qwen3", path, pack, dtype=dtype)) for pack in (False, True))
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.02 * float(before.abs().max()))


def logits_of(target: Target) -> torch.Tensor:
    cache = prefilled(target, PROMPT)
    return target.verify(target.plan([random_tree(4)], cache), cache).logits.float()


def test_the_model_is_given_back_as_it_was() -> None:
    model = tiny_model()
    ids = torch.tensor([PROMPT])
    usual = model.config._attn_implementation
    before = model(ids).logits
    target = Target(model, "lent", tap_layers=(1,))
    target.release()
    assert model.config._attn_implementation == usual
    torch.testing.assert_close(model(ids).logits, before)
    assert not any(m._forward_hooks for m in model.modules())


def recurrent_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **SHAPE, state_size=4))


def test_a_recurrent_model_is_refused_by_name() -> None:
    with pytest.raises(BadModel, match="cannot be rewound"):
        Target(recurrent_model(), "some-mamba")


def test_a_recurrent_model_is_refused_before_its_parts_are_counted(tmp_path: Path) -> None:
    from transformers import MambaConfig

    MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1).save_pretrained(tmp_path)
    for look in (load_target, weights_and_attention):
        with pytest.raises(BadModel, match="cannot be rewound"):
            look(str(tmp_path))


def weights_and_attention(name: str) -> None:
    doctor.attention_backends(name, torch.device("cpu"), torch.float32)


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(BadModel, match="lies on several devices"):
        Target(model, "spread")


def test_what_the_cache_takes_is_counted_by_layer() -> None:
    target = tiny_target("gemma4_text")
    (row,) = target.new_cache(4).rows
    target.prefill([1, 2, 3], (cache := KVCache(target.num_layers, [row])))
    kept = [states.shape[0] * states.shape[2] for states in cache.rows[0].keys if states is not None]
    assert len(set(kept)) == 2 and 2 * 8 * sum(kept) == target.kv_bytes_per_token()


def test_accepted_tokens_are_moved_in_layers_of_different_widths() -> None:
    """Of the compiled move, which takes the same bytes in all of them, nothing may be seen."""
    states = [torch.arange(float(heads * 8 * 4)).view(heads, 8, 4) for heads in (1, 2)]
    assert not slots.takes(states)
    assert not slots.takes(states[::-1])


def test_a_row_grows_by_little_more_than_it_needs() -> None:
    row = Row(1, 1000)
    row.reserve(1001)
    assert 1001 <= row.capacity <= 1000 + MOST_SPARE


def test_a_model_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.plan import Plan

    monkeypatch.setattr(Plan, "mask", lambda *_: None)
    with pytest.raises(BadModel, match="does not follow a tree mask"):
        tiny_target()


def test_running_our_attention_without_a_plan_is_refused() -> None:
    target = tiny_target(path="universal")
    with pytest.raises(BadModel, match="without a plan"):
        target.model(torch.tensor([PROMPT]))


@pytest.mark.parametrize("operators", ["none", "without products", "all"])
@pytest.mark.parametrize(("family", "head"), [("llama", 16), ("llama", 64), ("llama", 256), ("qwen3_sliding", 128)])
def test_on_the_lean_path_a_token_keeps_its_bits_whatever_is_verified_beside_it(
    family: str, head: int, operators: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0" if operators == "none" else "1")
    if operators == "without products":  # as where there are matrix units
        monkeypatch.setattr(packing, "takes", lambda weight: False)
    if not can_pack(torch.ones(2, 2, dtype=torch.bfloat16)):
        pytest.skip("no such packed bf16 products here")
    shape = dict(hidden_size=64, intermediate_size=1536, head_dim=head)
    target = tiny_target(family, "lean", pack=True, dtype=torch.bfloat16, **shape)
    text, size = [*PROMPT, *PROMPT[::-1]], 8
    alone, cache = [], prefilled(target, text[:-size])
    for token in text[-size:]:
        alone.append(target.verify(target.plan([chain_tree([token])], cache), cache).logits[0])
        cache.commit(0, [])
    for decoys in range(4):  # siblings that lie between a token's ancestors in the cache
        tree, nodes = chain_among_decoys(text[-size:], decoys)
        cache.rewind(0, len(text) - size)
        found = target.verify(target.plan([tree], cache), cache).logits
        assert torch.equal(found[nodes], torch.stack(alone)), f"{decoys} decoys a level"


def chain_among_decoys(tokens: list[int], decoys: int) -> tuple[Tree, list[int]]:
    """A tree whose deepest path is `tokens`, with `decoys` other children before each; and that path's nodes."""
    ids, parents, depths, nodes = [tokens[0]], [-1], [0], [0]
    for depth, token in enumerate(tokens[1:], 1):
        parents += [nodes[-1]] * (decoys + 1)
        depths += [depth] * (decoys + 1)
        ids += [*((token + 1 + i) % 97 for i in range(decoys)), token]
        nodes.append(len(ids) - 1)
    return Tree(np.array(ids), np.array(parents), np.array(depths), np.ones(len(ids), np.float32)), nodes


def test_the_lean_path_is_chosen_where_it_fits_and_says_why_it_does_not() -> None:
    assert tiny_target("qwen3").path.name == "lean"
    assert tiny_target("gemma").path.name == "universal"
    with pytest.raises(BadInput, match="cannot take the lean path: GemmaForCausalLM"):
        tiny_target("gemma", "lean")


def test_fused_weights_are_the_models_own() -> None:
    model = tiny_model("qwen2")
    before = {name: p.clone() for name, p in model.named_parameters()}
    target = Target(model, "shared", path="lean")
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in before.values()), "weights are held once"
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()  # seen by the lean path, too
    cache = prefilled(target, PROMPT)
    torch.testing.assert_close(
        target.verify(target.plan([chain_tree([4])], cache), cache).logits[0],
        plain_logits(target, [*PROMPT, 4])[-1],
        **close("qwen2", "lean"),
    )


def test_a_token_of_a_mixture_reads_its_own_experts_and_a_wide_tree_nearly_all() -> None:
    target = tiny_target("qwen2_moe")
    stacked = sum(p.nbytes for n, p in target.model.named_parameters() if ".experts." in n)
    read = [target.work(width, 0).bytes - 2 * width * target.kv_bytes_per_token() for width in (1, 2, 30)]
    assert read == pytest.approx([target.weight_bytes - share * stacked for share in (0.5, 0.25, 0)])
    dense, three = tiny_target("llama"), tiny_target("llama").work(3, 10)
    assert dense.work(1, 0).bytes == dense.weight_bytes + 2 * dense.kv_bytes_per_token()
    heads = dense.config.num_attention_heads * dense.config.head_dim
    assert three.flops == 2 * 3 * dense.weight_bytes / 8 + 4 * 3 * 13 * heads * dense.num_layers
    assert dense.work(6, 10, 2).flops == 2 * three.flops, "nobody sees the other request's tokens"


def test_a_model_whose_code_takes_no_rows_of_slots_is_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("diffllama", **SHAPE)
    with pytest.raises(BadModel, match=r"DiffLlamaForCausalLM\) does not run with draftwood's cache.*not list"):
        Target(AutoModelForCausalLM.from_config(config), "other")


def test_llama_has_no_window_whatever_its_config_says() -> None:
    target = tiny_target("llama", "lean", sliding_window=4)
    tokens = [*PROMPT, *range(1, 30)]
    found = target.prefill(tokens, target.new_cache(64)).logits[-1]
    torch.testing.assert_close(found, plain_logits(target, tokens)[-1], **close("llama", "lean"))


@pytest.mark.parametrize("path", ["universal", "lean"])
def test_a_layer_may_be_tapped_twice(path: str) -> None:
    target = tiny_target("llama", path)
    target.tap((2, 0, 2))
    twice = target.prefill(PROMPT, target.new_cache(64)).taps
    target.tap((0, 2))
    once = target.prefill(PROMPT, target.new_cache(64)).taps
    assert twice is not None and once is not None
    first, last = once.chunk(2, dim=-1)
    assert torch.equal(twice, torch.cat([last, first, last], dim=-1))


def _another_head(model) -> None:
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False, dtype=model.dtype)


def _another_tensor(model) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = -weight.data


@pytest.mark.parametrize("replace", [_another_head, _another_tensor])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_a_lent_model_may_be_replaced_by_its_owner(replace, dtype: torch.dtype) -> None:
    model = tiny_model(dtype=dtype)
    target = Target(model, "lent", path="lean")
    target.release()
    replace(model)
    target.attach()
    found = target.prefill(PROMPT, target.new_cache(64)).logits[-1]
    near = close("llama", "lean") if dtype == torch.float64 else dict(rtol=0.1, atol=0.5)
    torch.testing.assert_close(found, plain_logits(target, PROMPT)[-1], **near)


def test_a_lent_model_may_be_moved_by_its_owner() -> None:
    model = tiny_model()
    target = Target(model, "lent", path="lean")
    target.release()
    model.to(torch.float32)  # new storages: the fused weights are no longer the model's
    target.attach()
    cache = prefilled(target, PROMPT)
    found = target.verify(target.plan([chain_tree([4])], cache), cache).logits[0]
    torch.testing.assert_close(found, plain_logits(target, [*PROMPT, 4])[-1], **close("llama", "lean"))
    model.model.layers[1].mlp.up_proj = torch.nn.Sequential(model.model.layers[1].mlp.up_proj)
    with pytest.raises(BadModel, match="up_proj is Sequential"):
        target.attach()
