"""The record of one round: what was drafted, verified and accepted, and where the seconds went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwood.tree import Floats, Ints

VERBS = ("draft", "grow", "choose", "verify", "accept", "commit", "observe")


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round of one request: the only input of metrics, calibration and the simulator."""

    context: int  # tokens in the KV cache when the round began
    n: int  # nodes verified, the root not counted
    drafted: bool  # False: the policy skipped the drafter
    mass: Floats  # [n] the drafter's path probabilities of the verified nodes
    depths: Ints  # [n]
    accepted: int  # nodes accepted; the round emitted 1 + accepted tokens
    seconds: dict[str, float]  # by verb, see VERBS
    predicted_s: float  # what the latency model expected of draft + aux + verify; NaN if it has no opinion
    padding: int = 0  # tokens that the target ran besides, to fill a captured width

    @property
    def width(self) -> int:
        """Tokens of the target's forward."""
        return 1 + self.n + self.padding

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict; arrays become lists, masses keep four digits."""
        return {
            "context": self.context,
            "n": self.n,
            "width": self.width,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mass": [round(float(m), 4) for m in self.mass],
            "depths": [int(d) for d in self.depths],
            "seconds": {verb: round(s, 6) for verb, s in self.seconds.items()},
            "predicted_s": None if np.isnan(self.predicted_s) else round(self.predicted_s, 6),
        }


def tau(rounds: list[Round]) -> float:
    """Acceptance length: tokens emitted per round, the bonus token included; NaN without rounds."""
    return float(np.mean([1 + r.accepted for r in rounds])) if rounds else float("nan")


def seconds_by_verb(rounds: list[Round]) -> dict[str, float]:
    """Total seconds of each verb over `rounds`."""
    return {verb: sum(r.seconds.get(verb, 0.0) for r in rounds) for verb in VERBS}
