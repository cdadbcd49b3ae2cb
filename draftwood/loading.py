"""Loading a target by name, through transformers. Every way in which this can fail becomes one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.distributed import DistributedConfig

from draftwood.config import config as settings
from draftwood.errors import BadInput, BadModel, check_one_of, first_line
from draftwood.memory import load_need, part_of, require
from draftwood.names import DTYPES, model_name
from draftwood.parallel import ALONE, Group
from draftwood.precision import choose_dtype
from draftwood.sharded import ShardedTarget, refuse_indivisible
from draftwood.target import Target, check_path, refuse_unrewindable


def load_target(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    path: str = "auto",
    trust_remote_code: bool = False,
    drafter_bytes: Callable[[int], int] = lambda itemsize: 0,
    width_invariant: bool = False,
    group: Group = ALONE,
) -> Target:
    """A causal LM from a folder or a Hub name, ready to verify trees.

    `drafter_bytes(itemsize)` is the memory that a drafter with numbers of that size will need beside it. If the `group`
    has several processes, each holds a part of the target.

    Raises
    ------
    BadModel: it does not exist, cannot be read, rewound, or divided among so many processes.
    BadInput: unknown dtype, device or path, a path that the model cannot take, or more than fits into memory.
    """
    place = parse_device(group.place(device))
    kind = group.decide(lambda: parse_dtype(dtype, place))
    check_path(path)
    config = _from_pretrained(AutoConfig, name, trust_remote_code=trust_remote_code)
    if type(config) in AutoModelForCausalLM._model_mapping:  # code of the model's own is not run to count weights
        refuse_unrewindable(config, name)  # before counting, since such a model lacks the parts that are counted
        need = part_of(load_need(config, kind, drafter_bytes(kind.itemsize)), config, kind, place, group)
        what, remedy = f"{name} in {str(kind).removeprefix('torch.')}", "name a smaller model or dtype"
        group.every(lambda: require(need, place, what, remedy))
    if group.size > 1:
        refuse_indivisible(config, name, group.size)
        options = dict(distributed_config=DistributedConfig(tp_size=group.size), trust_remote_code=trust_remote_code)
        model = group.every(lambda: _from_pretrained(AutoModelForCausalLM, name, dtype=kind, **options))
        target: Target = ShardedTarget(model, name, group, path, width_invariant)
    else:
        model = _from_pretrained(AutoModelForCausalLM, name, dtype=kind, trust_remote_code=trust_remote_code)
        target = Target(model.to(place), name, path=path, pack=True, width_invariant=width_invariant)
    target.trusts_code = trust_remote_code
    return target


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return _from_pretrained(AutoTokenizer, name, trust_remote_code=trust_remote_code)


def tokenized(encode: Callable[..., Any], *prompt: Any, **options: Any) -> Any:
    """What a tokenizer or its template makes of a prompt. Raises BadInput if it refuses the prompt."""
    try:
        return encode(*prompt, **options)
    except Exception as error:  # a template raises whatever its author wrote
        raise BadInput(f"The tokenizer or its chat template refuses this prompt: {error}") from error


def parse_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return choose_dtype(device, settings().profiles).dtype
    check_one_of("dtype", dtype, DTYPES)
    kind: torch.dtype = getattr(torch, dtype)
    return kind


def parse_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise BadInput(f"device is {device!r}; expected auto, cpu, cuda or cuda:N.") from None
    if place.type not in ("cpu", "cuda"):
        raise BadInput(f"device is {device!r}; draftwood runs on cpu and cuda.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"device is {device!r}, but {torch.cuda.device_count()} CUDA devices are visible; use cpu.")
    return place


def _from_pretrained(loader: Any, name: str, **options: Any) -> Any:
    folder_or_hub = model_name(name)
    try:
        return loader.from_pretrained(folder_or_hub, **options)
    except Exception as error:  # its code and libraries may raise anything, and tokenizers raise plain Exceptions
        if "trust_remote_code" in str(error):
            raise BadModel(
                f"{name} brings code of its own, which runs only if you ask for it; read it, then give "
                "--trust-remote-code (in Python trust_remote_code=True)."
            ) from None
        raise BadModel(f"{name} could not be loaded: {first_line(error)}") from error
