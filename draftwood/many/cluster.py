"""`draftwood batch --ray`: actors of a Ray cluster, each with a model of its own, answer the lines.

Ray Data hands small blocks of lines to actors. It restarts actors that died, and hands out their blocks again. Only
the process that was started writes results, so a line that actors answer twice still counts once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext

from draftwood.config import ray_address
from draftwood.errors import BadInput, BadModel, DraftwoodError, first_line
from draftwood.many.lines import Fill, Line, parse
from draftwood.many.options import BatchOptions
from draftwood.many.outcome import Found, outcome
from draftwood.many.writer import AHEAD, Keep, Writer, answer_alone, undeserved

ANSWER_S = 5.0  # that a cluster's port gets to accept a connection; Ray itself tries for minutes
LOCAL = ("localhost", "127.0.0.1", "::1")
BLOCK = 8  # lines that come back together: after a kill, an actor writes them all again


class Answerer:
    """An actor's model. Blocks come on several threads and share its rounds."""

    def __init__(self, options: BatchOptions, fill: Fill, alone: bool) -> None:
        """`alone`: each block is a line by itself."""
        self._fill, self._alone, self._mistake = fill, alone, ""
        try:
            self._writer = Writer(options.load(), options.serving())
        except DraftwoodError as mistake:  # raised here, it would be lost in a report about a dead actor
            self._mistake = str(mistake)
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, block: dict[str, Any]) -> dict[str, list[Any]]:
        """Results as JSON, and whether another line may be to blame for them; or why there is no model."""
        if self._mistake:
            return {"mistake": [self._mistake]}
        texts = [bytes(text).decode(errors="surrogateescape") for text in block["text"]]
        lines = [parse(int(n), text, self._fill) for n, text in zip(block["number"], texts, strict=True)]
        try:
            found = asyncio.run_coroutine_threadsafe(self._answers(lines), self._loop).result()
        except BadModel as broken:
            return {"mistake": [str(broken)]}
        results = [json.dumps(outcome(line.custom_id, f)) for line, f in zip(lines, found, strict=True)]
        numbers = [line.number for line in lines]
        return {"number": numbers, "result": results, "spoilt": [undeserved(f) for f in found]}

    async def _answers(self, lines: list[Line]) -> list[Found]:
        if self._alone:
            return [await answer_alone(self._writer, line) for line in lines]
        found = await asyncio.gather(*(self._writer.answer(line) for line in lines))
        for one in found:
            await self._writer.check(one)
        return found


def write_on_cluster(options: BatchOptions, fill: Fill, lines: Iterable[Line], keep: Keep) -> None:
    """`keep` gets a result for each line. Raises BadModel and BadInput as one process would.

    Lines that failed with a whole round are written again, each by itself.
    """
    rows = [{"number": line.number, "text": line.text.encode(errors="surrogateescape")} for line in lines]
    with _cluster():
        spoilt = set()
        for row in _results(options, fill, rows, BLOCK, alone=False):
            if row["spoilt"]:
                spoilt.add(row["number"])
            else:
                keep(json.loads(row["result"]))
        if again := [row for row in rows if row["number"] in spoilt]:
            for row in _results(replace(options, max_concurrency=1), fill, again, 1, alone=True):
                keep(json.loads(row["result"]))


def _results(
    options: BatchOptions, fill: Fill, rows: list[dict[str, Any]], block: int, alone: bool
) -> Iterator[dict[str, Any]]:
    """Rows as the actors return them, in any order."""
    gpus = 0 if options.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    replicas = options.replicas or max(1, gpus)
    calls = -(-AHEAD * options.max_concurrency // block)
    data = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // block)).map_batches(
        Answerer,
        batch_size=None,
        fn_constructor_args=(options, fill, alone),
        compute=ActorPoolStrategy(
            size=replicas,
            max_concurrent_calls_per_actor=calls,
            max_tasks_in_flight_per_actor=calls,
            enable_true_multi_threading=True,
        ),
        num_gpus=1 if gpus else 0,
        num_cpus=0 if gpus else min(1.0, ray.cluster_resources().get("CPU", 1.0) / (2 * replicas)),
    )
    for row in data.iter_rows():
        if "mistake" in row:
            raise BadModel(row["mistake"])
        yield row


@contextmanager
def _cluster() -> Iterator[None]:
    """The cluster that this process belongs to, or the one that RAY_ADDRESS names, or one of its own."""
    context = DataContext.get_current()
    shown, context.enable_progress_bars = context.enable_progress_bars, False
    joined = ray.is_initialized()
    try:
        if not joined:
            _join()
        yield
    finally:
        context.enable_progress_bars = shown
        if not joined:
            ray.shutdown()


def _join() -> None:
    """Raises BadInput where no cluster answers."""
    address = ray_address()
    try:
        if address and (place := re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)):
            _knock(place[1].strip("[]"), int(place[2]))
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        found = f"RAY_ADDRESS is {address!r}" if address else "RAY_ADDRESS is not set"
        wanted = "name the host:port of one that runs, or set it to local for one in this process"
        raise BadInput(f"{found}, and no Ray cluster can be used ({first_line(error)}); {wanted}.") from None


def _knock(host: str, port: int) -> None:
    """Raises OSError if nothing listens there, ValueError for a port that cannot exist."""
    if port > 65535:  # the system would connect to another port
        raise ValueError(f"there is no port {port}")
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except ConnectionRefusedError:
        if host not in LOCAL:
            raise
        # Ray replaces these names by the machine's address, and a cluster may listen at that one alone.
        socket.create_connection((ray.util.get_node_ip_address(), port), ANSWER_S).close()
