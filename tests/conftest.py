"""Shared fixtures: an isolated cache folder, tiny targets, a scripted baseline; and a header with versions."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the imports that read it: no test waits for a hub

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels then run on the CPU; read when Triton is imported

import numpy as np
import pytest
import transformers
from hypothesis import settings

from draftwood import cores
from draftwood.bench import measure
from draftwood.bench.stats import TRANSFORMERS
from draftwood.native.build import operators
from draftwood.target import Target
from tests.bench_cases import FakeLLM
from tests.reference import tiny_target

settings.register_profile("untimed", deadline=None)  # speed belongs into benchmarks
settings.load_profile("untimed")


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}, {device}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for the whole run, of all workers: operators are compiled and the machine is probed once."""
    own = tmp_path_factory.getbasetemp()
    home = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "home"
    home.mkdir(exist_ok=True)
    return home


@pytest.fixture(scope="session", autouse=True)
def isolated_home(session_home: Path) -> Iterator[None]:
    """No test reads or writes the user's own cache, nor does a fixture that outlives its tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_HOME", str(session_home))
        yield


@pytest.fixture(scope="session")
def compiled(isolated_home: None) -> None:
    """The compiled operators, or a skip. A mark would ask while tests are collected: in the user's own cache."""
    if operators().library is None:
        pytest.skip(operators().reason)


@pytest.fixture
def changing_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a compiled operator takes another number of threads, as where other programs come and go."""
    numbers = cycle((1, 2, 3, 4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(cores, "fitting", lambda most, free: next(numbers))


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts() -> None:
    """Ctrl-C reaches tests that send it, and processes that they start, also where a script runs them behind `&`, whose
    children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products are slower on several threads, and far slower where those compete with other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> Target:
    """A random Llama in float64."""
    return tiny_target()


@pytest.fixture(scope="module")
def single() -> Target:
    """The same Llama in float32, packed like the targets of users."""
    return tiny_target(dtype=torch.float32, pack=True)


@pytest.fixture
def scripted_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bench of a `FakeLLM`, that one answers as the outside baseline, too."""

    def beside(llm: FakeLLM) -> SimpleNamespace:
        return SimpleNamespace(generate=lambda question, size, *_: llm.answer(TRANSFORMERS, question, size))

    monkeypatch.setattr(measure, "Transformers", SimpleNamespace(beside=beside))
