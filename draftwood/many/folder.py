"""The output folder: results.jsonl only grows, line by whole line, so a run can be killed at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from draftwood.errors import BadInput
from draftwood.many.outcome import failed
from draftwood.store import differences, read_json, write_json
from draftwood.train.files import alone, make_folder, told_if_unwritable

RESULTS, MANIFEST = "results.jsonl", "batch.json"


@dataclass(slots=True, eq=False)
class Folder:
    """What is finished, and the file that more is appended to."""

    path: Path
    file: BinaryIO
    done: set[str] = field(default_factory=set)  # custom_ids
    failed: int = 0

    def add(self, result: Mapping[str, Any]) -> None:
        """Keep a result: when this returns, it is on the disk."""
        try:
            self.file.write(json.dumps(result).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise BadInput(f"--out {self.path}: results cannot be written ({error.strerror}).") from None
        self.count(result)

    def count(self, result: Mapping[str, Any]) -> None:
        self.done.add(result["custom_id"])
        self.failed += failed(result)


@contextmanager
def open_folder(path: Path, manifest: Mapping[str, Any]) -> Iterator[Folder]:
    """The folder with what earlier runs of the same input and settings left in it.

    Raises BadInput if it holds another run's results, is written by another process now, or is damaged.
    """
    make_folder(path, "--out")
    with alone(path):
        with told_if_unwritable(path):
            _claim(path, manifest)
            file = (path / RESULTS).open("ab+")
        try:
            folder = Folder(path, file)
            _recover(folder)
            yield folder
        finally:
            with suppress(OSError):  # kept results are on the disk already; if it is full, the rest fails again
                file.close()


def _claim(path: Path, manifest: Mapping[str, Any]) -> None:
    """Record which run's results the folder holds, or refuse to mix two runs."""
    results = path / RESULTS
    begun = results.exists() and results.stat().st_size
    if begun and (told := differences(read_json(path / MANIFEST) or {}, manifest)):
        raise BadInput(f"--out {path} holds the results of another run ({told}); name another folder.")
    write_json(path / MANIFEST, manifest)


def _recover(folder: Folder) -> None:
    """Read what is there. A last line that a kill cut off is removed."""
    end = 0
    folder.file.seek(0)
    for number, line in enumerate(folder.file, start=1):
        if not line.endswith(b"\n"):
            folder.file.truncate(end)
            break
        end += len(line)
        try:
            folder.count(json.loads(line))
        except (ValueError, KeyError, TypeError):
            raise BadInput(
                f"{folder.path / RESULTS}: line {number} is damaged; delete it, and its answer is written again."
            ) from None
