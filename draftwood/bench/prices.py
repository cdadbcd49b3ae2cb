"""What the rounds of a trace cost on the machine that it was recorded on: for replays, and for the figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from draftwood.errors import BadInput
from draftwood.footprint import Footprint
from draftwood.latency import LatencyModel, Machine, Work
from draftwood.policies.base import Costs
from draftwood.recording import Trace
from draftwood.simulate import RECORD
from draftwood.trace import PARTS, Round

PLAIN_HOST = "plain aux"  # the host's part of plain rounds
OFTEN = 30  # rounds of a kind from which their mean is its price
Kind = TypeVar("Kind", int, str)


def learned(trace: Trace) -> LatencyModel:
    """A latency model that has seen every recorded round."""
    sizes, draft = recorded_work(trace)
    model = LatencyModel(recorded_machine(trace), sizes.work, draft)
    for round, first in recorded_rounds(trace):
        model.observe(round, first=first)
    return model


def recorded_rounds(trace: Trace) -> Iterator[tuple[Round, bool]]:
    """Every round, and whether the one before it in the same answer did not draft.

    Rounds that draft for the record alone take longer than any policy's, so they count only where no others drafted.
    """
    others = [answer for answer in trace.answers if answer.policy != RECORD]
    drafted = any(round.drafted for answer in others for round in answer.rounds)
    for answer in others if drafted else trace.answers:
        before = False
        for round in answer.rounds:
            yield round, not before
            before = round.asked


def widest(trace: Trace) -> int:
    """Tokens of the widest forward that ran: prices of wider ones are extrapolated."""
    return max((r.width for answer in trace.answers for r in answer.rounds), default=0)


@dataclass(frozen=True, slots=True)
class Average:
    """Prices of a `model` that follows typical rounds, raised to mean rounds, which decide tokens per second."""

    model: LatencyModel
    host: LatencyModel  # for what policies of one kind make the host do: it also grew nodes that were not verified
    scale: dict[str, float]  # factors by part
    of_width: dict[int, float]  # of verification by nodes, if OFTEN rounds had as many: the model follows recent ones
    of_draft: dict[int, float]  # of drafts by the positions that were asked for, likewise

    @classmethod
    def of(cls, model: LatencyModel, trace: Trace) -> Average:
        parts, widths, drafts = (defaultdict[Any, list[tuple[float, float]]](list) for _ in range(3))
        for round, first in recorded_rounds(trace):
            predicted = dict(model.predict(round.n, round.context, round.drafted, round.padding))
            if first and round.asked:
                predicted["draft"] += model.costs(0, round.context).resume_s
            pairs = {part: (seconds, predicted.get(part, 0.0)) for part, seconds in round.parts.items()}
            for part, pair in pairs.items():
                parts[part if round.drafted or part != "aux" else PLAIN_HOST].append(pair)
            widths[round.n].append(pairs["verify"])
            if round.positions and not first:
                drafts[round.positions].append(pairs["draft"])
        scale = dict.fromkeys((*PARTS, PLAIN_HOST), 1.0) | _ratios(parts, 1)
        return cls(model, model, scale, _ratios(widths, OFTEN), _ratios(drafts, OFTEN))

    def hosted(self, trace: Trace, policy: str) -> Average:
        """The same with the host's time of the rounds of `policy`, if it ran often."""
        own = replace(trace, answers=[answer for answer in trace.answers if answer.policy == policy])
        host, drafted = learned(own), [round for round, _ in recorded_rounds(own) if round.drafted]
        pairs = [(round.parts["aux"], host.predict(round.n, round.context, True)["aux"]) for round in drafted]
        ratio = _ratios({"aux": pairs}, OFTEN)
        return replace(self, host=host, scale=self.scale | ratio) if ratio else self

    def costs(self, n_max: int, context: int, positions: int | None = None) -> Costs:
        found, host = self.model.costs(n_max, context), self.host.costs(n_max, context)
        draft, verify, aux = (self.scale[part] for part in PARTS)
        position_s = 0.0
        if positions is not None and self.of_draft:
            asked, ratios = list(self.of_draft), list(self.of_draft.values())
            draft = float(np.interp(positions, asked, ratios))
            position_s = found.draft_s * max(ratios[-1] - ratios[0], 0.0) / max(asked[-1] - asked[0], 1)
        by_width = np.array([self.of_width.get(n, verify) for n in range(len(found.verify_s))])
        verify_s = by_width * found.verify_s
        plain_s = float(verify_s[0] + self.scale[PLAIN_HOST] * (found.plain_s - found.verify_s[0]))
        draft_s, resume_s = draft * found.draft_s, draft * found.resume_s
        return Costs(plain_s, draft_s, aux * host.aux_s, verify_s, resume_s=resume_s, position_s=position_s)


def _ratios(pairs: Mapping[Kind, Sequence[tuple[float, float]]], least: int) -> dict[Kind, float]:
    """Seconds that rounds of a kind took over those predicted, for kinds with `least` rounds or more, in order."""
    sums = {kind: np.sum(pairs[kind], axis=0) for kind in sorted(pairs) if len(pairs[kind]) >= least}
    return {kind: float(took / said) if said else 1.0 for kind, (took, said) in sums.items()}


def recorded_machine(trace: Trace) -> Machine:
    return Machine(**fact(trace, "machine"))


def recorded_work(trace: Trace) -> tuple[Footprint, Callable[[int], Work]]:
    """The target's sizes and the drafter's work, as the trace's header has them."""
    known = {int(context): work for context, work in fact(trace, "draft_work").items()}
    contexts = sorted(known)
    columns = list(zip(*(known[c] for c in contexts), strict=True))

    def draft(context: int) -> Work:
        flops, size, launches, *shared = (linear(context, contexts, column) for column in columns)
        return Work(flops, size, round(launches), *shared)  # older traces do not say what is shared

    return Footprint(**fact(trace, "footprint")), draft if known else lambda context: Work(0.0, 0.0, 0)


def linear(x: float, places: Sequence[int], values: Sequence[float]) -> float:
    """The value at `x`, linear between and beyond rising `places`."""
    if x <= places[-1] or len(places) < 2:
        return float(np.interp(x, places, values))
    return values[-1] + (x - places[-1]) * (values[-1] - values[-2]) / (places[-1] - places[-2])


def fact(trace: Trace, name: str) -> Any:
    if name not in trace.header.facts:
        raise BadInput(f"The trace does not say its {name}; record it again with draftwood bench --trace.")
    return trace.header.facts[name]
