"""One step of training: the loss and its gradients, how texts and processes share it, the rate, the optimizers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Muon
from torch.overrides import TorchFunctionMode

from draftwood.target import Target
from draftwood.train import loop, loss, optimizers
from draftwood.train.blocks import make_blocks
from draftwood.train.fleet import Fleet
from draftwood.train.loop import add_gradients, descend, plan_step, run_part, teacher_of
from draftwood.train.loss import Before, Head, Labels, Teacher, backpropagate
from draftwood.train.model import MarkovHead
from draftwood.train.optimizers import MARKOV_PACE, OPTIMIZERS
from draftwood.train.recipe import Recipe
from tests.reference import VOCAB, plain_logits, tiny_target
from tests.train_cases import MASK, RECIPE, TEXTS, make_course, make_trainee


def test_a_head_in_float16_is_widened() -> None:
    """Gradients of unlikely tokens are below what float16 can tell from 0."""
    assert Head.of(tiny_target(dtype=torch.float16), None).weight.dtype == torch.float32


@pytest.mark.parametrize(("soft", "paired"), [(0.0, False), (0.4, False), (0.4, True)])
def test_the_chunked_loss_is_the_plain_one(
    single: Target, soft: float, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.train.loss.CHUNK", 7)
    torch.manual_seed(0)
    kept = torch.arange(0, VOCAB, 2)
    head = Head.of(single, kept)
    hidden = torch.randn(6, 5, 32, requires_grad=True)
    labels, weights = torch.randint(VOCAB, (6, 5)), torch.rand(6, 5)
    weights[0, 2:] = 0
    asked = Labels.of(labels.numpy(), weights.numpy(), head)
    teacher = Teacher(torch.randint(VOCAB, (30, 3)), torch.rand(30, 3).softmax(-1))
    markov, embedded, unseen = MarkovHead(32, 4), torch.randn(6, 5, 32), torch.rand(6, 5) < 0.7
    before = Before(markov, embedded, unseen, head) if paired else None
    outcome = backpropagate(hidden, head, asked, 0.5, teacher, soft, before)
    learning = [hidden, *(markov.parameters() if paired else ())]
    found = [parameter.grad for parameter in learning]
    for parameter in learning:
        parameter.grad = None
    logits = hidden @ single.head_rows(None)[0][kept].T
    if paired:  # a token before that the block shows has had its say
        one, other = markov.tables(embedded, head.weight)
        logits = torch.where(unseen[..., None], logits + one @ other.T, logits)
    logp = logits.log_softmax(-1).flatten(0, 1)
    loss = torch.zeros(())
    for n, (label, weight) in enumerate(zip(labels.flatten().tolist(), weights.flatten(), strict=True)):
        hard = -logp[n, label // 2] if label % 2 == 0 else 0.0
        known = {int(t): p for t, p in zip(teacher.tokens[n], teacher.probs[n], strict=True) if t % 2 == 0}
        both = [(t, p) for t, p in zip(teacher.tokens[n].tolist(), teacher.probs[n], strict=True) if t in known]
        total = sum(p for _, p in both)
        softly = -sum(p / total * logp[n, t // 2] for t, p in both) if both else 0.0
        loss = loss + weight * ((1 - soft) * hard + soft * softly)
    (0.5 * loss).backward()
    torch.testing.assert_close(outcome.loss, loss.detach())
    torch.testing.assert_close(found, [parameter.grad for parameter in learning])
    assert outcome.total.tolist() == [6, 6, 5, 5, 5]
    best = 2 * logp.argmax(-1).view(6, 5)
    assert outcome.right.tolist() == ((best == labels) & (weights > 0)).sum(0).tolist()


def test_the_teacher_of_a_position_is_what_the_target_expects_there(single: Target, tmp_path: Path) -> None:
    course = make_course(single, tmp_path, replace(RECIPE, soft=0.5))
    anchors = [np.array([8, 30]), np.array([7])]
    texts = TEXTS[1:3]
    blocks = make_blocks(texts, anchors, [np.ones(2, int), np.ones(1, int)], 6, MASK, 4.0)
    teacher = teacher_of(blocks, course.features([1, 2]))
    expected = [plain_logits(single, t.tokens.tolist()).softmax(-1) for t in texts]
    row = 0
    for text, places, probs in zip(texts, anchors, expected, strict=True):
        for anchor in places:
            for position in range(1, 6):
                if anchor + position < len(text.tokens):
                    values, tokens = probs[anchor + position - 1].topk(4)
                    assert teacher.tokens[row][:4].tolist() == tokens.tolist()
                    torch.testing.assert_close(teacher.probs[row][:4], values, atol=5e-3, rtol=1e-2)
                row += 1


def test_micro_batches_add_up(single: Target, tmp_path: Path) -> None:
    gradients = []
    for micro in (None, 1, 3):
        course = make_course(single, tmp_path, replace(RECIPE, micro_batch=micro, clip=1e9))
        trainee = make_trainee(course)
        add_gradients(course, trainee)
        gradients.append([p.grad.clone() for p in trainee.model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_processes_share_the_work(single: Target, tmp_path: Path) -> None:
    """The gradients of two processes, each with its share of the texts, add up to those of one."""
    sums = []
    for size in (1, 2):
        trainee = make_trainee(make_course(single, tmp_path))
        for rank in range(size):
            course = replace(make_course(single, tmp_path), fleet=Fleet(rank, size))
            for part in plan_step(course, step=1):
                run_part(course, trainee, part, scale=0.01)
        sums.append([p.grad for p in trainee.model.parameters()])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-6)


# --- the rate and the optimizers -----------------------------------------------------------------------------


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [Recipe(lr=1e-3, warmup=0.1).rate(step, 100) for step in range(100)]
    assert rates[:3] == pytest.approx([1e-4, 2e-4, 3e-4]) and max(rates) == pytest.approx(1e-3)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:])) and 1e-4 <= rates[-1] < 1.1e-4


def test_muon_steps_as_pytorch_does() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((24, 48), (48, 24), (24, 48), (30, 30))]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    both = optimizers.Muon({"params": ours, **options}), Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        for optimizer in both:
            optimizer.step()
    for one, other, before in zip(ours, theirs, start, strict=True):
        moved = torch.linalg.vector_norm(other - before)
        assert torch.linalg.vector_norm(one - other) < 0.02 * moved


def first_step(single: Target, out: Path, optimizer: str) -> tuple[float, dict[str, Tensor]]:
    """The rate of a run's first step, and how it moved each parameter."""
    course = make_course(single, out, replace(RECIPE, optimizer=optimizer))
    trainee = make_trainee(course)
    before = {name: parameter.detach().clone() for name, parameter in trainee.model.named_parameters()}
    rate = descend(course, trainee, add_gradients(course, trainee)).rate
    return rate, {name: p.detach() - before[name] for name, p in trainee.model.named_parameters()}


