"""The record of one round: what was drafted, verified and accepted, and where the seconds went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.tree import Floats, Ints, Lattice, Tree

VERBS = ("draft", "grow", "choose", "verify", "accept", "commit", "observe")
AUX = ("grow", "choose", "accept", "commit", "observe")  # what the host does: T_aux
PARTS = ("draft", "verify", "aux")  # what the latency model predicts one by one


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round of one request: the only input of metrics, calibration and the simulator."""

    context: int  # tokens in the KV cache when the round began
    n: int  # nodes verified, the root not counted
    drafted: bool  # False: the policy skipped the drafter
    mass: Floats  # [n] the drafter's path probabilities of the verified nodes
    depths: Ints  # [n]
    path: Sequence[int]  # accepted nodes in order, the root being 0; the round emitted one token more
    seconds: dict[str, float]  # by verb, see VERBS
    predicted: Mapping[str, float]  # seconds of PARTS that the latency model expected before the round; {}: no opinion
    padding: int = 0  # tokens that the target ran besides, for other requests or to fill a captured width
    draft: Lattice | Tree | None = None  # what it was grown from: candidates, or the whole tree; None without a draft
    # Positions that the drafter was asked for; None: unknown, or no matter; 0: it did not run, the text sufficed.
    positions: int | None = None
    grown: int | None = None  # nodes that it was chosen from; None: not known
    confidence: float | None = None  # the target's probability of its likeliest token, on average of visited nodes
    faint: float = 0.0  # mass below which no chain of the draft goes; a recorded tree may have fainter nodes

    @property
    def asked(self) -> bool:
        """Whether a drafter ran."""
        return self.drafted and self.positions != 0

    @property
    def accepted(self) -> int:
        """Nodes accepted."""
        return len(self.path)

    @property
    def width(self) -> int:
        """Tokens of the target's forward."""
        return 1 + self.n + self.padding

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def predicted_s(self) -> float:
        """Expected seconds of the whole round; NaN without an opinion."""
        return sum(self.predicted.values()) if self.predicted else float("nan")

    @property
    def parts(self) -> dict[str, float]:
        """Measured seconds of PARTS; what did not happen is left out."""
        seconds = {verb: self.seconds.get(verb, 0.0) for verb in ("draft", "verify")}
        seconds["aux"] = sum(self.seconds.get(verb, 0.0) for verb in AUX)
        return {part: s for part, s in seconds.items() if s > 0}

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict without the draft; arrays become lists, masses keep four digits."""
        return {
            "context": self.context,
            "n": self.n,
            "width": self.width,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mass": [round(float(m), 4) for m in self.mass],
            "depths": [int(d) for d in self.depths],
            "seconds": rounded(self.seconds),
            "predicted": rounded(self.predicted),
            "predicted_s": None if np.isnan(self.predicted_s) else round(self.predicted_s, 6),
        }


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Microseconds are exact enough."""
    return {name: round(s, 6) for name, s in seconds.items()}


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions were off: |predicted / measured - 1|. NaN without a prediction."""

    median: float
    p90: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Errors:
        """From (predicted, measured) seconds; pairs without a measured time are left out."""
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs if measured > 0]
        if not errors:
            return cls(float("nan"), float("nan"))
        return cls(float(np.median(errors)), float(np.quantile(errors, 0.9)))


def prediction_errors(rounds: Iterable[Round]) -> dict[str, Errors]:
    """Errors of each part and of the whole `round`. A prediction is made before its round is learned from."""
    seen = [r for r in rounds if r.predicted]
    both = [(r.predicted, r.parts) for r in seen]
    pairs = {p: [(said[p], took[p]) for said, took in both if p in took and p in said] for p in PARTS}
    return {
        **{part: Errors.of(found) for part, found in pairs.items()},
        "round": Errors.of((r.predicted_s, r.total_s) for r in seen),
    }


def tau(rounds: list[Round]) -> float:
    """Acceptance length: tokens emitted per round, the bonus token included; NaN without rounds."""
    return float(np.mean([1 + r.accepted for r in rounds])) if rounds else float("nan")


def seconds_by_verb(rounds: list[Round]) -> dict[str, float]:
    """Total seconds of each verb over `rounds`."""
    return {verb: sum(r.seconds.get(verb, 0.0) for r in rounds) for verb in VERBS}
