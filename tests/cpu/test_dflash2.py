"""DFlash 2 (z-lab/dflash) and DSpark (deepseek-ai/DeepSpec) by their definitions.

DFlash 2 has convolutions within a block and a selector of which token follows which, DSpark a Markov head. The scores
are a trellis here, whose best path is the one that their makers follow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_config import parse_config
from draftwood.errors import BadModel
from draftwood.train.start import start
from draftwood.tree import Lattice
from draftwood.trellis import Trellis
from tests.cpu.test_dflash import check, last_states, reference
from tests.dflash_cases import BASE, SECOND, SECOND_FORMS, SPARK, VOCAB, TinyTarget, make_tensors, some_taps, write

TOP = {"DSpark": 32}  # candidates of a depth, if not 4


def made(form: str, folder: Path) -> tuple[dict, dict[str, Tensor], TinyTarget, DFlashDrafter]:
    config, target = {**BASE, **SECOND_FORMS[form]}, TinyTarget()
    tensors = make_tensors(config)
    return config, tensors, target, DFlashDrafter.load(write(folder, config, tensors), target)


def opened(drafter: DFlashDrafter, taps: Tensor):
    state = drafter.open(4)
    drafter.extend(state, [1] * len(taps), taps)
    return state


def edges(tensors: dict[str, Tensor], target: TinyTarget, states: Tensor, before: list[list[int]]) -> list[Tensor]:
    """For each depth, the scores [A, V] of all tokens behind each of the tokens `before`: U(b) + <A_a * H h, B_b>."""
    if "markov_head.markov_w1.weight" in tensors:
        a, b = (tensors[f"markov_head.markov_w{i}.weight"].double() for i in (1, 2))
        gates = torch.ones(len(states), 1)
    else:
        a, b = (tensors[f"candidate_selector.{n}_codebook"].double() for n in ("predecessor", "successor"))
        gates = states @ tensors["candidate_selector.hidden_projection.weight"].double().T
    unary = target.output(states.to(target.dtype)).double()
    return [u + (a[tokens] * gate) @ b.T for u, gate, tokens in zip(unary, gates, before, strict=True)]


@pytest.mark.parametrize("form", SECOND_FORMS)
def test_the_trellis_has_the_selectors_scores(form: str, tmp_path: Path) -> None:
    config, tensors, target, drafter = made(form, tmp_path)
    taps = some_taps(drafter, 20)
    draft = drafter.draft([Request(opened(drafter, taps), root=5, width=2)])[0]
    assert isinstance(draft, Trellis) and draft.lattice.tokens.shape == (7, TOP.get(form, 4)), (
        "as many as it was trained with"
    )
    states, tokens = last_states(config, tensors, target, taps, [5]), draft.lattice.tokens
    unary = torch.log_softmax(target.output(states.to(target.dtype)).double(), -1)
    for depth in range(7):
        assert set(tokens[depth]) == set(unary[depth].topk(TOP.get(form, 4)).indices.tolist())
    scores = edges(tensors, target, states, [[5], *tokens[:-1].tolist()])
    for depth, found in enumerate([draft.lattice.logp[:1], *draft.pairs]):
        moved = scores[depth][:, tokens[depth]] - target.output(states[depth].to(target.dtype)).double().logsumexp(-1)
        rest = 1 - unary[depth, tokens[depth]].exp().sum()
        expected = moved - (moved.exp().sum(-1, keepdim=True) + rest).log()
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert (np.diff(draft.lattice.logp[0]) <= 0).all()


@pytest.mark.parametrize("form", SECOND_FORMS)
def test_its_best_path_is_the_one_that_its_makers_follow(form: str, tmp_path: Path) -> None:
    config, tensors, target, drafter = made(form, tmp_path)
    taps = some_taps(drafter, 20)
    draft = drafter.draft([Request(opened(drafter, taps), root=5, width=1)])[0]
    states, path, before = last_states(config, tensors, target, taps, [5]), [], 5
    for depth in range(7):
        (scores,) = edges(tensors, target, states[depth : depth + 1], [[before]])
        top = target.output(states[depth].to(target.dtype)).topk(TOP.get(form, 4)).indices
        before = int(top[scores[0, top].argmax()])
        path.append(before)
    place, found = draft.start(), []
    for _ in range(7):
        token = next(iter(draft.children(place)))[1]
        place = draft.step(place, token)
        found.append(token)
    assert found == path


@pytest.mark.parametrize(("form", "left"), [("as published", 5), ("DSpark", 5)])
def test_a_block_behind_known_tokens_follows_the_last_of_them(form: str, left: int, tmp_path: Path) -> None:
    config, tensors, target, drafter = made(form, tmp_path)
    taps = some_taps(drafter, 20)
    draft = drafter.draft_behind([(Request(opened(drafter, taps), root=5, width=4), [8, 9])])[0]
    states = last_states(config, tensors, target, taps, [5, 8, 9])[2:]
    assert len(draft) == left
    (scores,) = edges(tensors, target, states[:1], [[9]])
    best = max(draft.lattice.tokens[0].tolist(), key=lambda token: float(scores[0, token]))
    assert draft.lattice.tokens[0, 0] == best


@pytest.mark.parametrize("form", SECOND_FORMS)
def test_blocks_of_several_requests_do_not_mix(form: str, tmp_path: Path) -> None:
    drafter = made(form, tmp_path)[3]
    taps = some_taps(drafter, 24)
    asked = [(opened(drafter, taps[:length]), root) for length, root in ((24, 5), (9, 6), (0, 7))]
    alone = [drafter.draft([Request(state, root, 3)])[0] for state, root in asked]
    together = drafter.draft([Request(state, root, 3) for state, root in asked])
    for one, other in zip(alone, together, strict=True):
        assert one.lattice.tokens.tolist() == other.lattice.tokens.tolist()
        np.testing.assert_allclose(one.pairs, other.pairs, atol=1e-5)


@pytest.mark.parametrize("form", SECOND_FORMS)
@torch.inference_mode()
def test_on_static_buffers_it_is_the_same(form: str, tmp_path: Path) -> None:
    drafter = made(form, tmp_path)[3]
    taps, placed = some_taps(drafter, 20), drafter.place(40)
    placed.extend(taps, torch.tensor(0))
    expected = drafter.draft([Request(opened(drafter, taps), root=5, width=3)])[0]
    found = placed.draft(torch.tensor([5]), torch.tensor(20), 3)
    assert placed.paired == TOP.get(form, 4) and found.pairs is not None
    assert np.array_equal(found.tokens.numpy(), expected.lattice.tokens)
    torch.testing.assert_close(found.logp, torch.from_numpy(expected.lattice.logp), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.pairs, torch.from_numpy(expected.pairs), atol=1e-5, rtol=1e-5)


def test_what_is_missing_is_named_and_its_weights_are_counted(tmp_path: Path) -> None:
    config, tensors, target, _ = made("as published", tmp_path)
    counted = DFlashDrafter.weight_bytes(str(tmp_path), 1)
    assert counted > sum(t.numel() for t in tensors.values())
    for gone in ("layers.1.mlp_conv.base_kernel", "candidate_selector.successor_codebook"):
        left = {name: tensor for name, tensor in tensors.items() if name != gone}
        with pytest.raises(BadModel, match=f"lacks the tensor {gone}"):
            DFlashDrafter.load(write(tmp_path, config, left), target)


def test_a_block_of_dspark_without_a_markov_head_is_a_lattice_and_other_heads_are_refused(tmp_path: Path) -> None:
    """deepseek-ai's DFlash drafters are such."""
    config, target = {**BASE, **SPARK, "markov_rank": 0, "enable_confidence_head": False}, TinyTarget()
    tensors = make_tensors(config)
    drafter = DFlashDrafter.load(write(tmp_path, config, tensors), target)
    taps = some_taps(drafter, 20)
    draft = drafter.draft([Request(opened(drafter, taps), root=5, width=6)])[0]
    assert isinstance(draft, Lattice) and drafter.max_depth == len(draft) == 7
    check(draft, reference(config, tensors, target, taps, 5))
    for kind in ("gated", "rnn"):
        with pytest.raises(BadModel, match=f"markov_head_type = '{kind}' instead of 'vanilla'"):
            parse_config({**BASE, **SPARK, "markov_head_type": kind}, "made")


