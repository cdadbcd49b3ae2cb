"""Shards of training data: Parquet files with a row for each text, which are whole or absent.

Whatever reads Parquet reads them: `pandas.read_parquet(folder)` or `datasets.load_dataset("parquet", data_files=…)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.errors import BadInput, MissingExtra, first_line
from draftwood.train.files import written_whole
from draftwood.tree import Ints

VERSION = "2"  # of the columns; 1 was never released
VERSION_KEY = "draftwood"


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A prompt and the target's answer to it."""

    tokens: Ints  # [T]
    prompt: int  # how many of them are the prompt
    temperature: float
    source: str  # the data set of the prompt; self: the target's own
    job: int  # number of the request that it answers
    thinking: str = "default"  # the chat template's switch: default, on or off


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a data folder, oldest first."""
    return sorted(folder.glob("shard-*.parquet"))


def write_shard(folder: Path, number: int, texts: Sequence[Text]) -> None:
    """`shard-<number>.parquet`, atomically."""
    arrow, parquet = _pyarrow()
    rows = [
        {
            "tokens": t.tokens,
            "prompt_tokens": t.prompt,
            "origin": t.source,
            "temperature": t.temperature,
            "thinking": t.thinking,
            "request": t.job,
        }
        for t in texts
    ]
    with written_whole(folder / f"shard-{number:05d}.parquet") as scratch:
        parquet.write_table(arrow.Table.from_pylist(rows, _schema(arrow)), scratch, compression="zstd")


def read_shard(path: Path) -> list[Text]:
    """Raises BadInput for a file that is damaged or something else."""
    arrow, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
        version = (table.schema.metadata or {}).get(VERSION_KEY.encode(), b"unknown").decode()
        if version != VERSION:
            raise ValueError(f"its version is {version} instead of {VERSION}")
        columns = table.select(_schema(arrow).names).cast(_schema(arrow)).to_pydict()
        texts = [
            Text(np.array(tokens, np.int64), prompt, heat, source, job, thinking)
            for tokens, prompt, source, heat, thinking, job in zip(*columns.values(), strict=True)
        ]
        if not all(map(is_whole, texts)):
            raise ValueError("a text in it has no tokens, negative ones, or a prompt of another length")
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise BadInput(
            f"{path} is no shard of training data ({first_line(error)}); make it again or delete it."
        ) from None
    return texts


def is_whole(text: Text) -> bool:
    """Whether it can be a prompt and an answer."""
    size = len(text.tokens)
    return size > 0 and int(text.tokens.min()) >= 0 and 0 <= text.prompt <= size


def require_pyarrow() -> None:
    """Raises MissingExtra, before any work, if the package that reads and writes shards is missing."""
    _pyarrow()


def _schema(arrow: Any) -> Any:
    """The columns of a shard, none of them with nulls."""
    kinds = {
        "tokens": arrow.list_(arrow.field("element", arrow.int32(), nullable=False)),
        "prompt_tokens": arrow.int32(),
        "origin": arrow.string(),
        "temperature": arrow.float32(),
        "thinking": arrow.string(),
        "request": arrow.int64(),
    }
    fields = [arrow.field(name, kind, nullable=False) for name, kind in kinds.items()]
    return arrow.schema(fields, {VERSION_KEY: VERSION})


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("Training data needs the package pyarrow; pip install 'draftwood[train]'.") from None
    return pyarrow, parquet
