"""Names of models, number formats and data. Mistakes in them are found without torch, whose import takes seconds."""

from __future__ import annotations

from pathlib import Path

from draftwood.errors import BadInput, BadModel

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")  # torch's own names, and auto
PATHS = ("auto", "universal", "lean")  # how a target runs
SELF = "self"  # instead of a prompt set: the target invents them
DATA = "data.json"  # what a folder of training data holds, beside the texts


def model_name(name: str) -> str:
    """What transformers is to load: a folder's path or a Hub name. Raises BadModel for a folder without a model."""
    folder = Path(name)
    if not (name.startswith((".", "/", "~")) or folder.exists()):
        return name
    if not (folder.expanduser() / "config.json").is_file():
        raise BadModel(f"{name} holds no config.json; name a folder with a transformers model, or a Hub name.")
    return str(folder.expanduser())


def check_data(folder: Path) -> None:
    """Raises BadInput for a folder without training data."""
    if not (folder / DATA).exists():
        raise BadInput(f"--data {folder}: there is no {DATA}; make the data with `draftwood distill --out`.")
