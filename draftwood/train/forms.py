"""The kinds of drafter that can be trained: where one begins, and how it is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwood.target import Target
from draftwood.train.eagle3 import export_eagle3, start_eagle3
from draftwood.train.loss import Head
from draftwood.train.start import start
from draftwood.train.state import export


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of drafter."""

    start: Callable[[Mapping[str, Any], str, Target, int], Any]  # of config, init, target and seed
    # Writes a model with its config and head into a folder; the tokens of a trimmed head, and tau, if known.
    export: Callable[[Path, Any, dict[str, Any], Head, Tensor | None, float | None], None]
    prefix: str = ""  # of the spec that --drafter takes


FORMS = {
    "dflash": Form(start, lambda out, model, config, head, tokens, tau: export(out, model, config, tokens, tau)),
    "eagle3": Form(
        start_eagle3, lambda out, model, config, head, tokens, tau: export_eagle3(out, model, config, head), "eagle3:"
    ),
}
