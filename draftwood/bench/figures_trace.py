"""Figures of one trace: what was measured, and what its drafts say about budgets, beams, confidence and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.acceptance import AcceptanceModel
from draftwood.bench.figures import GREYS, HATCHES, styles
from draftwood.bench.prices import Average, learned, recorded_machine, recorded_rounds, recorded_work, widest
from draftwood.bench.reliability import Reliability, reliability
from draftwood.bench.simulation import measured_rates
from draftwood.bench.stats import PLAIN
from draftwood.latency import LatencyModel
from draftwood.recording import Answer, Trace
from draftwood.registry import policy
from draftwood.simulate import RECORD, Replayed, Script, replay, scripts
from draftwood.trace import Round, tau

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BEAMS = ((2, 2), (2, 4), (3, 5), (4, 6), (4, 10), (4, 15))
TREE = 32  # nodes of the trees whose confidence is compared with what happened
LEAST_ROUNDS = 5  # a width seen less often says too little about its time


@dataclass(frozen=True)
class Story:
    """A trace and what is drawn from it more than once."""

    trace: Trace

    @cached_property
    def texts(self) -> list[Script]:
        return scripts(self.trace.answers)

    @cached_property
    def model(self) -> LatencyModel:
        return learned(self.trace)

    @cached_property
    def prices(self) -> Average:
        return Average.of(self.model, self.trace)

    @cached_property
    def measured(self) -> list[str]:
        """Policies that were really run, plain decoding first, without the recording itself."""
        names = dict.fromkeys(a.policy for a in self.trace.answers)
        return sorted((n for n in names if n != RECORD), key=lambda name: name != PLAIN)

    @cached_property
    def sweep(self) -> dict[int, Replayed]:
        return {n: replay(policy(f"ddtree:{n}"), self.texts, self.prices) for n in BUDGETS}

    @cached_property
    def widest(self) -> int:
        return widest(self.trace)

    @property
    def context(self) -> int:
        """The median context of all rounds."""
        return int(np.median([r.context for a in self.trace.answers for r in a.rounds] or [0]))

    def rounds(self, name: str) -> list[Round]:
        return [r for a in self.trace.answers if a.policy == name for r in a.rounds]

    def datasets(self) -> dict[str, list[Answer]]:
        names = dict.fromkeys(a.dataset for a in self.trace.answers)
        return {name: [a for a in self.trace.answers if a.dataset == name] for name in names}


def draw_speedups(axes: Axes, story: Story) -> None:
    """BASTION's figure 1: bars by data set and policy."""
    groups = {**story.datasets(), "all": list(story.trace.answers)}
    shown = [name for name in story.measured if name != PLAIN]
    width = 0.8 / max(len(shown), 1)
    for i, name in enumerate(shown):
        heights = [speedup_of(answers, name) for answers in groups.values()]
        places = np.arange(len(groups)) + (i - (len(shown) - 1) / 2) * width
        bars = axes.bar(places, heights, width, label=name, color=GREYS[i % 8], hatch=HATCHES[i % 8], edgecolor="white")
        axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("decoding speed, × plain decoding")
    axes.margins(y=0.18)
    axes.legend(fontsize="small", ncols=4, loc="upper center")


def speedup_of(answers: Sequence[Answer], name: str) -> float:
    rates = measured_rates(answers)
    return rates.get(name, float("nan")) / rates.get(PLAIN, float("nan"))


def draw_width(axes: Axes, story: Story) -> None:
    """BASTION's figure 2: tokens a round and its time against the tokens verified."""
    one, two = styles(), axes.twinx()
    style = next(one)
    axes.plot([1 + n for n in story.sweep], [tau(p.rounds) for p in story.sweep.values()], **style, label="τ (left)")
    costs = story.prices.costs(max(BUDGETS), story.context)
    milliseconds = {1 + n: 1e3 * float(costs.verify_s[n]) for n in BUDGETS}
    _priced(two, milliseconds, story.widest, next(one), "verify, ms (right)")
    _logarithmic(axes, [1 + n for n in BUDGETS])
    axes.set_xlabel("tokens verified a round, the root included")
    axes.set_ylabel("τ: tokens written a round")
    two.set_ylabel("verify, ms")
    axes.set_ylim(bottom=1)
    two.set_ylim(bottom=0)
    axes.figure.legend(loc="outside upper center", ncols=2, fontsize="small")


