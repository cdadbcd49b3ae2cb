"""Reading a drafter's parameters: `depth=4,beam=2` into a record of whole numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from draftwood.errors import BadInput, nearest

Record = TypeVar("Record")


def parse(record: type[Record], drafter: str, text: str) -> Record:
    """`text` as a `record`, a dataclass of whole numbers whose fields say `least` and `most` in their metadata.

    Raises BadInput for an unknown name, a value that is no number, or one that is out of range.
    """
    known: dict[str, Any] = {option.name: option.metadata for option in fields(record)}  # type: ignore[arg-type]
    values: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise BadInput(f"{drafter} has no parameter '{name}'.{nearest(name, known)} Valid: {', '.join(known)}.")
        if not (value.isascii() and value.isdigit() and len(value) <= 9):
            raise BadInput(f"{drafter}: {name} is '{value}'; write a whole number, for example {name}=4.")
        values[name] = int(value)
        least, most = known[name]["least"], known[name]["most"]
        if not least <= values[name] <= most:
            raise BadInput(f"{drafter}: {name} is {value}; write a number from {least} to {most}.")
    return record(**values)
