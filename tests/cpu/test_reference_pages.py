"""Pages that are written from the code are what the code says, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from docs import generate
from draftwood.drafters.ngram import Options
from draftwood.drafters.options import parse

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    return generate.pages()


def test_pages_are_up_to_date(pages: dict[Path, str]) -> None:
    stale = [path.name for path, text in pages.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"{', '.join(stale)} no longer say what the code says; run: python -m docs.generate"


def test_every_command_and_family_is_there(pages: dict[Path, str]) -> None:
    assert "\n## generate\n" in pages[generate.REFERENCE / "commands.md"]
    assert "`LlamaForCausalLM` | lean, universal" in pages[generate.REFERENCE / "support.md"]
    assert "DRAFTWOOD_HOME" in pages[generate.REFERENCE / "settings.md"]


def test_switches_that_are_on_show_how_to_switch_them_off(pages: dict[Path, str]) -> None:
    assert "`--no-autocast`" in pages[generate.REFERENCE / "commands.md"]


def test_settings_of_ngram_exist_and_are_explained(pages: dict[Path, str]) -> None:
    parse(Options, *generate.NGRAM.split(":"))
    assert set(generate.comments(Options)) == {field.name for field in fields(Options)}
    assert all(generate.comments(Options).values())


def test_no_page_of_these_folders_is_written_by_hand(pages: dict[Path, str]) -> None:
    for folder in (generate.REFERENCE, generate.EXAMPLES):
        assert set(folder.glob("*.md")) <= pages.keys()


def test_excerpts_are_filled(pages: dict[Path, str]) -> None:
    policies = pages[generate.DOCS / "policies.md"]
    assert "rates = [t / s for t, s in zip(tokens, seconds, strict=True)]" in policies and '"""' not in policies


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "draftwood.llm.LLM.generate" in (tmp_path / "site" / "api.html").read_text(), "the API comes from docstrings"
