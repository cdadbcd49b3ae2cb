"""The never-slower grid: what its cells cover, what a worse drafter is, and that a stopped run goes on."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from draftwood import registry
from draftwood.bench import grid, race
from draftwood.bench.environment import environment
from draftwood.bench.grid import GridOptions, beside, lengthened, places, run_grid, summarize
from draftwood.bench.grid_table import FIXED, NEW, OURS, Cell, Place, by_drafter, by_method, page
from draftwood.bench.prompts import Prompt, load_prompts
from draftwood.bench.stats import PLAIN
from draftwood.bench.worse import Shifted, Worse, worse
from draftwood.drafters.base import Request
from draftwood.drafters.pooled import Pooled, Recycling
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.grow import grow
from draftwood.latency import LatencyModel, Machine
from draftwood.prefix import PrefixCache
from draftwood.processor import processor
from draftwood.sampling import Sampling
from draftwood.target import Target
from draftwood.tree import Lattice
from draftwood.trellis import Trellis
from tests.reference import VOCAB, Noisy, Tabled, Truthful, tiny_dflash

MACHINE = Machine("made up", 1e12, 1e10, 1e-6)
SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench", "alpaca")


def test_forty_five_cells_cover_everything_and_each_context_meets_each_drafter_and_temperature() -> None:
    found = places(SETS, full=False)
    assert len(found) == len(set(found)) == 45 and len(places(SETS, full=True)) == 135
    for pick in (
        lambda p: (p.drafter, p.context),
        lambda p: (p.temperature, p.context),
        lambda p: (p.dataset, p.context),
    ):
        assert len({pick(p) for p in found}) == (15 if pick(found[0])[0] in SETS else 9)


def test_what_stands_in_front_of_prompts_is_not_asked() -> None:
    a, b = ([Prompt(f"{name}/{i}", name, ("x",)) for i in range(3)] for name in "ab")
    assert beside({"a": a, "b": b}, "b", 2) == [b[2], *a]
    assert beside({"a": a}, "a", 3) == a, "unless there is nothing else"


def test_nothing_is_learned_from_what_is_measured() -> None:
    packaged = load_prompts(())
    for measured in (packaged[:8], packaged[2:], []):
        earlier = grid.earlier_prompts(measured)
        assert len(earlier) == min(grid.EARLIER, len(packaged) - len(measured))
        assert not {p.turns for p in earlier} & {p.turns for p in measured}


def test_prompts_are_lengthened_in_front() -> None:
    assert lengthened([7, 8], [1, 2, 3], 7) == [1, 2, 3, 1, 2, 7, 8]
    assert lengthened([7, 8, 9], [1], 2) == [7, 8, 9]


def test_a_worse_drafter_keeps_its_confidence_and_loses_its_tokens() -> None:
    inner = Truthful("inner", truth=list(range(40)), max_depth=6)
    request = Request([1, 2, 3], 4, 4)
    before = inner.draft([request])[0]
    assert isinstance(before, Lattice)
    for share, low, high in ((0.0, 1.0, 1.0), (0.5, 0.0, 0.99), (1.0, 0.0, 0.4)):
        after = Worse(inner, share, VOCAB).draft([request])[0]
        assert np.array_equal(after.logp, before.logp)
        assert low <= (after.tokens == before.tokens).mean() <= high
        again = Worse(inner, share, VOCAB).draft([request])[0]
        assert np.array_equal(after.tokens, again.tokens), "a draft depends on its context alone"


def test_of_a_conditional_draft_whole_depths_are_moved_and_siblings_stay_apart() -> None:
    chain = [1, 2, 3]
    tree = SimpleNamespace(
        start=lambda: 0,
        children=lambda depth: iter([(0.1, chain[depth], 0), (2.0, 9, 0)]),
        step=lambda depth, _: depth + 1,
    )
    shifted = Shifted(tree, [0, VOCAB - 1, 5], VOCAB)
    place, seen = shifted.start(), []
    for _ in chain:
        first, second = (token for _, token, _ in shifted.children(place))
        assert first != second
        seen.append(first)
        place = shifted.step(place, first)
    assert seen == [1, 1, 8]


def test_a_trellis_stays_one_and_grows_as_if_its_nodes_were_moved_one_by_one() -> None:
    rng = np.random.default_rng(3)
    logp = np.sort(np.log(rng.dirichlet(np.ones(5), 4)).astype(np.float32))[:, ::-1]
    pairs = np.log(rng.dirichlet(np.ones(5), (3, 5))).astype(np.float32)
    draft = Trellis(Lattice(np.stack([rng.permutation(VOCAB)[:5] for _ in range(4)]), logp), pairs)
    inner = SimpleNamespace(name="inner", tap_layers=(), max_depth=6, draft=lambda requests: [draft])
    (moved,) = Worse(inner, 0.5, VOCAB).draft([Request([1], 4, 4)])  # type: ignore[arg-type]
    assert isinstance(moved, Trellis)
    shifts = (moved.lattice.tokens - draft.lattice.tokens) % VOCAB
    assert (shifts == shifts[:, :1]).all() and 0 < (shifts[:, 0] > 0).sum() < 4
    one, other = grow(moved, 4, 20), grow(Shifted(draft, shifts[:, 0].tolist(), VOCAB), 4, 20)
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.parents, other.parents)


@torch.inference_mode()
def test_on_a_device_whole_depths_are_moved_too(target: Target) -> None:
    inner = tiny_dflash(target)
    root, start, taps = torch.tensor([4]), torch.tensor(3), torch.randn(3, len(inner.tap_layers) * target.hidden_size)
    for share, kept in ((0.0, {1.0}), (0.5, {0.0, 1.0}), (1.0, {0.0})):
        plain, placed = inner.place(50), worse(inner, share, VOCAB).place(50)  # type: ignore[attr-defined]
        for each in (plain, placed):
            each.extend(taps, torch.tensor(0))
        before, after, again = (each.draft(root, start, 4) for each in (plain, placed, placed))
        assert torch.equal(after.logp, before.logp) and after.tokens.max() < VOCAB
        assert set((after.tokens == before.tokens).float().mean(1).tolist()) == kept
        assert torch.equal(again.tokens, after.tokens), "a draft depends on its context alone"


def test_what_is_pooled_can_be_worse_and_still_learns() -> None:
    worse = Worse(Pooled([Truthful("inner", truth=[5] * 300), Recycling()]), 1.0, VOCAB)
    worse.learn([7], torch.eye(VOCAB)[[3]])
    both = worse, worse.fresh()
    for made in both:
        made._inner.gains.kinds[0].gain.mean = 1.0  # pooling pays
    drafts = [made.draft([Request(made.open(9), 7, 4)])[0] for made in both]
    known = [{token for _, token, _ in draft.children(draft.start())} for draft in drafts]  # type: ignore[union-attr]
    assert len(known[0]) > len(known[1]), "what it learned is not in a fresh one"
    assert not isinstance(drafts[0], Lattice) and grow(drafts[0], 7, 4).tokens[1] != 5


def totals(plain: float, ours: float, fixed: float) -> dict[str, np.ndarray]:
    seconds = {PLAIN: plain, OURS: ours, NEW: ours, **dict.fromkeys(FIXED, 9.0), FIXED[1]: fixed}
    return {method: np.array([[10.0, s], [10.0, s]]) for method, s in seconds.items()}


@pytest.mark.parametrize(("plain", "fixed", "holds"), [(1.0, 1.0, True), (0.96, 1.0, False), (1.0, 0.97, False)])
def test_a_cell_holds_if_neither_plain_decoding_nor_a_fixed_budget_is_faster(
    plain: float, fixed: float, holds: bool
) -> None:
    cell = summarize(Place("s", 0.0, "good", 128), totals(plain, 1.0, fixed), [], 1.0, 0, 2)
    assert cell.holds is holds and cell.best_fixed == FIXED[1]
    assert cell.of_plain == pytest.approx(plain) and cell.of_fixed == pytest.approx(fixed)
    assert Cell.of_json(json.loads(json.dumps(cell.to_json()))).place == cell.place
    told = "\n".join(page([replace(cell, commit="abc"), cell], environment()))
    assert ("**no**" in told) is not holds
    assert processor() in told and "commit abc (1 cells), unknown (1 cells)" in told


def test_the_page_sums_up_drafters_and_methods() -> None:
    good, random = (Place("s", 0.0, drafter, 128) for drafter in ("good", "random"))
    cells = [
        summarize(good, totals(2.0, 1.0, 1.0), [], 1.0, 0, 2),
        summarize(random, totals(0.9, 1.0, 3.0), [], 1.0, 0, 2),
    ]
    assert list(by_drafter(cells))[2:] == [
        "| good | 1 | 2.000, 2.000, 2.000 | 0 | 1.000, 1.000, 1.000 | 0 | 1 |",
        "| random | 1 | 0.900, 0.900, 0.900 | 1 | 3.000, 3.000, 3.000 | 0 | 0 |",
    ]
    assert f"| {FIXED[1]} | 1.150, 1.150, 0.300 | 1 |" in list(by_method(cells))


def test_budgets_that_will_not_be_the_best_are_left_out() -> None:
    found = totals(1.0, 1.0, 1.0)
    found[FIXED[0]][:] = [10.0, 1.05]
    ran = dict.fromkeys(found)
    assert list(grid.sieved(ran, found)) == [PLAIN, OURS, NEW, *FIXED[:2]]  # type: ignore[arg-type, type-var]
    found[FIXED[0]][1] = 0  # left out after the first prompt, which was an easy one
    found[FIXED[0]][0], found[PLAIN][0] = [10.0, 0.1], [10.0, 0.2]
    cell = summarize(Place("s", 0.0, "good", 128), found, [], 1.0, 0, 2)
    assert cell.best_fixed == FIXED[1] and cell.of_fixed == pytest.approx(1.0)
    assert cell.times_plain[FIXED[0]] == pytest.approx(2.0), "plain decoding found this prompt easy, too"


def test_a_method_goes_on_while_its_interval_leaves_open_on_which_side_of_its_bound_ours_is() -> None:

    def left(plain: float, fixed: float, spread: float, prompts: int) -> set[str]:
        """Of `bastion` over the two, every other prompt above and below that."""
        found = {method: np.full((prompts, 2), 10.0) for method in (PLAIN, OURS, NEW, *FIXED)}
        for method, ratio in {PLAIN: plain, **dict.fromkeys(FIXED, fixed)}.items():
            found[method][:, 1] *= ratio * np.exp(spread * (-1.0) ** np.arange(prompts))
        return {*grid.undecided(dict.fromkeys(found), found, 0)}  # type: ignore[arg-type]

    assert left(1.5, 1.05, 0.01, 8) == left(0.9, 1.05, 0.01, 8) == {OURS}
    assert left(1.5, 0.985, 0.05, 8) == {OURS, *FIXED}, "a prompt more or less decides"
    assert left(0.965, 1.05, 0.01, 8) == {OURS, PLAIN} and left(1.5, 0.99, 0.05, 1000) == {OURS}
    assert left(1.5, 1.5, 0.0, 1) == {OURS, PLAIN, *FIXED}, "one prompt says nothing of others"


def test_ours_is_compared_on_prompts_that_both_answered() -> None:
    found = {method: np.full((3, 2), 10.0) for method in (PLAIN, OURS, NEW, *FIXED)}
    found[OURS][2] = [10.0, 20.0]  # a slow one, of which plain decoding was not asked any more
    found[PLAIN][2] = found[FIXED[0]][2] = 0.0
    found[FIXED[1]][2] = [10.0, 18.0]
    cell = summarize(Place("s", 0.0, "good", 128), found, [], 1.0, 0, 2)
    assert cell.of_plain == 1.0 and cell.tokens_per_s[OURS] == 1.0 and cell.prompts == 3
    assert cell.best_fixed == FIXED[2] and cell.of_fixed == pytest.approx(30 / 40)


def tiny_llm(target: Target) -> Any:
    drafter = Truthful("truthful", truth=[5] * 300)
    engine = SimpleNamespace(latency=LatencyModel(MACHINE, target.work, drafter.work))
    return SimpleNamespace(target=target, drafter=drafter, engine=engine, encode=lambda text: [1, 2, len(text) % 90])


def test_engines_start_with_what_all_of_them_learned_about_seconds_and_then_part(target: Target) -> None:
    ran = grid.engines(tiny_llm(target), Place("s", 0.0, "good", 16), (PLAIN, OURS, "ddtree:4"))
    known = {engine.drafter is None: PrefixCache(engine.drafter, 64) for engine in ran.values()}
    before = ran[PLAIN].latency.costs(4, 20).verify_s.copy()
    after = race.warmed(ran, [1, 2, 3], known)
    costs = {method: engine.latency.costs(4, 20).verify_s for method, engine in after.items()}
    assert all(np.array_equal(cost, costs[PLAIN]) and (cost != before).all() for cost in costs.values())
    assert len({id(engine.latency) for engine in after.values()}) == 3


def test_a_device_is_waited_for_seldom_and_its_first_round_counts(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are as long as is asked of devices, and what a device did before the first one is in the seconds."""
    asked: list[int] = []

    def turns(methods: list[str], tokens: int, seed: int, each: int) -> list[tuple[str, int]]:
        asked.append(each)
        return [(method, tokens) for method in methods]

    monkeypatch.setattr(race, "turns", turns)
    ran = {
        spec: Engine(
            target, Tabled(Noisy("noisy")), registry.policy(spec), LatencyModel(MACHINE, target.work), backend="device"
        )
        for spec in ("ddtree:3", OURS)
    }
    known = {False: PrefixCache(None, 64)}
    for answer in race.race(ran, [1, 2, 3], 20, Sampling(), known, 0).values():
        assert len(answer.rounds) > 1 and len(answer._spent) == 1 + len(answer.rounds) and min(answer._spent) > 0
    assert asked == [race.TURN["device"]]


