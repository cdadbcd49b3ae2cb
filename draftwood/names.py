"""What models and number formats are called. Mistakes in names are found without torch, whose import takes seconds."""

from __future__ import annotations

from pathlib import Path

from draftwood.errors import BadModel

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")  # as torch calls them, too, but for auto


def model_name(name: str) -> str:
    """What transformers is to load: a folder's path or a Hub name. Raises BadModel for a folder without a model."""
    folder = Path(name)
    if not (name.startswith((".", "/", "~")) or folder.exists()):
        return name
    if not (folder.expanduser() / "config.json").is_file():
        raise BadModel(f"{name} holds no config.json; name a folder with a transformers model, or a Hub name.")
    return str(folder.expanduser())
