"""Features of many texts read in one forward, and kept on the device: for a GPU, where a text alone is few tokens.

Texts are read in groups that the data alone decide, so that a resumed run sees the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.lean import Lean
from draftwood.train.features import CachedReader, Features, Reader, row_bytes
from draftwood.train.padded import Padded
from draftwood.train.shards import Text

TOKENS = 8192  # of a group, unless a text alone has more
SHARE = 0.5  # of the device's memory, at most: training needs the rest


class DeviceReader:
    """Features of each text by its number; a text's whole group is read with it."""

    def __init__(self, reader: Reader, texts: Sequence[Text]) -> None:
        self._reader, self._texts = reader, texts
        self._group_of = {i: group for group in groups([len(text.tokens) for text in texts]) for i in group}
        self._read: dict[int, Features] = {}

    def __call__(self, index: int) -> Features:
        if index not in self._read:
            group = self._group_of[index]
            parts = read_together(self._reader, [self._texts[i] for i in group])
            self._read |= zip(group, map(self._reader.unpack, parts), strict=True)
        return self._read[index]


def groups(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Texts of similar length, of at most `TOKENS` with their padding."""
    made: list[list[int]] = []
    for index in np.argsort(lengths, kind="stable").tolist():
        if not made or (len(made[-1]) + 1) * lengths[index] > TOKENS:
            made.append([])
        made[-1].append(index)
    return [tuple(group) for group in made]


@torch.no_grad()
def read_together(reader: Reader, texts: Sequence[Text]) -> list[Tensor]:
    """`[T, width]` in bf16 of each text, as `Reader.row` gives them up to rounding. The target is on the lean path."""
    path, device = reader.target.path, reader.target.device
    assert isinstance(path, Lean)
    sizes = [len(text.tokens) for text in texts]
    path.rotary.reserve(max(sizes))
    padded = Padded.of(sizes, device)
    wanted = None if reader.teacher else padded.inside[:0]
    output = padded.forward(path, [text.tokens.tolist() for text in texts], wanted)
    return list(reader.packed(output).split(sizes))


def open_features(reader: Reader, texts: Sequence[Text], folder: Path, limit: float) -> DeviceReader | CachedReader:
    """On a GPU that has room for all of them, there; else through a cache on disk of at most `limit` bytes."""
    if fits(reader, texts):
        return DeviceReader(reader, texts)
    return CachedReader(reader, texts, folder, limit)


def fits(reader: Reader, texts: Sequence[Text]) -> bool:
    target = reader.target
    if target.device.type != "cuda" or not isinstance(target.path, Lean):
        return False
    needed = sum(row_bytes(len(text.tokens), reader.width) for text in texts)
    return needed <= SHARE * torch.cuda.mem_get_info(target.device)[0]
