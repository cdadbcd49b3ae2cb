"""Replay: what a policy would have done with recorded drafts, under any prices.

The target writes the same text whatever is drafted, so a draft recorded at some token tells how far any tree grown
from it would have been accepted. Where a policy drafts at a token that has no recorded draft, the replay goes on at the
next token that has one. Skipped tokens are counted apart; neither they nor their time count in the result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from draftwood.acceptance import AcceptanceModel
from draftwood.grow import grow
from draftwood.limits import Asked, asked, grown
from draftwood.policies.base import OPTIMISM, Costs, Policy
from draftwood.policies.record import Record
from draftwood.recording import Answer
from draftwood.trace import Round
from draftwood.tree import Lattice, Tree, matched, root_only, shared

RECORD = "record"  # the policy that drafts after every token


class Prices(Protocol):
    """Gives the costs of rounds whose drafter is asked for so many positions."""

    def costs(self, n_max: int, context: int, positions: int) -> Costs: ...


@dataclass(slots=True)
class Replayed:
    """What a policy did in a replay."""

    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0  # tokens that were skipped for want of a recorded draft: not in `tokens`
    clipped: int = 0  # rounds whose tree took all recorded nodes, or all children of one: it might have wanted more
    rounds: list[Round] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """One text and the drafts recorded along it, by context length."""

    answer: Answer
    drafts: Mapping[int, Lattice | Tree]
    places: Sequence[int]  # the contexts that have one, ascending
    deepens: bool = False  # whether its drafter gives no more positions than it is asked for
    confidences: Mapping[int, float] = field(default_factory=dict)  # the target's, where rounds recorded it
    free: frozenset[int] = frozenset()  # contexts of drafts for which no drafter ran
    faint: Mapping[int, float] = field(default_factory=dict)  # mass below which chains of drafts do not go

    @classmethod
    def of(cls, answer: Answer, others: Iterable[Answer] = ()) -> Script:
        """Drafts of `answer`, and of `others` for as long as their texts are the same."""
        drafts: dict[int, Lattice | Tree] = {}
        confidences: dict[int, float] = {}
        faint: dict[int, float] = {}
        deepens = any(r.positions is not None for r in answer.rounds)
        alike = [_while_alike(source, answer) for source in (*others, answer)]
        for source in alike:
            drafts |= {r.context: r.draft for r in source.rounds if r.draft is not None}
            confidences |= {r.context: r.confidence for r in source.rounds if r.confidence is not None}
            faint |= {r.context: r.faint for r in source.rounds if r.draft is not None}
        return cls(answer, drafts, sorted(drafts), deepens, confidences, _free(alike), faint)

    @property
    def end(self) -> int:
        """The context behind which nothing is known."""
        return self.answer.prompt_tokens + len(self.answer.tokens) - 1

    def draft(self, context: int, wanted: Asked) -> Lattice | Tree:
        """What the drafter would have given there, had it been asked for no more than `wanted`."""
        draft, positions = self.drafts[context], wanted.positions if self.deepens and context not in self.free else None
        if isinstance(draft, Lattice):
            return Lattice(draft.tokens[:positions, : wanted.width], draft.logp[:positions, : wanted.width])
        if wanted.width == 1:
            draft = grow(draft, int(draft.tokens[0]), len(draft), self.faint.get(context, 0.0))
        return draft if positions is None else draft.up_to_depth(positions)


def _while_alike(source: Answer, answer: Answer) -> Answer:
    """A source with its rounds up to where its text parts from the answer's."""
    end = source.prompt_tokens + shared(list(source.tokens), list(answer.tokens))
    return replace(source, rounds=[r for r in source.rounds if r.context < end])


def _free(answers: Sequence[Answer]) -> frozenset[int]:
    """Contexts of drafts for which no drafter ran, in the rounds of policies that draft. The memory behind `record` has
    heard a draft after every token and knows more than theirs, so its rounds count only where there are no others."""
    drafting = [answer for answer in answers if answer.policy != RECORD and any(r.drafted for r in answer.rounds)]
    rounds = [r for answer in drafting or answers for r in answer.rounds if r.drafted]
    return frozenset(r.context for r in rounds if not r.asked) - {r.context for r in rounds if r.asked}


