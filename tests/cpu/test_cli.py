"""The command line: one sentence for every mistake, JSON as the last line, a clean end after Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from draftwood import __version__, assemble, cli, cli_show, doctor, embedded, offline, precision, threads
from draftwood.bench.stats import PLAIN, TRANSFORMERS
from draftwood.demo import POLICIES, Lane, race, run_demo, show_race
from draftwood.errors import BadInput, BadModel
from draftwood.latency import Machine
from draftwood.llm import LLM, Piece, load
from draftwood.offline_profile import ConvexCosts, Profile
from draftwood.store import write_json
from draftwood.tree import Tree
from tests.reference import byte_tokenizer, tiny_model

COMMANDS = (
    "generate", "chat", "bench", "calibrate", "doctor", "demo", "distill", "train", "eval-drafter", "serve", "batch",
)  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(dtype=torch.float32, vocab_size=257, max_position_embeddings=1024, eos_token_id=256)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that needs no measuring."""
    machine = Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6)
    for module in (assemble, doctor):
        monkeypatch.setattr(module, "probe", lambda device, dtype, folder: machine)


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "probe", lambda *_: Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6))
        return load(str(folder), "ngram", dtype="float32", device="cpu")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line: exit code, stdout, stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in args])
        return (end.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> LLM:
    """Commands get the tiny model without loading it."""
    monkeypatch.setattr("draftwood.llm.load", lambda *args, **options: llm)
    return llm


def assert_one_sentence(result: tuple[int, str, str]) -> None:
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("draftwood: ") and err.count("\n") == 1 and "Traceback" not in err


# --- help ----------------------------------------------------------------------------------------------------
def test_help_needs_no_torch() -> None:
    script = f"""
import sys
from draftwood import cli
for command in {(None, *COMMANDS)!r}:
    try:
        cli.main([*([command] if command else []), "--help"])
    except SystemExit as end:
        assert not end.code, command
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"draftwood {command}" in done.stdout for command in COMMANDS)


# --- mistakes ------------------------------------------------------------------------------------------------
MISTAKES = {
    "unknown command": (["genrate"], "generate"),
    "unknown flag": (["generate", "x", "--polcy", "bastion"], "--policy"),
    "unknown policy": (["generate", "x", "--policy", "ddtre:8"], "'ddtree'"),
    "bad policy parameter": (["generate", "x", "--policy", "ddtree:none"], "ddtree:none"),
    "unknown dtype": (["generate", "x", "--target", "TINY", "--dtype", "bfloat61"], "'bfloat16'"),
    "unknown device": (["generate", "x", "--target", "TINY", "--device", "gpu"], "cuda"),
    "unknown target path": (["generate", "x", "--target", "TINY", "--target-path", "leen"], "'lean'"),
    "unknown drafter": (["generate", "x", "--target", "TINY", "--drafter", "ngrm"], "'ngram'"),
    "missing target": (["generate", "x", "--target", "./not-there"], "not-there"),
    "target without model": (["generate", "x", "--target", "EMPTY"], "config.json"),
    "wrong drafter": (["generate", "x", "--target", "TINY", "--drafter", embedded.EMBEDDED_DRAFTER], "576"),
    "no tokens": (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
    "not a number": (["generate", "x", "--max-new-tokens", "many"], "--max-new-tokens"),
    "NaN": (["generate", "x", "--temperature", "nan"], "temperature"),
    "negative": (["generate", "x", "--top-k", "-1"], "top_k"),
    "long prompt": (["generate", "x" * 2000, "--target", "TINY", "--drafter", "none"], "1024"),
    "empty prompt": (["generate", " \n"], "empty"),
    "prompt that is no text": (["generate", "\udcff"], "UTF-8"),
    "system without template": (["generate", "x", "--target", "TINY", "--system", "y"], "template"),
    "prompts not there": (["bench", "--prompts", "gsm8", "--limit", "1"], "gsm8k"),
    "bench limit": (["bench", "--limit", "0"], "--limit"),
    "bench policy": (["bench", "--policies", "dflash,bastoin"], "'bastion'"),
    "contexts": (["calibrate", "--contexts", "0,x"], "--contexts"),
    "contexts below zero": (["calibrate", "--contexts", "-5"], "--contexts"),
    "calibrate width": (["calibrate", "--max-width", "1"], "--max-width"),
    "doctor device": (["doctor", "--device", "gpu"], "cuda"),
    "doctor target": (["doctor", "--target", "EMPTY"], "EMPTY"),
    "demo limit": (["demo", "--limit", "0"], "--limit"),
    "distill tokens": (["distill", "--out", "OUT", "--tokens", "0"], "--tokens"),
    "distill temperature": (["distill", "--out", "OUT", "--tokens", "9", "--temperature", "0,warm"], "--temperature"),
    "distill below zero": (["distill", "--out", "OUT", "--tokens", "9", "--temperature", "-1"], "--temperature"),
    "distill without template": (["distill", "--out", "OUT", "--tokens", "9", "--target", "TINY"], "chat template"),
    "distill into a file": (["distill", "--out", "FILE", "--tokens", "9", "--target", "TINY"], "--out"),
    "distill prompts": (["distill", "--out", "OUT", "--tokens", "9", "--target", "TINY", "--prompts", "gsm8"], "gsm8k"),
    "distill self and raw": (
        ["distill", "--out", "OUT", "--tokens", "9", "--target", "TINY", "--prompts", "self", "--raw"],
        "--raw",
    ),
    "train without data": (["train", "--data", "EMPTY", "--out", "OUT", "--target", "TINY"], "distill"),
    "train objective": (["train", "--data", "DATA", "--out", "OUT", "--objective", "dflush"], "'dflash'"),
    "train head": (["train", "--data", "DATA", "--out", "OUT", "--head-tokens", "many"], "--head-tokens"),
    "train layers": (["train", "--data", "DATA", "--out", "OUT", "--layers", "0"], "--layers"),
    "train window": (["train", "--data", "DATA", "--out", "OUT", "--window", "8"], "--window"),
    "train rate": (["train", "--data", "DATA", "--out", "OUT", "--lr", "nan"], "--lr"),
    "train into a file": (["train", "--data", "DATA", "--out", "FILE"], "--out"),
    "eval-drafter policy": (["eval-drafter", "--drafter", "ngram", "--policies", "ddtre:8"], "'ddtree'"),
    "eval-drafter none": (["eval-drafter", "--drafter", "none"], "name a drafter"),
    "eval-drafter no policy": (["eval-drafter", "--drafter", "ngram", "--policies", ","], "--policies"),
    "eval-drafter drafter": (["eval-drafter", "--drafter", "./not-there", "--target", "TINY"], "not-there"),
    "eval-drafter thinking": (
        ["eval-drafter", "--drafter", "ngram", "--target", "TINY", "--thinking", "on"],
        "chat template",
    ),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_sentence(run: Run, folder: Path, tmp_path: Path, args: list, expected: str) -> None:
    empty = tmp_path / "EMPTY"
    empty.mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "DATA").mkdir()
    (tmp_path / "DATA" / "data.json").touch()
    places = {
        "DATA": tmp_path / "DATA",
        "TINY": folder,
        "EMPTY": empty,
        "OUT": tmp_path / "OUT",
        "FILE": tmp_path / "FILE",
    }
    result = run(*(places.get(arg, arg) for arg in args))
    assert_one_sentence(result)
    assert expected in result[2]


NAMES = [
    ["chat", "--policy", "ddtre:8"],
    ["generate", "x", "--drafter", "ngram+recyclin"],
    ["generate", "x", "--temperature", "nan"],
    ["serve", "--target", "./not-there"],
    ["bench", "--policies", "dflash,bastoin"],
    ["bench", "serve", "--dtype", "bfloat61"],
    ["bench", "grid", "--out", "x", "gsm8"],
    ["eval-drafter", "--drafter", "ngram", "--prompts", "gsm8"],
    ["eval-drafter", "--drafter", "shiped"],
    ["distill", "--out", "x", "--tokens", "1", "--prompts", "self", "--prompts", "gsm8"],
    ["train", "--data", "x", "--out", "x", "--target", "./not-there"],
    ["train", "--data", ".", "--out", "x"],
    ["batch", "--in", "not-there", "--out", "x"],
    ["simulate", "--trace", "not-there"],
    ["report", "not-there"],
]


def test_mistakes_in_names_do_not_wait_for_torch() -> None:
    script = f"""
import sys
from draftwood import cli
for args in {NAMES!r}:
    try:
        cli.main(args)
    except SystemExit as end:
        assert end.code == 2, args
    assert not {{"torch", "transformers"}} & set(sys.modules), args
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(NAMES)


numbers = st.floats() | st.integers(-(10**20), 10**20) | st.just("x")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flags=st.dictionaries(
        st.sampled_from(["--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed"]),
        numbers,
    ),
    prompt=st.text(max_size=20).filter(lambda text: text != "-"),  # which stands for standard input
)
def test_any_value_gives_text_or_one_sentence(run: Run, loaded: LLM, flags: dict[str, object], prompt: str) -> None:
    options = [f"{name}={value}" for name, value in flags.items()]
    result = run("generate", "--max-new-tokens", "3", "--json", *options, "--", prompt)
    if result[0] == 0:
        answer = json.loads(result[1].splitlines()[-1])
        assert 1 <= len(answer["token_ids"]) <= 3
    else:
        assert_one_sentence(result)


