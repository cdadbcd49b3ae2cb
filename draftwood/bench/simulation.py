"""`draftwood simulate`: recorded drafts replayed under every policy and on every machine that was asked for."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from draftwood import registry
from draftwood.bench.branches import Branch, branches
from draftwood.bench.figures import save_figures
from draftwood.bench.figures_simulated import draw_pareto
from draftwood.bench.loads import NOBODY, Crowd, Load, load_table
from draftwood.bench.prices import Average, learned, recorded_machine, recorded_work, widest
from draftwood.bench.records import check_writable, writing
from draftwood.bench.report import new_table, number, percent
from draftwood.bench.stats import PLAIN, jsonable, quotient
from draftwood.errors import BadInput
from draftwood.footprint import Footprint
from draftwood.hardware import (
    Hardware,
    Modelled,
    draft_work,
    drafts_work,
    footprint,
    hardware,
    target_config,
    uncompiled,
)
from draftwood.latency import LatencyModel, Work
from draftwood.policies.base import Policy
from draftwood.recording import Answer, Trace
from draftwood.simulate import Prices, Replayed, Script, replay, scripts
from draftwood.trace import tau

HERE = "this"  # the machine that the trace was recorded on


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy on one machine."""

    hardware: str
    policy: str
    tokens_per_s: float
    speedup: float  # over plain decoding on the same machine
    tau: float
    mean_width: float  # tokens of the target run a round, the root included
    work: float  # tokens of the target run for each token written
    drafted: float  # share of rounds
    rounds: int
    skipped: float  # share of the text that no recorded draft could start at
    clipped: float  # share of rounds that may have wanted more candidates than were recorded
    measured: float  # tokens per second of the same policy when the trace was made; NaN if it was not run there
    unseen: float = 0.0  # share of rounds wider than any recorded one, if prices are learned from these: extrapolated
    foretold: float = math.nan  # tokens per second without what the rounds of this policy itself recorded

    @property
    def error(self) -> float:
        """How far the simulation is off what was measured."""
        return self.tokens_per_s / self.measured - 1

    @property
    def error_foretold(self) -> float:
        """How far it is off if it knows the rounds of other policies alone, as for a policy that never ran."""
        return self.foretold / self.measured - 1


@dataclass(frozen=True, slots=True)
class Simulation:
    cells: list[Cell]
    rounds_per_s: float  # replayed rounds per second of this program's own time
    branches: dict[str, Branch]  # what the drafts knew on the spine and after a sibling
    loads: list[Load] = field(default_factory=list)  # of many users, if asked for

    def to_json(self) -> dict[str, Any]:
        names = (*Cell.__slots__, "error", "error_foretold")
        cells = [{name: getattr(c, name) for name in names} for c in self.cells]
        known = {where: branch.to_json() for where, branch in self.branches.items()}
        full = {"cells": cells, "branches": known, "rounds_per_s": self.rounds_per_s}
        if self.loads:
            full["loads"] = [load.to_json() for load in self.loads]
        return dict(jsonable(full))


def simulate(trace: Trace, policies: Sequence[str], machines: Sequence[str], config: str | None = None) -> Simulation:
    """Replay every policy on every machine, plain decoding first.

    Raises BadInput for an unknown policy, machine or config, and for a trace without drafts.
    """
    rules = {spec: registry.policy(spec) for spec in [PLAIN, *policies]}
    texts = scripts(trace.answers)
    if not any(script.drafts for script in texts):
        raise BadInput("The trace holds no drafts; record one with a drafter: draftwood bench --trace --out DIR.")
    cells: list[Cell] = []
    priced = {name: prices_of(trace, name, config) for name in machines}
    start = time.perf_counter()
    for name, price in priced.items():
        measured = measured_rates(trace.answers) if name == HERE and config is None else {}
        plain = float("nan")
        for spec, rule in rules.items():
            played = replay(rule, texts, price(spec))
            plain = played.tokens_per_s if rule.name == PLAIN else plain
            ran = widest(trace) if measured else math.inf
            cells.append(cell(name, rule.name, played, plain, texts, told_of(measured, spec, rule.name), ran))
    seconds = time.perf_counter() - start
    named = {rule.name: (spec, rule) for spec, rule in rules.items()}
    cells = [c if math.isnan(c.measured) else replace(c, foretold=foretell(trace, *named[c.policy])) for c in cells]
    return Simulation(cells, quotient(sum(c.rounds for c in cells), seconds), branches(trace.answers))


