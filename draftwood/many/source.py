"""The input file, JSONL or Parquet, read as often as needed and never held in memory."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import BadInput, MissingExtra
from draftwood.many.lines import Fill, Line, parse

CHUNK = 1 << 20  # bytes
ROWS = 256


@dataclass(frozen=True, slots=True)
class Survey:
    """What reading the whole file once shows."""

    lines: int
    valid: int
    digest: str


@dataclass(frozen=True, slots=True)
class Source:
    """Lines of a file."""

    path: Path

    @property
    def parquet(self) -> bool:
        return self.path.suffix == ".parquet"

    def texts(self) -> Iterator[tuple[int, str]]:
        """Numbers from 1 and JSON. Empty lines are left out. Raises BadInput for a file that cannot be read."""
        try:
            yield from self._rows() if self.parquet else self._lines()
        except OSError as error:
            raise BadInput(f"--in {self.path}: the file cannot be read ({error.strerror or error}).") from None

    def survey(self, fill: Fill) -> Survey:
        """Check every line. Raises BadInput if a custom_id occurs twice, or no line can be used."""
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise BadInput(f"--in {self.path} is a pipe or device, but is read several times; save it to a file first.")
        numbers: dict[str, int] = {}
        valid, bad = 0, list[Line]()
        for number, text in self.texts():
            line = parse(number, text, fill)
            if line.custom_id in numbers:
                raise BadInput(
                    f"--in {self.path}: the custom_id {line.custom_id!r} stands in lines {numbers[line.custom_id]} and "
                    f"{number}; give every line its own."
                )
            numbers[line.custom_id] = number
            if line.valid:
                valid += 1
            elif not bad:
                bad.append(line)
        if not valid:
            why = f"line {bad[0].number}: {bad[0].asked}" if bad else "it is empty"
            raise BadInput(f"--in {self.path}: the file has no line that can be used ({why}).")
        return Survey(len(numbers), valid, self._digest())

    def _lines(self) -> Iterator[tuple[int, str]]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, line.decode("utf-8", errors="surrogateescape")

    def _rows(self) -> Iterator[tuple[int, str]]:
        try:
            from pyarrow import ArrowInvalid
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise MissingExtra("Reading Parquet needs the package pyarrow; pip install 'draftwood[batch]'.") from None
        try:
            batches = ParquetFile(self.path).iter_batches(ROWS)
        except ArrowInvalid as error:
            raise BadInput(f"--in {self.path}: the file is not Parquet ({error}).") from None
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield number, json.dumps(_dense(row), default=str)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


def _dense(value: Any) -> Any:
    """Without the nulls that a column has where a row has no value; a body may be JSON text."""
    if isinstance(value, list):
        return [_dense(one) for one in value]
    if isinstance(value, dict):
        held = {key: _dense(one) for key, one in value.items() if one is not None}
        return {**held, "body": _json(held["body"])} if isinstance(held.get("body"), str) else held
    if isinstance(value, bytes):  # text, as Spark and others write it; what is not UTF-8 is kept as in JSONL
        return value.decode("utf-8", errors="surrogateescape")
    # A column of whole numbers in which some are missing comes as floats.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
