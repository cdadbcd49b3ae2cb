"""Shapes of public models and of the DFlash drafters for them, as their configs give them: no weights are needed.

Only Qwen3-4B, Qwen3-8B and Llama-3.1-8B have published drafters; the others get one of the same build: five layers
of the target's own sizes, a block of 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwood.errors import BadInput, nearest

LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's sizes and its drafter's."""

    name: str
    family: str  # transformers' model type
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    rope: Mapping[str, Any]
    positions: int  # the context window
    norm_eps: float = 1e-6
    draft_layers: int = 5
    draft_heads: tuple[int, int, int] = (32, 8, 128)  # query heads, key heads, their width
    block: int = 16

    def target_config(self) -> dict[str, Any]:
        """The same under transformers' names."""
        return dict(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            vocab_size=self.vocab, tie_word_embeddings=self.tied, rope_parameters=dict(self.rope),
            max_position_embeddings=self.positions, rms_norm_eps=self.norm_eps,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip

    def drafter_config(self) -> dict[str, Any]:
        """A config.json in z-lab's format; the tapped layers follow from the number of layers."""
        heads, kv_heads, head_dim = self.draft_heads
        return dict(
            architectures=["DFlashDraftModel"], block_size=self.block, num_target_layers=self.layers,
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.draft_layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=self.norm_eps,
            rope_theta=self.rope["rope_theta"], vocab_size=self.vocab, max_position_embeddings=self.positions,
            mask_token_id=self.vocab - 1, layer_types=["full_attention"] * self.draft_layers,
        )  # fmt: skip


def plain_rope(theta: float) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=theta)


SHAPES = (
    Shape(
        "SmolLM2-135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, True, plain_rope(1e5), 8192, 1e-5,
        draft_heads=(9, 3, 64),
    ),
    Shape(
        "Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, plain_rope(1e6), 40960,
        draft_heads=(16, 8, 128),
    ),
    Shape("Qwen3-4B", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, plain_rope(1e6), 40960),
    Shape("Qwen3-8B", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, plain_rope(1e6), 40960),
    Shape("Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False, LLAMA3_ROPE, 131072, 1e-5, block=10),
)  # fmt: skip

# For a first try without a GPU, and for the tests: everything runs, but the figures mean nothing.
TINY = Shape(
    "tiny", "qwen3", 64, 96, 8, 4, 2, 16, 512, False, plain_rope(1e4), 4096, draft_layers=2, draft_heads=(4, 2, 16),
    block=8,
)  # fmt: skip


def shape(name: str) -> Shape:
    """A shape by its name, in upper or lower case. Raises BadInput for an unknown one."""
    known = {s.name.lower(): s for s in (*SHAPES, TINY)}
    if name.lower() not in known:
        names = [s.name for s in (*SHAPES, TINY)]
        raise BadInput(f"--models names {name!r}; expected some of {', '.join(names)}.{nearest(name, names)}")
    return known[name.lower()]
