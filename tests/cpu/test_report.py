"""The report: every figure from one trace, on a page that needs no other file; refusals in a sentence."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from draftwood.bench.figures_trace import (
    BUDGETS,
    Story,
    conditional,
    confidences,
    draw_budgets,
    draw_width,
    oracle,
    positions,
    prediction_series,
    speedup_of,
)
from draftwood.bench.page import FIGURES, page_lines, run_report
from draftwood.bench.prices import recorded_rounds
from draftwood.errors import BadInput
from draftwood.footprint import Footprint
from draftwood.latency import Machine
from draftwood.policies.base import Costs
from draftwood.recording import Answer, Header, Trace
from draftwood.registry import policy
from draftwood.simulate import RECORD, replay, scripts
from draftwood.trace import Round
from draftwood.tree import Lattice

MACHINE = Machine("made up", 1e12, 1e10, 1e-6)
PARTS = {"draft": 0.004, "verify": 0.02, "observe": 0.001}


class Rising:
    """A node costs a twentieth of a step, so that trees are of few sizes."""

    def costs(self, n_max: int, context: int, positions: int) -> Costs:
        return Costs(1.0, 0.2, np.zeros(1 + n_max), 1 + 0.05 * np.arange(1 + n_max))


def a_record(prompt: str, dataset: str, rng: np.random.Generator, length: int = 60) -> Answer:
    """A text of 9 tokens drawn evenly, and drafts that put the right one first half of the time."""
    tokens = rng.integers(0, 9, length + 12).tolist()
    rounds = []
    for i in range(length - 1):
        rows = []
        for d in range(6):
            order = rng.permutation(9)
            if rng.random() < 0.5:
                order = np.append(tokens[i + 1 + d], order[order != tokens[i + 1 + d]])
            rows.append(order[:4])
        logp = np.log(np.tile([0.55, 0.2, 0.1, 0.05], (6, 1))).astype(np.float32)
        draft = Lattice(np.array(rows), logp)
        rounds.append(Round(5 + i, 0, True, np.zeros(0, np.float32), np.zeros(0, np.int64), [], PARTS, {}, 0, draft))
    return Answer(prompt, dataset, RECORD, 0.0, 5, tokens[:length], 0.1, 2.0, rounds)


def ran(record: Answer, spec: str, seconds: float) -> Answer:
    rounds = replay(policy(spec), scripts([record]), Rising()).rounds
    plain = {part: seconds for part, seconds in PARTS.items() if part != "draft"}
    timed = [replace(r, seconds=PARTS if r.drafted else plain) for r in rounds]
    return Answer(record.prompt, record.dataset, spec, 0.0, 5, record.tokens, 0.1, seconds, timed)


@pytest.fixture(scope="module")
def trace() -> Trace:
    rng = np.random.default_rng(0)
    records = [a_record(f"{kind}/{i}", kind, rng) for kind in ("maths", "code") for i in range(2)]
    measured = [ran(r, spec, s) for r in records for spec, s in (("autoregressive", 2.0), ("bastion", 1.0))]
    facts = {
        "machine": asdict(MACHINE),
        "footprint": asdict(Footprint(2e8, 2, 64, 4, 1e4, 80)),
        "draft_work": {"0": [1e7, 1e7, 20], "4096": [2e7, 2e7, 20]},
    }
    return Trace(Header("target", "<drafter>", facts), [*records, *measured])


def test_a_report_is_whole_by_itself(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "trace.jsonl.gz")
    page = run_report(tmp_path).read_text()
    assert page.count("data:image/png;base64,") == len(FIGURES)
    assert not re.findall(r"(?:src|href)='(?!data:)", page) and "&lt;drafter&gt;" in page
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in FIGURES)


def test_prompts_are_counted_without_their_turns(trace: Trace) -> None:
    def counted(**named: object) -> bool:
        two = [trace.answers[0], replace(trace.answers[0], **named)]
        return any(
            "<p>2 prompts " in line for line in islice(page_lines(Story(replace(trace, answers=two)), Path()), 3)
        )

    assert counted(prompt=f"{trace.answers[0].prompt}#1") and not counted(turn=1)


def test_figures_show_what_their_captions_say(trace: Trace) -> None:
    story = Story(trace)
    assert speedup_of(trace.answers, "bastion") == pytest.approx(2.0)
    chain = positions(story)["likeliest chain"]
    assert chain[0] == pytest.approx(0.5 + 0.5 / 9, abs=0.12)
    best = max(p.tokens_per_s for p in story.sweep.values())
    assert oracle(story) >= 0.99 * best, "each set's own best budget cannot lose to one budget for all"


def test_positions_that_were_not_drafted_are_not_wrong() -> None:
    short = Round(0, 2, True, np.zeros(2), np.array([1, 2]), [1, 2], {}, {})
    long = Round(0, 3, True, np.zeros(3), np.array([1, 2, 3]), [1, 2], {}, {})
    assert list(conditional([short] * 6)) == [1, 1]
    assert list(conditional([short] * 6 + [long] * 6)) == [1, 1, 0]


def test_confidence_is_calibrated_before_it_is_learned_from(trace: Trace) -> None:
    found = confidences(Story(trace))
    assert found["calibrated"].count.sum() == found["drafter's own"].count.sum() > 0


def test_online_predictions_beat_the_roofline(trace: Trace) -> None:
    rounds = [r for r, _ in recorded_rounds(trace)]
    medians = {name: np.median(errors) for name, errors in prediction_series(trace, rounds).items()}
    assert medians["online"] < 0.5 * medians["uncalibrated"]


def test_no_draft_is_predicted_where_no_drafter_ran(trace: Trace) -> None:
    rounds = [r for r, _ in recorded_rounds(trace)]
    half = len(rounds) // 2
    free = [replace(r, positions=0, seconds={**r.seconds, "draft": 0.0}) for r in rounds[half:] if r.drafted]
    medians = {name: np.median(e) for name, e in prediction_series(trace, [*rounds[: len(free)], *free]).items()}
    assert medians["calibrated on the first half"] < 0.05


def test_prices_of_widths_that_never_ran_are_hollow(trace: Trace) -> None:
    from matplotlib.figure import Figure

    story = Story(trace)
    assert 1 < story.widest == max(r.width for a in trace.answers for r in a.rounds) < 1 + max(BUDGETS)
    for drawing, root in ((draw_budgets, 1), (draw_width, 0)):
        figure = Figure()
        drawing(figure.subplots(), story)
        hollow = [line for axes in figure.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
        assert [min(line.get_xdata()) + root > story.widest for line in hollow] == [True]
        assert sum(1 + n > story.widest for n in BUDGETS) == len(hollow[0].get_xdata())


def test_a_folder_without_a_trace_or_drafts_is_refused(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--trace"):
        run_report(tmp_path)
    plain = [a for a in trace.answers if a.policy == "autoregressive"]
    Trace(trace.header, plain).save(tmp_path / "trace.jsonl.gz")
    with pytest.raises(BadInput, match="no drafts"):
        run_report(tmp_path)
