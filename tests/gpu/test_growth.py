"""The kernels of growth and ancestors against torch's form, on a device. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from draftwood.device.ancestors import bitmask, lineage, visible
from draftwood.device.growth import DeviceTree, Grower, grower
from draftwood.drafters.base import Candidates
from draftwood.grow import Growth

pytestmark = pytest.mark.gpu
DEPTH, WIDTH = 15, 64


def a_draft(seed: int, paired: bool) -> Candidates:
    """Random and sharp, with ties here and there."""
    made = torch.Generator("cuda").manual_seed(seed)
    logits = 3 * torch.randn(DEPTH, WIDTH, generator=made, device="cuda")
    logp = (8 * logits.log_softmax(-1)).round() / 8
    pairs = (3 * torch.randn(DEPTH - 1, WIDTH, WIDTH, generator=made, device="cuda")).log_softmax(-1)
    tokens = torch.randint(50_000, (DEPTH, WIDTH), generator=made, device="cuda")
    return Candidates(tokens, logp.sort(-1, descending=True).values, pairs if paired else None)


def trees(growth: Growth, draft: Candidates, limit: int, most: int) -> tuple[DeviceTree, DeviceTree]:
    numbers = [torch.tensor(number, device="cuda") for number in ([7], limit, most)]
    paired = draft.pairs is not None
    kinds = (Grower, grower)
    return tuple(kind(growth, DEPTH, WIDTH, numbers[0].device, paired)(draft, *numbers) for kind in kinds)  # type: ignore[return-value]


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("limit", "most"), [(99, 999), (4, 999), (99, 20), (0, 999)])
@pytest.mark.parametrize("growth", [Growth(256), Growth(63), Growth(1), Growth(15, 1), Growth(24, 4, 6), Growth(1024)])
def test_trees_are_those_of_torch(growth: Growth, limit: int, most: int, paired: bool) -> None:
    for seed in range(3):
        expected, found = trees(growth, a_draft(seed, paired), limit, most)
        for name in ("tokens", "parents", "depths", "count"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        torch.testing.assert_close(found.mass, expected.mass, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 32, 33, 257])
def test_ancestors_are_those_of_torch(size: int) -> None:
    parents = torch.tensor([0, *(max(i // 2 - 3, 0) for i in range(1, size))], device="cuda")
    line = lineage(parents, 15)
    seen = visible(line)
    bits = bitmask(seen)
    found = torch.full_like(line, -1), ~seen, ~bits
    grower(Growth(size - 1), 1, 1, parents.device).relate(parents, *found)
    assert all(map(torch.equal, found, (line, seen, bits)))
