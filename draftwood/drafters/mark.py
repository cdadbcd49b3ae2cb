"""A drafter's mark of the target it was made for: numbers of its embedding, which tuning and rounding hardly move.

Configs cannot tell models of one shape apart, and a drafter made for another model drafts nonsense without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftwood.errors import BadModel

if TYPE_CHECKING:
    from draftwood.target import Target

KEY = "target_mark"  # in config.json
TOKENS, NUMBERS = 8, 8
ALIKE = 0.8  # cosine: near 0 for two models, near 1 for one model in two number formats


def mark_of(target: Target) -> list[float]:
    """The first `NUMBERS` of `TOKENS` rows of the embedding, spread over the vocabulary, to three digits."""
    rows = torch.linspace(0, target.vocab_size - 1, TOKENS, dtype=torch.float64).long()
    numbers = target.embed(rows.to(target.device))[:, :NUMBERS].flatten().tolist()
    return [float(f"{number:.3g}") for number in numbers]


def check_mark(mark: Sequence[float] | None, name: str, target: Target) -> None:
    """Refuse a drafter whose `mark` is another target's; without a mark it passes. Raises BadModel."""
    if mark is None:
        return
    theirs, ours = np.asarray(mark), np.asarray(mark_of(target))
    if theirs.shape != ours.shape:
        raise BadModel(
            f"The config.json of drafter {name} has a {KEY} of {theirs.size} numbers instead of {ours.size}; "
            "fetch it again, or remove the key."
        )
    lengths = float(np.linalg.norm(theirs) * np.linalg.norm(ours))
    cosine = float(theirs @ ours) / lengths if lengths else 1.0
    if cosine < ALIKE:
        raise BadModel(
            f"The drafter {name} was made for another model of the shape of {target.name}: their embeddings disagree "
            f"(cosine {cosine:.2f}). Name the drafter of this target, or 'ngram', which works with every target."
        )
