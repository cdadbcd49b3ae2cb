"""A Ray cluster of this machine alone, small, for tests."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

MEGABYTE = 1 << 20


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Two CPUs, nothing left behind. Its processes share the tests' cache: each would compile the operators anew."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        _start()
        try:
            yield
        finally:
            ray.shutdown()


def _start() -> None:
    """Ray gives a node thirty seconds to start, which a busy machine may need more than once."""
    import ray

    for attempt in range(3):
        try:
            ray.init(
                num_cpus=2, object_store_memory=80 * MEGABYTE, include_dashboard=False, log_to_driver=False,
                logging_level=logging.ERROR, _node_ip_address="127.0.0.1",
            )  # fmt: skip
            return
        except Exception as error:
            ray.shutdown()
            if attempt == 2 or "timed out" not in str(error).lower():
                raise


def processes(title: str) -> list[int]:
    """Ids of the workers of this process's cluster whose title has this word."""
    psutil = pytest.importorskip("psutil")

    def name(process: psutil.Process) -> str:
        try:
            return " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            return ""

    mine = {p.pid: name(p) for p in psutil.Process().children(recursive=True)}
    return [pid for pid, line in mine.items() if "ray::" in line and title in line]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])
