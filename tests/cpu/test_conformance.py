"""The promise: every drafter, under every policy, gives the target's own text. A new one joins the lists here.

T = 0 and T > 0 are checked token for token in float64: a draw depends on (seed, position) alone, so the same seed
must give the same tokens as plain decoding. That the tokens have the right distribution is a χ² test against the
exact one, which two wrong acceptance rules must fail.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Container

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from draftwood import registry
from draftwood import rounds as rounds_module
from draftwood.accept import Draw, Verdict
from draftwood.cache import KVCache
from draftwood.device.draw import Dice
from draftwood.drafters.d2sd import D2SDDrafter
from draftwood.drafters.d2sd import Options as D2SDOptions
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.draft_model import Options as Beam
from draftwood.drafters.ngram import NgramDrafter
from draftwood.drafters.pooled import Pooled, Recycling
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.latency import LatencyModel, Machine, Work
from draftwood.parallel import ALONE
from draftwood.sampling import Sampler, Sampling
from draftwood.target import Target
from draftwood.tree import Tree
from tests.reference import (
    VOCAB,
    Branching,
    Hostile,
    Noisy,
    ReplayedGraphs,
    Tabled,
    Truthful,
    plain_logits,
    tiny_dflash,
    tiny_eagle3,
    tiny_model,
    tiny_target,
    without_the_block,
)

POLICIES = [
    "autoregressive", "dflash", "ddtree:1", "ddtree:7", "ddtree:40", "beam:3x4", "caddtree", "caddtree:paper",
    "bastion", "bastion:paper",
]  # fmt: skip
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalty": Sampling(repetition_penalty=1.3),
    "T = 1": Sampling(1.0, seed=3),
    "T = 0.7, top-k, top-p": Sampling(0.7, top_k=20, top_p=0.9, seed=4),
    "T = 1.3, min-p, penalty": Sampling(1.3, min_p=0.02, repetition_penalty=1.2, seed=5),
}
PROMPT = [(11 * i + 5) % 97 for i in range(13)]
NEW = 24


def latency_of(target: Target) -> LatencyModel:
    """A machine on which wide trees are cheap, so that every policy drafts."""
    return LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)


def engine(target: Target, drafter, policy: str, backend: str = "host", late: bool = True) -> Engine:
    """On the device, stages are recorded once and replayed, as CUDA graphs are; unless `late`, all of them."""
    made = Engine(target, drafter, registry.policy(policy), latency_of(target), backend=backend)
    made.device.graphs = ReplayedGraphs(target.device, late)
    assert made.backend().name == backend
    return made


def run(target: Target, drafter, policy: str, sampling: Sampling, backend: str = "host", **options) -> list[int]:
    steps = engine(target, drafter, policy, backend).run(PROMPT, options.pop("new", NEW), sampling, **options)
    return [token for step in steps for token in step.tokens]


def plain(target: Target, sampling: Sampling, new: int = NEW) -> list[int]:
    """Plain decoding by definition: the model's own forward over the whole text, one token at a time."""
    sampler = Sampler(sampling, PROMPT)
    for _ in range(new):
        sampler.commit([sampler.draw(plain_logits(target, sampler.tokens)[-1])])
    return sampler.tokens[len(PROMPT) :]


@functools.cache
def target_of(family: str) -> Target:
    return tiny_target(family)


@functools.cache
def truth_of(family: str, sampling: str) -> list[int]:
    return plain(target_of(family), SAMPLINGS[sampling])


@pytest.fixture(scope="module", params=["llama", "qwen3_sliding"])
def family(request: pytest.FixtureRequest) -> Target:
    return target_of(request.param)


@pytest.fixture(scope="module")
def truth(family: Target) -> list[int]:
    return truth_of(family.name.removeprefix("tiny-"), "greedy")


@functools.cache
def small_model() -> Target:
    return tiny_target("qwen2", seed=5)


