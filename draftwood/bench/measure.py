"""The measuring loop: prompt by prompt, every method in turn, none of them always first.

A method is a policy with a drafter. All of them run on one target, whose weights exist once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from draftwood.bench.baseline import Transformers
from draftwood.bench.options import check_policies
from draftwood.bench.partings import tie
from draftwood.bench.prompts import Prompt
from draftwood.bench.stats import PLAIN, TRANSFORMERS, MethodStats, Run, compare, jsonable, summarize, what_if
from draftwood.errors import BadInput

if TYPE_CHECKING:
    from draftwood.llm import LLM, Messages

WARMUP_TOKENS = 16
HEADLINES = (
    "tokens_per_s",
    "speedup_vs_transformers",
    "speedup_vs_plain",
    "tau",
    "mean_width",
    "identical",
    "prompts",
)
Started = Callable[[Prompt, str], None]
Finished = Callable[[Sequence[Run]], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What all methods are asked for."""

    max_new_tokens: int = 128  # per turn
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The runs and the figures drawn from them; without any finished turn the tables are empty."""

    runs: list[Run]
    policies: dict[str, MethodStats]  # by method, both baselines included
    datasets: dict[str, dict[str, MethodStats]]  # the same for the prompts of each data set
    what_if: dict[str, dict[int, dict[str, Any]]]  # by method and width, see `stats.what_if`
    partial: bool  # interrupted: holds the turns that were finished before
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by method: its policy and its drafter
    against: Mapping[str, Any] = field(default_factory=dict)  # by data set and method, see `drafters_compared`

    @classmethod
    def of(cls, runs: list[Run], methods: Mapping[str, Method], seed: int, partial: bool) -> Summary:
        if not runs:
            return cls([], {}, {}, {}, partial)
        policies = summarize(runs, list(methods), seed)
        sets = dict.fromkeys(r.dataset for r in runs)
        datasets = {n: summarize([r for r in runs if r.dataset == n], list(methods), seed) for n in sets}
        rounds = {m: [r for run in runs if run.method == m for r in run.rounds] for m in methods}
        tables = {m: what_if(rounds[m], policies[PLAIN].tokens_per_s) for m in methods}
        names = {name: {"policy": m.policy, "drafter": m.drafter} for name, m in methods.items()}
        filled = {m: table for m, table in tables.items() if table}
        return cls(runs, policies, datasets, filled, partial, names, drafters_compared(runs, methods, seed))

    def to_json(self) -> dict[str, Any]:
        full = {name: {**self.names[name], **stats.to_json()} for name, stats in self.policies.items()}
        return {
            "policies": full,
            "partial": self.partial,
            "datasets": {
                dataset: {name: headline(stats) for name, stats in table.items()}
                for dataset, table in self.datasets.items()
            },
            "against": jsonable(self.against),
            "what_if": {
                "note": "extrapolation: the time of a round is measured, tau is assumed",
                "by_policy_and_width": jsonable(self.what_if),
            },
        }


def drafters_compared(runs: Sequence[Run], methods: Mapping[str, Method], seed: int) -> dict[str, dict[str, Any]]:
    """Each method over the one with the same policy and the first drafter: on all prompts and on each data set's."""
    first = {method.policy: name for name, method in reversed(list(methods.items()))}
    pairs = [(name, first[method.policy]) for name, method in methods.items() if first[method.policy] != name]
    sets: dict[str, Sequence[Run]] = {"all": runs} if pairs else {}
    if pairs and len(names := dict.fromkeys(r.dataset for r in runs)) > 1:
        sets |= {name: [r for r in runs if r.dataset == name] for name in names}

    def over(some: Sequence[Run], name: str, base: str) -> dict[str, Any]:
        ours, theirs = ([r for r in some if r.method == method] for method in (name, base))
        return {"of": base, **compare(ours, theirs, seed)}

    return {dataset: {name: over(some, name, base) for name, base in pairs} for dataset, some in sets.items()}


def headline(stats: MethodStats) -> dict[str, Any]:
    full = stats.to_json()
    return {name: full[name] for name in HEADLINES}


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """What a row of the tables is about: a policy, a drafter by its label, and the LLM that runs them."""

    policy: str
    drafter: str
    llm: LLM


