"""DFlash (arXiv 2602.06036): a few bidirectional layers that predict a whole block in one pass.

The block is the root's embedding and B - 1 mask embeddings. Its tokens see each other and, as keys and values
only, one fused feature for every context token, made from the outputs of a few target layers. The embedding
and the head are the target's own; if a checkpoint names the tokens worth proposing, the head is trimmed to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

from draftwood.decoder import norm
from draftwood.drafters.base import Candidates, Carded, Placeable, Request, Stateful, Weighed
from draftwood.drafters.checkpoint import checkpoint_folder, read_config, read_draft_tokens, read_tensors
from draftwood.drafters.dflash_config import DFlashConfig, check_fits, parse_config
from draftwood.drafters.dflash_layers import block_layers
from draftwood.drafters.dflash_state import PENDING, DFlashState
from draftwood.drafters.dflash_static import StaticDFlash
from draftwood.drafters.dflash_weights import Weights, build_weights
from draftwood.drafters.markov import Follower, Markov, candidates_of, on_host, propose, read_pairs
from draftwood.errors import BadInput, BadModel, first_line
from draftwood.latency import Work
from draftwood.native.block import Behind, Blocks
from draftwood.native.forward import Ends
from draftwood.noise import Ahead
from draftwood.packing import linear
from draftwood.rotary import Rotary
from draftwood.target import Target
from draftwood.tree import Draft
from draftwood.trellis import Block

FIRST_SLOTS = 1024  # a capacity is only a hint: larger states grow when they get there
LAUNCHES_PER_LAYER, LAUNCHES_AROUND = 16, 30  # operators, for the latency prior


class DFlashDrafter(Placeable, Stateful, Weighed, Carded):
    """A DFlash drafter bound to its target; `depth` limits how many positions get logits, not the block.

    `pairs` are the matrices that score which candidate follows which (markov.py); None: depths are independent.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: Weights,
        target: Target,
        name: str,
        depth: int | None = None,
        draft_tokens: list[int] | None = None,
        pairs: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        most = config.block_size - config.first
        if depth is not None and not 1 <= depth <= most:
            raise BadInput(f"A depth of {depth} is not within the 1 to {most} that {name} predicts.")
        self.name = name
        self.config = config
        self.tap_layers = config.target_layer_ids
        self.max_depth = depth or most
        self._weights = weights
        self._target = target
        self._ids = None if draft_tokens is None else torch.tensor(draft_tokens, device=weights.norm.device)
        rotary = Rotary(rotary_embedding(config).to(weights.norm.device), weights.norm)
        if weights.head is not None:
            head = weights.head.output
        else:
            head = target.output if self._ids is None else linear(*target.head_rows(self._ids))
        self._ends = Ends(target.embedding, config.embedding_scale, rotary, weights.norm, head)
        self._layers = block_layers(config, weights, self._ends)
        markov = None if pairs is None else Markov.of(*pairs, target, self._ids)
        self._follower: Follower | None = markov or weights.selector
        simple = not (target.finishes or config.from_root or weights.selector)
        self._whole = self._layers.whole(self._ids, markov.tables if markov else None) if simple else None

    @classmethod
    def load(cls, name_or_folder: str, target: Target, depth: int | None = None) -> DFlashDrafter:
        """Load a checkpoint in z-lab's or speculators' format, a folder or a Hub name, in the target's dtype on its
        device.

        Raises BadModel if there is none, it is damaged, of another architecture, or made for another target.
        """
        config = parse_config(read_config(name_or_folder), name_or_folder)
        check_fits(config, name_or_folder, target)
        folder = checkpoint_folder(name_or_folder)
        weights = build_weights(read_tensors(folder), config, name_or_folder, target.device, target.dtype)
        kept = read_draft_tokens(folder, config.vocab_size) if weights.head is None else weights.head.tokens
        rank = config.markov_rank
        pairs = read_pairs(folder, name_or_folder, rank, config.hidden_size) if rank else None
        return cls(config, weights, target, name_or_folder, depth, kept, pairs)

    @property
    def promised_tau(self) -> float | None:
        return self.config.tau

    @torch.inference_mode()
    def open(self, capacity: int) -> DFlashState:
        """A fresh state; `capacity` in tokens is a hint."""
        config, like = self.config, self._weights.norm
        slots = min(capacity, FIRST_SLOTS) + config.block_size
        return DFlashState(
            kv=like.new_empty(config.num_layers, 2, config.num_kv_heads, slots, config.head_dim),
            pending=like.new_empty(PENDING, self.config.tap_width),
        )

    def extend(self, state: DFlashState, tokens: list[int], taps: Tensor | None) -> None:
        """Append context tokens with their taps `[M, taps * hidden]`, in the order of `tap_layers`."""
        assert taps is not None and taps.shape == (len(tokens), self.config.tap_width), (
            f"{len(tokens)} tokens need the taps of layers {self.tap_layers}"
        )
        if state.waiting + len(tokens) > PENDING:
            self._project_pending(state)
        if len(tokens) > PENDING:
            for chunk in taps.split(PENDING):
                self._project(state, chunk, len(chunk))
        else:
            state.wait(taps)

    def rewind(self, state: DFlashState, length: int) -> None:
        """Keep the first `length` context tokens."""
        assert 0 <= length <= len(state), f"cannot rewind {len(state)} tokens to {length}"
        state.projected = min(state.projected, length)
        state.waiting = length - state.projected

    def draft(self, requests: list[Request]) -> list[Draft]:
        """One `Lattice` [depth, width] or `Trellis` per request; requests share the products, never the attention.

        Where tokens of a block see later ones, the block stays whole whatever depth is asked for: a shorter one would
        predict other tokens. Only rows of the head are saved.
        """
        if self._whole is not None and len(requests) == 1:
            return [self._at_once(self._whole, requests[0])]
        return list(self.draft_behind([(request, ()) for request in requests]))

    def _at_once(self, whole: Blocks, request: Request) -> Block:
        """The same for one request, in one call."""
        state, config = request.state, self.config
        state.reserve(len(state) + config.block_size)
        behind = Behind(state.pending, state.waiting, state.projected, state.kv.shape[3], state.addresses)
        depth = min(self.max_depth, request.depth or self.max_depth)
        masks = depth if config.causal else config.block_size - 1
        k = candidates_of(request.width, self._head_size, self._follower)
        ahead = request.ahead(depth) if request.ahead else None
        draft = whole.draft(behind, [request.root, *[config.mask_token_id] * masks], depth, k, ahead)
        state.projected, state.waiting = len(state), 0
        return draft

    @torch.inference_mode()
    def draft_behind(self, blocks: Sequence[tuple[Request, Sequence[int]]], gap: int = 0) -> list[Block]:
        """What each block predicts after the given tokens that follow its root, which are seen instead of masked.

        Blocks of one request share its context. `gap` is the number of drafted tokens between context and root: they
        have no features, so that positions count them but no token sees them.
        """
        logits, hidden = self._run(blocks, gap)
        depth = len(logits) // len(blocks)
        each = logits.split(depth) if len(blocks) > 1 else [logits]  # a single block needs no view
        states = [None] * len(blocks) if hidden is None else hidden.split(depth)
        return [
            self._predicted(rows, state, request, seen, gap)
            for rows, state, (request, seen) in zip(each, states, blocks, strict=True)
        ]

    def _predicted(
        self, logits: Tensor, hidden: Tensor | None, request: Request, seen: Sequence[int], gap: int
    ) -> Block:
        """What one block predicts, from its logits `[depth, V]` and, for a selector, the states behind them."""
        ahead = request.ahead(len(logits)) if request.ahead and not (seen or gap) else None
        logits = logits[len(seen) :] if seen else logits
        how = logits, request.width, self._ids, self._follower, ahead
        if hidden is None:
            return on_host(propose(*how))
        before = torch.tensor([seen[-1] if seen else request.root], device=hidden.device)
        return on_host(propose(*how, hidden[len(seen) :], before))

    def _run(self, blocks: Sequence[tuple[Request, Sequence[int]]], gap: int) -> tuple[Tensor, Tensor | None]:
        """Logits `[R * depth, V]`, and the states `[R * depth, hidden]` that gave them if a selector reads these."""
        states = [request.state for request, _ in blocks]
        for state in states:
            self._project_pending(state)
            state.reserve(state.projected + self.config.block_size)
        depth = min(self.max_depth, max(request.depth or self.max_depth for request, _ in blocks))
        behind = max(depth, *(len(seen) for _, seen in blocks)) if self.config.causal else self.config.block_size - 1
        masks = [self.config.mask_token_id] * behind
        tokens = [token for request, seen in blocks for token in (request.root, *seen, *masks[len(seen) :])]
        if self._weights.selector is None:
            return self._target.finish(self._layers(tokens, states, gap, depth)), None
        hidden = self._layers.hidden(tokens, states, gap, depth)
        return self._target.finish(self._ends.head(hidden)), hidden

    def place(self, capacity: int) -> StaticDFlash:
        """One request's state of at most `capacity` tokens in static buffers."""
        paired = min(self._follower.least, self._head_size) if self._follower else 0
        shared = self.config, self._weights, self._ends.rotary, self._ends.embed, self._candidates
        return StaticDFlash(*shared, self.max_depth, capacity, paired)

    def state_bytes(self, capacity: int) -> int:
        """Context keys and values in all layers; waiting taps are next to nothing."""
        config = self.config
        slots = capacity + config.block_size
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * slots * self._weights.norm.itemsize

    @classmethod
    def weight_bytes(cls, argument: str, itemsize: int) -> int:
        config = parse_config(read_config(argument), argument)
        kept = read_draft_tokens(checkpoint_folder(argument, weights=False), config.vocab_size)
        rows = config.draft_vocab or config.vocab_size if kept is None else len(kept)
        tables = 2 * config.markov_rank * rows + config.selector_rank * (2 * config.vocab_size + config.hidden_size)
        tables += 2 * config.spark_rank * config.vocab_size
        head = 0 if rows == config.vocab_size else rows * config.hidden_size  # a copy of the target's rows, or its own
        return (config.block_parameters() + config.context_parameters() + tables + head) * itemsize

    def work(self, context: int) -> Work:
        """One request's draft at `context` tokens, the target's head included; one new context feature."""
        config = self.config
        block, features = config.block_parameters(), config.context_parameters()
        head = self._head_size * config.hidden_size
        keys = sum(min(context, sight.window or context) + config.block_size for sight in config.sights)
        pairs = keys * config.block_size * config.num_heads
        cached = keys * 2 * config.num_kv_heads * config.head_dim
        return Work(
            flops=2 * (block * config.block_size + features + head * self.max_depth) + 4 * pairs * config.head_dim,
            bytes=(block + features + head + cached) * self._weights.norm.itemsize,
            launches=LAUNCHES_PER_LAYER * config.num_layers + LAUNCHES_AROUND,
            shared=head * self._weights.norm.itemsize if self._ids is None else 0,
        )

    @property
    def _head_size(self) -> int:
        """Tokens that may be proposed."""
        return self.config.vocab_size if self._ids is None else len(self._ids)

    def _candidates(self, hidden: Tensor, root: Tensor, width: int, ahead: Ahead | None) -> Candidates:
        hidden = norm(hidden, self._weights.norm, self.config.norm_eps)
        logits = self._target.finish(self._ends.head(hidden))
        return propose(logits, width, self._ids, self._follower, ahead, hidden, root)

    def _project_pending(self, state: DFlashState) -> None:
        if state.waiting:
            waiting, state.waiting = state.waiting, 0
            self._project(state, state.pending, waiting)

    @torch.inference_mode()
    def _project(self, state: DFlashState, taps: Tensor, count: int) -> None:
        """Project the first `count` of taps `[M, taps * hidden]` and store their keys and values."""
        state.reserve(state.projected + count + self.config.block_size)
        self._layers.project(state, taps, count)
        state.projected += count


class Turned(Protocol):
    """The config of a model with rotary position embeddings."""

    @property
    def head_dim(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rope(self) -> Mapping[str, Any]: ...


def rotary_embedding(config: Turned) -> nn.Module:
    """transformers knows linear, llama3 and yarn scaling. Raises BadModel for settings that it cannot use."""
    try:
        return Qwen3RotaryEmbedding(
            Qwen3Config(
                head_dim=config.head_dim,
                max_position_embeddings=config.max_positions,
                rope_parameters=dict(config.rope),
            )
        )
    except Exception as error:  # whatever transformers raises for missing or impossible settings
        settings = f"The drafter's rotary settings {dict(config.rope)} cannot be used"
        raise BadModel(f"{settings} ({first_line(error)}); fetch the checkpoint again.") from error
