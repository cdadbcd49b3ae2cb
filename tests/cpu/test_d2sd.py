"""D²SD against its formulas: where it begins again, what it makes of the second pass, and when it leaves it out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood import registry
from draftwood.drafters import d2sd
from draftwood.drafters.base import Request
from draftwood.drafters.d2sd import Anchored, D2SDDrafter, Options, boundaries, first_rejection, naive_samples
from draftwood.drafters.worth import LOOKS, Trials
from draftwood.errors import BadInput, BadModel
from draftwood.grow import grow
from draftwood.tree import Lattice
from draftwood.trellis import Trellis
from tests.reference import Noisy, byte_tokenizer, plain_logits, tiny_dflash, tiny_target

CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def chain_of(confidences: list[float], first_token: int = 1) -> Lattice:
    """Two candidates at each depth; the likelier one has this confidence."""
    p = np.array([[c, (1 - c) / 2] for c in confidences])
    tokens = np.arange(first_token, first_token + p.size).reshape(p.shape)
    return Lattice(tokens, np.log(p).astype(np.float32))


def test_naive_samples_are_the_chain_and_paths_drawn_from_the_marginals() -> None:
    """Masses are the lattice's; each node is drawn as often as its mass says."""
    lattice = chain_of([0.7, 0.6])
    tree = naive_samples(lattice, 9, 3, np.random.default_rng(0))
    assert tree.tokens[0] == 9 and (np.diff(tree.mass) <= 0).all() and len(tree) <= 2 * 4
    assert [1, 3] in [tree.tokens[tree.path(node)].tolist() for node in range(len(tree) + 1)], "the chain is in it"
    paths = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(1, len(tree) + 1)}
    assert len(paths) == len(tree), "nothing twice"
    p = dict(zip(lattice.tokens.flatten().tolist(), np.exp(lattice.logp).flatten().tolist(), strict=True))
    for node in range(1, len(tree) + 1):
        assert tree.mass[node] == pytest.approx(
            np.prod([p[t] for t in tree.tokens[tree.path(node)].tolist()]), rel=1e-5
        )
    trees = [naive_samples(lattice, 9, 1, np.random.default_rng(seed)) for seed in range(2000)]
    second = np.mean([2 in tree.tokens[tree.depths == 1] for tree in trees])
    assert second == pytest.approx(0.15 / 0.85, abs=0.03), "among the tokens that are listed"


def test_samples_do_not_depend_on_anything_but_the_place_in_the_text() -> None:
    target = tiny_target()
    made = D2SDDrafter(drafter := tiny_dflash(target), drafter, Options(samples=4), "d2sd")
    trees = [made.draft([Request(opened(made, target), 7, 5)])[0] for _ in range(2)]
    np.testing.assert_array_equal(trees[0].tokens, trees[1].tokens)


def test_scores_are_the_probabilities_of_the_first_rejection() -> None:
    """They sum to what is not accepted whole; checked against all outcomes of independent coins."""
    c = [0.9, 0.6, 0.8, 0.7]
    scores = first_rejection(np.array(c, np.float32))
    np.testing.assert_allclose(scores, [0.1, 0.9 * 0.4, 0.9 * 0.6 * 0.2, 0.9 * 0.6 * 0.8 * 0.3], rtol=1e-5)
    assert scores.sum() == pytest.approx(1 - np.prod(c), rel=1e-5)


def test_boundaries_are_the_likeliest_and_never_the_root() -> None:
    draft = Anchored(chain_of([0.9, 0.6, 0.8, 0.7]))
    assert boundaries(draft, 2, 8) == [(1,), (1, 3, 5)]  # 0.36, then 0.1296 before 0.108
    assert boundaries(draft, 9, 2) == [(1,)], "a block is no longer than the second drafter's"
    draft.add((1,), chain_of([0.5, 0.5, 0.5], first_token=52))
    assert (1,) not in boundaries(draft, 9, 8) and (1, 52) in boundaries(draft, 9, 8), (
        "a third level follows the second"
    )


