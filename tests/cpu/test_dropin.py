"""`model.generate(custom_generate=...)`: what transformers would have written, with its own processors."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import draftwood
from draftwood.dropin import CustomGenerate, drawing
from draftwood.engine import Engine
from draftwood.errors import BadInput, BadModel
from draftwood.sampling import Sampler, Sampling
from tests.reference import tiny_model

IDS = torch.tensor([[(5 * i + 2) % 97 for i in range(11)] * 2])


@pytest.fixture
def model():
    return tiny_model("qwen3_sliding")


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(repetition_penalty=1.4),
        dict(no_repeat_ngram_size=3),
        dict(bad_words_ids=[[4], [7, 8]]),
        dict(eos_token_id=[3, 50], pad_token_id=0),
        dict(min_new_tokens=5, eos_token_id=list(range(40)), pad_token_id=0),
        dict(max_length=30, max_new_tokens=None),
    ],
)
@pytest.mark.parametrize("policy", ["ddtree:6", "bastion"])
def test_greedy_output_is_that_of_generate(model, options: dict, policy: str) -> None:
    asked = dict(input_ids=IDS, do_sample=False, max_new_tokens=25) | options
    expected = model.generate(**asked)
    ours = model.generate(**asked, custom_generate=draftwood.custom_generate("ngram", policy))
    assert ours.tolist() == expected.tolist()
    assert model.generate(**asked).tolist() == expected.tolist(), "the model must be left as it was"


def test_sampling_obeys_the_processors_and_the_torch_seed(model) -> None:
    generate = draftwood.custom_generate("ngram", "ddtree:6")
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = model.generate(IDS, do_sample=True, top_k=2, max_new_tokens=15, custom_generate=generate)
        texts.append(out[0].tolist())
        logits = model(out).logits[0, IDS.shape[1] - 1 : -1]
        allowed = logits.topk(2).indices
        assert (allowed == out[0, IDS.shape[1] :, None]).any(-1).all()
    assert texts[0] == texts[1] != texts[2]


def test_drafts_foresee_draws_by_the_temperature_of_the_processors(model, monkeypatch) -> None:
    heats, run = [], Engine.run
    monkeypatch.setattr(
        Engine, "run", lambda self, *args, **options: heats.append(options["heat"]) or run(self, *args, **options)
    )
    for options in ({"typical_p": 0.9}, {"typical_p": 0.9, "temperature": 0.4}, {"temperature": 0.4}):
        model.generate(
            IDS, do_sample=True, max_new_tokens=3, custom_generate=draftwood.custom_generate("ngram"), **options
        )
    assert heats == [1.0, 0.4, None], "the last one is a parameter, which says so itself"
    assert Sampler(Sampling(1.0), IDS[0].tolist(), heat=0.4).ahead(2).heat == 0.4


@pytest.mark.parametrize(
    "warpers",
    [
        [],
        [TemperatureLogitsWarper(0.6)],
        [TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
        [TemperatureLogitsWarper(1.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    ],
)
def test_the_usual_processors_are_parameters_of_the_same_distribution(warpers: list) -> None:
    sampling, rule = drawing(LogitsProcessorList(warpers), True, torch.device("cpu"))
    scores = 3 * torch.randn(200, generator=torch.Generator().manual_seed(1))
    theirs = LogitsProcessorList(warpers)(IDS, scores[None])[0].double().softmax(-1)
    ours = Sampler(sampling, IDS[0].tolist(), rule).process(scores).double().softmax(-1)
    assert rule is None and sampling.temperature > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("processors", "samples"),
    [
        ([TopKLogitsWarper(9), TemperatureLogitsWarper(0.6)], True),  # in another order
        ([TemperatureLogitsWarper(0.6), TemperatureLogitsWarper(0.6)], True),
        ([TopPLogitsWarper(0.9, min_tokens_to_keep=3)], True),
        ([TopKLogitsWarper(9, filter_value=-100.0)], True),
        ([TypicalLogitsWarper(0.9)], True),
        ([TopPLogitsWarper(0.0)], True),  # which keeps one token, and is no top-p of ours
        ([TopKLogitsWarper(9)], False),
    ],
)
def test_all_others_are_applied_as_they_are(processors: list, samples: bool) -> None:
    sampling, rule = drawing(LogitsProcessorList(processors), samples, torch.device("cpu"))
    assert rule is not None and sampling.temperature == float(samples) and sampling.top_k == 0
    scores = torch.randn(50)
    assert rule([1, 2], scores).tolist() == LogitsProcessorList(processors)(IDS, scores[None])[0].tolist()


def test_the_output_record(model) -> None:
    asked = dict(inputs=IDS, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    out = model.generate(**asked, custom_generate=draftwood.custom_generate("ngram"))
    assert out.sequences.tolist() == model.generate(**asked).sequences.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_the_model_is_left_to_its_owner(family: str) -> None:
    """Parameters stay those that an optimizer knows, and a mistake leaves nothing behind."""
    model = tiny_model(family).train()
    parameters = dict(model.named_parameters())
    expected = model.generate(IDS, max_new_tokens=5, do_sample=False).tolist()
    with pytest.raises(BadModel):
        model.generate(IDS, max_new_tokens=5, custom_generate=draftwood.custom_generate("/nowhere"))
    ours = model.generate(IDS, max_new_tokens=5, do_sample=False, custom_generate=draftwood.custom_generate("ngram"))
    assert ours.tolist() == expected == model.generate(IDS, max_new_tokens=5, do_sample=False).tolist()
    assert model.training and all(p is parameters[name] and p.requires_grad for name, p in model.named_parameters())
    model(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in parameters.values())


def test_what_its_owner_trains_in_place_counts() -> None:
    """Norms of queries and keys, too, of which the lean path keeps a copy."""
    model, fast = tiny_model("qwen3"), draftwood.custom_generate("ngram")
    asked = dict(inputs=IDS, max_new_tokens=12, do_sample=False)
    before = model.generate(**asked, custom_generate=fast).tolist()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.mul_(torch.linspace(-9, 9, len(norm.weight), dtype=norm.weight.dtype))
    expected = model.generate(**asked).tolist()
    assert model.generate(**asked, custom_generate=fast).tolist() == expected != before


def test_threads_may_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls change the model while they write, so they take turns."""
    model, generate = tiny_model("llama", dtype=torch.float32), draftwood.custom_generate("ngram", "ddtree:6")
    prompts, inside, answer = [IDS[:, start:] for start in range(4)], threading.Lock(), CustomGenerate._generate

    def alone(*args: object) -> object:
        assert inside.acquire(blocking=False), "another thread's call is under way"
        try:
            time.sleep(0.01)
            return answer(*args)  # type: ignore[arg-type]
        finally:
            inside.release()

    def write(ids: torch.Tensor) -> list[int]:
        return model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=generate)[0].tolist()

    expected = [model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist() for ids in prompts]
    monkeypatch.setattr(CustomGenerate, "_generate", alone)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(write, prompts)) == expected


