"""A run as people see it: a moving bar, lines in a log, JSONL, and curves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftwood.errors import BadInput
from draftwood.train.files import write_text
from draftwood.train.loop import Progress as Step
from draftwood.train.loop import Watcher

LINE_EVERY_S = 60.0  # without a terminal: one line a minute
SMOOTH = 0.98
CURVES = 4  # positions whose accuracy is drawn


@contextmanager
def bar(total: int, label: str, shown: bool = True) -> Iterator[Callable[[int, str], None]]:
    """Yields a function of (done, what to say): it moves a bar in a terminal, and prints a line a minute elsewhere."""
    console = Console(stderr=True, highlight=False, quiet=not shown)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    said_at, began, first = time.monotonic(), time.monotonic(), -1
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=total)

        def update(done: int, text: str) -> None:
            nonlocal said_at, first
            first = done if first < 0 else first
            progress.update(task, completed=done, description=f"{label}  {text}")
            now = time.monotonic()
            if not console.is_terminal and now - said_at > LINE_EVERY_S:
                if done > first:
                    text += f"  {(total - done) * (now - began) / 60 / (done - first):.0f} min left"
                console.print(f"{label} {done}/{total}  {text}", soft_wrap=True)
                said_at = now

        yield update


class Log:
    """`training/log.jsonl`: a line for each step and each evaluation."""

    def __init__(self, out: Path, step: int) -> None:
        """Goes on after `step`: what a killed run wrote after its last checkpoint is dropped."""
        path = out / "training" / "log.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(out) if line["step"] <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read_log(out: Path) -> list[dict[str, Any]]:
    """Lines written so far; the last may have been cut off by a kill."""
    try:
        lines = (out / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"The log of {out} cannot be read ({error.strerror}).") from None
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


@dataclass(slots=True, eq=False)
class Show:
    """Turns what the loop reports into a bar, log lines and curves."""

    out: Path
    update: Callable[[int, str], None]
    stop: Callable[[], bool]
    log: Log | None = None
    loss: float = float("nan")
    tau: str = ""

    def watcher(self) -> Watcher:
        return Watcher(self._step, self._tau, self._begin, self.stop)

    def silent(self) -> Watcher:
        """The watcher of a process that does not lead."""
        return Watcher(stop=self.stop)

    def _begin(self, step: int) -> None:
        self.log = Log(self.out, step)
        self.update(step, "resumed" if step else "")

    def _step(self, step: Step) -> None:
        assert self.log is not None
        self.log.write({key: rounded(value) for key, value in asdict(step).items()})
        self.loss = step.loss if np.isnan(self.loss) else SMOOTH * self.loss + (1 - SMOOTH) * step.loss
        right = " ".join(f"{a:.2f}" for a in step.accuracy[:CURVES])
        speed = step.predicted / step.seconds
        self.update(step.step, f"loss {self.loss:.3f}  right {right}  {speed:.0f} tokens/s{self.tau}")

    def _tau(self, step: int, tau: Mapping[str, float]) -> None:
        assert self.log is not None
        self.log.write({"step": step, "tau": rounded(dict(tau))})
        self.tau = "".join(f"  τ {name} {value:.2f}" for name, value in tau.items())
        save_curves(self.out)


def rounded(value: Any) -> Any:
    """Floats at six digits, in lists and dicts too."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def save_curves(out: Path) -> str:
    """Write training/curves.png from the log. Returns a sentence that says what happened."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No curves: matplotlib is not installed (pip install 'draftwood[bench]')."
    lines = read_log(out)
    steps, taus = [x for x in lines if "loss" in x], [x for x in lines if "tau" in x]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, accuracy, tau = figure.subplots(1, 3)
    at = [x["step"] for x in steps]
    loss.plot(at, smooth([x["loss"] for x in steps]))
    loss.set(xlabel="step", ylabel="loss")
    for position in range(min(CURVES, len(steps[0]["accuracy"]) if steps else 0)):
        accuracy.plot(at, smooth([x["accuracy"][position] for x in steps]), label=f"position {position + 1}")
    accuracy.set(xlabel="step", ylabel="share of right predictions")
    for policy in taus[0]["tau"] if taus else ():
        tau.plot([x["step"] for x in taus], [x["tau"][policy] for x in taus], marker="o", label=policy)
    tau.set(xlabel="step", ylabel="τ on held-out texts")
    for axes in (accuracy, tau):
        if axes.lines:
            axes.legend(fontsize="small")
    path = out / "training" / "curves.png"
    figure.savefig(path, dpi=110)
    return f"Curves: {path}."


def smooth(values: list[float]) -> list[float]:
    """A running mean that starts at the first value."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else SMOOTH * out[-1] + (1 - SMOOTH) * value)
    return out
