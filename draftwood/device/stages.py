"""The two halves of a round as fixed sequences of operations on static buffers: draft + grow, verify … commit.

Nothing in here waits for the device, and nothing depends on a Python number that changes between rounds, so each of
these functions can be captured in a CUDA graph as it stands: `draft` once, `verify` once for each width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from draftwood.device.ancestors import bitmask, lineage, visible
from draftwood.device.foresight import foreseen
from draftwood.device.growth import DeviceTree, grower
from draftwood.device.state import Report, State
from draftwood.device.view import View
from draftwood.device.walk import Walk, compact, compaction, walk
from draftwood.drafters.base import Candidates
from draftwood.grow import Growth
from draftwood.hardware import CAPTURED
from draftwood.lean import Lean
from draftwood.noise import Ahead
from draftwood.plan import Verified


class Stages:
    """Both halves for one way of growing. Several of them may share a `State`."""

    def __init__(self, model: Lean, state: State, growth: Growth, width: int) -> None:
        """`width` (K) is how many candidates of each depth are asked of the drafter."""
        device, vocab = state.kv.device, len(state.dice.seen)
        self.drafter = state.drafter if growth.n_max else None  # who never drafts needs no draft state either
        depth, paired = (self.drafter.max_depth, self.drafter.paired) if self.drafter else (0, 0)
        self._candidates = min(max(width, paired), vocab)
        self._grower = grower(growth, depth, self._candidates, device, paired > 0)
        self._hold(model, state, self._grower.size, min(depth, growth.depth or depth), growth.per_depth == 1)

    def _hold(self, model: Lean, state: State, nodes: int, depth: int, is_chain: bool) -> None:
        """Buffers for trees of `nodes` nodes, none deeper than `depth`."""
        device = state.kv.device
        self._model, self._state = model, state
        self._depth, self._is_chain = depth, is_chain
        self.widths = (*(w for w in CAPTURED if w <= nodes), 1 + nodes)
        self.report = Report(nodes, self._depth, device)
        zeros = torch.zeros(1 + nodes, dtype=torch.int64, device=device)
        self._tree = DeviceTree(zeros, zeros.clone(), zeros.clone(), zeros.float(), zeros[0].clone())
        self._line = lineage(zeros, self._depth)
        self._seen = visible(self._line)
        self._bits = bitmask(self._seen)

    @property
    def changing(self) -> tuple[Tensor, ...]:
        """The buffers that a stage changes for good."""
        return (*self._state.changing, *self.report.buffers)

    def draft(self) -> None:
        """draft, grow: a tree behind the root, none of whose nodes is too deep to be emitted."""
        self.catch_up()
        assert self.drafter is not None
        ahead = self._state.dice.ahead(self._state.length + 1, self.drafter.max_depth)
        self.grow(self.propose(ahead), ahead)

    def verify(self, width: int) -> None:
        """verify, accept, commit: the root and the first `state.n` nodes in a forward of `width` tokens."""
        found = self.forward(width)
        self.commit(self.accept(width, found.logits), found.taps)

    # --- one verb each -----------------------------------------------------------------------------------
    @torch.inference_mode()
    def catch_up(self) -> None:
        """Let the drafter read the taps that it is owed."""
        assert self.drafter is not None
        state = self._state
        self.drafter.extend(state.owed, state.drafted)
        state.drafted.copy_(state.length)

    @torch.inference_mode()
    def propose(self, ahead: Ahead | None = None) -> Candidates:
        """`depth` times K candidates, those that noise `ahead` favours."""
        assert self.drafter is not None
        draft = self.drafter.draft(self._state.root, self._state.length, self._candidates, ahead)
        return draft.filled(self._candidates)

    @torch.inference_mode()
    def grow(self, draft: Candidates, ahead: Ahead | None = None) -> None:
        """Write a draft's tree, under noise `ahead`, into the buffers that `forward` and `accept` read."""
        state = self._state
        if ahead is not None:
            draft = foreseen(draft, ahead)
        # A node at depth d can only be emitted if d more tokens fit before the bonus token.
        tree = self._grower(draft, state.root, state.end - state.length - 2, state.most)
        for name in ("tokens", "parents", "depths", "mass", "count"):
            getattr(self._tree, name).copy_(getattr(tree, name))
        self._grower.relate(self._tree.parents, self._line, self._seen, self._bits)
        self.report.put_tree(tree)

    @torch.inference_mode()
    def forward(self, width: int) -> Verified:
        """Run the target over the first `width` tokens of the tree; keys and values go into the free slots."""
        state = self._state
        tokens, positions = self._tokens(width), state.length + self._tree.depths[:width]
        return self._model.forward(tokens, positions, partial(self._attend, self._view(width)))

    @torch.inference_mode()
    def accept(self, width: int, logits: Tensor) -> Walk:
        """The path to the first of the target's own tokens that is no node; `logits` [width, V]."""
        state, tree, line = self._state, self._tree, self._line[:width]
        tokens, depths = self._tokens(width), tree.depths[:width]
        drawn = state.dice.draw(logits, state.length + depths + 1, tokens, line)
        return walk(tokens, tree.parents[:width], depths, line, drawn, state.n, min(width - 1, self._depth))

    @torch.inference_mode()
    def commit(self, walked: Walk, taps: Tensor | None) -> None:
        """Keep the accepted path, forget the rest, and owe the path's taps to the drafter; `taps` are the whole
        forward's."""
        state = self._state
        if not self._is_chain:  # a chain's path lies where it belongs
            compact(state.kv, *compaction(walked, state.length))
        if self.drafter is not None and taps is not None:
            self._owe(walked.path, taps)
        if state.dice.kind.penalty:  # else nobody asks what was seen
            state.dice.observe(torch.cat([walked.tokens, walked.bonus]))
        state.root.copy_(walked.bonus)
        state.length.add_(1 + walked.length)
        self.report.put_walk(walked)

    def _owe(self, path: Tensor, taps: Tensor) -> None:
        """Keep the taps of the root and of what was accepted behind it."""
        state = self._state
        at, rows = (state.length - state.drafted)[None], taps[:1]
        if len(path):  # rounds without drafts do without these operators
            rows = taps[torch.cat([path.new_zeros(1), path])]
            at = at + torch.arange(len(rows), device=rows.device)
        state.owed.index_copy_(0, at, rows)

    def _tokens(self, width: int) -> Tensor:
        return torch.cat([self._state.root, self._tree.tokens[1:width]])

    def _view(self, width: int) -> View:
        state, bits = self._state, None if self._is_chain else self._bits[:width]
        form, line = (state.capacity, state.kv.dtype), self._line[:width] if self._model.invariant else None
        return View(state.length, self._tree.depths[:width], self._seen[:width, :width], bits, *form, lineage=line)

    def _attend(self, view: View, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return view.attend(self._state.kv[layer], self._model.scale, self._model.windows[layer], q, k, v)