def cell(
    machine: str,
    policy: str,
    played: Replayed,
    plain: float,
    texts: Sequence[Script],
    measured: float,
    widest: float,
) -> Cell:
    rounds = played.rounds
    run = sum(1 + r.n for r in rounds)
    return Cell(
        machine,
        policy,
        played.tokens_per_s,
        played.tokens_per_s / plain,
        tau(rounds),
        quotient(run, len(rounds)),
        quotient(run, played.tokens),
        quotient(sum(r.drafted for r in rounds), len(rounds)),
        len(rounds),
        quotient(played.skipped, sum(len(t.answer.tokens) - 1 for t in texts)),
        quotient(played.clipped, len(rounds)),
        measured,
        quotient(sum(r.width > widest for r in rounds), len(rounds)),
    )


def foretell(trace: Trace, spec: str, rule: Policy) -> float:
    """Tokens per second of a policy, replayed with the drafts and prices of the others; NaN if none drafted."""
    others = replace(trace, answers=[answer for answer in trace.answers if answer.policy not in (spec, rule.name)])
    texts = scripts(others.answers)
    if not any(script.drafts for script in texts):
        return math.nan
    return replay(rule, texts, prices_of(others, HERE, None)(spec)).tokens_per_s


def measured_rates(answers: Iterable[Answer]) -> dict[str, float]:
    """Tokens per second of each policy as it was really run."""
    totals: dict[str, list[float]] = {}
    for answer in answers:
        total = totals.setdefault(answer.policy, [0.0, 0.0])
        total[0] += len(answer.tokens) - 1
        total[1] += answer.decode_s
    return {policy: quotient(tokens, seconds) for policy, (tokens, seconds) in totals.items()}


def told_of(measured: Mapping[str, float], spec: str, name: str) -> float:
    """What was measured for a policy, by its spelling or by its name; NaN if it was not measured."""
    return measured.get(spec, measured.get(name, float("nan")))


def prices_of(trace: Trace, name: str, config: str | None) -> Callable[[str], Prices]:
    """What a policy's rounds cost: on `this` machine from the recorded rounds, on any other by counted work."""
    if name == HERE and config is None:
        return partial(Average.of(learned(trace), trace).hosted, trace)
    machine, sizes, draft = parts_of(trace, name, config)
    modelled = Modelled(LatencyModel(machine.machine, sizes.work, draft), machine.widths)
    return lambda policy: modelled


def parts_of(trace: Trace, name: str, config: str | None) -> tuple[Hardware, Footprint, Callable[[int], Work]]:
    """A machine, the sizes of a target and the work of its drafter: the recorded ones, or those of a config."""
    machine = Hardware(recorded_machine(trace)) if name == HERE else hardware(name)
    if config is not None:
        described = target_config(config)
        return machine, footprint(described), draft_work(described)
    sizes, draft = recorded_work(trace)
    return machine, sizes if name == HERE else uncompiled(sizes), draft


