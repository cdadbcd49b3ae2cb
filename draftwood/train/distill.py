"""`draftwood distill`: the target answers prompts, and its answers become training data."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from rich.console import Console

from draftwood.bench.environment import memory_bytes
from draftwood.embedded import embedded_target
from draftwood.errors import BadInput
from draftwood.loading import load_target, load_tokenizer
from draftwood.memory import free_bytes
from draftwood.native.build import TILES
from draftwood.processor import can
from draftwood.store import read_json
from draftwood.target import Target
from draftwood.train.data import Identity, Manifest
from draftwood.train.files import GIGABYTE, alone, check_disk, make_folder, told_if_unwritable, write_text
from draftwood.train.jobs import TEXTS, Job, Jobs, make_jobs
from draftwood.train.rows import open_rows
from draftwood.train.shards import Text, read_shard, require_pyarrow, shard_paths, write_shard
from draftwood.train.show import bar
from draftwood.train.stopping import stop_flag
from draftwood.train.writing import SELF_TOKENS, Limits, Turns, Writing, hash_of

UNDER_WAY = "under-way.json"
SHARD_TEXTS = 512
SHARD_S = 120.0  # a kill loses at most this much
ROWS = (128, 64, 32, 16, 8, 4, 2, 1)  # texts at once: the most whose cache takes no more than ROOMY
TILED_ROWS = (256, *ROWS)  # where many rows of a product cost little
GPU_ROWS = (2048, 1024, 512, *TILED_ROWS)
GPU_TURNS = 2  # a GPU's rows are halved: one half steps while the host reads what the other has drawn
ROOMY = 0.25  # share of the memory that the cache may take
SURPLUS = 0.25  # share of the tokens asked for that texts under way may add at the end


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """The flags of the command."""

    out: Path
    tokens: int  # of answers
    prompts: list[str] = field(default_factory=list)  # JSONL files, names of data sets, self
    target: str | None = None  # None: the embedded one
    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 512
    thinking: str = "default"
    raw: bool = False
    limit: int | None = None  # prompts of each source
    rows: int | None = None  # texts at once; None: what suits the device
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if any(not 0 <= heat <= 10 for heat in self.temperatures) or not self.temperatures:
            raise BadInput(f"--temperature is {self.temperatures}; expected numbers from 0 up, such as 0,0.7.")

    def recipe(self) -> dict[str, Any]:
        """What shapes the texts: the same for all parts of a folder."""
        shaping = ("prompts", "temperatures", "max_new_tokens", "raw", "limit", "seed")
        return {name: list(v) if isinstance(v := asdict(self)[name], tuple) else v for name in shaping}


@dataclass(slots=True, eq=False)
class Shards:
    """A folder that grows: texts wait here until there are enough for a shard."""

    folder: Path
    done: set[int] = field(default_factory=set)  # numbers of jobs
    tokens: int = 0  # of answers
    doubles: int = 0
    barren: int = 0  # doubles since the last new text
    _seen: set[bytes] = field(default_factory=set)
    _waiting: list[Text] = field(default_factory=list)
    _number: int = 0
    _flushed: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """A folder with everything that earlier runs left in it."""
        self = cls(folder)
        for path in shard_paths(folder):
            for text in read_shard(path):
                self._count(text)
            self._number = int(path.stem.split("-")[1]) + 1
        return self

    def add(self, text: Text) -> None:
        """Keep a text unless it is there already."""
        if mark_of(text) in self._seen:
            self.doubles += 1
            self.barren += 1
            self.done.add(text.job)
            return
        self.barren = 0
        self._count(text)
        self._waiting.append(text)

    @property
    def texts(self) -> int:
        return len(self._seen)

    @property
    def due(self) -> bool:
        """Whether it is time to flush."""
        return len(self._waiting) >= SHARD_TEXTS or time.monotonic() - self._flushed > SHARD_S

    def flush(self, unfinished: Sequence[Job] = ()) -> None:
        """Write what waits, and texts that are under way."""
        if self._waiting:
            write_shard(self.folder, self._number, self._waiting)
            self._number += 1
            self._waiting = []
        write_text(self.folder / UNDER_WAY, json.dumps({"jobs": [asdict(job) for job in unfinished]}))
        self._flushed = time.monotonic()

    def unfinished(self) -> list[Job]:
        """What the last run was writing."""
        path = self.folder / UNDER_WAY
        if not path.exists():
            return []
        try:
            jobs = [Job(**{**job, "tokens": tuple(job["tokens"])}) for job in read_json(path)["jobs"]]
        except (KeyError, TypeError):
            raise BadInput(f"{path} is damaged; delete it, and its texts are written anew.") from None
        return [job for job in jobs if job.number not in self.done]

    def _count(self, text: Text) -> None:
        self._seen.add(mark_of(text))
        self.done.add(text.job)
        self.tokens += len(text.tokens) - text.prompt


def mark_of(text: Text) -> bytes:
    """Sixteen bytes by which a text is recognised."""
    return hashlib.blake2b(text.tokens.tobytes(), digest_size=16).digest()


def run_distill(options: DistillOptions) -> bool:
    """Write texts until there are `options.tokens`, earlier runs' included. Returns False if it was asked to stop.

    Raises BadInput or BadModel for whatever cannot be used, before the target writes anything.
    """
    require_pyarrow()
    make_folder(options.out, "--out")
    with alone(options.out):
        return _write(options)


def _write(options: DistillOptions) -> bool:
    name = options.target or str(embedded_target())
    tokenizer = load_tokenizer(name, options.trust_remote_code)
    jobs = make_jobs(options.prompts, options.temperatures, tokenizer, options.thinking, options.raw, options.limit)
    target = load_target(name, options.dtype, options.device, trust_remote_code=options.trust_remote_code)
    if target.device.type == "cuda":
        torch.cuda.set_device(target.device)  # graphs and events belong to its streams
    manifest = claim(options, Identity.of(target), jobs.digest)
    shards = Shards.open(options.out)
    check_disk(options.out, 8.0 * max(0, options.tokens - shards.tokens), "--out", "the data")
    notes = Console(stderr=True, highlight=False)
    with (
        stop_flag() as stop,
        bar(options.tokens, "writing") as update,
        told_if_unwritable(options.out),
        lasting(),
    ):
        end = tokenizer.eos_token_id
        stop_ids = target.stop_ids | (frozenset() if end is None else {end})
        writing = open_writing(options, target, jobs, shards, stop_ids)
        manifest.save(options.out)  # last, so that after a refusal other flags can be tried
        began, before = time.monotonic(), shards.tokens
        for text in writing.texts():
            if text is not None:
                shards.add(text)
                continue
            if stop():
                break
            if shards.due:
                shards.flush(writing.unfinished())
            now = shards.tokens + writing.under_way
            update(min(now, options.tokens), f"{(now - before) / (time.monotonic() - began):.0f} tokens/s")
        shards.flush(writing.unfinished())
    notes.print(closing(options, shards, jobs), soft_wrap=True)
    return not stop()


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Let the garbage collector skip what exists now, mostly the libraries: looking through it took 4 % of the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def open_writing(
    options: DistillOptions, target: Target, jobs: Jobs, shards: Shards, stop_ids: frozenset[int]
) -> Turns:
    """Rows for as many texts as go together well. Raises BadInput if their cache does not fit in memory."""
    longest = max(len(prompt.tokens) for prompt in jobs.prompts) + options.max_new_tokens
    longest += SELF_TOKENS if jobs.template else 0
    longest += len(jobs.template.after) if jobs.template else 0
    if longest > target.context_limit:
        raise BadInput(
            f"The longest prompt with its answer may have {longest} tokens, but {target.name} has a context window "
            f"of {target.context_limit}; lower --max-new-tokens or leave long prompts out."
        )
    size = at_once(options, longest, target)
    begun = deque(shards.unfinished())
    known = shards.done | {job.number for job in begun}
    left = (job for job in jobs if job.number not in known)
    own = hash_of(options.seed, crc32(jobs.digest.encode()))  # or `self` would write the same beside other prompts
    limits = Limits(options.max_new_tokens, stop_ids, own)
    turns = Turns([])

    def admit() -> bool:  # texts under way are finished: dropping them would favour short answers
        return shards.tokens + turns.under_way < options.tokens and shards.barren < jobs.patience

    parts = GPU_TURNS if target.device.type == "cuda" and size >= GPU_TURNS else 1
    for part in range(parts):
        some = len(range(part, size, parts))
        rows = open_rows(target, some, longest)
        turns.each.append(Writing(rows, some, left, limits, jobs.template, admit, deque(list(begun)[part::parts])))
    return turns


def at_once(options: DistillOptions, longest: int, target: Target) -> int:
    """How many texts of up to `longest` tokens to write together. Raises BadInput if they do not fit in memory."""
    most = max(int(SURPLUS * options.tokens / options.max_new_tokens), 1)
    on_gpu, row = target.device.type == "cuda", longest * target.kv_bytes_per_token()
    have = (free_bytes(target.device) if on_gpu else memory_bytes()) or inf
    choices = GPU_ROWS if on_gpu else TILED_ROWS if can(TILES) else ROWS
    roomy = next((rows for rows in choices if rows * row <= ROOMY * have), 1)
    size = options.rows or min(roomy, most)
    if size * row > 0.7 * have:
        raise BadInput(
            f"{size} texts of up to {longest} tokens need {size * row / GIGABYTE:.3g} GB for their cache and this "
            f"machine has {have / GIGABYTE:.3g} GB; lower --rows or --max-new-tokens."
        )
    return size


def claim(options: DistillOptions, target: Identity, prompts: str) -> Manifest:
    """Which target's texts the folder holds, and for which prompts. Raises BadInput if it holds others."""
    ours = Manifest(target, options.thinking, options.recipe(), prompts)
    found = Manifest.load(options.out)
    if found is None:
        return ours
    if not found.target.same_as(target):
        theirs = found.target.told_beside(target)
        raise BadInput(f"--out {options.out} holds texts of {theirs}; name another folder.")
    if (found.thinking, found.recipe) != (ours.thinking, ours.recipe):
        raise BadInput(
            f"--out {options.out} was begun with other flags ({found.recipe}, thinking {found.thinking}); repeat them "
            "to go on, or name another folder."
        )
    if found.prompts.startswith(TEXTS) and found.prompts != prompts:
        raise BadInput(
            f"--out {options.out} was begun with other prompts in files of the same names, or by an earlier version in "
            "another order of temperatures; have the new ones answered in another folder: train reads several."
        )
    return found


def closing(options: DistillOptions, shards: Shards, jobs: Jobs) -> str:
    doubles = f" {shards.doubles} answers were there already and left out." if shards.doubles else ""
    facts = f"{shards.texts} texts with {shards.tokens} answer tokens in {options.out}.{doubles}"
    if shards.tokens >= options.tokens:
        whose = f" --target {options.target}" if options.target else ""
        return f"{facts} Train on them: draftwood train{whose} --data {options.out} --out FOLDER"
    goes_on = "Nothing new comes of these prompts." if shards.barren >= jobs.patience else "The same command goes on."
    return (
        f"{facts} {goes_on} If the prompts ran out, write to another folder, too, with other --prompts or a "
        "--temperature above 0: train reads several."
    )
