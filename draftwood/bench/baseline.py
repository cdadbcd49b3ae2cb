"""The outside baseline: `model.generate` of transformers as its users call it, on the same weights."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftwood.llm import LLM


@dataclass(slots=True)
class TokenClock:
    """A streamer for `generate` that only notes when each token was there."""

    times: list[float] = field(default_factory=list)  # of the prompt, then of every token
    ended: float = 0.0

    def put(self, _value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self.ended = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Answer:
    """What `generate` wrote; times are those of a `Generation`."""

    text: str
    token_ids: list[int]
    prefill_s: float
    decode_s: float


def transformers_generate(
    llm: LLM, prompt: str | list[dict[str, str]], max_new_tokens: int, temperature: float, seed: int
) -> Answer:
    """`model.generate` with its usual attention; greedy at temperature 0, else plain sampling.

    Stop tokens are those of the other methods; penalties and cut-offs that the model's generation config may
    bring are switched off, as they are there. The random state of torch is left as it was.
    """
    device = llm.target.device
    ids = torch.tensor([llm.encode(prompt)], device=device)
    stops = sorted(llm.stop_ids)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    clock = TokenClock()
    generators = [device] if device.type == "cuda" else []
    with llm.target.plain_transformers() as model, torch.random.fork_rng(generators):
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            repetition_penalty=1.0,
            eos_token_id=stops or None,
            pad_token_id=stops[0] if stops else 0,  # one prompt needs no padding; saves a warning
            streamer=clock,
            **sampling,
        )
    token_ids = output[0, ids.shape[1] :].tolist()
    text = llm.tokenizer.decode(token_ids, skip_special_tokens=True)
    return Answer(text, token_ids, clock.times[1] - start, clock.ended - clock.times[1])
