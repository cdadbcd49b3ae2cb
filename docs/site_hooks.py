"""Pages that the site adds: files of the repository that the docs link to, so that no link leaves the site.

In the repository a link such as `../draftwood/engine.py` opens the file. On the site it opens a page that shows it.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?:\.\./)+(?P<path>[^)\s#]+)(?=[#)])")
PICTURES = (".png", ".svg")
LANGUAGES = {".py": "python", ".c": "c", ".toml": "toml", ".json": "json"}
FOLDER = "repository"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each linked file; for a folder, a list of its files and a page for each."""
    for page in [file for file in files if file.src_path.endswith(".md")]:
        for found in LINK.finditer(page.content_string):
            add(found["path"].rstrip("/"), files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links that leave docs/ at these pages."""
    here = PurePosixPath(page.file.src_path)
    up = "../" * (len(here.parts) - 1)
    return LINK.sub(lambda found: f"{up}{page_of(found['path'].rstrip('/'))}", markdown)


def add(path: str, files: Files, config: Any) -> None:
    source = ROOT / path
    if not source.exists():
        raise FileNotFoundError(f"a page links to {path}, which is not there")
    if files.get_file_from_path(page_of(path)):
        return
    if source.is_dir():
        parts = sorted(part for part in source.iterdir() if part.is_file())
        text = "\n".join(f"- [{part.name}]({part.name}.md)" for part in parts if shown(part))
        text = re.sub(r"\]\(", f"]({source.name}/", text)
        files.append(File.generated(config, page_of(path), content=f"# {path}\n\n{text}\n"))
        for part in parts:
            if shown(part):
                add(f"{path}/{part.name}", files, config)
    elif source.suffix in PICTURES:
        files.append(File.generated(config, page_of(path), content=source.read_bytes()))
    else:
        files.append(File.generated(config, page_of(path), content=content(source, path)))


def shown(source: Path) -> bool:
    return source.suffix in (*LANGUAGES, ".md")


def content(source: Path, path: str) -> str:
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":  # its own links are relative to where it lies in the repository
        return re.sub(r"\[([^\]]*)\]\((?!https?://)[^)]+\)", r"\1", text)
    fence = "`" * 4
    return f"# {path}\n\n{fence} {LANGUAGES.get(source.suffix, 'text')}\n{text}{fence}\n"


def page_of(path: str) -> str:
    """Where the site keeps a file of the repository."""
    return f"{FOLDER}/{path}" if path.endswith((".md", *PICTURES)) else f"{FOLDER}/{path}.md"
