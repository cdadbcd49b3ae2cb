"""Any small causal LM with the target's tokenizer as a drafter: a beam with its own cache.

A small model's forward takes as long for a dozen tokens as for one, so every level runs the whole beam from the root
again: one forward a level, and nothing in its cache but committed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from draftwood.cache import KVCache
from draftwood.drafters.base import Request, Stateful
from draftwood.drafters.beam import BeamTree
from draftwood.drafters.lattice import candidates
from draftwood.drafters.options import parse
from draftwood.errors import BadModel
from draftwood.latency import Work
from draftwood.loading import load_target, load_tokenizer
from draftwood.target import Target
from draftwood.tree import Draft, Tree, root_only

CHUNK = 512  # tokens of a prompt that enter its cache at once


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the drafter, as in `draft-model:NAME,depth=4,beam=2`."""

    depth: int = field(default=5, metadata={"least": 1, "most": 64})
    beam: int = field(default=4, metadata={"least": 1, "most": 64})  # nodes of a level that are continued; 1: a chain


@dataclass(slots=True, eq=False)
class DraftModelState:
    cache: KVCache
    waiting: list[int] = field(default_factory=list)  # committed tokens that are not in the cache yet

    def __deepcopy__(self, memo: object) -> DraftModelState:
        """Without spare room: a copy keeps a prefix, and gets room when a text continues from it."""
        (row,) = self.cache.rows
        return DraftModelState(KVCache(len(row.keys), [row.copy(row.length, row.length)]), list(self.waiting))


class DraftModel(Stateful):
    """A small model that writes a few levels of a beam ahead."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, model: Target, options: Options, name: str, vocab: int) -> None:
        """`vocab`: the target's tokens. A head may have more or fewer, of which a tokenizer uses none."""
        self.name, self.max_depth = name, options.depth
        self._model, self._beam, self._vocab = model, options.beam, vocab

    @classmethod
    def load(cls, argument: str, target: Target) -> DraftModel:
        """From `NAME` or `NAME,depth=4,beam=2`. Raises BadInput and BadModel."""
        name, _, rest = argument.partition(",")
        if not name:
            raise BadModel("No draft model was named; write draft-model:FOLDER or draft-model:OWNER/NAME.")
        options = parse(Options, "draft-model", rest)
        kind, place = str(target.dtype).removeprefix("torch."), str(target.device)
        model = load_target(name, kind, place, trust_remote_code=target.trusts_code)
        check_same_tokens(model, target)
        return cls(model, options, f"draft-model:{argument}", target.vocab_size)

    def open(self, capacity: int) -> DraftModelState:
        return DraftModelState(self._model.new_cache(self._slots(capacity)))

    def state_bytes(self, capacity: int) -> int:
        return self._slots(capacity) * self._model.kv_bytes_per_token()

    def _slots(self, capacity: int) -> int:
        """Behind its own window it drafts nothing."""
        return min(capacity, self._model.context_limit) + self.max_depth * self._beam

    def extend(self, state: DraftModelState, tokens: list[int], taps: object) -> None:
        state.waiting += tokens

    def rewind(self, state: DraftModelState, length: int) -> None:
        """Keep the first `length` tokens."""
        inside = state.cache.rows[0].length
        assert 0 <= length <= inside + len(state.waiting), f"cannot rewind {inside + len(state.waiting)} to {length}"
        del state.waiting[max(0, length - inside) :]
        state.cache.rewind(0, min(length, inside))

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One `Tree` per request: every level's best `beam` nodes with their `beam` best children."""
        return [self._draft(r.state, r.root, min(self.max_depth, r.depth or self.max_depth)) for r in requests]

    def work(self, context: int) -> Work:
        """A forward for each level, of at most a whole beam."""
        works = [self._model.work(1 + level * self._beam, context) for level in range(self.max_depth)]
        return Work(
            sum(work.flops for work in works), sum(work.bytes for work in works), sum(work.launches for work in works)
        )

    def _draft(self, state: DraftModelState, root: int, depth: int) -> Tree:
        if state.cache.rows[0].length + len(state.waiting) >= self._model.context_limit:
            return root_only(root)  # it cannot read that far
        if max([root, *state.waiting]) >= self._model.vocab_size:
            return root_only(root)  # nor padding of the target's, which is drawn once in a blue moon
        for at in range(0, len(state.waiting), CHUNK):
            self._model.prefill(state.waiting[at : at + CHUNK], state.cache)
        state.waiting.clear()
        nodes, kept, front = BeamTree([root]), [0], [0]
        room = self._model.context_limit - state.cache.rows[0].length - 1
        for _ in range(min(depth, room)):
            tree = nodes.tree().subtree(np.array(kept))
            logits = self._model.verify(self._model.plan([tree], state.cache), state.cache).logits[-len(front) :]
            tokens, logp = candidates(logits[:, : self._vocab], self._beam)
            front = nodes.level(front, tokens, logp, self._beam)
            kept += front
        return nodes.tree()


def check_same_tokens(model: Target, target: Target) -> None:
    """Refuse a draft model whose tokens mean something else. Raises BadModel."""
    try:
        ours, theirs = (load_tokenizer(each.name, each.trusts_code).get_vocab() for each in (model, target))
        same: bool | None = ours == theirs
    except BadModel:  # one has no tokenizer, or no name to load it by: only their sizes can be compared
        same = None
    if same or (same is None and model.vocab_size == target.vocab_size):
        return
    sizes = f"its head has {model.vocab_size} tokens, the target's {target.vocab_size}"
    why = sizes if same is None else "its tokenizer is another one"
    raise BadModel(f"{model.name} cannot draft for {target.name}: {why}. Name a model of the same family.")
