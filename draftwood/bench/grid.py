"""`draftwood bench grid`: is `bastion` never slower? Cell by cell against plain decoding and every fixed budget.

A cell is a data set, a temperature, a drafter and a context length. Its methods answer the same prompts in turn, in
one process; plain decoding runs without any drafter. Finished cells are kept, so a run that was stopped goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from draftwood import registry
from draftwood.bench.environment import environment
from draftwood.bench.grid_table import (
    FIXED,
    FIXED_ON_GPU,
    LEAST_OF_FIXED,
    LEAST_OF_PLAIN,
    NEW,
    OURS,
    Cell,
    Place,
    budgets,
    leaves_open,
    write_table,
)
from draftwood.bench.prompts import Prompt, by_dataset, fingerprint, load_prompts
from draftwood.bench.race import experienced, race, warmed
from draftwood.bench.records import check_writable
from draftwood.bench.results import FILE, Results
from draftwood.bench.stats import PLAIN, Totals, bootstrap, speedup
from draftwood.bench.worse import worse
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.prefix import PrefixCache
from draftwood.sampling import Sampling
from draftwood.trace import Round

if TYPE_CHECKING:
    from draftwood.drafters.base import Drafter
    from draftwood.llm import LLM

TEMPERATURES, CONTEXTS = (0.0, 0.7, 1.0), (128, 2048, 6144)
DRAFTERS = {"good": 0.0, "weakened": 0.5, "random": 1.0}  # share of depths whose candidates are not the drafter's own
EARLIER = 4  # prompts of the packaged set that an earlier process has answered
SIEVE, NEAR = 2, 0.9  # after so many prompts, fixed budgets below this share of the best one are left out


@dataclass(frozen=True, slots=True)
class GridOptions:
    """What to measure. Raises BadInput for numbers that cannot be used."""

    out: Path
    prompts: Sequence[str] = ()  # sets: files or names
    limit: int = 8  # prompts of a cell
    max_new_tokens: int = 64
    cells: int | None = None  # only the first so many that are missing or undecided
    full: bool = False  # every context in every cell, three times as many
    seed: int = 0
    most: int | None = None  # prompts of a cell, if fewer leave undecided whether it holds; None: no more than `limit`

    def __post_init__(self) -> None:
        if min(self.limit, 1 if self.cells is None else self.cells) < 1 or self.max_new_tokens < 2:
            raise BadInput("--limit and --cells must be 1 or more, --max-new-tokens 2 or more.")
        if self.most is not None and self.most < self.limit:
            raise BadInput(f"--most {self.most} is below --limit {self.limit}; give as many prompts or more.")


def places(datasets: Sequence[str], full: bool) -> list[Place]:
    """Every data set × temperature × drafter, with one context each in turn, so that each meets each; all if `full`."""
    found = []
    for d, dataset in enumerate(datasets):
        for t, temperature in enumerate(TEMPERATURES):
            for k, drafter in enumerate(DRAFTERS):
                contexts = CONTEXTS if full else (CONTEXTS[(d + t + k) % len(CONTEXTS)],)
                found += [Place(dataset, temperature, drafter, context) for context in contexts]
    return found


def lengthened(ids: Sequence[int], filler: Sequence[int], context: int) -> list[int]:
    """`context` tokens that end with the prompt, filled up from `filler`; the prompt alone if it is longer."""
    missing = context - len(ids)
    if missing <= 0 or not filler:
        return list(ids)
    return [*(list(filler) * (1 + missing // len(filler)))[:missing], *ids]


def engines(llm: LLM, place: Place, methods: Sequence[str]) -> dict[str, Engine]:
    """An engine for each method, with one latency model for all until they are made `fresh`."""
    drafters = {method: None if method == PLAIN else worsened(llm, DRAFTERS[place.drafter]) for method in methods}
    prices = llm.engine.latency.copy()
    return {
        method: Engine(llm.target, drafter, registry.policy(OURS if method == NEW else method), prices)
        for method, drafter in drafters.items()
    }


def worsened(llm: LLM, share: float) -> Drafter | None:
    return llm.drafter if not share or llm.drafter is None else worse(llm.drafter, share, llm.target.vocab_size)


def beside(sets: Mapping[str, Sequence[Prompt]], dataset: str, limit: int) -> list[Prompt]:
    """Prompts that are not asked in a data set's cells, its own first. Contexts are filled with them: in a few prompts
    over and over an n-gram drafter would find each prompt again, followed by another one."""
    own = list(sets[dataset])
    return [*own[limit:], *(p for name, others in sets.items() if name != dataset for p in others)] or own


def earlier_prompts(measured: Sequence[Prompt]) -> list[Prompt]:
    """Prompts that an earlier process has answered: of the packaged set, and none of those that are measured."""
    asked = {prompt.turns for prompt in measured}
    return [prompt for prompt in load_prompts(()) if prompt.turns not in asked][:EARLIER]


def measure_cell(
    llm: LLM, place: Place, prompts: Sequence[Prompt], ahead: Sequence[Prompt], options: GridOptions
) -> Cell:
    """Run all methods on all prompts, none of them always first. The prompts `ahead` make contexts long."""
    start = time.perf_counter()
    methods = (PLAIN, OURS, NEW, *(FIXED_ON_GPU if llm.target.device.type == "cuda" else FIXED))
    ran = engines(llm, place, methods)
    encoded = [llm.encode(p.turns[0]) for p in prompts]
    filler = [token for p in ahead for token in llm.encode(p.turns[0])]
    longest = max(place.context, *map(len, encoded)) + options.max_new_tokens
    known = {engine.drafter is None: PrefixCache(engine.drafter, 2 * longest) for engine in ran.values()}
    ran = warmed(ran, lengthened(encoded[0], filler, place.context), known)
    others = [llm.encode(p.turns[0])[-place.context :] for p in earlier_prompts(prompts)]
    earlier = [lengthened(ids, filler, place.context) for ids in others]
    ran = experienced(ran, earlier, options.max_new_tokens, place.temperature, known)
    totals: dict[str, Totals] = {method: np.zeros((len(prompts), 2)) for method in methods}
    rounds: list[Round] = []
    seconds = wall_s = 0.0
    for i, ids in enumerate(encoded):
        sampling = Sampling(place.temperature, seed=options.seed + i)
        answers = race(ran, lengthened(ids, filler, place.context), options.max_new_tokens, sampling, known, i)
        for method, answer in answers.items():
            totals[method][i] = answer.tokens, answer.seconds
            seconds, wall_s = seconds + answer.seconds, wall_s + answer.wall_s
        rounds += answers[OURS].rounds
        if i + 1 == SIEVE:
            ran = sieved(ran, totals)
        asked = {method: total[: i + 1] for method, total in totals.items()}
        if i + 1 >= options.limit:
            ran = undecided(ran, asked, options.seed)
            if set(ran) == {OURS}:
                break
    cell = summarize(place, asked, rounds, time.perf_counter() - start, options.seed, options.limit)
    return replace(cell, paused=1 - seconds / wall_s)


def sieved(ran: Mapping[str, Engine], totals: Mapping[str, Totals]) -> dict[str, Engine]:
    """The methods without the fixed budgets that are far below the best one so far."""
    rates = {method: rate(totals[method]) for method in budgets(totals)}
    least = NEAR * max(rates.values())
    return {method: engine for method, engine in ran.items() if rates.get(method, least) >= least}


def summarize(
    place: Place, totals: dict[str, Totals], rounds: Sequence[Round], seconds: float, seed: int, limit: int
) -> Cell:
    """The figures of a cell. Speeds are over the first `limit` prompts, which all methods answered, except budgets that
    were far below the best.

    The best budget is the one that `OURS` is least ahead of, among those that answered all of these prompts.
    """
    fixed = {method: over(totals, method, seed) for method in budgets(totals) if totals[method][:limit].all()}
    best = min(fixed, key=lambda method: fixed[method][0])
    widths = [1 + r.n for r in rounds]
    return Cell(
        place,
        {method: rate(total[:limit]) for method, total in totals.items()},
        {method: speedup(*paired(total[:limit], totals[PLAIN][:limit])) for method, total in totals.items()},
        *over(totals, PLAIN, seed),
        best,
        *fixed[best],
        float(np.mean([r.drafted for r in rounds])) if rounds else 0.0,
        seconds,
        {width: widths.count(width) for width in sorted(set(widths))},
        prompts=len(totals[OURS]),
    )


def over(totals: Mapping[str, Totals], method: str, seed: int) -> tuple[float, tuple[float, float] | None]:
    """`OURS` over a method, on the prompts that both answered, and the interval."""
    pair = paired(totals[OURS], totals[method])
    return speedup(*pair), bootstrap(*pair, seed)


def paired(ours: Totals, theirs: Totals) -> tuple[Totals, Totals]:
    """Both on the prompts that both answered."""
    both = ours.all(1) & theirs.all(1)
    return ours[both], theirs[both]


def undecided(ran: Mapping[str, Engine], totals: Mapping[str, Totals], seed: int) -> dict[str, Engine]:
    """`OURS`, and the methods whose interval leaves undecided on which side of its bound the ratio lies."""
    bounds = {PLAIN: LEAST_OF_PLAIN, **dict.fromkeys(budgets(ran), LEAST_OF_FIXED)}

    def is_open(method: str) -> bool:
        return leaves_open(over(totals, method, seed)[1], bounds[method])

    return {m: engine for m, engine in ran.items() if m == OURS or (m in bounds and is_open(m))}


def rate(total: Totals) -> float:
    """Tokens per second of the prompts that were answered."""
    return float(total[:, 0].sum() / total[:, 1].sum())


def run_grid(options: GridOptions, load: Callable[[], LLM], console: Console) -> list[Cell]:
    """Measure cells that are missing, or undecided while more prompts are allowed now, and write groups.jsonl,
    grid.json and README.md into `options.out`."""
    check_writable(options.out)
    check_own(options.out)
    whole = by_dataset(load_prompts(options.prompts))
    sets = {name: prompts[: options.most or options.limit] for name, prompts in whole.items()}
    if not sets:
        raise BadInput("There are no prompts; name data sets or files with --prompts.")
    llm = load()
    if llm.drafter is None:
        raise BadInput("There is no drafter, but the grid measures what one brings; name one with --drafter.")
    results = Results(options.out, conditions(llm, whole, options))
    try:
        done = {cell.place: cell for cell in map(Cell.of_json, results.rows())}
    except (KeyError, TypeError):
        raise BadInput(f"--out {options.out} holds cells of another version; name another folder.") from None
    settled = {place for place, c in done.items() if not c.is_open or c.prompts >= len(sets[place.dataset])}
    todo = [place for place in places(list(sets), options.full) if place not in settled]
    usable = [place for place in todo if fits(llm, place, sets[place.dataset], options)]
    if len(usable) < len(todo):
        console.print(f"{len(todo) - len(usable)} cells do not fit into the target's context window and are left out.")
    code = environment()["commit"]
    for number, place in enumerate(usable[: options.cells], 1):
        ahead = beside(whole, place.dataset, len(sets[place.dataset]))
        cell = replace(measure_cell(llm, place, sets[place.dataset], ahead, options), commit=code)
        done[place] = cell
        results.add(place.name, [cell.to_json()])
        write_table(options.out, list(done.values()))
        console.print(f"{number}/{len(usable)}  {place.name}: × plain {cell.of_plain:.3f}, × {cell.best_fixed} "
                      f"{cell.of_fixed:.3f}  ({cell.seconds:.0f} s)")  # fmt: skip
    return list(done.values())


def check_own(out: Path) -> None:
    """Raise BadInput where the table would replace somebody's README.md."""
    if (out / "README.md").exists() and not (out / FILE).exists():
        raise BadInput(f"--out {out} holds a README.md that no grid has written; name another folder.")


def conditions(llm: LLM, sets: Mapping[str, Sequence[Prompt]], options: GridOptions) -> dict[str, Any]:
    """What must be the same in all cells of a folder."""
    target, drafter = llm.target, llm.drafter
    return {
        "target": Path(target.name).name,
        "drafter": Path(drafter.name).name if drafter else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "path": target.path.kind,
        "device": str(target.device),
        "machine": llm.engine.latency.machine.name,
        "prompts": fingerprint([prompt for prompts in sets.values() for prompt in prompts]),
        "limit": options.limit,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
    }


def fits(llm: LLM, place: Place, prompts: Sequence[Prompt], options: GridOptions) -> bool:
    longest = max(len(llm.encode(p.turns[0])) for p in prompts)
    return max(longest, place.context) + options.max_new_tokens <= llm.target.context_limit
