"""What a drafter reads from its target: tapped layers of every text, computed once and kept on disk in bf16.

Each text goes through the target alone, so that its features do not depend on its company and a resumed run
sees the same numbers. The cache is one file with a place for every text that fits under the size limit; a
checksum says whether a place is filled, so whatever a kill or a power cut left behind is computed again.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.cache import KVCache
from draftwood.drafters.lattice import top_k
from draftwood.target import Target
from draftwood.train.data import Identity, Text
from draftwood.train.files import GIGABYTE, check_disk
from draftwood.train.loss import Teacher
from draftwood.tree import Ints, chain_tree

TEACHER_TOKENS = 32  # likeliest next tokens kept for soft labels
TEACHER_NUMBERS = 3 * TEACHER_TOKENS  # in bf16 places: a probability, and an id in two
CHUNK = 2048  # tokens of a text that go through the target at once


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Of one text of T tokens."""

    taps: Tensor  # [T, taps * hidden], bf16
    teacher: Teacher | None  # a row for each token: what the target expects behind it


class Reader:
    """Features from the target itself."""

    def __init__(self, target: Target, tap_layers: Sequence[int], teacher: bool) -> None:
        self.target, self.teacher = target, teacher
        target.tap(tap_layers)
        self.width = len(tap_layers) * target.hidden_size + (TEACHER_NUMBERS if teacher else 0)

    def row(self, tokens: Ints) -> Tensor:
        """`[T, width]` in bf16: the taps, then the teacher's probabilities and ids."""
        cache = self.target.new_cache(len(tokens))
        parts = [self._chunk(tokens[at : at + CHUNK], cache) for at in range(0, len(tokens), CHUNK)]
        return torch.cat(parts)

    @torch.inference_mode()
    def _chunk(self, tokens: Ints, cache: KVCache) -> Tensor:
        plan = self.target.plan([chain_tree(tokens.tolist())], cache, known=[not self.teacher])
        result = self.target.verify(plan, cache)
        cache.advance(0, len(tokens))
        assert result.taps is not None
        taps = result.taps.bfloat16()
        if not self.teacher:
            return taps
        probs, ids = top_k(result.logits.float().softmax(-1), min(TEACHER_TOKENS, result.logits.shape[-1]))
        pad = (0, TEACHER_TOKENS - ids.shape[-1])
        probs, ids = (torch.nn.functional.pad(x, pad) for x in (probs, ids))
        return torch.cat([taps, probs.bfloat16(), ids.int().contiguous().view(torch.bfloat16)], -1)

    def unpack(self, row: Tensor) -> Features:
        """Taps and teacher of a row."""
        if not self.teacher:
            return Features(row, None)
        taps, probs, ids = row.split([self.width - TEACHER_NUMBERS, TEACHER_TOKENS, 2 * TEACHER_TOKENS], -1)
        return Features(taps, Teacher(ids.contiguous().view(torch.int32).long(), probs.float()))


class CachedReader:
    """The same, through a file that holds the first texts of a set, as many as the limit allows."""

    def __init__(self, reader: Reader, texts: Sequence[Text], folder: Path, limit: float) -> None:
        """`limit` in bytes. Raises BadInput if the disk has less than that to give."""
        self.reader, self.texts = reader, texts
        sizes = np.array([len(t.tokens) for t in texts], np.int64) * reader.width
        ends = np.cumsum(sizes)
        self._kept = int(np.searchsorted(ends, limit / 2, side="right"))
        self._starts, self._sizes = ends - sizes, sizes
        self._open(folder) if self._kept else None

    def _open(self, folder: Path) -> None:
        folder = folder / self._key()
        numbers = int(self._starts[self._kept - 1] + self._sizes[self._kept - 1])
        path, checks = folder / "features.bin", folder / "checks.bin"
        if not path.exists():
            check_disk(folder, 2 * numbers, "--features", "the cache of target features")
            folder.mkdir(parents=True, exist_ok=True)
        self._values = _mapped(path, np.uint16, numbers)
        self._checks = _mapped(checks, np.uint32, self._kept)

    def _key(self) -> str:
        """Features of the same texts, target and layers share a folder."""
        digest = hashlib.sha256(repr((Identity.of(self.reader.target).fingerprint, self.reader.width)).encode())
        digest.update(repr((self.reader.target.tap_layers, str(self.reader.target.dtype), self._kept)).encode())
        for text in self.texts[: self._kept]:
            digest.update(text.tokens.tobytes())
        return digest.hexdigest()[:16]

    def __call__(self, index: int) -> Features:
        """Of text `index`, on the target's device."""
        if index >= self._kept:
            return self.reader.unpack(self.reader.row(self.texts[index].tokens))
        place = slice(int(self._starts[index]), int(self._starts[index] + self._sizes[index]))
        stored = self._values[place]
        if self._checks[index] == 0 or self._checks[index] != _checksum(stored):
            row = self.reader.row(self.texts[index].tokens)
            self._values[place] = row.cpu().contiguous().view(torch.int16).numpy().view(np.uint16).ravel()
            self._checks[index] = _checksum(stored)
            return self.reader.unpack(row)
        values = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
        return self.reader.unpack(values.view(-1, self.reader.width).to(self.reader.target.device))


def _mapped(path: Path, dtype: type, size: int) -> np.ndarray:
    """A file of `size` numbers in memory; made of zeros, which take no disk, if it is not there."""
    if not path.exists() or path.stat().st_size != size * np.dtype(dtype).itemsize:
        return np.memmap(path, dtype, "w+", shape=(size,))
    return np.memmap(path, dtype, "r+", shape=(size,))


def _checksum(values: np.ndarray) -> int:
    """Never 0, which says that nothing was stored."""
    return zlib.crc32(values.tobytes()) or 1


def default_limit(free: float) -> float:
    """Half of what is free, at most 20 GB."""
    return min(20 * GIGABYTE, free / 2)
