"""How likely paths are to be accepted, in one call: for a dozen nodes numpy takes ten times as long."""

from __future__ import annotations

from ctypes import c_double, c_int64

import numpy as np

from draftwood.acceptance import Array, Chances, chances_of
from draftwood.native.build import address, library, operators
from draftwood.tree import Floats, Ints


def quickest() -> Chances:
    """`chances_of`, compiled if that is possible."""
    return chances if operators().library is not None else chances_of


def chances(weights: Array, covariance: Array, mass: Floats, depths: Ints, optimism: float) -> Floats:
    """`chances_of`, compiled."""
    out = np.empty(len(mass), np.float32)
    given = np.ascontiguousarray(mass, np.float32), np.ascontiguousarray(depths, np.int64)
    addresses = (address(array) for array in (weights, covariance, *given, out))
    library().chances(*addresses, c_int64(len(out)), c_double(optimism))
    return out
