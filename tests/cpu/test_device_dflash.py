"""DFlash on static buffers drafts what DFlash drafts, in every form of its config; views are plain attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.device.ancestors import bitmask, lineage, visible
from draftwood.device.view import View
from draftwood.drafters.base import Request
from draftwood.drafters.dflash import DFlashDrafter
from tests.dflash_cases import BASE, FORMS, TinyTarget, make_tensors, some_taps, write


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_the_lattice_is_that_of_the_host(form: str, tmp_path: Path) -> None:
    config, target = {**BASE, **FORMS[form]}, TinyTarget()
    drafter = DFlashDrafter.load(write(tmp_path, config, make_tensors(config)), target)
    taps, state, placed = some_taps(drafter, 30), drafter.open(capacity=4), drafter.place(capacity=40)
    for start, stop in ((0, 9), (9, 10), (10, 14), (14, 30)):
        drafter.extend(state, [1] * (stop - start), taps[start:stop])
        rows = torch.cat([taps[start:stop], taps[:3]])  # three too many, as after a path that was cut short
        placed.extend(rows, torch.tensor(start))
        expected = drafter.draft([Request(state, root=5, width=6)])[0]
        found = placed.draft(torch.tensor([5]), torch.tensor(stop), 6)
        assert np.array_equal(found.tokens.numpy(), expected.tokens) and found.pairs is None
        torch.testing.assert_close(found.logp, torch.from_numpy(expected.logp), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("context", [0, 1, 7])
def test_a_view_is_attention_by_its_definition(context: int, window: int | None) -> None:
    numbers = torch.Generator().manual_seed(1)
    size, heads, groups, dim, slots = 6, 2, 3, 4, 24
    depths = torch.tensor([0, 1, 1, 2, 3, 3])
    seen = visible(lineage(torch.tensor([0, 0, 0, 1, 3, 3]), 3))
    kv = torch.randn(2, heads, slots, dim, generator=numbers, dtype=torch.float64)
    q, k, v = (
        torch.randn(size, h, dim, generator=numbers, dtype=torch.float64) for h in (heads * groups, heads, heads)
    )
    view = View(torch.tensor(context), depths, seen, bitmask(seen), slots, kv.dtype)
    found = view.attend(kv, 0.5, window, q, k, v)
    assert torch.equal(kv[0, :, context : context + size], k.transpose(0, 1))
    assert torch.equal(kv[1, :, context : context + size], v.transpose(0, 1))
    where = torch.cat([torch.arange(context), context + depths])
    for i in range(size):
        reach = [j for j in range(context + size) if window is None or where[context + i] - where[j] < window]
        keys = [j for j in reach if j < context or seen[i, j - context]]
        for h in range(heads * groups):
            weights = torch.softmax(kv[0, h // groups, keys] @ q[i, h] * 0.5, 0)
            expected = weights @ kv[1, h // groups, keys]
            torch.testing.assert_close(found[i, h * dim : (h + 1) * dim], expected)


def test_what_overflows_in_fp16_reaches_nobody_who_does_not_see_it() -> None:
    """Neither a sibling's keys and values, nor what an earlier tree left behind this one."""
    seen = visible(lineage(torch.tensor([0, 0, 0]), 1))
    q, k, v = (torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))
    found = []
    for bad in (0.0, torch.inf, torch.nan):
        kv = torch.zeros(2, 1, 16, 8, dtype=torch.float16)
        for context in (4, 2):  # the first leaves its last node behind the second
            view = View(torch.tensor(context), torch.tensor([0, 1, 1]), seen, bitmask(seen), 16, kv.dtype)
            k[2], v[2] = bad, bad
            found.append(view.attend(kv, 0.5, None, q, k, v)[:2])
        assert kv.isfinite().all()
    assert all(torch.equal(one, other) for one, other in zip(found[2:], found[:2] * 2, strict=True))
