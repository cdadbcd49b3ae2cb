"""What commands have in common when they load models. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftwood.config import config

if TYPE_CHECKING:
    from draftwood.llm import LLM


def load(target: str | None, drafter: Sequence[str] | None, policy: str | None = None, **options: Any) -> LLM:
    """`draftwood.load` with the values of flags. A repeatable flag that is absent may give an empty list."""
    from draftwood import llm

    hide_progress_bars()
    return llm.load(target, drafter or None, policy, **options)


def hide_progress_bars() -> None:
    """Keep transformers' progress bars out of logs and pipes; in a terminal they tell why loading takes long.

    Of several processes only the first shows them, and none lists the layers that are not divided.
    """
    from transformers.utils import logging

    here = config()
    if not sys.stderr.isatty() or here.rank > 0:
        logging.disable_progress_bar()
    if here.processes > 1:
        logging.set_verbosity_error()
