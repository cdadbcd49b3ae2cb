"""What a drafter is: it proposes the next tokens of a request, from tokens and target features alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from draftwood.latency import Work
from draftwood.noise import Ahead
from draftwood.tree import Draft


@dataclass(slots=True)
class Request:
    """One request as a drafter sees it."""

    state: Any  # what the drafter's own `open` returned
    root: int  # the last committed token: not in any KV cache yet, the draft continues it
    width: int  # K: candidates per depth the policy can use
    depth: int | None = None  # depths that are worth predicting, 1 or more; None: all. A drafter may give more
    # Gives the noise of so many draws to come, if trees may know it: it decides which candidates are worth naming.
    ahead: Callable[[int], Ahead] | None = None


class Drafter(Protocol):
    """Shared weights; everything that belongs to one request lives in the state that `open` returns.

    The state is part of the prefix: it covers exactly the tokens that are in the target's KV cache.
    `extend` follows every prefill and commit, `rewind` every rewind of the target.
    """

    name: str
    tap_layers: tuple[int, ...]  # target decoder layers whose outputs it reads; () for none
    max_depth: int  # deepest node it can propose

    def open(self, capacity: int) -> Any:
        """A fresh state for a request of at most `capacity` tokens (a hint: states grow when needed)."""
        ...

    def extend(self, state: Any, tokens: list[int], taps: torch.Tensor | None) -> None:
        """Append M tokens that entered the target's KV cache; taps `[M, len(tap_layers) * hidden]` or None."""
        ...

    def rewind(self, state: Any, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        ...

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One proposal per request, in order. Deterministic given the state and the root."""
        ...

    def work(self, context: int) -> Work:
        """FLOPs and bytes of one draft at this context length, for the latency prior."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """A lattice on a device, and for a trellis the log-probabilities of candidates given those of the depth before."""

    tokens: torch.Tensor  # [D, K]
    logp: torch.Tensor  # [D, K]
    pairs: torch.Tensor | None = None  # [D - 1, K, K]

    def filled(self, width: int) -> Candidates:
        """The same with `width` candidates of each depth: impossible ones where the head has too few tokens."""
        more = width - self.tokens.shape[1]
        if more <= 0:
            return self
        logp = F.pad(self.logp, (0, more), value=-torch.inf)
        pairs = None if self.pairs is None else F.pad(self.pairs, (0, more, 0, more), value=-torch.inf)
        return Candidates(F.pad(self.tokens, (0, more)), logp, pairs)


class Placed(Protocol):
    """One request's draft state in buffers that stay where they are: what a captured round runs.

    `extend` and `draft` may neither wait for the device nor depend on a Python number that changes: such numbers lie
    in tensors. `extend` follows every prefill and commit here too.
    """

    max_depth: int
    paired: int  # least candidates of each depth, given with the scores of all their pairs; 0: depths are independent

    def extend(self, taps: torch.Tensor, start: torch.Tensor) -> None:
        """Context tokens at the positions from `start` [] on, as taps `[M, len(tap_layers) * hidden]`.

        Rows after the accepted ones hold nonsense, which the next call overwrites.
        """
        ...

    def draft(self, root: torch.Tensor, context: torch.Tensor, width: int, ahead: Ahead | None = None) -> Candidates:
        """`max_depth` times `width` candidates after `root` [1], at `context` []; with `ahead`, those it favours."""
        ...

    def nbytes(self) -> int:
        """Bytes of its buffers."""
        ...


class Stateful(ABC):
    """A drafter whose states are counted where memory is. Those of others take next to nothing."""

    @abstractmethod
    def state_bytes(self, capacity: int) -> int:
        """Bytes that the state of a request of `capacity` tokens takes."""


def state_bytes(drafter: object, capacity: int) -> int:
    """Bytes that a drafter's state of a request takes, as far as they count."""
    return drafter.state_bytes(capacity) if isinstance(drafter, Stateful) else 0


class Placeable(ABC):
    """A drafter that can also run on static buffers. Others draft on the host."""

    @abstractmethod
    def place(self, capacity: int) -> Placed:
        """Buffers for one request of at most `capacity` tokens, and for the block that follows them."""


class Weighed(ABC):
    """A drafter whose weights can be counted before they are loaded. Others count as weightless."""

    @classmethod
    @abstractmethod
    def weight_bytes(cls, argument: str, itemsize: int) -> int:
        """Bytes of the weights that `load(argument, target)` would load, at `itemsize` bytes a number."""


class Carded(ABC):
    """A drafter whose model card says how well it drafts."""

    @property
    @abstractmethod
    def promised_tau(self) -> float | None:
        """Tokens a round of its likeliest chain, bonus included, at temperature 0; None if its card does not say."""
        ...


class Learner(ABC):
    """A drafter that learns from the target's logits while it runs; all requests share what it learns."""

    @property
    def listens(self) -> bool:
        """Whether it can learn from this round."""
        return True

    @abstractmethod
    def learn(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """The target gave `logits` [M, V] after each of the M `tokens`, which have just been committed."""

    @abstractmethod
    def fresh(self) -> Drafter:
        """The same weights with nothing learned yet: in a comparison one method's texts must not help the next one."""
