"""Draws, noise and foresight on a device against the host's. Skipped without one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.device.draw import drawer
from draftwood.drafters.lattice import head_rows
from draftwood.noise import Ahead, gumbel, gumbel_of, keys, noisiest

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_noise_is_the_hosts() -> None:
    under = keys(5, 2, 3)
    found = gumbel_of(torch.from_numpy(under).to(CUDA)[:, None], torch.arange(1000, device=CUDA))
    np.testing.assert_allclose(found.cpu().numpy(), gumbel(under[:, None], np.arange(1000)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 31, 2048, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kernel_draws_what_torch_does(size: int, dtype: torch.dtype) -> None:
    made = torch.Generator("cuda").manual_seed(size)
    scores = 3 * torch.randn(40, size, generator=made, device=CUDA, dtype=dtype)
    scores[2, 1:] = scores[3, : size // 2] = -torch.inf
    under = torch.from_numpy(keys(4, 0, 40)).to(CUDA)
    assert drawer(CUDA) is not noisiest
    assert torch.equal(drawer(CUDA)(scores, under), noisiest(scores, under))


@pytest.mark.parametrize("heat", [0.4, 1.0])
def test_candidates_are_the_hosts(heat: float) -> None:
    logits = torch.randn(15, 49_152, generator=torch.Generator().manual_seed(1)) * 3
    ahead = Ahead(keys(1, 7, 15), heat)
    placed = Ahead(torch.from_numpy(ahead.keys).to(CUDA), torch.tensor(heat, dtype=torch.float64, device=CUDA))
    rows, logp = head_rows(logits.double(), 32, None, ahead)
    found, on_device = head_rows(logits.double().to(CUDA), 32, None, placed)
    assert torch.equal(found.cpu(), rows)
    torch.testing.assert_close(on_device.cpu(), logp)
