"""An evaluation for people: tables and two pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from draftwood.bench.report import new_table, number, percent

Figures = Mapping[str, Any]


def tables(policies: Mapping[str, Figures]) -> Iterator[Table]:
    """Tau by policy and category, then acceptance by position, confidence and calibration."""
    categories = list(next(iter(policies.values()))["tau"])
    table = new_table("τ: tokens per round, the bonus token included", "policy", tuple(categories))
    for policy, figures in policies.items():
        table.add_row(policy, *(cell(figures["tau"][c]) for c in categories))
    yield table
    depth = max((row["position"] for f in policies.values() for row in f["acceptance"]), default=0)
    table = new_table(
        "How often a position is right, if the round got that far", "policy", tuple(map(str, range(1, depth + 1)))
    )
    for policy, figures in policies.items():
        parts = figures["categories"] if len(figures["categories"]) > 1 else {}
        for name, part in {policy: figures, **{f"  {category}": part for category, part in parts.items()}}.items():
            right = {row["position"]: percent(row["right"]) for row in part["acceptance"]}
            table.add_row(name, *(right.get(position, "–") for position in range(1, depth + 1)))
    yield table
    table = new_table("Share of accepted nodes: predicted by the drafter, observed", "policy", tuple(categories))
    for policy, figures in policies.items():
        table.add_row(policy, *(both(part["confidence"]) for part in (figures, *figures["categories"].values())))
    yield table
    table = new_table(
        "The same, nodes grouped by their predicted probability", "policy", ("predicted", "observed", "nodes")
    )
    for policy, figures in policies.items():
        for row in figures["calibration"]:
            table.add_row(policy, percent(row["predicted"]), percent(row["observed"]), str(row["nodes"]))
    yield table


def cell(value: float | None) -> str:
    return "–" if value is None else number(value, 2)


def both(confidence: Mapping[str, float | None]) -> str:
    predicted, observed = (cell(confidence[key]) for key in ("predicted", "observed"))
    return f"{predicted}, {observed}"


def save_pictures(policies: Mapping[str, Figures], folder: Path) -> str:
    """Write evaluation.png. Returns a sentence that says what happened."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture: matplotlib is not installed (pip install 'draftwood[bench]')."
    figure = Figure(figsize=(9, 4), layout="constrained")
    acceptance, calibration = figure.subplots(1, 2)
    for policy, figures in policies.items():
        rows = figures["acceptance"]
        acceptance.plot([r["position"] for r in rows], [r["right"] for r in rows], marker="o", label=policy)
        rows = figures["calibration"]
        calibration.plot([r["predicted"] for r in rows], [r["observed"] for r in rows], marker="o", label=policy)
    calibration.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    acceptance.set(xlabel="position", ylabel="share that is right, if the round got that far", ylim=(0, 1))
    calibration.set(
        xlabel="predicted probability of a path", ylabel="observed share of accepted paths", xlim=(0, 1), ylim=(0, 1)
    )
    acceptance.legend(fontsize="small")
    path = folder / "evaluation.png"
    figure.savefig(path, dpi=120)
    return f"Picture: {path}."
