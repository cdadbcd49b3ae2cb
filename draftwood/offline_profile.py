"""CaDDTree's cost model (arXiv 2606.01813 §4): verification measured beforehand, then made convex.

Where the cost is convex in n, tokens per second rise and then fall, which the paper's stopping rule needs.
Unlike the authors' curves these count the root: a width is what the target really runs, 1 + n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from draftwood.curve import extended
from draftwood.errors import BadInput
from draftwood.policies.base import Costs
from draftwood.store import read_json, write_json

Array = NDArray[np.float64]

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (0, 512, 1024, 2048, 4096)
Measure = Callable[[int, int], float]  # (width, context) -> seconds of one verification of `width` tokens


@dataclass(frozen=True, slots=True)
class Profile:
    """Medians of measured verifications, and what they were measured on."""

    widths: tuple[int, ...]  # tokens, the root included
    contexts: tuple[int, ...]  # tokens in the KV cache
    seconds: tuple[tuple[float, ...], ...]  # [widths][contexts]
    draft_s: float
    machine: str
    versions: dict[str, str]

    def save(self, path: Path) -> None:
        """Raises OSError where `path` cannot be written."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Profile | None:
        """The profile in `path`; None if there is no such file. Raises BadInput if it holds anything else."""
        data = read_json(path)
        if data is None and not path.exists():
            return None
        try:
            return cls(
                tuple(int(w) for w in data["widths"]),
                tuple(int(c) for c in data["contexts"]),
                tuple(tuple(float(s) for s in row) for row in data["seconds"]),
                float(data["draft_s"]),
                str(data["machine"]),
                {str(k): str(v) for k, v in data["versions"].items()},
            )._checked()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path} is not a profile: {error}. Delete it; draftwood calibrate makes a new one."
            ) from error

    def _checked(self) -> Profile:
        table = np.array(self.seconds, np.float64)
        if table.shape != (len(self.widths), len(self.contexts)) or not table.size:
            raise ValueError("it must hold seconds for each width and context")
        if not (np.isfinite(table) & (table > 0)).all() or not 0 <= self.draft_s < np.inf:
            raise ValueError("its seconds must be positive numbers")
        if any((np.diff(axis) <= 0).any() for axis in (self.widths, self.contexts)) or self.widths[0] < 1:
            raise ValueError("its widths and contexts must rise")
        return self


@dataclass(frozen=True, slots=True, eq=False)
class ConvexCosts:
    """A profile made convex over width, and linear between contexts: what `caddtree` decides with."""

    widths: Array  # [W]
    contexts: Array  # [C]
    seconds: Array  # [C, W]: each row never falls and is convex
    draft_s: float

    @classmethod
    def of(cls, profile: Profile) -> ConvexCosts:
        widths = np.array(profile.widths, np.float64)
        rows = [fit_convex(widths, column) for column in np.array(profile.seconds, np.float64).T]
        return cls(widths, np.array(profile.contexts, np.float64), np.array(rows), profile.draft_s)

    def costs(self, n_max: int, context: int) -> Costs:
        """Costs of 0 … `n_max` nodes, the host's share being 0 as in the paper.

        Outside the measured contexts the nearest one counts; beyond the measured widths the last slope goes on.
        """
        at = [np.interp(context, self.contexts, column) for column in self.seconds.T]
        verify = extended(np.arange(1.0, 2 + n_max), self.widths, np.array(at))
        return Costs(float(verify[0]), self.draft_s, np.zeros(1 + n_max), verify)


def measure_profile(
    measure: Measure,
    draft_s: float,
    machine: str,
    versions: dict[str, str],
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 5,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Profile:
    """Medians of `repeats` calls of `measure` for each width and context, after one call to warm up.

    `progress(done, of)` follows each of them. One context is finished before the next, so that `measure` may
    keep its cache.
    """
    table = np.zeros((len(widths), len(contexts)))
    for c, context in enumerate(contexts):
        for w, width in enumerate(widths):
            measure(width, context)
            table[w, c] = median(measure(width, context) for _ in range(repeats))
            progress(c * len(widths) + w + 1, table.size)
    rows = tuple(tuple(float(s) for s in row) for row in table)
    return Profile(tuple(widths), tuple(contexts), rows, draft_s, machine, versions)._checked()


def fit_convex(widths: Array, seconds: Array) -> Array:
    """The non-falling convex curve through `widths` that is nearest to `seconds` in least squares, `[W]`.

    Such a curve is a constant plus hinges max(0, x - w) with weights that are not negative, so this is a
    non-negative least-squares problem and its solution is exact.
    """
    hinges = np.maximum(widths[:, None] - widths[:-1], 0.0)
    scale = np.maximum(hinges.max(axis=0), 1.0)  # columns of like size keep the small systems well conditioned
    columns = np.concatenate([np.ones((len(widths), 1)), hinges / scale], axis=1)
    fitted: Array = columns @ nonnegative_least_squares(columns, np.asarray(seconds, np.float64))
    return fitted


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """argmin |a x - b| over x >= 0: the active-set method of Lawson and Hanson (1974), chapter 23."""
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    tolerance = 1e-12 * np.linalg.norm(a) * np.linalg.norm(b)
    for _ in range(3 * a.shape[1]):
        slope = np.where(free, -np.inf, a.T @ (b - a @ x))
        if slope.max() <= tolerance:
            break
        free[np.argmax(slope)] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            negative = free & (best <= 0)
            if not negative.any():
                break
            # Go towards the unconstrained best until the first weight reaches 0, and hold that one there.
            reach = np.min(x[negative] / (x[negative] - best[negative]))
            x = x + reach * (best - x)
            free &= x > tolerance
            x[~free] = 0.0
        x = best
    return x
