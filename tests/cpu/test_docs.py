"""What the README, the docs and the examples say exists, and the examples run (on a tiny random model)."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import draftwood
from draftwood import llm as llm_module
from draftwood import registry
from draftwood.cli import app
from draftwood.engine import Engine
from draftwood.latency import LatencyModel, Machine
from draftwood.llm import LLM
from draftwood.target import Target
from tests.reference import FAMILIES, VOCAB, Noisy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app).commands
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
FOREIGN = re.compile(r"\b(pip install|vllm|sglang|llama-server)\b")  # other programs, whose flags are theirs


def blocks(text: str, language: str = "") -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert found, f"the README has no section {title!r}"
    return found[1]


def flags_of(command: str) -> set[str]:
    return {"--help", *(name for option in COMMANDS[command].params for name in option.opts)}


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --- links ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), f"{page.name} links to {link}, which is not there"
            assert not anchor or anchor in anchors(found), f"{page.name} links to {link}: no such heading"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, f"docs/index.md does not list {page.name}"


# --- the command line -----------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """(command, line) of every `draftwood …` in code, in the README and the docs."""
    for page in PAGES:
        for code in [*blocks(page.read_text()), *re.findall(r"`(draftwood [^`]+)`", page.read_text())]:
            for line in code.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:draftwood|\$\(BIN\)/draftwood) (bench gpu|[a-z-]+)", line):
                    yield found[1].replace(" ", "-"), line


def test_every_command_and_flag_exists() -> None:
    lines = list(commands())
    assert {command for command, _ in lines} >= {"generate", "bench", "doctor"}
    for command, line in lines:
        assert command in COMMANDS, line
        unknown = set(FLAG.findall(line)) - flags_of(command)
        assert not unknown, f"{line}: no flag {unknown}"


def test_flags_in_running_text_exist() -> None:
    known = set().union(*(flags_of(command) for command in COMMANDS))
    for page in PAGES:
        for line in page.read_text().splitlines():
            if not FOREIGN.search(line):
                assert set(FLAG.findall(line)) <= known, f"{page.name}: {line}"


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target} is in the README alone"


# --- names ----------------------------------------------------------------------------------------------------


def test_the_policies_are_all_in_the_readme() -> None:
    specs = re.findall(r"^\| `([^`]+)` \|", section("Policies"), re.MULTILINE)
    built_in = [entry.name for entry in registry.BUILT_IN if entry.group == registry.POLICIES]
    assert sorted(spec.partition(":")[0] for spec in specs) == sorted(built_in)
    for spec in [*specs, *re.findall(r"`([a-z]+:[^`]+)`", section("Policies"))]:
        assert registry.policy(spec).name


def test_the_families_are_those_of_the_tests() -> None:
    row = next(line for line in section("What is supported").splitlines() if line.startswith("| Targets"))
    plain = re.sub(r"[^a-z0-9]", "", row.lower())
    for family in FAMILIES:
        assert family.removesuffix("_sliding").replace("_", "") in plain, f"{family} is missing in the README"


def test_the_map_lists_every_module() -> None:
    listed: list[str] = []
    folders: list[str] = []
    for line in blocks(section("Map of the code"))[0].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        if name.startswith("#"):
            continue
        path = "/".join([*folders[:depth], name.rstrip("/")])
        assert (ROOT / path).exists(), f"the README's map lists {path}, which is not there"
        assert len(line.split()) > 1 or name.endswith("/"), f"{path} has no description"
        if name.endswith("/"):
            folders[depth:] = [name.rstrip("/")]
        listed.append(path)
    modules = [path for path in (ROOT / "draftwood").rglob("*.py") if path.name != "__init__.py"]
    missing = {path.relative_to(ROOT).as_posix() for path in modules} - set(listed)
    assert not missing, f"the README's map lacks {sorted(missing)}"
    assert len(set(listed)) == len(listed)


def snippets() -> list[str]:
    return [code for page in PAGES for code in blocks(page.read_text(), "python")]


def test_snippets_use_names_that_exist() -> None:
    assert snippets()
    for code in snippets():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "draftwood" or node.attr in draftwood.__all__, node.attr
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


def test_keyword_arguments_in_snippets_exist() -> None:
    signatures = {"load": draftwood.load, "custom_generate": draftwood.custom_generate, "stream": LLM.stream}
    for code in snippets():
        for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            known = inspect.signature(signatures[name]).parameters if name in signatures else None
            assert known is None or {keyword.arg for keyword in call.keywords} <= set(known), ast.unparse(call)


# --- running them ---------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_load(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """`draftwood.load` gives a random model with made-up words: what is tested is that the calls fit."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)

    def load() -> LLM:
        return LLM(Engine(target, Noisy("noisy"), registry.policy("bastion"), latency), tokenizer)

    monkeypatch.setattr(llm_module, "load", load)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, tiny_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_readmes_first_snippet_runs(tiny_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks(section("30 seconds"), "python")[0], "README", "exec"), {})
    assert "tokens per round" in capsys.readouterr().out