def test_what_an_earlier_process_learned_of_acceptance_is_known_to_ours_alone(target: Target) -> None:
    ran = grid.engines(tiny_llm(target), Place("s", 0.0, "good", 16), (PLAIN, OURS, NEW))
    known = {engine.drafter is None: PrefixCache(engine.drafter, 128) for engine in ran.values()}
    after = race.experienced(ran, [[1, 2, 3], [1, 2, 4]], 60, 0.0, known)
    assert {method: len(engine.experience()) for method, engine in after.items()} == {PLAIN: 0, OURS: 1, NEW: 0}
    assert not ran[OURS].experience()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"limit": 0}, "1 or more"), ({"cells": 0}, "1 or more"), ({"most": 1}, "--most 1 is below --limit 8")],
)
def test_flags_that_cannot_be_used(changes: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        GridOptions(Path("out"), [], **changes)  # type: ignore[arg-type]


def test_without_a_drafter_there_is_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(json.dumps({"turns": ["question"]}))
    options = GridOptions(tmp_path / "out", [str(tmp_path / "set.jsonl")], 2, 6, 1)
    llm = SimpleNamespace(drafter=None)
    with pytest.raises(BadInput, match="name one with --drafter"):
        run_grid(options, lambda: llm, Console(quiet=True))


def test_nobodys_readme_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n")
    with pytest.raises(BadInput, match=r"README\.md that no grid has written; name another folder"):
        run_grid(GridOptions(tmp_path), lambda: pytest.fail("loaded"), Console(quiet=True))
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_open_cells_are_measured_again_with_more_prompts(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "CONTEXTS", (16,))
    monkeypatch.setattr(race, "WARM_TOKENS", 4)
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps({"turns": [f"question {i}"]}) for i in range(3)))

    def go(most: int | None, cells: int | None = None) -> dict[Place, int]:
        options = GridOptions(tmp_path / "out", [str(tmp_path / "set.jsonl")], 1, 6, cells, most=most)
        return {c.place: c.prompts for c in run_grid(options, lambda: tiny_llm(target), Console(quiet=True))}

    assert sorted(go(None).values()) == [1] * 9, "one prompt leaves every cell open"
    assert sorted(go(None, cells=9).values()) == [1] * 9
    kept = (tmp_path / "out" / "groups.jsonl").read_text()
    assert go(1) and kept == (tmp_path / "out" / "groups.jsonl").read_text(), "no more than were asked"
    assert sorted(go(2, cells=1).values()) == [1] * 8 + [2]
    asked = go(2)
    assert sorted(asked.values()) == [2] * 9 and set(asked) == set(grid.places(["set"], full=False))


