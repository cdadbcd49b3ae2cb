"""Pooled drafts against the formulas, growth of conditional drafts against its definition, and what is learned."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import registry
from draftwood.bench.worse import Shifted
from draftwood.drafters.automaton import automaton
from draftwood.drafters.base import Carded, Request
from draftwood.drafters.d2sd import D2SDDrafter, Options
from draftwood.drafters.pooled import Pooled, Recycling
from draftwood.errors import BadInput
from draftwood.experts import KINDS, LatticeExpert, Matches, Opinion, TreeExpert
from draftwood.foresight import foreseen
from draftwood.grow import _pop_conditional, beam, chain, grow
from draftwood.native import successors
from draftwood.native.pooled import quicker
from draftwood.noise import Ahead, keys
from draftwood.pool import FLOOR, Pool
from draftwood.pool_gain import FIRST, GUESSED, LONGER, NEW, PAYS, SELDOM, SURE, Case, Gain, Gains
from draftwood.pool_weights import STEP, Weights
from draftwood.successors import LEARNED, Learn, Successors
from draftwood.tree import FAINT, Lattice, Tree, chain_tree
from draftwood.trellis import Trellis
from tests.cpu.test_grow import same
from tests.reference import Branching, Noisy, lattice, tiny_dflash, tiny_target

V, D, K = 12, 4, 5


def random_lattice(seed: int) -> Lattice:
    """The K likeliest of V tokens at each depth."""
    rng = np.random.default_rng(seed)
    whole = lattice(np.stack([rng.permutation(V) for _ in range(D)]), rng.normal(size=(D, V)) * 2)
    return Lattice(whole.tokens[:, :K], whole.logp[:, :K])


def taught(seed: int) -> Successors:
    rng, table = np.random.default_rng(seed), Successors()
    for token in range(V // 2):  # the others stay unknown
        table.learn([token], rng.permutation(V)[None, :4], np.array([[0.5, 0.2, 0.1, 0.05]]))
    return table


def pool_of(seed: int, **parts) -> Pool:
    own = dict(table=taught(seed), experts=[LatticeExpert(random_lattice(seed + 1), 1), TreeExpert(branches(), 2)])
    return Pool(3, random_lattice(seed), **{**own, "weights": Weights(), "max_depth": D, **parts})


def branches() -> Tree:
    return Branching("b", vocab=V).propose([3], 4)


def everything(pool: Pool, place) -> dict[int, float]:
    children = list(pool.children(place))
    assert len({token for _, token, _ in children}) == len(children), "no token twice"
    assert [cost for cost, *_ in children] == sorted(cost for cost, *_ in children), "likeliest first"
    return {token: math.exp(-cost) for cost, token, _ in children}


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.lists(st.integers(0, V - 1), max_size=D - 1))
def test_children_are_a_distribution(seed: int, path: list[int]) -> None:
    pool = pool_of(seed)
    place = pool.start()
    for token in path:
        place = pool.step(place, token)
    found = everything(pool, place)
    assert sum(found.values()) <= 1 + 1e-9 and all(p > 0 for p in found.values())


def test_the_product_is_the_formula() -> None:
    """q^a s^b over the lattice's tokens, the table's, and what lies outside of both."""
    q, table, weights = random_lattice(0), taught(0), Weights()
    a, b = weights.exponents[1][0], weights.exponents[1][1]
    pool = pool_of(0, experts=[], weights=weights)
    found = everything(pool, pool.step(pool.start(), 2))
    powers = dict(zip(q.tokens[1].tolist(), np.exp(a * q.logp[1].astype(np.float64)), strict=True))
    _, s = table.of(2)
    least = 0.5 * min(powers.values())
    scores = {t: powers.get(t, least) * (s.get(t, 0.0) + FLOOR) ** b for t in {*powers, *s}}
    outside = (1 - math.fsum(np.exp(q.logp[1].astype(np.float64)))) * FLOOR**b
    total = sum(scores.values()) + outside
    assert found == pytest.approx({t: score / total for t, score in scores.items()}, rel=1e-6)


def test_an_unknown_token_leaves_the_lattice_as_it_is() -> None:
    q, weights = random_lattice(0), Weights(exponents=np.tile([1.0, 0.6, 0.6, 0.6], (8, 1)))
    pool = pool_of(0, experts=[], weights=weights)
    found = everything(pool, pool.step(pool.start(), V - 1))
    assert found == pytest.approx(dict(zip(q.tokens[1].tolist(), np.exp(q.logp[1]).tolist(), strict=True)), rel=1e-5)


def test_opinions_are_mixed_by_their_shares() -> None:
    pool = Pool(3, None, None, [TreeExpert(branches(), 1)], Weights(), D)
    assert everything(pool, pool.start()) == pytest.approx({4: 0.5 * 0.6, 5: 0.5 * 0.3}, rel=1e-5)
    assert everything(pool, pool.step(pool.start(), 4)) == pytest.approx({4: 0.25, 5: 0.5 / 3}, rel=1e-5)
    assert not everything(pool, pool.step(pool.start(), 9)), "it knows nothing of that path"


def slow_growth(pool: Pool, root: int, n: int) -> list[tuple[float, tuple[int, ...]]]:
    """Best-first growth by its definition: of all children of the nodes taken so far, take the likeliest."""
    taken, front = [((), 1.0, pool.start())], []
    while len(taken) <= n:
        path, mass, place = taken[-1]
        front += [(mass * p, (*path, token), pool.step(place, token)) for token, p in everything(pool, place).items()]
        if not front or max(front, key=lambda node: node[0])[0] < FAINT:
            break
        best = max(front, key=lambda node: node[0])
        front.remove(best)
        taken.append((best[1], best[0], best[2]))
    return [(mass, path) for path, mass, _ in taken[1:]]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 30))
def test_growth_is_best_first(seed: int, n: int) -> None:
    tree = grow(pool_of(seed), 3, n)
    expected = slow_growth(pool_of(seed), 3, n)
    assert len(tree) == len(expected)
    np.testing.assert_allclose(tree.mass[1:], [mass for mass, _ in expected], rtol=1e-5)
    found = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(1, len(tree) + 1)}
    assert found == {path for _, path in expected}
    assert (np.diff(tree.mass) <= 0).all() and len(tree.sources) == len(tree.tokens)


def matches(texts: list[list[int]]) -> list[Matches]:
    found = []
    for i, text in enumerate(texts):
        made = automaton()
        made.extend(text)
        found.append(Matches(made, made.step(*made.end, 3), 1 + i // 2, "text"))
    return found


def test_an_opinion_that_was_long_of_no_use_is_heard_again() -> None:
    """As soon after ten thousand useless choices as after a thousand."""
    kept = []
    for useless in (1_000, 10_000):
        weights, opinion = Weights(), Opinion(("text", 0, 0), 0.5, {})
        for _ in range(useless):
            weights.credit(opinion, 0.5, 0.0)
        assert 0 < weights.share(opinion) < 0.01
        choices = 0
        while weights.share(opinion) < 0.5:
            weights.credit(opinion, 0.3, 0.9)
            choices += 1
        kept.append(choices)
    assert kept[0] == kept[1] < 500


TEXT = st.lists(st.integers(0, V - 1), min_size=1, max_size=80)
COSTS = st.floats(0.1, 8.0) | st.just(math.inf)


@pytest.mark.usefixtures("compiled")
@settings(max_examples=300)
@given(st.integers(0, 10**6), st.lists(TEXT, max_size=2), st.integers(0, 40), COSTS, COSTS, st.data())
def test_compiled_growth_is_that_of_asking_node_by_node(
    seed: int, texts: list[list[int]], n: int, most: float, barren: float, data: st.DataObject
) -> None:
    """With all kinds of parts, what was learned of matches, noise ahead, and spoiled depths."""
    rng, weights = np.random.default_rng(seed), Weights()
    for kind in np.ndindex(*KINDS):
        if rng.random() < 0.5:
            weights.credit(Opinion(("text", *kind), 0.5, {}), *rng.random(2))
    experts = matches(texts)
    block, width = random_lattice(seed), data.draw(st.integers(1, 20))
    if data.draw(st.booleans()):
        wide = np.stack([rng.permutation(30)[:width] for _ in range(D)])
        logp = np.where(rng.random((D, width)) < 0.1, np.nan, -rng.exponential(3.0, (D, width)) - np.log(width))
        pairs = np.where(rng.random((D - 1, width, width)) < 0.1, -np.inf, logp[1:, None] - rng.random((width, 1)))
        block = Trellis(Lattice(wide, -np.sort(-logp.astype(np.float32))), pairs.astype(np.float32))
    parts = {
        "lattice": data.draw(st.sampled_from([block, None])),
        "table": data.draw(st.sampled_from([taught(seed), None])),
        "max_depth": data.draw(st.integers(1, 6)),
    }
    draft: Pool | Shifted = Pool(3, experts=experts, weights=weights, own=5, table_source=6, quicker=quicker(), **parts)
    if data.draw(st.booleans()):
        draft = Shifted(draft, rng.integers(0, 40, 6), 40)
    if data.draw(st.booleans()):
        draft = foreseen(draft, lambda depths: Ahead(keys(seed, 0, depths), 0.7))
    tree, asked = draft.grown(3, n, most, barren), _pop_conditional(draft, 3, n, most, barren)
    assert tree is not None
    for part in ("tokens", "parents", "depths", "sources"):
        np.testing.assert_array_equal(getattr(tree, part), getattr(asked, part))
    np.testing.assert_allclose(tree.mass, asked.mass, rtol=1e-6)


@pytest.mark.usefixtures("compiled")
@settings(max_examples=200)
@given(st.integers(0, 10**6), st.lists(TEXT, max_size=2), st.lists(st.integers(0, V), min_size=1, max_size=8))
def test_compiled_learning_is_the_other_one(seed: int, texts: list[list[int]], chosen: list[int]) -> None:
    weights, gains = (Weights(), Weights()), (Gains(), Gains())
    for _ in range(3):  # what was learned is what the next one begins with
        for one, brought, way in zip(weights, gains, (quicker(), None), strict=True):
            table = taught(seed) if seed % 3 else None
            lattice = random_lattice(seed) if seed % 4 else None
            case = brought.case(0, Gain())
            Pool(3, lattice, table, matches(texts), one, D, quicker=way, case=case).learn(chosen)
    assert gains[0].choices == gains[1].choices
    made, plain = (brought.kinds[0] for brought in gains)
    assert made.gain.mean == pytest.approx(plain.gain.mean, abs=1e-9)
    assert made.block.mean == pytest.approx(plain.block.mean, abs=1e-9)
    made, plain = weights
    np.testing.assert_allclose(made.exponents, plain.exponents, rtol=1e-9)
    np.testing.assert_allclose(made.matched("text"), plain.matched("text"), rtol=1e-9)


@pytest.mark.usefixtures("compiled")
def test_the_table_knows_nothing_of_what_is_no_token() -> None:
    """Whatever lies before it: drafts are checked once they have grown."""
    table, strange = taught(0), Lattice(np.full((2, 1), -2), np.full((2, 1), -0.1, np.float32))
    whole = np.concatenate([np.zeros(8, np.int32), table.slots])
    table.slots = whole[8:]
    assert table.of(-2) == table.of(-len(whole)) == (0, {})
    compiled, plain = (Pool(3, strange, table, [], Weights(), 2, quicker=way) for way in (quicker(), None))
    tree = grow(compiled, 3, 30)
    same(tree, grow(plain, 3, 30))
    assert {int(tree.tokens[node]) for node in range(1, len(tree) + 1) if tree.tokens[tree.parents[node]] == -2} == {-2}


@pytest.mark.usefixtures("compiled")
def test_pools_with_parts_that_are_not_compiled_are_asked() -> None:
    whole = Pool(3, random_lattice(0), taught(0), [], Weights(), D, quicker=quicker())
    assert whole.grown(3, 8, math.inf, math.inf) is not None
    mixed = pool_of(0, quicker=quicker())
    assert mixed.grown(3, 8, math.inf, math.inf) is None
    same(grow(mixed, 3, 8), grow(pool_of(0), 3, 8))


def test_chains_and_beams_of_a_conditional_draft() -> None:
    one = chain(pool_of(1), 3, D)
    assert one.is_chain and len(one) <= D
    pool, place = pool_of(1), pool_of(1).start()
    for token in one.tokens[1:]:
        assert token == next(pool.children(place))[1]
        place = pool.step(place, int(token))
    wide = beam(pool_of(1), 3, 2, 3)
    assert all((wide.depths == d).sum() == 2 for d in (1, 2, 3)) and (np.diff(wide.mass) <= 0).all()


def test_sources_follow_prefixes_and_cuts() -> None:
    tree = grow(pool_of(2), 3, 12)
    assert set(tree.sources[1:]) <= {0, 1, 2} and len(set(tree.sources[1:])) > 1
    np.testing.assert_array_equal(tree[:5].sources, tree.sources[:6])
    np.testing.assert_array_equal(tree.up_to_depth(1).sources, tree.sources[tree.depths <= 1])


def likelihood(pool: Pool, chosen: list[int]) -> float:
    place, total = pool.start(), 0.0
    for token in chosen:
        total += math.log(everything(pool, place).get(token, 1e-4))
        place = pool.step(place, token)
    return total


def test_learning_raises_the_likelihood_of_what_is_chosen() -> None:
    weights, chosen = Weights(), [int(t) for t in random_lattice(5).tokens[:, 2]]
    before = likelihood(pool_of(5, weights=weights), chosen)
    for _ in range(50):
        pool_of(5, weights=weights).learn(chosen)
    assert likelihood(pool_of(5, weights=weights), chosen) > before


def test_exponents_follow_the_gradient_of_the_likelihood() -> None:
    """Against finite differences, for a token that the table knows."""
    chosen = int(random_lattice(7).tokens[0, 0])

    def log_p(a: float, b: float) -> float:
        weights = Weights(exponents=np.tile([a, b, b, b], (8, 1)))
        return math.log(everything(pool_of(7, experts=[], weights=weights), (0, 3, ()))[chosen])

    weights, h = Weights(), 1e-5
    a, b = weights.exponents[0][:2].tolist()
    slopes = [(log_p(a + h, b) - log_p(a - h, b)) / (2 * h), (log_p(a, b + h) - log_p(a, b - h)) / (2 * h)]
    pool_of(7, experts=[], weights=weights).learn([chosen])
    moved = weights.exponents[0][:2] - [a, b]
    assert moved == pytest.approx(STEP * np.array(slopes), rel=1e-3)


def test_what_is_worthless_is_switched_off() -> None:
    """A drafter whose probabilities are right, beside a table that is wrong: the lattice goes out alone, and seldom
    is there a pool that could be judged once it is new no more."""
    made, rng = Pooled([Noisy("noisy", vocab=30, max_depth=1), Recycling()]), np.random.default_rng(0)
    state, root, alone, judged = made.open(8), 0, [], []
    for _ in range(NEW + 600):
        alone.append(isinstance(made.draft([Request(state, root, 97)])[0], Lattice))
        judged.append(state.pool is not None)
        right = made.parts[0].propose([*state.states[0], root], 97)
        p = np.exp(right.logp[0].astype(np.float64))
        chosen = int(rng.choice(right.tokens[0], p=p / p.sum()))
        made._recycling.table.learn([root], np.array([[(chosen + 1) % 97]]), np.array([[0.9]]))
        made.extend(state, [root], None)
        root = chosen
    assert all(alone) and all(judged[:NEW])
    assert np.mean(judged[-300:]) < 0.4


def test_what_pays_is_followed_once_it_has_shown_so() -> None:
    """A drafter that knows nothing, beside a table that knows what comes next."""
    made, root, alone = Pooled([Noisy("noisy", max_depth=1), Recycling()]), 0, []
    state = made.open(8)
    for _ in range(128):
        alone.append(isinstance(made.draft([Request(state, root, V)])[0], Lattice))
        chosen = (7 * root + 3) % V
        made._recycling.table.learn([root], np.array([[chosen]]), np.array([[0.9]]))
        made.extend(state, [root], None)
        root = chosen
    assert alone[0] and not any(alone[-64:])
    judged(made.gains.case(0, state.gain), -0.9, 1)
    assert made.gains.case(0, state.gain).pays, "one bad choice says little"
    judged(made.gains.case(0, state.gain), 0.0, 2 * NEW)
    assert not made.gains.case(0, state.gain).pays


def judged(case: Case, value: float, times: int, block: float = 0.5) -> None:
    """By choices to which pooling adds `value`, and the block `block`."""
    for _ in range(times):
        case.judge(0.5 + value, 0.5, 0.5 + value - block)


def test_drafts_behind_longer_matches_are_judged_apart() -> None:
    gains = Gains()
    assert [gains.case(match, Gain()).pays for match in (0, 2, 3, 5, 6, 99)] == [False] * 2 + [True] * 4, "as guessed"
    judged(gains.case(0, Gain()), 0.3, 4)
    judged(gains.case(LONGER[0], Gain()), -0.3, 10 * GUESSED)
    assert [gains.case(match, Gain()).pays for match in (0, 2, 3, 5, 6)] == [True, True, False, False, True]


def test_a_text_for_which_pooling_pays_is_found_among_others() -> None:
    """As one that copies is among answers that the drafter knows by heart, and the other way round."""
    for usual, here in ((-0.1, 0.3), (0.1, -0.3)):
        gains, own = Gains(), Gain()
        judged(gains.case(0, Gain()), usual, NEW)
        before = gains.case(0, Gain()).pays
        judged(gains.case(0, own), here, 12)
        assert gains.case(0, own).pays != before == gains.case(0, Gain()).pays


def test_a_block_that_adds_nothing_is_asked_for_seldom_once_that_is_sure() -> None:
    """Behind long matches here; elsewhere it is always."""
    gains = Gains()
    for match in (0, LONGER[-1]):
        judged(gains.case(match, Gain()), 0.3, SURE - GUESSED - 1, block=0.3 if match == 0 else 0.0)
        assert gains.case(match, Gain()).asks, "too little is known"
        judged(gains.case(match, Gain()), 0.3, 1, block=0.0)
    asked = [(case.asks, case.pools) for case in (gains.case(LONGER[-1], Gain()) for _ in range(4 * SELDOM))]
    assert sum(asks for asks, _ in asked) == 4 and all(pools for _, pools in asked)
    assert all(gains.case(0, Gain()).asks for _ in range(4 * SELDOM))
    judged(gains.case(LONGER[-1], Gain()), 0.3, SURE, block=0.3)
    assert gains.case(LONGER[-1], Gain()).asks, "it may come to know more"


def test_a_text_that_repeats_itself_is_drafted_without_the_drafter() -> None:
    """Which is asked for what is new, and now and then. It knows nothing here; its state follows the text anyway."""
    inner = Noisy("noisy", vocab=1000, max_depth=4)
    made = Pooled([inner, *registry.drafter("ngram", tiny_target()).parts])
    state, calls = made.open(400), []
    text = [(7 * i * i + 3) % 97 + 100 for i in range(40)] * 8
    inner.draft, own = lambda requests: calls.append(len(requests)) or own(requests), inner.draft
    found = []
    for at in range(len(text) - 1):
        found.append(made.draft([Request(state, text[at], 8, 4)])[0])
        made.extend(state, [text[at]], None)
    late = found[-80:]
    without = [draft for draft in late if not (isinstance(draft, Lattice) or draft.asked)]
    assert len(without) > 60 and 0 < len(calls) < len(found), "and looked at again"
    assert all(grow(draft, draft.root, 4).depths.max() == 4 for draft in without), "as deep as ever"
    assert state.states[0] == text[:-1]


def test_all_drafts_are_judged_at_first_and_those_of_a_text_at_its_beginning() -> None:
    gains, own = Gains(), Gain()

    def due(times: int) -> list[bool]:
        found = []
        for _ in range(times):
            case = gains.case(0, own)
            found.append(case.pools)
            if found[-1]:
                case.judge(0.4, 0.4 + PAYS, 0.0)
        return found

    assert all(due(NEW)) and sum(due(4 * SELDOM)) == 4
    own = Gain()
    assert all(due(FIRST)) and sum(due(4 * SELDOM)) == 4


def test_texts_that_begin_anew_are_judged_anew() -> None:
    made = Pooled([Noisy("noisy", max_depth=1), Recycling()])
    state = made.open(8)
    for root in range(3):
        made.draft([Request(state, root, V)])
        made.extend(state, [root], None)
    assert state.gain.choices == 2
    made.rewind(state, 1)
    assert state.gain.choices == 0 and made.gains.choices == 2


def test_drafts_are_judged_by_a_table_that_does_not_know_what_came_of_them() -> None:
    """What follows is drawn anew each time: the table knows nothing of it, unless it has read on."""
    made, rng = Pooled([Noisy("noisy", max_depth=1), Recycling()]), np.random.default_rng(0)
    state, root = made.open(8), 0
    for _ in range(1000):
        made.draft([Request(state, root, V)])
        chosen = int(rng.integers(V))
        made.extend(state, [root], None)
        made.learn([root], 20 * torch.eye(V)[[chosen]])
        root = chosen
    assert max(made.weights.exponents[0][1:]) < 0.7, "it would rise to 1.5"


@pytest.mark.parametrize("seed", range(5))
def test_what_a_draft_expected_is_judged_as_it_was_drafted(seed: int) -> None:
    """Token by token, when the table has heard what came, as at once when it had not."""
    at_once, later = (pool_of(seed, weights=Weights()) for _ in range(2))
    place, chosen = later.start(), []
    for _ in range(D):
        chosen.append(next(token for _, token, _ in later.children(place)))
        place = later.step(place, chosen[-1])
    chosen[-1] = (chosen[-1] + 1) % V  # the last one is another than expected
    views = later.expected(chosen[0])
    assert [best for _, best in views[:-1]] == chosen[1:-1] and len(views) == D - 1
    assert later.expected(chosen[0] + 1) == []
    later.table.learn(chosen[:-1], np.array(chosen[1:])[:, None], np.ones((D - 1, 1)))
    at_once.learn(chosen)
    later.learn_at(later._view(later.start()), chosen[0])
    for (view, _), token in zip(views, chosen[1:], strict=True):
        later.learn_at(view, token)
    assert later.case.own.choices == at_once.case.own.choices == D
    assert later.case.own.mean == pytest.approx(at_once.case.own.mean, abs=0.02)
    np.testing.assert_allclose(later.weights.exponents, at_once.weights.exponents, atol=STEP)


def test_drafts_of_which_nothing_is_verified_are_judged_by_all_that_follows() -> None:
    """As `record` drafts: after every token. Two thirds of the tokens are those that the draft before them expected."""
    made, rng = Pooled([Noisy("noisy", max_depth=4), Recycling()]), np.random.default_rng(0)
    state, root, rounds = made.open(8), 0, 30
    for _ in range(rounds):
        made.draft([Request(state, root, V)])
        first = next(token for _, token, _ in state.pool.children(state.pool.start()))
        made.extend(state, [root], None)
        root = first if rng.random() < 2 / 3 else int(rng.integers(V))
    assert made.gains.choices > 1.5 * rounds
    made.rewind(state, 3)
    assert state.expectations == []


def test_every_node_has_an_author() -> None:
    made = Pooled([Noisy("noisy", max_depth=1), Recycling()])
    tree = chain_tree([5, 6, 7])
    assert made.authors(tree) == ["noisy"] * 3, "a lattice alone"
    pooled = replace(tree, sources=np.array([0, 1, 0]))
    assert made.authors(pooled) == ["noisy", "recycling", "noisy"]


@pytest.fixture(params=[Successors.learn, pytest.param(successors.learn, id="compiled")], scope="module")
def learn(request: pytest.FixtureRequest, isolated_home: None) -> Learn:
    if request.param is successors.learn:
        request.getfixturevalue("compiled")
    return request.param


def test_the_table_holds_averages_of_what_was_seen(learn: Learn) -> None:
    table = Successors()
    learn(table, [1], np.array([[2, 3]]), np.array([[0.6, 0.4]]))
    learn(table, [1], np.array([[2, 4]]), np.array([[0.2, 0.8]]))
    assert table.of(1) == (2, pytest.approx({2: 0.4, 3: 0.2, 4: 0.4}))
    assert table.of(0) == (0, {})


def test_the_compiled_table_is_the_other_one(compiled: None) -> None:
    """Of more tokens, and successors of each, than there is room for at first."""
    plain, made, rng = Successors(), Successors(), np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 2000, 12).tolist()
        followers = np.stack([rng.permutation(40)[:LEARNED] for _ in tokens])
        probs = rng.random((12, LEARNED)) / LEARNED
        plain.learn(tokens, followers, probs)
        successors.learn(made, tokens, followers, probs)
    for token in range(2001):
        (seen, after), (found, same) = made.of(token), plain.of(token)
        assert seen == found and list(after) == list(same) and after == pytest.approx(same, rel=1e-12)


def test_recycling_learns_every_verified_node() -> None:
    made = registry.drafter("recycling", tiny_target())
    made.learn([5, 6], torch.eye(97)[:2] * 9)
    made.draft([])
    seen, followers = made._recycling.table.of(6)
    assert seen == 1 and max(followers, key=followers.get) == 1
    with pytest.raises(BadInput, match="no parameter"):
        registry.drafter("recycling:3", tiny_target())


def test_a_fresh_drafter_shares_weights_and_nothing_that_was_learned() -> None:
    noisy = Noisy("noisy", vocab=V)
    taught = Pooled([noisy, registry.drafter("ngram:earlier=100", tiny_target()).parts[0], Recycling()])
    state = taught.open(1)
    taught.extend(state, [1, 2, 3], None)
    taught.learn([1, 2], torch.randn(2, V))
    taught.open(1)  # the first text is an earlier one now
    taught.draft([])
    fresh = taught.fresh()
    assert fresh.parts[0] is noisy and fresh.name == taught.name and fresh.weights is not taught.weights
    assert [part.table.of(1)[0] for part in (taught.parts[2], fresh.parts[2])] == [1, 0]
    draft = fresh.draft([Request(fresh.open(1), 1, 4)])[0]
    assert draft is not None and fresh.parts[1]._earlier.states == 1


@pytest.mark.parametrize("specs", [[], ["none", "ngram"], ["ngram", "ngram"]])
def test_drafters_that_cannot_be_pooled(specs: list[str]) -> None:
    with pytest.raises(BadInput, match="drafters"):
        registry.drafter(specs, tiny_target())


def test_each_drafter_gets_the_taps_of_its_own_layers() -> None:
    parts = [Noisy("a", tap_layers=(2, 0)), Noisy("b", tap_layers=(1,)), Noisy("c")]
    made, got = Pooled(parts), []
    for part in parts:
        part.extend = lambda state, tokens, taps: got.append(None if taps is None else taps.tolist())
    assert made.tap_layers == (2, 0, 1)
    made.extend(made.open(8), [4], torch.tensor([[20.0, 21, 0, 1, 10, 11]]))
    assert got == [[[20, 21, 0, 1]], [[10, 11]], None]


def test_the_card_of_a_drafter_counts_for_the_pool() -> None:
    drafter = tiny_dflash(tiny_target())
    drafter.config = replace(drafter.config, tau=2.5)
    assert isinstance(drafter, Carded) and drafter.promised_tau == 2.5
    made = Pooled([Recycling(), drafter])
    assert isinstance(made, Carded) and made.promised_tau == 2.5
    assert Pooled([Recycling()]).promised_tau is None
    assert D2SDDrafter(drafter, drafter, Options(), "d2sd").promised_tau == 2.5


@pytest.mark.parametrize("texts", [["recycling"], ["ngram", "recycling"]])
def test_the_work_of_a_pool_is_that_of_its_drafters(texts: list[str]) -> None:
    target = tiny_target()
    memories, drafter = registry.drafter(texts, target), tiny_dflash(target)
    assert memories is not None and memories.work(40).bytes == memories.work(40).shared == 0
    one, pool = drafter.work(40), Pooled([Recycling(), drafter]).work(40)
    assert pool == one and one.shared > 0, "the head is the target's"
