"""What a training run is: every number that shapes it, and the drafter's shape that follows from the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from draftwood.drafters import mark
from draftwood.drafters.dflash_config import ARCHITECTURES, LAYER_TYPES
from draftwood.errors import BadInput, check_one_of
from draftwood.rotary import STATIC
from draftwood.target import Target
from draftwood.train.blocks import OBJECTIVES
from draftwood.train.optimizers import OPTIMIZERS
from draftwood.train.shards import Text

SHAPE_KEYS = (  # of config.json, decided by a checkpoint if training begins with one
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias",
    "input_embedding_scale", "rope_theta", "rope_scaling",
)  # fmt: skip
FREE = ("lr", "save_minutes", "eval_every", "cache_gb")  # what a resumed run may change


@dataclass(frozen=True, slots=True)
class Recipe:
    """The defaults are the DFlash paper's (arXiv 2602.06036), but for one machine instead of eight GPUs."""

    objective: str = "dflash"
    layers: int = 3
    block_size: int = 16
    causal: bool = False  # tokens of a block do not see later ones, so that a draft of few depths is a short block
    # tokens that a layer looks back; 0: all; None: as in the checkpoint of `init`, else enough for 9 of 10 texts
    window: int | None = None
    taps: int = 5  # target layers that the drafter reads
    markov_rank: int = 64  # rank of the correction by the previous candidate; 0: none, marginals alone
    init: str = "target"  # where the weights come from: target, random or a checkpoint
    head_tokens: str = "auto"  # tokens that may be drafted: auto, all or how many
    mask_token: int | None = None  # id of the mask; None: a token that the texts do not use
    epochs: float = 6.0
    steps: int | None = None  # if given, it replaces `epochs`
    batch_size: int = 8  # texts of a step, all processes together
    micro_batch: int | None = None  # texts of one forward; None: all of a step's
    anchors: int = 64  # blocks that a text is trained on, drawn anew in every epoch
    max_length: int = 3072
    optimizer: str = "adamw"  # adamw, or muon for the layers' matrices and adamw for the rest
    lr: float = 6e-4
    warmup: float = 0.04  # share of the steps with a rising learning rate
    weight_decay: float = 0.0
    clip: float = 1.0
    gamma: float | None = None  # decay of the weights of later positions; None: the paper's for this block size
    soft: float = 0.0  # share of the loss that follows the target's own distribution
    autocast: bool = True  # matrix products in bf16, if the device has them
    holdout: float = 0.02  # share of the prompts that are kept for measuring
    seed: int = 0
    save_minutes: float = 5.0
    eval_every: int = 500  # steps between two measurements
    cache_gb: float | None = None  # gigabytes of disk for the target's features; None: half of what is free, at most 20

    def __post_init__(self) -> None:
        check_one_of("--objective", self.objective, OBJECTIVES)
        check_one_of("--optimizer", self.optimizer, OPTIMIZERS)
        for name, value in OBJECTIVES[self.objective].fixed.items():
            object.__setattr__(self, name, value)  # the kind of drafter leaves no choice
        if self.head_tokens not in ("auto", "all") and not (self.head_tokens.isdigit() and int(self.head_tokens)):
            raise BadInput(f"--head-tokens is {self.head_tokens!r}; expected auto, all or a number of tokens.")
        for name, least in (
            ("layers", 1), ("block_size", 2), ("taps", 1), ("markov_rank", 0), ("batch_size", 1), ("anchors", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise BadInput(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be {least} or more.")
        if self.window and self.window < self.block_size:
            raise BadInput(f"--window is {self.window}; it must be 0 (all) or at least a block of {self.block_size}.")
        for name, low, high, range_ in (
            ("epochs", 0, math.inf, "above 0"), ("lr", 0, 1, "above 0 and below 1"),
            ("clip", 0, math.inf, "above 0"), ("soft", -1e-9, 1 + 1e-9, "from 0 to 1"),
            ("holdout", -1e-9, 0.9, "from 0 to less than 0.9"),
        ):  # fmt: skip
            if not low < getattr(self, name) < high:
                raise BadInput(f"--{name} is {getattr(self, name)}; it must be a finite number {range_}.")

    @property
    def decay(self) -> float:
        """The paper's 7, 5 and 4 for blocks of 16, 10 and 8, up to rounding."""
        return self.gamma or 1 + 3 * self.block_size / 8

    def total_steps(self, texts: int) -> int:
        return self.steps or max(1, round(self.epochs * texts / self.batch_size))

    def rate(self, step: int, steps: int) -> float:
        """The learning rate: linear warm-up, then a cosine down to a tenth."""
        warmup = max(1, round(self.warmup * steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        part = (step - warmup) / max(1, steps - warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))

    def batch(self, step: int, texts: int) -> list[tuple[int, int]]:
        """(epoch, text) pairs of a step. A function of the step alone, so a resumed run needs no position."""
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = range(places[0] // texts, places[-1] // texts + 1)
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(texts) for epoch in epochs}
        return [(at // texts, int(orders[at // texts][at % texts])) for at in places]

    def anchor_rng(self, epoch: int, text: int) -> np.random.Generator:
        """What anchors and prefixes of a text are drawn from in an epoch."""
        return np.random.default_rng([self.seed, epoch, text])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_same(self, found: dict[str, Any], where: str) -> None:
        """Refuse to resume a run of another recipe, naming the first difference."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), found.get(field.name, field.default)
            if field.name not in FREE and ours != theirs:
                raise BadInput(
                    f"{where} holds a run with --{field.name.replace('_', '-')} {theirs}, and {ours} was asked for; "
                    "repeat its flags to resume it, or name another --out."
                )


def drafter_config(
    recipe: Recipe, target: Target, mask_token: int, thinking: str = "default", first: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a drafter in z-lab's format, with the shapes of the target's own layers.

    `first` is what the checkpoint that training begins with decides or, if there is none, what the texts decide.
    """
    theirs, first = target.config, first or {}
    heads = theirs.num_attention_heads
    rope = dict(getattr(theirs, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", None) or getattr(theirs, "rope_theta", None) or 10000.0
    rope.pop("partial_rotary_factor", None)
    plain = rope.get("rope_type", "default") not in STATIC[1:]  # a drafter has none that depends on the length
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "qwen3",
        "block_size": recipe.block_size,
        **sight_keys(recipe, first),
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": read_layers(recipe, target.num_layers, first.get("target_layer_ids")),
            "objective": recipe.objective,
            "thinking": thinking,
            "markov_rank": recipe.markov_rank,
            mark.KEY: mark.mark_of(target),
        },
        "num_target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(theirs, "intermediate_size", None) or 4 * target.hidden_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(theirs, "num_key_value_heads", None) or heads,
        "head_dim": getattr(theirs, "head_dim", None) or target.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", None) or 1e-6,
        "rope_theta": theta,
        "rope_scaling": None if plain else rope,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": bool(getattr(theirs, "tie_word_embeddings", False)),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": min(target.context_limit, 2**20),
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": getattr(theirs, "bos_token_id", None),
        "eos_token_id": sorted(target.stop_ids) or None,
        **{key: first[key] for key in SHAPE_KEYS if key in first},
    }


def sight_keys(recipe: Recipe, first: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a drafter's config.json that say what its layers see, the same in all layers."""
    window = (first.get("sliding_window") if recipe.window is None else recipe.window) or None
    if window and window < recipe.block_size:
        raise BadInput(
            f"--block-size is {recipe.block_size}, but --init {recipe.init} looks back {window} tokens, less than a "
            f"block; give {window} or less, or begin from target or random."
        )
    causal = recipe.causal or bool(first.get("is_causal"))
    return {
        **({"is_causal": causal} if causal or window else {}),  # layers with a window are causal by default
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window else recipe.layers,
        "layer_types": [LAYER_TYPES[window is not None]] * recipe.layers,
    }


def read_layers(recipe: Recipe, layers: int, first: list[int] | None) -> list[int]:
    """The target layers that the drafter reads: `first`, those of a checkpoint to begin with, if any. EAGLE-3's
    are its authors': what enters layers 2, L / 2 and L - 3, if the target has so many."""
    if first:
        if recipe.taps not in (Recipe().taps, len(first)):
            raise BadInput(
                f"--taps is {recipe.taps}, but --init {recipe.init} reads {len(first)} target layers; leave --taps "
                "out, or begin from target or random."
            )
        return first
    if OBJECTIVES[recipe.objective].form != "eagle3":
        return tap_layers(layers, recipe.taps)
    return [1, layers // 2 - 1, layers - 4] if layers >= 8 else [0, layers // 2, layers - 1]


def tap_layers(layers: int, count: int) -> list[int]:
    """Spread evenly from the second layer to the third last, as in DFlash."""
    if count == 1:
        return [layers // 2]
    spread = np.linspace(min(1, layers - 1), max(layers - 3, 0), count)
    return sorted({round(float(layer)) for layer in spread})


def choose_mask_token(
    wanted: int | None, target: Target, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]
) -> int:
    """A token with an embedding that no text uses: one beyond the tokenizer's own, else a special one, else any.

    Raises BadInput for a token that is outside of the vocabulary or ends texts, or if all are in use.
    """
    taboo = target.stop_ids | {t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None}
    if wanted is not None:
        if not 0 <= wanted < target.vocab_size or wanted in taboo:
            raise BadInput(
                f"--mask-token {wanted} cannot be used: it must be an id below {target.vocab_size} that neither pads "
                "nor ends a text."
            )
        return wanted
    used = set(np.unique(np.concatenate([t.tokens for t in texts])).tolist()) | taboo
    beyond = range(len(tokenizer), target.vocab_size)
    special = [
        t for t in sorted(tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder)) if t < target.vocab_size
    ]
    for candidate in (*beyond, *reversed(special), *reversed(range(target.vocab_size))):
        if candidate not in used:
            return candidate
    raise BadInput("The texts use every token of the vocabulary; name one with --mask-token.")