def test_scores_of_pairs_have_a_rate_of_their_own(single: Target, tmp_path: Path) -> None:
    """Adam's first step moves a weight by its rate."""
    rate, moved = first_step(single, tmp_path, "adamw")
    assert float(moved["fc.weight"].abs().max()) == pytest.approx(rate, rel=0.01)
    assert float(moved["markov.after.weight"].abs().max()) == pytest.approx(MARKOV_PACE * rate, rel=0.01)


def test_muon_moves_matrices_in_all_directions_alike(single: Target, tmp_path: Path) -> None:
    """Newton and Schulz's five iterations bring singular values to 0.5 … 1.5; AdamW moves them as if there were one."""
    spread = {}
    for optimizer in OPTIMIZERS:
        rate, moved = first_step(single, tmp_path / optimizer, optimizer)
        values = torch.linalg.svdvals(moved["fc.weight"])
        spread[optimizer] = float(values[0] / values[len(values) // 2])
        assert float(moved["norm.weight"].abs().max()) == pytest.approx(rate, rel=0.01)  # a vector, AdamW's
    assert spread["muon"] < 3 < spread["adamw"]


@pytest.mark.parametrize("native", [True, False])
def test_products_are_in_bf16_only_where_the_processor_has_them(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take ten times as long elsewhere: autocast, the head of a bf16 target, and PyTorch's Muon ask for them."""
    met: list[torch.dtype] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.mm, Tensor.matmul, Tensor.__matmul__, F.linear):
                met.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    for user in (loss, loop, optimizers):
        monkeypatch.setattr(user, "computes_bf16", lambda device: native)
    target = tiny_target(dtype=torch.bfloat16)
    course = make_course(target, tmp_path, replace(RECIPE, optimizer="muon", autocast=True, soft=0.5))
    trainee = make_trainee(course)
    course.features(range(len(TEXTS)))  # by the target's own products, which stay as they are
    with Watch():
        descend(course, trainee, add_gradients(course, trainee))
    assert (torch.bfloat16 in met) == native and course.autocast == native