# --- generate ------------------------------------------------------------------------------------------------
def test_text_is_what_the_library_writes(run: Run, loaded: LLM) -> None:
    code, out, err = run("generate", "to be or not to be", "--max-new-tokens", "12", "--policy", "ddtree:4")
    assert (code, err) == (0, "")
    assert out == loaded.generate("to be or not to be", max_new_tokens=12).text + "\n"


def test_loading_is_silent(run: Run, folder: Path) -> None:
    code, _, err = run("generate", "x", "--target", folder, "--drafter", "none", "--max-new-tokens", "2")
    assert (code, err) == (0, "")


def test_json_is_the_last_line(run: Run, loaded: LLM) -> None:
    code, out, err = run("generate", "abcabcabc", "--max-new-tokens", "8", "--json", "--show-tree")
    assert code == 0
    answer = json.loads(out.splitlines()[-1])
    expected = loaded.generate("abcabcabc", max_new_tokens=8)
    assert answer["text"] == expected.text and answer["token_ids"] == expected.token_ids
    assert answer.keys() >= {"tau", "rounds", "seconds_by_verb", "tokens_per_s", "policy", "widths"}
    assert "bonus" in err  # the tree does not get between


@pytest.mark.parametrize("prompt", [["-"], []], ids=["dash", "piped"])
def test_prompt_from_stdin(run: Run, loaded: LLM, monkeypatch: pytest.MonkeyPatch, prompt: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    code, out, _ = run("generate", *prompt, "--max-new-tokens", "4")
    assert code == 0 and out == loaded.generate("from a pipe", max_new_tokens=4).text + "\n"


def test_no_prompt_in_a_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    result = run("generate")
    assert_one_sentence(result)
    assert "No prompt" in result[2]


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_no_prompt_where_stdin_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch, prompt: list[str]) -> None:
    monkeypatch.setattr("sys.stdin", None)
    result = run("generate", *prompt)
    assert_one_sentence(result)
    assert "No prompt" in result[2]


