"""Models of any shape without weights to load: random targets and drafters, and drafts as good as asked for.

A random target takes as long as a real one. Its layers add little to the residual stream, and its head repeats its
embedding, so that its next token is the last one by a wide margin: rounding, which differs between widths, never
changes its text.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftwood.bench.gpu.rates import RANKS, Rates
from draftwood.bench.gpu.shapes import Shape
from draftwood.drafters.base import Candidates, Placed
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_config import DFlashConfig, parse_config
from draftwood.drafters.dflash_weights import Weights, build_weights
from draftwood.memory import Need, cache_bytes, prefill_bytes, require, target_bytes
from draftwood.noise import Ahead
from draftwood.target import Target

SPREAD = 0.02  # of a drafter's weights, as models are initialised
QUIET = 0.1  # what all layers together add to the residual stream, in units of an embedding
MOST_CANDIDATES = 256


def check_room(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Raise BadInput if the models and a request of `tokens` do not fit, before anything is allocated."""
    config = AutoConfig.for_model(shape.family, **shape.target_config())
    draft = parse_config(shape.drafter_config(), shape.name)
    slots = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim * tokens
    need = Need(
        target=target_bytes(config, dtype),
        drafter=(draft.block_parameters() + draft.context_parameters()) * dtype.itemsize,
        cache=cache_bytes(config, dtype, tokens) + slots * dtype.itemsize,
        buffers=prefill_bytes(config, dtype, tokens),
    )
    require(need, device, f"{shape.name} in {str(dtype).removeprefix('torch.')}", "leave it out, or long contexts")


@torch.no_grad()
def random_target(shape: Shape, device: torch.device, dtype: torch.dtype, width_invariant: bool = False) -> Target:
    """A target of this shape, its weights created where they stay."""
    config = AutoConfig.for_model(shape.family, **shape.target_config())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            table.normal_()
    for block in model.model.layers:
        for layer in (block.self_attn.o_proj, block.mlp.down_proj):
            layer.weight.mul_(QUIET / math.sqrt(2 * shape.layers))
    if head is not table:
        head.copy_(table)
    return Target(model, shape.name, pack=device.type == "cpu", width_invariant=width_invariant)


class ScriptedDrafter(DFlashDrafter):
    """A random DFlash drafter whose whole pass runs, and whose proposals are then replaced by scripted ones."""

    def __init__(self, config: DFlashConfig, weights: Weights, target: Target, name: str, positions: int) -> None:
        """Scripts cover answers of up to `positions` tokens."""
        super().__init__(config, weights, target, name)
        device = target.device
        width = min(MOST_CANDIDATES, target.vocab_size - 1)
        self.tokens = torch.zeros(positions, self.max_depth, width, dtype=torch.int64, device=device)
        self.logp = torch.full((self.max_depth, width), -math.log(width), device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)

    def follow(self, truth: list[int], prompt: int, rates: Rates, seed: int) -> None:
        """From now on propose `truth`, the text after `prompt` tokens; proposals are right as often as `rates` say."""
        rounds, depth, width = self.tokens.shape
        ranks = torch.from_numpy(rates.to_depth(depth).draw(rounds, seed)).to(self.tokens.device)
        text = torch.tensor([*truth, *truth[-1:] * (depth + rounds)], device=self.tokens.device)
        # After a context of c tokens the root is truth[c - prompt], and depth d continues it.
        right = text[torch.arange(rounds)[:, None] + 1 + torch.arange(depth)]
        wrong = 1 + torch.arange(width, device=self.tokens.device)
        tokens = (right[:, :, None] + wrong) % self._target.vocab_size
        hit = torch.arange(width, device=self.tokens.device) == ranks[:, :, None]
        self.tokens.copy_(torch.where(hit & (ranks < RANKS)[:, :, None], right[:, :, None], tokens))
        self.logp.copy_(torch.from_numpy(rates.to_depth(depth).logp(width)))
        self.start.fill_(prompt)

    def place(self, capacity: int) -> Script:  # type: ignore[override]
        return Script(self, super().place(capacity))


class Script:
    """The drafter's own buffers; what it proposes is read from the script."""

    paired = 0

    def __init__(self, drafter: ScriptedDrafter, placed: Placed) -> None:
        self.max_depth = drafter.max_depth
        self._drafter, self._placed = drafter, placed

    def extend(self, taps: Tensor, start: Tensor) -> None:
        self._placed.extend(taps, start)

    def draft(self, root: Tensor, context: Tensor, width: int, ahead: Ahead | None = None) -> Candidates:
        self._placed.draft(root, context, width, ahead)
        script = self._drafter
        at = (context - script.start).clamp(0, len(script.tokens) - 1)[None]  # a scalar index would wait for the device
        return Candidates(script.tokens[at][0, :, :width], script.logp[:, :width])

    def nbytes(self) -> int:
        return self._placed.nbytes()


def random_drafter(shape: Shape, target: Target, positions: int) -> ScriptedDrafter:
    """A DFlash drafter of this shape with random weights, created on the target's device."""
    config = parse_config(shape.drafter_config(), shape.name)
    chance = torch.Generator(target.device).manual_seed(1)
    tensors = {
        name: torch.ones(size, device=target.device, dtype=target.dtype)
        if len(size) == 1
        else torch.empty(size, device=target.device, dtype=target.dtype).normal_(std=SPREAD, generator=chance)
        for name, size in tensor_sizes(config).items()
    }
    weights = build_weights(tensors, config, shape.name, target.device, target.dtype)
    return ScriptedDrafter(config, weights, target, f"{shape.name}-DFlash", positions)


def tensor_sizes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor of a checkpoint in z-lab's format."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.num_heads * head, config.num_kv_heads * head
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (wide, hidden), "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, wide),
        "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    sizes = {"fc": (hidden, config.tap_width), "hidden_norm": (hidden,), "norm": (hidden,)}
    sizes |= {f"layers.{i}.{name}": size for i in range(config.num_layers) for name, size in layer.items()}
    return {f"{name}.weight": size for name, size in sizes.items()}
