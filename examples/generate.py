"""Write an answer, and print how many rounds it took and what they spent their time on."""

from __future__ import annotations

import draftwood

llm = draftwood.load()
answer = llm.generate("Why is the sky blue?", max_new_tokens=48)

print(answer.text)
print(f"\n{len(answer.token_ids)} tokens in {len(answer.rounds)} rounds, {answer.tau:.2f} tokens a round")
for verb, seconds in answer.seconds_by_verb.items():
    print(f"{verb:>8} {1000 * seconds / max(1, len(answer.rounds)):8.2f} ms a round")
