"""What a `LatencyModel` learns for long, by reach of context; it is saved and restored."""

from __future__ import annotations

from collections.abc import Iterable

from draftwood.curve import HOST, WIDTHS, Curve, Level, Slope

FIRST_REACH = 1024  # tokens of context that share what is learned; then each doubling has its own


class Learned:
    """What rounds have taught, apart from the machine's pace."""

    def __init__(self) -> None:
        self.verify: dict[int, Curve] = {}  # by reach of context
        self.draft: dict[int, Level] = {}
        self.resume: dict[int, Level] = {}  # how much longer a draft after a pause takes than one without
        self.position = Slope()  # what one more position of a draft takes, in priors of a draft
        self.host, self.plain_host = Curve(kind=HOST), Level()

    def verify_at(self, context: int) -> Curve:
        """The curve for a context; one that is new starts like the nearest."""
        at = reach(context)
        if at not in self.verify:
            self.verify[at] = Curve(self.verify[_nearest(self.verify, at)] if self.verify else None)
        return self.verify[at]

    def draft_at(self, context: int) -> Level:
        return _level_at(self.draft, context)

    def resume_at(self, context: int) -> Level:
        return _level_at(self.resume, context)

    def again(self) -> Learned:
        """A head start for something similar: the same, believed as little as a profile of another day."""
        learned = Learned()
        learned.verify = {at: Curve(curve) for at, curve in self.verify.items()}
        learned.draft = {at: level.again() for at, level in self.draft.items()}
        learned.resume = {at: level.again() for at, level in self.resume.items()}
        learned.position = self.position.again()
        learned.host, learned.plain_host = Curve(self.host), self.plain_host.again()
        return learned

    def to_json(self) -> dict[str, object]:
        return {
            "widths": WIDTHS.tolist(),
            "verify": {str(at): curve.to_json() for at, curve in self.verify.items()},
            "draft": {str(at): level.to_json() for at, level in self.draft.items()},
            "resume": {str(at): level.to_json() for at, level in self.resume.items()},
            "position": self.position.to_json(),
            "host": self.host.to_json(),
            "plain_host": self.plain_host.to_json(),
        }

    @classmethod
    def of_json(cls, data: object) -> Learned:
        """Raises ValueError or KeyError for anything that `to_json` does not give."""
        if not isinstance(data, dict) or data["widths"] != WIDTHS.tolist():
            raise ValueError("other widths")
        if not all(isinstance(data[part], dict) for part in ("verify", "draft", "resume")):
            raise ValueError("verify, draft and resume are by context")
        learned = cls()
        learned.verify = {int(at): Curve.of_json(entry) for at, entry in data["verify"].items()}
        learned.draft = {int(at): Level.of_json(entry) for at, entry in data["draft"].items()}
        learned.resume = {int(at): Level.of_json(entry) for at, entry in data["resume"].items()}
        learned.position = Slope.of_json(data["position"])
        learned.host, learned.plain_host = Curve.of_json(data["host"], HOST), Level.of_json(data["plain_host"])
        return learned


def reach(context: int) -> int:
    """Which contexts share what is learned: 0 below 1024 tokens, then one for each doubling."""
    return max(0, (context // FIRST_REACH).bit_length())


def _level_at(levels: dict[int, Level], context: int) -> Level:
    """The level for a context; one that is new starts like the nearest."""
    at = reach(context)
    if at not in levels:
        levels[at] = levels[_nearest(levels, at)].again() if levels else Level()
    return levels[at]


def _nearest(known: Iterable[int], at: int) -> int:
    return min(known, key=lambda other: abs(other - at))
