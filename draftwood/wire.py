"""Decisions as JSON, for processes that share a target: what is read becomes records, and runs no code."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from draftwood.accept import Likelihood, Verdict
from draftwood.errors import BadInput, BadModel, DraftwoodError, LostProcess, MissingExtra
from draftwood.latency import Machine
from draftwood.tree import Tree

RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Tree, Verdict, Likelihood, Machine)}
MISTAKES = {kind.__name__: kind for kind in (DraftwoodError, BadInput, BadModel, LostProcess, MissingExtra)}


def write(value: Any) -> bytes:
    """The bytes of plain values, lists, tuples, arrays, torch dtypes, RECORDS and mistakes; TypeError for others."""
    return json.dumps(_plain(value)).encode()


def read(message: bytes) -> Any:
    """What `write` was given, equal to the bit; a mistake of an unknown kind becomes a DraftwoodError."""
    return json.loads(message, object_hook=_rebuilt)


def _plain(value: Any) -> Any:
    """A value as JSON, in which an object's only name says what its list stands for."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(each) for each in value]
        case tuple():
            return {"tuple": [_plain(each) for each in value]}
        case np.ndarray():
            return {"array": [value.tolist(), value.dtype.str]}
        case torch.dtype():
            return {"dtype": [str(value).removeprefix("torch.")]}
        case DraftwoodError():
            return {type(value).__name__: [str(value)]}
        case _ if type(value).__name__ in RECORDS:
            return {type(value).__name__: [_plain(getattr(value, field.name)) for field in fields(value)]}
    raise TypeError(f"a {type(value).__name__} cannot be told to another process")


def _rebuilt(one: dict[str, list[Any]]) -> Any:
    ((kind, parts),) = one.items()
    match kind:
        case "tuple":
            return tuple(parts)
        case "array":
            return np.array(*parts)
        case "dtype":
            return getattr(torch, *parts)
    return RECORDS.get(kind, MISTAKES.get(kind, DraftwoodError))(*parts)
