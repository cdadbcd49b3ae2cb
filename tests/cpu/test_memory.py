"""Memory is counted as it will be taken, and refused before it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwood import llm, memory, registry
from draftwood.drafters.base import Request, state_bytes
from draftwood.drafters.d2sd import D2SDDrafter, Options
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.pooled import Pooled
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel, Machine
from draftwood.memory import Need
from tests.reference import FAMILIES, tiny_dflash, tiny_eagle3, tiny_model, tiny_target

CPU = torch.device("cpu")
PROMPT = [(11 * i + 5) % 97 for i in range(13)]


def engine(target, drafter, backend: str = "host") -> Engine:
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)
    return Engine(target, drafter, registry.policy("ddtree:7"), latency, backend=backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_as_they_are(family: str) -> None:
    model = tiny_model(family, torch.float32)
    counted = memory.target_bytes(model.config, torch.float32)
    assert counted == sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "mistral"])
def test_keys_and_values_are_counted_as_they_are(family: str) -> None:
    target = tiny_target(family, dtype=torch.float32, path="universal")
    cache = target.new_cache(capacity=40)
    target.prefill(PROMPT, cache)
    assert memory.cache_bytes(target.config, torch.float32, 40) == cache.nbytes()


def test_a_drafter_is_counted_before_and_after_it_is_loaded(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = tiny_dflash(target)
    placed = drafter.place(100)
    assert drafter.state_bytes(100) == placed.nbytes()
    config, weights = drafter.config, drafter._weights
    products = [weights.fc, weights.context_kv]
    products += [m for layer in weights.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    numbers = sum(m.in_features * m.out_features for m in products)
    assert config.block_parameters() + config.context_parameters() == numbers


def test_states_of_every_kind_are_counted(tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.float32)
    one = tiny_dflash(target)
    tiny_model(dtype=torch.float32, seed=5).save_pretrained(tmp_path)
    ngram, model = (registry.drafter(name, target) for name in ("ngram", f"draft-model:{tmp_path},depth=2,beam=3"))
    assert state_bytes(ngram, 100) == state_bytes(None, 100) == 0
    assert state_bytes(Pooled([one, ngram]), 100) == one.state_bytes(100) > 0
    assert state_bytes(D2SDDrafter(one, one, Options(), "d"), 100) == 2 * one.state_bytes(100)
    eagle = tiny_eagle3(target)
    opened = eagle.open(100)
    assert state_bytes(eagle, 100) == opened.features.nbytes + opened.kv.nbytes
    filled = model.open(10_000)
    model.extend(filled, PROMPT, None)
    model.draft([Request(filled, 7, 4)])
    most = state_bytes(model, 10_000)
    assert most == state_bytes(model, 256) > state_bytes(model, 255), "its window ends there"
    assert most <= filled.cache.nbytes() < 1.1 * most, "the lean path keeps ones beside the values"
    assert memory.request_need(target, Pooled([one, ngram]), 100, 8) == memory.request_need(target, one, 100, 8)


def test_only_named_checkpoints_have_weights(tmp_path: Path) -> None:
    assert registry.drafter_bytes("none", 2) == registry.drafter_bytes("ngram", 2) == 0
    with pytest.raises(BadInput, match="Unknown drafter"):
        registry.drafter_bytes("engram", 2)


def test_the_shipped_drafter_weighs_what_its_file_holds() -> None:
    from draftwood.drafters.checkpoint import read_draft_tokens, read_json, read_tensors
    from draftwood.embedded import EMBEDDED_DRAFTER

    stored = sum(t.numel() for t in read_tensors(EMBEDDED_DRAFTER).values())
    config = read_json(EMBEDDED_DRAFTER / "config.json")
    head = len(read_draft_tokens(EMBEDDED_DRAFTER, config["vocab_size"]) or ()) * config["hidden_size"]
    counted = DFlashDrafter.weight_bytes(str(EMBEDDED_DRAFTER), 1)
    assert 0 < stored < counted - head < 1.2 * stored, (
        "keys' and values' weights lie in memory twice, and a part of a head"
    )


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama", torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr("draftwood.loading.AutoModelForCausalLM.from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 50_000)
    with pytest.raises(BadInput, match=r"needs .* \(target 115\.1 KiB.*cache .*buffers .*48\.8 KiB are free on cpu"):
        llm.load(str(tmp_path), dtype="float32", device="cpu")


@pytest.mark.parametrize("backend", ["host", "device"])
def test_a_request_that_does_not_fit_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    made = engine(target, tiny_dflash(target), backend)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1_000_000)
    assert len(list(made.run(PROMPT, 2))) == 2
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(target, "new_row", lambda *a: pytest.fail("allocated"))
    made.device = type(made.device)(target, made.drafter)
    with pytest.raises(BadInput, match=r"A request of \d+ tokens needs .*cache .*1000 bytes are free on cpu; shorten"):
        next(made.run(PROMPT, 2))


def test_logits_that_a_drafter_learns_from_are_counted() -> None:
    target = tiny_target()
    made = engine(target, registry.drafter(["ngram", "recycling"], target), "device")
    assert len(list(made.run(PROMPT, 2))) == 2
    (stages,) = made.device._stages.values()
    with_them, without = (memory.request_need(target, made.drafter, 40, 8, keeps) for keeps in (True, False))
    assert with_them.total - without.total == stages.said.nbytes  # type: ignore[attr-defined]


def test_a_gpu_also_has_what_pytorch_keeps_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("memory_reserved", 3 << 30), ("memory_allocated", 2 << 30), ("mem_get_info", (2 << 30, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    assert memory.free_bytes(torch.device("cuda:0")) == 3 << 30


def test_where_nobody_knows_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.require(Need(target=2**60), CPU, "It", "no")


def test_linux_says_what_is_free() -> None:
    free = memory.free_bytes(CPU)
    assert free is None or 0 <= free < 2**50
