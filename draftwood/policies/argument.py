"""Reading what follows the colon of a policy's name: `32` of `ddtree:32`."""

from __future__ import annotations

from draftwood.errors import BadInput

LARGEST = 4096  # nodes; the papers stop at 1024, and buffers are sized by this


def count(spec: str, found: str, unit: str, example: str, largest: int = LARGEST) -> int:
    """A whole number from 1 to `largest`. BadInput says what was found in `spec` and shows an `example`."""
    if found.isascii() and found.isdigit() and len(found) <= 9 and 1 <= int(found) <= largest:
        return int(found)
    raise BadInput(f"{spec}: '{found}' is not a number of {unit} from 1 to {largest}; write for example {example}.")


def none(name: str, argument: str | None) -> None:
    """Refuse any parameter."""
    if argument is not None:
        raise BadInput(f"{name}:{argument}: {name} takes no parameter; write {name}.")
