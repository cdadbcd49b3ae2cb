"""What a DFlash checkpoint's config.json says, in all published forms, and whether it fits a target.

Keys of DFlash (arXiv 2602.06036) lie in `dflash_config` or at the top level; rotary settings are `rope_theta`
with `rope_scaling`, or `rope_parameters`. Unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftwood.decoder import Shape, Sight
from draftwood.drafters import mark, speculators
from draftwood.errors import BadModel
from draftwood.rotary import STATIC

if TYPE_CHECKING:
    from draftwood.target import Target

SECOND, SPARK = "DFlash2DraftModel", ("Qwen3DSparkModel", "DSparkDraftModel")
ARCHITECTURES = ("DFlashDraftModel", SECOND, *SPARK)
LAYER_TYPES = ("full_attention", "sliding_attention")
ADVICE = "Name a DFlash drafter made for your target, or 'ngram'."
OTHERS = {  # what an architecture's name says of a checkpoint, the first that fits
    "Eagle3": "If it is an EAGLE-3 drafter of your target, name it eagle3:{}.",
    "ForCausalLM": "If it is a smaller model with your target's tokenizer, name it draft-model:{}.",
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """The shapes and constants of one DFlash drafter."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    vocab_size: int
    attention_bias: bool
    sights: tuple[Sight, ...]  # one per layer
    rope: Mapping[str, Any]  # rope_theta, rope_type and the parameters of that type
    max_positions: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    embedding_scale: float
    tau: float | None = None  # tokens a round, as its maker measured; a key that only draftwood writes
    target_mark: tuple[float, ...] | None = None  # identifies the target it was made for (mark.py); draftwood's, too
    markov_rank: int = 0  # rank of the Markov head (markov.py), 0: none; draftwood's, too
    draft_vocab: int | None = None  # tokens that a head of its own proposes; None: the target's head; speculators'
    taps: int = 0  # tokens that each convolution of DFlash 2 mixes (convolution.py); 0: it has none
    groups: int = 0  # of channels that share a dynamic kernel there
    selector_rank: int = 0  # of DFlash 2's candidate selector (selector.py), 0: none
    selector_top_k: int = 0  # candidates that it was trained to choose among
    spark_rank: int = 0  # of DSpark's Markov head (selector.py), 0: none
    from_root: bool = False  # whether the root's own place predicts, too: a block of B then gives B tokens (DSpark)

    @property
    def num_layers(self) -> int:
        return len(self.sights)

    @property
    def first(self) -> int:
        """The place in the block that predicts what follows the root."""
        return 0 if self.from_root else 1

    @property
    def causal(self) -> bool:
        """Whether no token of a block sees later ones, so that a short block begins as a long one does."""
        return all(sight.causal for sight in self.sights)

    @property
    def window(self) -> int | None:
        """How far back every layer looks; None: to the beginning, or layers differ."""
        windows = {sight.window for sight in self.sights}
        return windows.pop() if len(windows) == 1 else None

    @property
    def shape(self) -> Shape:
        return Shape(self.num_heads, self.num_kv_heads, self.head_dim, self.norm_eps)

    @property
    def tap_width(self) -> int:
        """Numbers per context token that the drafter reads from the target."""
        return len(self.target_layer_ids) * self.hidden_size

    def block_parameters(self) -> int:
        """Weights that every block token is multiplied with, the target's head not counted."""
        attention = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
        kernels = 2 * 2 * self.taps * self.groups  # in front of attention and MLP, and behind
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size + kernels)

    def context_parameters(self) -> int:
        """Weights that every new context feature is multiplied with."""
        return self.hidden_size * (self.tap_width + self.num_layers * 2 * self.num_kv_heads * self.head_dim)


