"""Ending a long run: the first Ctrl-C or SIGTERM asks, a later one insists."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ECHO_S = 2.0  # a second signal within this time does not insist: launchers repeat the terminal's to their processes


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """Whether somebody asked to stop; the run ends itself where nothing is lost."""
    asked: float | None = None

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
        elif time.monotonic() - asked > ECHO_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
