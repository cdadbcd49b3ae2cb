"""Machines and models that are not here: a card's figures and a config's sizes, enough to price a round by roofline.

Every card is assumed to reach the same share of its data sheet, and nothing here was measured. Such prices rank
policies and cards; they promise no tokens per second. A file with measured figures does better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftwood.errors import BadInput, nearest
from draftwood.footprint import ATTENTION_LAUNCHES, Footprint
from draftwood.latency import LatencyModel, Machine, Work
from draftwood.policies.base import Costs

REACHED_PEAK, REACHED_BANDWIDTH = 0.7, 0.8  # of the data sheet, by large products and long streams
GRAPH_LAUNCH_S = 1.5e-6  # an operator inside a captured graph
ROOFLINE = 1.0  # overlap: all of the shorter of arithmetic and traffic is hidden behind the longer
# Tokens of a verification, the root included, that get a graph of their own. The largest tree gets one too.
CAPTURED = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

# Dense bf16 FLOP/s and bytes/s of the data sheets (SXM where there are several).
CARDS = {
    "a100": (312e12, 2.039e12),
    "h100": (989e12, 3.35e12),
    "h200": (989e12, 4.8e12),
    "rtx4090": (165e12, 1.008e12),
    "rtxpro6000": (504e12, 1.792e12),
}
QWEN3 = {
    "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36,
    "vocab_size": 151936,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-4b": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "vocab_size": 128256,
    },
}  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
MAY_LACK = ("head_dim", "num_key_value_heads", "sliding_window")  # the first two follow from the others then
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names for their number
ALL_NEAR = ("mistral", "ministral", "phi3", "starcoder2")  # families in which a window, if set, is every layer's
ITEMSIZE = 2  # bf16
LAUNCHES_PER_LAYER = 20
BLOCK, DRAFT_LAYERS, TAPS = 16, 5, 5  # of a DFlash drafter as published


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine and the widths that run fast on it; none: every width."""

    machine: Machine
    widths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Modelled:
    """Prices of rounds that never ran."""

    latency: LatencyModel
    widths: tuple[int, ...]

    def costs(self, n_max: int, context: int, positions: int | None = None) -> Costs:
        """Costs with a block drafter, whose forward takes equally long for any number of `positions` while arithmetic
        is plentiful."""
        if not self.widths or not n_max:
            return self.latency.costs(n_max, context)
        last = next((width for width in self.widths if width > n_max), 1 + n_max)
        costs = self.latency.costs(last - 1, context).stepped([w for w in self.widths if w < last] + [last])
        return replace(costs, aux_s=costs.aux_s[: 1 + n_max], verify_s=costs.verify_s[: 1 + n_max])


def hardware(name: str) -> Hardware:
    """`a100`, or a JSON file with `peak` FLOP/s, `bandwidth` bytes/s, `launch_s`, perhaps `overlap` and `widths`.

    Raises BadInput for anything else.
    """
    if name in CARDS:
        peak, bandwidth = CARDS[name]
        reached = REACHED_PEAK * peak, REACHED_BANDWIDTH * bandwidth
        return Hardware(Machine(name, *reached, GRAPH_LAUNCH_S, ROOFLINE), CAPTURED)
    _check_known("hardware", name, ["this", *CARDS])
    data = _read(Path(name), "--hardware")
    try:
        peak, bandwidth, launch_s = (float(data[key]) for key in ("peak", "bandwidth", "launch_s"))
        widths = tuple(sorted({int(width) for width in data.get("widths", ())}))
        overlap = float(data.get("overlap", ROOFLINE))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{name} describes no machine ({error}); expected numbers: peak, bandwidth, launch_s.") from None
    figures = all(0 < figure < math.inf for figure in (peak, bandwidth, launch_s))  # JSON may say NaN and Infinity
    if not figures or min(widths, default=1) < 1 or not 0 <= overlap <= 1:
        raise BadInput(f"{name} describes no machine: figures must be positive and finite, overlap from 0 to 1.")
    machine = Machine(str(data.get("name", Path(name).stem)), peak, bandwidth, launch_s, overlap)
    return Hardware(machine, widths)