def test_a_block_that_begins_again_takes_over_its_node() -> None:
    first, second = chain_of([0.9, 0.6, 0.8]), chain_of([0.7, 0.9], first_token=52)
    draft = Anchored(first)
    draft.add((1,), second)

    def children(path: list[int]) -> list[tuple[int, int]]:
        place = draft.start()
        for token in path:
            place = draft.step(place, token)
        return [(token, source) for _, token, source in draft.children(place)]

    assert children([]) == [(1, 0), (2, 0)], "the root is the first pass's"
    assert children([1]) == [(52, 1), (53, 1)], "behind the boundary the second pass's"
    assert children([1, 52]) == [(54, 1), (55, 1)] and children([1, 3]) == [(54, 1), (55, 1)]
    assert children([2]) == [(3, 0), (4, 0)] and not children([1, 52, 54])
    tree = grow(draft, 9, 20)
    assert (np.diff(tree.mass) <= 0).all() and set(tree.sources[1:]) == {0, 1}


@torch.inference_mode()
def opened(drafter, target):
    state = drafter.open(32)
    taps = []
    cache = target.new_cache(32)
    target.tap(drafter.tap_layers)
    taps = target.prefill(CONTEXT, cache).taps
    drafter.extend(state, CONTEXT, taps)
    return state


def test_blocks_with_seen_tokens_share_one_pass_and_nothing_else() -> None:
    target = tiny_target()
    drafter = tiny_dflash(target)
    state = opened(drafter, target)
    request = Request(state, 7, 5)
    blocks = [(request, ()), (request, (11,)), (request, (11, 12, 13)), (request, (20, 12, 13))]
    together = drafter.draft_behind(blocks)
    for block, found in zip(blocks, together, strict=True):
        (alone,) = drafter.draft_behind([block])
        np.testing.assert_array_equal(found.tokens, alone.tokens)
        np.testing.assert_allclose(found.logp, alone.logp, rtol=1e-6)
    np.testing.assert_array_equal(together[0].tokens, drafter.draft([request])[0].tokens)
    assert not np.allclose(together[2].logp, together[3].logp), "a seen token is seen"
    assert not np.allclose(together[0].logp[3:], together[2].logp)


@pytest.mark.parametrize("again", [0, 1])
def test_the_second_pass_can_be_forced_and_forbidden(again: int) -> None:
    target = tiny_target()
    made = D2SDDrafter(
        tiny_dflash(target), tiny_dflash(target, seed=2, taps=(1, 0)), Options(again=again, further=0), "d2sd"
    )
    assert made.tap_layers == (0, 2, 1)
    state = opened(made, target)
    draft = made.draft([Request(state, 7, 5)])[0]
    assert isinstance(draft, Anchored if again else Lattice)
    if again:
        assert len(draft.anchors) == 1 + 4 and all(len(path) for path in draft.anchors if path)
    made.rewind(state, 3)
    made.extend(state, CONTEXT[3:], target.prefill(CONTEXT, target.new_cache(16)).taps[3:])
    after = made.draft([Request(state, 7, 5)])[0]
    first, second = (d.anchors[()] if again else d for d in (draft, after))
    np.testing.assert_allclose(first.logp, second.logp, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16), (4, 16)])
