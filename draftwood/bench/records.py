"""The output folder: runs, rounds and, if asked for, the trace grow while measuring; `summary.json` comes last."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from draftwood.bench.stats import Run
from draftwood.errors import BadInput
from draftwood.recording import Answer, Header, append, start

TRACE = "trace.jsonl.gz"
OF_A_RUN = (TRACE, "summary.json", "report.html")  # a reader would take an earlier run's for this one's


def check_writable(folder: Path | None) -> None:
    """Make the folder if needed. Raises BadInput if nothing can be written there; None is fine."""
    if folder is None:
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Report a write that fails as one sentence (BadInput)."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"--out {folder}: nothing can be written there ({error.strerror}); name another folder."
        ) from None


@contextmanager
def recording(
    folder: Path | None, header: Header | None = None, temperature: float = 0.0
) -> Iterator[Callable[[Sequence[Run]], None]]:
    """A function that appends the runs of a turn to the folder's files and, given a `header`, to a trace."""
    if folder is None:
        yield lambda runs: None
        return
    with ExitStack() as files:
        with writing(folder):
            runs, rounds = (files.enter_context((folder / name).open("w")) for name in ("runs.jsonl", "rounds.jsonl"))
            for name in OF_A_RUN:
                (folder / name).unlink(missing_ok=True)
            if header is not None:
                start(folder / TRACE, header)

        def write(turn: Sequence[Run]) -> None:
            with writing(folder):
                write_turn(turn, runs, rounds)
                if header is not None:
                    append(folder / TRACE, [answer(run, temperature) for run in turn if run.rounds])

        yield write


def answer(run: Run, temperature: float) -> Answer:
    """A run as a trace keeps it."""
    size, seconds = run.prompt_tokens, (run.prefill_s, run.decode_s)
    of = run.prompt, run.dataset, run.method, temperature, size, run.token_ids
    return Answer(*of, *seconds, run.rounds, run.turn)


def write_turn(turn: Sequence[Run], runs: TextIO, rounds: TextIO) -> None:
    for run in turn:
        runs.write(json.dumps(run.to_json()) + "\n")
        where = {"prompt": run.prompt, "dataset": run.dataset, "turn": run.turn, "policy": run.method}
        for index, record in enumerate(run.rounds):
            rounds.write(json.dumps({**where, "round": index, **record.to_json()}) + "\n")
    runs.flush()
    rounds.flush()


def write_summary(folder: Path | None, facts: dict[str, Any]) -> None:
    if folder is None:
        return
    with writing(folder):
        (folder / "summary.json").write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
