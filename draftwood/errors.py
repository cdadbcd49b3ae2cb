"""What a user can get wrong: one base class, shown as one sentence, never as a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DraftwoodError(Exception):
    """A mistake the user can mend. Says what was found, what was expected and what to do next."""


class BadInput(DraftwoodError, ValueError):
    """A value, flag, prompt or file that cannot be used."""


class BadModel(DraftwoodError):
    """A target or drafter that is missing, unreadable, unsupported or made for another model."""


class LostProcess(DraftwoodError):
    """One of the processes that share a target died or does not answer."""


class MissingExtra(DraftwoodError, ImportError):
    """A feature whose optional package is not installed."""


def nearest(found: str, valid: Iterable[str]) -> str:
    """`"ddtre"` -> `" Did you mean 'ddtree'?"`; the empty string if nothing is near."""
    close = difflib.get_close_matches(found, list(valid), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def first_line(error: BaseException) -> str:
    """What another library's error says, as far as it fits into a sentence; the error's kind if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def check_one_of(what: str, found: str, valid: Iterable[str]) -> None:
    """Raise BadInput if the value `found` of the setting or flag `what` is none of the valid ones."""
    names = list(valid)
    if found not in names:
        raise BadInput(f"{what} is {found!r}; expected one of {', '.join(names)}.{nearest(found, names)}")