def draw_beams(axes: Axes, story: Story) -> None:
    """BASTION's figure 5: best-first trees against beams of as many nodes."""
    one = styles()
    axes.plot(list(story.sweep), [tau(p.rounds) for p in story.sweep.values()], **next(one), label="best first")
    beams = [(w, d, replay(policy(f"beam:{w}x{d}"), story.texts, story.prices)) for w, d in BEAMS]
    sizes = [float(np.mean([r.n for r in p.rounds if r.drafted])) for _, _, p in beams]
    axes.plot(sizes, [tau(p.rounds) for *_, p in beams], **next(one), label="beam")
    for (w, d, p), size in zip(beams, sizes, strict=True):
        axes.annotate(f"{w}×{d}", (size, tau(p.rounds)), xytext=(2, -12), textcoords="offset points", fontsize=7)
    _logarithmic(axes, BUDGETS)
    axes.set_xlabel("nodes verified a round")
    axes.set_ylabel("τ: tokens written a round")
    axes.legend(fontsize="small")


def draw_budgets(axes: Axes, story: Story) -> None:
    """BASTION's figure 6: fixed budgets against the adaptive one and the best budget of each data set."""
    plain = replay(policy(PLAIN), story.texts, story.prices).tokens_per_s
    one = styles()
    _priced(axes, {n: p.tokens_per_s / plain for n, p in story.sweep.items()}, story.widest - 1, next(one), "ddtree:n")
    adaptive = replay(policy("bastion"), story.texts, story.prices).tokens_per_s / plain
    axes.axhline(adaptive, color="black", linestyle="-", linewidth=1.2, label=f"bastion ({adaptive:.2f})")
    best = oracle(story) / plain
    axes.axhline(best, color="black", linestyle=":", linewidth=1.2, label=f"best n for each data set ({best:.2f})")
    axes.axhline(1, color="grey", linewidth=0.8)
    _logarithmic(axes, BUDGETS)
    axes.set_xlabel("nodes verified a round")
    axes.set_ylabel("replayed speed, × plain decoding")
    axes.legend(fontsize="small")


def _priced(axes: Axes, values: Mapping[int, float], last: int, style: Mapping[str, Any], label: str) -> None:
    """A line whose markers are hollow beyond `last`, the last place that a round ran at."""
    axes.plot(list(values), list(values.values()), **style, label=label)
    unseen = {at: value for at, value in values.items() if at > last}
    if unseen:
        hollow = {**style, "linestyle": "", "markerfacecolor": "white"}
        axes.plot(list(unseen), list(unseen.values()), **hollow, label="extrapolated: no round that wide ran")


def oracle(story: Story) -> float:
    """Tokens per second if every data set ran its own best fixed budget, chosen afterwards."""
    tokens = seconds = 0.0
    for name in story.datasets():
        own = [script for script in story.texts if script.answer.dataset == name]
        played = [replay(policy(f"ddtree:{n}"), own, story.prices) for n in BUDGETS]
        best = max(played, key=lambda p: np.nan_to_num(p.tokens_per_s))
        tokens, seconds = tokens + best.tokens, seconds + best.seconds
    return tokens / seconds if seconds else float("nan")


