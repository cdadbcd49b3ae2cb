"""The target: a transformers causal LM that verifies whole trees in one forward and shows its hidden states.

The forward takes one of two paths: `universal.py` serves any model, `lean.py` dense Llama-shaped ones with less
overhead around the matrix products. Whether a model really follows a tree on its path is checked once at load by
comparing a small tree with the model's plain forward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftwood import attention, lean
from draftwood.cache import KVCache, Row, kv_widths, query_widths, stored
from draftwood.errors import BadInput, BadModel, DraftwoodError, check_one_of, first_line
from draftwood.footprint import Footprint
from draftwood.latency import Work
from draftwood.names import PATHS
from draftwood.packing import PackedLinear
from draftwood.parallel import ALONE, Group
from draftwood.plan import Plan, Verified, make_plan
from draftwood.tree import Tree, chain_tree
from draftwood.universal import Universal

REWINDABLE = {"full_attention", "sliding_attention", None}


class Path(Protocol):
    """How a forward runs: through the model's own modules, or leaner."""

    name: str

    @property
    def kind(self) -> str: ...
    @property
    def launches_per_layer(self) -> int: ...
    @property
    def exact_cache(self) -> bool: ...

    def tap(self, layers: Sequence[int]) -> None: ...
    def attach(self) -> None: ...
    def release(self) -> None: ...
    def verify(self, plan: Plan, cache: KVCache) -> Verified: ...


