"""The prompts of step 14 beside the target's own, in three parts.

    mixture.py FOLDER gsm8k.jsonl mbpp.jsonl FUNCTIONS FORMS

The two files are training questions of GSM8K and of MBPP; FUNCTIONS and FORMS are the first seeds of
`function_prompts.py` (7 of them are used; 25 in step 14) and of `prompts.py` (16; 74).
"""

from __future__ import annotations

import json
import random
import sys
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import code_prompts
import function_prompts
import prompts

CHAT = 4800  # prompts of forms that are no code
LONGEST = 1000  # characters
PARTS = 3


def main(out: Path, files: list[Path], functions: int, forms: int) -> None:
    texts: dict[str, str] = {}
    for path in files:
        add(texts, path.stem, read(path))
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "prompts.jsonl"
        code_prompts.main(path)
        add(texts, "code", read(path))
        for seed in range(functions, functions + 7):
            function_prompts.main(path, seed)
            add(texts, "functions", read(path))
    for seed in range(forms, forms + 16):
        drawn = list(islice(prompts.prompts(seed), 3200))
        add(texts, "code", (p for p in drawn if p["dataset"] == "forms_code"))
        chat = (p for p in drawn if p["dataset"] == "forms_chat")
        add(texts, "chat", islice(chat, max(0, CHAT - list(texts.values()).count("chat"))))
    rows = [{"dataset": kind, "turns": [text]} for text, kind in texts.items() if len(text) <= LONGEST]
    random.Random(7).shuffle(rows)
    for part in range(PARTS):
        lines = (json.dumps({"id": f"m{part}/{i}", **row}) + "\n" for i, row in enumerate(rows[part::PARTS]))
        (out / f"mixture-{part}.jsonl").write_text("".join(lines))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().strip().split("\n")]


def add(texts: dict[str, str], kind: str, drawn) -> None:
    for prompt in drawn:
        texts.setdefault(prompt["turns"][0], kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(sys.argv[2]), Path(sys.argv[3])], int(sys.argv[4]), int(sys.argv[5]))
