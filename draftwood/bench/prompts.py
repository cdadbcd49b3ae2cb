"""Prompt sets: JSONL files, public data sets by name, and the set that ships with the package.

One JSON object a line: `{"id": "mine/0", "dataset": "mine", "turns": ["first user message", …]}`; `turns`
alone is enough. A later turn continues the conversation after plain decoding's answer to the one before.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftwood.bench.hub import DATASETS, load_rows
from draftwood.errors import BadInput, nearest

DEFAULT = "default"
PACKAGED = (DEFAULT, "copy")  # sets that ship with the package


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: what the user says, turn by turn."""

    id: str
    dataset: str
    turns: tuple[str, ...]


def by_dataset(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    sets: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.dataset, []).append(prompt)
    return sets


def load_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of every source, in the order given; no source means the packaged set.

    Raises BadInput (unknown name, unreadable file, bad line, an id used twice) or MissingExtra.
    """
    prompts = [p for source in sources or [DEFAULT] for p in load_source(source)[:limit]]
    twice = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise BadInput(f"{len(twice)} prompt ids occur twice, the first is {twice[0]!r}; make them differ.")
    return prompts


def check_source(source: str) -> None:
    """Raise BadInput for a set that does not exist. Nothing is read or fetched."""
    names = [*PACKAGED, *DATASETS]
    if source not in names and not Path(source).exists():
        raise BadInput(
            f"--prompts {source}: there is no such file, and it is not a data set that draftwood knows "
            f"({', '.join(names)}).{nearest(source, names)}"
        )


def load_source(source: str) -> list[Prompt]:
    check_source(source)
    if source in PACKAGED:
        text = (files("draftwood") / "data" / "prompts" / f"{source}.jsonl").read_text(encoding="utf-8")
        return parse_jsonl(text, source, source)
    if source in DATASETS:
        rows = load_rows(source)
        return [Prompt(f"{source}/{i}", source, DATASETS[source].turns(row)) for i, row in enumerate(rows)]
    return read_jsonl(Path(source))


def read_jsonl(path: Path) -> list[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise BadInput(f"--prompts {path}: the file cannot be read ({reason}).") from None
    return parse_jsonl(text, str(path), Path(path).stem)


def parse_jsonl(text: str, name: str, dataset: str = DEFAULT) -> list[Prompt]:
    """Prompts of a JSONL text; `name` is for messages, `dataset` for lines that name none."""
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                prompts.append(parse_line(line, f"{dataset}/{number}", dataset))
            except ValueError as error:
                raise BadInput(f"{name}, line {number}: {error}") from None
    if not prompts:
        raise BadInput(f"{name} holds no prompts; expected one JSON object with the key 'turns' a line.")
    return prompts


def parse_line(line: str, default_id: str, dataset: str) -> Prompt:
    """One line; ValueError says in words what is wrong with it."""
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not valid JSON ({error.msg}, column {error.colno}).") from None
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON object was expected, not {type(entry).__name__}.")
    turns = entry.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError("the key 'turns' must be a list of one or more texts, none of them empty.")
    return Prompt(str(entry.get("id", default_id)), str(entry.get("dataset", dataset)), tuple(turns))


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Sixteen hex digits that change with any prompt, its place or its name."""
    text = json.dumps([asdict(p) for p in prompts], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
