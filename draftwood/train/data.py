"""Training data: texts of one target as token ids, and what is decided from them before a run.

A folder holds `data.json` (what the texts are and whose) and `shard-00000.parquet` and so on.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from draftwood.errors import BadInput
from draftwood.names import DATA, check_data
from draftwood.target import Target
from draftwood.train.files import write_text
from draftwood.train.shards import Text, read_shard, shard_paths
from draftwood.train.start import plain_weight
from draftwood.universal import decoder_layers

FORMAT = 2
FINGER_ROWS = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """Which target texts and drafters belong to, however it was named and in whatever dtype it was loaded."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    fingerprint: str  # of weights

    @classmethod
    def of(cls, target: Target) -> Identity:
        mark = fingerprint(target.model)
        return cls(target.name, target.vocab_size, target.hidden_size, target.num_layers, mark)

    def told_beside(self, other: Identity) -> str:
        """The name, and what sets it apart from another target of the same shape."""
        same = replace(self, name=other.name, fingerprint=other.fingerprint) == other
        return f"{self.name} with other weights, or in another --dtype" if same else self.name

    def same_as(self, other: Identity) -> bool:
        """Names do not count: a folder and the Hub may hold the same model."""
        return replace(self, name=other.name) == other


def fingerprint(model: PreTrainedModel) -> str:
    """Of the first rows of the embedding and of all weights in the first and last layer, in bf16: tuning moves some."""
    layers = decoder_layers(model)
    modules = [module for layer in (layers[0], layers[-1]) for name, module in layer.named_modules() if is_part(name)]
    mark = 0
    for weight in map(plain_weight, [model.get_input_embeddings(), *modules]):
        if weight is not None:
            rows = weight[:FINGER_ROWS].detach().to("cpu", torch.bfloat16).contiguous()
            mark = zlib.crc32(rows.view(torch.int16).numpy().tobytes(), mark)
    return f"{mark:08x}"


def is_part(name: str) -> bool:
    """Whether a module is one of the layer's own parts, and not one that packing adds."""
    return not name.endswith(".whole")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a data folder holds, and how it was made."""

    target: Identity
    thinking: str  # default, on or off
    recipe: dict[str, Any]  # the flags that shaped it
    prompts: str = ""  # their digest; empty if unknown

    def save(self, folder: Path) -> None:
        write_text(folder / DATA, json.dumps({"format": FORMAT, **asdict(self)}))

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """None if the folder holds no data yet; BadInput if it holds something else."""
        path = folder / DATA
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise KeyError
            return cls(Identity(**found["target"]), found["thinking"], found["recipe"], found.get("prompts", ""))
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror or error}).") from None
        except (TypeError, KeyError, ValueError):
            raise BadInput(f"{path} is damaged or of another version; make the data again.") from None


def read_all(folders: Sequence[Path], target: Target) -> list[Text]:
    """What several data folders of one target hold, each text once. Raises BadInput if they do not go together."""
    for folder in folders:
        check_manifest(folder, target)
    parts = [read_texts(folder, target) for folder in folders]
    mode = parts[0][0].thinking
    for folder, part in zip(folders, parts, strict=True):
        if other := next((text.thinking for text in part if text.thinking != mode), None):
            raise BadInput(
                f"--data {folder} was written with thinking {other} and {folders[0]} with thinking {mode}; a drafter "
                "learns one mode, so train on one kind."
            )
    return list({text.tokens.tobytes(): text for part in parts for text in part}.values())


def check_manifest(folder: Path, target: Target) -> None:
    """Raises BadInput if there is none, or another target's."""
    check_data(folder)
    manifest = Manifest.load(folder)
    assert manifest is not None
    ours = Identity.of(target)
    if not manifest.target.same_as(ours):
        raise BadInput(
            f"--data {folder} was written by {manifest.target.told_beside(ours)}, not by {ours.name}: a drafter learns "
            "its own target's texts; make data with this target."
        )


def read_texts(folder: Path, target: Target) -> list[Text]:
    """All texts of a data folder. Raises BadInput if there are none, or some that the target cannot have written."""
    texts = [text for path in shard_paths(folder) for text in read_shard(path)]
    if not texts:
        raise BadInput(f"--data {folder} holds no texts yet; let `draftwood distill` run longer.")
    if (wrong := max(int(t.tokens.max()) for t in texts)) >= target.vocab_size:
        raise BadInput(f"--data {folder} has the token {wrong}, but {target.name} knows {target.vocab_size} only.")
    return texts


def usual_length(texts: Sequence[Text], least: int = 1) -> int:
    """The length that nine of ten texts do not exceed, or `least`, rounded up to a multiple of 64: farther back, little
    is learned."""
    length = max(int(np.quantile([len(text.tokens) for text in texts], 0.9)), least)
    return -(-length // 64) * 64


def usable(texts: Iterable[Text], max_length: int) -> list[Text]:
    """Texts cut to `max_length`, without those whose answer is too short to predict anything in it."""
    cut = [replace(t, tokens=t.tokens[:max_length]) for t in texts]
    return [t for t in cut if len(t.tokens) - t.prompt >= 2]


def split(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out: about `share` of the prompts, whatever was sampled from them.

    Of those held out the first are evaluated: they are texts of temperature 0, if there are any, from all sources.
    """
    marks = [zlib.crc32(t.tokens[: t.prompt].tobytes()) for t in texts]
    held = [mark % 10_000 < 10_000 * share for mark in marks]
    order = sorted(
        (t.temperature > 0, mark, i) for i, (t, mark) in enumerate(zip(texts, marks, strict=True)) if held[i]
    )
    return [t for t, out in zip(texts, held, strict=True) if not out], [texts[i] for *_, i in order]


def frequent_tokens(texts: Sequence[Text], vocab: int, wanted: str) -> NDArray[np.int64] | None:
    """The tokens of a trimmed head in rising order; None for all of them.

    `wanted` is `all`, a number of tokens, or `auto`: the fewest that make up 99.9 % of what the target wrote,
    or all where that would save less than half of the head. If `wanted` is more than were written, tokens of the
    prompts are added, then low ids, which most tokenizers give to frequent tokens.
    """
    if wanted == "all":
        return None
    counts = np.bincount(np.concatenate([t.tokens[t.prompt :] for t in texts]), minlength=vocab)
    asked = np.bincount(np.concatenate([t.tokens[: t.prompt] for t in texts]), minlength=vocab)
    order = np.lexsort((np.arange(vocab), -asked, -counts))
    if wanted == "auto":
        covered = np.cumsum(counts[order]) / counts.sum()
        keep = 1 + int(np.searchsorted(covered, 0.999))
        keep = vocab if keep > vocab // 2 else keep
    else:
        keep = int(wanted)
    return None if keep >= vocab else np.sort(order[:keep])


def unseen_share(texts: Sequence[Text]) -> float:
    """Which share of what the target will write are tokens that it has not written yet (Good and Turing's estimate)."""
    written = np.concatenate([t.tokens[t.prompt :] for t in texts])
    return float((np.unique(written, return_counts=True)[1] == 1).sum() / len(written))
