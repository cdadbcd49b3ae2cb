"""Tells a user, once and in one sentence, that a drafter does far worse here than it should, and the likely reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from draftwood.trace import Round

ENOUGH = 128  # latest drafted rounds; before there are as many, there is no opinion
FAR = 0.3  # share of the expected draft tokens: a hard text may reach 0.4 where nothing is wrong
CHAIN = 4  # nodes: a tree of so many is at least as good as most of a chain
LONG = 4096  # tokens of context that drafters are rarely trained for


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What may explain a low acceptance."""

    temperature: float = 0.0
    thinking: bool = False  # the answer has a thinking part
    templated: bool = True  # the prompt went through the chat template, or there is none


@dataclass(slots=True)
class Watchdog:
    """Watches the rounds of one target and drafter; the drafter's card promises `promise` tokens a round."""

    promise: float | None = None
    told: bool = False
    _latest: deque[Round] = field(default_factory=lambda: deque(maxlen=ENOUGH))

    def watch(self, rounds: Iterable[Round], where: Circumstances) -> str | None:
        """The sentence, but only the first time that there is reason for it."""
        self._latest.extend(r for r in rounds if r.n)
        if self.told or len(self._latest) < ENOUGH:
            return None
        expected, accepted = self._compared()
        if accepted >= FAR * expected:
            return None
        self.told = True
        context = float(np.median([r.context for r in self._latest]))
        return (
            f"The drafter gets {1 + accepted:.2f} tokens a round here, where {self._source()} promises "
            f"{1 + expected:.2f}: {reason(where, context)}"
        )

    def _compared(self) -> tuple[float, float]:
        """Draft tokens a round: expected and accepted."""
        wide = [r for r in self._latest if r.n >= CHAIN]
        if self.promise is not None and len(wide) > ENOUGH / 2:
            return self.promise - 1, float(np.mean([r.accepted for r in wide]))
        expected = float(np.mean([r.mass.sum() for r in self._latest]))
        return expected, float(np.mean([r.accepted for r in self._latest]))

    def _source(self) -> str:
        wide = sum(r.n >= CHAIN for r in self._latest)
        return "its card" if self.promise is not None and wide > ENOUGH / 2 else "its own confidence"


def reason(where: Circumstances, context: float) -> str:
    """The likeliest cause and what to do about it."""
    if not where.templated:
        return "the prompt has no chat template, which drafters are trained with; leave --raw out if you can."
    if context > LONG:
        return (
            f"contexts of some {context:.0f} tokens are longer than drafters are trained for; give it a sliding_window "
            "if its config.json has none (docs/train.md, long contexts), or try the drafter ngram."
        )
    if where.thinking:
        return "it was probably not trained on thinking answers; switch thinking off, or train one on such answers."
    if where.temperature > 0:
        return f"temperature {where.temperature:g} makes the text hard to guess; a lower one is faster."
    return (
        "it was probably made for another version of the target, such as before fine-tuning; compare with the drafter "
        "ngram, or train one with draftwood train."
    )
