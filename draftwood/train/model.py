"""The DFlash drafter as a module that learns; its parameters have the names of z-lab's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwood.drafters.dflash import rotary_embedding
from draftwood.drafters.dflash_config import DFlashConfig
from draftwood.drafters.markov import tables
from draftwood.rotary import Rotary, rotate
from draftwood.train.attention import AttendBlocks, Layout, blocks_attention

Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, [N, 1, D] each


class Norm(nn.RMSNorm):
    """A norm in the weight's own precision, whatever the product before it gave."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def side_by_side(x: Tensor, *parts: nn.Linear) -> Sequence[Tensor]:
    """What each of `parts` makes of `x`, by one product: `x` goes to bf16, and its gradient back, once for all."""
    weight = torch.cat([part.weight for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
    return F.linear(x, weight, bias).split([part.out_features for part in parts], -1)


class SelfAttention(nn.Module):
    """Block tokens are queries; context features and block tokens are keys and values."""

    def __init__(self, config: DFlashConfig, qk_norm: bool) -> None:
        super().__init__()
        wide, narrow = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.attention_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_norm:
            self.q_norm, self.k_norm = (Norm(config.head_dim, config.norm_eps) for _ in range(2))
        self.head_dim = config.head_dim

    def forward(self, x: Tensor, features: Tensor, at: Rotation, context_at: Rotation, attend: AttendBlocks) -> Tensor:
        """`[M * B, hidden]` for block tokens `x` and context features `[C, hidden]`."""
        q, k, v = map(self._heads, side_by_side(x, self.q_proj, self.k_proj, self.v_proj))
        ck, cv = map(self._heads, side_by_side(features, self.k_proj, self.v_proj))
        q, k, ck = self.q_norm(q), self.k_norm(k), self.k_norm(ck)
        q, k, ck = (rotate(y, *where).to(v.dtype) for y, where in ((q, at), (k, at), (ck, context_at)))
        out: Tensor = self.o_proj(attend(q, ck, cv, k, v))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """One layer. Context features pass through it unchanged: they only give keys and values."""

    def __init__(self, config: DFlashConfig, qk_norm: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, qk_norm)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, features: Tensor, at: Rotation, context_at: Rotation, attend: AttendBlocks) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), features, at, context_at, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """The correction of rank r by the token before: see drafters/markov.py. It begins by changing nothing."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Linear(hidden, rank, bias=False)
        self.after = nn.Linear(hidden, rank, bias=False)

    def begin(self) -> None:
        nn.init.normal_(self.before.weight, std=self.before.in_features**-0.5)
        nn.init.zeros_(self.after.weight)

    def tables(self, embedded: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """`[N, r]` and `[V, r]` of embeddings and head rows `[…, hidden]`; scores are their products."""
        return tables(*self.matrices, embedded, head)

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B, `[r, hidden]` each."""
        return self.before.weight, self.after.weight


class TrainableDFlash(nn.Module):
    """Many blocks of many texts in one forward; the embedding and the head stay the target's, frozen."""

    def __init__(self, config: DFlashConfig, qk_norm: bool = True) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.tap_width, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.norm_eps)
        self.layers = nn.ModuleList([Block(config, qk_norm) for _ in config.sights])
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.markov = MarkovHead(config.hidden_size, config.markov_rank) if config.markov_rank else None

    def forward(self, embedded: Tensor, taps: Sequence[Tensor], layout: Layout) -> Tensor:
        """Final hidden states `[M, B - 1, hidden]` of the positions after the anchors.

        Parameters
        ----------
        embedded: `[M * B, hidden]`, the target's embeddings of the block tokens
        taps: for each text `[T, taps * hidden]`, outputs of the tapped target layers
        """
        features = self.hidden_norm(self.fc(torch.cat(list(taps)).to(embedded.dtype)))
        attends = {sight: blocks_attention(layout, sight) for sight in set(self.config.sights)}
        rotary = self._rotary(max(layout.lengths) + layout.size)
        at, context_at = rotary.at(layout.block_positions()), rotary.at(layout.context_positions())
        x = embedded if self.config.embedding_scale == 1.0 else embedded * self.config.embedding_scale
        for layer, sight in zip(self.layers, self.config.sights, strict=True):
            x = layer(x, features, at, context_at, attends[sight])
        out: Tensor = self.norm(x.unflatten(0, (-1, layout.size))[:, 1:])
        return out

    def _rotary(self, count: int) -> Rotary:
        """Made anew in each call: a table of a few thousand rows costs nothing beside a training step."""
        weight = self.norm.weight.detach()
        rotary = Rotary(rotary_embedding(self.config).to(weight.device), weight)
        rotary.reserve(count)
        return rotary
