"""What the README, the docs and the examples say exists; snippets and examples run (on a tiny random model)."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import draftwood
from draftwood import llm as llm_module
from draftwood import registry
from draftwood.cli import app
from draftwood.engine import Engine
from draftwood.latency import LatencyModel, Machine
from draftwood.llm import LLM
from draftwood.target import Target
from tests.reference import FAMILIES, VOCAB, Noisy, tiny_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(app).commands
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
FOREIGN = re.compile(r"\b(pip install|torchrun|vllm|sglang|llama-server)\b")  # other programs, whose flags are theirs


def blocks(text: str, language: str = "") -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert found, f"the README has no section {title!r}"
    return found[1]


def flags_of(command: str) -> set[str]:
    return {"--help", *(name for option in COMMANDS[command].params for name in (*option.opts, *option.secondary_opts))}


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_site_fetches_nothing() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assets = re.findall(r"^  - (\S+\.(?:js|css))$", site, re.MULTILINE)
    assert any("katex" in asset for asset in assets)
    for asset in assets:
        assert (ROOT / "docs" / asset).is_file(), f"mkdocs.yml names {asset}, which is not in docs/"
    fonts = re.findall(r"url\((fonts/[^)]+\.woff2)\)", (ROOT / "docs" / "katex" / "katex.min.css").read_text())
    assert fonts and all((ROOT / "docs" / "katex" / font).is_file() for font in fonts)


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
                if found := re.match(r"(?:draftwood|\$\(BIN\)/draftwood) (bench (?:gpu|grid|serve)|[a-z-]+)", line):
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


def programs(page: Path) -> list[str]:
    """Python that a reader may type; excerpts of the source are not."""
    return blocks(re.sub(r"<!-- source: .*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), "python")


def snippets() -> list[str]:
    return [code for page in PAGES for code in programs(page)]


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

    def load(**_: object) -> LLM:
        return LLM(Engine(target, Noisy("noisy"), registry.policy("bastion"), latency), tokenizer)

    monkeypatch.setattr(llm_module, "load", load)


def test_the_tour_runs(tiny_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"), "kept without outputs"
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    exec(compile("\n".join(code), "tour.ipynb", "exec"), {})
    assert "tokens a round" in capsys.readouterr().out


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, tiny_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_readmes_first_snippet_runs(tiny_load: None, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks(section("30 seconds"), "python")[0], "README", "exec"), {})
    assert "tokens per round" in capsys.readouterr().out


@pytest.fixture
def tiny_hub(tiny_load: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever name is asked for, transformers gives a tiny model, and every drafter is made of noise."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: tiny_model("llama"))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: llm_module.load().tokenizer)
    monkeypatch.setattr(registry, "drafter", lambda name, target: Noisy("noisy"))


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=lambda page: page.name)
def test_snippets_run(page: Path, tiny_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page in one namespace, as a reader would type it."""
    module = ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", module)  # a dataclass looks its module up
    exec(compile("\n".join(programs(page)), page.name, "exec"), module.__dict__)


def test_the_drafter_of_the_extension_page_is_exact(tiny_load: None) -> None:
    code = next(code for code in blocks((ROOT / "docs" / "extend.md").read_text(), "python") if "class Again" in code)
    names: dict[str, Any] = {}
    exec(compile(code, "extend.md", "exec"), names)
    engine = llm_module.load().engine
    drafter = names["Again"].load("", engine.target)
    latency = LatencyModel(engine.latency.machine, engine.target.work, drafter.work)
    texts = {
        spec: [
            token
            for step in Engine(engine.target, drafter, registry.policy(spec), latency).run([1, 2, 3], 24)
            for token in step.tokens
        ]
        for spec in ("autoregressive", "ddtree:2")
    }
    assert texts["ddtree:2"] == texts["autoregressive"]


# --- the release ----------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere() -> None:
    version = draftwood.__version__
    assert re.search(rf'^version = "{version}"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_the_citation_names_the_papers_of_the_readme() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["message"]
    papers = {paper["url"].rpartition("/")[2] for paper in citation["references"]}
    assert papers == set(re.findall(r"arXiv:(\d+\.\d+)", section("Papers")))
    assert all(paper["authors"] and paper["title"] for paper in citation["references"])
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "draftwood").rglob("*.py"))
    assert papers == set(re.findall(r"\b2\d{3}\.\d{5}\b", code)), "and those whose methods the code names"


def test_make_sets_up_anew_what_is_half_made(tmp_path: Path) -> None:
    """As after a `python -m venv` that failed for want of pip, or with a Python that is too old."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, script in ((".venv/bin/python", "exit 1"), ("python", f'echo "$@" >> {tmp_path}/asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    made = ["make", ".venv/.installed", f"PYTHON={tmp_path}/python"]
    done = subprocess.run(made, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "-m venv --clear .venv\n"
    assert done.returncode and "needs Python 3.10 or newer" in done.stderr
