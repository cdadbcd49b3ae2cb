"""Where draftwood keeps what it learned; the only reader of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that are not a flag. Hugging Face's own variables (HF_HOME, HF_TOKEN …) stay its own."""

    home: Path  # everything draftwood may write without being told to; safe to delete
    compile: bool = True  # whether small CPU operators may be compiled by the C compiler that is at hand
    processes: int = 1  # that torchrun started together
    rank: int = 0  # of this one among them
    local_rank: int = 0  # of this one among those on this machine

    @property
    def models(self) -> Path:
        """Converted models."""
        return self.home / "models"

    @property
    def operators(self) -> Path:
        """Compiled CPU operators."""
        return self.home / "operators"

    @property
    def profiles(self) -> Path:
        """What was measured about this machine, per (machine, target, dtype)."""
        return self.home / "profiles"


def config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the environment.

    DRAFTWOOD_HOME, else XDG_CACHE_HOME/draftwood, else ~/.cache/draftwood; DRAFTWOOD_COMPILE=0 compiles nothing.
    What torchrun sets (WORLD_SIZE, RANK, LOCAL_RANK) counts where it sets TORCHELASTIC_RUN_ID, too.
    """
    env = os.environ if environ is None else environ
    torchrun = env if "TORCHELASTIC_RUN_ID" in env else {}
    return Config(
        _home(env),
        compile=compiles(env),
        processes=int(torchrun.get("WORLD_SIZE", 1)),
        rank=int(torchrun.get("RANK", 0)),
        local_rank=int(torchrun.get("LOCAL_RANK", 0)),
    )


def compiles(environ: Mapping[str, str] | None = None) -> bool:
    """Whether operators may be compiled; asked some ten times a round, where reading all of it would count."""
    env = os.environ if environ is None else environ
    return env.get("DRAFTWOOD_COMPILE") != "0"


def deployed(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What `draftwood.serve_ray:app` is built with: DRAFTWOOD_SERVE_NUM_REPLICAS=2 gives `{"num_replicas": "2"}`."""
    env = os.environ if environ is None else environ
    prefix = "DRAFTWOOD_SERVE_"
    return {name.removeprefix(prefix).lower(): value for name, value in env.items() if name.startswith(prefix)}


def ray_address() -> str | None:
    """The cluster that Ray will join: its own RAY_ADDRESS, which counts where it is not empty."""
    return os.environ.get("RAY_ADDRESS") or None


def _home(env: Mapping[str, str]) -> Path:
    if own := env.get("DRAFTWOOD_HOME"):
        return Path(own).expanduser().absolute()
    caches = Path(env.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "draftwood"
