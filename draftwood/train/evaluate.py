"""`draftwood eval-drafter`: what a drafter is worth on given prompts, with real rounds of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from draftwood import registry
from draftwood.bench.environment import environment
from draftwood.bench.prompts import Prompt, fingerprint, load_prompts
from draftwood.bench.stats import jsonable
from draftwood.drafters.checkpoint import read_config
from draftwood.engine import Engine, Step
from draftwood.errors import BadInput, BadModel
from draftwood.llm import LLM, load
from draftwood.sampling import Sampling
from draftwood.train.files import make_folder, write_text
from draftwood.train.jobs import chat_ids
from draftwood.train.show import bar

BINS = 10  # of path confidence
ALL = "all"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The flags of the command."""

    drafter: str
    target: str | None = None
    prompts: list[str] = field(default_factory=list)
    policies: tuple[str, ...] = ("dflash", "ddtree:64")
    max_new_tokens: int = 128
    limit: int | None = None
    temperature: float = 0.0
    thinking: str = "default"
    out: Path | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(slots=True, eq=False)
class Tally:
    """What the rounds of one policy on one category add up to."""

    emitted: list[int] = field(default_factory=list)  # tokens of each round
    accepted: list[int] = field(default_factory=list)  # nodes of each; after a drafted stop token no bonus follows
    drafted: list[int] = field(default_factory=list)  # deepest node of each round
    mass: list[float] = field(default_factory=list)  # of every verified node
    kept: list[bool] = field(default_factory=list)  # whether it was accepted

    def add(self, step: Step) -> None:
        if step.tree is None or not len(step.tree):
            return
        self.emitted.append(len(step.tokens))
        self.accepted.append(len(step.path))
        depths, accepted = step.tree.depths, set(step.path)
        # Where the answer ended with an accepted node, the outcome of deeper nodes is unknown.
        known = depths <= (len(step.path) if len(step.path) == len(step.tokens) else depths.max())
        self.drafted.append(int(depths[known].max()))
        self.mass += step.tree.mass[known][1:].tolist()
        self.kept += [node in accepted for node in np.flatnonzero(known)[1:].tolist()]

    @property
    def tau(self) -> float:
        """Tokens of a round, the bonus token included; NaN without rounds."""
        return float(np.mean(self.emitted)) if self.emitted else float("nan")

    def acceptance(self) -> list[dict[str, float]]:
        """For each position: how often it is reached and how often it is then right."""
        accepted, depth = np.array(self.accepted), np.array(self.drafted)
        rows = []
        for position in range(1, 1 + max(self.drafted, default=0)):
            reached = (accepted >= position - 1) & (depth >= position)
            if reached.any():
                right = float((accepted[reached] >= position).mean())
                rows.append({"position": position, "reached": float(reached.mean()), "right": right})
        return rows

    def calibration(self) -> list[dict[str, float]]:
        """Nodes by the drafter's probability of their path: its mean, and how often they were accepted."""
        mass, kept = np.array(self.mass), np.array(self.kept, float)
        bins = np.minimum((mass * BINS).astype(int), BINS - 1)
        return [
            {"predicted": float(mass[bins == b].mean()), "observed": float(kept[bins == b].mean()), "nodes": int(n)}
            for b in range(BINS)
            if (n := (bins == b).sum())
        ]

    def confidence(self) -> dict[str, float]:
        """The drafter's mean probability of all nodes' paths, and the share that was accepted; NaN without nodes."""
        said, seen = (float(np.mean(x)) if x else float("nan") for x in (self.mass, self.kept))
        return {"predicted": said, "observed": seen}

    def figures(self) -> dict[str, Any]:
        """Everything but tau, as JSON."""
        return {
            "rounds": len(self.emitted),
            "acceptance": self.acceptance(),
            "confidence": self.confidence(),
            "calibration": self.calibration(),
        }


def run_evaluation(options: EvalOptions) -> dict[str, Any]:
    """Measure, show, and return the report. Raises BadInput or BadModel for whatever cannot be used."""
    Sampling(temperature=options.temperature, seed=options.seed)  # refuses values that cannot be used
    for spec in options.policies:
        registry.policy(spec)
    if not options.policies:
        raise BadInput("--policies names none; give one or more, such as dflash,ddtree:64.")
    if registry.drafter_specs(options.drafter) == ["none"]:
        raise BadInput("--drafter is none, but this command measures drafts; name a drafter, such as ngram.")
    if options.out is not None:
        make_folder(options.out, "--out")
    prompts = load_prompts(options.prompts, options.limit)
    llm = load(
        options.target,
        options.drafter,
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
    )
    tallies = measure(llm, prompts, options)
    report = summarize(tallies, options, prompts)
    show(report, tallies, options)
    return report


def measure(llm: LLM, prompts: Sequence[Prompt], options: EvalOptions) -> dict[str, dict[str, Tally]]:
    """Policy and category to tally; `all` holds every category. Only first turns are asked."""
    categories = [ALL, *dict.fromkeys(p.dataset for p in prompts)]
    asked = [encode(llm, prompt.turns[0], options.thinking) for prompt in prompts]
    for ids in asked:  # before hours are spent
        llm.engine.check(ids, options.max_new_tokens)
    tallies = {policy: {category: Tally() for category in categories} for policy in options.policies}
    with bar(len(prompts) * len(options.policies), "measuring") as update:
        for j, policy in enumerate(options.policies):
            engine = llm.engine.fresh()  # no policy learns from the texts of another
            for i, (prompt, ids) in enumerate(zip(prompts, asked, strict=True)):
                update(j * len(prompts) + i, f"{prompt.id}  {policy}")
                for step in answer(engine, ids, policy, options, llm.stop_ids):
                    tallies[policy][ALL].add(step)
                    tallies[policy][prompt.dataset].add(step)
    return tallies