def method_names(policies: Sequence[str], drafters: Sequence[str] = ()) -> tuple[str, ...]:
    """Both baselines, then each policy once; with several drafters, each policy with each drafter: `bastion@ngram`."""
    drafting = [p for p in dict.fromkeys(policies) if p not in (TRANSFORMERS, PLAIN)]
    named = [f"{p}@{d}" for d in dict.fromkeys(drafters) for p in drafting] if len(drafters) > 1 else drafting
    return TRANSFORMERS, PLAIN, *named


def methods_of(llm: LLM, policies: Sequence[str], rivals: Mapping[str, LLM]) -> dict[str, Method]:
    """The methods by their `method_names`. The baselines run without any drafter, and pay for none."""
    drafters = rivals or {label(llm.drafter.name) if llm.drafter else "none": llm}
    drafting = [p for p in dict.fromkeys(policies) if p not in (TRANSFORMERS, PLAIN)]
    plain = llm.with_drafter("none")
    rows = [Method(p, "none", plain) for p in (TRANSFORMERS, PLAIN)]
    rows += [Method(p, d, each) for d, each in drafters.items() for p in drafting]
    return dict(zip(method_names(policies, list(drafters)), rows, strict=True))


def label(drafter: str) -> str:
    """A drafter's spec without the folders that its files lie in."""
    return re.sub(r"[^:,+=]*/", "", drafter)


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    policies: Sequence[str],
    settings: Settings | None = None,
    *,
    rivals: Mapping[str, LLM] | None = None,
    started: Started = lambda prompt, method: None,
    finished: Finished = lambda runs: None,
) -> Summary:
    """Run both baselines and `policies` on every turn of every prompt, interleaved.

    `rivals` are LLMs with the same target by the labels of their drafters; every policy then runs with each of them
    instead of with `llm`. `started` is called before each run, `finished` gets the runs of each turn. Ctrl-C ends the
    measuring, not the program: the summary then covers the finished turns and is marked partial.

    Raises
    ------
    BadInput: an unknown policy, or a conversation that may exceed the context window.
    """
    settings = settings or Settings()
    check_policies(policies)
    check_room(llm, prompts, settings.max_new_tokens)
    methods = methods_of(llm, policies, rivals or {})
    names, runs = list(methods), list[Run]()
    partial = False
    try:
        theirs = Transformers.beside(llm)
        warm = Asker.of(methods, theirs, settings)
        warm_up(warm, prompts[0], names)
        ask = Asker.of(warm.methods, theirs, settings)  # keeps what was learned about time
        for index, prompt in enumerate(prompts):
            for turn in conversation(ask, prompt, rotated(names, index), started):
                finished(turn)
                runs += map(without_drafts, turn)
    except KeyboardInterrupt:
        partial = True
    return Summary.of(runs, methods, settings.seed, partial)


@dataclass(frozen=True, slots=True, eq=False)
class Asker:
    """Both engines and what they are asked for. What drafters learn from texts, each method learns for itself."""

    methods: dict[str, Method]
    transformers: Transformers
    settings: Settings

    @classmethod
    def of(cls, methods: Mapping[str, Method], transformers: Transformers, settings: Settings) -> Asker:
        fresh = {name: replace(method, llm=method.llm.fresh()) for name, method in methods.items()}
        return cls(fresh, transformers, settings)

    def __call__(self, prompt: Prompt, turn: int, messages: Messages, method: str) -> Run:
        """One method's answer to `messages`."""
        question = asked(messages)
        where = (prompt.id, prompt.dataset, turn, method)
        size, heat, seed = self.settings.max_new_tokens, self.settings.temperature, self.settings.seed
        if method == TRANSFORMERS:
            theirs = self.transformers.generate(question, size, heat, seed)
            times = theirs.prefill_s, theirs.decode_s
            return Run(*where, theirs.text, len(theirs.token_ids), *times, token_ids=theirs.token_ids)
        llm, policy = self.methods[method].llm, self.methods[method].policy
        ours = llm.generate(question, max_new_tokens=size, temperature=heat, seed=seed, policy=policy)
        return Run(
            *where,
            ours.text,
            len(ours.token_ids),
            ours.prefill_s,
            ours.decode_s,
            ours.rounds,
            prompt_tokens=ours.prompt_tokens,
            token_ids=ours.token_ids,
        )

    def explained(self, run: Run, plain: Run, messages: Messages) -> Run:
        """The run with `tie` filled in, if its text should be that of `plain` and is not. Takes a prefill, untimed."""
        if run.identical is not False or self.settings.temperature > 0:
            return run
        llm = self.methods[PLAIN].llm
        prompt = llm.encode(asked(messages))
        return replace(run, tie=tie(llm.target, prompt, plain.token_ids, run.token_ids))


