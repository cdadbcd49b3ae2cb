"""Rounds and runs of given seconds, prompts, and a model that answers a fixed text: what the bench measures."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from draftwood.bench import measure
from draftwood.bench.measure import Settings, Summary
from draftwood.bench.prompts import Prompt
from draftwood.bench.stats import PLAIN, TRANSFORMERS, Run
from draftwood.footprint import Footprint
from draftwood.latency import Machine, Work
from draftwood.trace import Round

TREE = "ddtree:4"
METHODS = (TRANSFORMERS, PLAIN, TREE)


def a_round(accepted: int = 1, n: int = 4, seconds: float = 0.04, predicted: float = 0.05) -> Round:
    """Three quarters verify, one quarter commit."""
    by_verb = {"verify": 0.75 * seconds, "commit": 0.25 * seconds}
    parts = {"verify": 0.8 * predicted, "aux": 0.2 * predicted} if predicted else {}
    return Round(9, n, n > 0, np.ones(n, np.float32), np.ones(n, np.int64), range(1, 1 + accepted), by_verb, parts)


def a_run(prompt: str, method: str, tokens: int, decode_s: float, **more: object) -> Run:
    return Run(prompt, "set", 0, method, "text", tokens, 0.5, decode_s, **more)  # type: ignore[arg-type]


class FakeLLM:
    """Answers a fixed text at a fixed speed per policy, and remembers what it was asked."""

    def __init__(self, texts: dict[str, str] | None = None, interrupt_at: int | None = None) -> None:
        self.texts, self.interrupt_at = texts or {}, interrupt_at
        self.asked: list[tuple[str, object]] = []
        work = Work(flops=2e9, bytes=1e9, launches=7)
        self.target = SimpleNamespace(
            name="fake",
            path=SimpleNamespace(kind="lean"),
            context_limit=400,
            device=torch.device("cpu"),
            dtype=torch.float32,
            work=lambda tokens, context: work,
            footprint=Footprint(1e6, 4, 64, 2, 512, 30),
        )
        self.drafter = None
        machine = Machine("here", peak=1e12, bandwidth=2e10, launch_s=1.0)
        self.engine = SimpleNamespace(latency=SimpleNamespace(machine=machine), tap=lambda: None)
        self.loaded: list[str] = []

    def fresh(self) -> FakeLLM:
        return self

    def with_drafter(self, drafter: str) -> FakeLLM:
        self.loaded.append(drafter)
        return self

    def encode(self, prompt: object) -> list[int]:
        return [1] * len(str(prompt).split())

    def answer(self, method: str, question: object, size: int) -> SimpleNamespace:
        self.asked.append((method, question if isinstance(question, str) else [dict(m) for m in question]))
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        seconds = {TRANSFORMERS: 0.4, PLAIN: 0.2}.get(method, 0.1)
        rounds = [] if method == TRANSFORMERS else [a_round()]
        text = self.texts.get(method, "the answer")
        times = {"prefill_s": 0.1, "decode_s": seconds * (size - 1)}
        return SimpleNamespace(text=text, token_ids=list(range(size)), prompt_tokens=5, rounds=rounds, **times)

    def generate(self, question: object, *, max_new_tokens: int, policy: str, **_: object) -> SimpleNamespace:
        return self.answer(policy, question, max_new_tokens)


def some_prompts(count: int, turns: int = 1) -> list[Prompt]:
    asked = [tuple(f"question {i} {turn}" for turn in range(turns)) for i in range(count)]
    return [Prompt(f"p{i}", f"set{i % 2}", questions) for i, questions in enumerate(asked)]


def run_fake(llm: FakeLLM, count: int = 6, turns: int = 1, **options: object) -> Summary:
    settings = Settings(max_new_tokens=20, **options)  # type: ignore[arg-type]
    return measure.measure(llm, some_prompts(count, turns), [TREE], settings)  # type: ignore[arg-type]