def encode(llm: LLM, text: str, thinking: str) -> list[int]:
    """As `generate` would, and with the thinking switch if it is asked for."""
    return llm.encode(text) if thinking == "default" else chat_ids(llm.tokenizer, text, thinking)


def answer(
    engine: Engine, ids: list[int], policy: str, options: EvalOptions, stop_ids: frozenset[int]
) -> Iterator[Step]:
    """Rounds until there are `max_new_tokens`. The last one is not cut, or tau would be too low."""
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    room = 1 + engine.drafter.max_depth if engine.drafter else 0
    steps = engine.run(ids, options.max_new_tokens + room, sampling, stop_ids, policy=registry.policy(policy))
    written = 0
    with closing(steps):
        while written < options.max_new_tokens and (step := next(steps, None)):
            written += len(step.tokens)
            yield step


def summarize(
    tallies: Mapping[str, Mapping[str, Tally]], options: EvalOptions, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """The report as JSON: figures, what they say in one sentence, and how they were measured."""
    figures = {
        policy: {
            "tau": {category: tally.tau for category, tally in by_category.items()},
            **by_category[ALL].figures(),
            "categories": {category: tally.figures() for category, tally in by_category.items() if category != ALL},
        }
        for policy, by_category in tallies.items()
    }
    settings = {**asdict(options), "out": str(options.out) if options.out else None}
    report = {
        "policies": figures,
        "says": [sentence(tallies), *warnings(options)],
        "settings": settings,
        "prompt_set": {"prompts": len(prompts), "sha256": fingerprint(prompts)},
        "environment": environment(),
    }
    cleaned: dict[str, Any] = jsonable(report)
    return cleaned


def sentence(tallies: Mapping[str, Mapping[str, Tally]]) -> str:
    """What to expect of the drafter."""
    best = max(tallies, key=lambda policy: np.nan_to_num(tallies[policy][ALL].tau))
    tally = tallies[best][ALL]
    if not tally.emitted:
        return "No round drafted anything, so nothing can be said; give longer answers."
    by_set = {c: t.tau for c, t in tallies[best].items() if c != ALL and t.emitted}
    low, high = min(by_set, key=by_set.__getitem__), max(by_set, key=by_set.__getitem__)
    spread = f", from {by_set[low]:.2f} ({low}) to {by_set[high]:.2f} ({high})" if low != high else ""
    said, seen = tally.confidence().values()
    trust = "is about right" if 0.8 * seen <= said <= 1.25 * seen else "is too sure" if said > seen else "is too modest"
    return (
        f"Expect {tally.tau:.2f} tokens a round with {best}{spread}; a round must cost less than {tally.tau:.2f} plain "
        f"steps to gain anything. The drafter {trust} of its paths ({said:.2f} predicted, {seen:.2f} observed)."
    )


def warnings(options: EvalOptions) -> list[str]:
    """Says where the drafter was trained for something else than what it is measured on."""
    recorded = [training_of(name) for name in checkpoints(options.drafter)]
    found = []
    modes = {
        trained["thinking"] for trained in recorded if trained.get("thinking", options.thinking) != options.thinking
    }
    for mode in sorted(modes):
        found.append(
            f"Warning: the drafter was trained with thinking {mode} and is measured with thinking {options.thinking}; "
            "expect less than it can do."
        )
    if recorded and (objective := recorded[0].get("objective", "dflash")) != "dflash":
        found.append(
            f"Warning: this is a {objective} drafter, made to continue a given prefix; as a first drafter it does less "
            "than it can."
        )
    return found


def checkpoints(spec: str) -> list[str]:
    """Names of folders and Hub repositories in a drafter's spec, as in `d2sd:FIRST,SECOND,again=1`."""
    kinds, names = registry.drafter_names(), []
    for each in registry.drafter_specs(spec):
        kind, _, argument = each.partition(":")
        names += (argument if kind in kinds else each).split(",")
    return [name.strip() for name in names if name.strip() and "=" not in name]


def training_of(name: str) -> dict[str, Any]:
    """What a checkpoint's config.json says about its training; empty if it says nothing, or is no checkpoint."""
    try:
        values = read_config(name)
    except BadModel:
        return {}
    nested = values.get("dflash_config", values.get("eagle_config"))
    return nested if isinstance(nested, dict) else {}


def show(report: dict[str, Any], tallies: Mapping[str, Mapping[str, Tally]], options: EvalOptions) -> None:
    """Tables on stdout, files in `options.out`."""
    from draftwood.train.evaluate_show import save_pictures, tables

    console = Console(highlight=False)
    for table in tables(report["policies"]):
        console.print(table)
    for line in report["says"]:
        console.print(line, soft_wrap=True)
    if options.out is not None:
        write_text(options.out / "evaluation.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
        Console(stderr=True, highlight=False).print(save_pictures(report["policies"], options.out), soft_wrap=True)
