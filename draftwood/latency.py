"""How long a forward takes: a roofline prior from counted work, corrected by every round that runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward must do at least."""

    flops: float
    bytes: float
    launches: int  # operator launches: the fixed cost that small forwards pay
