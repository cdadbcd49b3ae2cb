"""Reference pages, source excerpts and tables of the documentation, written from code and results.

`python -m docs.generate` writes them.

`pages()` gives what should be on disk; a test compares. Nothing here is part of the package.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from docs.tables import table, with_tables
from draftwood import lean, registry
from draftwood.cli import app
from draftwood.config import Config
from draftwood.device.rounds import Device
from draftwood.drafters.ngram import Options
from draftwood.sampling import Sampling
from draftwood.train.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings

DOCS = Path(__file__).parent
REFERENCE, EXAMPLES = DOCS / "reference", DOCS / "examples"
NOTE = "<!-- written by `python -m docs.generate`; edit the code instead -->\n"
NGRAM = "ngram:max_depth=8,earlier=100000"
EXCERPT = re.compile(r"(<!-- source: (\S+) -->\n```python\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


def pages() -> dict[Path, str]:
    """Every page that is written from the code, and what it should be."""
    return {
        REFERENCE / "commands.md": commands(),
        REFERENCE / "settings.md": settings(),
        REFERENCE / "support.md": support(),
        **{EXAMPLES / f"{script.stem}.md": example(script) for script in scripts()},
        **{page: with_tables(with_excerpts(page.read_text())) for page in DOCS.glob("*.md")},
    }


def first_sentence(thing: Any) -> str:
    return re.split(r"(?<=[.!?])\s", " ".join((inspect.getdoc(thing) or "").split()) + " ")[0]


def summary(kind: type) -> str:
    """The first sentence of a class's module."""
    return first_sentence(sys.modules[kind.__module__])


# --- commands -------------------------------------------------------------------------------------------------


def commands() -> str:
    group = typer.main.get_command(app)
    parts = [NOTE, "# Commands\n", f"{group.help}\n", "`-h` or `--help` after a command says the same.\n"]
    for name, command in sorted(group.commands.items()):
        arguments = [part for part in command.params if part.param_type_name == "argument"]
        usage = " ".join([f"draftwood {name}", *(part.metavar or part.name.upper() for part in arguments), "[FLAGS]"])
        parts += [f"## {name}\n", f"```\n{usage}\n```\n", " ".join((command.help or "").split()) + "\n"]
        hints = get_type_hints(command.callback)
        parts.append(table(("flag", "value", "default", ""), (row(part, hints) for part in command.params)))
    return "\n".join(parts)


def row(part: Any, hints: dict[str, Any]) -> list[str]:
    names = [*part.opts, *part.secondary_opts]  # the second ones switch off
    flag = f"*{part.name}*" if part.param_type_name == "argument" else " ".join(f"`{name}`" for name in names)
    blank = part.default is None or part.default is False or part.default == ""
    default = "required" if part.required else "" if blank else f"`{part.default}`"
    return [flag, value(hints[part.name]), default, part.help or ""]


