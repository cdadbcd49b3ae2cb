"""Stream an answer with draft tokens coloured apart from the target's own, and stop when enough is seen."""

from __future__ import annotations

from rich.console import Console

import draftwood

COLOURS = {"draft": "green", "bonus": "bold"}
ENOUGH = 160  # characters

console = Console(highlight=False)
llm = draftwood.load()
stream = llm.stream("Name three trees and where they grow.", max_new_tokens=64)
seen = 0
for piece in stream:
    console.print(piece.text, style=COLOURS[piece.origin], markup=False, end="")
    seen += len(piece.text)
    if seen >= ENOUGH and piece.text.endswith((".", "\n")):
        stream.close()  # safe at any time
        break

answer = stream.generation
console.print(f"\n\n{len(answer.token_ids)} tokens, {answer.finish_reason}", style="dim")
