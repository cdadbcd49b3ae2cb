"""Traces on disk: what was drafted and verified in every round, and the text that the target wrote.

JSON lines: first a `Header`, then for each answer one line about it and one line for each of its rounds. The text
is the target's own whatever was drafted, so it tells how far any tree from a draft would have been accepted, not only
the verified one. A file whose name ends in .gz is compressed. Format: docs/benchmarks.md.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from draftwood.errors import BadInput
from draftwood.trace import Round, rounded
from draftwood.tree import Floats, Ints, Lattice, Tree

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Header:
    """On what the rounds ran. `facts` is free-form: machine, sizes, versions."""

    target: str
    drafter: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answer. Text position p holds the prompt up to `prompt_tokens`, and `tokens` from there on."""

    prompt: str
    dataset: str
    policy: str
    temperature: float
    prompt_tokens: int
    tokens: Sequence[int]
    prefill_s: float
    decode_s: float
    rounds: Sequence[Round] = ()
    turn: int = 0  # of the conversation that `prompt` names

    def continuation(self, context: int) -> Sequence[int]:
        """What the target wrote after the root of a round behind `context` tokens, as far as the answer goes."""
        return self.tokens[context - self.prompt_tokens + 1 :]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    header: Header
    answers: Sequence[Answer]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Raises BadInput for a file that is no trace, of another schema, or damaged."""
        lines = _lines(path)
        try:
            first = next(lines, {})
            if first.get("schema", SCHEMA) != SCHEMA:  # its other keys may be others, too
                raise BadInput(f"{path} is a trace of schema {first['schema']}; this version reads schema {SCHEMA}.")
            return cls(Header(**first), list(_answers(lines)))
        except BadInput:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise BadInput(f"{path} is not a trace ({error}); draftwood bench --trace makes one.") from error

    def save(self, path: Path) -> None:
        start(path, self.header)
        append(path, self.answers)


def start(path: Path, header: Header) -> None:
    """A new trace without answers. Raises OSError where `path` cannot be written."""
    _write(path, [asdict(header)], "wt")


def append(path: Path, answers: Sequence[Answer]) -> None:
    """Append answers. What was appended before stays readable whatever happens, unless the file is compressed."""
    _write(path, [line for answer in answers for line in _answer_lines(answer)], "at")


def _open(path: Path, mode: str) -> IO[str]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return cast("IO[str]", opener(path, mode, encoding="utf-8"))


def _write(path: Path, lines: Sequence[Mapping[str, Any]], mode: str) -> None:
    with _open(path, mode) as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with _open(path, "rt") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except ValueError:
                    if line.endswith("\n"):
                        raise
                    return  # cut off while it was written
                yield found
    except (EOFError, zlib.error):
        raise BadInput(f"The trace {path} is cut off or damaged; record it again.") from None
    except FileNotFoundError:
        raise BadInput(f"There is no trace {path}; draftwood bench --trace makes one.") from None
    except OSError as error:
        raise BadInput(f"The trace {path} cannot be read ({error.strerror or error}).") from None


def _answer_lines(answer: Answer) -> Iterator[dict[str, Any]]:
    fields = {name: getattr(answer, name) for name in Answer.__slots__ if name != "rounds"}
    yield {**fields, "tokens": [int(token) for token in answer.tokens], "rounds": len(answer.rounds)}
    yield from map(round_to_json, answer.rounds)


def _answers(lines: Iterator[dict[str, Any]]) -> Iterator[Answer]:
    for line in lines:
        count = line.pop("rounds")
        rounds = [round_from_json(round) for round in islice(lines, count)]
        if len(rounds) < count:
            return  # cut off
        known = line if "turn" in line else line | _of_older(line["prompt"])
        yield Answer(**known, rounds=rounds)


def _of_older(prompt: str) -> dict[str, Any]:
    """Prompt and turn from an older trace, in which the turn stands behind the prompt's name."""
    name, mark, turn = prompt.rpartition("#")
    return {"prompt": name, "turn": int(turn)} if mark and turn.isdecimal() else {}


def round_to_json(round: Round) -> dict[str, Any]:
    """Everything in a round as one line; the logarithms of probabilities and masses keep three digits."""
    line: dict[str, Any] = {"c": round.context, "a": [int(node) for node in round.path], "s": rounded(round.seconds)}
    line |= {"p": rounded(round.predicted)} if round.predicted else {}
    line |= {"pad": round.padding} if round.padding else {}
    line |= {} if round.positions is None else {"k": round.positions}
    line |= {} if round.confidence is None else {"q": float(f"{round.confidence:.3g}")}
    line |= {"f": round.faint} if round.faint else {}
    if round.draft is not None:
        line |= {"d": round.depths.tolist(), "m": _logs(round.mass), **_draft_to_json(round.draft)}
    return line


def round_from_json(line: Mapping[str, Any]) -> Round:
    depths = np.array(line.get("d", ()), np.int64)
    draft = _draft_from_json(line)
    mass = _masses(line.get("m", ()))
    return Round(
        int(line["c"]), len(depths), draft is not None, mass, depths, line["a"], line["s"], line.get("p", {}),
        int(line.get("pad", 0)), draft, line.get("k"), confidence=line.get("q"), faint=line.get("f", 0.0),
    )  # fmt: skip


def _draft_to_json(draft: Lattice | Tree) -> dict[str, Any]:
    if isinstance(draft, Lattice):
        return {"t": draft.tokens.tolist(), "l": np.round(draft.logp.astype(np.float64), 3).tolist()}
    return {"tree": draft.tokens.tolist(), "up": draft.parents.tolist(), "l": _logs(draft.mass)}


def _draft_from_json(line: Mapping[str, Any]) -> Lattice | Tree | None:
    if "t" in line:
        tokens, logp = np.array(line["t"], np.int64), np.array(line["l"], np.float32)
        shape = tokens.shape if tokens.ndim == 2 else (0, 0)  # a draft without depths
        return Lattice(tokens.reshape(shape), logp.reshape(shape))
    if "tree" not in line:
        return None
    parents = np.array(line["up"], np.int64)
    return Tree(np.array(line["tree"], np.int64), parents, _depths(parents), _masses(line["l"]))


def _depths(parents: Ints) -> Ints:
    """Depths of a tree whose parents come before their children."""
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return np.array(depths, np.int64)


def _logs(mass: Floats) -> list[float]:
    return np.round(np.log(np.maximum(mass, np.finfo(np.float32).tiny).astype(np.float64)), 3).tolist()


def _masses(logs: Sequence[float]) -> Floats:
    masses: Floats = np.exp(np.array(logs, np.float64)).astype(np.float32)
    return masses
