"""Where draftwood keeps what it learned; the only reader of environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that are not a flag. Hugging Face's own variables (HF_HOME, HF_TOKEN …) stay its own."""

    home: Path  # folder of everything that draftwood writes unasked; safe to delete
    compile: bool = True  # whether small CPU operators may be compiled by the C compiler that is at hand
    processes: int = 1  # processes that torchrun started together
    rank: int = 0  # number of this process among them, from 0 on
    local_rank: int = 0  # its number among those on this machine

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

    The cache folder is DRAFTWOOD_HOME, else XDG_CACHE_HOME/draftwood, else ~/.cache/draftwood. With DRAFTWOOD_COMPILE=0
    nothing is compiled. What torchrun sets (WORLD_SIZE, RANK, LOCAL_RANK) is read only if TORCHELASTIC_RUN_ID is set.
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
    """Whether operators may be compiled. It is asked some ten times a round, so it reads this one variable alone."""
    env = os.environ if environ is None else environ
    return env.get("DRAFTWOOD_COMPILE") != "0"


def deployed(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of `draftwood.serve_ray:app`: DRAFTWOOD_SERVE_NUM_REPLICAS=2 gives `{"num_replicas": "2"}`."""
    env = os.environ if environ is None else environ
    prefix = "DRAFTWOOD_SERVE_"
    return {name.removeprefix(prefix).lower(): value for name, value in env.items() if name.startswith(prefix)}


def ray_address() -> str | None:
    """The cluster that Ray will join, by Ray's own RAY_ADDRESS; None if that is unset or empty."""
    return os.environ.get("RAY_ADDRESS") or None


def _home(env: Mapping[str, str]) -> Path:
    if own := env.get("DRAFTWOOD_HOME"):
        return Path(own).expanduser().absolute()
    caches = Path(env.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "draftwood"
