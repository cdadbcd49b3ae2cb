"""Files that are whole or absent, and the sentences for folders that cannot be used."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftwood.errors import BadInput

GIGABYTE = 1e9
LOCK = ".lock"
WEIGHTS = "model.safetensors"  # of a drafter's folder


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A scratch file that takes the place of `path` once it is written: a kill leaves the old one or the new one."""
    scratch = scratch_of(path)
    try:
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:  # Ctrl-C, too
        scratch.unlink(missing_ok=True)
        raise


def scratch_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f"{path.name}.tmp")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all."""
    with written_whole(path) as scratch:
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch, dict(metadata))
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(path)) from None


def write_text(path: Path, text: str) -> None:
    """A text file, whole or not at all."""
    with written_whole(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


@contextmanager
def told_if_unwritable(folder: Path) -> Iterator[None]:
    """Report a write that fails in the middle of a run as one sentence (BadInput)."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"--out {folder}: writing failed ({error.strerror or error}); what was saved before is whole: free space, "
            "then run the same command again, and it goes on from there."
        ) from None


def make_folder(folder: Path, flag: str) -> None:
    """Make `folder` if needed. Raises BadInput, naming the flag, if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{flag} {folder}: nothing can be written there ({error.strerror}); name another.") from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Raises BadInput if another process writes there now."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BadInput(f"--out {folder}: another process is writing there; wait for it, or name another.") from None
    try:
        yield
    finally:
        lock.release()


def free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(folder: Path, needed: float, flag: str, what: str) -> None:
    """Raises BadInput before hours are spent if `needed` bytes do not fit."""
    free = free_bytes(folder)
    if needed > free:
        raise BadInput(
            f"{flag} {folder}: {what} needs about {needed / GIGABYTE:.2g} GB and {free / GIGABYTE:.2g} GB are free "
            "there; free space or name another folder."
        )