def value(hint: Any) -> str:
    """`list[str] | None` -> "text, repeatable"; a switch takes none."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if get_origin(kinds[0]) is list:
        return value(get_args(kinds[0])[0]) + ", repeatable"
    if get_origin(hint) is list:
        return value(get_args(hint)[0]) + ", repeatable"
    return {bool: "", str: "text", int: "whole number", float: "number", Path: "path"}[kinds[0]]


# --- settings -------------------------------------------------------------------------------------------------


def settings() -> str:
    return "\n".join(
        [
            NOTE,
            "# Settings\n",
            "## Environment\n",
            inspect.getdoc(importlib.import_module("draftwood.config").config).partition("\n\n")[2] + "\n",
            first_sentence(importlib.import_module("draftwood.config").deployed) + "\n",
            record(Config, "What is read from it"),
            record(Sampling, "Sampling: `LLM.generate`, `LLM.stream`, and the flags of the same names"),
            "## Policies\n",
            policies(),
            "## Drafters\n",
            drafters(),
            record(Options, f"The drafter `ngram`, as in `{NGRAM}`"),
            record(Recipe, "A training run"),
            "## Extras of the package\n",
            extras(),
        ]
    )


def record(kind: type, title: str) -> str:
    """A dataclass as a table; the comment behind a field, or above it, explains it."""
    said = comments(kind)
    rows = [(f"`{f.name}`", f"`{f.type}`", default(f), said.get(f.name, "")) for f in fields(kind)]
    return f"## {title}\n\n{first_sentence(kind)}\n\n" + table(("name", "type", "default", ""), rows)


def default(field: Any) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def comments(kind: type) -> dict[str, str]:
    found = re.findall(r"^(?:    # (.*)\n)?    (\w+): [^#\n]*(?:#\s*(.*))?$", inspect.getsource(kind), re.MULTILINE)
    return {name: behind or above for above, name, behind in found}


def policies() -> str:
    rows = []
    for name in built_in(registry.POLICIES):
        rule = registry.policy({"ddtree": "ddtree:32", "beam": "beam:4x15"}.get(name, name))
        seen = "calibrated" if rule.calibrated else "the drafter's own"
        rows.append((f"`{rule.name}`", rule.n_max, rule.width, seen, summary(type(rule))))
    return table(("spec", "most nodes", "candidates a depth", "masses", ""), rows)


def drafters() -> str:
    rows = [
        (f"`{entry.name}`", proposes(entry.name, entry.load()))
        for entry in registry.BUILT_IN
        if entry.group == registry.DRAFTERS
    ]
    return table(("kind", ""), [*rows, ("`none`", "Plain decoding.")])


def proposes(name: str, kind: type) -> str:
    """Of a class that shares its module, what it says of itself, beginning with its name."""
    own = first_sentence(kind)
    return own if own.startswith(f"`{name}`:") else summary(kind)


def built_in(group: str) -> list[str]:
    return [entry.name for entry in registry.BUILT_IN if entry.group == group]


def extras() -> str:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    rows = [(f"`draftwood[{name}]`", ", ".join(needs)) for name, needs in project["optional-dependencies"].items()]
    return table(("extra", "installs"), rows)


# --- support --------------------------------------------------------------------------------------------------


def support() -> str:
    """What each tested family gets, asked of a random model of it."""
    from tests.reference import FAMILIES, tiny_target

    rows = [family(name, tiny_target(name)) for name in FAMILIES]
    head = ("family", "transformers class", "forward", "rounds on a GPU, with a DFlash drafter or none")
    return "\n".join(
        [
            NOTE,
            "# Support matrix\n",
            "Each row was found with a small random model of the family, which runs the family's own transformers\n"
            "code. In the tests, which compare in float64, a tree forward of the model equals its plain forward\n"
            "along every branch. Rounds on a GPU are tested on CPUs, where each stage of a round is recorded once and\n"
            "replayed, as a CUDA graph is.\n",
            table(head, rows),
            "Any other model is checked when it is loaded: it is refused if its logits for a small tree with a decoy\n"
            "branch differ from those of its plain forward.\n",
            "## Versions\n",
            versions(),
        ]
    )


def family(name: str, target: Any) -> list[str]:
    why = lean.declines(target.model)
    rounds = Device(target, None).declines(registry.policy("bastion"), None)
    device = "captured" if rounds is None else "on the host"
    return [
        name.replace("_", " "),
        f"`{type(target.model).__name__}`",
        "universal" if why else "lean, universal",
        device,
    ]


def versions() -> str:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    tested = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)(?=$|\s|; python_version >=)", (DOCS.parent / "constraints.txt").read_text(), re.M
        )
    )
    rows = [("Python", project["requires-python"], "3.11")]
    rows += [(name, needs or "any", tested.get(name, "")) for name, needs in map(requirement, project["dependencies"])]
    return table(("package", "needed", "tested with"), rows)


def requirement(line: str) -> tuple[str, str]:
    found = re.match(r"([\w-]+)(.*)", line)
    assert found, line
    return found[1], found[2]


# --- examples -------------------------------------------------------------------------------------------------


def scripts() -> list[Path]:
    return sorted((DOCS.parent / "examples").glob("*.py"))


def example(script: Path) -> str:
    """The page of a script: what it does, how to run it, and all of it."""
    text = script.read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    title = script.stem.replace("_", " ").capitalize()
    body = text.split('"""\n', 1)[1].lstrip("\n")
    return f"{NOTE}\n# {title}\n\n{said}\n\n```\npython examples/{script.name}\n```\n\n```python\n{body}```\n"


# --- excerpts -------------------------------------------------------------------------------------------------


def with_excerpts(text: str) -> str:
    """The page with every marked block replaced by the source that its marker names."""
    return EXCERPT.sub(lambda found: found[1] + source(found[2]) + found[4], text)


def source(name: str) -> str:
    """The code of `package.module:Class.method`, without its docstring."""
    module, _, path = name.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    code = textwrap.dedent(inspect.getsource(thing))
    body = ast.parse(code).body[0].body  # type: ignore[attr-defined]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        lines = code.splitlines(keepends=True)
        del lines[body[0].lineno - 1 : body[0].end_lineno]
        code = "".join(lines)
    return code


def main() -> None:
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
