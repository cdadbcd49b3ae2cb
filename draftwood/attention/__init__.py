"""Tree attention for any transformers model: one registered function, an ordered list of backends."""

from draftwood.attention.dispatch import NAME, attend_slots, explain, register
from draftwood.attention.invariant import attend_invariantly

__all__ = ["NAME", "attend_invariantly", "attend_slots", "explain", "register"]
