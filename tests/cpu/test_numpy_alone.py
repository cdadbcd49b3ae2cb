"""The idea without the machine: where there is only numpy its modules import, and another engine runs on them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.cpu.test_layers import FILES, IDEA

ROOT = Path(__file__).parents[2]
NUMPY_ALONE = """
import sys

class OnlyNumpy:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "draftwood"):
            raise ImportError(f"{name} is not to be had here")

sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, OnlyNumpy())
"""


def run(code: str, *args: str) -> str:
    """Standard output of code where nothing but the standard library, numpy and draftwood can be imported."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", NUMPY_ALONE + code, str(ROOT), *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_else_can_be_imported() -> None:
    code = "\ntry:\n    import torch\nexcept ImportError:\n    print('no torch')"
    assert run(code) == "no torch\n"


def test_the_idea_imports() -> None:
    idea = [path.relative_to(ROOT).with_suffix("") for path, unit in FILES.items() if unit in IDEA]
    names = ["draftwood.registry", *(".".join(path.parts) for path in idea)]
    code = "\nfor name in sys.argv[2:]:\n    __import__(name)\nprint(len(sys.argv) - 2)"
    assert int(run(code, *names)) == len(names) > 20


def test_another_engine_writes_what_its_model_alone_would() -> None:
    example = ROOT / "examples" / "other_engine.py"
    # By a clock on which every verb takes 1 ms: whether drafts pay on this machine in this moment is not asked.
    clock = "\nimport itertools, time\nticks = (tick / 1000 for tick in itertools.count())"
    clock += "\ntime.perf_counter = lambda: next(ticks)"
    code = clock + "\nimport runpy\nrunpy.run_path(sys.argv[2], run_name='__main__')"
    *rounds, last = run(code, str(example)).splitlines()
    text = [int(token) for token in last.split()]
    assert len(rounds) < len(text) / 2, "trees save forwards"
    assert text == plainly(example, len(text))


def plainly(example: Path, length: int) -> list[int]:
    """The example's model without any draft: one forward of one token for each token."""
    parts = runpy.run_path(str(example))
    model, text = parts["Model"](), [1, 2, 3]
    while len(text) < length:
        logits: np.ndarray = model.forward(text[:-1], parts["root_only"](text[-1]))
        text.append(parts["sample"](logits[0], len(text)))
    return text