def target_config(name: str) -> Mapping[str, Any]:
    """Sizes by a known model's name or from a config.json. Raises BadInput for anything else."""
    if name in CONFIGS:
        return CONFIGS[name]
    _check_known("target config", name, list(CONFIGS))
    data = _read(Path(name), "--target-config")
    optional = [key for key in MAY_LACK if data.get(key) is not None]
    wrong = [f"{key} is {data.get(key, 'missing')!s:.40}" for key in (*NEEDED, *optional) if not _counts(data.get(key))]
    if wrong:
        raise BadInput(
            f"{name} does not describe a dense decoder ({', '.join(wrong)}); expected whole numbers above 0."
        )
    if mixed := [key for key in EXPERTS if data.get(key) not in (None, 0, 1)]:
        raise BadInput(
            f"{name} describes a mixture of experts ({mixed[0]} is {data[mixed[0]]!s:.40}), and only dense decoders "
            "can be priced; give the config of one."
        )
    if near_layers(data) is None:
        raise BadInput(
            f"{name} has a sliding_window of {data['sliding_window']}, but does not say in which layers; give it "
            "layer_types, sliding_attention or full_attention for each, or a sliding_window of null."
        )
    return data


def near_layers(config: Mapping[str, Any]) -> int | None:
    """How many layers look back over `sliding_window` tokens only, as transformers reads the config; None if it does
    not say."""
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    if isinstance(kinds, list) and len(kinds) == layers:
        return kinds.count("sliding_attention")
    pattern: Any = config.get("sliding_window_pattern")
    if _counts(pattern):
        return layers - layers // int(pattern)  # one in every `pattern` sees everything
    return layers if config.get("model_type") in ALL_NEAR else None


def footprint(config: Mapping[str, Any], layers: int | None = None) -> Footprint:
    """The footprint of a dense decoder with a config's sizes in bf16, head included."""
    near = near_layers(config) if layers is None else 0
    layers = layers or int(config["num_hidden_layers"])
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_width = head_dim * int(config.get("num_key_value_heads") or heads)
    layer = hidden * (2 * heads * head_dim + 2 * kv_width + 3 * int(config["intermediate_size"]))
    weights = layers * layer + hidden * int(config["vocab_size"])
    kv_bytes = 2 * layers * kv_width * ITEMSIZE
    launches = LAUNCHES_PER_LAYER * layers
    sizes = Footprint(weights * ITEMSIZE, ITEMSIZE, hidden, layers, kv_bytes, launches, attention_size=heads * head_dim)
    return replace(sizes, near_layers=near, window=int(config["sliding_window"])) if near else sizes


def uncompiled(sizes: Footprint) -> Footprint:
    """A recorded footprint as it would be without compiled forwards, which launch no operators."""
    return replace(sizes, launches=LAUNCHES_PER_LAYER * sizes.layers)


def draft_work(config: Mapping[str, Any]) -> Callable[[int], Work]:
    """A DFlash drafter for this target: a block through a few layers of the target's shape, and its taps."""
    sizes = footprint(config, DRAFT_LAYERS)
    taps, head = TAPS * sizes.hidden_size**2, sizes.hidden_size * int(config["vocab_size"]) * ITEMSIZE

    def work(context: int) -> Work:
        block = sizes.work(BLOCK, context)
        return Work(block.flops + 2 * taps, block.bytes + taps * ITEMSIZE, block.launches, head)

    return work


def drafts_work(draft: Callable[[int], Work], context: int, users: int) -> Work:
    """Drafts for all `users`, each behind `context` tokens: weights are read once, and each attends by itself."""
    one, read = draft(context), draft(0).bytes
    attending = (users - 1) * ATTENTION_LAUNCHES / LAUNCHES_PER_LAYER
    size = read + users * (one.bytes - read)
    return Work(one.flops * users, size, round(one.launches * (1 + attending)), one.shared)


def _check_known(noun: str, name: str, names: list[str]) -> None:
    if not name.endswith(".json"):
        raise BadInput(f"Unknown {noun} '{name}'.{nearest(name, names)} Valid: {', '.join(names)}, or a JSON file.")


def _counts(value: object) -> bool:
    """Whether it is a whole number above 0; JSON's true is none."""
    return type(value) is int and value > 0


def _read(path: Path, flag: str) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{flag} {path} cannot be read as JSON ({error}).") from None
    if not isinstance(data, dict):
        raise BadInput(f"{flag} {path} must hold a JSON object.")
    return data
