"""Features of many texts read in one forward, and kept in memory: for a GPU, where a text alone is few tokens.

Texts are read in groups that depend on the data and the free memory: a resumed run with as much memory sees the same
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.lean import Lean
from draftwood.memory import free_bytes
from draftwood.train.features import TEACHER_NUMBERS, CachedReader, Features, Reader, row_bytes
from draftwood.train.padded import Padded
from draftwood.train.shards import Text

TOKENS = 8192  # of a group, unless a text alone has more
SHARE = 0.65  # of the device's free memory, at most: training needs the rest
LOGIT_BYTES = 10  # of a token's logits in bf16, in float32, and of their softmax
SHARE_BESIDE = 0.4  # of the host's: copying a text's features from there takes less time than a forward's launches


class DeviceReader:
    """Features of texts by their numbers. The first texts that fit under a limit stay on the device, further ones on
    the host; each is read with its whole group. All others are read each time, with those of the same call."""

    def __init__(self, reader: Reader, texts: Sequence[Text], limit: float, beside: float = 0) -> None:
        """`limit` in bytes on the device, `beside` on the host."""
        self._reader, self._texts = reader, texts
        lengths = [len(text.tokens) for text in texts]
        unpacked = reader.width + reader.teacher * TEACHER_NUMBERS  # ids and probabilities take twice what rows do
        here = fitting([row_bytes(length, unpacked) for length in lengths], limit)
        # Blocks of pinned memory are powers of two.
        pinned = [1 << (row_bytes(length, reader.width) - 1).bit_length() for length in lengths[here:]]
        kept = here + fitting(pinned, beside)
        made = [*groups(lengths, 0, here), *groups(lengths, here, kept)]
        self._group_of = {i: group for group in made for i in group}
        self._here, self._kept, self._beside = here, dict[int, Features](), dict[int, Tensor]()

    def __call__(self, indices: Sequence[int]) -> list[Features]:
        for index in indices:
            if index in self._group_of and index not in self._kept and index not in self._beside:
                self._keep(self._group_of[index])
        others = [index for index in dict.fromkeys(indices) if index not in self._group_of]
        read: dict[int, Features] = {}
        for places in groups([len(self._texts[index].tokens) for index in others]):
            some = [others[place] for place in places]
            read |= zip(some, map(self._reader.unpack, self._rows(some)), strict=True)
        return [read[index] if index in read else self._known(index) for index in indices]

    def _known(self, index: int) -> Features:
        if index in self._kept:
            return self._kept[index]
        return self._reader.unpack(self._beside[index].to(self._reader.target.device, non_blocking=True))

    def _keep(self, group: Sequence[int]) -> None:
        rows = self._rows(group)
        if group[0] < self._here:
            self._kept |= zip(group, map(self._reader.unpack, rows), strict=True)
        else:
            pinned = self._reader.target.device.type == "cuda"  # or the copy back would wait for the device
            host = (row.cpu().pin_memory() if pinned else row.cpu() for row in rows)
            self._beside |= zip(group, host, strict=True)

    def _rows(self, indices: Sequence[int]) -> list[Tensor]:
        return read_together(self._reader, [self._texts[index] for index in indices])


def fitting(sizes: Sequence[int], limit: float) -> int:
    """How many of the first sizes add up to at most `limit`."""
    return int(np.searchsorted(np.cumsum(sizes), limit, side="right"))


def groups(lengths: Sequence[int], first: int = 0, end: int | None = None) -> list[tuple[int, ...]]:
    """Texts of similar length from `first` to before `end`, of at most `TOKENS` with their padding."""
    made: list[list[int]] = []
    for index in (first + np.argsort(lengths[first:end], kind="stable")).tolist():
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


def open_features(
    reader: Reader, texts: Sequence[Text], folder: Path, limit: float, taken: float, processes: int
) -> DeviceReader | CachedReader:
    """On a GPU, as many as fit beside the `taken` bytes of a step stay there, and others stay on the host, which all
    `processes` share. Elsewhere features go through a cache on disk of at most `limit` bytes."""
    target = reader.target
    if target.device.type == "cuda" and isinstance(target.path, Lean):
        beside = SHARE_BESIDE * (free_bytes(torch.device("cpu")) or 0) / processes
        free = torch.cuda.mem_get_info(target.device)[0]
        taken += reader.teacher * TOKENS * target.vocab_size * LOGIT_BYTES  # of a group that is read in between
        return DeviceReader(reader, texts, max(min(SHARE * free, free - taken), 0), beside)
    return CachedReader(reader, texts, folder, limit)
