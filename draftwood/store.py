"""Small JSON files that are whole or absent: what was measured and learned, kept between processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping
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
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")  # nobody else's
    try:
        scratch.write_text(json.dumps(content), encoding="utf-8")
        os.replace(scratch, path)
    except BaseException:  # or a full disk would fill up with these
        scratch.unlink(missing_ok=True)
        raise


def differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What is not as asked, for a sentence; empty if all is."""
    changed = [name for name, value in asked.items() if found.get(name) != value]
    return ", ".join(f"{name} {found.get(name)!r} instead of {asked[name]!r}" for name in changed)
