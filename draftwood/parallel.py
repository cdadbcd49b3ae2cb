"""Several processes that hold one target together: the first one decides, the others are told.

Every process runs the same program and its own copy of the drafter; their forwards meet in the target's layers. Clocks
and samplers differ from process to process, so whatever depends on one (tree, width, tokens) is made by the leading
process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from draftwood import wire
from draftwood.config import config
from draftwood.errors import BadInput, DraftwoodError, LostProcess, first_line

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # for a process that neither answers nor dies: loading takes long where disks are slow


@dataclass(frozen=True, slots=True)
class Group:
    """This process's place among those that share a target; by default it has the target to itself."""

    rank: int = 0
    size: int = 1
    channel: Any = None  # what decisions travel through, on the CPU whatever the device

    @classmethod
    def join(cls, patience: timedelta = PATIENCE) -> Group:
        """Join the processes that torchrun started; a group of one where it was not used.

        If a process dies, the others end at once; if one hangs, they end after `patience`.

        Raises
        ------
        BadInput: more processes than GPUs here. LostProcess: the others cannot be reached.
        """
        here = config()
        if here.processes == 1:
            return cls()
        cuda = torch.cuda.is_available()
        if cuda and here.local_rank >= (count := torch.cuda.device_count()):
            raise BadInput(f"torchrun started process {here.local_rank + 1} here for {count} GPUs; start one for each.")
        with _heard(here.rank, here.processes):
            if not dist.is_initialized():
                if cuda:
                    torch.cuda.set_device(here.local_rank)
                dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)
            return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=patience))

    @property
    def leads(self) -> bool:
        """Whether this process decides, writes and talks."""
        return self.rank == 0

    def place(self, asked: str) -> str:
        """The device of this process, by name. Raises BadInput if another one was asked for."""
        if self.size == 1:
            return asked
        own = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        if asked not in ("auto", own.partition(":")[0]):
            raise BadInput(f"device is {asked!r}, but under torchrun each process takes its own ({own}); use auto.")
        return own

    def decide(self, make: Callable[[], T]) -> T:
        """What `make` gives in the leading process; the others do not run it. Its errors are raised everywhere.

        Raises TypeError for what `wire` cannot write.
        """
        if self.size == 1:
            return make()
        try:
            answer: Any = make() if self.leads else None
        except BaseException as error:
            self._tell(error if isinstance(error, DraftwoodError) else DraftwoodError(f"The first process: {error!r}"))
            raise
        told = self._tell(answer)
        if isinstance(told, DraftwoodError):
            raise told
        return answer if self.leads else told

    def every(self, act: Callable[[], T]) -> T:
        """What `act` gives here, once it has ended well in every process; else the first error is raised in all."""
        if self.size == 1:
            return act()
        mistake, made = None, None
        try:
            made = act()
        except DraftwoodError as error:
            mistake = error
        for told in [self._tell(mistake, rank) for rank in range(self.size)]:
            if told is not None:
                raise told
        return made  # type: ignore[return-value]  # there was no mistake, so it was made

    def listening(self) -> Any:
        """A context in which the loss of another process, noticed in a forward, becomes one sentence."""
        return _heard(self.rank, self.size) if self.size > 1 else nullcontext()

    def close(self) -> None:
        """Leave the group, all processes at the same time."""
        if self.size > 1:
            with _heard(self.rank, self.size):
                dist.barrier(group=self.channel)
            dist.destroy_process_group()

    def _tell(self, message: Any, source: int = 0) -> Any:
        """Send the message of the process `source` to all others: the length of its bytes, then these."""
        said = wire.write(message) if self.rank == source else b""
        length = torch.tensor([len(said)])
        with _heard(self.rank, self.size):
            dist.broadcast(length, source, group=self.channel)
            text = torch.frombuffer(bytearray(said or int(length)), dtype=torch.uint8)
            dist.broadcast(text, source, group=self.channel)
        return wire.read(text.numpy().tobytes())


ALONE = Group()


@contextmanager
def _heard(rank: int, size: int) -> Iterator[None]:
    """Turn a connection that breaks, or stays silent for too long, into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostProcess(
            f"Process {rank} of {size} has lost another one ({first_line(error)}); see what that one wrote "
            "last. Start all of them again."
        ) from error
