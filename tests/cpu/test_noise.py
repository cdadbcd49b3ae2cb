"""The noise of draws: Gumbel's distribution, by the generators' published numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftwood.noise import gumbel, gumbel_of, keys

SPLITMIX = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_bits_are_those_of_splitmix64() -> None:
    """From the state 1234567 on, as other implementations print them."""
    uniform = (np.array([word >> 12 for word in SPLITMIX], np.float64) + 0.5) / 2**52
    np.testing.assert_allclose(gumbel(np.array(1234567), np.arange(5)), -np.log(-np.log(uniform)), rtol=1e-14)


def test_keys_belong_to_seed_and_position() -> None:
    for seed, start in ((0, 0), (3, 17), (2**63 - 1, 1000)):
        assert keys(seed, start, 40).tolist() == [int(keys(seed, start + i, 1)[0]) for i in range(40)]
    assert len({*keys(1, 0, 100).tolist(), *keys(2, 0, 100).tolist()}) == 200
    assert len(keys(1, 5, 0)) == 0


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_noise_has_gumbels_distribution(along: str) -> None:
    size = 4000
    at = keys(7, 0, size) if along == "positions" else np.concatenate([keys(seed, 5, 1) for seed in range(size)])
    noise = gumbel(keys(7, 5, 1), np.arange(size)) if along == "tokens" else gumbel(at, np.array([11]))
    reached = np.exp(-np.exp(-np.sort(noise)))
    # Kolmogorov-Smirnov: false alarm 1 in 1000
    assert np.abs(reached - (np.arange(size) + 0.5) / size).max() < 1.95 / math.sqrt(size)


def test_noise_of_neighbours_is_independent() -> None:
    noise = gumbel(keys(7, 0, 64)[:, None], np.arange(64))
    rows = noise - noise.mean()
    for other in (rows[1:, :], rows[:, 1:], rows[1:, 1:]):
        ours = rows[: other.shape[0], : other.shape[1]]
        assert abs((ours * other).mean()) < 3.5 * rows.var() / math.sqrt(other.size)


def test_a_device_makes_the_same_noise() -> None:
    under = keys(5, 2, 3)
    found = gumbel_of(torch.from_numpy(under)[:, None], torch.arange(300))
    np.testing.assert_allclose(found.numpy(), gumbel(under[:, None], np.arange(300)), rtol=1e-13, atol=1e-13)
