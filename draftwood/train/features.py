"""What a drafter reads from its target: tapped layers of every text, computed once and kept on disk in bf16.

Each text goes through the target alone, so that its features do not depend on other texts and a resumed run
sees the same numbers. The cache has a file for each text, with a checksum in it, so that whatever a kill or a power cut
left incomplete is computed again.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftwood.cache import KVCache
from draftwood.drafters.lattice import top_k
from draftwood.plan import Verified
from draftwood.target import Target
from draftwood.train.data import Identity
from draftwood.train.files import GIGABYTE, check_disk, free_bytes, make_folder
from draftwood.train.loss import Teacher
from draftwood.train.shards import Text
from draftwood.tree import Ints, chain_tree

TEACHER_TOKENS = 32  # likeliest next tokens kept for soft labels
TEACHER_NUMBERS = 3 * TEACHER_TOKENS  # in bf16 places: a probability, and an id in two
CHUNK = 2048  # tokens of a text that go through the target at once
SUFFIX = ".features"
CHECKSUM = 4  # bytes at the end of a file


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Features of one text of T tokens."""

    taps: Tensor  # [T, taps * hidden], bf16
    teacher: Teacher | None  # a row for each token: what the target expects after it


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
        return self.packed(result)

    def packed(self, result: Verified) -> Tensor:
        """`[T, width]` of T tokens' taps, and logits if there is a teacher."""
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
    """The same, through a folder with a file for each text, named by everything that decides its contents.

    Texts that other runs cached are found again, whatever else those runs read. The first of this run's texts that
    fit under the limit are kept; files of other texts are removed to make room for them, the oldest ones first.
    """

    def __init__(self, reader: Reader, texts: Sequence[Text], folder: Path, limit: float) -> None:
        """`limit` in bytes, of the whole folder. Raises BadInput if the disk has less than that to spare."""
        self.reader, self.texts = reader, texts
        kind = (Identity.of(reader.target).fingerprint, reader.target.tap_layers, reader.teacher)
        self._kind = repr((kind, str(reader.target.dtype))).encode()
        self._paths = [folder / f"{self._name(text)}{SUFFIX}" for text in texts]
        sizes = {path: row_bytes(len(t.tokens), reader.width) for path, t in zip(self._paths, texts, strict=True)}
        fitting = int(np.searchsorted(np.cumsum(list(sizes.values())), limit, side="right"))
        self._kept = set(list(sizes)[:fitting])
        if self._kept:
            room = sum(sizes[path] for path in self._kept)
            missing = sum(sizes[path] for path in self._kept if not path.exists())
            others = {path: size for path, size in cached_files(folder).items() if path not in self._kept}
            going = beyond(others, limit - room)
            freed = sum(others[path] for path in going)
            check_disk(folder, missing - freed, "--features", "the cache of target features")
            make_folder(folder, "--features")
            for path in going:
                with suppress(OSError):  # another user's: then it stays
                    path.unlink(missing_ok=True)

    def _name(self, text: Text) -> str:
        return hashlib.sha256(self._kind + text.tokens.tobytes()).hexdigest()[:32]

    def __call__(self, indices: Sequence[int]) -> list[Features]:
        """Of the texts with these numbers, on the target's device."""
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> Features:
        path, tokens = self._paths[index], self.texts[index].tokens
        row = read_row(path, len(tokens), self.reader.width)
        if row is None:
            row = self.reader.row(tokens)
            if path in self._kept:
                write_row(path, row)
        return self.reader.unpack(row.to(self.reader.target.device))


def row_bytes(tokens: int, width: int) -> int:
    """Bytes of a text's file: bf16 numbers and a checksum."""
    return 2 * tokens * width + CHECKSUM


def read_row(path: Path, tokens: int, width: int) -> Tensor | None:
    """`[tokens, width]` in bf16; None if the file is missing, or is not what was written."""
    try:
        stored = np.fromfile(path, np.uint8)
    except OSError:
        return None
    values = stored[:-CHECKSUM]
    if len(stored) != row_bytes(tokens, width) or stored[-CHECKSUM:].tobytes() != checksum(values.data):
        return None
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).view(tokens, width)


def write_row(path: Path, row: Tensor) -> None:
    """Write atomically, but without waiting for the disk: the checksum shows what a power cut damaged."""
    values = row.cpu().contiguous().view(torch.int16).numpy().tobytes()
    scratch = path.with_suffix(f".{os.getpid()}{SUFFIX}")
    try:
        scratch.write_bytes(values + checksum(values))
        os.replace(scratch, path)
    except OSError:  # if others have filled the disk meanwhile, that costs time, not the run
        scratch.unlink(missing_ok=True)


def checksum(values: bytes | memoryview) -> bytes:
    return zlib.crc32(values).to_bytes(CHECKSUM, "little")


def cached_files(folder: Path) -> dict[Path, int]:
    """What any run has left in a folder of features, with its bytes, the newest first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process removed it to make room
            facts = path.stat()
            found.append((facts.st_mtime, path, facts.st_size))
    return {path: size for _, path, size in sorted(found, reverse=True)}


def beyond(files: Mapping[Path, int], limit: float) -> list[Path]:
    """Of `files`, newest first, those beyond the first ones that have at most `limit` bytes together."""
    return [path for path, total in zip(files, accumulate(files.values()), strict=True) if total > limit]


def default_limit(folder: Path) -> float:
    """Half of the disk that is free or holds features already, at most 20 GB."""
    return min(20 * GIGABYTE, (free_bytes(folder) + sum(cached_files(folder).values())) / 2)


def feature_folder(data: Sequence[Path]) -> Path:
    """Beside the data; of several folders the first that has features already."""
    folders = [folder / "features" for folder in data]
    return next((folder for folder in folders if folder.exists()), folders[0])