def asked(messages: Messages) -> str | Messages:
    """A first message as text, which a model without a chat template can continue."""
    return messages[0]["content"] if len(messages) == 1 else messages


def conversation(ask: Asker, prompt: Prompt, methods: Sequence[str], started: Started) -> Iterator[list[Run]]:
    """The runs of each turn. Later turns follow plain decoding's answers, so that all methods read the same."""
    messages: Messages = []
    for turn, question in enumerate(prompt.turns):
        messages.append({"role": "user", "content": question})
        runs = {}
        for method in methods:
            started(prompt, method)
            runs[method] = ask(prompt, turn, messages, method)
        yield [ask.explained(run, runs[PLAIN], messages) for run in compared(runs, ask.settings.temperature)]
        messages.append({"role": "assistant", "content": runs[PLAIN].text})


def without_drafts(run: Run) -> Run:
    """The run without its drafts, which figures do not need: those of thousands of rounds would fill a gigabyte."""
    return replace(run, rounds=[replace(r, draft=None) for r in run.rounds])


def compared(runs: dict[str, Run], temperature: float) -> list[Run]:
    """The runs with `identical` filled in: unknown for transformers at T > 0, whose draws are its own."""
    text = runs[PLAIN].text
    unknown = {TRANSFORMERS} if temperature > 0 else set()
    return [run if m in unknown else replace(run, identical=run.text == text) for m, run in runs.items()]


def rotated(methods: Sequence[str], index: int) -> list[str]:
    """`methods`, beginning with another one for every `index`."""
    first = index % len(methods)
    return [*methods[first:], *methods[:first]]


def turns(methods: Sequence[str], tokens: int, seed: int, each: int = 1) -> Iterator[tuple[str, int]]:
    """Which method is next, and how many tokens (of each user) it should have written after its turn: `each` more than
    before, in a random order.

    In longer turns a machine's changing speed favours one of two methods that do the same. In a fixed order each method
    would find the caches as the same other one left them.
    """
    order = Random(seed)
    for goal in range(each, tokens + each, each):
        yield from ((method, min(goal, tokens)) for method in order.sample(methods, len(methods)))


def warm_up(ask: Asker, prompt: Prompt, methods: Sequence[str]) -> None:
    """One short answer of every method, not recorded: first calls allocate, compile and page in."""
    short = replace(ask.settings, max_new_tokens=min(WARMUP_TOKENS, ask.settings.max_new_tokens))
    for method in methods:
        replace(ask, settings=short)(prompt, 0, [{"role": "user", "content": prompt.turns[0]}], method)


def check_room(llm: LLM, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse before any work a conversation that may not fit the context window."""
    limit = llm.target.context_limit
    for prompt in prompts:
        needed = len(llm.encode(prompt.turns[0] if len(prompt.turns) == 1 else unanswered(prompt)))
        needed += max_new_tokens * len(prompt.turns)
        if needed > limit:
            raise BadInput(
                f"Prompt {prompt.id} may need {needed} tokens with its answers, but {llm.target.name} has a "
                f"context window of {limit}; lower --max-new-tokens or leave the prompt out."
            )


def unanswered(prompt: Prompt) -> Messages:
    """The whole conversation with empty answers."""
    turns = [[{"role": "user", "content": t}, {"role": "assistant", "content": ""}] for t in prompt.turns]
    return [message for turn in turns for message in turn][:-1]