@dataclass(frozen=True, slots=True)
class Keys:
    """Checked access to a config; `dflash_config` takes precedence over the top level."""

    values: Mapping[str, Any]
    name: str
    form: str = "z-lab's DFlash format"

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value; `null` counts as absent."""
        nested = self.values.get("dflash_config")
        for level in (nested if isinstance(nested, dict) else {}, self.values):
            if level.get(key) is not None:
                return level[key]
        return default

    def wrong(self, key: str, expected: str) -> BadModel:
        return BadModel(
            f"The config.json of drafter {self.name} has {key} = {self.get(key)!r} instead of {expected}; "
            f"use a checkpoint in {self.form}."
        )

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(key, f"a whole number of at least {least}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(key, "a positive number")
        return float(value)

    def reals(self, key: str) -> tuple[float, ...] | None:
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise self.wrong(key, "a list of numbers")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value


def parse_config(values: Mapping[str, Any], name: str) -> DFlashConfig:
    """The config of drafter `name` from the parsed JSON. Raises BadModel naming the key that is wrong."""
    keys = Keys(speculators.as_dflash(values, name), name)
    kind = _check_architecture(keys)
    second, spark = kind == SECOND, kind in SPARK
    num_layers, num_heads, hidden = (
        keys.whole(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    config = DFlashConfig(
        hidden_size=hidden,
        intermediate_size=keys.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=keys.whole("num_key_value_heads", num_heads),
        head_dim=keys.whole("head_dim", hidden // num_heads),
        norm_eps=keys.real("rms_norm_eps"),
        vocab_size=keys.whole("vocab_size"),
        attention_bias=keys.flag("attention_bias", False),
        sights=_sights(keys, num_layers),
        rope=read_rope(keys),
        max_positions=keys.whole("max_position_embeddings", 32768),
        block_size=keys.whole("block_size", 16, least=2),
        mask_token_id=keys.whole("mask_token_id", least=0),
        target_layer_ids=_target_layers(keys, num_layers),
        num_target_layers=keys.whole("num_target_layers") if keys.get("num_target_layers") is not None else None,
        embedding_scale=keys.real("input_embedding_scale", 1.0),
        tau=keys.real("tau") if keys.get("tau") is not None else None,
        target_mark=keys.reals(mark.KEY),
        markov_rank=0 if spark else keys.whole("markov_rank", 0, least=0),
        draft_vocab=keys.whole("draft_vocab_size") if keys.get("draft_vocab_size") is not None else None,
        taps=keys.whole("conv_kernel_size") if second else 0,
        groups=hidden // keys.whole("conv_group_size") if second else 0,
        selector_rank=keys.whole("selector_rank") if second else 0,
        selector_top_k=keys.whole("selector_top_k") if second else 0,
        spark_rank=keys.whole("markov_rank", least=0) if spark else 0,
        from_root=keys.flag("sample_from_anchor", spark),
    )
    if num_heads % config.num_kv_heads:
        raise keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    if config.spark_rank and keys.get("markov_head_type", "vanilla") != "vanilla":
        raise keys.wrong("markov_head_type", "'vanilla', which is all that draftwood runs")
    if keys.real("output_multiplier", 1.0) != 1:
        raise keys.wrong("output_multiplier", "1, which is all that draftwood runs")
    if second and hidden % keys.whole("conv_group_size"):
        raise keys.wrong("conv_group_size", f"a divisor of hidden_size = {hidden}")
    if config.head_dim % 2:
        raise keys.wrong("head_dim", "an even number")
    return config


def check_fits(config: DFlashConfig, name: str, target: Target) -> None:
    """Refuse a drafter made for another target, naming everything that differs."""
    pairs = [
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
        ("number of target layers", config.num_target_layers or target.num_layers, target.num_layers),
    ]
    wrong = [f"{what} {ours} (the target has {theirs})" for what, ours, theirs in pairs if ours != theirs]
    beyond = [layer for layer in config.target_layer_ids if layer >= target.num_layers]
    if beyond:
        wrong.append(f"target layer {beyond[0]} (the target's last is {target.num_layers - 1})")
    if config.mask_token_id >= target.vocab_size:
        wrong.append(f"mask token {config.mask_token_id} (the target embeds {target.vocab_size} tokens)")
    if wrong:
        raise BadModel(
            f"The drafter {name} does not fit {target.name}: it expects {', '.join(wrong)}. "
            "Name the drafter of this target, or 'ngram', which works with every target."
        )
    mark.check_mark(config.target_mark, name, target)


def _check_architecture(keys: Keys) -> str:
    """The one of ARCHITECTURES that a config names, or the first."""
    found = keys.get("architectures", list(ARCHITECTURES[:1]))
    known = [one for one in ARCHITECTURES if isinstance(found, list) and one in found]
    if not known:
        listed = ", ".join(map(repr, found)) if isinstance(found, list) else repr(found)
        raise BadModel(
            f"{keys.name} is a checkpoint of {listed or 'no architecture'}, not of {' or '.join(ARCHITECTURES)}. "
            + next((told for part, told in OTHERS.items() if part.lower() in listed.lower()), ADVICE).format(keys.name)
        )
    if keys.get("hidden_act", "silu") != "silu":
        raise keys.wrong("hidden_act", "'silu'")
    return known[0]


def _sights(keys: Keys, num_layers: int) -> tuple[Sight, ...]:
    """Full layers see everything; sliding ones see a window, and of the block only what comes before.

    That is z-lab's rule; its `is_causal` overrides the order in every layer. `use_swa`, `swa_window_size`
    and `causal` are MiMo's and ModelOpt's keys: every layer slides, and the block stays bidirectional.
    """
    first_sliding = (
        keys.whole("max_window_layers", 28, least=0) if keys.flag("use_sliding_window", False) else num_layers
    )
    types = keys.get("layer_types", [LAYER_TYPES[i >= first_sliding] for i in range(num_layers)])
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
        raise keys.wrong("layer_types", f"a list of {num_layers} out of {' and '.join(LAYER_TYPES)}")
    sliding = [kind == LAYER_TYPES[1] for kind in types]
    ordered = sliding
    if keys.flag("use_swa", False) and not any(sliding):
        sliding, ordered = [True] * num_layers, [False] * num_layers
    window_key = "swa_window_size" if keys.get("swa_window_size") is not None else "sliding_window"
    window = keys.whole(window_key) if any(sliding) else None
    override = "causal" if keys.get("causal") is not None else "is_causal"
    return tuple(
        Sight(window if slides else None, keys.flag(override, causal))
        for slides, causal in zip(sliding, ordered, strict=True)
    )


def read_rope(keys: Keys) -> dict[str, Any]:
    source = "rope_parameters" if keys.get("rope_parameters") is not None else "rope_scaling"
    given = keys.get(source, {})
    if not isinstance(given, dict):
        raise keys.wrong(source, "an object")
    rope = {**given, "rope_type": given.get("rope_type", given.get("type", "default"))}
    if rope["rope_type"] not in STATIC:
        raise keys.wrong(source, f"a rope_type out of {', '.join(STATIC)}")
    rope["rope_theta"] = Keys({"rope_theta": keys.get("rope_theta"), **given}, keys.name).real("rope_theta")
    return rope


def _target_layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """The tapped target layers; where a checkpoint names none, DFlash spreads them from layer 1 to L - 3."""
    layers = keys.get("target_layer_ids")
    if layers is None:
        depth = keys.whole("num_target_layers", least=4)
        if num_layers == 1:
            return (depth // 2,)
        return tuple(round(1 + i * (depth - 4) / (num_layers - 1)) for i in range(num_layers))
    if not isinstance(layers, list) or not layers or not all(type(i) is int and i >= 0 for i in layers):
        raise keys.wrong("target_layer_ids", "a list of layer numbers")
    return tuple(layers)
