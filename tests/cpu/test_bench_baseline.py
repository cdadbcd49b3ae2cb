"""The bench's outside baseline: transformers' own generate, timed and stopped as the other methods are."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood import memory
from draftwood.bench.baseline import Transformers
from draftwood.errors import BadInput
from draftwood.packing import PackedLinear, pack_linears


class TinyLLM:
    """A real transformers model of two layers behind the few names that the baseline uses."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config).eval()
        self.target = SimpleNamespace(
            name="tiny",
            device=self.model.device,
            dtype=self.model.dtype,
            model=self.model,
            plain_transformers=lambda: nullcontext(self.model),
            weight_bytes=1000,
        )
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
        self.stop_ids: frozenset[int] = frozenset()

    def encode(self, _prompt: object) -> list[int]:
        return [3, 5, 7]


def test_generate_is_timed_from_the_first_token_and_greedy_at_temperature_zero() -> None:
    llm = TinyLLM()
    made = Transformers.beside(llm).generate("x", 6, 0.0, 0)  # type: ignore[arg-type]
    ids = torch.tensor([llm.encode("x")])
    for _ in range(6):
        ids = torch.cat([ids, llm.model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    assert made.token_ids == ids[0, 3:].tolist()
    assert made.text == " ".join(map(str, made.token_ids))
    assert made.prefill_s > 0 and made.decode_s > 0


def test_generate_stops_where_the_other_methods_stop() -> None:
    llm = TinyLLM()
    free = Transformers.beside(llm).generate("x", 6, 0.0, 0).token_ids  # type: ignore[arg-type]
    llm.stop_ids = frozenset([free[2]])
    stopped = Transformers.beside(llm).generate("x", 6, 0.0, 0).token_ids  # type: ignore[arg-type]
    assert stopped == free[: free.index(free[2]) + 1]


def test_generate_samples_by_seed_and_leaves_the_random_state_alone() -> None:
    llm = TinyLLM()
    state = torch.random.get_rng_state()
    texts = [Transformers.beside(llm).generate("x", 12, 2.0, seed).text for seed in (1, 1, 2)]  # type: ignore[arg-type]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(state, torch.random.get_rng_state())


def test_packed_weights_are_not_what_users_have(tmp_path) -> None:
    llm = TinyLLM()
    llm.model.save_pretrained(tmp_path)
    llm.target.name = str(tmp_path)
    expected = Transformers.beside(llm).generate("x", 6).token_ids
    pack_linears(llm.model)
    if not any(isinstance(module, PackedLinear) for module in llm.model.modules()):
        pytest.skip("this processor packs nothing")
    outside = Transformers.beside(llm)
    assert outside.copy is not None and outside.generate("x", 6).token_ids == expected
    assert not any(isinstance(module, PackedLinear) for module in outside.copy.modules())


def test_a_copy_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = TinyLLM()
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10)
    assert Transformers.beside(llm).copy is None, "the target's own model is lent"  # type: ignore[arg-type]
    pack_linears(llm.model)
    if not any(isinstance(module, PackedLinear) for module in llm.model.modules()):
        pytest.skip("this processor packs nothing")
    with pytest.raises(BadInput, match=r"copy of the target .* needs .* 10 bytes are free on cpu"):
        Transformers.beside(llm)  # type: ignore[arg-type]