def test_stdin_that_is_no_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), encoding="utf-8"))
    assert_one_sentence(run("generate", "-"))


def test_ctrl_c_keeps_the_partial_text(run: Run, loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream) -> Iterator[Piece]:
        for count, piece in enumerate(stream._pieces):
            if count == 3:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr("draftwood.llm.Stream.__iter__", interrupted)
    code, out, err = run("generate", "abc", "--max-new-tokens", "20", "--json")
    answer = json.loads(out.splitlines()[-1])
    assert (code, err) == (130, "")
    assert answer["finish_reason"] == "abandoned"
    monkeypatch.undo()
    full = loaded.generate("abc", max_new_tokens=20)
    assert full.token_ids[:3] == answer["token_ids"][:3] and len(answer["token_ids"]) < 20
    assert full.text.startswith(answer["text"]) and answer["text"]


def test_ctrl_c_while_loading(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftwood.llm.load", interrupted)
    assert run("generate", "x") == (130, "", "")


# --- what it looks like --------------------------------------------------------------------------------------
def screen(**options: object) -> tuple[cli_show.Screen, io.StringIO]:
    file = io.StringIO()
    return cli_show.Screen(Console(file=file, highlight=False, **options), True), file


def test_draft_and_bonus_tokens_look_different_in_a_terminal() -> None:
    written = []
    for origin in ("draft", "bonus"):
        terminal, file = screen(force_terminal=True, color_system="standard", width=8)
        for text in ("a rather long ", "[bold]piece\n"):
            terminal.write(Piece(text, origin, (1,)))
        written.append(file.getvalue())
    assert written[0] != written[1]
    assert all("a rather long " in text and "[bold]piece" in text for text in written)


def test_without_a_terminal_the_text_is_untouched() -> None:
    pipe, file = screen()
    for text in ("[bold]", " a\t\n\n", "b  "):
        pipe.write(Piece(text, "draft", (1,)))
    assert file.getvalue() == "[bold] a\t\n\nb  "


def test_a_tree_is_drawn_with_its_path_and_bonus() -> None:
    tree = Tree(
        np.array([97, 98, 99, 100]), np.array([-1, 0, 0, 1]), np.array([0, 1, 1, 2]),
        np.array([1, 0.5, 0.25, 0.125], np.float32),
    )  # fmt: skip
    terminal, file = screen(width=60)
    terminal.console.print(cli_show.draw(tree, [1, 3], 65, LetterTokenizer()))
    lines = file.getvalue().splitlines()
    assert [("✓" in line) for line in lines] == [False, True, True, False, False]
    assert [next(c for c in "abcdA" if f"'{c}'" in line) for line in lines] == list("abdAc")
    assert "bonus" in lines[3] and "0.125" in lines[2]
    assert isinstance(cli_show.draw(None, [], None, LetterTokenizer()), str)


class LetterTokenizer:
    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


# --- doctor --------------------------------------------------------------------------------------------------
def test_doctor_counts_the_weights_that_a_token_reads(run: Run, folder: Path, llm: LLM) -> None:
    assert doctor.weight_bytes(str(folder), torch.float32) == llm.target.weight_bytes
    code, out, _ = run("doctor", "--target", folder, "--json")
    report = json.loads(out)
    assert code == 0 and report["dtype"] in ("bfloat16", "float32") and report["reason"]
    assert report["needs"]["tokens_per_s"] == pytest.approx(1e10 / report["needs"]["bytes_per_token"])


def test_doctor_shows_how_far_predictions_were_off(run: Run, isolated_home: None, folder: Path) -> None:
    from draftwood.config import config

    write_json(config().profiles / "learned-x.json", {"of": "some target", "errors": {"verify": [0.021, 0.08]}})
    write_json(config().profiles / "learned-y.json", {"of": "no rounds yet", "errors": {}})
    _, out, _ = run("doctor", "--target", folder)
    flat = " ".join(out.split())
    assert "some target: predictions off by verify 2.1% (p90 8%)" in flat and "no rounds yet" not in flat
    assert re.search(r"\d profiles", flat) and "learned-x" not in flat, "of profiles it tells how many"


def test_doctor_shows_the_latest_profiles_and_counts_the_others(tmp_path: Path) -> None:
    for day in range(6):
        file = tmp_path / f"learned-{9 - day}.json"
        write_json(file, {"of": f"day {day}", "errors": {"round": [0.05, 0.2]}})
        os.utime(file, (day, day))
    told = doctor.latency_lines(doctor.latency_errors(tmp_path))
    assert [line.split(":")[0] for line in told[:-1]] == ["day 5", "day 4", "day 3"] and "3 before" in told[-1]


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "is_whole", lambda folder: False)  # other tests may have converted the model
    code, out, _ = run("doctor")
    assert code == 0
    assert "draftwood[datasets]" in out and "draftwood[embedded]" in out
    assert embedded.HUB_NAME in out


