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

    @property
    def models(self) -> Path:
        """Converted models."""
        return self.home / "models"

    @property
    def profiles(self) -> Path:
        """What was measured about this machine, per (machine, target, dtype)."""
        return self.home / "profiles"


def config(environ: Mapping[str, str] | None = None) -> Config:
    """Read the environment: DRAFTWOOD_HOME, else XDG_CACHE_HOME/draftwood, else ~/.cache/draftwood."""
    env = os.environ if environ is None else environ
    if own := env.get("DRAFTWOOD_HOME"):
        return Config(Path(own).expanduser().absolute())
    caches = Path(env.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is to be ignored.
    return Config((caches if caches.is_absolute() else Path.home() / ".cache") / "draftwood")