def crowded(
    trace: Trace, policies: Sequence[str], machines: Sequence[str], config: str | None, crowd: Crowd
) -> list[Load]:
    """Every policy on every machine for every number of users, plain decoding first; all priced by counted work."""
    from draftwood.bench.capacity import prices, replay_load  # imports torch, which few replays need

    rules = {spec: registry.policy(spec) for spec in [PLAIN, *policies]}
    texts, found = scripts(trace.answers), []
    longest = crowd.context + max(script.answer.prompt_tokens + len(script.answer.tokens) for script in texts)
    for name in machines:
        machine, sizes, draft = parts_of(trace, name, config)
        measured = measured_rates(trace.answers) if name == HERE and config is None else {}
        for users in crowd.users:
            price = prices(machine, sizes, draft, crowd.context)
            plain = float("nan")
            for spec, rule in rules.items():
                played = replay_load(rule, texts, price, users)
                plain = played.tokens_per_s if rule.name == PLAIN else plain
                stored = sizes.weight_bytes + users * longest * sizes.kv_bytes
                drafts = drafts_work(draft, longest, users)
                stored += drafts.bytes - drafts.shared if rule.n_max else 0
                told = told_of(measured, spec, rule.name) if users == 1 else float("nan")
                found.append(played.load(name, rule.name, users, plain, stored, crowd.price, told))
    return found


def run_simulation(
    path: Path,
    policies: Sequence[str],
    machines: Sequence[str],
    config: str | None,
    out: Path | None,
    as_json: bool,
    crowd: Crowd = NOBODY,
) -> None:
    """The command: tables on stdout unless only JSON was asked for, plots and JSON into `out`."""
    check_writable(out)
    trace = Trace.load(path)
    found = simulate(trace, policies, machines, config)
    if crowd.users:
        found.loads.extend(crowded(trace, policies, machines, config, crowd))
    if not as_json:
        show(found, Console())
    print(json.dumps(found.to_json(), allow_nan=False), flush=True)
    if out is not None:
        Console(stderr=True).print(write(found, out), soft_wrap=True, markup=False)


def write(found: Simulation, out: Path) -> str:
    """simulation.json, and pareto.png if it can be drawn; returns a sentence that says so."""
    with writing(out):
        (out / "simulation.json").write_text(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
        return save_figures(out, {"pareto": partial(draw_pareto, cells=found.cells)})


def show(found: Simulation, console: Console) -> None:
    for name in dict.fromkeys(c.hardware for c in found.cells):
        cells = [c for c in found.cells if c.hardware == name]
        columns = ("tokens/s", "× plain", "τ", "width", "drafted", "measured", "error", "left out")
        table = new_table(f"Simulated on {name}", "policy", columns)
        for c in cells:
            table.add_row(
                c.policy,
                number(c.tokens_per_s, 1),
                number(c.speedup, 2),
                number(c.tau, 2),
                number(c.mean_width, 1),
                percent(c.drafted),
                number(c.measured, 1),
                percent(c.error),
                percent(c.error_foretold),
            )
        console.print(table)
    if any(c.foretold == c.foretold for c in found.cells):
        console.print("left out: the error if the policy's own rounds are left out, as for one that never ran")
    for name in dict.fromkeys(load.hardware for load in found.loads):
        console.print(load_table(name, [load for load in found.loads if load.hardware == name]))
    for c in found.cells:
        if c.skipped > 0.01 or c.clipped > 0.05:
            console.print(
                f"{c.policy} on {c.hardware}: {percent(c.skipped)} of the text had no recorded draft and was left out; "
                f"{percent(c.clipped)} of the trees may have wanted more candidates than were recorded."
            )
        if c.unseen > 0.05:
            console.print(
                f"{c.policy} on {c.hardware}: {percent(c.unseen)} of the rounds are wider than any that was recorded, "
                "so their prices are extrapolated; record a policy that runs trees as wide."
            )
    spine, sibling = found.branches["spine"], found.branches["sibling"]
    console.print(
        f"The first child of an accepted node is right in {percent(spine.share)} of {spine.nodes} cases on the spine, "
        f"in {percent(sibling.share)} of {sibling.nodes} after a sibling."
    )
    console.print(f"{found.rounds_per_s:.0f} rounds a second.")
