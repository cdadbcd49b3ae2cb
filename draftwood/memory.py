"""What a model and a request take of a device's memory, counted before anything is allocated.

Weights, keys and values, and the largest activations are counted; what a library keeps for itself is not. So the count
is a lower bound, and nothing is refused that would fit.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from draftwood import container
from draftwood.cache import kv_widths
from draftwood.drafters.base import Drafter, state_bytes
from draftwood.errors import BadInput
from draftwood.parallel import Group

if TYPE_CHECKING:
    from draftwood.target import Target

DRAWN_TOGETHER, DRAW_COPIES = 32, 4  # rows that are drawn from at once, and float64 copies of their scores
LEAST_REQUEST = 512  # tokens: a model that leaves no room for these is of no use
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by what they are for."""

    target: int = 0
    drafter: int = 0
    cache: int = 0  # keys and values of target and drafter
    buffers: int = 0  # logits and activations of the widest forward

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.cache + self.buffers

    def __str__(self) -> str:
        parts = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {readable(size)}" for name, size in parts if size)


def require(need: Need, device: torch.device, what: str, remedy: str) -> None:
    """Raise BadInput with all sizes if `need` is more than `device` has left; never where the system does not tell."""
    free = free_bytes(device)
    if free is not None and need.total > free:
        raise BadInput(
            f"{what} needs {readable(need.total)} ({need}), but {readable(free)} are free on {device}; {remedy}."
        )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return min((free for free in (_system_free(), container.free_memory()) if free is not None), default=None)


def _system_free() -> int | None:
    """Bytes that new programs may use without swapping, as Linux estimates; None elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def on_meta(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The model of a config without any memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def target_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights of a config's model; tied ones count once."""
    return sum(p.nbytes for p in on_meta(config, dtype).parameters())


def cache_bytes(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of the keys and values of `tokens` in all layers."""
    return 2 * sum(kv_widths(config.get_text_config())) * tokens * dtype.itemsize


def buffer_bytes(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes for a forward of `tokens`: its logits, the scores that draws are made from, and its widest activations."""
    vocab = config.get_text_config().vocab_size
    scores = min(tokens, DRAWN_TOGETHER) * DRAW_COPIES * vocab * torch.float64.itemsize
    return int(prefill_bytes(config, dtype, tokens) + tokens * vocab * dtype.itemsize + scores)


def prefill_bytes(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of the widest activations of `tokens`, of which only the last gets logits."""
    text = config.get_text_config()
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(tokens * (4 * text.hidden_size + 3 * wide) * dtype.itemsize)


def load_need(config: PretrainedConfig, dtype: torch.dtype, drafter: int) -> Need:
    """What a target with a drafter of `drafter` bytes and a short request need."""
    cache, buffers = (count(config, dtype, LEAST_REQUEST) for count in (cache_bytes, prefill_bytes))
    return Need(target_bytes(config, dtype), drafter, cache, buffers)


def part_of(need: Need, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, group: Group) -> Need:
    """What one process of a group needs on its device: a part of the target, all of its embedding and head, and the
    drafter. On a CPU the processes share one memory, so it is what all of them need."""
    if group.size == 1:
        return need
    text = config.get_text_config()
    ends = 2 * text.vocab_size * text.hidden_size * dtype.itemsize
    if device.type == "cpu":
        return replace(need, target=need.target + group.size * ends, drafter=need.drafter * group.size)
    return replace(need, target=need.target // group.size + ends, cache=need.cache // group.size)


def request_need(target: Target, drafter: Drafter | None, tokens: int, width: int, keeps: bool = False) -> Need:
    """What a request of `tokens` in all, the tree included, and `width` in its widest forward needs beside weights.

    One that `keeps` logits has a copy of them that outlasts the forward.
    """
    kept = width * target.vocab_size * target.dtype.itemsize if keeps else 0
    return Need(
        cache=target.kv_bytes_per_token() * tokens + state_bytes(drafter, tokens),
        buffers=buffer_bytes(target.config, target.dtype, width) + kept,
    )


def require_request(target: Target, drafter: Drafter | None, tokens: int, width: int, keeps: bool = False) -> None:
    """Raise BadInput for a request that the target's device has no room for."""
    need = request_need(target, drafter, tokens, width, keeps)
    remedy = "shorten the prompt or ask for fewer new tokens"
    require(need, target.device, f"A request of {tokens} tokens", remedy)


def readable(size: int) -> str:
    """`1.5 GiB`."""
    for unit, name in UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
