"""Results on disk, group by group, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.bench.records import check_writable, writing
from draftwood.errors import BadInput
from draftwood.store import differences

FILE = "groups.jsonl"
Row = dict[str, Any]


class Results:
    """Finished groups by name. `conditions` is what all of them must have been measured under."""

    def __init__(self, folder: Path | None, conditions: Row) -> None:
        """Raises BadInput for a folder that cannot be written, or holds results of other conditions."""
        check_writable(folder)
        self._file = None if folder is None else folder / FILE
        self.groups: dict[str, list[Row]] = {}
        conditions = json.loads(json.dumps(conditions))
        known = read(self._file) if self._file is not None and self._file.exists() else []
        if known and (told := differences(known[0].get("conditions", {}), conditions)):
            raise BadInput(f"--out {folder} holds results of another run ({told}); name another folder.")
        if self._file is not None and self._file.exists():
            drop_cut_line(self._file)
        if not known:
            self._append({"conditions": conditions})
        self.groups = {line["group"]: line["rows"] for line in known[1:]}

    def add(self, group: str, rows: Sequence[Row]) -> None:
        """Add a whole group, written at once."""
        self.groups[group] = list(rows)
        self._append({"group": group, "rows": self.groups[group]})

    def rows(self) -> list[Row]:
        return [row for rows in self.groups.values() for row in rows]

    def _append(self, line: Row) -> None:
        if self._file is None:
            return
        with writing(self._file.parent), self._file.open("a", encoding="utf-8") as file:
            file.write(as_line(line))


def as_line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def drop_cut_line(path: Path) -> None:
    """Remove what follows the last whole line: the next one would continue it."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read(path: Path) -> list[Row]:
    """Whole lines; only the last one can have been cut off, and it does not count then."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise BadInput(f"{path} is damaged ({error}); name another folder.") from None
