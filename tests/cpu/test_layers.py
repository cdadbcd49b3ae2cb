"""The layering: the idea knows no machine, nobody imports a door, and only config reads the environment."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "draftwood"
IDEA = {
    "tree", "grow", "accept", "sampling", "noise", "foresight", "curve", "latency", "learned", "limits", "footprint",
    "acceptance", "ledger", "trace",
    "recording", "simulate", "hardware", "watchdog", "offline_profile", "policies", "pool", "pool_gain", "pool_weights",
    "experts", "successors", "predictability", "recent", "trellis", "errors", "store",
}  # fmt: skip
WITH_TORCH = {"sampling", "noise"}  # of the idea, and for its types alone: test_numpy_alone.py
DOORS = {
    "__main__", "cli", "flags", "terminal", "cli_show", "chat", "demo", "doctor", "bench", "serve", "many", "train",
    "serve_ray",
}  # fmt: skip
FILES = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}


def imports(file: Path) -> set[str]:
    """Dotted names of everything that a file imports, type-checking blocks and functions included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def attributes(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_layers(file: Path) -> None:
    unit = FILES[file]
    names = imports(file)
    inside = {name.split(".")[1] for name in names if name.startswith("draftwood.")} & set(FILES.values())
    outside = {name.split(".")[0] for name in names} - {"draftwood"} - set(sys.stdlib_module_names)
    if unit not in DOORS:
        assert not inside & DOORS, "nobody imports a door"
    if unit in IDEA:
        assert inside <= IDEA, "the idea imports only itself"
        assert outside <= ({"numpy", "torch"} if unit in WITH_TORCH else {"numpy"})
    if unit != "config":
        assert not {"os.environ", "os.getenv"} & (names | attributes(file)), "only config reads them"


def test_every_layer_exists() -> None:
    assert {"tree", "grow", "accept", "policies", "cli", "bench"} <= set(FILES.values())
