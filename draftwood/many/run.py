"""`draftwood batch`: every line of a file is answered once, whatever happens to the process in between."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from draftwood.embedded import embedded_target
from draftwood.errors import MissingExtra
from draftwood.loading import load_tokenizer
from draftwood.many.folder import Folder, open_folder
from draftwood.many.lines import Fill, Line, parse
from draftwood.many.options import BatchOptions
from draftwood.many.outcome import written
from draftwood.many.source import Source
from draftwood.many.table import write_table
from draftwood.many.writer import Keep, Writer, answer_all
from draftwood.serve.service import called
from draftwood.train.files import told_if_unwritable
from draftwood.train.show import bar


@dataclass(slots=True)
class Tally:
    """Lines of the folder, and tokens of this run."""

    lines: int
    answered: int
    failed: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        failed = f", {self.failed} of them with an error" if self.failed else ""
        return f"{self.answered + self.failed} of {self.lines} lines are done{failed}"


def run_batch(options: BatchOptions) -> Tally:
    """Answer the lines that have no result yet. Raises BadInput or BadModel before anything is written.

    KeyboardInterrupt comes through once everything that is finished is on the disk.
    """
    source, fill = Source(options.source), _fill(options)
    survey = source.survey(fill)
    with open_folder(options.out, {"--in": survey.digest, **options.shaping()}) as folder:
        tally = Tally(survey.lines, 0, 0, 0, 0.0)
        try:
            if len(folder.done) < survey.lines:
                with bar(survey.lines, "writing") as update:
                    write = _write_on_cluster if options.ray else _write
                    write(options, fill, _left(source, fill, folder), partial(_keeping, folder, tally, update))
        finally:
            tally.answered, tally.failed = len(folder.done) - folder.failed, folder.failed
            _say(tally)
        if source.parquet:
            with told_if_unwritable(options.out):
                write_table(options.out)
    return tally


def to_json(tally: Tally) -> dict[str, Any]:
    rate = tally.tokens / tally.seconds if tally.seconds else None
    return {**asdict(tally), "tokens_per_s": rate}


def _fill(options: BatchOptions) -> Fill:
    target = options.target or str(embedded_target())
    names = (options.name or called(target), target)
    raw = options.raw or load_tokenizer(target, options.trust_remote_code).chat_template is None
    return Fill(names, options.max_new_tokens, options.temperature, options.seed, raw)


def _left(source: Source, fill: Fill, folder: Folder) -> Iterator[Line]:
    for number, text in source.texts():
        line = parse(number, text, fill)
        if line.custom_id not in folder.done:
            yield line


def _keeping(folder: Folder, tally: Tally, update: Callable[[int, str], None]) -> Keep:
    """Results go to the disk first, then into the bar. Seconds count from this call."""
    began = time.monotonic()
    update(len(folder.done), "")

    def keep(result: dict[str, Any]) -> None:
        folder.add(result)
        tally.tokens, tally.seconds = tally.tokens + written(result), time.monotonic() - began
        update(len(folder.done), f"{tally.tokens / tally.seconds:.0f} tokens/s")

    return keep


def _write(options: BatchOptions, fill: Fill, lines: Iterator[Line], keeping: Callable[[], Keep]) -> None:
    writer = Writer(options.load(), options.serving())
    try:
        asyncio.run(answer_all(writer, lines, keeping()))
    finally:
        writer.close()


def _write_on_cluster(options: BatchOptions, fill: Fill, lines: Iterator[Line], keeping: Callable[[], Keep]) -> None:
    try:
        from draftwood.many.cluster import write_on_cluster
    except ImportError as missing:
        raise MissingExtra(f"--ray needs the package {missing.name}; pip install 'draftwood[ray]'.") from None
    write_on_cluster(options, fill, lines, keeping())


def _say(tally: Tally) -> None:
    rate = f", {tally.tokens / tally.seconds:.0f} tokens/s" if tally.tokens else ""
    unfinished = tally.answered + tally.failed < tally.lines
    print(f"{tally}{rate}{'; the same command goes on' if unfinished else ''}.", file=sys.stderr, flush=True)
