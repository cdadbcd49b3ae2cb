"""Prompts whose beginnings are taken from others and whose ends the target writes.

beginnings.py cut MIX.jsonl BEGUN.jsonl
draftwood distill --raw --prompts BEGUN.jsonl --temperature 0.75 --max-new-tokens 100 --tokens … --out FOLDER
beginnings.py finish FOLDER FINISHED.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mixture import read
from transformers import PreTrainedTokenizerBase

from draftwood.embedded import embedded_target
from draftwood.loading import load_tokenizer
from draftwood.train.jobs import user_template
from draftwood.train.shards import read_shard, shard_paths

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
QUOTES = ('"""', "'''")


class Cut(NamedTuple):
    """How often a prompt of a kind is cut, and behind how many words."""

    times: int
    least: int
    most: int


CUTS = {"train_gsm8k": Cut(1, 3, 9), "train_mbpp": Cut(20, 4, 8), "code": Cut(2, 4, 8), "chat": Cut(1, 2, 4)}


def cut(mix: Path, out: Path) -> None:
    rng, before = random.Random(11), before_a_turn(load_tokenizer(str(embedded_target())))
    begun = [pair for prompt in read(mix) for pair in beginnings(rng, prompt["dataset"], prompt["turns"][0])]
    rng.shuffle(begun)
    write(out, [(kind, before + text) for kind, text in begun])


def beginnings(rng: random.Random, kind: str, text: str) -> Iterator[tuple[str, str]]:
    if kind == "functions":  # within the docstring, mostly
        yield kind, text[: int(len(text) * rng.uniform(0.25, 0.6))].rsplit(" ", 1)[0]
        return
    how = CUTS[kind]
    for _ in range(how.times):
        words, count = text.split(REASON)[0].split(" "), rng.randint(how.least, how.most)
        if len(words) > count + 2:
            yield kind, " ".join(words[:count])


def finish(folder: Path, out: Path) -> None:
    tokenizer = load_tokenizer(str(embedded_target()))
    before = before_a_turn(tokenizer)
    made: dict[str, str] = {}
    for path in shard_paths(folder):
        for text in read_shard(path):
            whole, ended, _ = tokenizer.decode(text.tokens).removeprefix(before).partition("<|im_end|>")
            prompt = ends_for(text.source)(whole.strip(), bool(ended))
            if prompt is not None:
                made.setdefault(prompt, text.source)
    write(out, [(f"{kind}_finished", prompt) for prompt, kind in made.items()])


def ends_for(kind: str) -> Callable[[str, bool], str | None]:
    ends: dict[str, Callable[[str, bool], str | None]] = {
        "train_gsm8k": lambda text, ended: text + REASON if ended else None,
        "functions": function,
    }
    return ends.get(kind, lambda text, ended: text if ended else None)


def function(text: str, ended: bool) -> str | None:
    """Up to the end of its docstring, in a closed block."""
    for quotes in QUOTES:
        parts = text.split(quotes)
        if len(parts) > 2:
            return quotes.join(parts[:2]) + quotes + "\n```"
    return text if ended else None


def before_a_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(user_template(tokenizer, "default").before))


def write(path: Path, prompts: list[tuple[str, str]]) -> None:
    rows = ({"id": f"b{i}", "dataset": kind, "turns": [text]} for i, (kind, text) in enumerate(prompts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    {"cut": cut, "finish": finish}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
