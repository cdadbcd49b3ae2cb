"""draftwood: the same text from a Hugging Face language model, several times faster.

import draftwood

llm = draftwood.load()
print(llm.generate("Why is the sky blue?").text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.dropin import custom_generate
    from draftwood.errors import DraftwoodError
    from draftwood.llm import LLM, Generation, Piece, load
    from draftwood.sampling import Sampling
    from draftwood.tree import Lattice, Tree

__version__ = "0.1.0"
__all__ = ["LLM", "DraftwoodError", "Generation", "Lattice", "Piece", "Sampling", "Tree", "custom_generate", "load"]

_HOME = {
    "LLM": "llm", "Generation": "llm", "Piece": "llm", "load": "llm", "Sampling": "sampling", "Tree": "tree",
    "Lattice": "tree", "DraftwoodError": "errors", "custom_generate": "dropin",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import draftwood` and `draftwood --help` need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
    return getattr(import_module(f"draftwood.{_HOME[name]}"), name)
