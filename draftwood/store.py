"""Small JSON files that are whole or absent: what was measured and learned, kept between processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def cached_file(folder: Path, kind: str, identity: str) -> Path:
    """One file for each `identity`; its name has a part for people and a hash that tells files apart."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", identity)[:60].strip("-")
    return folder / f"{kind}-{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"


def read_json(path: Path) -> Any:
    """The file's content; None if it is absent, unreadable or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, content: object) -> None:
    """Write atomically, making folders as needed. Raises OSError where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")  # no other writer has this name
    try:
        scratch.write_text(json.dumps(content), encoding="utf-8")
        os.replace(scratch, path)
    except BaseException:  # or a full disk would fill up with these
        scratch.unlink(missing_ok=True)
        raise


def measured_once(
    folder: Path | None,
    kind: str,
    name: str,
    figures: Sequence[str],
    measure: Callable[[], Mapping[str, float]],
    trusted: Callable[[], bool] = lambda: True,
) -> Mapping[str, float]:
    """The `figures` that `measure` finds, or that it found before under this `name` if `folder` keeps them.

    They are kept if they can be `trusted` afterwards. If the file is damaged, they are measured again; if the folder
    cannot be written, they are at each start.
    """
    if folder is None:
        return measure()
    file = cached_file(folder, kind, name)
    if known := _figures(read_json(file), name, figures):
        return known
    found = measure()
    if trusted():
        with contextlib.suppress(OSError):
            write_json(file, {"name": name, **found})
    return found


def _figures(data: object, name: str, figures: Sequence[str]) -> dict[str, float] | None:
    """Kept measurements; None if the file holds anything else."""
    if not isinstance(data, dict) or data.get("name") != name:
        return None
    if not all(isinstance(data.get(f), float) and data[f] > 0 for f in figures):
        return None
    return {f: data[f] for f in figures}


def differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What differs from what was asked, as part of a sentence; empty if nothing does."""
    changed = [name for name, value in asked.items() if found.get(name) != value]
    return ", ".join(f"{name} {found.get(name)!r} instead of {asked[name]!r}" for name in changed)
