"""What turns gradients into steps: AdamW, or for matrices Muon.

Muon (Jordan et al. 2024) makes the step of a matrix orthogonal. Brought to the size of AdamW's steps
(Liu et al. 2025) it takes the same learning rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from draftwood.precision import computes_bf16

Group: TypeAlias = dict[str, Any]

MARKOV_PACE = 5.0  # the Markov head's learning rate over the layers': it has two small matrices (docs/log.md)
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
MOMENTUM = 0.95
QUINTIC = (3.4445, -4.7750, 2.0315)  # of the iteration that makes a matrix orthogonal, by Jordan et al.
ITERATIONS = 5


def adamw(group: Group) -> Optimizer:
    return AdamW([group], betas=(0.9, 0.95), weight_decay=0.0)


class Muon(Optimizer):
    """The steps of PyTorch's `Muon`, which takes one matrix after the other, and in bf16 everywhere.

    Here all matrices of a shape go through the same products: with small ones a GPU would wait for launches. Where a
    processor has no bf16, products are in fp32.
    """

    def __init__(self, group: Group) -> None:
        super().__init__([group], {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of all matrices that have a gradient."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            alike = defaultdict(list)
            for parameter, step in zip(moved, self._steps(moved), strict=True):
                alike[wide(parameter).shape].append((wide(parameter), wide(step)))
            for shape, some in alike.items():
                size = 0.2 * max(shape) ** 0.5  # as large as AdamW's (Liu et al. 2025)
                steps = orthogonal(torch.stack([step for _, step in some]))
                for (parameter, _), step in zip(some, steps, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"] * size)

    def _steps(self, moved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Nesterov's momentum of each."""
        if not moved:
            return []
        for parameter in moved:
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        momenta = [self.state[p]["momentum_buffer"] for p in moved]
        grads = [p.grad for p in moved if p.grad is not None]
        torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
        return torch._foreach_lerp(grads, momenta, MOMENTUM)


def wide(matrix: Tensor) -> Tensor:
    """The matrix, or a view of its transpose if it has more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonal(matrices: Tensor) -> Tensor:
    """`[N, r, c]`, r at most c, each with its singular values brought near 1, by Newton and Schulz."""
    x = matrices.bfloat16() if computes_bf16(matrices.device) else matrices.float()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


OPTIMIZERS: dict[str, Callable[[Group], Optimizer]] = {"adamw": adamw, "muon": Muon}  # of the layers' matrices


class Optimizers:
    """Each parameter belongs to one optimizer; all are stepped, saved and restored together."""

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
