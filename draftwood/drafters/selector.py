"""Which token follows which: DFlash 2's candidate selector, and DSpark's Markov head, which has no gate.

With h_d the drafter's last hidden state at depth d, A and B tables of all tokens, and H a projection
(z-lab/dflash, `CandidateSelector`; deepseek-ai/DeepSpec, `VanillaMarkov`, with H h = 1):

    log p(b | a) = log q_d(b) + <A_a * H h_d, B_b> - log Z_a

Their makers draw one path along these scores, beginning behind the root. Here they are the edges of a tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from draftwood.drafters.base import Candidates
from draftwood.drafters.markov import conditional


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """The scores of all pairs of tokens at any depth."""

    before: Tensor  # A, [V, r]
    after: Tensor  # B, [V, r]
    gate: nn.Module | None  # H, hidden -> r
    least: int  # candidates of each depth that are scored at least

    def follow(
        self, tokens: Tensor, rows: Tensor, logp: Tensor, hidden: Tensor | None, root: Tensor | None
    ) -> Candidates:
        """Candidates `tokens` `[D, K]` with marginals `logp`: those of the first depth as they follow the `root` `[1]`,
        the likeliest first, and others behind each candidate before. `hidden` is `[D, hidden]`."""
        assert hidden is not None and root is not None, "a selector reads the drafter's states"
        gates = hidden.new_ones(len(hidden), 1) if self.gate is None else self.gate(hidden)
        gates, after = gates.float(), self.after[tokens].float()
        first = conditional((self.before[root].float() * gates[:1]) @ after[0].T, logp[:1])
        pairs = conditional((self.before[tokens[:-1]].float() * gates[1:, None]) @ after[1:].mT, logp[1:, None])
        first, order = first[0].sort(descending=True, stable=True)
        tokens, logp, pairs = tokens.clone(), logp.clone(), pairs.clone()
        tokens[0], logp[0] = tokens[0, order], first
        if len(pairs):
            pairs[0] = pairs[0, order]
        return Candidates(tokens, logp, pairs)
