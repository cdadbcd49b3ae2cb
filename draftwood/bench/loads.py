"""How many users share a machine, and what they get: the flags and the figures of `draftwood simulate --users`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from draftwood.bench.report import new_table, number, percent


@dataclass(frozen=True, slots=True)
class Crowd:
    """The users of a machine."""

    users: Sequence[int] = ()  # how many at once; each number is simulated by itself
    context: int = 0  # tokens that each user has besides what was recorded
    price: float | None = None  # of the machine for an hour, in the reader's currency


NOBODY = Crowd()


@dataclass(frozen=True, slots=True)
class Load:
    """So many users on one machine under one policy."""

    hardware: str
    policy: str
    users: int
    tokens_per_s: float  # of all users together
    each: float  # of one of them
    speedup: float  # over plain decoding for as many users
    tau: float  # tokens a round and user
    width: float  # tokens that the target runs a round, of all users
    drafted: float  # share of the users' rounds that had a draft
    gib: float  # weights of target and drafter, keys and values at their longest
    cost: float  # of a million tokens; NaN without a price
    measured: float  # tokens per second when the trace was made; NaN if this load did not run there

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Load.__slots__}


def load_table(name: str, loads: Sequence[Load]) -> Table:
    columns = ("policy", "tokens/s", "each user", "× plain", "τ", "width", "drafted", "GiB", "cost")
    table = new_table(f"Many users on {name}, in modelled seconds", "users", columns)
    table.caption = (
        "width: tokens that the target runs a round; drafted: share of the users' rounds; cost: of a million tokens"
    )
    table.caption_justify = "left"
    for load in loads:
        table.add_row(
            str(load.users),
            load.policy,
            number(load.tokens_per_s, 0),
            number(load.each, 1),
            number(load.speedup, 2),
            number(load.tau, 2),
            number(load.width, 1),
            percent(load.drafted),
            number(load.gib, 1),
            number(load.cost, 3),
        )
    return table
