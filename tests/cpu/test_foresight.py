"""Drafts under the noise of draws to come: by definition, and in rounds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import exp, inf, log

import numpy as np
import pytest
import torch

from draftwood import registry
from draftwood.device import foresight as on_device
from draftwood.device.draw import Dice
from draftwood.drafters.base import Candidates, Request
from draftwood.drafters.lattice import head_rows
from draftwood.engine import Engine
from draftwood.foresight import MOST, foreseen
from draftwood.grow import grow
from draftwood.latency import LatencyModel, Machine
from draftwood.noise import FAVOUR, HOTTEST, Ahead, gumbel, keys
from draftwood.sampling import Sampler, Sampling
from draftwood.target import Target
from draftwood.tree import Child, Draft, Lattice, Tree
from draftwood.trellis import Trellis
from tests.cpu.test_grow import paths
from tests.reference import Noisy, Scripted, plain_logits, tiny_target

ROOT, DEPTH, WIDTH = 7, 3, 4
SEED, TEXT = 11, [3, 1, 4, ROOT]


def sampler_of(temperature: float) -> Sampler:
    return Sampler(Sampling(temperature, seed=SEED), TEXT)


def random_trellis(seed: int = 0) -> Trellis:
    """With all tokens of a depth apart, one of them dead."""
    rng = np.random.default_rng(seed)
    tokens = rng.permuted(np.tile(np.arange(40), (DEPTH, 1)), axis=1)[:, :WIDTH]
    logits = rng.normal(size=(DEPTH, WIDTH + 2)) * 2
    logp = -np.sort(-(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)), axis=1)[:, :WIDTH]
    logp[1, -1] = np.nan
    scores = rng.normal(size=(DEPTH - 1, WIDTH, WIDTH + 2)) * 2
    pairs = (scores - np.logaddexp.reduce(scores, axis=2, keepdims=True))[..., :WIDTH]
    pairs[0, 1, 2] = -np.inf
    return Trellis(Lattice(tokens, logp.astype(np.float32)), pairs.astype(np.float32))


def expected_step(row: dict[int, float], depth: int, temperature: float) -> dict[int, float]:
    """q exp(T g) of a row of log-probabilities, beside the rest of it."""
    noise = {token: gumbel(keys(SEED, len(TEXT) + depth, 1), np.array([token]))[0] for token in row}
    weights = {token: exp(logp + min(temperature, HOTTEST) * noise[token]) for token, logp in row.items()}
    whole = sum(weights.values()) + max(1 - sum(map(exp, row.values())), 0.0)
    return {token: weight / whole for token, weight in weights.items()}


def expected_masses(draft: Trellis | Lattice, temperature: float) -> dict[tuple[int, ...], float]:
    """Of every path, as its tokens."""
    lattice, found = draft if isinstance(draft, Lattice) else draft.lattice, {}

    def go_on(path: tuple[int, ...], rank: int, mass: float) -> None:
        depth = len(path)
        if depth == DEPTH or not mass:
            return
        given = lattice.logp[depth] if draft is lattice or not depth else draft.pairs[depth - 1, rank]
        ranks = {int(token): r for r, token in enumerate(lattice.tokens[depth]) if given[r] > -inf}
        shares = expected_step({token: float(given[r]) for token, r in ranks.items()}, depth, temperature)
        for token, share in shares.items():
            found[(*path, token)] = mass * share
            go_on((*path, token), ranks[token], mass * share)

    go_on((), 0, 1.0)
    return found


class Unpacked:
    """The same trellis as a draft of another kind, whose nodes are asked for one by one."""

    faint = 0.0

    def __init__(self, draft: Trellis) -> None:
        self.start, self.children, self.step = draft.start, draft.children, draft.step


def tree_of(draft: Trellis) -> Tree:
    return grow(draft, ROOT, 1000)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
@pytest.mark.parametrize(
    "kind", [lambda d: d.lattice, lambda d: d, Unpacked, tree_of], ids=["lattice", "trellis", "conditional", "tree"]
)
def test_every_kind_of_draft_is_weighed_by_the_noise_of_its_positions(kind, temperature: float) -> None:
    for seed in range(5):
        draft = random_trellis(seed)
        found = grow(foreseen(kind(draft), sampler_of(temperature).ahead), ROOT, 1000)
        truth = expected_masses(draft.lattice if kind(draft) is draft.lattice else draft, temperature)
        heavy = {path: mass for path, mass in truth.items() if mass > 1e-30}
        assert {path: mass for path, mass in paths(found).items() if mass > 1e-30} == pytest.approx(heavy, rel=1e-4)
        assert (found.mass[1:] <= found.mass[found.parents[1:]]).all()


def test_noise_is_asked_about_the_likeliest_children_alone() -> None:
    class Endless:
        faint = 0.0

        def start(self) -> int:
            return 0

        def children(self, place: int) -> Iterator[Child]:
            return ((log(2) * (1 + i), i, 0) for i in itertools.count())

        def step(self, place: int, token: int) -> int:
            return place + 1

    tree = grow(foreseen(Endless(), sampler_of(1.0).ahead), ROOT, 100)
    assert 5 < len({*tree.tokens[1:].tolist()}) <= MOST


# --- in rounds -----------------------------------------------------------------------------------------------

FEW = 24  # tokens of a vocabulary that is known whole


class Knowing(Scripted):
    """Knows what the target makes of every path."""

    def __init__(self, target: Target) -> None:
        super().__init__("knowing", max_depth=4)
        self.target = target

    def propose(self, tokens: list[int], width: int) -> Draft:
        return Known(self.target, tokens)  # type: ignore[return-value]

    def draft(self, requests: list[Request]) -> list[Draft]:
        return [Known(self.target, [*request.state, request.root]) for request in requests]


class Known:
    faint = 0.0

    def __init__(self, target: Target, tokens: list[int]) -> None:
        self.target, self.tokens = target, tokens

    def start(self) -> tuple[int, ...]:
        return ()

    def children(self, place: tuple[int, ...]) -> Iterator[Child]:
        if len(place) < 4:
            logp = plain_logits(self.target, [*self.tokens, *place])[-1].log_softmax(-1)
            yield from (
                (-p, token, 0) for p, token in sorted(((p, t) for t, p in enumerate(logp.tolist())), reverse=True)
            )

    def step(self, place: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*place, token)


def written(target: Target, drafter, policy: str, foresight: bool, sampling: Sampling, backend: str = "host"):
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work)
    made = Engine(target, drafter, registry.policy(policy), latency, backend=backend, foresight=foresight)
    steps = list(made.run([1, 2, 3], 40, sampling))
    rounds = [step.round for step in steps if step.round is not None]
    return [token for step in steps for token in step.tokens], rounds


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_who_knows_the_target_foresees_every_draw(temperature: float) -> None:
    """A chain is accepted whole in every round but the last; who does not look at the noise loses nodes in most."""
    target, sampling = tiny_target(vocab_size=FEW), Sampling(temperature, seed=5)
    text, rounds = written(target, Knowing(target), "dflash", True, sampling)
    assert all(round.accepted == round.n == 4 for round in rounds[:-1]) and len(rounds) == 8
    blind, more = written(target, Knowing(target), "dflash", False, sampling)
    assert blind == text and len(more) > len(rounds) + 3 * (temperature >= 1)


@pytest.mark.parametrize("policy", ["ddtree:7", "bastion", "beam:3x2"])
def test_what_is_foreseen_changes_no_text(policy: str) -> None:
    target, sampling = tiny_target(), Sampling(1.0, top_p=0.95, repetition_penalty=1.1, seed=8)
    truth, _ = written(target, None, "autoregressive", True, sampling)
    for foresight in (True, False):
        assert written(target, Noisy("noisy"), policy, foresight, sampling)[0] == truth


def test_engines_hand_their_foresight_on() -> None:
    target = tiny_target()
    made = Engine(
        target, None, registry.policy("dflash"), LatencyModel(Machine("x", 1, 1, 1), target.work), foresight=False
    )
    assert not made.fresh().request([1], 5, Sampling(1.0)).foresees
    made.foresight = True
    assert made.fresh().request([1], 5, Sampling(1.0)).foresees
    assert not made.fresh().request([1], 5, Sampling()).foresees, "a greedy target leaves nothing to foresee"


# --- on the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
def test_a_device_foresees_the_same(temperature: float, paired: bool) -> None:
    draft = random_trellis(3)
    lattice, sampling = draft.lattice, Sampling(temperature, seed=SEED)
    dice = Dice(20, 40, torch.device("cpu"))
    dice.reset(sampling, TEXT, foresees=True)
    tensors = [torch.from_numpy(part) for part in (lattice.tokens, lattice.logp, draft.pairs)]
    ahead = dice.ahead(torch.tensor(len(TEXT)), DEPTH)
    assert ahead is not None
    found = on_device.foreseen(Candidates(*tensors[: 2 + paired]), ahead)
    truth = foreseen(lattice, Sampler(sampling, TEXT).ahead)
    assert isinstance(truth, Lattice) and found.tokens.tolist() == truth.tokens.tolist()
    np.testing.assert_allclose(found.logp.numpy(), truth.logp, rtol=1e-5, atol=1e-6)
    assert (found.pairs is not None) == paired
    if found.pairs is not None:
        rows = foreseen(draft, Sampler(sampling, TEXT).ahead)
        assert isinstance(rows, Trellis)
        for d, a in itertools.product(range(1, DEPTH), range(WIDTH)):
            tokens, logp = rows.row(d, int(found.tokens[d - 1, a]))
            expected = dict(zip(tokens, logp, strict=True))
            again = [expected[int(token)] for token in found.tokens[d]]
            np.testing.assert_allclose(found.pairs[d - 1, a].numpy(), again, rtol=1e-5, atol=1e-6)


def test_a_device_foresees_nothing_unasked() -> None:
    dice = Dice(20, 40, torch.device("cpu"))
    dice.reset(Sampling(1.0), TEXT, foresees=False)
    assert dice.ahead(torch.tensor(4), 3) is None


def test_positions_behind_the_last_one_have_some_noise() -> None:
    """They are never emitted."""
    dice = Dice(6, 40, torch.device("cpu"))
    dice.reset(Sampling(1.0), TEXT, foresees=True)
    ahead = dice.ahead(torch.tensor(5), 3)
    assert ahead is not None and ahead.over(torch.arange(9)).isfinite().all()


# --- candidates ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("size", "k"), [(5, 8), (64, 8), (1000, 32), (8000, 32)])
@pytest.mark.parametrize("heat", [0.4, 1.0, 8.0])
def test_candidates_are_those_that_noise_favours(size: int, k: int, heat: float, named: bool) -> None:
    """By definition, compiled or not: the largest sums, in the order of their probability."""
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(4, size, generator=generator) * 3).bfloat16()
    ids = torch.randperm(9 * size, generator=generator)[:size].sort().values if named else None
    ahead = Ahead(keys(1, 7, 4), heat)
    tokens = np.arange(size) if ids is None else ids.numpy()
    sums = logits.double().numpy() + np.minimum(ahead.of(np.arange(4)[:, None], tokens), FAVOUR * heat)
    truth = torch.log_softmax(logits.double(), -1)
    placed = Ahead(torch.from_numpy(ahead.keys), torch.tensor(heat, dtype=torch.float64))  # as a device has it
    for form, noise in itertools.product((logits, logits.double(), logits.float()), (ahead, placed)):
        rows, logp = head_rows(form, k, ids, noise)
        for r in range(4):
            assert set(rows[r].tolist()) == set(np.argsort(-sums[r])[:k].tolist())
        torch.testing.assert_close(logp.double(), truth.gather(1, rows), rtol=1e-4, atol=1e-4)
        assert (logp[:, 1:] <= logp[:, :-1]).all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("alive", [0, 1, 5])
def test_where_few_tokens_are_alive_each_is_named_once(alive: int) -> None:
    logits = torch.full((2, 70), -torch.inf).bfloat16()
    logits[:, torch.arange(alive) * 13 + 1] = torch.arange(alive).bfloat16()
    rows, logp = head_rows(logits, 8, None, Ahead(keys(1, 7, 2), 1.0))
    for r in range(2):
        assert len(set(rows[r].tolist())) == 8
        named = {int(row) for row, p in zip(rows[r], logp[r], strict=True) if p > -torch.inf}
        assert named == {13 * i + 1 for i in range(alive)}
