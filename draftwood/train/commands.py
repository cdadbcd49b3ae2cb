"""The three commands of the trainer; like the command line itself it imports nothing heavy before it is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from draftwood.errors import BadInput
from draftwood.flags import (
    Data,
    Device,
    Dtype,
    OneDrafter,
    Policies,
    Prompts,
    PromptsOrSelf,
    Target,
    TrustRemoteCode,
    names,
)

INTERRUPTED = 130

Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same run.")]
Thinking = Annotated[str, typer.Option(help="default, on or off: the chat template's own switch.")]


def distill(
    out: Annotated[Path, typer.Option(help="Folder for the texts; an earlier one is continued.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers to write.")],
    target: Target = None,
    prompts: PromptsOrSelf = None,
    temperature: Annotated[str, typer.Option(help="Comma-separated; prompts take them in turn.")] = "0",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 512,
    thinking: Thinking = "default",
    raw: Annotated[bool, typer.Option("--raw", help="Continue prompts without chat template.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts of each source.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Texts written at once.")] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Let the target answer prompts: the training data of its drafter. Ctrl-C saves; the same command goes on."""
    heats = parse_temperatures(temperature)
    from draftwood.terminal import hide_progress_bars
    from draftwood.train.distill import DistillOptions, run_distill

    hide_progress_bars()
    options = DistillOptions(
        out, tokens, prompts or [], target, heats, max_new_tokens, thinking, raw, limit, rows, seed, dtype, device,
        trust_remote_code,
    )  # fmt: skip
    if not run_distill(options):
        raise typer.Exit(INTERRUPTED)


def train(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the drafter; a run that was stopped goes on.")],
    target: Target = None,
    layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 3,
    block_size: Annotated[int, typer.Option(help="Tokens of a block, the anchor included.")] = 16,
    causal: Annotated[
        bool, typer.Option("--causal", help="Tokens of a block see no later ones: shorter blocks draft the same.")
    ] = False,
    window: Annotated[
        int | None, typer.Option(min=0, help="Tokens that a layer looks back; 0: all; none: enough for 9 of 10 texts.")
    ] = None,
    taps: Annotated[int, typer.Option(help="Target layers that the drafter reads.")] = 5,
    markov_rank: Annotated[
        int, typer.Option(help="Rank of the correction by the candidate before; 0: independent depths.")
    ] = 64,
    init: Annotated[str, typer.Option(help="target, random, or a drafter's folder or Hub name.")] = "target",
    objective: Annotated[
        str, typer.Option(help="dflash, variable-prefix for D2SD's second drafter, or eagle3.")
    ] = "dflash",
    head_tokens: Annotated[str, typer.Option(help="Tokens that may be drafted: auto, all or how many.")] = "auto",
    mask_token: Annotated[int | None, typer.Option(help="Id of the mask; none: one that no text uses.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 6.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts of a step.")] = 8,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Texts of one forward; none: all.")] = None,
    anchors: Annotated[int, typer.Option(help="Blocks of a text, drawn anew in every epoch.")] = 64,
    max_length: Annotated[int, typer.Option(min=8, help="Longer texts are cut.")] = 3072,
    optimizer: Annotated[str, typer.Option(help="adamw, or muon for matrices and AdamW for the rest.")] = "adamw",
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 6e-4,
    warmup: Annotated[float, typer.Option(min=0, max=1, help="Share of the steps with a rising rate.")] = 0.04,
    weight_decay: Annotated[float, typer.Option(min=0, help="Weight decay of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Largest norm of a gradient.")] = 1.0,
    gamma: Annotated[float | None, typer.Option(min=0.1, help="Decay of position weights; none: the paper's.")] = None,
    soft: Annotated[float, typer.Option(help="Share of the loss that follows the target's probabilities.")] = 0.0,
    autocast: Annotated[bool, typer.Option(help="Products in bf16, where the device has them.")] = True,
    holdout: Annotated[float, typer.Option(help="Share of the prompts to measure on.")] = 0.02,
    seed: Seed = 0,
    save_minutes: Annotated[float, typer.Option(min=0, help="Minutes between two saves.")] = 5.0,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between two measurements.")] = 500,
    cache_gb: Annotated[float | None, typer.Option(min=0, help="Gigabytes of disk for the target's features.")] = None,
    features: Annotated[Path | None, typer.Option(help="Folder for these features; none: in the data's.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="Upload the drafter to this repository.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Train a DFlash drafter on what distill wrote. Ctrl-C saves; the same command goes on, exactly."""
    given = dict(locals())
    from draftwood.terminal import hide_progress_bars
    from draftwood.train.recipe import Recipe
    from draftwood.train.run import TrainOptions, run_training

    hide_progress_bars()
    recipe = Recipe(**{name: given[name] for name in Recipe.__slots__})
    options = TrainOptions(**{name: given[name] for name in TrainOptions.__slots__})
    if not run_training(options, recipe):
        raise typer.Exit(INTERRUPTED)


def eval_drafter(
    drafter: OneDrafter,
    target: Target = None,
    prompts: Prompts = None,
    policies: Policies = "dflash,ddtree:64",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts of every set.")] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    thinking: Thinking = "default",
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and pictures.")] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")] = False,
) -> None:
    """Measure a drafter: tau by policy, acceptance by position, and whether its confidence can be believed."""
    specs = tuple(names(policies))
    from draftwood.terminal import hide_progress_bars
    from draftwood.train.evaluate import EvalOptions, run_evaluation

    hide_progress_bars()
    options = EvalOptions(
        drafter, target, prompts or [], specs, max_new_tokens, limit, temperature, thinking, out, seed, dtype, device,
        trust_remote_code,
    )  # fmt: skip
    report = run_evaluation(options)
    if as_json:
        print(json.dumps(report, allow_nan=False), flush=True)


def parse_temperatures(text: str) -> tuple[float, ...]:
    """`"0,0.7"` -> `(0.0, 0.7)`"""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--temperature is {text!r}; expected numbers from 0 up, such as 0,0.7.") from None


def add_to(app: typer.Typer) -> None:
    """Make the commands known under their names."""
    app.command()(distill)
    app.command()(train)
    app.command(name="eval-drafter")(eval_drafter)
