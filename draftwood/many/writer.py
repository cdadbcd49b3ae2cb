"""Lines in, results out, as many at once as the engine has seats: a finished one makes room for the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

from draftwood.errors import BadModel, DraftwoodError
from draftwood.llm import LLM
from draftwood.many.lines import BadLine, Line
from draftwood.many.outcome import Found, outcome
from draftwood.serve.failure import Refused
from draftwood.serve.options import Options
from draftwood.serve.protocol import CompletionRequest
from draftwood.serve.scheduler import MISTAKE
from draftwood.serve.service import Service

LOG = logging.getLogger("draftwood.batch")
AHEAD = 2  # lines that are prepared for each seat, so that none is ever free
TRIED = 8  # tokens that show whether rounds work: the first one only needs the prompt to be read
PATIENCE = 10  # times that a line is tried while others hold the memory that it needs
PASSING = ("out_of_memory", "shutting_down")
ELSEWHERE = "needs_memory"  # a run with more memory can answer
UNDESERVED = ("internal_error", ELSEWHERE, *PASSING)

GOES_ON = "The same command goes on."

Keep = Callable[[dict[str, Any]], None]


class Writer:
    """A model that answers lines."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self._service = Service(llm, options)
        self.places = AHEAD * self._service.scheduler.seats
        self._service.scheduler.start()

    async def answer(self, line: Line) -> Found:
        """The body of the answer, or why there is none."""
        if isinstance(line.asked, Refused | BadLine):
            return line.asked
        try:
            return await (await self._service.begin(line.asked)).whole()
        except Refused as why:
            return why
        except DraftwoodError as mistake:
            return Refused(400, str(mistake))
        except Exception:  # one line failed; the others go on
            LOG.exception("line %s could not be answered", line.number)
            return MISTAKE

    async def check(self, found: Found, alone: bool = False) -> None:
        """Raises BadModel if an error means that no line will be answered any more.

        The error of a line that was written `alone` means it, too, if a trial request fails as well.
        """
        if not undeserved(found):
            return
        why = self._service.scheduler.sick
        if why is None and alone and not await self._works():
            why = "Nothing is answered any more."
        if why:
            raise BadModel(f"{why} {found} {GOES_ON}")

    async def _works(self) -> bool:
        asked = {"model": self._service.name, "prompt": [0], "max_tokens": TRIED, "ignore_eos": True}
        try:
            await (await self._service.begin(CompletionRequest.model_validate(asked))).whole()
        except (Refused, DraftwoodError):
            return False
        return True

    def close(self) -> None:
        """Give up what is under way."""
        self._service.scheduler.drain(0.0)


def undeserved(found: Found) -> bool:
    """Whether an error may be the fault of another line in the same round."""
    return isinstance(found, Refused) and found.code in UNDESERVED


async def answer_all(writer: Writer, lines: Iterator[Line], keep: Keep) -> None:
    """`keep` gets a result for each line, in the order in which they are ready.

    Lines that failed with a whole round are written again, each by itself: then only those that are to blame fail.
    """
    again: list[Line] = []

    async def work() -> None:
        for line in lines:  # one iterator for all workers: the next free one takes the next line
            found = await writer.answer(line)
            await writer.check(found)
            if undeserved(found):
                again.append(line)
            else:
                keep(outcome(line.custom_id, found))

    await asyncio.gather(*(work() for _ in range(writer.places)))
    for line in again:
        keep(outcome(line.custom_id, await answer_alone(writer, line)))


async def answer_alone(writer: Writer, line: Line) -> Found:
    """The answer to a line that is written by itself. Raises BadModel if it may be answered another time."""
    found = await _patiently(writer, line)
    await writer.check(found, alone=True)
    return found


async def _patiently(writer: Writer, line: Line) -> Found:
    """Answer a line; wait for memory that others hold for a while. Raises BadModel if none comes, or all lines fail."""
    for _ in range(PATIENCE):
        found = await writer.answer(line)
        await writer.check(found)
        if not (isinstance(found, Refused) and found.code in (ELSEWHERE, *PASSING)):
            return found
        if found.code == ELSEWHERE:
            break
        await asyncio.sleep(found.retry_s or 1)
    raise BadModel(f"{found} {GOES_ON}")
