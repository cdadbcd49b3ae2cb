"""A drafter without the neurons that add least to its layers' outputs: narrow.py FROM TO WIDTH DATA...

What a neuron adds is the root mean square of its activation over blocks of the texts, times the norm of its column in
`down_proj`. Written for the shipped drafter, to make room for other weights; `draftwood train --init TO` trains it on.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from draftwood.embedded import embedded_target
from draftwood.loading import load_target
from draftwood.train.attention import Layout
from draftwood.train.blocks import make_blocks
from draftwood.train.features import Reader
from draftwood.train.holdout import forward
from draftwood.train.shards import read_shard
from draftwood.train.start import start

TEXTS, ANCHORS = 20, 64  # of each folder, of each text


def note(total: torch.Tensor, layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
    total.add_(inputs[0].float().square().sum(0))


@torch.no_grad()
def activity(source: Path, config: dict, folders: list[Path]) -> list[torch.Tensor]:
    """For each layer the root of the summed squares of what each neuron gave, `[intermediate size]`."""
    target = load_target(str(embedded_target()), "auto", "cpu")
    model = start(config, str(source), target, 0)
    reader = Reader(target, config["dflash_config"]["target_layer_ids"], False)
    squares = [torch.zeros(config["intermediate_size"]) for _ in model.layers]
    for layer, total in zip(model.layers, squares, strict=True):
        layer.mlp.down_proj.register_forward_pre_hook(partial(note, total))
    rng = np.random.default_rng(0)
    for folder in folders:
        shard = sorted(folder.glob("*.parquet"))[0]
        for text in read_shard(shard)[:TEXTS]:
            places = np.arange(text.prompt, len(text.tokens) - 1)
            anchors = np.sort(rng.choice(places, min(ANCHORS, len(places)), replace=False))
            shown, mask = np.ones(len(anchors), np.int64), config["dflash_config"]["mask_token_id"]
            blocks = make_blocks([text], [anchors], [shown], config["block_size"], mask, 1.0)
            taps = reader.unpack(reader.row(text.tokens)).taps
            forward(model, target, blocks.tokens, [taps], Layout.of(blocks, target.device), True)
    return [total.sqrt() for total in squares]


def main(source: Path, out: Path, width: int, folders: list[Path]) -> None:
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for i, active in enumerate(activity(source, config, folders)):
        gate, up, down = (f"layers.{i}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        adds = active * tensors[down].float().norm(dim=0)
        kept = adds.argsort(descending=True)[:width].sort().values
        tensors |= {name: tensors[name][kept].contiguous() for name in (gate, up)}
        tensors[down] = tensors[down][:, kept].contiguous()
    save(source, out, {**config, "intermediate_size": width}, tensors)


def save(source: Path, out: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """A drafter made of the one in `source`, which proposes the same tokens."""
    out.mkdir(exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(source / "draft_tokens.json", out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), [Path(folder) for folder in sys.argv[4:]])
