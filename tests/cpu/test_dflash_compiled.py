"""DFlash in compiled layers: as close to the truth as in PyTorch's, and a draft in one call is the one in many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from draftwood.drafters.dflash_layers import BlockLayers, NativeLayers, TorchLayers
from draftwood.drafters.dflash_state import PENDING
from draftwood.noise import Ahead, keys
from draftwood.trellis import Block, Trellis
from tests.dflash_cases import BASE, FORMS, VOCAB, TinyTarget, make_tensors, some_taps, write

COMPILED = [
    "nested",
    "scaled embedding",
    "block 16, one key head",
    "bias",
    "sliding",
    "sliding, block larger than window",
    "causal everywhere",
]


@pytest.mark.usefixtures("compiled")
@torch.inference_mode()
@pytest.mark.parametrize(("gap", "depth"), [(0, 7), (3, 2)])
@pytest.mark.parametrize("form", [*COMPILED, "sliding, bidirectional", "the root predicts, too"])
def test_compiled_layers_are_as_close_to_the_truth_as_pytorchs(
    form: str, gap: int, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**BASE, **FORMS[form], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    folder = write(tmp_path, config, make_tensors(config))

    def run(dtype: torch.dtype) -> tuple[BlockLayers, Tensor]:
        """Two blocks behind contexts of 3 and 40 tokens."""
        drafter = DFlashDrafter.load(folder, TinyTarget(hidden_size=64, dtype=dtype))
        states = [drafter.open(capacity=60) for _ in range(2)]
        for state, length in zip(states, (3, 40), strict=True):
            drafter.extend(state, [1] * length, some_taps(drafter, length))
            drafter._project_pending(state)
        blocks = torch.randint(VOCAB, (2 * config["block_size"],), generator=torch.Generator().manual_seed(5))
        return drafter._layers, drafter._layers(blocks.tolist(), states, gap, depth).double()

    _, truth = run(torch.float64)
    layers, compiled = run(torch.bfloat16)
    assert isinstance(layers, TorchLayers if form == "sliding, bidirectional" else NativeLayers)
    monkeypatch.setenv("DRAFTWOOD_COMPILE", "0")
    layers, torchs = run(torch.bfloat16)
    assert isinstance(layers, TorchLayers)
    assert (compiled - truth).abs().mean() <= 1.25 * (torchs - truth).abs().mean()


@pytest.mark.usefixtures("compiled", "changing_threads")
@torch.inference_mode()
@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize(("kept", "paired"), [(None, False), ([*range(3, 60, 2)], True), (None, True)])
def test_a_draft_in_one_call_is_the_one_in_many(
    form: str, kept: list[int] | None, paired: bool, tmp_path: Path
) -> None:
    """Behind contexts of any length, of which any number of tokens wait: the same draft, and the same state."""
    config = {**BASE, **FORMS[form], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    target = TinyTarget(hidden_size=64, dtype=torch.bfloat16)
    read = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), target)
    pairs = (torch.randn(16, 64), torch.randn(16, 64)) if paired else None
    drafter = DFlashDrafter(read.config, read._weights, target, "made", draft_tokens=kept, pairs=pairs)
    one, many = drafter.open(capacity=10), drafter.open(capacity=10)
    for step, count in enumerate((1, 0, 9, PENDING, 40)):
        for state in (one, many):
            drafter.extend(state, [1] * count, some_taps(drafter, count, step))
        for depth, width, ahead in ((1, 4, None), (5, 40, lambda n: Ahead(keys(1, 7, n), 1.0)), (None, 16, None)):
            (found,) = drafter.draft([Request(one, 5 + step, width, depth, ahead)])
            (expected,) = drafter.draft_behind([(Request(many, 5 + step, width, depth, ahead), ())])
            for mine, theirs in zip(parts(found), parts(expected), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            assert len(one) == len(many) == one.projected == many.projected
            assert torch.equal(
                one.kv[..., : len(one), :].view(torch.int16), many.kv[..., : len(one), :].view(torch.int16)
            )


def parts(draft: Block) -> list[np.ndarray]:
    if isinstance(draft, Trellis):
        return [draft.lattice.tokens, draft.lattice.logp, draft.pairs]
    return [draft.tokens, draft.logp]


@pytest.mark.usefixtures("compiled")
@torch.inference_mode()
def test_blocks_of_one_context_share_one_draft_and_nothing_else_in_compiled_layers(tmp_path: Path) -> None:
    config = {**BASE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    target = TinyTarget(hidden_size=64, dtype=torch.bfloat16)
    drafter = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), target)
    assert isinstance(drafter._layers, NativeLayers)
    asked = []
    for length in (20, 9):
        state = drafter.open(capacity=40)
        drafter.extend(state, [1] * length, some_taps(drafter, length))
        asked.append(Request(state, root=5 + length, width=4))
    blocks = [(asked[0], ()), (asked[0], (11,)), (asked[1], (7, 8)), (asked[0], (11, 12)), (asked[1], ())]
    for block, found in zip(blocks, drafter.draft_behind(blocks), strict=True):
        (alone,) = drafter.draft_behind([block])
        np.testing.assert_array_equal(found.tokens, alone.tokens)
        np.testing.assert_array_equal(found.logp, alone.logp)