DRAFTERS: dict[str, Callable] = {
    "truthful": lambda target, truth: Truthful("truthful", tap_layers=(0, 2), truth=truth),
    "noisy": lambda target, truth: Noisy("noisy"),
    "hostile": lambda target, truth: Hostile("hostile"),
    "branching": lambda target, truth: Branching("branching"),
    "ngram": lambda target, truth: registry.drafter("ngram", target),
    "recycling": lambda target, truth: registry.drafter(["ngram:earlier=100", "recycling"], target),
    "pooled": lambda target, truth: Pooled(
        [
            tiny_dflash(target),
            Truthful("t", tap_layers=(0, 1), truth=truth),
            Branching("branching"),
            Noisy("noisy"),
            NgramDrafter.load("", target),
            Recycling(),
        ]
    ),
    "dflash": lambda target, truth: tiny_dflash(target),
    "dflash, trimmed head": lambda target, truth: tiny_dflash(target, list(range(0, 97, 2))),
    "dflash, pairs": lambda target, truth: tiny_dflash(target, list(range(0, 97, 2)), rank=4),
    "dflash, causal": lambda target, truth: tiny_dflash(target, rank=4, causal=True),
    "dflash 2": lambda target, truth: tiny_dflash(target, form="DFlash 2"),
    "dspark": lambda target, truth: tiny_dflash(target, form="DSpark"),
    "dflash, pairs, pooled": lambda target, truth: Pooled([tiny_dflash(target, rank=4), Noisy("noisy"), Recycling()]),
    "pooled, the block seldom asked for": lambda target, truth: without_the_block(
        Pooled([tiny_dflash(target, rank=4), NgramDrafter.load("", target), Recycling()])
    ),
    "d2sd": lambda target, truth: D2SDDrafter(
        tiny_dflash(target), tiny_dflash(target, seed=2, taps=(1, 0)), D2SDOptions(boundaries=2), "d2sd"
    ),
    "d2sd, one drafter, third level": lambda target, truth: D2SDDrafter(
        drafter := tiny_dflash(target, rank=4), drafter, D2SDOptions(passes=2, again=1), "d2sd"
    ),
    "d2sd, further blocks": lambda target, truth: D2SDDrafter(
        tiny_dflash(target), tiny_dflash(target, seed=2, rank=4), D2SDOptions(again=0, further=1), "d2sd"
    ),
    "d2sd, naive samples": lambda target, truth: D2SDDrafter(
        drafter := tiny_dflash(target, rank=4), drafter, D2SDOptions(samples=4), "d2sd"
    ),
    "eagle3": lambda target, truth: tiny_eagle3(target),
    "draft-model": lambda target, truth: DraftModel(small_model(), Beam(depth=3, beam=2), "draft-model", VOCAB),
}


ON_DEVICE: dict[str, Callable] = {
    "none": lambda target, truth: None,
    "truthful": lambda target, truth: Tabled(Truthful("truthful", tap_layers=(0, 2), truth=truth)),
    "noisy": lambda target, truth: Tabled(Noisy("noisy")),
    "hostile": lambda target, truth: Tabled(Hostile("hostile")),
    "dflash": lambda target, truth: tiny_dflash(target),
    "dflash, pairs": lambda target, truth: tiny_dflash(target, rank=4),
    "dflash 2": lambda target, truth: tiny_dflash(target, form="DFlash 2"),
    "dspark": lambda target, truth: tiny_dflash(target, form="DSpark"),
    # Drafts of the host.
    "ngram and recycling": lambda target, truth: registry.drafter(["ngram:earlier=100", "recycling"], target),
    "draft-model": lambda target, truth: DraftModel(small_model(), Beam(depth=3, beam=2), "draft-model", VOCAB),
}


@functools.lru_cache(1)  # what is captured holds all that it made
def on_device(drafter: str, policy: str, of: str, known: str) -> Engine:
    """For all ways of drawing, since stages are captured once; a truthful drafter knows the text drawn in one."""
    target = target_of(of)
    made = ON_DEVICE[drafter](target, PROMPT + truth_of(of, known))
    return engine(target, made, policy, "device", late=drafter != "dflash")  # once for all widths


# How a token is drawn does not depend on the family, so the second one needs fewer ways of drawing.
CASES = [("llama", name) for name in SAMPLINGS] + [("qwen3_sliding", name) for name in ("greedy", "T = 1")]


