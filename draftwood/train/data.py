"""Training data: texts of the target as token ids, in safetensors shards that are whole or absent.

A folder holds `data.json` (what the texts are and whose) and `shard-00000.safetensors` and so on. safetensors,
because draftwood needs it anyway, it maps into memory, and a few flat arrays are all there is to store; Parquet
would cost a package of 40 MB for the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from draftwood.errors import BadInput
from draftwood.store import read_json, write_json
from draftwood.target import Target
from draftwood.train.files import write_tensors
from draftwood.tree import Ints

MANIFEST = "data.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Which target texts and drafters belong to, however it was named and in whatever dtype it was loaded."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    fingerprint: str  # of the first rows of its embedding, in bf16

    @classmethod
    def of(cls, target: Target) -> Identity:
        rows = target.model.get_input_embeddings().weight[:64].detach().to("cpu", torch.bfloat16)
        mark = zlib.crc32(rows.view(torch.int16).numpy().tobytes())
        return cls(target.name, target.vocab_size, target.hidden_size, target.num_layers, f"{mark:08x}")

    def same_as(self, other: Identity) -> bool:
        """Names do not count: a folder and the Hub may hold the same model."""
        return {**asdict(self), "name": ""} == {**asdict(other), "name": ""}


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A prompt and the target's answer to it."""

    tokens: Ints  # [T]
    prompt: int  # how many of them are the prompt
    temperature: float
    source: str  # the data set of the prompt
    job: int  # number of the request that it answers


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a data folder holds, and how it was made."""

    target: Identity
    thinking: str  # default, on or off
    recipe: dict[str, Any]  # the flags that shaped it

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> Manifest | None:
        """None if the folder holds no data yet; BadInput if it holds something else."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        found = read_json(path)
        try:
            return cls(Identity(**found["target"]), found["thinking"], found["recipe"])
        except (TypeError, KeyError):
            raise BadInput(f"{path} is damaged or of another version; make the data again.") from None


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def write_shard(folder: Path, number: int, texts: Sequence[Text]) -> None:
    """`shard-<number>.safetensors`, atomically."""
    columns = {
        "tokens": np.concatenate([t.tokens for t in texts]).astype(np.int32),
        "lengths": np.array([len(t.tokens) for t in texts], np.int32),
        "prompts": np.array([t.prompt for t in texts], np.int32),
        "temperatures": np.array([t.temperature for t in texts], np.float32),
        "jobs": np.array([t.job for t in texts], np.int64),
    }
    metadata = {"sources": json.dumps([t.source for t in texts])}
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    write_tensors(folder / f"shard-{number:05d}.safetensors", tensors, metadata)


def read_shard(path: Path) -> list[Text]:
    """Raises BadInput for a file that is damaged or something else."""
    try:
        with safe_open(path, "np") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            sources = json.loads(file.metadata()["sources"])
        ends = np.cumsum(columns["lengths"])
        return [
            Text(tokens.astype(np.int64), int(prompt), float(heat), source, int(job))
            for tokens, prompt, heat, source, job in zip(
                np.split(columns["tokens"], ends[:-1]),
                columns["prompts"],
                columns["temperatures"],
                sources,
                columns["jobs"],
                strict=True,
            )
        ]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is no shard of training data ({error}); make it again or delete it.") from None


def read_all(folders: Sequence[Path], target: Target) -> tuple[list[Manifest], list[Text]]:
    """What several data folders of one target hold. Raises BadInput if they do not go together."""
    manifests = [manifest_of(folder, target) for folder in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.thinking != manifests[0].thinking:
            raise BadInput(
                f"--data {folder} was written with thinking {manifest.thinking} and {folders[0]} with thinking "
                f"{manifests[0].thinking}; a drafter learns one mode, so train on one kind."
            )
    return manifests, [text for folder in folders for text in read_texts(folder, target)]


def manifest_of(folder: Path, target: Target) -> Manifest:
    """Raises BadInput if there is none, or another target's."""
    manifest = Manifest.load(folder)
    if manifest is None:
        raise BadInput(f"--data {folder}: there is no {MANIFEST}; make the data with `draftwood distill --out`.")
    ours = Identity.of(target)
    if not manifest.target.same_as(ours):
        raise BadInput(
            f"--data {folder} was written by {manifest.target.name}, not by {ours.name}: a drafter learns its own "
            "target's texts; make data with this target."
        )
    return manifest


def read_texts(folder: Path, target: Target) -> list[Text]:
    """All texts of a data folder. Raises BadInput if there are none, or some that the target cannot have written."""
    texts = [text for path in shard_paths(folder) for text in read_shard(path)]
    if not texts:
        raise BadInput(f"--data {folder} holds no texts yet; let `draftwood distill` run longer.")
    if (wrong := max(int(t.tokens.max()) for t in texts)) >= target.vocab_size:
        raise BadInput(f"--data {folder} has the token {wrong}, but {target.name} knows {target.vocab_size} only.")
    return texts


def usable(texts: Iterable[Text], max_length: int) -> list[Text]:
    """Texts cut to `max_length`, without those whose answer is too short to predict anything in it."""
    cut = [Text(t.tokens[:max_length], t.prompt, t.temperature, t.source, t.job) for t in texts]
    return [t for t in cut if len(t.tokens) - t.prompt >= 2]


def split(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """Texts to train on and texts held out: about `share` of the prompts, whatever was sampled from them."""
    held = [zlib.crc32(t.tokens[: t.prompt].tobytes()) % 10_000 < 10_000 * share for t in texts]
    return [t for t, out in zip(texts, held, strict=True) if not out], [
        t for t, out in zip(texts, held, strict=True) if out
    ]


def frequent_tokens(texts: Sequence[Text], vocab: int, wanted: str) -> NDArray[np.int64] | None:
    """The tokens of a trimmed head in rising order; None for all of them.

    `wanted` is `all`, a number of tokens, or `auto`: the fewest that make up 99.9 % of what the target wrote,
    or all where that would save less than half of the head. A number larger than that of the tokens written is filled
    with those of the prompts, then with low ids, which most tokenizers give to what is frequent.
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
    """How much of what the target will write are tokens that it has not written yet (Good and Turing's estimate)."""
    written = np.concatenate([t.tokens[t.prompt :] for t in texts])
    return float((np.unique(written, return_counts=True)[1] == 1).sum() / len(written))
