"""`shipped`: the drafter that comes with draftwood, made for the target that runs when none is named."""

from __future__ import annotations

from draftwood.drafters.dflash import DFlashDrafter
from draftwood.embedded import EMBEDDED_DRAFTER
from draftwood.errors import BadInput
from draftwood.target import Target


class ShippedDrafter(DFlashDrafter):
    """DFlash's format, found without a path."""

    @classmethod
    def load(cls, argument: str, target: Target, depth: int | None = None) -> DFlashDrafter:
        """It has no parameters. Raises BadInput, and BadModel with another target."""
        if argument:
            raise BadInput(f"shipped:{argument}: shipped takes no parameter; write shipped.")
        return DFlashDrafter.load(str(EMBEDDED_DRAFTER), target, depth)

    @classmethod
    def weight_bytes(cls, argument: str, itemsize: int) -> int:
        return DFlashDrafter.weight_bytes(str(EMBEDDED_DRAFTER), itemsize)
