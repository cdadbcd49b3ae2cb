"""Where a drafter's weights begin: the target's own last layers, a checkpoint, or random numbers.

The target's layers already turn its features into next tokens. With `fc` as the identity on the deepest tap, the
drafter begins as the last layers of its target, and reads the kind of input that they expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.drafters import markov
from draftwood.drafters.checkpoint import checkpoint_folder, read_config, read_draft_tokens, read_tensors
from draftwood.drafters.dflash_config import DFlashConfig, check_fits, parse_config
from draftwood.errors import BadModel
from draftwood.lean import ARCHITECTURES
from draftwood.packing import PackedLinear, PackedPart
from draftwood.target import Target
from draftwood.train.model import TrainableDFlash
from draftwood.universal import decoder_layers

BEGINNINGS = ("target", "random")


def inherited(init: str) -> dict[str, Any]:
    """What a checkpoint to begin from decides: target layers, mask token, the shape of its layers and what they see."""
    if init in BEGINNINGS:
        return {}
    config = parse_config(read_config(init), init)
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    return {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "is_causal": config.causal,
        "sliding_window": config.window,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        **({} if config.embedding_scale == 1.0 else {"input_embedding_scale": config.embedding_scale}),
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def inherited_tokens(init: str, vocab: int) -> list[int] | None:
    """The tokens that a checkpoint to begin from proposes; None: all of them, or there is none to begin from."""
    return None if init in BEGINNINGS else read_draft_tokens(checkpoint_folder(init, weights=False), vocab)


def start(config: Mapping[str, Any], init: str, target: Target, seed: int) -> TrainableDFlash:
    """A drafter of this config.json on the target's device, in float32.

    `init` is `target` (falls back to random for parts whose shapes differ), `random`, or a folder or Hub name.
    """
    torch.manual_seed(seed)
    shape = parse_config(config, "to be trained")
    model = TrainableDFlash(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, config["initializer_range"])
        if model.markov is not None:
            model.markov.begin()
    if init == "target":
        copy_target(model, target)
    elif init not in BEGINNINGS:
        model.load_state_dict(model.state_dict() | checkpoint_tensors(config, init, target))
    return model.to(target.device, torch.float32)


@torch.no_grad()
def copy_target(model: TrainableDFlash, target: Target) -> None:
    """Copy the target's last layers, as many as the drafter has, and make `fc` the identity on the deepest tap."""
    hidden = model.config.hidden_size
    model.fc.weight.zero_()
    model.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    if type(target.model).__name__ not in ARCHITECTURES:
        return
    sources = list(decoder_layers(target.model))[-len(model.layers) :]
    for layer, source in zip(model.layers, sources, strict=False):
        theirs = dict(source.named_modules())
        for name, part in layer.named_modules():
            weight = plain_weight(theirs.get(name))
            if isinstance(part, (nn.Linear, nn.RMSNorm)) and weight is not None and weight.shape == part.weight.shape:
                part.weight.copy_(weight)
    norms = [plain_weight(dict(source.named_modules())["input_layernorm"]) for source in sources]
    model.hidden_norm.weight.copy_(torch.stack([w.float() for w in norms if w is not None]).mean(0))
    final = plain_weight(target.model.get_decoder().norm)
    if final is not None:
        model.norm.weight.copy_(final)


def plain_weight(module: nn.Module | None) -> Tensor | None:
    """A module's weight, row-major again where it was packed."""
    if isinstance(module, PackedLinear):
        return module.unpacked()
    if isinstance(module, PackedPart):
        return module.whole.unpacked()[module.start : module.stop]
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def checkpoint_tensors(config: Mapping[str, Any], name: str, target: Target) -> dict[str, Tensor]:
    """The weights of a drafter in DFlash's format. Raises BadModel if it is of another target or shape."""
    folder = checkpoint_folder(name)
    found = parse_config(read_config(name), name)
    check_fits(found, name, target)
    wanted = parse_config(config, name)
    if found.num_layers != wanted.num_layers:
        raise BadModel(f"--init {name} has {found.num_layers} layers; give --layers {found.num_layers}.")
    differ = [field for field in DFlashConfig.__dataclass_fields__ if differs(field, found, wanted)]
    if differ:
        theirs, ours = (json.dumps(getattr(shape, differ[0]), default=str) for shape in (found, wanted))
        raise BadModel(
            f"--init {name} has another {differ[0].replace('_', ' ')} than the drafter to be trained ({theirs} instead "
            f"of {ours}); give the flags of that checkpoint, or begin from target or random."
        )
    model = TrainableDFlash(found)
    tensors = {k: v.float() for k, v in read_tensors(folder).items() if not k.endswith("inv_freq")}
    if found.markov_rank:
        before, after = markov.read_pairs(folder, name, found.markov_rank, found.hidden_size)
        tensors |= {markov.PREFIX + markov.BEFORE: before, markov.PREFIX + markov.AFTER: after}
    missing = set(model.state_dict()) - set(tensors)
    if missing:
        raise BadModel(f"--init {name} lacks the tensor {sorted(missing)[0]}; fetch it again.")
    return {key: tensors[key] for key in model.state_dict()}


def differs(field: str, one: DFlashConfig, other: DFlashConfig) -> bool:
    """Whether the config of a checkpoint and another one differ in what shapes the weights or their meaning."""
    constants = ("max_positions", "num_target_layers", "norm_eps", "block_size", "tau", "target_mark")
    # What a layer sees is no weight's shape: to look ahead, or less far back, is soon learned. A head is the target's.
    free = (*constants, "sights", "draft_vocab")
    if field == "markov_rank" and not one.markov_rank:
        return False  # a Markov head that is not there yet begins by changing nothing
    return field not in free and getattr(one, field) != getattr(other, field)
