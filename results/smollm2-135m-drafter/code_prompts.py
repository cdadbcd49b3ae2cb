"""700 code prompts: the forms of prompts.py around the tasks of code_tasks.txt, written to the file named first."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import prompts


def main(out: Path) -> None:
    tasks = Path(__file__).with_name("code_tasks.txt").read_text().splitlines()
    rng, texts = random.Random(3), dict[str, None]()
    while len(texts) < 700:
        texts[prompts.code(rng, tasks)] = None
    lines = (json.dumps({"id": f"g/{i}", "dataset": "forms_code", "turns": [text]}) for i, text in enumerate(texts))
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
