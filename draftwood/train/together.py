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
SHARE = 0.65  # of the device's memory, at most: training needs the rest


class DeviceReader:
    """Features of texts by their numbers. The first ones that fit under a limit are kept, and are read with their whole
    group; the others are read with those that are asked for with them."""

    def __init__(self, reader: Reader, texts: Sequence[Text], limit: float) -> None:
        """`limit` in bytes."""
        self._reader, self._texts = reader, texts
        lengths = [len(text.tokens) for text in texts]
        sizes = np.cumsum([row_bytes(length, reader.width) for length in lengths])
        kept = int(np.searchsorted(sizes, limit, side="right"))
        self._group_of = {i: group for group in groups(lengths[:kept]) for i in group}
        self._kept: dict[int, Features] = {}

    def __call__(self, indices: Sequence[int]) -> list[Features]:
        for index in indices:
            if index in self._group_of and index not in self._kept:
                self._kept |= self._read(self._group_of[index])
        others = [index for index in dict.fromkeys(indices) if index not in self._group_of]
        read: dict[int, Features] = {}
        for places in groups([len(self._texts[index].tokens) for index in others]):
            read |= self._read([others[place] for place in places])
        return [self._kept[index] if index in self._kept else read[index] for index in indices]

    def _read(self, indices: Sequence[int]) -> dict[int, Features]:
        parts = read_together(self._reader, [self._texts[index] for index in indices])
        return dict(zip(indices, map(self._reader.unpack, parts), strict=True))


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
    """On a GPU as many as it has room for stay there; else through a cache on disk of at most `limit` bytes."""
    target = reader.target
    if target.device.type == "cuda" and isinstance(target.path, Lean):
        return DeviceReader(reader, texts, SHARE * torch.cuda.mem_get_info(target.device)[0])
    return CachedReader(reader, texts, folder, limit)
