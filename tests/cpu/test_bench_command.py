"""The bench as a command: what it prints, writes, draws and refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from draftwood.bench import environment, measure, plots, prompts, records, report, run
from draftwood.bench.measure import Settings
from draftwood.bench.options import BenchOptions
from draftwood.bench.stats import PLAIN
from draftwood.cores import Load
from draftwood.errors import BadInput, DraftwoodError
from draftwood.latency import Machine
from draftwood.recording import Trace
from draftwood.trace import VERBS
from tests.bench_cases import METHODS, TREE, FakeLLM, run_fake, some_prompts

pytestmark = pytest.mark.usefixtures("scripted_transformers")


def test_the_last_line_of_stdout_is_the_summary(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    returned = run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=4, out=tmp_path))
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert printed == json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(returned))
    wanted = {*measure.HEADLINES, "end_to_end_tokens_per_s", "widths", "verb_ms", "host_share"}
    assert set(printed["policies"]) == set(METHODS) and wanted <= set(printed["policies"][TREE])
    assert printed["ceiling"]["plain_tokens_per_s"] == pytest.approx(2e10 / 1e9)
    assert printed["prompt_set"] == {"prompts": 4, "sha256": prompts.fingerprint(prompts.load_prompts([], 4))}
    assert {"settings", "environment", "memory", "what_if", "datasets"} <= set(printed)


def test_a_ceiling_that_plain_decoding_passes_is_measured_again(monkeypatch) -> None:
    monkeypatch.setattr(run.probe, "probe", lambda device, dtype: Machine("here", 1e12, 3e10, 1.0))
    llm = FakeLLM()
    assert run.ceiling(llm, 0, reached=19.9)["plain_tokens_per_s"] == pytest.approx(20)
    assert run.ceiling(llm, 0, reached=20.1)["bandwidth_bytes_per_s"] == 3e10


def test_a_trace_holds_every_answer_of_ours_and_one_that_drafts_everywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=2, out=tmp_path, trace=True, json=True))
    trace = Trace.load(tmp_path / records.TRACE)
    assert sorted(a.policy for a in trace.answers) == sorted([PLAIN, TREE, "record"] * 2)
    assert trace.header.facts["footprint"]["layers"] == 2 and trace.header.facts["machine"]["peak"] == 1e12
    assert all(list(a.tokens) == list(range(20)) and len(a.rounds) == 1 for a in trace.answers)
    with pytest.raises(BadInput, match="--out"):
        BenchOptions(trace=True)
    run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=2, out=tmp_path, json=True))
    assert not (tmp_path / records.TRACE).exists(), "it is another run's, which a report would draw as this one's"


def test_json_alone_leaves_stdout_to_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=1, json=True))
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(("taken", "told"), [(0.93, True), (0.1, False), (None, False)])
def test_a_neighbour_that_slowed_it_down_is_told(taken: float | None, told: bool, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM())
    monkeypatch.setattr(Load, "others", lambda self: taken)
    facts = run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=4, json=True))
    assert facts["environment"]["cores_of_others"] == taken
    assert ("Other programs took 0.9 of " in capsys.readouterr().err) == told


def test_an_interrupted_command_writes_what_it_has_and_passes_the_interrupt_on(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: FakeLLM(interrupt_at=3 + 3 + 2))
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(BenchOptions(policies=[TREE], max_new_tokens=20, limit=4, out=tmp_path))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["partial"] and written["policies"][TREE]["prompts"] == 1
    assert "Interrupted" in capsys.readouterr().err


def test_the_tables_show_every_method() -> None:
    summary = run_fake(FakeLLM())
    policies = {name: replace(stats, ties=[0.5, 1.5]) for name, stats in summary.policies.items()}
    against = {"all": {f"{TREE}@rival": {"speed": 1.2, "speed_interval": [1.1, 1.3], "tau": 3, "tau_interval": [2, 4]}}}
    ceiling = {"plain_tokens_per_s": 9.0, "bytes_per_token": 1e6, "bandwidth_bytes_per_s": 1e9}
    console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print_tables(console, policies, summary.datasets, summary.what_if, ceiling, against)
    text = console.export_text()
    assert all(name in text for name in METHODS) and "6/6" in text and "4.00" in text
    assert f"{TREE} 1.5 (2 texts)" in text and f"{TREE}@rival" in text and "1.20" in text


# --- files and plots -----------------------------------------------------------------------------------------


def test_runs_and_rounds_are_on_disk_turn_by_turn(tmp_path) -> None:
    folder = tmp_path / "deep" / "out"
    records.check_writable(folder)
    with records.recording(folder) as finished:
        summary = measure.measure(FakeLLM(), some_prompts(2), [TREE], Settings(20), finished=finished)  # type: ignore[arg-type]
        runs = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
        assert len(runs) == 2 * len(METHODS)  # flushed before the end
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [r["rounds"] for r in runs if r["method"] == TREE] == [1, 1]
    assert {(r["prompt"], r["policy"], r["round"]) for r in rounds} == {
        (p, m, 0) for p in ("p0", "p1") for m in (PLAIN, TREE)
    }
    records.write_summary(folder, summary.to_json())
    assert json.loads((folder / "summary.json").read_text())["policies"][TREE]["prompts"] == 2


def test_a_run_that_fails_leaves_no_earlier_figures_and_says_itself_why(tmp_path) -> None:
    for name in records.OF_A_RUN:
        (tmp_path / name).touch()
    with pytest.raises(OSError, match="a model's file"), records.recording(tmp_path):
        raise OSError("a model's file is gone")
    assert {path.name for path in tmp_path.iterdir()} == {"runs.jsonl", "rounds.jsonl"}


def test_an_output_folder_that_cannot_be_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match=r"--out .*file.*name another folder"):
            records.check_writable(folder)
    records.check_writable(None)


def test_plots_are_written_or_their_absence_explained(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.bench.plots import save_plots

    summary = run_fake(FakeLLM())
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in save_plots(summary.policies, tmp_path)
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    save_plots(summary.policies, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"speedup.png", "rounds.png", "widths.png"}


def test_plots_can_be_read_in_grey_and_widths_that_none_ran_at_are_zeros() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    policies = run_fake(FakeLLM()).policies
    policies = {
        name: replace(s, rounds=4, widths={1: 1, 9: 3}, verb_ms=dict.fromkeys(VERBS, 1.0))
        for name, s in policies.items()
    }
    widths, rounds = figure.subplots(1, 2)
    plots.draw_widths(widths, policies)
    plots.draw_rounds(rounds, policies)
    assert all(list(line.get_ydata()) == [0.25, *[0] * 7, 0.75] for line in widths.lines)
    assert len({(line.get_marker(), line.get_linestyle()) for line in widths.lines}) == len(policies)
    assert len({bars[0].get_hatch() for bars in rounds.containers}) == len(VERBS)


# --- environment and options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "told"), [("/x/bin/draftwood", "draftwood"), ("/x/draftwood/__main__.py", "python -m draftwood")]
)
def test_a_command_is_told_as_it_was_typed(called: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [called, "bench", "--out", "a b"])
    assert environment.environment()["command"] == f"{told} bench --out 'a b'"


def test_the_environment_is_json_and_names_what_it_ran_on(tmp_path) -> None:
    facts = json.loads(json.dumps(environment.environment()))
    assert facts["versions"]["torch"] in torch.__version__ or torch.__version__ in facts["versions"]["torch"]
    assert facts["cores"] >= 1 and facts["command"] and facts["date"].endswith("+00:00")
    assert environment.commit(tmp_path) is None
    assert (environment.peak_memory()["peak_resident_bytes"] or 0) > 1e6


def test_mistakes_are_found_before_a_model_is_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "load", lambda *_, **__: pytest.fail("loaded a model"))
    (tmp_path / "file").write_text("")
    for options in (
        {"policies": ["bastian"]},
        {"out": tmp_path / "file"},
        {"prompts": [str(tmp_path / "absent.jsonl")]},
        {"temperature": float("nan")},
    ):
        with pytest.raises(BadInput):
            run.run_bench(BenchOptions(**options))


def test_a_trace_of_several_drafters_is_refused(tmp_path) -> None:
    with pytest.raises(BadInput, match="--against"):
        BenchOptions(against=["ngram"], trace=True, out=tmp_path)


@pytest.mark.parametrize("bad", [{"max_new_tokens": 1}, {"max_new_tokens": -3}, {"limit": 0}])
def test_numbers_that_cannot_be_used_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(DraftwoodError, match=str(next(iter(bad.values())))):
        BenchOptions(**bad)  # type: ignore[arg-type]
