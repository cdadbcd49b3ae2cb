"""What `draftwood bench grid` found: a cell, and the tables that sum cells up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.bench.environment import environment
from draftwood.bench.records import writing
from draftwood.bench.stats import PLAIN, jsonable

OURS, NEW = "bastion", "bastion, first use"  # with what an earlier process learned, and without
FIXED = ("ddtree:2", "ddtree:4", "ddtree:8", "ddtree:16")
FIXED_ON_GPU = ("ddtree:8", "ddtree:16", "ddtree:32", "ddtree:64")  # where a wider forward costs little
LEAST_OF_PLAIN, LEAST_OF_FIXED = 0.97, 0.98


@dataclass(frozen=True, slots=True)
class Place:
    """Which cell."""

    dataset: str
    temperature: float
    drafter: str
    context: int

    @property
    def name(self) -> str:
        return f"{self.dataset}, T {self.temperature:g}, {self.drafter}, {self.context}"


@dataclass(frozen=True, slots=True)
class Cell:
    """The figures of a cell: tokens per second by method, and `bastion` over the two that it must not fall behind."""

    place: Place
    tokens_per_s: dict[str, float]  # over the first prompts; over fewer for a budget that was left out
    times_plain: dict[str, float]  # of each method over plain decoding, on those of the first prompts that it answered
    of_plain: float
    of_plain_interval: tuple[float, float] | None
    best_fixed: str
    of_fixed: float
    of_fixed_interval: tuple[float, float] | None
    drafted: float  # share of bastion's rounds
    seconds: float
    widths: dict[int, int] = field(default_factory=dict)  # bastion's: tokens, the root included -> rounds
    prompts: int = 0  # that were asked
    paused: float = 0.0  # share of the rounds' time that was left out, see `race.PAUSE`
    commit: str | None = None  # of the code that measured it

    @property
    def holds(self) -> bool:
        return self.of_plain >= LEAST_OF_PLAIN and self.of_fixed >= LEAST_OF_FIXED

    @property
    def is_open(self) -> bool:
        """Whether an interval leaves undecided if the cell holds."""
        return leaves_open(self.of_plain_interval, LEAST_OF_PLAIN) or leaves_open(
            self.of_fixed_interval, LEAST_OF_FIXED
        )

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = jsonable(asdict(self))
        return fields

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Cell:
        widths = {int(width): count for width, count in data.pop("widths").items()}
        return cls(Place(**data.pop("place")), widths=widths, **data)


def leaves_open(bounds: Sequence[float] | None, least: float) -> bool:
    """Whether an interval (None if there is one prompt) lies on both sides of `least`."""
    low, high = bounds or (0.0, inf)
    return low < least <= high


def budgets(methods: Iterable[str]) -> list[str]:
    """The fixed budgets among these methods."""
    return [method for method in methods if method not in (PLAIN, OURS, NEW)]


def write_table(out: Path, cells: Sequence[Cell]) -> None:
    """grid.json and README.md."""
    found = environment()
    facts = {"cells": [c.to_json() for c in cells], "environment": found, "holds": sum(c.holds for c in cells)}
    with writing(out):
        (out / "grid.json").write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
        (out / "README.md").write_text("\n".join(page(cells, found)) + "\n")


def page(cells: Sequence[Cell], found: Mapping[str, Any]) -> Iterator[str]:
    """All tables in Markdown, and the environment that was found."""
    yield f"# Never slower? {sum(c.holds for c in cells)} of {len(cells)} cells hold"
    yield ""
    fixed = ", ".join(budgets(cells[0].tokens_per_s))
    yield (
        f"The speed of `{OURS}` over that of plain decoding without a drafter, and over that of the best of {fixed} "
        f"(found afterwards), with 95 % intervals over prompts. A cell holds if the first is at least {LEAST_OF_PLAIN} "
        f"and the second at least {LEAST_OF_FIXED}. `{OURS}` has learned from other texts what drafting brings, as "
        f"after an earlier process; `{NEW}` has not. The machine's pauses are left out: "
        f"{np.mean([c.paused for c in cells]):.2%} of the time on average, at most "
        f"{max(c.paused for c in cells):.2%} in one cell."
    )
    yield ""
    yield measured_on(cells, found)
    for part in (by_drafter, by_method, every_cell):
        yield ""
        yield from part(cells)


def measured_on(cells: Sequence[Cell], found: Mapping[str, Any]) -> str:
    """Hardware, versions, commits and the last command, in one line."""
    gpus = [gpu["name"] for gpu in found["gpus"]]
    commits = Counter(c.commit or "unknown" for c in cells)
    told = ", ".join(f"{commit[:12]} ({count} cells)" for commit, count in commits.items())
    return (
        f"{', '.join([found['processor'], *gpus])}; {found['cores']} cores; torch {found['versions']['torch']}; "
        f"commit {told}. Command: `{found['command']}`"
    )


def by_drafter(cells: Sequence[Cell]) -> Iterator[str]:
    """`bastion` with drafters of each kind."""
    yield (
        f"| drafter | cells | × plain: mean, median, worst | below {LEAST_OF_PLAIN} "
        f"| × best fixed: mean, median, worst | below {LEAST_OF_FIXED} | hold |"
    )
    yield "|---|---|---|---|---|---|---|"
    for drafter in dict.fromkeys(c.place.drafter for c in cells):
        own = [c for c in cells if c.place.drafter == drafter]
        plain, fixed = [c.of_plain for c in own], [c.of_fixed for c in own]
        yield (
            f"| {drafter} | {len(own)} | {spread(plain)} | {sum(x < LEAST_OF_PLAIN for x in plain)} "
            f"| {spread(fixed)} | {sum(x < LEAST_OF_FIXED for x in fixed)} | {sum(c.holds for c in own)} |"
        )


def by_method(cells: Sequence[Cell]) -> Iterator[str]:
    """The figures of each method, over the first prompts of each cell: only some methods get further ones."""
    yield f"| method, in all cells, by their first prompts | × plain: mean, median, worst | below {LEAST_OF_PLAIN} |"
    yield "|---|---|---|"
    for method in (OURS, NEW, *budgets(cells[0].tokens_per_s)):
        over = [c.times_plain[method] for c in cells]
        yield f"| {method} | {spread(over)} | {sum(x < LEAST_OF_PLAIN for x in over)} |"


def every_cell(cells: Sequence[Cell]) -> Iterator[str]:
    """A row for each cell, the worst first."""
    heads = "data set, T, drafter, context, prompts, plain tokens/s, × plain, best fixed, × best fixed, drafted, holds"
    yield f"| {heads.replace(', ', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for c in sorted(cells, key=lambda c: min(c.of_plain / LEAST_OF_PLAIN, c.of_fixed / LEAST_OF_FIXED)):
        p = c.place
        yield (
            f"| {p.dataset} | {p.temperature:g} | {p.drafter} | {p.context} | {c.prompts} "
            f"| {c.tokens_per_s[PLAIN]:.1f} | {interval(c.of_plain, c.of_plain_interval)} | {c.best_fixed} "
            f"| {interval(c.of_fixed, c.of_fixed_interval)} | {c.drafted:.0%} | {'yes' if c.holds else '**no**'} |"
        )


def spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.3f}, {np.median(values):.3f}, {min(values):.3f}"


def interval(value: float, bounds: Sequence[float] | None) -> str:
    return f"{value:.3f}" + (f" [{bounds[0]:.2f}–{bounds[1]:.2f}]" if bounds else "")
