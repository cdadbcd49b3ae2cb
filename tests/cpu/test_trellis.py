"""Trellises against their definition: rows, growth on the host and on a device, pairs scored by a Markov head."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draftwood import registry
from draftwood.device.growth import DeviceTree, Grower
from draftwood.drafters.base import Candidates, Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.lattice import candidates
from draftwood.drafters.markov import Markov, on_host, propose, tables
from draftwood.errors import BadModel
from draftwood.experts import LatticeExpert
from draftwood.grow import Growth, beam, chain, grow
from draftwood.native.growth import grower
from draftwood.noise import Ahead, keys
from draftwood.pool import Pool
from draftwood.pool_weights import Weights
from draftwood.tree import Lattice
from draftwood.trellis import Trellis
from tests.cpu.test_device_growth import CPU, LOGP, check_same, every_grower
from tests.cpu.test_grow import check_tree, paths, same
from tests.reference import dflash_files, tiny_target

ROOT = 7
compiled = pytest.mark.usefixtures("compiled")


@st.composite
def trellises(draw: st.DrawFn) -> Trellis:
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def row() -> list[float]:
        return draw(st.lists(LOGP, min_size=width, max_size=width))

    logp = -np.sort(-np.array([row() for _ in range(depth)], np.float32), axis=1)  # NaN last
    pairs = np.array([[row() for _ in range(width)] for _ in range(depth - 1)], np.float32)
    tokens = np.arange(10, 10 + depth * width).reshape(depth, width)
    return Trellis(Lattice(tokens, logp), pairs.reshape(depth - 1, width, width))


def likely(logp: float) -> float:
    return 0.0 if math.isnan(logp) else math.exp(min(logp, 0.0))


def masses(draft: Trellis) -> dict[tuple[int, ...], float]:
    """Every path of the draft as its tokens, with its mass, by definition."""
    lattice, found = draft.lattice, {}
    for length in range(1, 1 + len(draft)):
        for ranks in itertools.product(range(lattice.tokens.shape[1]), repeat=length):
            mass = likely(lattice.logp[0, ranks[0]])
            for depth, (a, b) in enumerate(itertools.pairwise(ranks)):
                mass *= likely(draft.pairs[depth, a, b])
            found[tuple(lattice.tokens[range(length), ranks].tolist())] = mass
    return found


@given(trellises(), st.integers(0, 40))
def test_the_likeliest_paths_are_grown(draft: Trellis, n_max: int) -> None:
    tree, every = grow(draft, ROOT, n_max), masses(draft)
    check_tree(tree)
    best = sorted((mass for mass in every.values() if np.float32(mass) > 0), reverse=True)[:n_max]
    np.testing.assert_allclose(tree.mass[1:], best, rtol=1e-5)
    for path, mass in paths(tree).items():
        assert mass == pytest.approx(every[path], rel=1e-5)


@given(trellises(), st.integers(0, 40), st.floats(0.001, 1.0))
def test_faint_nodes_and_children_of_nearly_faint_ones_are_not_grown(draft: Trellis, n_max: int, faint: float) -> None:
    fertile = 2 * faint / (1 + faint)  # twice the odds
    whole = paths(grow(draft, ROOT, 10**6))
    assume(not any(math.isclose(mass, edge, rel_tol=1e-5) for mass in whole.values() for edge in (faint, fertile)))
    kept: dict[tuple[int, ...], float] = {}
    for path, mass in sorted(whole.items(), key=lambda item: len(item[0])):
        if mass >= faint and (len(path) == 1 or kept.get(path[:-1], 0.0) >= fertile):
            kept[path] = mass
    found = paths(grow(draft, ROOT, n_max, faint))
    assert found.items() <= kept.items()
    assert sorted(found.values(), reverse=True) == sorted(kept.values(), reverse=True)[:n_max]


@given(trellises())
def test_a_chain_takes_the_best_child_of_each_node(draft: Trellis) -> None:
    tokens = chain(draft, ROOT, 9).tokens.tolist()[1:]
    every = masses(draft)
    for length in range(len(tokens)):
        siblings = {path: mass for path, mass in every.items() if path[:-1] == tuple(tokens[:length])}
        assert every[tuple(tokens[: length + 1])] == max(siblings.values())


def device_tree(grower: type[Grower], draft: Trellis, growth: Growth) -> DeviceTree:
    parts = draft.lattice.tokens, draft.lattice.logp, draft.pairs
    found = grower(growth, *draft.lattice.tokens.shape, CPU, paired=True)
    return found(Candidates(*map(torch.from_numpy, parts)), torch.tensor([ROOT]), torch.tensor(99), torch.tensor(999))


@every_grower
@given(trellises(), st.integers(0, 40))
@settings(max_examples=80)
def test_a_device_grows_the_same_tree(grower: type[Grower], draft: Trellis, n_max: int) -> None:
    check_same(device_tree(grower, draft, Growth(n_max)), grow(draft, ROOT, n_max))


@every_grower
@given(trellises(), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=40)
def test_a_device_grows_the_same_beam(grower: type[Grower], draft: Trellis, width: int, depth: int) -> None:
    found = device_tree(grower, draft, Growth(width * depth, width, depth))
    expected = beam(draft, ROOT, width, depth)
    np.testing.assert_allclose(found.mass[1 : 1 + int(found.count)].numpy(), expected.mass[1:], rtol=1e-6)


# --- growth in one call --------------------------------------------------------------------------------------


def check_identical(draft: Trellis, n_max: int, faint: float) -> None:
    """A compiled tree is the other one to the bit."""
    quick = Trellis(draft.lattice, draft.pairs, grower(CPU), draft.ahead)
    assert quick.grow is not None and draft.grow is None
    found, expected = grow(quick, ROOT, n_max, faint), grow(draft, ROOT, n_max, faint)
    assert same(found, expected) and found.parents.dtype == found.depths.dtype == np.int64
    assert found.sources is not None and found.sources.tolist() == [0] * len(found.tokens)
    check_tree(found)


def loud(draft: Trellis, heat: float | None) -> Trellis:
    """Under noise, unless there is no `heat`."""
    ahead = None if heat is None else Ahead(keys(3, 5, len(draft)), heat)
    return Trellis(draft.lattice, draft.pairs, ahead=ahead)


HEAT = st.sampled_from([None, 0.3, 1.0, 8.0])
FAINT = st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 1.0]) | st.floats(1e-6, 1.0)


@compiled
@given(trellises(), st.integers(0, 300), FAINT, HEAT)
@settings(max_examples=400)
def test_compiled_growth_is_the_same(draft: Trellis, n_max: int, faint: float, heat: float | None) -> None:
    check_identical(loud(draft, heat), n_max, faint)


@compiled
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 40), st.integers(1, 300), FAINT, HEAT, st.booleans()
)
def test_compiled_growth_is_the_same_of_many_candidates(
    seed: int, depth: int, width: int, n_max: int, faint: float, heat: float | None, tied: bool
) -> None:
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(size=(depth + depth * width, width)) * 2
    logp = np.float32(logits.round() if tied else logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    logp[numbers.random(logp.shape) < 0.1] = numbers.choice([-np.inf, np.nan])
    tokens = numbers.permuted(np.tile(np.arange(width + 9), (depth, 1)), axis=1)[:, :width]
    marginals = -np.sort(-logp[:depth], axis=1)  # NaN last
    pairs = logp[depth:].reshape(depth, width, width)[1:].swapaxes(1, 2)
    check_identical(loud(Trellis(Lattice(tokens, marginals), pairs), heat), n_max, faint)


@compiled
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_compiled_growth_of_next_to_nothing(shape: tuple[int, int]) -> None:
    depth, width = shape
    pairs = np.zeros((max(depth - 1, 0), width, width), np.float32)
    for n_max in (0, 1, 5):
        check_identical(Trellis(Lattice(np.ones(shape, np.int64), np.zeros(shape, np.float32)), pairs), n_max, 0.1)


@compiled
def test_a_head_drafts_what_grows_in_one_call_if_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, head = torch.randn(4, 20, generator=torch.Generator().manual_seed(2)), Markov(*random_head(20))
    found = []
    for switch, quick in (("1", True), ("0", False)):
        monkeypatch.setenv("DRAFTWOOD_COMPILE", switch)
        draft = on_host(propose(logits, 8, None, head))
        assert isinstance(draft, Trellis) and (draft.grow is not None) == quick
        found.append(grow(draft, ROOT, 30, 0.001))
    assert same(*found) and len(found[0]) == 30
    assert grower(torch.device("cuda")) is None


def test_behind_a_token_that_is_no_candidate_the_marginals_hold() -> None:
    lattice = Lattice(np.array([[1, 2], [3, 4]]), np.log(np.array([[0.6, 0.3], [0.7, 0.2]], np.float32)))
    draft = Trellis(lattice, np.log(np.array([[[0.1, 0.8], [0.5, 0.4]]], np.float32)))
    assert draft.row(1, 1)[0] == [4, 3] and draft.row(1, 2)[0] == [3, 4]
    assert draft.row(1, 99) == lattice.row(1, 99)
    assert LatticeExpert(draft, 0).opinions((1, 1))[0].probs == pytest.approx({4: 0.8, 3: 0.1})
    assert LatticeExpert(draft, 0).opinions((2, 4)) == ()


def test_a_pool_corrects_each_row_behind_its_own_token() -> None:
    """Alone and with exponents of 1 it says what the trellis says."""
    lattice = Lattice(np.array([[1, 2], [3, 4]]), np.log(np.array([[0.6, 0.3], [0.7, 0.2]], np.float32)))
    draft = Trellis(lattice, np.log(np.array([[[0.1, 0.8], [0.5, 0.4]]], np.float32)))
    pool = Pool(ROOT, draft, None, [], Weights(), max_depth=2)
    tree, expected = grow(pool, ROOT, 9), grow(draft, ROOT, 9)
    assert paths(tree) == pytest.approx(paths(expected))


# --- the Markov head -----------------------------------------------------------------------------------------


def random_head(vocab: int, rank: int = 3, hidden: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(4)
    a, b, e, h = (torch.randn(rows, hidden, generator=numbers) for rows in (rank, rank, vocab, vocab))
    return tables(a, b, e, h)


def test_pairs_are_the_softmax_of_corrected_logits() -> None:
    """Where all tokens are candidates nothing is left out."""
    before, after = random_head(20)
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(2))
    draft = on_host(propose(logits, 20, None, Markov(before, after)))
    assert isinstance(draft, Trellis)
    for depth, first in enumerate(draft.lattice.tokens[:-1]):
        expected = (logits[depth + 1] + before[torch.from_numpy(first)] @ after.T).log_softmax(-1)
        found = draft.pairs[depth]
        at = torch.from_numpy(draft.lattice.tokens[depth + 1])
        np.testing.assert_allclose(found, expected[:, at].numpy(), atol=1e-5)


@compiled
@pytest.mark.parametrize(("depths", "k", "rank"), [(7, 32, 64), (2, 5, 3), (3, 40, 16), (1, 4, 8)])
def test_compiled_pairs_are_those_of_the_formula(depths: int, k: int, rank: int) -> None:
    before, after = (table.bfloat16() for table in random_head(90, rank))
    rows, logp = candidates(torch.randn(depths, 90, generator=torch.Generator().manual_seed(3)) * 3, k)
    found = Markov(before, after).pairs(rows, logp)
    expected = Markov(before.double(), after.double()).pairs(rows, logp.double())
    assert found.shape == (depths - 1, k, k)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_is_no_candidate_keeps_its_share() -> None:
    before, after = random_head(200)
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    draft = on_host(propose(logits, 1, None, Markov(before, after)))
    assert isinstance(draft, Trellis) and draft.lattice.tokens.shape == (3, 32)
    logp = logits.log_softmax(-1).double()
    rows = torch.from_numpy(draft.lattice.tokens)
    for depth in range(2):
        kept = logp[depth + 1, rows[depth + 1]]
        scores = (before[rows[depth]] @ after[rows[depth + 1]].T).double() + kept
        rest = 1 - kept.exp().sum()
        expected = scores - (scores.exp().sum(1, keepdim=True) + rest).log()
        np.testing.assert_allclose(draft.pairs[depth], expected, atol=1e-5)


def test_scores_know_nothing_of_the_length_of_an_embedding() -> None:
    a, b, e, h = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for found, expected in zip(tables(a, b, 5 * e, 3 * h), tables(a, b, e, h), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["dflash", "ddtree:7"])
@torch.inference_mode()
def test_a_folder_with_a_head_drafts_a_trellis(policy: str, tmp_path: Path) -> None:
    target = tiny_target()
    dflash_files(target, tmp_path, rank=4)
    drafter = DFlashDrafter.load(str(tmp_path), target)
    state = drafter.open(8)
    taps = torch.randn(5, 2 * target.hidden_size, dtype=target.dtype)
    drafter.extend(state, [1, 2, 3, 4, 5], taps)
    (draft,) = drafter.draft([Request(state, 9, registry.policy(policy).width)])
    assert isinstance(draft, Trellis)
    placed = drafter.place(32)
    placed.extend(taps, torch.tensor(0))
    found = placed.draft(torch.tensor([9]), torch.tensor(5), 1)
    assert placed.paired == found.tokens.shape[1] == 32
    np.testing.assert_array_equal(found.tokens, draft.lattice.tokens)
    np.testing.assert_allclose(found.pairs, draft.pairs, atol=1e-5)


def test_a_head_that_is_missing_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    dflash_files(target, tmp_path, rank=4)
    path = tmp_path / "markov" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "after.weight": torch.zeros(4, 3)}, path)
    with pytest.raises(BadModel, match=r"after.weight is \[4, 3\] instead of \[4, "):
        DFlashDrafter.load(str(tmp_path), target)
    save_file({"after.weight": tensors["after.weight"]}, path)
    with pytest.raises(BadModel, match=r"before.weight is missing"):
        DFlashDrafter.load(str(tmp_path), target)
    path.write_bytes(b"no weights")
    with pytest.raises(BadModel, match="damaged"):
        DFlashDrafter.load(str(tmp_path), target)
    path.unlink()
    with pytest.raises(BadModel, match=r"lacks markov/model.safetensors, of which its config.json speaks"):
        DFlashDrafter.load(str(tmp_path), target)
