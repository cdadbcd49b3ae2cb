"""The outside baseline: `model.generate` of transformers as its users call it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftwood.memory import Need, require
from draftwood.packing import PackedLinear

if TYPE_CHECKING:
    from draftwood.llm import LLM, Messages


@dataclass(slots=True)
class TokenClock:
    """A streamer for `generate` that only notes when each token came."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Transformers:
    """A target's model as users of transformers run it: its usual attention, weights as they were loaded."""

    llm: LLM
    copy: Any = None  # None: the target's own model can be lent with its usual attention

    @classmethod
    def beside(cls, llm: LLM) -> Transformers:
        """Shares the target's weights, unless draftwood has packed them: users' weights are not packed."""
        target = llm.target
        if not any(isinstance(module, PackedLinear) for module in target.model.modules()):
            return cls(llm)
        need = Need(target=target.weight_bytes)
        require(need, target.device, "The copy of the target that transformers runs", "compare on a larger machine")
        name = str(Path(target.name).expanduser()) if target.name.startswith("~") else target.name
        copy: Any = type(target.model).from_pretrained(name, dtype=target.dtype)
        return cls(llm, copy.to(target.device).eval())

    def model(self) -> AbstractContextManager[Any]:
        return self.llm.target.plain_transformers() if self.copy is None else nullcontext(self.copy)

    def generate(self, prompt: str | Messages, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Answer:
        """`model.generate`, greedy at temperature 0, else plain sampling.

        Stop tokens are those of the other methods. Penalties and cut-offs that the model's generation config may bring
        are switched off, as the other methods do. The random state of torch is left as it was.
        """
        device, stops = self.llm.target.device, sorted(self.llm.stop_ids)
        ids = torch.tensor([self.llm.encode(prompt)], device=device)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
        clock = TokenClock()
        with self.model() as model, torch.random.fork_rng([device] if device.type == "cuda" else []):
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
        text = str(self.llm.tokenizer.decode(token_ids, skip_special_tokens=True))
        return Answer(text, token_ids, clock.times[1] - start, clock.ended - clock.times[1])
