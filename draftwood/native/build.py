"""Compiling the operators once per machine into the user's cache, and saying why if that is not possible."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from draftwood.config import compiles, config
from draftwood.native.pages import pages
from draftwood.processor import abilities, can

LOG = logging.getLogger("draftwood")
NAMES = (
    "native.h",
    "attention.h",
    "ops.c",
    "attention.c",
    "scores.c",
    "values.c",
    "products.c",
    "tiles.c",
    "layers.h",
    "layers.c",
    "block.c",
    "logits.c",
    "growth.h",
    "growth.c",
    "substrings.h",
    "substrings.c",
    "successors.h",
    "successors.c",
    "pooled.h",
    "pooled.c",
    "judged.c",
    "chances.c",
)
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
COMPILED = [source for source in SOURCES if source.suffix == ".c"]
COMPILERS = ("cc", "gcc", "clang")
NO_COMPILER = f"no C compiler was found ({', '.join(COMPILERS)})"
COMMON = ("-O3", "-shared", "-fPIC", "-std=gnu11", "-fno-math-errno")
X86 = (  # the best first: not every compiler knows OpenMP. Without -march=native most instructions would lie idle
    ("-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    ("-march=native", "-fopenmp"),
    ("-march=native",),
)
OTHERS = (  # of which not every compiler knows -march=native
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    (),
)
FLAGS = X86 if platform.machine().lower() in ("x86_64", "amd64") else OTHERS
VARIANTS = ((), ("-DDOTS",))  # some processors run dot products of bf16 at twice the rate of fp32's sums, some at half
TILES, TILED = "amx_bf16", ("-DDOTS", "-DTILES")  # Linux's name for matrix units, and flags to use them
PATIENCE_S = 60
TRIALS, TRIAL_ROWS, TRIAL_SIDE = 10, 96, 512


@dataclass(frozen=True)
class Built:
    """The library, or why there is none."""

    library: Path | None
    reason: str

    @property
    def version(self) -> str:
        """Eight characters that identify sources, compiler and machine."""
        assert self.library is not None, self.reason
        return self.library.stem[-8:]

    @functools.cached_property
    def functions(self) -> ctypes.CDLL:
        assert self.library is not None, self.reason
        loaded = ctypes.CDLL(str(self.library))
        for name in (
            "attend",
            "draft_block",
            "forward",
            "has_products",
            "multiply",
            "pair_scores",
            "panel_width",
            "project",
        ):
            getattr(loaded, name).restype = ctypes.c_int
        loaded.confidence.restype = ctypes.c_float
        for name in ("append_text", "followers", "grow", "grow_pooled", "learn_pooled", "step_text", "walk"):
            getattr(loaded, name).restype = ctypes.c_int64
        return loaded


def address(array: NDArray[Any] | None) -> ctypes.c_void_p:
    """The address of numbers that an operator will read or write; null for None. Keep the array until it has."""
    if array is None:
        return ctypes.c_void_p(None)
    buffer: Any = array
    try:
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
    except (TypeError, ValueError):  # it is read-only, not in line, or empty
        return ctypes.c_void_p(array.ctypes.data)  # twice as long where caches are cold


def operators() -> Built:
    """The library for this machine in the user's cache, unless DRAFTWOOD_COMPILE=0 switches it off."""
    return _operators(compiles())


def library() -> ctypes.CDLL:
    """Its functions, for callers that know that there are some: asking whether they are switched off takes a while."""
    return _operators(True).functions


@functools.cache
def _operators(compile: bool) -> Built:
    if not compile:
        return Built(None, "switched off by DRAFTWOOD_COMPILE=0")
    built = build(config().operators, abilities())
    if built.library is None:  # else users would not know, in images without a compiler or with a read-only home
        LOG.warning(
            "No operators are compiled: %s. PyTorch's take twice as long on a CPU; DRAFTWOOD_COMPILE=0 silences this.",
            built.reason,
        )
    return built


