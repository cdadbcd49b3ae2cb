"""Public data sets by name: where they are on the Hugging Face Hub and how a row becomes user messages.

The prompt wording is that of the DFlash, DDTree and BASTION harnesses (arXiv 2602.06036, 2604.12989,
2605.29727), so that acceptance lengths can be compared with theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from draftwood.errors import BadInput, MissingExtra, first_line

Row = Mapping[str, Any]
Turns = tuple[str, ...]
Loader = Callable[..., Iterable[Row]]  # datasets.load_dataset

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n"
LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will "
    "generate a correct Python program that matches the specification and passes all tests. You will NOT "
    "return anything except for the program"
)
LIVECODEBENCH_FILES = "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/main/"


@dataclass(frozen=True, slots=True)
class HubDataset:
    """Arguments of `datasets.load_dataset`, and `turns`: the user messages of one row."""

    path: str
    config: str | None
    split: str
    turns: Callable[[Row], Turns]
    data_files: Mapping[str, list[str]] | None = None


def gsm8k(row: Row) -> Turns:
    return (row["question"] + BOXED,)


def competition(row: Row) -> Turns:
    return (row["problem"] + BOXED,)


def humaneval(row: Row) -> Turns:
    return (f"{TESTED}```python\n{row['prompt']}\n```",)


def mbpp(row: Row) -> Turns:
    return (row["prompt"],)


def livecodebench(row: Row) -> Turns:
    starter = row.get("starter_code")
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    return (
        f"{LIVECODEBENCH}\n\n### Question:\n{row['question_content']}\n\n### Format: {form}\n"
        f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)",
    )


def mt_bench(row: Row) -> Turns:
    return tuple(row["prompt"])


def alpaca(row: Row) -> Turns:
    return (f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"],)


DATASETS: Mapping[str, HubDataset] = {
    "gsm8k": HubDataset("openai/gsm8k", "main", "test", gsm8k),
    "math500": HubDataset("HuggingFaceH4/MATH-500", None, "test", competition),
    "aime25": HubDataset("MathArena/aime_2025", None, "train", competition),
    "humaneval": HubDataset("openai/openai_humaneval", None, "test", humaneval),
    "mbpp": HubDataset("google-research-datasets/mbpp", "sanitized", "test", mbpp),
    "livecodebench": HubDataset(
        "json",  # the repository's own loader is a script, which `datasets` no longer runs
        None,
        "test",
        livecodebench,
        {"test": [f"{LIVECODEBENCH_FILES}test{part}.jsonl" for part in ("", 2, 3, 4, 5, 6)]},
    ),
    "mt-bench": HubDataset("HuggingFaceH4/mt_bench_prompts", None, "train", mt_bench),
    "alpaca": HubDataset("tatsu-lab/alpaca", None, "train", alpaca),
}


def load_rows(name: str) -> list[Row]:
    """All rows of the data set `name`."""
    source, load = DATASETS[name], hub_loader(name)
    try:
        return list(load(source.path, source.config, split=source.split, data_files=source.data_files))
    except Exception as error:  # the hub client raises many kinds: offline, gated, renamed, broken download
        raise BadInput(
            f"The data set {name} ({source.path}) could not be loaded ({first_line(error)}); check the network, or "
            "give --prompts a JSONL file."
        ) from error


def hub_loader(name: str) -> Loader:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtra(
            f"The data set {name} is loaded with the package 'datasets', which is not installed; "
            "run: pip install 'draftwood[datasets]'"
        ) from None
    return load_dataset