def test_every_module_is_in_the_mode_that_it_was_in() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    model.generate(IDS, max_new_tokens=3, do_sample=False, custom_generate=draftwood.custom_generate("ngram"))
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_prompt_that_fills_the_window_is_called_so() -> None:
    model = tiny_model("llama", max_position_embeddings=16)
    with pytest.raises(BadInput, match="context window of 16"):
        model.generate(IDS.repeat(1, 9), max_new_tokens=3, custom_generate=draftwood.custom_generate("ngram"))


def test_processors_may_write_into_the_scores() -> None:
    class Banned(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, 4:] = -torch.inf
            return scores

    model = tiny_model("qwen3", dtype=torch.float32)
    asked = dict(inputs=IDS, max_new_tokens=9, do_sample=False, logits_processor=LogitsProcessorList([Banned()]))
    ours = model.generate(**asked, custom_generate=draftwood.custom_generate("ngram"))
    assert ours.tolist() == model.generate(**asked).tolist()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (dict(attention_mask=(torch.arange(IDS.shape[1]) > 2)[None].long()), "padding"),
        (dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
        (dict(penalty_alpha=0.6, top_k=4), "samples or takes the likeliest token; leave out penalty_alpha"),
        (dict(dola_layers="low"), "leave out dola_layers"),
    ],
)
def test_what_is_not_used_is_refused(model, more: dict, says: str) -> None:
    whole = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
    generate = draftwood.custom_generate("ngram")
    assert model.generate(IDS, **whole, custom_generate=generate).shape[1] == IDS.shape[1] + 3
    with pytest.raises(BadInput, match=says):
        model.generate(IDS, **{**whole, **more}, custom_generate=generate)


def test_no_processor_is_asked_behind_the_end_of_the_text() -> None:
    """Of `prefix_allowed_tokens_fn` that often fails: what is allowed there is nothing."""
    model, text = tiny_model("llama", dtype=torch.float32, eos_token_id=2, pad_token_id=2), [11, 12, 13, 14, 15, 2]
    prompt = torch.tensor([[5, 6, *text, 7, 8, *text, 9, 9]])  # so that the end is drafted, too

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return text[len(ids) - prompt.shape[1] :][:1]

    asked = dict(inputs=prompt, max_new_tokens=20, do_sample=False, prefix_allowed_tokens_fn=allowed)
    generate = draftwood.custom_generate("ngram", "ddtree:16")
    assert model.generate(**asked)[0, prompt.shape[1] :].tolist() == text
    for _ in range(3):
        assert model.generate(**asked, custom_generate=generate)[0, prompt.shape[1] :].tolist() == text


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
def test_more_than_one_text_is_refused(model, name: str) -> None:
    asked = {name: 2, "max_new_tokens": 2, "do_sample": True}
    with pytest.raises(BadInput, match=f"one text, without a beam search; leave out {name}"):
        model.generate(IDS, **asked, custom_generate=draftwood.custom_generate("ngram"))


def test_a_batch_is_refused(model) -> None:
    with pytest.raises(BadInput, match="one sequence"):
        model.generate(IDS.repeat(2, 1), max_new_tokens=2, custom_generate=draftwood.custom_generate("ngram"))
