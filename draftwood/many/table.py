"""Results as Parquet, where the prompts were Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from draftwood.many.folder import RESULTS
from draftwood.many.outcome import failed

ROWS = 1024


def write_table(folder: Path) -> Path:
    """results.parquet from results.jsonl, atomically. Columns: custom_id, text (null where there is none), status_code,
    response and error (JSON)."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    names = ("custom_id", "text", "status_code", "response", "error")
    schema = pa.schema([(name, pa.int32() if name == "status_code" else pa.string()) for name in names])
    path = folder / "results.parquet"
    scratch = path.with_name(path.name + ".tmp")
    with ParquetWriter(scratch, schema) as writer:
        rows = _rows(folder)
        while some := list(islice(rows, ROWS)):
            writer.write_table(pa.Table.from_pylist(some, schema))
    os.replace(scratch, path)
    return path


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / RESULTS).open(encoding="utf-8") as file:
        for line in file:
            result = json.loads(line)
            response, error = result["response"], result["error"]
            yield {
                "custom_id": result["custom_id"],
                "text": None if failed(result) else _text(response["body"]),
                "status_code": response and response["status_code"],
                "response": response and json.dumps(response["body"]),
                "error": error and json.dumps(error),
            }


def _text(body: dict[str, Any]) -> str | None:
    """The text of the first choice."""
    choice = body["choices"][0]
    found: str | None = choice["message"]["content"] if "message" in choice else choice["text"]
    return found
