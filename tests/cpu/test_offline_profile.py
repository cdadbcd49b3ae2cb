"""The offline profile: how it is measured and kept, and the convex curve that is fitted to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import BadInput
from draftwood.offline_profile import ConvexCosts, Profile, fit_convex, measure_profile, nonnegative_least_squares
from draftwood.store import read_json, write_json
from tests.latency_cases import TRUE_S


def profile() -> Profile:
    return measure_profile(
        lambda width, context: TRUE_S[width] + 1e-6 * context * width,
        0.007,
        "made up",
        {"torch": "9"},
        tuple(TRUE_S),
        (0, 1000),
    )


def test_measuring_takes_medians_and_reports_progress() -> None:
    calls: list[tuple[int, int]] = []
    seconds = iter([9.0, 1.0, 7.0, 2.0] * 6)
    done: list[tuple[int, int]] = []

    def forward(width: int, context: int) -> float:
        calls.append((width, context))
        return next(seconds)

    taken = measure_profile(
        forward, 0.1, "m", {}, (1, 2, 4), (0, 8), repeats=3, progress=lambda d, of: done.append((d, of))
    )
    assert taken.seconds == ((2.0, 2.0),) * 3  # the median of 1, 7 and 2: the first call warms up
    assert calls == [(w, c) for c in (0, 8) for w in (1, 2, 4) for _ in range(4)]
    assert done == [(i, 6) for i in range(1, 7)]


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=14))
def test_the_fit_never_falls_and_is_convex(seconds: list[float]) -> None:
    widths = np.cumsum(1 + np.arange(len(seconds))).astype(float)
    slopes = np.diff(fit_convex(widths, np.array(seconds))) / np.diff(widths)
    assert (slopes >= -1e-9).all() and (np.diff(slopes) >= -1e-9).all()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=10))
def test_the_fit_leaves_a_convex_curve_alone(slopes: list[float]) -> None:
    widths = np.arange(1.0, 2 + len(slopes))
    curve = 0.5 + np.concatenate([[0], np.cumsum(np.sort(slopes))])
    np.testing.assert_allclose(fit_convex(widths, curve), curve, atol=1e-7)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 10))
def test_nonnegative_least_squares_is_optimal(seed: int, rows: int, columns: int) -> None:
    """Karush, Kuhn and Tucker: no free weight wants to move, none at 0 wants to rise."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    x = nonnegative_least_squares(a, b)
    downhill = a.T @ (b - a @ x)
    assert (x >= 0).all() and (downhill <= 1e-8).all() and np.abs(downhill[x > 0]).max(initial=0) <= 1e-8


def test_convex_costs_interpolate_between_contexts_and_go_on_beyond_widths() -> None:
    convex = ConvexCosts.of(profile())
    near, middle, far = (convex.costs(255, c) for c in (0, 500, 1000))
    np.testing.assert_allclose(middle.verify_s, (near.verify_s + far.verify_s) / 2)
    assert np.array_equal(convex.costs(255, 10**6).verify_s, far.verify_s)
    assert near.verify_s[255] == pytest.approx(near.verify_s[127] + 128 * (near.verify_s[127] - near.verify_s[63]) / 64)
    assert near.draft_s == 0.007 and near.plain_s == near.verify_s[0] and not near.aux_s.any()
    assert (np.diff(near.verify_s, n=2) >= -1e-12).all()


def test_a_profile_is_saved_and_loaded(tmp_path: Path) -> None:
    assert Profile.load(tmp_path / "none.json") is None
    profile().save(tmp_path / "new folder" / "p.json")
    assert Profile.load(tmp_path / "new folder" / "p.json") == profile()


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [[1.0]]},
        {"widths": "x"},
        {"contexts": [1000, 0]},
        {"draft_s": None},
        {"versions": 3},
        {"seconds": None},
    ],
)
def test_a_damaged_offline_profile_is_one_sentence(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "p.json"
    profile().save(path)
    write_json(path, read_json(path) | change)
    with pytest.raises(BadInput, match=r"p\.json is not a profile.*calibrate"):
        Profile.load(path)
    path.write_text("{")
    with pytest.raises(BadInput):
        Profile.load(path)
