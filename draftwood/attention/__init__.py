"""Tree attention for any transformers model: one registered function, an ordered list of backends."""

from draftwood.attention.dispatch import NAME, register

__all__ = ["NAME", "register"]
