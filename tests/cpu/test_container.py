"""Limits of containers and services, as both versions of control groups tell them."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from draftwood import container, cores, memory
from draftwood.bench import environment

GROUPS = {
    2: "0::/a/b\n",
    1: "4:memory:/a/b\n1:cpu,cpuacct:/a/b\n0::/\n",  # with the other version's root beside it
}


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(container, "ROOT", tmp_path)
    monkeypatch.setattr(container, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(GROUPS[request.param])
    return int(request.param)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def write_cores(root: Path, version: int, group: str, allowed: int | None) -> None:
    if version == 2:
        write(root / group, cpu_max=f"{'max' if allowed is None else allowed} 100000")
    else:
        write(root / "cpu" / group, cpu_cfs_quota_us=-1 if allowed is None else allowed, cpu_cfs_period_us=100000)


def write_memory(root: Path, version: int, group: str, limit: int | None, used: int) -> None:
    if version == 2:
        write(root / group, memory_max="max" if limit is None else limit, memory_current=used)
        write(root / group, memory_stat="anon 500\nfile 200")
    else:
        most = 9223372036854771712 if limit is None else limit
        write(root / "memory" / group, memory_limit_in_bytes=most, memory_usage_in_bytes=used)
        write(root / "memory" / group, memory_stat="rss 500\ntotal_cache 200")


def test_the_tightest_of_all_groups_around_it_counts(version: int, tmp_path: Path) -> None:
    assert container.cores() == inf
    for group, allowed, expected in (("a/b", None, inf), ("a", 250_000, 2.5), ("", 400_000, 2.5), ("a/b", 50_000, 0.5)):
        write_cores(tmp_path, version, group, allowed)
        assert container.cores() == expected
    write_cores(tmp_path, version, "another", 10_000)
    assert container.cores() == 0.5


def test_memory_is_what_is_left_without_the_page_cache(version: int, tmp_path: Path) -> None:
    assert container.memory() is None and container.free_memory() is None
    write_memory(tmp_path, version, "a/b", None, 700)
    assert container.memory() is None and container.free_memory() is None
    write_memory(tmp_path, version, "a", 1000, 700)
    assert container.memory() == 1000 == environment.memory_bytes() and container.free_memory() == 500
    assert memory.free_bytes(memory.torch.device("cpu")) == 500
    write_memory(tmp_path, version, "", 900, 800)
    assert container.memory() == 900 and container.free_memory() == 300


def test_inside_a_container_the_outer_path_is_not_there(version: int, tmp_path: Path) -> None:
    """It sees its own group as the root of all."""
    write_cores(tmp_path, version, "", 150_000)
    write_memory(tmp_path, version, "", 1000, 700)
    assert container.cores() == 1.5 and container.memory() == 1000


@pytest.mark.parametrize("told", ["", "nonsense", "0::"])
def test_where_nothing_is_told_there_is_no_limit(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "ROOT", tmp_path)
    monkeypatch.setattr(container, "OWN", tmp_path / "own")
    assert container.cores() == inf and container.memory() is None
    (tmp_path / "own").write_text(told)
    write(tmp_path, cpu_max="a b", memory_max="", memory_current="x")
    assert container.cores() == inf and container.memory() is None


def test_a_limit_of_cores_is_one_of_threads(version: int, tmp_path: Path) -> None:
    write_cores(tmp_path, version, "a/b", 100_000)
    assert cores.Load().free() == 1.0 and cores.fitting(8, 1.0) == 1