def test_a_cell_is_open_while_an_interval_has_both_sides_of_a_bound() -> None:
    cell = summarize(Place("s", 0.0, "good", 128), totals(1.0, 1.0, 1.0), [], 1.0, 0, 2)
    assert not cell.is_open
    assert replace(cell, of_plain_interval=(0.95, 1.2)).is_open and replace(cell, of_fixed_interval=(0.97, 1.2)).is_open
    assert not replace(cell, of_fixed_interval=(0.9, 0.97)).is_open and replace(cell, of_fixed_interval=None).is_open


def test_a_stopped_grid_goes_on_where_it_was(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "CONTEXTS", (16, 24, 4096))
    monkeypatch.setattr(race, "WARM_TOKENS", 4)
    lines = [json.dumps({"turns": [f"question {i}"]}) for i in range(2)]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    screen = Console(file=io.StringIO(), width=200)

    def go(cells: int, tokens: int = 6, machine: str = MACHINE.name) -> list[Cell]:
        options = GridOptions(tmp_path / "out", [str(tmp_path / "set.jsonl")], 2, tokens, cells)
        llm = tiny_llm(target)
        llm.engine.latency.machine = replace(MACHINE, name=machine)
        return run_grid(options, lambda: llm, screen)

    assert len(go(1)) == 1 and len(go(1)) == 2
    found = go(99)
    assert len(found) == len({c.place for c in found}) == 6, "of nine cells three do not fit into 256 tokens"
    assert "3 cells do not fit" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert (tmp_path / "out" / "README.md").read_text().startswith("# Never slower?")
    assert all(set(c.tokens_per_s) == {PLAIN, OURS, NEW, *FIXED} for c in found)
    kept = tmp_path / "out" / "groups.jsonl"
    with kept.open("a") as file:
        file.write('{"group": ')  # as a kill leaves it
    assert len(go(99)) == 6 and kept.read_text().count("\n") == 1 + 6
    with pytest.raises(BadInput, match="max_new_tokens 6 instead of 7"):
        go(1, tokens=7)
    with pytest.raises(BadInput, match="machine 'made up' instead of 'another'"):
        go(1, machine="another")
    kept.write_text(kept.read_text().split("\n")[0] + '\n{"group": "older", "rows": [{}]}\n')
    with pytest.raises(BadInput, match="cells of another version"):
        go(1)
    kept.write_text("{]\n")
    with pytest.raises(BadInput, match="name another folder"):
        go(1)
