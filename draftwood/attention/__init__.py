"""Tree attention for any transformers model: one registered function, an ordered list of backends."""

from draftwood.attention.dispatch import NAME, attend_slots, explain, register
from draftwood.attention.invariant import attend_invariantly, log2_scale

__all__ = ["NAME", "attend_invariantly", "attend_slots", "explain", "log2_scale", "register"]