def test_dspark_in_speculators_form_scores_the_tokens_of_its_own_head(tmp_path: Path) -> None:
    _, tensors, target, drafter = made("DSpark", tmp_path / "one")
    taps, ids = some_taps(drafter, 20), torch.arange(VOCAB).flip(0)[:60]
    nested = {key: value for key, value in BASE.items() if key not in ("architectures", "block_size", "dflash_config")}
    theirs = {
        "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 7, "block_size": 7, "draft_vocab_size": 60,
        "markov_rank": 5, "markov_head_type": "vanilla", "sample_from_anchor": True,
    }  # fmt: skip
    w2 = tensors["markov_head.markov_w2.weight"]
    own = {
        "d2t": ids - torch.arange(60),
        "lm_head.weight": target.head_rows(ids)[0],
        "markov_head.markov_w2.weight": w2[ids],
    }
    few = DFlashDrafter.load(write(tmp_path / "two", theirs, {**tensors, **own}), target)
    width = VOCAB
    whole, some = (d.draft([Request(opened(d, taps), root=5, width=width)])[0] for d in (drafter, few))
    kept = set(ids.tolist())
    for before in (None, 90, 70):
        depth, token = (0, -1) if before is None else (1, before)
        expected = [t for t in whole.row(depth, token)[0] if t in kept]
        assert some.row(depth, token)[0] == expected, "in the same order as among all tokens"


def test_speculators_writes_it_in_its_own_form_and_training_does_not_begin_from_it(tmp_path: Path) -> None:
    nested = {key: value for key, value in BASE.items() if key not in ("architectures", "block_size", "dflash_config")}
    theirs = {
        "speculators_model_type": "dflash2", "architectures": ["DFlash2Speculator"], "transformer_layer_config": nested,
        "aux_hidden_state_layer_ids": [2, 4, 5], "mask_token_id": 7, "block_size": 8, "draft_vocab_size": VOCAB,
        "conv_kernel_size": 2, "conv_group_size": 6, "selector_rank": 5, "selector_top_k": 4,
        "sliding_window_non_causal": True,
    }  # fmt: skip
    usual = {**BASE, **SECOND}
    found, expected = (parse_config(config, "made") for config in (theirs, usual))
    assert found.target_layer_ids == expected.target_layer_ids and found.sights == expected.sights
    assert (found.taps, found.groups, found.selector_rank) == (expected.taps, expected.groups, 5) == (2, 4, 5)
    init = write(tmp_path, usual, make_tensors(usual))
    with pytest.raises(BadModel, match="has another taps than the drafter to be trained"):
        start({**BASE, "initializer_range": 0.02}, init, TinyTarget(), 0)  # type: ignore[arg-type]