def test_doctor_says_which_attention_runs_and_why(run: Run, folder: Path) -> None:
    code, out, _ = run("doctor", "--device", "cpu", "--target", folder, "--json")
    assert code == 0
    triton, cascade, sdpa = json.loads(out)["attention"].items()
    assert triton[0] == "triton" and "CUDA" in triton[1] and cascade[0] == "cascade" and sdpa == ("sdpa", None)
    assert doctor.attention_line(dict([triton, sdpa])) == f"sdpa (triton: {triton[1]})"
    assert doctor.attention_line({"triton": None}) == "triton"


@pytest.mark.parametrize(
    ("seconds", "allowed", "said"),
    [
        ({8: 1.0, 4: 0.9, 1: 4.0}, 2.5, "^8$"),
        ({8: 2.6, 4: 1.0, 1: 1.5}, 8.0, "^8, but steps are 2.6 times as quick with 4: other .* set OMP_NUM_THREADS=4 "),
        ({8: 2.6, 2: 1.0, 1: 1.5}, 2.5, "^8, .* with 2: the container may use 2.5 cores; set OMP_NUM_THREADS=2$"),
        ({1: 1.0}, 0.5, "^1$"),
    ],
)
def test_doctor_says_when_fewer_threads_would_be_quicker(seconds: dict[int, float], allowed: float, said: str) -> None:
    assert re.search(said, threads.told(seconds, allowed))


