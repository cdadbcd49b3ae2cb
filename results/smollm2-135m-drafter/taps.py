"""A drafter that reads its target without the shallowest tap: taps.py FROM TO.

Written for the shipped drafter, which did not miss it; `draftwood train --init TO` trains it on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from narrow import save
from safetensors.torch import load_file


def main(source: Path, out: Path) -> None:
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    del config["dflash_config"]["target_layer_ids"][0]
    tensors["fc.weight"] = tensors["fc.weight"][:, config["hidden_size"] :].contiguous()
    save(source, out, config, tensors)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
