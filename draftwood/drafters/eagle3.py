"""EAGLE-3 (arXiv 2503.01840): one layer over the target's features that drafts a tree, level by level.

Row i of the layer is the embedding of token i + 1 beside the feature of token i, and predicts token i + 2. Features of
committed tokens come from the target; those of drafted ones are the layer's own outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwood.decoder import norm
from draftwood.drafters.base import Request, Stateful, Weighed
from draftwood.drafters.beam import BeamTree
from draftwood.drafters.dflash import rotary_embedding
from draftwood.drafters.eagle3_weights import Eagle3Config, Eagle3Weights, load_eagle3, weight_bytes
from draftwood.drafters.lattice import candidates
from draftwood.drafters.options import parse
from draftwood.latency import Work
from draftwood.rotary import Rotary, rotate
from draftwood.target import Target
from draftwood.tree import Draft, Tree, root_only

CHUNK = 512  # rows that enter the layer at once: bounds the mask
LAUNCHES = 20  # operators of a level, for the latency prior


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the drafter, as in `eagle3:NAME,depth=5,beam=8`."""

    depth: int = field(default=6, metadata={"least": 1, "most": 32})
    beam: int = field(default=8, metadata={"least": 1, "most": 64})  # nodes of a level that are continued


@dataclass(slots=True, eq=False)
class Eagle3State:
    """One request: its tokens, their features, and the keys and values of the rows that are final."""

    features: Tensor  # [slots, hidden]
    kv: Tensor  # [2, G, slots, D]; slots from `rows` on are free
    tokens: list[int] = field(default_factory=list)
    rows: int = 0

    def __deepcopy__(self, memo: object) -> Eagle3State:
        """Without spare room: a copy keeps a prefix, and gets room when a text continues from it."""
        slots = len(self.tokens)
        return Eagle3State(self.features[:slots].clone(), self.kv[:, :, :slots].clone(), [*self.tokens], self.rows)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` tokens, at least doubling if there is none."""
        have = len(self.features)
        if slots > have:
            more = max(slots, 2 * have) - have
            self.features = F.pad(self.features, (0, 0, 0, more))
            self.kv = F.pad(self.kv, (0, 0, 0, more))


class Eagle3Drafter(Weighed, Stateful):
    """An EAGLE-3 drafter bound to its target."""

    def __init__(
        self, config: Eagle3Config, weights: Eagle3Weights, target: Target, options: Options, name: str
    ) -> None:
        self.name, self.max_depth, self.tap_layers = name, options.depth, config.tap_layers
        self.config, self._weights, self._target, self._beam = config, weights, target, options.beam
        self._rotary = Rotary(rotary_embedding(config).to(weights.norm.device), weights.norm)

    @classmethod
    def load(cls, argument: str, target: Target) -> Eagle3Drafter:
        """From `NAME` or `NAME,depth=5,beam=8`. Raises BadInput and BadModel."""
        name, _, rest = argument.partition(",")
        options = parse(Options, "eagle3", rest)
        return cls(*load_eagle3(name, target), target, options, f"eagle3:{argument}")

    @classmethod
    def weight_bytes(cls, argument: str, itemsize: int) -> int:
        return weight_bytes(argument.partition(",")[0], itemsize)

    def open(self, capacity: int) -> Eagle3State:
        config, like = self.config, self._weights.norm
        slots = min(capacity, 1024) + self._scratch
        kv = like.new_zeros(2, config.num_kv_heads, slots, config.head_dim)
        return Eagle3State(like.new_zeros(slots, config.hidden_size), kv)

    def state_bytes(self, capacity: int) -> int:
        config = self.config
        each = config.hidden_size + 2 * config.num_kv_heads * config.head_dim
        return (capacity + self._scratch) * each * self._weights.norm.itemsize

    @torch.inference_mode()
    def extend(self, state: Eagle3State, tokens: list[int], taps: Tensor | None) -> None:
        """Append tokens with their taps `[M, 3 * the target's hidden]`."""
        assert taps is not None, f"{self.name} reads the layers {self.tap_layers}"
        start, stop = len(state.tokens), len(state.tokens) + len(tokens)
        state.reserve(stop + self._scratch)
        state.features[start:stop] = self._weights.fc(taps.to(state.features))
        state.tokens += tokens

    def rewind(self, state: Eagle3State, length: int) -> None:
        """Keep the first `length` tokens; the last one's row is not final, since another token may follow it now."""
        assert 0 <= length <= len(state.tokens), f"cannot rewind {len(state.tokens)} tokens to {length}"
        del state.tokens[length:]
        state.rows = min(state.rows, max(length - 1, 0))

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One `Tree` per request: every level's best `beam` nodes with their `beam` best children."""
        return [self._draft(r.state, r.root, min(self.max_depth, r.depth or self.max_depth)) for r in requests]

    def work(self, context: int) -> Work:
        """Every level reads the layer, the head and the cache once."""
        config, levels = self.config, self.max_depth
        heads = config.head_dim * (config.num_heads + config.num_kv_heads)
        weights = config.hidden_size * (4 * heads + 3 * config.intermediate_size + config.draft_vocab)
        cached = 2 * context * config.num_kv_heads * config.head_dim
        rows = 1 + (levels - 1) * self._beam
        return Work(2.0 * weights * rows, (weights + cached) * levels * self._weights.norm.itemsize, LAUNCHES * levels)

    @property
    def _scratch(self) -> int:
        """Slots for the drafted rows after the context."""
        return 1 + self.max_depth * self._beam

    @torch.inference_mode()
    def _draft(self, state: Eagle3State, root: int, deepest: int) -> Tree:
        if not state.tokens:
            return root_only(root)
        state.reserve(len(state.tokens) + self._scratch)  # a copy has none to spare
        hidden = self._catch_up(state, root)
        nodes, front = BeamTree([root]), [0]
        context, seen = len(state.tokens), torch.zeros(0, 0, dtype=torch.bool, device=hidden.device)
        place: dict[int, int] = {}  # from a node to its row among the drafted rows
        for depth in range(1, deepest + 1):
            tokens, logp = candidates(self._head(hidden), self._beam, self._weights.ids)
            before, front = front, nodes.level(front, tokens, logp, self._beam)
            if depth == deepest:
                break
            parents = [nodes.parents[node] for node in front]
            seen = _grown(seen, [place.get(parent) for parent in parents])
            place |= {node: len(seen) - len(front) + i for i, node in enumerate(front)}
            hidden = self._level(
                state,
                torch.tensor([nodes.tokens[node] for node in front], device=hidden.device),
                hidden[[before.index(parent) for parent in parents]],
                context,
                depth,
                seen,
            )
        return nodes.tree()

    def _catch_up(self, state: Eagle3State, root: int) -> Tensor:
        """Run the rows that are not in the cache; returns the output `[1, hidden]` of the last, which is the root's."""
        size = len(state.tokens)
        following = torch.tensor([*state.tokens[1:], root], device=state.features.device)
        for start in range(state.rows, size, CHUNK):
            stop = min(start + CHUNK, size)
            mask = torch.ones(stop - start, stop, dtype=torch.bool, device=following.device).tril(start)
            rows = torch.arange(start, stop, device=following.device)
            hidden = self._layer(state, following[start:stop], state.features[start:stop], rows, start, mask)
        state.rows = size - 1
        return hidden[-1:]

    def _level(
        self, state: Eagle3State, tokens: Tensor, hidden: Tensor, context: int, depth: int, seen: Tensor
    ) -> Tensor:
        """Outputs `[F, hidden]` of the newest drafted rows; `seen` [R, R] marks the ancestors of each drafted row."""
        front = len(tokens)
        mask = F.pad(seen[-front:], (context, 0), value=True)
        positions = torch.full((front,), context + depth - 1, device=tokens.device)
        return self._layer(state, tokens, hidden, positions, context + len(seen) - front, mask)

    def _layer(
        self, state: Eagle3State, tokens: Tensor, hidden: Tensor, positions: Tensor, slot: int, mask: Tensor
    ) -> Tensor:
        """Outputs `[M, hidden]` of rows that are stored from `slot` on and see what `mask` [M, slot + M] allows."""
        weights, config = self._weights, self.config
        eps, stop = config.norm_eps, slot + len(tokens)
        own, normed = weights.embedding, norm(hidden, weights.hidden_norm, eps)
        embedded = self._target.embed(tokens).to(hidden) if own is None else F.embedding(tokens, own)
        both = torch.cat([norm(embedded, weights.input_norm, eps), normed], -1)
        qkv = weights.qkv(both).unflatten(-1, (-1, config.head_dim))
        rotated = config.num_heads + config.num_kv_heads
        self._rotary.reserve(int(stop) + 1)
        qk = rotate(qkv[:, :rotated], *self._rotary.at(positions))
        state.kv[0, :, slot:stop] = qk[:, config.num_heads :].transpose(0, 1)
        state.kv[1, :, slot:stop] = qkv[:, rotated:].transpose(0, 1)
        q, (k, v) = qk[:, : config.num_heads].transpose(0, 1), state.kv[:, :, :stop]
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0]
        hidden = (normed if config.normed else hidden) + weights.output(seen.transpose(0, 1).flatten(1))
        gate, up = weights.gate_up(norm(hidden, weights.post_norm, eps)).chunk(2, -1)
        return hidden + weights.down(F.silu(gate) * up)

    def _head(self, hidden: Tensor) -> Tensor:
        x = norm(hidden, self._weights.norm, self.config.norm_eps)
        return self._target.head(x) if self._weights.head is None else self._weights.head(x)


def _grown(seen: Tensor, parents: list[int | None]) -> Tensor:
    """Ancestors `[R, R]` with a row for each new child of `parents`; None: a child of the root."""
    old, new = len(seen), len(parents)
    grown = F.pad(seen, (0, new, 0, new))
    for i, parent in enumerate(parents):
        if parent is not None:
            grown[old + i] = grown[parent]
        grown[old + i, old + i] = True
    return grown
