"""Checkpoints of the speculators library, such as RedHatAI's: their configs in the forms that the drafters read.

They keep the sizes of the layers in a config of their own, without what is usual for its kind of model; may propose
fewer tokens, with a head of their own (`d2t` plus a row's number is the target's token id); and name target layers by
what enters them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from draftwood.errors import BadModel, first_line

LAYERS = "transformer_layer_config"
KIND = "speculators_model_type"
DFLASH = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
VARIANTS = {"projector_type": "dflash", "shift_label": False}


def flat(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A config on one level and with nothing left out; any other is returned as it is."""
    layers = values.get(LAYERS)
    if not isinstance(layers, dict):
        return values
    try:
        usual = AutoConfig.for_model(**layers).to_dict() if "model_type" in layers else {}
    except Exception as error:  # whatever transformers raises for unknown kinds and impossible values
        raise BadModel(
            f"The config.json of drafter {name} has a {LAYERS} that cannot be read ({first_line(error)}); "
            "fetch the checkpoint again."
        ) from None
    return {**usual, **layers, **{key: value for key, value in values.items() if value is not None}}


def as_dflash(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config of a drafter of DFlash, DFlash 2 or DSpark in its makers' form; any other is returned as it is.

    Raises BadModel for other kinds of drafters and variants of DFlash.
    """
    if LAYERS not in values:
        return values
    if (kind := values.get(KIND)) not in DFLASH:
        other = f"; name it eagle3:{name}" if kind == "eagle3" else ", which draftwood does not run"
        raise BadModel(f"{name} is a checkpoint of speculators' kind {kind!r} instead of 'dflash'{other}.")
    for key, usual in VARIANTS.items():
        if values.get(key, usual) not in (usual, None):
            raise BadModel(
                f"The drafter {name} has {key} = {values[key]!r}, a variant of DFlash that draftwood does not run; "
                "name another drafter of your target, or 'ngram'."
            )
    layers = values.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int and layer > 0 for layer in layers):
        raise BadModel(
            f"The config.json of drafter {name} has aux_hidden_state_layer_ids = {layers!r} instead of a list of "
            "numbers from 1 up; fetch the checkpoint again."
        )
    # What enters a layer is what the one before it gave. A sliding layer sees nothing ahead, unless the config says so.
    told: dict[str, Any] = {"architectures": [DFLASH[kind]], "target_layer_ids": [layer - 1 for layer in layers]}
    if values.get("sliding_window_non_causal"):
        told["is_causal"] = False
    return {"sample_from_anchor": False, **flat(values, name), **told}


def own_tokens(tensors: Mapping[str, Tensor], size: int, vocab: int, name: str) -> Tensor | None:
    """`[size]` the target's token id of each token that a drafter proposes, in its own order; None: it has no list."""
    if "d2t" not in tensors:
        if size != vocab:
            raise BadModel(f"The drafter {name} proposes {size} tokens, but has no d2t to say which.")
        return None
    offsets = tensors["d2t"].long()
    ids = torch.arange(len(offsets)) + offsets
    if len(ids) != size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise BadModel(f"The drafter {name} has a d2t that leads out of the target's {vocab} tokens.")
    return ids
