"""Tau on held-out texts while training: rounds as they would go at temperature 0, walked along the known text.

The drafter drafts at every place of an answer in one forward; then each policy walks: draft, keep what the text
confirms, go on after it. No target forward is needed, and all policies share the drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from draftwood import registry
from draftwood.accept import accept
from draftwood.drafters.markov import Markov, on_host, propose
from draftwood.target import Target
from draftwood.train.attention import Layout
from draftwood.train.blocks import make_blocks
from draftwood.train.eagle3 import Trainable
from draftwood.train.features import Features
from draftwood.train.loss import Head
from draftwood.train.shards import Text
from draftwood.tree import Draft

POLICIES = ("dflash", "ddtree:64")
PLACES = 96  # of each text
TEXTS = 32


@torch.no_grad()
def lattices(
    model: Trainable,
    target: Target,
    head: Head,
    text: Text,
    features: Features,
    shown: int,
    width: int,
    autocast: bool = False,
    teacher_forced: bool = False,
) -> list[Draft]:
    """A draft at each of the first `PLACES` places of the answer; blocks show `shown` tokens.

    `teacher_forced`: each depth has seen the text before it, which is right on the path that the text confirms alone.
    """
    last = min(len(text.tokens) - 1 - shown, text.prompt + PLACES)
    first = 1 if teacher_forced else text.prompt
    anchors = np.arange(first, last)
    prefixes = np.full(len(anchors), shown)
    config = model.config
    blocks = make_blocks([text], [anchors], [prefixes], config.block_size, config.mask_token_id, 1.0, teacher_forced)
    hidden = forward(model, target, blocks.tokens, [features.taps], Layout.of(blocks, target.device), autocast)
    rows = hidden[text.prompt - first :, shown - 1 :]
    markov = None if model.markov is None else Markov.of(*model.markov.matrices, target, head.tokens)
    return [on_host(propose(head.logits(row), width, head.tokens, markov)) for row in rows]


def forward(
    model: Trainable,
    target: Target,
    tokens: np.ndarray,
    taps: list[Tensor],
    layout: Layout,
    autocast: bool = False,
) -> Tensor:
    """The module on block tokens `[M, B]`, products in bf16 with `autocast`: final hidden states `[M, B - 1, hidden]`.

    The target stays outside of autocast: it computes in its own precision.
    """
    ids = torch.from_numpy(tokens).to(target.device)
    embedded = target.embed(ids.flatten()).detach().to(model.norm.weight.dtype)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
        hidden: Tensor = model(embedded, taps, layout)
    return hidden


def walk(drafts: Sequence[Draft], text: Text, shown: int, policy: str) -> list[int]:
    """Tokens emitted by each round of a policy of fixed width, while there are drafts."""
    rule, emitted, place = registry.policy(policy), [], 0
    answer = text.tokens[text.prompt + shown - 1 :].tolist()  # answer[0] is the first root
    while place < len(drafts):
        tree = rule.grow(drafts[place], answer[place])

        def truth(_node: int, path: Sequence[int], at: int = place + 1) -> int:
            return answer[at + len(path)] if at + len(path) < len(answer) else -1

        emitted.append(len(accept(tree, truth).tokens))
        place += emitted[-1]
    return emitted


def held_out_tau(
    model: Trainable,
    target: Target,
    head: Head,
    texts: Sequence[Text],
    features: Sequence[Features],
    shown: int = 1,
    autocast: bool = False,
    teacher_forced: bool = False,
) -> Mapping[str, float]:
    """Mean tokens of a round, bonus included, for each policy; empty without texts.

    Where drafts are conditional (`teacher_forced`), only the chain is what it would be when drafting.
    """
    policies = POLICIES[:1] if teacher_forced else POLICIES
    width = max(registry.policy(p).width for p in policies)
    emitted: dict[str, list[int]] = {policy: [] for policy in policies}
    for text, read in zip(texts, features, strict=True):
        if len(text.tokens) - text.prompt <= shown + 1:
            continue
        drafts = lattices(model, target, head, text, read, shown, width, autocast, teacher_forced)
        for policy, rounds in emitted.items():
            rounds += walk(drafts, text, shown, policy)
    return {policy: float(np.mean(rounds)) for policy, rounds in emitted.items() if rounds}
