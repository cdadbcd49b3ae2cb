"""Several processes as one: what `accelerate launch` started, or this process alone."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.config import config
from draftwood.errors import MissingExtra
from draftwood.train.loss import Outcome


@dataclass(frozen=True, slots=True)
class Fleet:
    """This process's place among all that train the same drafter."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # of this process; None: any

    @classmethod
    def join(cls) -> Fleet:
        """The place that accelerate gives; alone where only one process was started. Raises MissingExtra without it."""
        if importlib.util.find_spec("accelerate") is None:
            if config().processes > 1:
                raise MissingExtra(
                    "Several processes train with the package accelerate; pip install 'draftwood[train]'."
                )
            return cls()
        from accelerate import PartialState

        state: Any = PartialState(cpu=not torch.cuda.is_available())
        return cls(state.process_index, state.num_processes, state.device) if state.num_processes > 1 else cls()

    def leave(self) -> None:
        """Leave all together: a process that ends while another still listens to it can abort that one."""
        if self.size > 1:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Added up over all processes, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def sum_gradients(self, model: nn.Module) -> None:
        """Add up gradients over all processes; where a process has none, it counts as zero."""
        if self.size == 1:
            return
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum(parameter.grad)

    def sum_outcome(self, outcome: Outcome) -> Outcome:
        return Outcome(self.sum(outcome.loss), self.sum(outcome.right), self.sum(outcome.total))

    def agrees(self, mark: int) -> bool:
        """Whether all processes have the same mark."""
        marks = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        marks[self.rank] = mark
        return len(set(self.sum(marks).tolist())) == 1

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process: all must stop at the same step."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)