def test_a_further_block_continues_the_chain_where_trees_reach_its_end(sizes: tuple[int, int]) -> None:
    """Its rows are those of a block that begins in the chain, at the right positions and behind the same context."""
    target = tiny_target()
    first, second = tiny_dflash(target, block_size=sizes[0]), tiny_dflash(target, seed=2, block_size=sizes[1])
    made = D2SDDrafter(first, second, Options(again=0, further=1), "d2sd")
    state = opened(made, target)
    deepest, seen = first.max_depth, min(second.max_depth // 2, first.max_depth - 1)
    assert made.max_depth == deepest + second.max_depth - seen
    shallow = made.draft([Request(state, 7, 5, depth=deepest)])[0]
    assert isinstance(shallow, Lattice), "nobody goes that deep"
    draft = made.draft([Request(state, 7, 5, depth=deepest + 2)])[0]
    chain = draft.anchors[()].tokens[:, 0].tolist()
    place = draft.start()
    for depth, token in enumerate(chain):
        assert {child for _, child, _ in draft.children(place)} == set(draft.anchors[()].tokens[depth].tolist())
        place = draft.step(place, token)
    gap = deepest - seen
    begins = Request(state.second, chain[gap - 1], 5)
    (expected,) = second.draft_behind([(begins, chain[gap:])], gap)
    assert len(expected) == second.max_depth - seen
    for row in expected.tokens:
        found = list(draft.children(place))
        assert [token for _, token, _ in found] == row.tolist() and found[0][2] == 1
        place = draft.step(place, found[0][1])
    assert not list(draft.children(place)), "and no further"
    (elsewhere,) = second.draft_behind([(begins, chain[gap:])], 0)
    assert not np.allclose(expected.logp, elsewhere.logp), "positions count what lies between"


def test_both_passes_know_which_candidate_follows_which() -> None:
    """Behind each of its tokens a block says what its scores of pairs make of it; where it begins, its marginals."""
    target = tiny_target()
    first, second = tiny_dflash(target, rank=4), tiny_dflash(target, seed=2, rank=4)
    made = D2SDDrafter(first, second, Options(boundaries=2, again=1, further=0), "d2sd")
    draft = made.draft([Request(opened(made, target), 7, 5)])[0]
    for path, block in draft.anchors.items():
        assert isinstance(block, Trellis) and len(block) == first.max_depth - len(path)
        tokens, confidence = d2sd.chain_of(block)
        place = draft.start()
        for token in path:
            place = draft.step(place, token)
        for row, (token, sure) in enumerate(zip(tokens, confidence, strict=True)):
            cost, likeliest, _ = next(draft.children(place))
            assert (likeliest, np.exp(-cost)) == (token, pytest.approx(sure, rel=1e-5))
            before = tokens[row - 1] if row else -1
            assert block.row(row, before)[0][0] == token
            place = draft.step(place, token)
            if place.block is not block:
                break
    alone = D2SDDrafter(first, second, Options(again=0, further=0), "d2sd")
    (only,) = alone.draft([Request(opened(alone, target), 7, 5)])
    (same,) = first.draft([Request(opened(first, target), 7, 5)])
    np.testing.assert_allclose(only.pairs, same.pairs, rtol=1e-5)


def test_without_further_blocks_nothing_is_deeper_than_a_block() -> None:
    target = tiny_target()
    made = D2SDDrafter(drafter := tiny_dflash(target), drafter, Options(again=0, further=0), "d2sd")
    assert made.max_depth == drafter.max_depth
    assert isinstance(made.draft([Request(opened(made, target), 7, 5)])[0], Lattice)


@pytest.mark.parametrize("pays", [True, False])
def test_what_does_not_pay_is_left_out(pays: bool) -> None:
    """A second pass that costs 5 of 30 ms, and brings a token more, or nothing."""
    now, chosen = 0.0, []
    trials = Trials(clock=lambda: now)
    for _ in range(200):
        trials.begin()
        done = trials.choose(0.5)
        chosen.append(done)
        now += 0.035 if done else 0.030
        trials.emitted(3 + (done and pays))
        now += 1.0 if done == pays else 0.0  # the caller's, which the better way must not be charged with
        trials.emitted(1)  # of a round without a draft
    assert chosen[: 2 * LOOKS].count(True) == LOOKS, "both are tried"
    assert (np.mean(chosen[20:]) > 0.9) == pays and 0.0 < np.mean(chosen[20:]) < 1.0, "and looked at again"


@pytest.mark.parametrize("argument", ["", "a,b,c", "boundaries=3"])
def test_needs_one_or_two_names(argument: str) -> None:
    with pytest.raises(BadModel, match="d2sd:FIRST,SECOND"):
        registry.drafter(f"d2sd:{argument}", tiny_target())


def test_a_draft_model_is_silent_where_it_cannot_read_any_more() -> None:
    from draftwood.drafters.draft_model import DraftModel
    from draftwood.drafters.draft_model import Options as Beam

    drafter = DraftModel(
        tiny_target("gpt2", n_positions=16, max_position_embeddings=16), Beam(depth=2, beam=2), "small", 97
    )
    state = drafter.open(64)
    drafter.extend(state, list(range(1, 16)), None)
    (tree,) = drafter.draft([Request(state, 5, 4)])
    assert len(tree) <= 2, "there is one position for nodes"
    drafter.extend(state, [5] * 10, None)
    (tree,) = drafter.draft([Request(state, 5, 4)])
    assert len(tree) == 0


def test_draft_models_write_their_own_beam(tmp_path) -> None:
    """Masses are the small model's own probabilities along each path, whatever it was fed before."""
    from draftwood.drafters.draft_model import DraftModel
    from draftwood.drafters.draft_model import Options as Beam

    model = tiny_target("qwen2", seed=5)
    drafter = DraftModel(model, Beam(depth=3, beam=2), "small", 97)
    state = drafter.open(32)
    drafter.extend(state, CONTEXT[:5], None)
    drafter.draft([Request(state, 8, 4)])
    drafter.extend(state, [8, 8], None)
    drafter.rewind(state, 5)
    drafter.extend(state, CONTEXT[5:], None)
    tree = drafter.draft([Request(state, 7, 4)])[0]
    assert len(tree) == 2 + 4 + 4 and tree.depths.max() == 3
    for node in range(1, len(tree) + 1):
        path = tree.tokens[tree.path(node)].tolist()
        logp = plain_logits(model, [*CONTEXT, 7, *path]).log_softmax(-1)
        whole = sum(float(logp[len(CONTEXT) + i, token]) for i, token in enumerate(path))
        assert tree.mass[node] == pytest.approx(np.exp(whole), rel=1e-4)
    first = [node for node in range(1, len(tree) + 1) if tree.depths[node] == 1]
    best = plain_logits(model, [*CONTEXT, 7])[-1].topk(2).indices.tolist()
    assert tree.tokens[first].tolist() == best


@pytest.mark.parametrize("vocab", [90, 110])
def test_heads_of_one_tokenizer_may_differ_in_padding(vocab: int) -> None:
    """As Qwen2.5's, of whose sizes the smaller have fewer rows. What one head lacks is neither read nor proposed."""
    from draftwood.drafters.draft_model import DraftModel
    from draftwood.drafters.draft_model import Options as Beam

    model = tiny_target(seed=5, vocab_size=vocab)
    drafter = DraftModel(model, Beam(depth=3, beam=4), "small", 97)
    state = drafter.open(32)
    drafter.extend(state, CONTEXT, None)
    (tree,) = drafter.draft([Request(state, 7, 4)])
    expected = plain_logits(model, [*CONTEXT, 7])[-1, :97].topk(4).indices.tolist()
    assert tree.tokens[tree.depths == 1].tolist() == expected
    drafter.extend(state, [7, 96], None)  # the smaller head has no such token
    assert len(drafter.draft([Request(state, 7, 4)])[0]) == (0 if vocab == 90 else 4 + 4 * 4 + 4 * 4)
    drafter.rewind(state, len(CONTEXT) + 1)
    (again,) = drafter.draft([Request(state, 8, 4)])
    assert len(again) and again.tokens.max() < 97


def test_draft_models_must_have_the_targets_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.drafters import draft_model
    from draftwood.drafters.draft_model import check_same_tokens

    with monkeypatch.context() as tokenizers:
        tokenizers.setattr(draft_model, "load_tokenizer", lambda name, trusted: byte_tokenizer())
        check_same_tokens(tiny_target(vocab_size=90), tiny_target())
    check_same_tokens(tiny_target("qwen2"), tiny_target())
    with pytest.raises(BadModel, match="50 tokens"):
        check_same_tokens(tiny_target(vocab_size=50), tiny_target())
    with pytest.raises(BadInput, match="'depth'"):
        registry.drafter("draft-model:x,dept=3", tiny_target())
    with pytest.raises(BadModel, match="draft-model:FOLDER"):
        registry.drafter("draft-model:", tiny_target())


def test_a_conditional_draft_is_pooled_like_any_other() -> None:
    from draftwood.drafters.pooled import Pooled

    target = tiny_target()
    made = Pooled([D2SDDrafter(tiny_dflash(target), tiny_dflash(target, seed=2), Options(again=1), "d"), Noisy("n")])
    state = opened(made, target)
    tree = grow(made.draft([Request(state, 7, 5)])[0], 7, 12)
    assert (np.diff(tree.mass) <= 0).all() and len(tree) > 3
