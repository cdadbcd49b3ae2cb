"""A target divided among processes (tensor parallel): transformers shards it, every process runs its part of a layer.

Every process keeps the whole embedding and head beside its shards, so that a drafter, which shares them, drafts without
waiting for the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from draftwood.errors import BadModel
from draftwood.packing import linear
from draftwood.parallel import Group
from draftwood.target import Target

KEYS = ("k_proj", "qkv_proj", "query_key_value")  # layers whose output holds the keys


class ShardedTarget(Target):
    """A target of which this process holds a part. Every process runs every forward; decisions are the `group`'s."""

    def __init__(self, model: PreTrainedModel, name: str, group: Group, path: str, width_invariant: bool) -> None:
        """Takes the universal path. Raises as `Target` does."""
        self.group = group
        self._whole_vocab = model.config.get_text_config().vocab_size
        table: Any = model.get_input_embeddings().weight
        head: Any = model.get_output_embeddings()
        self._table = self._whole(table)
        weight = self._table if head.weight is table else self._whole(head.weight)
        bias = None if head.bias is None else self._whole(head.bias)
        self._output = linear(weight, bias)
        super().__init__(model, name, path=path, width_invariant=width_invariant)
        self._experts = 0.0, 1.0  # of this part nobody knows which are whole
        self.weight_bytes = sum(local(p).nbytes for p in model.parameters() if p is not table or p is head.weight)

    @torch.no_grad()
    def _whole(self, part: Tensor) -> Tensor:
        """All rows of a parameter."""
        if isinstance(part, DTensor):
            return part.full_tensor()
        if len(part) == self._whole_vocab:
            return part.detach()
        parts = [torch.empty_like(part) for _ in range(self.group.size)]
        dist.all_gather(parts, part.detach())
        return torch.cat(parts)

    @property
    def vocab_size(self) -> int:
        return self._whole_vocab

    def _kv_width(self) -> int:
        return super()._kv_width() // (self.group.size if divides_keys(self.config) else 1)

    @property
    def embedding(self) -> Tensor:
        return self._table

    @property
    def output(self) -> nn.Module:
        return self._output


def local(parameter: Tensor) -> Tensor:
    """What this process holds of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def divides_keys(config: PretrainedConfig) -> bool:
    """Whether transformers' plan gives each process some of the key heads."""
    plan = config.get_text_config().base_model_tp_plan or {}
    return any(name.endswith(KEYS) and style == "colwise" for name, style in plan.items())


def refuse_indivisible(config: PretrainedConfig, name: str, processes: int) -> None:
    """Raise BadModel for a model whose heads cannot be dealt out evenly, or that transformers cannot divide."""
    text = config.get_text_config()
    if not text.base_model_tp_plan:
        raise BadModel(f"{name}: transformers has no plan for dividing a {text.model_type}; run it in one process.")
    heads = {"attention heads": text.num_attention_heads}
    heads["key and value heads"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for kind, count in heads.items():
        if divides_keys(config) and count % processes:
            fitting = [n for n in range(1, count + 1) if all(each % n == 0 for each in heads.values())]
            raise BadModel(
                f"{name} has {count} {kind}, which {processes} processes cannot share evenly; start "
                f"{' or '.join(map(str, fitting))}."
            )
