"""The compiled CPU operators: the same numbers as PyTorch's, and a reason wherever they cannot be had."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood import doctor, packing, processor
from draftwood.accept import accept
from draftwood.acceptance import chances_of
from draftwood.drafters.lattice import candidates
from draftwood.grow import grow
from draftwood.native import build as building
from draftwood.native import products
from draftwood.native.build import Built, build, operators
from draftwood.native.candidates import Rows, drawn_each, likeliest, takes
from draftwood.native.chances import chances
from draftwood.native.forward import Native
from draftwood.native.pages import CHUNK, LINE, Pages
from draftwood.native.products import Panels
from draftwood.native.products import takes as takes_weight
from draftwood.native.slots import picked, put
from draftwood.noise import Ahead, keys, noisiest
from draftwood.sampling import Sampling, warp
from draftwood.target import Target
from draftwood.train.rows import PagedRows, PlainRows, open_rows
from draftwood.tree import Lattice, Tree, chain_tree, root_only
from tests.attention_cases import Case, make_case, random_tree
from tests.reference import tiny_target

compiled = pytest.mark.skipif(building.shutil.which("cc") is None, reason="no C compiler")
x86 = pytest.mark.skipif(building.FLAGS is not building.X86, reason="elsewhere -march=native may not be known")

TEXT = [int(t) for t in torch.randint(0, 97, (90,), generator=torch.Generator().manual_seed(1))]


def drawn(logits: torch.Tensor, row: int, sampling: Sampling, key: int = 0) -> int:
    """From a row alone."""
    return rows_of(logits[row : row + 1]).walk(root_only(0), sampling, np.array([key])).bonus


def rows_of(logits: torch.Tensor) -> Rows:
    rows = Rows.of(logits)
    assert rows is not None
    return rows


def choice(logits: torch.Tensor, row: int) -> int:
    return drawn(logits, row, Sampling())


def lean(family: str, **options) -> Target:
    return tiny_target(family, "lean", hidden_size=64, intermediate_size=96, **options)


def logits_of(target: Target, tree: Tree, prompt: int) -> torch.Tensor:
    """Of a tree behind a prompt, and of one behind a second, shorter one."""
    target.tap((0, 2))
    cache = target.new_cache(capacity=4, requests=2)
    target.prefill(TEXT[:prompt], cache, row=0)
    target.prefill(TEXT[: prompt // 2], cache, row=1)
    found = target.verify(target.plan([tree, chain_tree([5, 9])], cache, rows=[0, 1]), cache)
    assert found.taps is not None
    return torch.cat([found.logits.double(), found.taps.double()], 1)


@compiled
@pytest.mark.parametrize("prompt", [10, 80])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_sliding"])
def test_they_are_as_close_to_the_truth_as_pytorchs(family: str, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = random_tree(12)
    truth = logits_of(lean(family), tree, prompt)
    native = lean(family, dtype=torch.bfloat16)
    assert isinstance(native.path.native, Native) and not native.path.exact_cache
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    torchs = lean(family, dtype=torch.bfloat16)
    assert isinstance(torchs.path.native, str)
    errors = [float((logits_of(target, tree, prompt) - truth).abs().mean()) for target in (native, torchs)]
    assert errors[0] <= 1.25 * errors[1]


def next_of_three(target: Target, kind: type) -> torch.Tensor:
    """Logits of three texts written together, behind their prompts and two tokens later."""
    rows = open_rows(target, 3, 90)
    assert type(rows) is kind
    prompts = [TEXT[:80], TEXT[:3], TEXT[:30]]
    found = [rows.prefill([1, 2, 0], prompts), *(rows.step([0, 1, 2], [token, 5, 9]) for token in (7, 8))]
    return torch.cat(found).double()


@compiled
def test_texts_that_are_written_together_need_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = next_of_three(lean("qwen3_sliding"), PagedRows)
    native = next_of_three(lean("qwen3_sliding", dtype=torch.bfloat16), PlainRows)
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    torchs = next_of_three(lean("qwen3_sliding", dtype=torch.bfloat16), PagedRows)
    assert (native - truth).abs().mean() <= 1.25 * (torchs - truth).abs().mean()


def attend(cases: list[Case], threads: int, built: Built | None = None, whole: bool = False) -> list[torch.Tensor]:
    """What the queries of each case see, all of them asked in one call."""
    segments, starts = [case.plan.segments[0] for case in cases], np.cumsum([0, *(len(c.query) for c in cases)])
    masks = [None if s.visible is None else np.ascontiguousarray(s.visible) for s in segments]
    table = np.array(
        [
            (c.keys.data_ptr(), c.values.data_ptr(), 0 if m is None else m.ctypes.data, s.depths.ctypes.data,
             start, s.size, c.keys.shape[1], s.context, whole)
            for c, s, m, start in zip(cases, segments, masks, starts[:-1], strict=True)
        ],
        np.int64,
    )  # fmt: skip
    query, first = torch.cat([case.query for case in cases]), cases[0]
    out = torch.full_like(query, torch.nan)
    sizes = [c_int64(size) for size in (query.shape[1], len(first.keys), query.shape[2], first.window or 0)]
    where = (c_void_p(query.data_ptr()), c_void_p(table.ctypes.data), c_int64(len(cases)), c_void_p(out.data_ptr()))
    assert (built or operators()).functions.attend(*where, *sizes, c_float(first.scale), c_int(threads)) == 0
    return list(out.split([len(case.query) for case in cases]))


@compiled
@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("kv_heads, groups, size", [(3, 3, 64), (1, 1, 48), (2, 4, 128)])
@pytest.mark.parametrize("context", [0, 250, 256, 511, 1200])
def test_a_token_sees_the_same_bits_alone_and_beside_others(
    kv_heads: int, groups: int, size: int, context: int, window: int | None
) -> None:
    """Whichever form its block takes, however the loops are divided and among however many threads."""
    kind = (kv_heads, groups, size, torch.bfloat16, window)
    cases = [make_case(random_tree(n, n), context + i, *kind, seed=n) for i, n in enumerate((2, 3, 5, 6, 11, 40, 130))]
    together = attend(cases, 1)
    for threads in (2, 3, 4):
        assert all(map(torch.equal, attend(cases, threads), together))
    for case, found in zip(cases, together, strict=True):
        assert all(torch.equal(attend([case], threads)[0], found) for threads in (1, 2, 4))
        for node in range(0, len(found), 1 + len(found) // 8):
            assert torch.equal(attend([case.plain(node)], 1 + node % 3)[0], found[node : node + 1])
        exact = replace(case, query=case.query.double(), keys=case.keys.double(), values=case.values.double())
        torch.testing.assert_close(found.double(), exact.truth(), rtol=2**-7, atol=2**-8)  # weights are rounded too


@compiled
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [1, 8, 16, 21])
def test_tokens_of_a_whole_part_see_each_other(rows: int, window: int | None) -> None:
    """As if each were the last of a chain that holds all of them."""
    chains = [make_case(chain_tree(range(rows)), context, 2, 3, 64, torch.bfloat16, window) for context in (0, 300)]
    for case, found in zip(chains, attend(chains, 2, whole=True), strict=True):
        keys, values = (part[:, : case.context + rows].double() for part in (case.keys, case.values))
        query = case.query.double().unflatten(1, (len(keys), -1))
        scores = torch.einsum("rgqd,gsd->rgqs", query, keys) * case.scale
        if window:
            far = torch.arange(case.context, case.context + rows)[:, None] - torch.arange(case.context + rows) >= window
            scores = scores.masked_fill(far[:, None, None], -torch.inf)
        seen = torch.einsum("rgqs,gsd->rgqd", scores.softmax(-1), values).flatten(1, 2)
        torch.testing.assert_close(found.double(), seen, rtol=2**-7, atol=2e-3)


# Not `-O3`, which takes half a minute for what no processor runs.
EMULATED = ("-DTILES", "-include", str(Path(__file__).with_name("emulated_tiles.h")), "-fopenmp", "-O1")
FORMS = {
    "narrow vectors": ("-mavx2", "-mfma", "-mno-avx512f", "-fopenmp"),
    "any processor": (),
    "tiles": EMULATED,  # one of 16 rows takes 16 lanes
}


@pytest.fixture(scope="module", params=["fused multiply-adds", "dot products", *FORMS])
def any_processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The operators as they are compiled where one form or the other is faster, for AVX2, and for any processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "VARIANTS", (building.VARIANTS[request.param == "dot products"],))
        patch.setattr(building, "can", lambda ability: False)  # or this machine's own tiles would be preferred
        if request.param in FORMS:  # flags that another kind of processor does not know are left away
            patch.setattr(building, "FLAGS", (FORMS[request.param], ()))
        built = build(tmp_path_factory.mktemp("operators"), request.param)
    assert built.functions.tiles(c_int64(64)) == (request.param == "tiles")
    return built


@compiled
@pytest.mark.parametrize("size", [48, 64, 128])
def test_on_other_processors_a_token_sees_the_same_bits_alone_too(size: int, any_processor: Built) -> None:
    for n in (2, 5, 11, 40):
        case = make_case(random_tree(n, n), 300 + n, 2, 2, size, torch.bfloat16, None, seed=n)
        found = attend([case], 1, any_processor)[0]
        torch.testing.assert_close(found, attend([case], 1)[0], rtol=2**-7, atol=2e-3)
        for node in range(0, len(found), 1 + len(found) // 8):
            assert torch.equal(attend([case.plain(node)], 1, any_processor)[0], found[node : node + 1])


@compiled
def test_scores_that_do_not_fit_at_once_are_taken_in_turns() -> None:
    case = make_case(random_tree(33), 9000, 1, 2, 16, torch.bfloat16)
    alone = attend([case], 1)[0]
    assert torch.equal(attend([case], 2)[0], alone) and torch.equal(attend([case], 3)[0], alone)
    assert torch.equal(attend([case.plain(20)], 4)[0], alone[20:21])


def test_tensors_in_pages_have_memory_of_their_own() -> None:
    pages = Pages()
    with torch.inference_mode():
        pages.empty((5, 5), torch.float32)
    sizes = [(3, 5), (1000, 7), (0, 4), (CHUNK + 2, 1), (64, 64)]
    tensors = [pages.empty(size, torch.bfloat16).fill_(n) for n, size in enumerate(sizes)]
    for n, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == size and tensor.is_contiguous() and bool((tensor == n).all())
        assert tensor.numel() == 0 or tensor.data_ptr() % LINE == 0


@pytest.fixture(scope="module")
def own_products() -> None:
    """A skip where there are none. A mark would compile them while tests are collected, in the user's own cache."""
    if not takes_weight(torch.empty(2, 2, dtype=torch.bfloat16)):
        pytest.skip("oneDNN's products are used here")


