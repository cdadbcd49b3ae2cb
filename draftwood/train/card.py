"""The model card of a trained drafter: data, recipe, tau and where it was made; and the way to the Hub."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.bench.environment import environment
from draftwood.drafters import markov
from draftwood.drafters.checkpoint import DRAFT_TOKENS
from draftwood.errors import BadInput, first_line
from draftwood.train.blocks import OBJECTIVES
from draftwood.train.files import WEIGHTS
from draftwood.train.holdout import TEXTS
from draftwood.train.loop import Course, keeps_up
from draftwood.train.show import read_log

SHARED = ("README.md", "LICENSE", "config.json", WEIGHTS, markov.FILE, DRAFT_TOKENS)  # and nothing else that lies there
OURS = (DRAFT_TOKENS, "markov/*")  # an earlier drafter's on the Hub are deleted: they would trim or correct this one


def card(course: Course, step: int) -> str:
    """README.md for the Hub and for people."""
    facts = environment()
    return "\n".join(
        [
            "---",
            *([f"base_model: {course.target.name}"] if is_hub_name(course.target.name) else []),
            "library_name: draftwood",
            f"tags: [speculative-decoding, {course.recipe.objective}]",
            "---",
            f"# A drafter for {Path(course.target.name).name}, objective {course.recipe.objective}",
            "",
            f"Made with `draftwood train`. To use it: `draftwood generate --target {course.target.name} --drafter "
            f"{course.form.prefix}THIS`. It changes how fast the target writes, never what it writes.",
            "",
            "## Measured",
            *tau_table(course.out, course.recipe.objective),
            "",
            "## Data",
            *data_lines(course),
            "",
            "## Recipe",
            f"{step} of {course.steps} steps, which took {hours(course.out):.2g} hours.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in course.recipe.to_json().items() if value is not None),
            f"| mask token | {course.config['dflash_config']['mask_token_id']} |",
            f"| target layers | {course.config['dflash_config']['target_layer_ids']} |",
            f"| how far back it looks, in tokens | {course.config['sliding_window'] or 'all'} |",
            f"| draft tokens | {course.drafted} |",
            "",
            f"`{facts['command']}`",
            "",
            f"{facts['date']}, draftwood {facts['versions']['draftwood']} at {facts['commit']}, torch "
            f"{facts['versions']['torch']}, {hardware(facts)}.",
            "",
            "## Licence",
            "The licences of the target and of the prompts apply; name them here before you share this drafter.",
            "",
        ]
    )


def is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).exists()


def tau_table(out: Path, objective: str) -> list[str]:
    """The last evaluations on held-out texts, and that of the drafter in the folder."""
    rows = [line for line in read_log(out) if line.get("tau")]
    if not rows:
        return ["No texts were held out, so nothing was measured."]
    policies, ours = list(rows[0]["tau"]), exported(rows)
    after = "" if OBJECTIVES[objective].shown == 1 else ", given one true token"
    return [
        f"τ (tokens per round, bonus included) of greedy rounds along held-out texts, at most {TEXTS}{after}:",
        "",
        f"| step | {' | '.join(policies)} |",
        f"|---|{'---|' * len(policies)}",
        *(
            f"| {row['step']}{', this drafter' if row is ours else ''} | "
            f"{' | '.join(format(row['tau'][p], '.2f') for p in policies)} |"
            for row in rows
            if row is ours or row in rows[-5:]
        ),
    ]


def exported(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The evaluation of the drafter that was exported last."""
    best, ours = 0.0, rows[0]
    for row in rows:
        score = next(iter(row["tau"].values()))
        ours = row if keeps_up(score, best) else ours
        best = max(best, score)
    return ours


def data_lines(course: Course) -> list[str]:
    sources = Counter(text.source for text in course.texts)
    answers = sum(len(t.tokens) - t.prompt for t in course.texts)
    named = ", ".join(f"{source} ({count})" for source, count in sources.most_common())
    return [
        f"{len(course.texts)} texts, in which the target wrote {answers} answer tokens; prompts from {named}. "
        f"Thinking: {course.config['dflash_config']['thinking']}. {len(course.held_out)} further texts were held out.",
    ]


def outdated(page: Path, steps: int) -> bool:
    """Whether there is no card, or one of a run that had not ended: a run saves its state first, then the card."""
    if not page.exists():
        return True
    told = re.search(rf"(\d+) of {steps} steps", page.read_text(encoding="utf-8"))
    return told is not None and int(told[1]) < steps


def hours(out: Path) -> float:
    """Hours of the steps alone, without evaluations and pauses."""
    return sum(line["seconds"] for line in read_log(out) if "seconds" in line) / 3600


def hardware(facts: dict[str, Any]) -> str:
    gpus = [gpu["name"] for gpu in facts["gpus"]]
    return " and ".join(gpus) if gpus else f"{facts['cores']} cores of {facts['processor']}"


def push(out: Path, repository: str) -> str:
    """Upload the drafter and nothing else of its folder. Raises BadInput if the Hub does not take it."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=out, allow_patterns=list(SHARED), delete_patterns=list(OURS))
    except Exception as error:  # the Hub's, the network's or any library's
        raise BadInput(
            f"--push-to-hub {repository}: the Hub did not take it ({first_line(error)}); the drafter is whole in "
            f"{out}, log in with `hf auth login` and upload it from there."
        ) from None
    return f"https://huggingface.co/{repository}"
