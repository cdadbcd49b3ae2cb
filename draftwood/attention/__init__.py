"""Tree attention for any transformers model: one registered function, an ordered list of backends."""

from draftwood.attention.dispatch import NAME, attend_slots, register

__all__ = ["NAME", "attend_slots", "register"]