@pytest.mark.parametrize(("of", "sampling"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_the_targets_own(drafter: str, policy: str, of: str, sampling: str) -> None:
    target, truth = target_of(of), truth_of(of, sampling)
    made = DRAFTERS[drafter](target, PROMPT + truth)
    assert run(target, made, policy, SAMPLINGS[sampling]) == truth


@pytest.mark.parametrize(("of", "sampling"), CASES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", ON_DEVICE)
def test_the_text_is_the_targets_own_on_the_device(drafter: str, policy: str, of: str, sampling: str) -> None:
    made = on_device(drafter, policy, of, sampling if drafter == "truthful" else "greedy")
    steps = made.run(PROMPT, NEW, SAMPLINGS[sampling])
    assert [token for step in steps for token in step.tokens] == truth_of(of, sampling)


@pytest.mark.parametrize("backend", ["host", "device"])
@pytest.mark.parametrize("policy", ["dflash", "ddtree:7", "bastion"])
def test_a_truthful_drafter_is_believed(family: Target, truth: list[int], policy: str, backend: str) -> None:
    """Equality alone would also hold if nothing were ever accepted."""
    drafter = Truthful("truthful", truth=PROMPT + truth)
    made = engine(family, drafter if backend == "host" else Tabled(drafter), policy, backend)
    rounds = [step.round for step in made.run(PROMPT, NEW) if step.round]
    assert len(rounds) < NEW / 2 and sum(r.accepted for r in rounds) > NEW / 2
    if backend == "device":
        return
    assert drafter.seen[0] == (PROMPT + truth)[: len(drafter.seen[0])], "the drafter must see the committed text"


def test_drafter_state_covers_exactly_what_is_in_the_cache(family: Target) -> None:
    drafter = Noisy("noisy", tap_layers=(1,))
    made = Engine(family, drafter, registry.policy("ddtree:7"), latency_of(family))
    for step in made.run(PROMPT, NEW):
        if step.round:
            assert len(drafter.seen[0]) == step.round.context + 1 + step.round.accepted


# --- several at once -------------------------------------------------------------------------------------------

CROWD = [  # length of the prompt, new tokens, sampling, round in which it joins, a policy of its own
    (13, 24, "greedy", 0, None),
    (1, 9, "T = 1", 0, "autoregressive"),
    (150, 12, "greedy", 1, None),
    (5, 20, "T = 0.7, top-k, top-p", 3, None),
    (31, 1, "greedy", 3, "dflash"),
    (20, 16, "T = 1.3, min-p, penalty", 5, "ddtree:3"),
]


def crowded_prompt(index: int) -> list[int]:
    return [(17 * i + 3 + index) % 97 for i in range(CROWD[index][0])]


@functools.cache
def alone(family: str, index: int) -> list[int]:
    _, new, sampling, _, _ = CROWD[index]
    made = Engine(target_of(family), None, registry.policy("autoregressive"), latency_of(target_of(family)))
    return [t for s in made.run(crowded_prompt(index), new, SAMPLINGS[sampling]) for t in s.tokens]


@pytest.mark.parametrize(("of", "policy"), [*(("llama", policy) for policy in POLICIES), ("qwen3_sliding", "bastion")])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_who_shares_the_batch_does_not_change_a_text(drafter: str, policy: str, of: str) -> None:
    """Requests of every kind join over time, one is abandoned; each text is what it would be alone."""
    target = target_of(of)
    made = engine(target, DRAFTERS[drafter](target, crowded_prompt(0) + alone(of, 0)), policy)
    batch, texts = made.batch(), {}
    waiting = [
        (join, made.request(crowded_prompt(i), new, SAMPLINGS[how], policy=own and registry.policy(own)))
        for i, (_, new, how, join, own) in enumerate(CROWD)
    ]
    stranger = made.request(PROMPT, 100)
    batch.join(stranger)
    for at in itertools.count():
        for request in [r for join, r in waiting if join == at]:
            batch.join(request)
        if at == 4:
            batch.leave(stranger)
        for request, step in batch.round().items():
            texts.setdefault(request, []).extend(step.tokens)
        if at > 5 and not batch.requests:
            break
    assert [texts[request] for _, request in waiting] == [alone(of, i) for i in range(len(CROWD))]


# --- the distribution -----------------------------------------------------------------------------------------

SMALL = 5  # tokens in the vocabulary; sequences of LENGTH tokens are counted
LENGTH = 3
DRAWS = 3000
ALARM = 1e-4  # probability that a correct engine fails one of these tests
SHAPED = Sampling(0.9, top_k=4, top_p=0.95, min_p=0.03, repetition_penalty=1.2)


class Table:
    """A target whose logits depend on the last two tokens: `Target` to the engine, a lookup underneath."""

    name, context_limit, tap_layers, vocab_size, num_layers = "table", 1000, (), SMALL, 1

    device, group, lock = torch.device("cpu"), ALONE, threading.RLock()

    def __init__(self) -> None:
        self.logits = torch.tensor(np.random.default_rng(1).normal(scale=1.2, size=(SMALL, SMALL, SMALL)))
        self.config, self.dtype = tiny_model().config, self.logits.dtype  # what the memory check asks for

    def kv_bytes_per_token(self) -> int:
        return 0

    def tap(self, layers) -> None: ...

    def after(self, tokens: list[int]) -> torch.Tensor:
        return self.logits[tokens[-2], tokens[-1]]

    def new_row(self, capacity: int):
        return TableRow()

    def plan(self, trees: list[Tree], cache: KVCache, rows, known):
        return trees[0], known[0]

    def verify(self, plan: tuple[Tree, bool], cache: KVCache):
        (row,), (tree, known) = cache.rows, plan
        row.pending = tree
        before = [row.tokens[-1] if p < 0 and row.tokens else int(tree.tokens[p]) for p in tree.parents]
        self.verified = self.logits[torch.tensor(before), torch.from_numpy(tree.tokens)]
        return _Result(self.verified[-1:] if known else self.verified)

    def work(self, n: int, context: int):
        return Work(1.0, 1.0, 0)


@dataclasses.dataclass
class TableRow:
    tokens: list[int] = dataclasses.field(default_factory=list)
    pending: Tree | None = None

    def advance(self, tokens: int) -> None:
        self.commit(list(range(1, tokens)))

    def commit(self, path: list[int]) -> None:
        self.tokens.extend(int(self.pending.tokens[i]) for i in (0, *path))


@dataclasses.dataclass
class _Result:
    logits: torch.Tensor
    taps: None = None
    rows: None = None


START = [0, 1]


def exact(logits: Callable[[list[int]], torch.Tensor], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every sequence, by the chain rule; `logits` gives those after some tokens."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        for text, p in [*law.items()]:
            before = [*START, *text]
            probs = Sampler(sampling, before).process(logits(before)).softmax(-1)
            law |= {(*text, token): p * float(probs[token]) for token in range(SMALL)}
            del law[text]
    return law


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Pearson's χ² with rare sequences pooled; impossible ones must not occur."""
    draws = sum(counts.values())
    assert all(law[text] > 0 for text in counts), "an impossible text came out"
    common = [t for t, p in law.items() if p * draws >= 5]
    rest = [t for t, p in law.items() if 0 < p * draws < 5]
    cells = [[t] for t in common] + ([rest] if sum(law[t] for t in rest) * draws >= 5 else [])
    statistic = sum(
        (sum(counts[t] for t in cell) - (e := draws * sum(law[t] for t in cell))) ** 2 / e for cell in cells
    )
    return float(chi2.sf(statistic, len(cells) - 1))


def sample(target: Table, policy: str, sampling: Sampling) -> Counter[tuple[int, ...]]:
    drafter = Noisy("noisy", vocab=SMALL, max_depth=LENGTH)
    return count(Engine(target, drafter, registry.policy(policy), latency_of(target)), sampling, DRAWS)


def count(made: Engine, sampling: Sampling, draws: int) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        steps = made.run(START, LENGTH, dataclasses.replace(sampling, seed=seed))
        counts[tuple(token for step in steps for token in step.tokens)] += 1
    return counts


@pytest.mark.parametrize("sampling", [Sampling(1.0), SHAPED], ids=["T = 1", "everything"])
@pytest.mark.parametrize("policy", ["autoregressive", "dflash", "ddtree:7", "bastion"])
def test_sampled_texts_have_the_exact_distribution(policy: str, sampling: Sampling) -> None:
    target = Table()
    assert p_value(sample(target, policy, sampling), exact(target.after, sampling)) > ALARM


def argmax_of_the_node(dice: Dice, logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Wrong at T > 0."""
    return logits.argmax(-1)


@pytest.mark.parametrize(("wrong", "draws"), [(None, 1000), (argmax_of_the_node, 300)])
def test_sampled_texts_on_the_device(wrong: Callable | None, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the exact distribution; drawn wrongly, they do not."""
    if wrong:
        monkeypatch.setattr(Dice, "draw", wrong)
    target = tiny_target(vocab_size=SMALL)
    made = engine(target, Tabled(Noisy("noisy", vocab=SMALL, max_depth=LENGTH)), "ddtree:7", "device")
    law = exact(lambda tokens: plain_logits(target, tokens)[-1], SHAPED)
    assert (p_value(count(made, SHAPED, draws), law) > ALARM) == (wrong is None)


def argmax_along_the_path(sampler_draw: Draw, logits: Callable[[int], torch.Tensor], tree: Tree) -> Verdict:
    """Wrong at T > 0: BASTION's released rule takes the target's argmax along the path and samples the bonus."""
    node, path, accepted = 0, [], []
    while True:
        best = int(logits(node).argmax())
        found = [i for i in range(1, len(tree) + 1) if tree.parents[i] == node and tree.tokens[i] == best]
        if not found:
            return Verdict(path, accepted, sampler_draw(node, accepted))
        node = found[0]
        path.append(node)
        accepted.append(best)


def ratio_of_masses(sampler_draw: Draw, logits: Callable[[int], torch.Tensor], tree: Tree) -> Verdict:
    """Wrong: min(1, p / q) for children that were chosen by top-k, as if they had been drawn from q."""
    rng = np.random.default_rng(abs(hash((sampler_draw(0, []), int(tree.tokens[0])))))
    node, path, accepted = 0, [], []
    while True:
        p = logits(node).softmax(-1)
        for i in [i for i in range(1, len(tree) + 1) if tree.parents[i] == node]:
            q = tree.mass[i] / tree.mass[node]
            if rng.random() < min(1.0, float(p[tree.tokens[i]]) / q):
                node = i
                path.append(i)
                accepted.append(int(tree.tokens[i]))
                break
        else:
            return Verdict(path, accepted, sampler_draw(node, accepted))


@pytest.mark.parametrize("wrong", [argmax_along_the_path, ratio_of_masses])
def test_a_wrong_acceptance_rule_fails(wrong: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: the test above can tell."""
    target = Table()

    def accept(tree: Tree, draw: Draw, ends: Container[int]) -> Verdict:
        return wrong(draw, lambda node: target.verified[node], tree)

    monkeypatch.setattr(rounds_module, "accept", accept)
    assert p_value(sample(target, "ddtree:7", Sampling(1.0)), exact(target.after, Sampling(1.0))) < ALARM


# --- lower precision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dflash", "ddtree:7", "bastion"])
def test_in_bf16_every_token_is_the_targets_argmax_or_a_near_tie(policy: str) -> None:
    """Kernels for 1 and for n rows round differently: judged by teacher forcing, not by equality of texts."""
    target = tiny_target(dtype=torch.bfloat16)
    assert is_near_argmax(target, PROMPT, run(target, Noisy("noisy", tap_layers=(1,)), policy, Sampling()))


def test_in_bf16_a_crowd_leaves_near_ties_at_most() -> None:
    target = tiny_target(dtype=torch.bfloat16)
    made = engine(target, Noisy("noisy", tap_layers=(1,)), "ddtree:7")
    batch, texts = made.batch(), {made.request(crowded_prompt(i), NEW): (i, []) for i in (0, 1, 3, 5)}
    for request in texts:
        batch.join(request)
    while batch.requests:
        for request, step in batch.round().items():
            texts[request][1].extend(step.tokens)
    assert all(is_near_argmax(target, crowded_prompt(i), text) for i, text in texts.values())


def is_near_argmax(target: Target, prompt: list[int], text: list[int]) -> bool:
    logits = plain_logits(target, prompt + text).float()[len(prompt) - 1 : -1]
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    return float(gap.max()) <= 2**-5 * float(logits.abs().max())  # four units in the last place of bf16


# --- what engines must survive --------------------------------------------------------------------------------


backends = pytest.mark.parametrize("backend", ["host", "device"])


@backends
def test_stop_tokens_end_the_text_and_are_emitted(family: Target, truth: list[int], backend: str) -> None:
    stop = truth[17]
    expected = truth[: truth.index(stop) + 1]
    drafter = Tabled(Truthful("truthful", truth=PROMPT + truth))
    for policy in POLICIES:
        assert run(family, drafter, policy, Sampling(), backend, stop_ids=frozenset({stop})) == expected


def test_tau_counts_what_was_emitted(target: Target) -> None:
    """Nothing behind a stop token, and of the last round no more than fits."""
    text = plain(target, Sampling())
    for stop_ids, new in ((frozenset({text[17]}), 24), (frozenset(), 7)):
        drafter = Truthful("t", truth=PROMPT + text)
        made = Engine(target, drafter, registry.policy("ddtree:12"), latency_of(target))
        steps = [step for step in made.run(PROMPT, new, Sampling(), stop_ids) if step.round]
        assert [1 + step.round.accepted for step in steps] == [len(step.tokens) for step in steps]


@backends
@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_never_more_tokens_than_asked(family: Target, truth: list[int], new: int, backend: str) -> None:
    for policy in POLICIES:
        drafter = Tabled(Truthful("t", truth=PROMPT + truth))
        assert run(family, drafter, policy, Sampling(), backend, new=new) == truth[:new]


@backends
def test_the_context_window_ends_the_text(backend: str) -> None:
    target = tiny_target(max_position_embeddings=32)
    assert len(run(target, Tabled(Noisy("noisy")), "ddtree:40", Sampling(), backend, new=100)) == 32 - len(PROMPT)


@pytest.mark.parametrize("strange", [-1, 10_000])
def test_a_token_of_another_model_is_refused(family: Target, strange: int) -> None:
    with pytest.raises(BadInput, match=f"token id {strange}.*own tokenizer"):
        next(engine(family, None, "autoregressive", "host").run([*PROMPT, strange], NEW))


@backends
def test_an_abandoned_run_leaves_nothing_behind(family: Target, truth: list[int], backend: str) -> None:
    made = engine(family, Tabled(Noisy("noisy")), "ddtree:7", backend)
    for rounds in (1, 2, 5):
        abandoned = made.run(PROMPT, NEW)
        list(itertools.islice(abandoned, rounds))
        abandoned.close()
        assert [t for step in made.run(PROMPT, NEW) for t in step.tokens] == truth


def test_two_engines_take_turns(family: Target, truth: list[int]) -> None:
    other = tiny_target("qwen2")
    expected = plain(other, Sampling())
    a = Engine(family, Noisy("noisy", tap_layers=(1,)), registry.policy("ddtree:7"), latency_of(family))
    b = Engine(other, Noisy("noisy"), registry.policy("dflash"), latency_of(other))
    texts: tuple[list[int], list[int]] = ([], [])
    for one, two in itertools.zip_longest(a.run(PROMPT, NEW), b.run(PROMPT, NEW)):
        for text, step in zip(texts, (one, two), strict=True):
            text.extend(step.tokens if step else [])
    assert texts == (truth, expected)


def test_engines_with_other_drafters_share_a_target(family: Target, truth: list[int]) -> None:
    """Each drafter reads the layers that it asked for, whoever ran last; `Scripted` checks that it gets them."""
    drafters = [Noisy("deep", tap_layers=(1,)), Noisy("blind"), Noisy("both", tap_layers=(0, 1))]
    made = [Engine(family, drafter, registry.policy("ddtree:7"), latency_of(family)) for drafter in drafters]
    texts: list[list[int]] = [[] for _ in made]
    for steps in itertools.zip_longest(*(one.run(PROMPT, NEW) for one in made)):
        for text, step in zip(texts, steps, strict=True):
            text.extend(step.tokens if step else [])
    assert texts == [truth] * len(made)


def test_masses_never_rise_in_what_is_verified(family: Target) -> None:
    made = Engine(family, Noisy("noisy"), registry.policy("bastion"), latency_of(family))
    for step in made.run(PROMPT, NEW):
        if step.tree is not None:
            tree = step.tree
            assert (np.diff(tree.mass) <= 0).all()
            assert (tree.mass[1:] <= tree.mass[tree.parents[1:]]).all() and math.isclose(tree.mass[0], 1)
