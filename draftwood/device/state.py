"""One request's state in buffers that never move, and the report of each round that the host reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftwood.accept import Verdict
from draftwood.cache import KVCache, Row
from draftwood.device.draw import Dice
from draftwood.device.growth import DeviceTree
from draftwood.device.mail import Mail
from draftwood.device.walk import Walk
from draftwood.drafters.base import Placed
from draftwood.sampling import Sampling
from draftwood.tree import Tree

# Tokens behind which a drafter reads the taps that it is owed. Before, who does not draft has no use for them.
OWED = 64


class State:
    """What a request has so far. `length` tokens are in the caches; the root is committed, but in no cache yet.

    The drafter's state covers the first `drafted` of these tokens; the taps of the others are owed to it.
    """

    def __init__(self, kv: Tensor, vocab: int, drafter: Placed | None, owed: tuple[int, int]) -> None:
        """`kv` [layers, 2, H_kv, S, d] holds finite numbers everywhere; `owed`: tokens and width of taps."""
        device = kv.device
        self.kv, self.cache = kv, KVCache(len(kv), [Row.over(kv)])
        self.drafter = drafter
        self.dice = Dice(self.capacity, vocab, device)
        self.owed = kv.new_zeros(owed)  # of the tokens from `drafted` on
        scalars = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))
        self.length, self.drafted, self.end, self.n = scalars
        self.most = torch.full_like(self.n, 2**31)  # nodes that a draft may grow to
        self.root = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """Tokens of context, tree and everything else that fit."""
        return self.kv.shape[3]

    @property
    def changing(self) -> tuple[Tensor, ...]:
        """The buffers that a round changes for good. Slots of the caches behind `length` are scratch."""
        return self.length, self.drafted, self.root, self.dice.seen

    def reset(self, sampling: Sampling, tokens: list[int], end: int, foresees: bool) -> None:
        """Start after `tokens`, all of which but the last are in the caches; the text may have `end` in all."""
        for length in (self.length, self.drafted):
            length.fill_(len(tokens) - 1)
        self.root.fill_(tokens[-1])
        self.end.fill_(end)
        self.n.zero_()  # stages that are captured now find the last request's tree, which may have fewer nodes than it
        self.dice.reset(sampling, tokens, foresees)

    def nbytes(self) -> int:
        drafter = 0 if self.drafter is None else self.drafter.nbytes()
        return self.kv.nbytes + self.owed.nbytes + drafter + self.dice.seen.nbytes + self.dice.keys.nbytes


class Report:
    """What the host learns of a round: the verdict, on a side stream while the device drafts, and the next tree."""

    def __init__(self, nodes: int, depth: int, device: torch.device) -> None:
        """Room for a tree of `nodes` nodes and a path of `depth`."""
        sizes = [4 * (1 + nodes), 1]
        self.tree_mail = Mail(sum(sizes), device)
        tree, self._count = self.tree_mail.buffer.split(sizes)
        self._tree = tree.view(4, 1 + nodes)  # tokens, parents, depths, bits of the masses
        self._grown = self.tree_mail.rows(self._tree), self.tree_mail.rows(self._count)
        self.verdict_mail = Mail(depth + 2, device)
        self._path, self._accepted, self._bonus = self.verdict_mail.buffer.split([depth, 1, 1])
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        return self.tree_mail.buffer, self.verdict_mail.buffer

    def put_tree(self, tree: DeviceTree) -> None:
        rows = (tree.tokens, tree.parents, tree.depths, tree.mass.view(torch.int32))
        for to, row in zip(self._tree, rows, strict=True):
            to.copy_(row)
        self._count.copy_(tree.count[None])

    def put_walk(self, walk: Walk) -> None:
        self._path[: len(walk.path)].copy_(walk.path)
        self._accepted.copy_(walk.length[None])
        self._bonus.copy_(walk.bonus)

    def send_verdict(self) -> None:
        """Start the verdict's copy beside whatever the device is given next. The host waits for it before it starts
        another walk."""
        if self._side is None:
            return self.verdict_mail.send()
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            self.verdict_mail.send()

    def tree(self) -> Tree:
        """The tree that was sent last; waits for it."""
        self.tree_mail.wait()
        rows, count = self._grown
        rows = rows[:, : 1 + int(count[0])]
        tokens, parents, depths = rows[:3].astype(np.int64)  # all at once: the device waits for it
        parents[0] = -1
        return Tree(tokens, parents, depths, rows[3].copy().view(np.float32))

    def verdict(self, tree: Tree) -> Verdict:
        """The verdict on `tree` of the last walk that was sent; waits for it."""
        *path, accepted, bonus = self.verdict_mail.values()
        path, tokens = path[:accepted], tree.tokens.tolist()
        return Verdict(path, [tokens[node] for node in path], bonus)