@compiled
@pytest.mark.usefixtures("changing_threads")
@pytest.mark.parametrize("width, depth", [(1, 2), (31, 64), (960, 576), (100, 1536)])
def test_products_are_as_close_to_the_truth_as_pytorchs_and_rows_know_no_others(
    width: int, depth: int, any_processor: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows there are, and among however many threads they are divided."""
    monkeypatch.setattr(products, "operators", lambda: any_processor)
    torch.manual_seed(width)
    weight, bias, x = torch.randn(width, depth), torch.randn(width), torch.randn(2, 130, depth)
    weight, bias, x = weight.bfloat16(), bias.bfloat16(), x.bfloat16()
    panels = Panels(weight)
    assert torch.equal(panels.dense(), weight)
    for part in (None, bias):
        found = panels.product(x, part)
        truth = torch.nn.functional.linear(x.double(), weight.double(), None if part is None else part.double())
        torchs = torch.nn.functional.linear(x, weight, part)
        assert (found - truth).abs().mean() <= 1.01 * (torchs - truth).abs().mean()
        for rows in range(1, 30):
            assert torch.equal(panels.product(x[:, :rows], part), found[:, :rows])
    assert panels.product(x[:, :0], None).shape == (2, 0, width)


@pytest.mark.usefixtures("own_products", "changing_threads")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_sliding"])
def test_all_layers_in_one_call_give_the_bits_of_a_call_for_each_operator(family: str) -> None:
    target, tree = lean(family, pack=True, dtype=torch.bfloat16), random_tree(12)
    assert isinstance(target.path.native, Native) and target.path.native.calls_per_layer == 0
    together = logits_of(target, tree, 80)
    target.path.native._table = None
    assert torch.equal(logits_of(target, tree, 80), together)


def test_models_they_do_not_serve_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not bfloat16" in lean("llama").path.native
    assert "multiples of 16" in tiny_target("llama", "lean", dtype=torch.bfloat16).path.native
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    target = lean("llama", dtype=torch.bfloat16)
    assert "DRAFTWOOD_COMPILE" in target.path.native and target.path.kind == "lean"


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Path]:
    """By their flags, what compilers made in tests that are about something else."""
    return {None: tmp_path_factory.mktemp("drafts")}


@pytest.fixture
def quickly(drafts: dict[object, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled for one test is copied for the next one."""
    compile = building._compile

    def copied(compiler: str, variant: Sequence[str], draft: Path) -> str | None:
        flags = compiler, *building.FLAGS, *variant
        if flags not in drafts:
            if said := compile(compiler, variant, draft):
                return said
            drafts[flags] = shutil.copy(draft, drafts[None] / f"{len(drafts)}.so")
        else:
            shutil.copy(drafts[flags], draft)
        return None

    monkeypatch.setattr(building, "_compile", copied)


def test_that_nothing_is_compiled_is_said_once_unless_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operators = functools.cache(building._operators.__wrapped__)
    monkeypatch.setenv("DRAFTWOOD_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    for _ in range(2):
        assert operators(True).library is None and operators(False).library is None
    (record,) = caplog.records
    assert "no C compiler" in record.getMessage() and "DRAFTWOOD_COMPILE=0" in record.getMessage()


@compiled
def test_compiled_once_and_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(tmp_path, "some processor")
    assert first.library is not None and [*tmp_path.iterdir()] == [first.library]
    monkeypatch.setattr(building.subprocess, "run", None)  # not called again
    assert build(tmp_path, "some processor").library == first.library
    monkeypatch.setenv("PATH", "/nowhere")  # as in an image that an earlier stage with a compiler has filled
    assert build(tmp_path, "some processor") == Built(first.library, "compiled by an earlier compiler")
    assert "no C compiler" in build(tmp_path, "another").reason


def test_without_a_working_compiler_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    built = build(tmp_path / "cache", "some processor")
    assert built.library is None and "no such flag" in built.reason and not [*(tmp_path / "cache").iterdir()]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "no C compiler" in build(tmp_path / "cache", "some processor").reason
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cannot be used" in build(tmp_path / "file", "some processor").reason


@pytest.mark.parametrize(
    "program, reason",
    [
        (
            b"#!/bin/sh\nprintf 'ops.c: In function:\\nops.c:6: error: no such thing\\n' >&2\nexit 1\n",
            "error: no such thing",
        ),
        (b"#!/bin/sh\nprintf 'f\\374r nichts' >&2\nexit 1\n", "failed: f\ufffdr nichts"),
        (b"of another machine", "failed: [Errno 8] Exec format error"),
    ],
    ids=["explained", "in an old encoding", "no program"],
)
def test_the_reason_is_what_the_compiler_failed_for(
    program: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cc").write_bytes(program)
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert reason in build(tmp_path / "cache", "some processor").reason


def test_a_compiler_that_is_ended_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches it, too: another try with other flags would keep whoever pressed it waiting."""
    ended = tmp_path / "cc"
    ended.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/calls\nkill -KILL $$\n", encoding="utf-8")
    ended.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(building, "can", lambda _: False)
    assert "ended by signal 9" in build(tmp_path / "cache", "some processor").reason
    assert (tmp_path / "calls").read_text().count("asked") == len(building.VARIANTS)


def slow(command: list[str]) -> Any:
    raise subprocess.TimeoutExpired(command, 60)


def short_of_memory(command: list[str]) -> Any:
    """As gcc ends when the system has ended the compiler proper, which it starts."""
    return subprocess.CompletedProcess(command, 1, "", "cc: fatal error: Killed signal terminated program cc1\n")


@compiled
@pytest.mark.parametrize(
    ("fail", "reason"),
    [(slow, "took more than"), pytest.param(short_of_memory, "Killed signal", marks=x86)],
)
def test_a_compiler_that_failed_once_leaves_nothing_that_would_stay(
    fail: Callable[[list[str]], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what other flags would make, without the processor's own instructions."""
    run = subprocess.run

    def busy(command: list[str], **options: Any) -> Any:
        return fail(command) if "-march=native" in command else run(command, **options)

    monkeypatch.setattr(building.subprocess, "run", busy)
    built = build(tmp_path, "some processor")
    assert built.library is None and reason in built.reason and not [*tmp_path.iterdir()]


@compiled
@pytest.mark.usefixtures("quickly")
def test_a_folder_that_cannot_be_removed_does_not_cost_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's file system keeps what is loaded under another name."""
    rmdir = os.rmdir

    def not_empty(path: str, **options: Any) -> None:
        if "tmp" in Path(path).name:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", not_empty)
    assert build(tmp_path, "some processor").library is not None


@compiled
@pytest.mark.usefixtures("quickly")
def test_of_variants_that_multiply_wrongly_none_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truths = iter([False, True, False, False])
    monkeypatch.setattr(building, "can", lambda _: False)
    monkeypatch.setattr(torch, "allclose", lambda *_, **__: next(truths))
    assert build(tmp_path, "some processor").library is not None, "the second is right"
    assert "multiplies wrongly" in build(tmp_path, "another").reason and len([*tmp_path.iterdir()]) == 1


@compiled
@pytest.mark.usefixtures("quickly")
def test_a_variant_that_does_not_compile_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a processor has matrix units, and the compiler does not know them."""
    monkeypatch.setattr(building, "VARIANTS", ((), ("-include", "nowhere.h")))
    assert build(tmp_path, "some processor").library is not None
    monkeypatch.setattr(building, "VARIANTS", (("-include", "nowhere.h"),))
    monkeypatch.setattr(building, "can", lambda _: False)
    assert "nowhere.h" in build(tmp_path, "another").reason


@compiled
@pytest.mark.usefixtures("quickly")
def test_a_library_that_does_not_serve_here_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = build(tmp_path, "some processor").library, tmp_path / "other"
    assert first is not None
    other.mkdir()
    (other / first.name).write_bytes(b"of another machine")
    assert "cannot be used" in build(other, "some processor").reason
    source = tmp_path / "alone.c"
    source.write_text("int threaded(void) { return 0; }", encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "alone.so", source], check=True)
    for threads, served in ((2, False), (1, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        built = building._checked(tmp_path / "alone.so", "cc")
        assert (built.library is not None) == served == ("OpenMP" not in built.reason)
        assert served or f"delete {tmp_path / 'alone.so'}" in built.reason


def test_doctor_says_whether_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    state = doctor.operators_state(cpu, torch.bfloat16)
    assert state.startswith(operators().reason) and "the lean path attends with them" in state
    assert state.endswith(f"weights are read by {packing.kind(torch.bfloat16)}")
    others = [(cpu, torch.float32), (torch.device("cuda"), torch.bfloat16)]
    for other in others:
        state = doctor.operators_state(*other)
        assert state.startswith(operators().reason) and "only for bfloat16 on a CPU" in state
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    for other in [(cpu, torch.bfloat16), *others]:  # without them fp32 is often the quicker one
        assert "switched off" in doctor.operators_state(*other)


@compiled
@pytest.mark.parametrize("size", [5, 64, 1000, 49152])
def test_a_choice_is_the_first_of_the_largest(size: int) -> None:
    logits = (torch.randn(9, size, generator=torch.Generator().manual_seed(2)) * 4).bfloat16()
    logits[3] = -torch.inf
    logits[4, size // 2 :] = 30.0
    logits[5] = torch.nan
    found = [choice(logits, row) for row in range(9)]
    assert found == [*logits[:3].argmax(-1).tolist(), 0, size // 2, 0, *logits[6:].argmax(-1).tolist()]
    assert [choice(logits[::2], row) for row in range(5)] == found[::2]
    apart = logits[:, ::2]
    assert [choice(apart, row) for row in range(9)] == [choice(apart.clone(), row) for row in range(9)]
    assert choice(apart, 0) == int(apart[0].argmax())


SHAPES = [
    Sampling(0.7),
    Sampling(1e-9),
    Sampling(2.0, top_k=1),
    Sampling(1.0, top_k=40),
    Sampling(0.8, top_p=0.8713),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.0, min_p=0.05),
    Sampling(1.0, min_p=1.0),
    Sampling(1.5, top_k=30, top_p=0.7713, min_p=0.02),
    Sampling(0.6, top_k=10**6, top_p=0.999, min_p=0.01),
]


@compiled
@pytest.mark.parametrize("sampling", SHAPES, ids=str)
@pytest.mark.parametrize("step", [0.5, 0.0], ids=["ties", "apart"])
@pytest.mark.parametrize("size", [1, 5, 64, 200, 5000])
def test_a_draw_is_the_rules_own(size: int, step: float, sampling: Sampling) -> None:
    rng = np.random.default_rng(size)
    logits = torch.from_numpy(rng.normal(0, 3, (4, size)))
    logits = (logits / step).round() * step if step else logits
    logits[1, 1::3] = -torch.inf
    logits[2] = 0.25  # one value for all: no share of so many may be a whole number
    logits[3, ::2] *= -0.0  # zeros of both signs
    found = logits.bfloat16()
    for row in range(4):
        scores = warp(found[row].float(), sampling)
        for key in keys(size, row, 20):
            assert drawn(found, row, sampling, int(key)) == int(noisiest(scores[None], key[None]))
    apart = torch.stack([found, found], -1).flatten(1)[:, ::2]
    assert drawn(apart, 3, sampling, 7) == drawn(found, 3, sampling, 7)


@compiled
@pytest.mark.parametrize("seed", range(40))
def test_a_walk_is_that_of_accept(seed: int) -> None:
    rng, size = np.random.default_rng(seed), 5
    nodes = int(rng.integers(0, 20))
    lattice = Lattice(np.argsort(rng.random((6, size)), 1), np.sort(rng.normal(-1, 1, (6, size)))[:, ::-1])
    tree, sampling = grow(lattice, 1, nodes), Sampling(float(rng.choice([0.0, 1.0])))
    logits = torch.from_numpy(rng.normal(0, 2, (len(tree.tokens), size))).bfloat16()
    under = keys(seed, 0, 1 + int(tree.depths.max()))
    expected = accept(tree, lambda node, path: drawn(logits, node, sampling, int(under[len(path)])))
    assert rows_of(logits).walk(tree, sampling, under) == expected


@compiled
@pytest.mark.parametrize("size", [5, 5000])
def test_many_rows_are_drawn_as_each_alone(size: int) -> None:
    rng = np.random.default_rng(size)
    logits = torch.from_numpy(rng.normal(0, 3, (40, size))).bfloat16()
    heat, under = rng.choice([0.0, 0.5, 1.3], 40).tolist(), keys(1, 0, 40).tolist()
    each = [drawn(logits, row, Sampling(t), x) for row, (t, x) in enumerate(zip(heat, under, strict=True))]
    assert drawn_each(logits, heat, under).tolist() == each
    assert drawn_each(logits[:0], [], []).tolist() == []


@compiled
def test_rows_behind_others_are_theirs() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    rows = rows_of(logits).behind(2).behind(1)
    assert rows.walk(root_only(0), Sampling(), None).bonus == int(logits[3].argmax())
    assert rows.confidence(1) == rows_of(logits[4:]).confidence(0)


MATRIX = torch.arange(42.0).view(7, 6)


@pytest.mark.parametrize("matrix", [MATRIX, MATRIX.bfloat16(), MATRIX.view(6, 7).T], ids=["fp32", "bf16", "turned"])
def test_rows_of_a_matrix_are_picked_and_put(matrix: torch.Tensor) -> None:
    for rows in ([0], [0, 2, 6], [3, 4, 5]):
        assert torch.equal(picked(matrix, rows), matrix[rows])
    for into in (torch.zeros(9, 6, dtype=matrix.dtype), torch.zeros(9, 6, dtype=torch.float64), torch.zeros(6, 9).T):
        put(matrix[1:4], into, 5)
        assert torch.equal(into[5:8], matrix[1:4].to(into.dtype)) and not into[:5].any() and not into[8:].any()


def test_an_address_is_where_numbers_begin() -> None:
    whole = np.arange(12)
    fixed = whole.copy()
    fixed.flags.writeable = False
    for array in (whole, whole[3:], whole[::2], whole[:0], fixed):
        assert building.address(array).value == array.ctypes.data
    assert building.address(None).value is None


@compiled
@pytest.mark.parametrize("size", [1, 5, 64, 1000, 49152])
def test_confidence_is_the_largest_probability_to_about_a_percent(size: int) -> None:
    logits = (torch.randn(4, size, generator=torch.Generator().manual_seed(5)) * 4).bfloat16()
    logits[2, 1:] = -torch.inf
    truth = logits.double().softmax(-1).amax(-1).tolist()
    apart, wide = torch.stack([logits, logits], -1).flatten(1)[:, ::2], torch.cat([logits, logits], 1)[:, :size]
    for row in range(4):
        assert rows_of(logits).confidence(row) == pytest.approx(truth[row], rel=1e-2)
        assert rows_of(apart).confidence(row) == rows_of(wide).confidence(row) == rows_of(logits).confidence(row)


@compiled
def test_what_is_no_number_is_not_confident() -> None:
    assert isnan(rows_of(torch.full((1, 128), torch.nan, dtype=torch.bfloat16)).confidence(0))


@compiled
@pytest.mark.parametrize("ahead", [None, Ahead(keys(0, 0, 4), 1.0)], ids=["plain", "noise"])
def test_who_asks_for_no_candidates_gets_none(ahead: Ahead | None) -> None:
    """As a policy of width 0 does; nothing is written where there is no room."""
    places, logp = likeliest(torch.randn(4, 1000).bfloat16(), 0, None, ahead)
    assert places.shape == logp.shape == (4, 0)


@compiled
@pytest.mark.parametrize("size", [5, 64, 1000, 49152])
def test_the_likeliest_tokens_are_those_of_the_formula(size: int) -> None:
    logits = (torch.randn(9, size, generator=torch.Generator().manual_seed(2)) * 4).bfloat16()
    logits[3] = -torch.inf
    logits[3, 2] = 1.0
    logits[4, :5] = 30.0  # equals
    assert takes(logits)
    tokens, logp = candidates(logits, 8)
    truth = torch.log_softmax(logits.double(), -1)
    order = truth.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    rows = [r for r in range(9) if r != 3]
    assert torch.equal(tokens[rows], order[rows]) and int(tokens[3, 0]) == 2
    torch.testing.assert_close(logp.double(), truth.gather(1, order), rtol=1e-5, atol=1e-5)
    none, _ = candidates(logits[:0], 8)
    assert none.shape == (0, min(8, size))


def test_processors_of_one_name_that_can_do_other_things_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Arm all have one name, and what was compiled for one may be no instruction of another."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "CPUINFO", path)
    block = "processor\t: {}\nBogoMIPS\t: {}\nFeatures\t: fp asimd{}\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n"
    said = []
    for clock, more in ((50, ""), (60, ""), (50, " sve")):
        path.write_text(block.format(0, clock, more) + block.format(1, clock, ""))
        said.append(processor.abilities())
    assert said[0] == said[1] != said[2]
    path.unlink()
    assert processor.abilities().startswith(processor.processor())


@compiled
@pytest.mark.parametrize("optimism", [0.0, 0.7])
def test_chances_are_those_of_the_formula(optimism: float) -> None:
    """Of nodes that are certain or hopeless, too, and of a slice of a tree's arrays."""
    rng = np.random.default_rng(3)
    mass = np.concatenate([rng.random(40, np.float32), np.array([0, 1e-40, 1, 1 - 1e-7, 2e-20], np.float32)])
    depths, root = rng.integers(1, 9, len(mass)), rng.normal(size=(4, 4))
    given = np.array([0.2, 1.1, 0.8, -0.05]), root @ root.T / 50, mass[1:], depths[1:], optimism
    np.testing.assert_allclose(chances(*given), chances_of(*given), rtol=1e-5)
    assert chances(*given[:2], mass[:0], depths[:0], optimism).shape == (0,)


@compiled
@pytest.mark.parametrize("variant", [*building.VARIANTS, building.TILED], ids=" ".join)
def test_every_variant_compiles_where_the_processor_can(
    variant: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not would be passed over in silence, or compiled without what the processor can do."""
    monkeypatch.setattr(building, "FLAGS", [flags for flags in building.FLAGS if "-march=native" in flags])
    if variant == building.TILED and not processor.can(building.TILES):
        pytest.skip("no matrix units")
    assert building._compile(building.shutil.which("cc"), variant, tmp_path / "ops.so") is None
