"""Which token follows which: a block drafter's marginals, corrected by the candidate before.

A block is predicted in one pass, so no depth knows which token the depth before will get. A low-rank score of the two
tokens corrects for it (DSpark's Markov head, arXiv 2607.05147; DFlash 2's candidate selector without its gate):

    log p(b | a) = log q_d(b) + <A e_a, B e_b> / sqrt(r) - log Z_a

with q_d the drafter's marginal at depth d, and e the target's own embedding and head rows, scaled to unit mean square.
The weights lie in a subfolder of the checkpoint, where runtimes that do not know them never look: those draft from the
marginals.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwood.drafters.base import Candidates
from draftwood.drafters.lattice import head_rows, named
from draftwood.errors import BadModel
from draftwood.native import candidates as compiled
from draftwood.native.growth import grower
from draftwood.noise import Ahead
from draftwood.tree import Lattice
from draftwood.trellis import Block, Trellis

if TYPE_CHECKING:
    from draftwood.target import Target

FILE = "markov/model.safetensors"
PREFIX = "markov."  # of the parameters' names in training
BEFORE, AFTER = "before.weight", "after.weight"  # A and B, [r, hidden] each
CANDIDATES = 32  # of each depth that are corrected; the marginals of further ones are next to nothing


class Markov:
    """The scores of all pairs of tokens that a drafter may propose."""

    def __init__(self, before: Tensor, after: Tensor) -> None:
        """Tables `[V, r]` with a row for each row of the drafter's head."""
        self._before, self._after = before, after

    @property
    def least(self) -> int:
        return CANDIDATES

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self._before, self._after

    @classmethod
    def of(cls, a: Tensor, b: Tensor, target: Target, ids: Tensor | None) -> Markov:
        """Of A and B `[r, hidden]`, for a head over the tokens `ids` `[V]`, or all; in the target's dtype."""
        everything = torch.arange(target.vocab_size, device=target.device) if ids is None else ids
        a, b = a.to(target.device), b.to(target.device)
        before, after = tables(a, b, target.embed(everything), target.head_rows(everything)[0])
        return cls(before.to(target.dtype), after.to(target.dtype))

    def pairs(self, rows: Tensor, logp: Tensor) -> Tensor:
        """`[D - 1, K, K]` float32: log p of each candidate, given each candidate of the depth before.

        `rows` and `logp` `[D, K]` are head rows and marginals. Other tokens keep their marginal share.
        """
        if compiled.takes(self._before):
            return compiled.pairs(rows, logp, self._before, self._after)
        before, after = self._before[rows[:-1]].float(), self._after[rows[1:]].float()
        return conditional(before @ after.mT, logp[1:, None])

    def follow(
        self, tokens: Tensor, rows: Tensor, logp: Tensor, hidden: Tensor | None, root: Tensor | None
    ) -> Candidates:
        """Candidates `tokens` `[D, K]`, `rows` of the head with marginals `logp`, and their pairs, whatever the
        drafter's `hidden` states and the `root` are."""
        return Candidates(tokens, logp, self.pairs(rows, logp))


class Follower(Protocol):
    """Scores of which candidate follows which: `Markov`, or DFlash 2's `Selector`."""

    @property
    def least(self) -> int:
        """Candidates of each depth that are scored, even if fewer are asked for."""
        ...

    def follow(
        self, tokens: Tensor, rows: Tensor, logp: Tensor, hidden: Tensor | None, root: Tensor | None
    ) -> Candidates: ...


def conditional(scores: Tensor, logp: Tensor) -> Tensor:
    """Log-probabilities of candidates with marginals `logp` `[..., K]`, moved by `scores` `[..., K]`. Tokens that are
    no candidates keep their marginal share."""
    moved, rest = scores + logp, (1 - logp.exp().sum(-1, keepdim=True)).clamp_min(0)
    total: Tensor = moved - (moved.exp().sum(-1, keepdim=True) + rest).log()
    return total


def read_pairs(folder: Path, name: str, rank: int, hidden: int) -> tuple[Tensor, Tensor]:
    """A and B in float32. Raises BadModel if their file is missing or does not fit."""
    path = folder / FILE
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise BadModel(f"The drafter {name} lacks {FILE}, of which its config.json speaks; fetch it again.") from None
    except (OSError, SafetensorError) as error:
        raise BadModel(f"{path} is damaged ({error}); fetch the checkpoint again.") from None
    for key in (BEFORE, AFTER):
        shape = list(tensors[key].shape) if key in tensors else None
        if shape != [rank, hidden]:
            found = "is missing" if shape is None else f"is {shape}"
            raise BadModel(
                f"In {path} the tensor {key} {found} instead of {[rank, hidden]}; fetch the checkpoint again."
            )
    return tensors[BEFORE].float(), tensors[AFTER].float()


def tables(a: Tensor, b: Tensor, embedded: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """A e / sqrt(r) of `embedded` and B e of `head`, rows of `hidden` numbers each."""
    before, after = (F.rms_norm(rows.to(a.dtype), rows.shape[-1:], eps=1e-6) for rows in (embedded, head))
    return before @ a.T * len(a) ** -0.5, after @ b.T


def propose(
    logits: Tensor,
    width: int,
    ids: Tensor | None,
    follower: Follower | None,
    ahead: Ahead | None = None,
    hidden: Tensor | None = None,
    root: Tensor | None = None,
) -> Candidates:
    """The `width` likeliest candidates of logits `[D, V]` over the tokens `ids`, or over all.

    Where pairs are scored there may be more (`Follower.least`). With noise `ahead` they are those that it favours. The
    logits came of the states `hidden` `[D, hidden]` behind the `root` `[1]`.
    """
    rows, logp = head_rows(logits, candidates_of(width, logits.shape[-1], follower), ids, ahead)
    tokens = named(rows, ids)
    return Candidates(tokens, logp) if follower is None else follower.follow(tokens, rows, logp, hidden, root)


def on_host(found: Candidates) -> Block:
    """Candidates as growth on the host takes them."""
    lattice = Lattice(found.tokens.cpu().numpy(), found.logp.cpu().numpy())
    return lattice if found.pairs is None else Trellis(lattice, found.pairs.cpu().numpy(), grower(found.logp.device))


def candidates_of(width: int, vocab: int, follower: Follower | None) -> int:
    """How many candidates of a depth a drafter over `vocab` tokens gives when asked for `width`."""
    return min(max(width, follower.least) if follower else width, vocab)