def draw_latency(axes: Axes, story: Story) -> None:
    """BASTION's figure 7: verification as measured, as predicted from counted work alone, and as learned."""
    found: dict[int, list[float]] = {}
    for answer in story.trace.answers:
        for r in answer.rounds:
            found.setdefault(r.width, []).append(1e3 * r.seconds.get("verify", float("nan")))
    seen = {width: times for width, times in sorted(found.items()) if len(times) >= LEAST_ROUNDS}
    low, middle, high = (np.array([np.nanquantile(times, q) for times in seen.values()]) for q in (0.1, 0.5, 0.9))
    axes.errorbar(
        list(seen), middle, [middle - low, high - middle], fmt="o", color="black", markersize=4, capsize=2,
        label="measured: median, 10 to 90 %",
    )  # fmt: skip
    widest = max(seen, default=1)
    widths = np.arange(1, 1 + widest)
    sizes, draft = recorded_work(story.trace)
    prior = LatencyModel(recorded_machine(story.trace), sizes.work, draft)
    one = styles()
    for model, label in ((prior, "uncalibrated: counted work"), (story.model, "learned online")):
        curve = 1e3 * model.costs(widest - 1, story.context).verify_s
        axes.plot(widths, curve, **{**next(one), "marker": ""}, label=label)
    axes.set_xlabel("tokens verified, the root included")
    axes.set_ylabel("verify, ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def draw_errors(axes: Axes, story: Story) -> None:
    """Relative error of the whole round as it was predicted, over the later half of the trace."""
    rounds = [r for r, _ in recorded_rounds(story.trace)]
    for (label, errors), style in zip(prediction_series(story.trace, rounds).items(), styles(), strict=False):
        window = max(len(errors) // 40, 1)
        smooth = [float(np.median(errors[max(0, i - window) : i + 1])) for i in range(len(errors))]
        axes.plot(100 * np.array(smooth), **{**style, "marker": ""}, label=f"{label}: {np.median(errors):.1%}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("round")
    axes.set_ylabel("error of the round's predicted time, % (running median)")
    axes.legend(title="median of these rounds", fontsize="small", loc="best")


def prediction_series(trace: Trace, rounds: Sequence[Round]) -> dict[str, list[float]]:
    """|predicted / measured - 1| of the later half: by counted work, by a model frozen after the first half, online."""
    sizes, draft = recorded_work(trace)
    prior, frozen, online = (LatencyModel(recorded_machine(trace), sizes.work, draft) for _ in range(3))
    half = len(rounds) // 2
    for r in rounds[:half]:
        frozen.observe(r)
        online.observe(r)
    series: dict[str, list[float]] = {"uncalibrated": [], "calibrated on the first half": [], "online": []}
    for r in rounds[half:]:
        for errors, model in zip(series.values(), (prior, frozen, online), strict=True):
            said = model.predict(r.n, r.context, r.drafted, r.padding)
            errors.append(abs(sum(s for part, s in said.items() if r.asked or part != "draft") / r.total_s - 1))
        online.observe(r)
    return series


def draw_confidence(axes: Axes, story: Story) -> None:
    """BASTION's figure 9: path confidence against what happened, raw and calibrated before it was learned from."""
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for (label, found), style in zip(confidences(story).items(), styles(), strict=False):
        axes.plot(
            found.said,
            found.happened,
            **style,
            label=f"{label}: error {found.error:.4f} (by chance: {found.chance:.4f})",
        )
    axes.set_xlabel("path probability as predicted")
    axes.set_ylabel("share of these paths that were accepted")
    axes.set_aspect("equal")
    axes.legend(fontsize="small")


def confidences(story: Story) -> dict[str, Reliability]:
    said: dict[str, list[np.ndarray]] = {"drafter's own": [], "calibrated": []}
    happened: list[np.ndarray] = []
    model = AcceptanceModel()
    for r in replay(policy(f"ddtree:{TREE}"), story.texts, story.prices).rounds:
        if r.n:
            said["drafter's own"].append(r.mass)
            said["calibrated"].append(model.calibrate(r.mass, r.depths))
            happened.append(np.isin(np.arange(1, 1 + r.n), r.path))
        model.observe(r)
    if not happened:
        return {}
    return {label: reliability(np.concatenate(p), np.concatenate(happened)) for label, p in said.items()}


def draw_positions(axes: Axes, story: Story) -> None:
    """How often the draft's token was right at each position, given that all before it were."""
    one = styles()
    for label, rates in positions(story).items():
        axes.plot(range(1, 1 + len(rates)), rates, **next(one), label=label)
    axes.set_xlabel("position after the root")
    axes.set_ylabel("share of tokens accepted, if all before were")
    axes.set_ylim(0, 1.03)  # or a share of 1 would lie on the frame
    axes.set_xticks(range(1, 1 + max(map(len, positions(story).values()), default=1)))
    axes.legend(fontsize="small")


def positions(story: Story) -> Mapping[str, list[float]]:
    """Conditional acceptance of the likeliest chain and of a tree. A text's last round is left out: it was cut off."""
    shapes = {"likeliest chain": policy("dflash"), f"tree of {TREE} nodes": policy(f"ddtree:{TREE}")}
    return {
        label: list(conditional([r for text in story.texts for r in replay(rule, [text], story.prices).rounds[:-1]]))
        for label, rule in shapes.items()
    }


def conditional(rounds: Sequence[Round]) -> Iterator[float]:
    """For each position, of the rounds that were accepted up to it and have nodes beyond it, the share that went on; as
    long as there are enough rounds."""
    for d in count():
        went_on = [r.accepted > d for r in rounds if r.accepted >= d and r.depths.max(initial=0) > d]
        if len(went_on) < LEAST_ROUNDS:
            return
        yield sum(went_on) / len(went_on)


def draw_widths(axes: Axes, story: Story) -> None:
    """Which widths the adaptive policy chose, from the first round to the last."""
    for name, style in zip(_adaptive(story), styles(), strict=False):
        widths = [1 + r.n for r in story.rounds(name)]
        axes.plot(widths, **{**style, "linestyle": "", "markersize": 3, "alpha": 0.6}, label=name)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("round")
    axes.set_ylabel("tokens verified, the root included")
    if _adaptive(story):
        axes.legend(fontsize="small", loc="upper right")


def _adaptive(story: Story) -> list[str]:
    return [name for name in story.measured if len({r.n for r in story.rounds(name) if r.drafted}) > 3]


def _logarithmic(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), [str(tick) for tick in ticks], fontsize=7)
    axes.minorticks_off()
