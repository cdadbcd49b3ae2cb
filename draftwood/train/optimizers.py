"""What turns gradients into steps: AdamW, or for matrices Muon.

Muon (Jordan et al. 2024; PyTorch has it) makes the step of a matrix orthogonal. Brought to the size of AdamW's steps
(Liu et al. 2025) it takes the same learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from draftwood.precision import computes_bf16

Group: TypeAlias = dict[str, Any]

MARKOV_PACE = 5.0  # learning rate of scores of pairs over the layers': they are two small matrices (docs/log.md)
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def adamw(group: Group) -> Optimizer:
    return AdamW([group], betas=(0.9, 0.95), weight_decay=0.0)


def muon(group: Group) -> Optimizer:
    kind = Muon if computes_bf16(group["params"][0].device) else WideMuon
    return kind([group], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


class WideMuon(Muon):
    """In fp32: PyTorch's products are in bf16 even where a processor has none and they take many times as long."""

    def step(self, closure: Any = None) -> Any:
        with SinglePrecision():
            return super().step(closure)


class SinglePrecision(TorchFunctionMode):
    """What asks for bf16 gets fp32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].float() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


OPTIMIZERS: dict[str, Callable[[Group], Optimizer]] = {"adamw": adamw, "muon": muon}  # of the layers' matrices


class Optimizers:
    """Each parameter has one; they are stepped, saved and restored together."""

    def __init__(
        self, name: str, layers: Sequence[nn.Parameter], pairs: Sequence[nn.Parameter], weight_decay: float
    ) -> None:
        """`pairs` are scores of which candidate follows which; weights decay in matrices of `layers`."""
        matrices, vectors = ([p for p in layers if (p.ndim == 2) == matrix] for matrix in (True, False))
        self._each = [OPTIMIZERS[name]({"params": matrices, "weight_decay": weight_decay, "pace": 1.0})]
        self._each += [adamw({"params": vectors, "pace": 1.0})]
        self._each += [adamw({"params": list(pairs), "pace": MARKOV_PACE})] if pairs else []
        self._of = {p: each for each in self._each for group in each.param_groups for p in group["params"]}

    def step(self, rate: float) -> None:
        """One step of every parameter that has a gradient."""
        for optimizer in self._each:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["pace"]
            optimizer.step()

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is remembered of a parameter's gradients; nothing before its first step."""
        state = self._of[parameter].state.get(parameter, {})
        return {name: state[name] for name in MOMENTS if name in state}

    def restore(self, parameter: nn.Parameter, moments: Mapping[str, Tensor], step: int) -> None:
        """Go on with `moments` of a run that has done `step` steps."""
        mine = {name: moment.to(parameter.device) for name, moment in moments.items()}
        self._of[parameter].state[parameter] = {"step": torch.tensor(float(step)), **mine}