def test_doctor_leaves_as_many_threads_as_there_were(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert set(threads.measure(torch.float32)) == {3, 2, 1} and torch.get_num_threads() == 3
        with monkeypatch.context() as limited:
            limited.setattr(threads.container, "cores", lambda: 4.0)
            torch.set_num_threads(10)
            assert set(threads.measure(torch.float32)) == {10, 5, 4, 1}
            torch.set_num_threads(3)
        _, out, _ = run("doctor", "--device", "cpu", "--target", folder, "--json")
        assert json.loads(out)["threads"].startswith("3")
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that takes nothing is Linux's")
@pytest.mark.parametrize("command", [["--help"], ["generate", "--help"]])
def test_a_full_disk_is_one_sentence(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "draftwood", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == cli.BAD_INPUT
    assert re.fullmatch(
        r"draftwood: Nothing more can be written \(No space .*\); make room, and try again\.\n", done.stderr
    )


def test_nobody_reading_is_no_mistake() -> None:
    command = [sys.executable, "-m", "draftwood", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == cli.NOBODY_READS


def test_a_closed_stdout_is_no_mistake() -> None:
    closed = ["sh", "-c", f"{sys.executable} -m draftwood --help >&-"]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_the_version_is_told(run: Run) -> None:
    assert run("--version") == (0, f"draftwood {__version__}\n", "")


def test_doctor_knows_home_where_the_shell_left_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    code, out, _ = run("doctor", f"--target=~/{folder.name}", "--json")
    assert code == 0 and json.loads(out)["needs"]["model"] == str(folder)


def test_doctor_tells_a_damaged_conversion(tmp_path: Path) -> None:
    assert doctor.embedded_state(tmp_path, whole=True) == f"converted, in {tmp_path}"
    assert "damaged" in doctor.embedded_state(tmp_path, whole=False)
    assert "damaged" not in doctor.embedded_state(tmp_path / "none", whole=False)


@pytest.mark.parametrize(
    ("fp32", "bf16", "dtype"),
    [(3.0, 1.0, torch.bfloat16), (1.1, 1.0, torch.float32), (1.0, 30.0, torch.float32)],
)
def test_dtype_is_what_measures_faster(
    monkeypatch: pytest.MonkeyPatch, fp32: float, bf16: float, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(precision, "step_seconds", lambda: {"float32": fp32, "bfloat16": bf16})
    chosen = precision.choose_dtype("cpu")
    assert chosen.dtype == dtype and f"{fp32 / bf16:.2g}" in chosen.reason


def test_a_dtype_once_chosen_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or a near-tie would give another text after a restart."""
    for fp32, bf16 in ((3.0, 1.0), (1.0, 3.0)):
        monkeypatch.setattr(precision, "step_seconds", lambda: {"float32": fp32, "bfloat16": bf16})  # noqa: B023
        assert precision.choose_dtype("cpu", tmp_path).dtype == torch.bfloat16
    assert precision.choose_dtype("cpu").dtype == torch.float32


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert precision.choose_dtype("cuda").dtype == dtype


# --- calibrate -----------------------------------------------------------------------------------------------
def test_calibrate_writes_a_profile_that_caddtree_reads(run: Run, loaded: LLM) -> None:
    code, out, _ = run("calibrate", "--max-width", "6", "--contexts", "20,0")
    assert code == 0
    path = Path(out.strip())
    assert path == offline.offline_file(loaded.target, loaded.drafter, loaded.engine.latency.machine)
    profile = Profile.load(path)
    assert profile is not None and profile.widths == (1, 2, 4, 6) and profile.contexts == (0, 20)
    assert len(ConvexCosts.of(profile).costs(8, 10).verify_s) == 9


def test_calibrate_refuses_what_does_not_fit(run: Run, loaded: LLM, tmp_path: Path) -> None:
    assert_one_sentence(run("calibrate", "--contexts", "1000", "--max-width", "64"))
    (tmp_path / "file").touch()
    assert_one_sentence(run("calibrate", "--contexts", "0", "--max-width", "2", "--out", tmp_path / "file" / "x"))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 12])
def test_the_measured_tree_is_a_tree(width: int) -> None:
    tree = offline.binary_tree(width)
    assert len(tree.tokens) == width and tree.parents[0] == -1 and tree.mass[0] == 1
    for node in range(1, width):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
    assert (np.diff(tree.mass) <= 0).all()
    assert tree.is_chain == (width < 3)


# --- demo ----------------------------------------------------------------------------------------------------
def test_the_race_is_fair(llm: LLM) -> None:
    """Whoever has used less time goes next, so at no moment is one ahead by more than its last round."""
    lanes = [Lane.of(llm, name, "abcabc", 12, name) for name in ("autoregressive", "ddtree:4")]
    before = [0.0, 0.0]
    for _ in race(lanes):
        now = [lane.seconds for lane in lanes]
        (moved,) = [i for i in range(2) if now[i] != before[i]]
        assert before[moved] <= before[1 - moved] or lanes[1 - moved].done
        before = now
    assert lanes[0].text.plain == lanes[1].text.plain == llm.generate("abcabc", max_new_tokens=12).text
    assert all(lane.done and lane.tokens == 12 for lane in lanes)


def test_demo_ends_with_the_table(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(llm, limit=1, max_new_tokens=3)
    out = capsys.readouterr().out
    assert "plain decoding" in out
    assert all(name in out for name in (TRANSFORMERS, PLAIN, *POLICIES))


def test_demo_in_a_terminal(llm: LLM) -> None:
    terminal, file = screen(force_terminal=True, width=60, height=30)
    lanes = [Lane.of(llm, name, "abcabc", 6, name) for name in ("autoregressive", "ddtree:4")]
    show_race(terminal.console, lanes)
    assert "autoregressive" in file.getvalue() and "accepted draft tokens" in file.getvalue()


def test_errors_are_errors_of_the_library(tmp_path: Path) -> None:
    """Python users catch the same classes that the command line turns into sentences."""
    with pytest.raises(BadModel):
        doctor.weight_bytes("./not-there", torch.float32)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": "x"}))
    with pytest.raises(BadModel, match=r"'num_hidden_layers':? .*x"):  # and not the first line alone, which ends there
        doctor.weight_bytes(str(tmp_path), torch.float32)
    with pytest.raises(BadInput):
        cli.parse_contexts("")
