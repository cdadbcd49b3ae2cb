"""Tree attention for any transformers model: one registered function, an ordered list of backends."""

from draftwood.attention.dispatch import NAME, attend_slots, explain, register

__all__ = ["NAME", "attend_slots", "explain", "register"]
