"""How much is drafted and grown: what a policy asks for, less what recent rounds showed to be of no use."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.acceptance import AcceptanceModel
from draftwood.policies.base import Policy
from draftwood.tree import Draft, Tree

RECORDED = 16  # candidates of each depth that a round's record keeps, and that are drafted at least


@dataclass(frozen=True, slots=True)
class Asked:
    """What a drafter is asked for."""

    width: int  # candidates of each depth
    positions: int  # depths


def asked(policy: Policy, known: AcceptanceModel, remaining: int) -> Asked:
    """What to ask a drafter for, in a text of which `remaining` tokens are still to be written."""
    width, positions = policy.width, min(remaining - 1, policy.n_max)  # no tree of n nodes is deeper than n
    if policy.calibrated and known.depth is not None and known.width is not None:
        width, positions = min(width, max(known.width, RECORDED)), min(positions, known.depth)
    return Asked(width, positions)


def grown(policy: Policy, known: AcceptanceModel, draft: Draft, root: int, remaining: int) -> Tree:
    """The tree that the policy grows from a draft."""
    limits = (known.faint, known.nodes) if policy.calibrated else ()
    # A node at depth d can only be emitted if d more tokens fit before the bonus token.
    return policy.grow(draft, root, *limits).up_to_depth(remaining - 1)
