"""Reading a drafter's checkpoint: from a folder or a Hub name to its config and its tensors.

Only `config.json` and tensors are read: no code from the checkpoint runs. Pickles are opened only for kinds of drafter
that are published as pickles, and only by a reader that loads nothing but tensors.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwood.embedded import EMBEDDED_DRAFTER
from draftwood.errors import BadModel, first_line

INDEX = "model.safetensors.index.json"
DRAFT_TOKENS = "draft_tokens.json"  # ours, optional: other runtimes do not look for it
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def checkpoint_folder(name: str, pickles: bool = False, weights: bool = True) -> Path:
    """The local folder of `name`: a folder, a Hub repository (downloaded into its cache if need be), or `shipped`.

    `pickles`: checkpoints of this kind are also published as pickles. Without `weights` only the small files are
    needed, which tell whether it is of the right kind: a model named by mistake may have many gigabytes.
    """
    if not name:
        raise BadModel("No checkpoint was named; write a folder or OWNER/NAME after the colon.")
    try:
        folder = Path(name).expanduser()
        if folder.is_file():
            raise BadModel(f"The drafter {name} is a file; give the folder with config.json and the safetensors.")
        if folder.is_dir():
            return folder
        if name == "shipped":
            return EMBEDDED_DRAFTER
        wanted = ["config.json", DRAFT_TOKENS]
        if weights:
            wanted += ["*.safetensors", INDEX, *(["*.bin"] if pickles else [])]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except BadModel:
        raise
    except Exception as error:  # the Hub's, the network's or any library's, or an impossible name
        raise BadModel(
            f"No drafter '{name}' was found: it is neither a folder here nor could it be fetched from the "
            f"Hugging Face Hub ({first_line(error)}). Check the name or give a folder."
        ) from None


def read_config(name: str) -> dict[str, Any]:
    """The config.json of a folder or Hub repository, of which nothing large is fetched."""
    return read_json(checkpoint_folder(name, weights=False) / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{path.parent} has no {path.name}; a drafter's folder needs one.") from None
    except (OSError, ValueError) as error:
        raise BadModel(f"{path} cannot be read as JSON ({error}); fetch the checkpoint again.") from None
    if not isinstance(values, dict):
        raise BadModel(f"{path} holds a JSON {type(values).__name__}, not an object; fetch the checkpoint again.")
    return values


def read_draft_tokens(folder: Path, vocab: int) -> list[int] | None:
    """The tokens that a drafter with a trimmed head can propose, in rising order; None: its head is whole."""
    path = folder / DRAFT_TOKENS
    if not path.is_file():
        return None
    try:
        tokens = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{path} cannot be read as JSON ({error}); fetch the checkpoint again.") from None
    whole = isinstance(tokens, list) and tokens and all(type(t) is int for t in tokens)
    if not whole or any(a >= b for a, b in pairwise(tokens)) or tokens[0] < 0 or tokens[-1] >= vocab:
        raise BadModel(
            f"{path} is not a rising list of token ids below {vocab}; fetch the checkpoint again, or delete the file "
            "to draft over the whole vocabulary."
        )
    return tokens


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, read by torch's weights-only reader, which runs no code from the file."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise BadModel(f"{path} is damaged or holds more than weights ({str(error)[:100]}); fetch it again.") from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise BadModel(f"{path} holds more than weights; fetch the checkpoint again.")
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files to read of a checkpoint that may be pickled: safetensors if any, else pickles, a trainer's own last."""
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.bin")
    return next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), [])


def read_tensors(folder: Path, pickles: bool = False) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, on the CPU; a sharded one must be complete."""
    files = weight_files(folder) if pickles else []
    if files and files[0].suffix == ".bin":
        return {name: tensor for path in files for name, tensor in read_pickle(path).items()}
    tensors: dict[str, Tensor] = {}
    for shard in _shards(folder):
        try:
            tensors |= load_file(shard)
        except FileNotFoundError:
            raise BadModel(f"{folder} lacks {shard.name}, which {INDEX} names; fetch the checkpoint again.") from None
        except (OSError, SafetensorError) as error:
            raise BadModel(f"{shard} is damaged ({error}); fetch the checkpoint again.") from None
    return tensors


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise BadModel(f"{folder / INDEX} has no weight_map of file names; fetch the checkpoint again.")
        return [folder / Path(name).name for name in sorted(set(names.values()))]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        pickles = [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]
        found = f"only {pickles[0]}, a pickle that could run code" if pickles else "no weights"
        raise BadModel(f"{folder} has {found}; draftwood loads drafters from safetensors files.")
    return shards


class Taker:
    """Hands out a checkpoint's tensors by name, checked and on the right device, and knows which are left over."""

    def __init__(
        self, tensors: dict[str, Tensor], name: str, form: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Consumes `tensors`, those of drafter `name`; `form` is the kind of drafter, such as DFlash."""
        self.tensors, self.name, self.form, self.device, self.dtype = tensors, name, form, device, dtype

    def __call__(self, key: str, *shape: int) -> Tensor:
        tensor = self.tensors.pop(key, None)
        if tensor is None:
            raise BadModel(
                f"The drafter {self.name} lacks the tensor {key} of a checkpoint of {self.form}; fetch it again."
            )
        if tuple(tensor.shape) != shape:
            raise BadModel(
                f"In the drafter {self.name} the tensor {key} is {list(tensor.shape)}, but its config.json "
                f"asks for {list(shape)}; the two files do not belong together."
            )
        return tensor.to(self.device, self.dtype)

    def has(self, key: str) -> bool:
        return key in self.tensors

    def nothing_left(self, but: Sequence[str]) -> None:
        left = sorted(key for key in self.tensors if key not in but and not key.endswith("inv_freq"))
        if left:
            raise BadModel(
                f"The drafter {self.name} has a tensor {left[0]} that no {self.form} model of its config.json has "
                f"({len(left)} such in all); it is of another architecture or its config.json is incomplete."
            )