def scripts(answers: Sequence[Answer]) -> list[Script]:
    """A script for each turn of a prompt, from the answer that drafted everywhere, or else the one with most drafts."""
    prompts: dict[tuple[str, int, float], list[Answer]] = {}
    for answer in answers:
        prompts.setdefault((answer.prompt, answer.turn, answer.temperature), []).append(answer)
    return [Script.of(max(group, key=_drafted), group) for group in prompts.values()]


def _drafted(answer: Answer) -> tuple[bool, int]:
    return answer.policy == RECORD, sum(r.draft is not None for r in answer.rounds)


def replay(policy: Policy, texts: Iterable[Script], prices: Prices) -> Replayed:
    """Run `policy` along the texts. What it learns of acceptance is kept from text to text, as in an engine."""
    played = Replayed()
    models: dict[float, AcceptanceModel] = {}
    for script in texts:
        model = models.setdefault(script.answer.temperature, AcceptanceModel())
        model.turn()
        _play(policy, script, prices, model, played)
    return played


def _play(policy: Policy, script: Script, prices: Prices, model: AcceptanceModel, played: Replayed) -> None:
    at, end = script.answer.prompt_tokens, script.end
    drafted = False
    while at < end:
        wanted = asked(policy, model, end - at)
        costs = prices.costs(policy.n_max, at, wanted.positions)
        drafts = policy.n_max > 0 and end - at > 1 and policy.drafts(model.outlook(costs))
        if drafts and at not in script.drafts:
            there = bisect_left(script.places, at)
            resume = script.places[there] if there < len(script.places) else end
            played.skipped += resume - at
            at = resume
            continue
        record, tree = _round(policy, script, at, costs, model, script.draft(at, wanted) if drafts else None)
        if drafts and at in script.free:
            record = replace(record, positions=0, seconds=record.seconds | {"draft": 0.0})
        if record.asked and not drafted:
            record.seconds["draft"] += costs.resume_s
        drafted = record.asked
        model.observe(record, position=costs.position)
        model.charge(record, costs.plain_s)
        played.clipped += drafts and _clipped(tree, script, at, wanted.width, policy.n_max)
        tokens = min(1 + record.accepted, end - at)
        played.rounds.append(replace(record, path=record.path[: tokens - 1]))  # as the engine ends an answer
        played.tokens, played.seconds, at = played.tokens + tokens, played.seconds + record.total_s, at + tokens


def _round(
    policy: Policy, script: Script, context: int, costs: Costs, model: AcceptanceModel, draft: Lattice | Tree | None
) -> tuple[Round, Tree]:
    """One round as the engine would run it, accepted as far as the recorded text goes along; and its tree."""
    root = script.answer.tokens[context - script.answer.prompt_tokens]
    whole = root_only(root) if draft is None else grown(policy, model, draft, root, script.end - context)
    mass, depths = whole.mass[1:], whole.depths[1:]
    likely = model.likely(mass, depths, OPTIMISM) if policy.calibrated else mass
    tree = whole[: policy.choose(likely, costs)]
    n = len(tree)
    seconds = {"draft": costs.draft_s, "verify": float(costs.verify_s[n]), "observe": float(costs.aux_s[n])}
    if draft is None:
        seconds = {"verify": costs.plain_s}
    path = matched(tree, script.answer.continuation(context))
    opinions = tree.mass[1:], tree.depths[1:]
    sure = script.confidences.get(context)
    grew = len(whole) if draft is not None else None
    record = Round(context, n, draft is not None, *opinions, path, seconds, {}, 0, draft, grown=grew, confidence=sure)
    return record, tree


def _clipped(tree: Tree, script: Script, context: int, width: int, n_max: int) -> bool:
    """Whether some node has all the children that were recorded, or a recorded tree was taken whole, where a policy
    that takes `width` children and `n_max` nodes might take more."""
    recorded = script.drafts[context]
    if not len(tree):
        return False
    if isinstance(recorded, Lattice):
        columns = recorded.tokens.shape[1]
        return width > columns and bool(np.bincount(tree.parents[1:]).max() >= columns)
    cut = script.answer.policy != RECORD or len(recorded) >= Record().n_max  # a smaller one of `record` is complete
    ends = tree.depths.max() >= script.end - context - 1  # no deeper tree could be emitted
    return cut and not ends and len(tree) == len(recorded) < n_max