class Target:
    """A causal LM in draftwood's hands. `model` stays an ordinary transformers model."""

    group: Group = ALONE  # the processes that hold it; several: `sharded.py`

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        tap_layers: Sequence[int] = (),
        path: str = "auto",
        pack: bool = False,
        width_invariant: bool = False,
    ) -> None:
        """`path` is auto (lean where the model allows it), universal or lean. `pack` rearranges the weights for a CPU,
        on which the model's own forward then runs, too: for models that nobody else uses. With `width_invariant` a GPU
        gives a token the same bits at every width and place in a tree, at some cost.

        Raises
        ------
        BadModel: it cannot be rewound, or does not follow a tree mask.
        BadInput: an unknown path, the lean one for a model of another shape, or width invariance where none is had.
        """
        self.model = model.eval()
        self.name = name
        # Held by a thread that runs a round, since threads may share buffers here and what engines learn.
        self.lock = threading.RLock()
        self.config = model.config.get_text_config()
        refuse_unrewindable(self.config, name, getattr(model, "_is_stateful", False))
        if len({parameter.device for parameter in model.parameters()}) > 1:
            raise BadModel(f"{name} lies on several devices; load it on one, without device_map.")
        self.weight_bytes, self._experts = weight_bytes(model), experts(model)
        self._query_width = sum(query_widths(self.config)) // self.num_layers
        self._key_width = sum(kv_widths(self.config))  # in all layers; counted once, since every price needs it
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # Cohere, Granite, Gemma
        self._finishing = tuple(getattr(self.config, name, None) for name in names)
        self.path = choose_path(model, name, path, pack, width_invariant)
        self.attach()
        self.tap_layers: tuple[int, ...] = ()
        self.trusts_code = False  # whether a drafter's model may bring code of its own, too
        self.tap(tap_layers)
        try:
            check_tree_attention(self)
        except BaseException:
            self.release()
            raise

    # --- facts -------------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.model.get_output_embeddings().out_features

    @property
    def context_limit(self) -> int:
        """The most tokens that prompt and answer may have together.

        With `longrope`, longer texts rotate all of their positions differently. The limit is then that of shorter
        texts, since a cache would hold wrong keys of a text from there on.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        longest: int = getattr(self.config, "max_position_embeddings", None) or 2**31
        if rope.get("rope_type") != "longrope":
            return longest
        short = getattr(self.config, "original_max_position_embeddings", None)
        return short or rope.get("original_max_position_embeddings") or longest

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a text, from the model's generation config."""
        ids = self.model.generation_config.eos_token_id
        return frozenset(() if ids is None else ids if isinstance(ids, list) else [ids])

    def kv_bytes_per_token(self) -> int:
        return 2 * self._kv_width() * stored(self.dtype, self.path.exact_cache).itemsize

    def _kv_width(self) -> int:
        """The size of a token's key in all layers together."""
        return self._key_width

    @property
    def footprint(self) -> Footprint:
        launches, kv_bytes = self.path.launches_per_layer * self.num_layers, self.kv_bytes_per_token()
        sizes = self.weight_bytes, self.dtype.itemsize, self.hidden_size, self.num_layers, kv_bytes, launches
        return Footprint(*sizes, *self._experts, self._query_width)

    def work(self, n_tokens: int, context: int, requests: int = 1) -> Work:
        """What verifying `n_tokens` (roots included) of some requests, each behind `context` tokens, takes at least."""
        return self.footprint.work(n_tokens, context, requests)

    # --- parts a drafter shares --------------------------------------------------------------------------
    @property
    def embedding(self) -> Tensor:
        """Raw rows of the input embedding, `[V, hidden]`."""
        return self.model.get_input_embeddings().weight

    @property
    def output(self) -> nn.Module:
        """The head's product alone: final hidden states `[M, hidden]` to `[M, V]`, neither scaled nor capped."""
        return self.model.get_output_embeddings()

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the input embedding: `[..., hidden]`."""
        return nn.functional.embedding(ids, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """The target's own logits `[M, V]` of final hidden states `[M, hidden]`, scaled and capped as it does."""
        return self.finish(self.output(hidden))

    def head_rows(self, tokens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight `[K, hidden]` and bias `[K]` of the head for these token ids, or for all."""
        head: Any = self.output
        weight = head.unpacked() if isinstance(head, PackedLinear) else head.weight
        rows = slice(None) if tokens is None else tokens
        return weight[rows].detach(), None if head.bias is None else head.bias[rows].detach()

    @property
    def finishes(self) -> bool:
        """Whether the target scales or caps its logits."""
        return any(part not in (None, 1) for part in self._finishing)

    def finish(self, logits: Tensor) -> Tensor:
        """Scale and cap what the head's product gave, as the target does."""
        scale, divisor, cap = self._finishing
        logits = logits if scale is None else logits * scale
        logits = logits if divisor is None else logits / divisor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # --- forwards ----------------------------------------------------------------------------------------
    def tap(self, layers: Sequence[int]) -> None:
        """Collect the outputs of these decoder layers from now on."""
        if tuple(layers) != self.tap_layers:
            self.tap_layers = tuple(layers)
            self.path.tap(layers)

    def new_cache(self, capacity: int, requests: int = 1) -> KVCache:
        return KVCache(self.num_layers, [self.new_row(capacity) for _ in range(requests)])

    def new_row(self, capacity: int) -> Row:
        return Row(self.num_layers, capacity, self.path.exact_cache)

    def plan(
        self, trees: Sequence[Tree], cache: KVCache, rows: Sequence[int] = (0,), known: Sequence[bool] = ()
    ) -> Plan:
        """Tree b goes behind what `rows[b]` holds; of a `known` one only the last token's logits are wanted."""
        contexts = [cache.rows[row].length for row in rows]
        return make_plan(trees, contexts, self.dtype, self.device, rows, known)

    def verify(self, plan: Plan, cache: KVCache) -> Verified:
        """One forward over the plan's tokens. Their keys and values lie in the cache, uncommitted."""
        cache.place(plan)
        with self.group.listening():
            return self.path.verify(plan, cache)

    def prefill(self, chunk: Sequence[int], cache: KVCache, row: int = 0) -> Verified:
        """Commit a chunk of known tokens: its taps, and the logits after its last token alone."""
        result = self.verify(self.plan([chain_tree(chunk)], cache, [row], [True]), cache)
        cache.advance(row, len(chunk))
        return result

    # --- whose model it is -------------------------------------------------------------------------------
    def attach(self) -> None:
        """Take the model back after `release`."""
        self._first = first_weight(self.model)  # every round needs it, and transformers takes ten times as long
        self.path.attach()

    def release(self) -> None:
        """Give the model back in the state that its users know."""
        self.path.release()

    @contextmanager
    def plain_transformers(self) -> Iterator[PreTrainedModel]:
        """The model with its usual attention, for `model.generate` on the same weights."""
        self.path.release()
        try:
            yield self.model
        finally:
            self.path.attach()


def first_weight(model: PreTrainedModel) -> Tensor:
    """A weight that tells a model's dtype and device."""
    return next(weight for weight in model.parameters() if weight.is_floating_point())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of parameters that every forward reads (an untied input embedding is only looked up)."""
    table = model.get_input_embeddings().weight
    tied = table is model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if tied or p is not table)


def experts(model: PreTrainedModel) -> tuple[float, float]:
    """Bytes of a mixture's stacked experts, and the share of them that a token runs through; 0 and 1 without any."""
    config = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count, chosen = next(filter(None, counts), None), getattr(config, "num_experts_per_tok", None)
    if count is None or chosen is None:
        return 0.0, 1.0
    return sum(p.nbytes for p in model.parameters() if p.ndim == 3 and len(p) == count), chosen / count


def check_path(asked: str) -> None:
    """Raise BadInput for a path that does not exist."""
    check_one_of("target_path", asked, PATHS)


def choose_path(model: PreTrainedModel, name: str, asked: str, pack: bool, invariant: bool) -> Path:
    """The lean path unless it is not wanted or declines the model."""
    check_path(asked)
    reason = lean.declines(model)
    if asked == "lean" and reason is not None:
        raise BadInput(f"{name} cannot take the lean path: {reason}; use target_path auto or universal.")
    if asked == "universal" or reason is not None:
        if invariant:
            raise BadInput(f"{name} takes the universal path, which cannot be width-invariant; leave that out.")
        return Universal(model, name, pack)
    path = lean.Lean(model, pack, invariant)
    if invariant and model.device.type == "cuda":
        check_invariant(path, name)
    return path


def check_invariant(path: lean.Lean, name: str) -> None:
    """Raise BadInput where the only attention that is width-invariant on a GPU does not run."""
    reason = attention.explain(path.model.device, path.model.dtype, path.shape.head_dim)["triton"]
    if reason is not None:
        raise BadInput(f"{name} cannot be width-invariant here: its attention would have to be Triton's, but {reason}.")


def refuse_unrewindable(config: PretrainedConfig, name: str, recurrent: bool = False) -> None:
    """Speculation needs a cache that can forget rejected tokens; recurrent states cannot. Raises BadModel."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - REWINDABLE
    if kinds or recurrent or getattr(text, "num_attention_heads", None) is None:
        found = ", ".join(sorted(kinds)) or "a recurrent state"
        raise BadModel(
            f"{name} ({config.model_type}) keeps {found}, which cannot be rewound after a rejected draft; draftwood "
            "needs a model with full or sliding-window attention in every layer."
        )


@torch.inference_mode()
def check_tree_attention(target: Target) -> None:
    """Refuse a model whose tree forward differs from its plain forward on a chain with a decoy branch."""
    # Ordinary tokens: for special ones, which have the lowest ids, rounding in bf16 moves logits by up to a tenth.
    tokens = [target.vocab_size // part for part in (11, 7, 5, 3)]
    with runs(target, "in transformers"), target.plain_transformers() as model:
        expected = model(input_ids=torch.tensor([tokens], device=target.device)).logits[0, -1].float()
    chain = chain_tree([*tokens[1:3], tokens[0], tokens[3]])
    tree = Tree(chain.tokens, chain.parents.copy(), chain.depths.copy(), chain.mass)
    tree.parents[3], tree.depths[2:] = 1, (1, 2)  # node 2 is a decoy beside node 1
    cache = target.new_cache(capacity=8)
    with runs(target, "with draftwood's cache, which holds keys and values as attention takes them"):
        target.prefill(tokens[:1], cache)
        found = target.verify(target.plan([tree], cache), cache).logits[-1].float()
    tolerance = 0.1 if target.dtype.itemsize == 2 else 1e-3
    gap = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)
    if not gap <= tolerance:
        raise BadModel(
            f"{target.name} ({type(target.model).__name__}) does not follow a tree mask (its logits move by "
            f"{float(gap):.2g} of their range); draftwood cannot verify trees with it."
        )


@contextmanager
def runs(target: Target, where: str) -> Iterator[None]:
    """Raise BadModel for whatever a model's own code raises."""
    try:
        yield
    except DraftwoodError:
        raise
    except Exception as error:
        raise BadModel(
            f"{target.name} ({type(target.model).__name__}) does not run {where}: {first_line(error)}."
        ) from error
