"""Whole answers under synthetic acceptance: tokens per second of the engine as users run it, prefill left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftwood import registry
from draftwood.bench.gpu.rates import Rates
from draftwood.bench.gpu.synthetic import ScriptedDrafter
from draftwood.engine import Engine
from draftwood.latency import LatencyModel, Machine
from draftwood.target import Target
from draftwood.trace import Round, seconds_by_verb, tau
from draftwood.tree import Tree

PLAIN = "autoregressive"
POLICIES = ("dflash", "ddtree:63", "ddtree:127", "bastion:255")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one policy."""

    policy: str
    tokens: list[int]
    seconds: float  # from the first token to the last
    rounds: list[Round]
    rates: Rates

    @property
    def tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / self.seconds

    @property
    def fair_tokens_per_s(self) -> float:
        """The same without the luck of the draws: counts the tokens that its trees emit on average under the rates."""
        trees = [r.draft[: r.n] for r in self.rounds if isinstance(r.draft, Tree)]
        undrafted = len(self.rounds) - len(trees)
        return (undrafted + sum(map(self.rates.expected_tau, trees))) / self.seconds

    def to_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "tokens_per_s": self.tokens_per_s,
            "fair_tokens_per_s": self.fair_tokens_per_s,
            "tau": tau(self.rounds),
            "round_s": self.seconds / len(self.rounds),
            "choose_s": seconds_by_verb(self.rounds)["choose"] / len(self.rounds),  # the host's; the device may wait
            "width": sum(r.width for r in self.rounds) / len(self.rounds),
        }


class Writer:
    """One engine that writes after the same prompt with every policy."""

    def __init__(self, target: Target, drafter: ScriptedDrafter, machine: Machine, context: int, tokens: int) -> None:
        latency = LatencyModel(machine, target.work, drafter.work)
        self._engine = Engine(target, drafter, registry.policy(PLAIN), latency, backend="device")
        self._drafter, self._tokens = drafter, tokens
        self._prompt = [(7919 * i + 13) % (target.vocab_size - 2) for i in range(context)]

    def measure(self, rates: Rates, policies: Sequence[str], repeats: int) -> Iterator[list[Answer]]:
        """Plain decoding and every policy, `repeats` times after one to warm up; each time another one is first."""
        rates = rates.to_depth(self._drafter.max_depth)
        truth = self._write(PLAIN, rates).tokens
        methods = [PLAIN, *policies]
        for repeat in range(1 + repeats):
            self._drafter.follow(truth, len(self._prompt), rates, seed=repeat)
            first = repeat % len(methods)
            answers = [self._write(policy, rates) for policy in (*methods[first:], *methods[:first])]
            if repeat:
                yield answers

    def _write(self, policy: str, rates: Rates) -> Answer:
        steps = self._engine.run(self._prompt, self._tokens, policy=registry.policy(policy))
        written, rounds, seconds = list(next(steps).tokens), [], 0.0
        for step in steps:
            written += step.tokens
            assert step.round is not None
            rounds.append(step.round)
            seconds += step.seconds  # the first round's, too, which begins before the first token is handed out
        return Answer(policy, written, seconds, rounds, rates)

    def memory(self) -> dict[str, int]:
        """Bytes of the static buffers, and of the graphs of all policies that have written."""
        return self._engine.device.nbytes()
