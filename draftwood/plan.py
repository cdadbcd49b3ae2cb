"""What one target forward needs besides the weights, computed once per round for all layers, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.native.candidates import Rows
from draftwood.tree import Bools, Ints, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One request's tokens on the flattened axis: `[start, stop)`, behind `context` committed slots of `row`."""

    row: int
    start: int
    stop: int
    context: int
    depths: Ints  # [N]
    visible: Bools | None  # [N, N] ancestors; None: a chain, where row i sees tokens 0..i

    @property
    def size(self) -> int:
        return self.stop - self.start

    def sees(self, window: int | None) -> Bools | None:
        """Who sees what, `[N, context + N]`; None if a single token sees everything."""
        size = self.size
        if size == 1 and (window is None or self.context < window):
            return None
        tree = np.tri(size, dtype=bool) if self.visible is None else self.visible
        seen = np.concatenate([np.ones((size, self.context), bool), tree], axis=1)
        if window is not None:  # distances are between positions, not slots: siblings share a position
            position = np.concatenate([np.arange(self.context), self.context + self.depths])
            seen &= position[self.context :, None] - position[None, :] < window
        return seen


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """Who sees whom in one segment, on the device: what a kernel needs instead of a mask."""

    context: Tensor  # int32 [], committed slots before the segment
    depths: Tensor  # int32 [N]
    ancestors: Tensor | None  # int32 [N, ceil(N / 32)]: bit j % 32 of word j // 32; None: a chain
    lineage: Tensor | None = None  # integers [N, C]: each node, its parent, …, the root, then 0; None: a chain
    alone: bool = False  # a node must get the bits that plain decoding would give it

    @classmethod
    def of(cls, part: Segment, device: torch.device, alone: bool = False) -> Sight:
        """All of it goes to the device in one copy. With `alone` the lineage is made instead of bits."""
        table = np.empty((0, 0), np.int32)
        if part.visible is not None:
            table = lineage_of(part.visible) if alone else pack_bits(part.visible)
        flat = torch.from_numpy(np.concatenate([[part.context], part.depths, table.ravel()]).astype(np.int32))
        flat, end = flat.to(device), 1 + part.size
        rows = None if part.visible is None else flat[end:].view(table.shape)
        return cls(flat[0], flat[1:end], None if alone else rows, rows if alone else None, alone)


def pack_bits(rows: Bools) -> NDArray[np.int32]:
    """`[N, M]` bools as `[N, ceil(M / 32)]` words, the first in the lowest bit."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


def lineage_of(visible: Bools) -> NDArray[np.int32]:
    """`[N, C]`: what each row of `visible` sees, the last first (itself, its parent, …), then 0."""
    sizes = visible.sum(1)
    rows, seen = np.nonzero(visible)
    line = np.zeros((len(visible), int(sizes.max())), np.int32)
    rank = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    line[rows, sizes[rows] - 1 - rank] = seen
    return line


class Visibility(Protocol):
    """Who sees whom in the segments of one forward, in the two forms that attention backends read."""

    @property
    def ahead(self) -> bool:
        """Whether a token may see tokens of its segment that come after it. In a tree none does."""
        ...

    @property
    def static(self) -> bool:
        """Whether backends get all slots of a cache, with the forward's tokens somewhere among them; else they come
        last."""
        ...

    def mask(self, index: int, window: int | None, groups: int) -> Tensor | None: ...
    def sight(self, index: int) -> Sight: ...


@dataclass(eq=False)
class Plan:
    """Positions, slots and masks of one forward over `[sum N]` tokens."""

    ahead: ClassVar[bool] = False
    static: ClassVar[bool] = False

    ids: Ints  # [sum N]
    places: Ints  # [sum N] context length + depth
    segments: list[Segment]
    dtype: torch.dtype
    device: torch.device
    wanted: Tensor | None = None  # [W] tokens whose logits are asked for; None: all of them
    alone: bool = False  # see `Sight`
    _masks: dict[tuple[int, int | None, int], Tensor | None] = field(default_factory=dict)
    _sights: dict[int, Sight] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> Tensor:
        """`ids` on the device."""
        return moved(self.ids, self.device)

    @cached_property
    def positions(self) -> Tensor:
        """`places` on the device."""
        return moved(self.places, self.device)

    def mask(self, index: int, window: int | None, groups: int) -> Tensor | None:
        """Additive mask of segment `index`, `[groups * N, context + N]`: rows repeat for each folded query head."""
        key = (index, window, groups)
        if key not in self._masks:
            self._masks[key] = self._build(index, window, groups)
        return self._masks[key]

    def sight(self, index: int) -> Sight:
        """What segment `index` sees, for kernels that build no mask."""
        if index not in self._sights:
            self._sights[index] = Sight.of(self.segments[index], self.device, self.alone)
        return self._sights[index]

    def _build(self, index: int, window: int | None, groups: int) -> Tensor | None:
        seen = self.segments[index].sees(window)
        if seen is None or seen.all():
            return None
        allowed = torch.from_numpy(seen).to(self.device)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, -torch.inf).repeat(groups, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What one forward says about every token of a plan."""

    logits: Tensor  # [sum N, V]; [W, V] where the plan wants W of them
    taps: Tensor | None  # [sum N, len(tap_layers) * hidden]; None if no layer is tapped
    rows: Rows | None = None  # where the rows of the logits lie, if known


def taps_of(layers: Sequence[int], among: Sequence[int], taps: Tensor | None) -> Tensor | None:
    """The taps `[M, len(layers) * hidden]` of some layers out of those of `among`; None for no layers."""
    if taps is None or not layers:
        return None
    if tuple(layers) == tuple(among):
        return taps
    each = taps.unflatten(-1, (len(among), -1))
    return each[:, [list(among).index(layer) for layer in layers]].flatten(1)


def make_plan(
    trees: Sequence[Tree],
    contexts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rows: Sequence[int],
    known: Sequence[bool] = (),
) -> Plan:
    """Lay out trees one behind the other on the token axis, each behind the `contexts[b]` committed tokens of cache row
    `rows[b]`.

    Of the trees that are `known` text (prompt chunks) only the last token's logits are wanted.
    """
    segments, start = [], 0
    for tree, row, context in zip(trees, rows, contexts, strict=True):
        visible, stop = None if tree.is_chain else tree.ancestors(), start + len(tree.tokens)
        segments.append(Segment(row, start, stop, context, np.ascontiguousarray(tree.depths, np.int64), visible))
        start = stop
    ids = _joined([tree.tokens for tree in trees])
    places = _joined([part.context + part.depths for part in segments])
    return Plan(ids, places, segments, dtype, device, _wanted(segments, known, device) if any(known) else None)


def _joined(parts: Sequence[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def moved(numbers: Ints, device: torch.device) -> Tensor:
    """Integers as a tensor on a device."""
    return torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(device)  # a drafter may give other integers


def _wanted(segments: Sequence[Segment], known: Sequence[bool], device: torch.device) -> Tensor:
    parts = (
        range(part.stop - 1 if skip else part.start, part.stop) for part, skip in zip(segments, known, strict=True)
    )
    return torch.tensor(list(chain.from_iterable(parts)), device=device)