def build(folder: Path, machine: str) -> Built:
    """The compiled library from `folder`, compiled now if it is not there. `machine` says what the processor can do.

    Without a compiler, as in an image whose cache an earlier stage has filled, any compiler's library will do.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    sources = [source.read_text(encoding="utf-8") for source in SOURCES]
    parts = [*sources, str((COMMON, FLAGS, VARIANTS, TILED)), machine]
    stem = f"ops-{_digest(parts)}"
    try:
        if compiler is None:
            kept = sorted(folder.glob(f"{stem}-*.so"))
            return _checked(kept[0], "an earlier compiler") if kept else Built(None, NO_COMPILER)
        own = Path(compiler).resolve()  # `cc` may be another compiler after an update
        library = folder / f"{stem}-{_digest([*parts, compiler, str(own), str(own.stat().st_size)])}.so"
        if not library.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            if (reason := _compile_best(compiler, library)) is not None:
                return Built(None, reason)
        return _checked(library, compiler)
    except OSError as error:
        return Built(None, f"{folder} cannot be used ({error}), see DRAFTWOOD_HOME")


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]


def _checked(library: Path, compiler: str) -> Built:
    """The compiled library, or why it is of no use here. Raises OSError if it cannot be loaded."""
    threaded = ctypes.CDLL(str(library)).threaded()
    if not threaded and torch.get_num_threads() > 1:
        slower = "on one core they take longer than PyTorch's operators on all"
        return Built(None, f"{compiler} has no OpenMP: {slower}; once it has, delete {library}")
    return Built(library, f"compiled by {compiler}")


def _compile_best(compiler: str, library: Path) -> str | None:
    """Make the quickest variant that computes correctly the `library`. Returns why there is none, or None.

    The file appears whole or not at all, even if other processes compile it meanwhile.
    """
    variants = (*VARIANTS, TILED) if can(TILES) else VARIANTS
    best, least = None, inf
    # A network's file system keeps what is removed while it is loaded, and then the folder is not empty.
    with tempfile.TemporaryDirectory(dir=library.parent, ignore_cleanup_errors=True) as folder:
        drafts = [Path(folder) / f"{place}.so" for place in range(len(variants))]
        with ThreadPoolExecutor(len(variants)) as pool:  # of compilers: they take seconds each, on a core each
            failed = list(pool.map(_compile, repeat(compiler), variants, drafts))
        for draft, failure in zip(drafts, failed, strict=True):
            if failure is None and (seconds := _trial_s(draft)) < least:
                best, least = draft, seconds
        if best is not None:
            os.replace(best, library)
            return None
    said = next(filter(None, failed), None)
    return f"{compiler} failed: {said}" if said else f"what {compiler} compiled multiplies wrongly"


def _compile(compiler: str, variant: Sequence[str], draft: Path) -> str | None:
    """Try the flags in order. Returns why the last of them failed, or None."""
    said = None
    for flags in FLAGS:
        command = [compiler, *COMMON, *flags, *variant, "-o", str(draft), *map(str, COMPILED), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:  # nor would what lesser flags make be kept for good because of a busy hour
            return f"took more than {PATIENCE_S} s"
        except OSError as error:  # it is not a program for this machine
            return str(error)
        else:
            if done.returncode == 0:
                return None
            if done.returncode < 0:  # it would be ended with other flags, too
                return f"was ended by signal {-done.returncode}"
            said = _reason(done.stderr)
    return said


def _reason(said: str) -> str:
    """The line of a compiler's message that says what is wrong; those before it say where."""
    lines = said.strip().splitlines() or ["no reason given"]
    return next((line for line in lines if "error:" in line), lines[0])


@torch.inference_mode()
def _trial_s(draft: Path) -> float:
    """Seconds of a product that is bound by arithmetic, the best of several runs; infinite if the result is wrong."""
    functions, like = ctypes.CDLL(str(draft)), torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, TRIAL_SIDE, generator=like).bfloat16() for rows in (TRIAL_SIDE, TRIAL_ROWS))
    out, panels = torch.empty(TRIAL_ROWS, TRIAL_SIDE, dtype=torch.bfloat16), in_panels(weight, functions.panel_width())
    addresses = [ctypes.c_void_p(None if part is None else part.data_ptr()) for part in (x, panels, None, out)]
    sizes = [ctypes.c_int64(size) for size in (TRIAL_ROWS, TRIAL_SIDE, TRIAL_SIDE)]

    def once() -> float:
        start = time.perf_counter()
        functions.multiply(*addresses, *sizes, 1)
        return time.perf_counter() - start

    seconds = min(once() for _ in range(TRIALS))
    right = torch.allclose(out.double(), x.double() @ weight.double().T, rtol=2**-7, atol=2**-7 * TRIAL_SIDE**0.5)
    return seconds if right else inf


def in_panels(weight: Tensor, panel: int) -> Tensor:
    """A weight `[out, in]` as `[panels, in / 2, panel, 2]`: panels of outputs, each by pairs of inputs."""
    filled = F.pad(weight.detach(), (0, 0, 0, -len(weight) % panel)).contiguous()
    laid = filled.view(torch.int32).view(-1, panel, weight.shape[1] // 2).mT  # a pair is moved as one number
    return pages().empty(laid.shape, torch.int32).copy_(laid).view(weight.dtype).unflatten(-1, (-1, 2))
