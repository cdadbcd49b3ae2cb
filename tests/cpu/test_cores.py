"""Steps take as many threads as have cores, whatever other programs do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draftwood import container, cores, threads
from draftwood.cores import EVERY_S, Load, fitting, taken_s, usable

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what cores do")


@pytest.mark.parametrize(
    ("most", "free", "expected"),
    [
        (2, 2.0, 2),
        (2, 1.5, 2),
        (2, 1.3, 1),
        (2, 1.0, 1),
        (2, 0.1, 1),
        (8, 16.0, 8),
        (8, 6.5, 7),
        (8, 6.3, 6),
        (4, 1.7, 2),
        (1, 9, 1),
    ],
)
def test_a_thread_needs_a_core_or_what_two_would_share_of_one(most: int, free: float, expected: int) -> None:
    assert fitting(most, free) == expected


@linux
def test_a_busy_neighbour_is_seen() -> None:
    everywhere = os.sched_getaffinity(0)
    mine = sorted(everywhere)[:2]
    os.sched_setaffinity(0, mine)  # and the neighbour's
    try:
        load = Load()
        assert load.free() == min(container.cores(), len(mine)) and load.others() is None, "nothing is known yet"
        with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as neighbour:
            time.sleep(EVERY_S)
            free, others = load.free(), load.others()
            neighbour.kill()
        assert free < len(mine) - 0.5 and others is not None and others > 0.5
    finally:
        os.sched_setaffinity(0, everywhere)


def stat(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    file = folder / "stat"
    file.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(cores, "STAT", file)
    monkeypatch.setattr(cores.time, "process_time", lambda: 2.0)


@linux
@pytest.mark.parametrize(("nice", "seconds"), [(0, 10 + 1 + 1 + 1 + 1 - 2), (5, 10 + 20 + 1 + 1 + 1 + 1 - 2)])
def test_counted_is_what_competes_for_the_cores_of_this_process(
    nice: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what is idle, its own, on other cores, or nicer than it is."""
    core, tick = min(os.sched_getaffinity(0)), os.sysconf("SC_CLK_TCK")
    ticks = " ".join(str(seconds * tick) for seconds in (10, 20, 1, 1000, 1000, 1, 1, 1, 0, 0))
    stat(tmp_path, monkeypatch, f"cpu  {ticks}", f"cpu{core} {ticks}", f"cpu{core}9 {ticks}", "intr 1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {core})
    monkeypatch.setattr(os, "getpriority", lambda which, who: nice)
    assert taken_s() == seconds


@linux
@pytest.mark.parametrize("lines", [["cpu0 some"], ["cpu0 1 2"], [""]])
def test_where_nothing_is_told_all_cores_are_free(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat(tmp_path, monkeypatch, *lines)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert taken_s() == 0 and Load().free() == usable() == 1


def test_compiled_steps_ask_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for free, expected in ((8.0, 8), (3.0, 3), (8.0, 8)):
        monkeypatch.setattr(Load, "free", lambda self, free=free: free)
        assert cores.threads() == expected
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(Load, "free", lambda self: pytest.fail("nothing to find out"))
    assert cores.threads() == 1


def test_doctor_says_how_many_follow_the_load() -> None:
    assert threads.followed(2, 1.9) is None
    assert re.match(r"4, but 2 just now: 2\.1 of \d+ cores are free", threads.followed(4, 2.1) or "")
