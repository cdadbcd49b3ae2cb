"""A drafter of your own: guess what followed the last token when it was written before."""

from __future__ import annotations

import numpy as np

import draftwood
from draftwood.drafters.base import Request
from draftwood.engine import Engine
from draftwood.latency import LatencyModel, Work
from draftwood.llm import LLM
from draftwood.tree import Lattice, Tree


class Bigram:
    """Its state is the list of tokens; a lattice of one candidate a depth is a chain."""

    name = "bigram"
    tap_layers = ()  # it reads nothing of the target
    max_depth = 4

    def open(self, capacity: int) -> list[int]:
        return []

    def extend(self, state: list[int], tokens: list[int], taps: object) -> None:
        state.extend(tokens)

    def rewind(self, state: list[int], length: int) -> None:
        del state[length:]

    def draft(self, requests: list[Request]) -> list[Lattice | Tree]:
        return [self.chain(request.state, request.root) for request in requests]

    def chain(self, seen: list[int], token: int) -> Lattice:
        followers, guesses = dict(zip(seen, [*seen[1:], token], strict=True)), []
        while token in followers and len(guesses) < self.max_depth:
            token = followers[token]
            guesses.append([token])
        tokens = np.array(guesses, np.int64).reshape(-1, 1)
        return Lattice(tokens, np.full(tokens.shape, np.log(0.5), np.float32))  # the chance it gives each guess

    def work(self, context: int) -> Work:
        return Work(flops=0.0, bytes=0.0, launches=0)


llm = draftwood.load(drafter="none")
target, machine, drafter = llm.engine.target, llm.engine.latency.machine, Bigram()
engine = Engine(target, drafter, llm.engine.policy, LatencyModel(machine, target.work, drafter.work))
answer = LLM(engine, llm.tokenizer).generate("Count from 1 to 20, then again.", max_new_tokens=64, policy="dflash")

print(answer.text)
print(f"\n{len(answer.token_ids)} tokens in {len(answer.rounds)} rounds")

# To use it by name, as in `draftwood generate --drafter bigram`, register it as an entry point: docs/extend.md.
