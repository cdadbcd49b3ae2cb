"""Tables of the documentation that are made of result files, in the place that a marker names.

<!-- table: capacity smollm2-135m-simulated/qwen3-8b -->
<!-- end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
TABLE = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
GIB = {"a100": 80, "h100": 80, "h200": 141, "rtx4090": 24, "this": 24}  # of memory
USABLE = 0.9  # of it: activations and what others keep are not counted
PLAIN, FIXED, OURS = "autoregressive", "ddtree:8", "bastion"


def with_tables(text: str) -> str:
    """The page with every marked table made anew."""
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]](simulation(found[3])) + found[5], text)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def simulation(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / folder / "simulation.json").read_text())
    return found


def error(found: Mapping[str, Any]) -> str:
    """What was simulated beside what was measured, in tokens per second and against plain decoding; last, how far it is
    off without the policy's own rounds, for results that tell."""
    plain = next(cell["measured"] for cell in found["cells"] if cell["policy"] == PLAIN)
    told_apart, rows = "error_foretold" in found["cells"][0], []
    for kind, told in (("learned", found["cells"]), ("roofline", found["loads"])):
        for one in told:
            rate, faster = one["tokens_per_s"], one["measured"] / plain
            left = [signed(1 + one["error_foretold"]) if "error_foretold" in one else "–"] if told_apart else []
            rows.append(
                (
                    kind, f"`{one['policy']}`", f"{one['measured']:.1f}", f"{rate:.1f}", signed(rate / one["measured"]),
                    f"{faster:.2f}", f"{one['speedup']:.2f}", signed(one["speedup"] / faster), *left,
                )
            )  # fmt: skip
    head = (
        "prices", "policy", "measured tokens/s", "simulated tokens/s", "error",
        "measured × plain", "simulated × plain", "error",
        *(["error without its rounds"] if told_apart else []),
    )  # fmt: skip
    return table(head, rows)


def signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def capacity(found: Mapping[str, Any]) -> str:
    """Users by card: plain decoding beside two policies."""
    rows = []
    for (card, users), loads in groupby(found["loads"], key=lambda load: (load["hardware"], load["users"])):
        named = {load["policy"]: load for load in loads}
        rows.append(capacity_row(card, users, *(named[name] for name in (PLAIN, FIXED, OURS))))
    head = (
        "card", "users", "plain tokens/s", "`ddtree:8`", "`bastion`",
        "× plain", "each user", "rounds drafted", "GiB", "cost of a million tokens",
    )  # fmt: skip
    return table(head, rows)


def capacity_row(card: str, users: int, plain: Any, fixed: Any, ours: Any) -> list[str]:
    full = "" if ours["gib"] <= USABLE * GIB[card] else ": too much"
    return [
        card, str(users), *(rounded(load["tokens_per_s"]) for load in (plain, fixed, ours)), f"{ours['speedup']:.2f}",
        rounded(ours["each"]), f"{100 * ours['drafted']:.0f} %", f"{ours['gib']:.0f}{full}", f"{ours['cost']:.2f}",
    ]  # fmt: skip


def rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"error": error, "capacity": capacity}
