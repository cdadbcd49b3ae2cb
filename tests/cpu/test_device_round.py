"""Rounds on the device: which requests they serve, what they keep, how often they are read, and when text leaves."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from draftwood import registry
from draftwood.acceptance import TRIAL_NODES, AcceptanceModel
from draftwood.attention import cascade, dispatch, triton_backend
from draftwood.batch import Batch
from draftwood.device import rounds as device_rounds
from draftwood.device import stages as device_stages
from draftwood.device.graphs import Graphs
from draftwood.device.mail import Mail
from draftwood.device.rounds import DeviceRounds
from draftwood.device.state import Report
from draftwood.engine import Engine, Step
from draftwood.errors import BadInput, BadModel
from draftwood.latency import LatencyModel, Machine
from draftwood.policies.base import Costs
from draftwood.policies.bastion import Bastion
from draftwood.policies.ddtree import DDTree
from draftwood.sampling import Sampling
from draftwood.target import Target
from draftwood.trace import VERBS, Round
from draftwood.tree import Lattice, Tree
from tests.reference import Noisy, ReplayedGraphs, Tabled, Truthful, tiny_dflash, tiny_target

PROMPT = [(11 * i + 5) % 97 for i in range(13)]


def engine(target: Target, drafter: object, policy: str = "ddtree:7", backend: str = "device") -> Engine:
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)
    return Engine(target, drafter, registry.policy(policy), latency, backend=backend)  # type: ignore[arg-type]


def text(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def truth(target: Target) -> list[int]:
    return text(list(engine(target, None, "autoregressive", "host").run(PROMPT, 40)))


# --- whom it serves -------------------------------------------------------------------------------------------


def test_on_a_cpu_the_host_is_chosen(target: Target) -> None:
    assert engine(target, None, backend="auto").backend().name == "host"


def test_an_unknown_backend_is_a_mistake(target: Target) -> None:
    with pytest.raises(BadInput, match="Did you mean 'device'"):
        engine(target, None, backend="devise")


def test_what_cannot_run_there_is_told(target: Target) -> None:
    with pytest.raises(BadInput, match="the drafter noisy reads the target's layers on the host"):
        engine(target, Noisy("noisy", tap_layers=(1,)))
    with pytest.raises(BadInput, match="takes the universal path"):
        engine(tiny_target("gpt2"), None)


@dataclasses.dataclass(frozen=True)
class Own:
    """A policy that grows its tree by a function of its own."""

    name: str = "own"
    n_max: int = 3
    width: int = 3
    calibrated: bool = False
    convex: bool = False

    def drafts(self, outlook: object) -> bool:
        return True

    def grow(self, draft: Lattice | Tree, root: int) -> Tree:
        return registry.policy("ddtree:3").grow(draft, root)

    def choose(self, mass: np.ndarray, costs: Costs) -> int:
        return len(mass)


def test_the_host_serves_what_the_device_declines(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Noisy("noisy")))
    assert "a function of its own" in made.backend(Own()).reason
    assert "whole likeliest chain" in made.backend(registry.policy("record")).reason
    assert text(list(made.run(PROMPT, 12, policy=Own()))) == truth[:12]
    ban = truth[3]

    def rule(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(0, torch.tensor([ban]), -torch.inf)

    assert made.backend(rule=rule).name == "host"
    assert ban not in text(list(made.run(PROMPT, 12, rule=rule)))
    assert made.device.nbytes() == {"buffers": 0, "graphs": 0}


def test_two_answers_of_one_engine_take_turns(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Noisy("noisy")))
    first = made.run(PROMPT, 20)
    steps = [next(first)]
    assert made.backend().name == "host" and "another answer" in made.backend().reason
    second = list(made.run(PROMPT, 20))
    assert text(steps + list(first)) == text(second) == truth[:20]
    assert made.backend().name == "device"


# --- what it keeps --------------------------------------------------------------------------------------------


def test_buffers_and_graphs_stay_while_requests_fit(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Noisy("noisy", tap_layers=(1,))))
    made.device.graphs = graphs = ReplayedGraphs(target.device)
    assert text(list(made.run(PROMPT, 12))) == truth[:12]
    before, state = set(graphs.recorded), made.device._state
    assert made.device.nbytes()["buffers"] > 0
    for sampling in (Sampling(), Sampling(1.0, seed=1), Sampling(1.0, seed=2, top_p=0.9), Sampling(0.3, top_k=9)):
        expected = text(list(engine(target, None, "autoregressive", "host").run(PROMPT, 12, sampling)))
        assert text(list(made.run(PROMPT, 12, sampling))) == expected
    assert made.device._state is state
    kinds = {key[-1] for key in set(graphs.recorded) - before} - {"draft ahead"}
    assert len(kinds) == 3, "sampled, with a sort, and with a small top-k: their parameters are no part of a graph"


def test_a_request_that_does_not_fit_gets_new_buffers(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_rounds, "LEAST_CAPACITY", 16)
    made = engine(target, Tabled(Noisy("noisy", tap_layers=(1,))))
    made.device.graphs = ReplayedGraphs(target.device)
    for new, capacity in ((3, 32), (40, 64), (3, 64)):
        assert text(list(made.run(PROMPT, new))) == truth[:new]
        assert made.device._state is not None and made.device._state.capacity == capacity


def test_where_memory_is_short_a_request_gets_no_more_than_it_needs(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def require(target: Target, drafter: object, capacity: int, width: int, keeps: bool) -> None:
        if capacity > 40:
            raise BadInput(f"{capacity} slots do not fit.")

    monkeypatch.setattr(device_rounds, "LEAST_CAPACITY", 16)
    monkeypatch.setattr(device_rounds, "require_request", require)
    made = engine(target, Tabled(Noisy("noisy", tap_layers=(1,))))
    assert text(list(made.run(PROMPT, 12))) == truth[:12]
    assert made.device._state is not None and made.device._state.capacity == len(PROMPT) + 12 + 8
    with pytest.raises(BadInput, match=r"^53 slots"):
        list(made.run(PROMPT, 32))


def test_wide_trees_behind_long_contexts_are_attended_where_their_keys_lie(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "LEAST_CONTEXT", 1)
    monkeypatch.setattr(cascade, "LEAST_NODES", 2)
    assert text(list(engine(target, Tabled(Noisy("noisy", tap_layers=(1,)))).run(PROMPT, 20))) == truth[:20]


def test_tables_of_positions_stay_where_captured_graphs_read_them(target: Target) -> None:
    """The host's rounds, which take longer texts meanwhile, let them grow."""
    tables = [weakref.ref(table) for table in target.path.rotary.reserve(1)]
    target.path.rotary.reserve(4 * len(tables[0]()))
    assert all(table() is not None for table in tables)


def test_the_least_used_graph_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.device.graphs.MOST", 2)
    graphs = Graphs(torch.device("cpu"))
    graphs._captures = True
    monkeypatch.setattr(graphs, "_capture", lambda stage, changing: object())
    for key in ("a", "b", "a", "c"):
        graphs.prepare(key, lambda: None, ())
    assert list(graphs._graphs) == ["a", "c"]
    graphs.clear()
    assert len(graphs) == 0


def test_without_memory_for_graphs_rounds_run_as_they_are(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine(target, Tabled(Noisy("noisy")))
    made.device.graphs._captures, captured = True, []

    def capture(self: Graphs, stage: object, changing: object) -> object:
        captured.append(stage)
        if len(captured) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return object()

    monkeypatch.setattr(Graphs, "_capture", capture)
    assert text(list(made.run(PROMPT, 12))) == truth[:12]
    assert len(captured) == 3 and len(made.device.graphs) == 0
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "too little memory for its CUDA graphs" in (made.device.declines(made.policy, None) or "")


# --- the same rounds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dflash", "ddtree:9", "beam:3x4"])
def test_the_same_trees_as_on_the_host(target: Target, policy: str) -> None:
    """So what the drafter knows after each commit is the same, too."""
    drafter = tiny_dflash(target)
    pairs = zip(*(engine(target, drafter, policy, where).run(PROMPT, 40) for where in ("host", "device")), strict=False)
    compared = 0
    for host, device in itertools.islice(pairs, 1, 20):
        assert host.tree is not None and device.tree is not None and host.path == device.path
        for name in ("tokens", "parents", "depths"):
            assert np.array_equal(getattr(host.tree, name), getattr(device.tree, name))
        np.testing.assert_allclose(host.tree.mass, device.tree.mass, rtol=1e-4)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("policy", ["dflash", "ddtree:7", "beam:4x6", "autoregressive"])
def test_the_drafter_gets_the_taps_of_what_was_committed(target: Target, truth: list[int], policy: str) -> None:
    made = engine(target, Tabled(Truthful("truthful", tap_layers=(0, 2), truth=PROMPT + truth)), policy)
    made.device.graphs = ReplayedGraphs(target.device)
    assert text(list(made.run(PROMPT, 40))) == truth
    known = (PROMPT + truth)[:-1]  # the last token is in no cache
    expected = target.prefill(known, target.new_cache(64)).taps
    placed = made.device._state.drafter  # type: ignore[union-attr]
    if policy == "autoregressive":
        assert placed.taps is None, "who never drafts pays for no draft state"
    else:
        torch.testing.assert_close(placed.taps[: len(known)], expected)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_head_of_fewer_tokens_than_a_policy_asks_for(target: Target, truth: list[int], rank: int) -> None:
    drafter = tiny_dflash(target, draft_tokens=sorted({truth[1], truth[2]}), rank=rank)
    assert text(list(engine(target, drafter, "ddtree:30").run(PROMPT, 20))) == truth[:20]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel needs its interpreter here")
@pytest.mark.parametrize("policy", ["dflash", "ddtree:9", "bastion:9"])
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding"])
def test_rounds_through_the_kernels_of_growth_and_tree_attention(
    family: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from draftwood.device.triton_growth import TritonGrower

    target = tiny_target(family, dtype=torch.float32)
    plain = text(list(engine(target, None, "autoregressive", "host").run(PROMPT, 16)))
    made = engine(target, Tabled(Truthful("truthful", truth=PROMPT + plain)), policy)
    kernel = dataclasses.replace(triton_backend.TRITON, declines=lambda args: None)
    monkeypatch.setattr(dispatch, "BACKENDS", (kernel,))
    monkeypatch.setattr(device_stages, "grower", TritonGrower)
    assert text(list(made.run(PROMPT, 16))) == plain


@pytest.mark.parametrize("policy", ["dflash", "ddtree:9", "beam:3x4", "record"])
def test_drafts_of_the_host_are_verified_as_there(target: Target, policy: str) -> None:
    """Whatever grows them, and with a drafter that learns from what the target says."""
    steps = []
    for backend in ("host", "device"):
        made = engine(target, registry.drafter(["ngram", "recycling"], target), policy, backend)
        made.device.graphs = ReplayedGraphs(target.device, late=True)
        assert made.backend(Own()).name == backend
        steps.append(list(made.run(PROMPT, 60, Sampling(0.5, seed=3))))
    assert text(steps[0]) == text(steps[1]) and any(step.path for step in steps[0]) == (policy != "record")
    for host, device in zip(*steps, strict=True):
        assert host.path == device.path and (host.tree is None) == (device.tree is None)
        if host.tree is not None and device.tree is not None:
            assert host.tree.tokens.tolist() == device.tree.tokens.tolist()


@pytest.mark.parametrize(("name", "tokens"), [("open", 8), ("extend", 1), ("draft", 8)])
def test_a_drafter_that_fails_once_does_not_keep_the_device(
    target: Target, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when a request comes, nor when it leaves, nor under way."""
    made = engine(target, registry.drafter("ngram", target))
    made.device.graphs = ReplayedGraphs(target.device, late=True)

    def fails(*_: object) -> None:
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr(made.drafter, name, fails)
        with pytest.raises(RuntimeError, match="once"):
            list(made.run(PROMPT, tokens))
    assert made.backend().name == "device" and not made.device.busy


@pytest.mark.parametrize("backend", ["host", "device"])
def test_a_drafter_that_goes_deeper_than_it_says_is_told_so(target: Target, backend: str) -> None:
    class Deep(Truthful):
        def propose(self, tokens: list[int], width: int) -> Lattice:
            found = super().propose(tokens, width)
            return Lattice(found.tokens.repeat(2, 0), found.logp.repeat(2, 0))

    made = engine(target, Deep("deep", max_depth=2), backend=backend)
    made.device.graphs = ReplayedGraphs(target.device, late=True)
    with pytest.raises(BadModel, match=r"deep proposed a token at depth [34], but its max_depth is 2"):
        list(made.run(PROMPT, 20))


def test_plain_rounds_beside_drafts_of_the_host_have_one_token(target: Target, truth: list[int]) -> None:
    made = engine(target, registry.drafter("ngram", target), backend="device")
    steps = list(made.run(PROMPT, 40, policy=Pausing(7)))
    rounds = [step.round for step in steps if step.round]
    assert text(steps) == truth and {r.width for r in rounds if not r.drafted} == {1}
    assert {1 + r.n for r in rounds} >= {1, 8} and {r.width for r in rounds} <= {1, 4, 8}


def test_no_more_nodes_are_grown_than_were_of_use_lately(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), "bastion")
    grown = [step.round.grown for step in made.run(PROMPT, 30) if step.round and step.round.drafted]
    assert grown[:3] == [TRIAL_NODES] * 3
    fixed = engine(target, Tabled(Noisy("noisy", vocab=97)), "ddtree:21")
    assert {step.round.grown for step in fixed.run(PROMPT, 12) if step.round and step.round.drafted} >= {21}


def test_a_policy_that_chooses_fills_its_forwards(target: Target, truth: list[int]) -> None:
    """With the nodes that were grown: padding takes as long."""
    made = engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), "bastion")
    drafted = [step.round for step in made.run(PROMPT, 40) if step.round and step.round.drafted and step.round.n]
    assert len(drafted) > 3 and all(round.n == round.grown or not round.padding for round in drafted)


class Insatiable(Bastion):
    """Asks for more nodes than any forward holds."""

    def drafts(self, outlook: object) -> bool:
        return True

    def choose(self, mass: np.ndarray, costs: Costs) -> int:
        return 2 * self.n_max


@pytest.mark.parametrize("backend", ["host", "device"])
def test_a_policy_that_asks_for_too_much_gets_the_whole_tree(target: Target, truth: list[int], backend: str) -> None:
    made = engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), backend=backend)
    steps = list(made.run(PROMPT, 30, policy=Insatiable(7)))
    drafted = [step.round for step in steps if step.round and step.round.drafted]
    assert text(steps) == truth[:30]
    assert len(drafted) > 3 and all(round.n == round.grown for round in drafted)


def test_the_widest_tree_and_its_padding_are_recorded(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Noisy("noisy", vocab=97)), "ddtree:21")
    rounds = [step.round for step in made.run(PROMPT, 12) if step.round]
    assert {r.width for r in rounds[:3]} == {22} and not any(r.padding for r in rounds[:3])
    assert rounds[-1].n == 0 and rounds[-1].width == 1
    assert DeviceRounds.ahead and made.device._stages


def test_costs_have_steps_where_widths_have() -> None:
    verify = np.arange(1.0, 9.0)
    costs = Costs(1.0, 1.0, np.zeros(8), verify).stepped((1, 4, 8))
    assert costs.verify_s.tolist() == [1, 4, 4, 4, 8, 8, 8, 8]


# --- reading and writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["autoregressive", "ddtree:7", "bastion"])
def test_one_tree_and_one_verdict_are_read_a_round(
    target: Target, truth: list[int], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    monkeypatch.setattr(Mail, "wait", lambda self: reads.append(len(self.buffer)))
    steps = list(engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), policy).run(PROMPT, 30))
    assert text(steps) == truth[:30]
    rounds = [step.round for step in steps if step.round is not None]
    assert len(reads) == len(rounds) + sum(r.drafted for r in rounds)


def test_the_verdict_comes_before_the_next_tree(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what the host does with it goes on while the device drafts."""
    order: list[str] = []
    for kind, name in ((Report, "tree"), (Report, "verdict"), (device_stages.Stages, "draft")):
        done = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, *a, n=name, d=done: (order.append(n), d(self, *a))[1])
    list(engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), "ddtree:7").run(PROMPT, 30))
    assert order[:8] == ["draft", "tree", "draft", "verdict", "tree", "draft", "verdict", "tree"]


@dataclasses.dataclass(frozen=True)
class Pausing(DDTree):
    """Drafts in some rounds and not in others."""

    pattern: Iterator[bool] = dataclasses.field(default_factory=lambda: itertools.cycle(PAUSES), compare=False)

    def drafts(self, outlook: object) -> bool:
        return next(self.pattern)


PAUSES = [True] * 3 + [False] * 4 + [True] * 3 + [False] * 20 + [True] * 4  # 20 times 4 tokens: more than is owed


def test_after_a_pause_a_drafter_has_read_all_that_was_written(target: Target) -> None:
    drafter = tiny_dflash(target)
    masses = []
    for backend in ("host", "device"):
        made = engine(target, drafter, backend=backend)
        made.device.graphs = ReplayedGraphs(target.device)
        rounds = [step.round for step in made.run(PROMPT, 140, policy=Pausing(7)) if step.round]
        masses.append({round.context: round.mass for round in rounds if round.drafted})
    shared = masses[0].keys() & masses[1].keys()  # on a device it is decided a round ahead
    assert len(shared) >= 8 and max(shared) > 100
    for context in shared:
        np.testing.assert_allclose(masses[1][context], masses[0][context], rtol=1e-4)


def test_every_width_is_captured_with_the_first_answer(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Noisy("noisy")), "ddtree:21")
    made.device.graphs = graphs = ReplayedGraphs(target.device)
    steps = made.run(PROMPT, 12)
    next(steps)
    (stages,) = made.device._stages.values()
    captured = {key[2] for key in graphs.recorded}
    assert captured == {"catch up", "draft", *stages.widths} and stages.widths == (1, 4, 8, 16, 22)
    assert text(list(steps)) == truth[1:12] and {key[2] for key in graphs.recorded} == captured


def test_text_leaves_while_the_next_round_runs(
    target: Target, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after the last token, nothing is started."""
    verify, widths = device_stages.Stages.verify, []

    def watched(self: device_stages.Stages, width: int) -> None:
        widths.append(width)
        verify(self, width)

    monkeypatch.setattr(device_stages.Stages, "verify", watched)
    made = engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), "dflash")
    emitted = []
    for rounds, step in enumerate(made.run(PROMPT, 30, stop_ids=frozenset({truth[17]}))):
        emitted += step.tokens
        assert len(widths) == rounds + (emitted[-1] != truth[17])
    assert emitted == truth[: truth.index(truth[17]) + 1]


@pytest.mark.parametrize("policy", ["autoregressive", "ddtree:7"])
def test_the_host_learns_while_the_device_works(
    target: Target, truth: list[int], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a draft, so that the next choice heeds it; where there is none, behind the next forward."""
    order: list[str] = []
    for kind, name in ((AcceptanceModel, "observe"), (device_stages.Stages, "verify"), (device_stages.Stages, "draft")):
        done = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, *a, n=name, d=done: (order.append(n), d(self, *a))[1])
    steps = list(engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), policy).run(PROMPT, 30))
    assert text(steps) == truth[:30]
    if policy == "autoregressive":
        assert order[:6] == ["verify", "verify", "observe", "verify", "observe", "verify"]
    else:
        assert order[:7] == ["draft", "verify", "draft", "observe", "verify", "draft", "observe"]
    assert order.count("observe") == len(steps) - 1, "the last round, too"


# --- seconds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["autoregressive", "ddtree:7"])
def test_a_round_takes_what_passes_from_verdict_to_verdict_without_the_callers_time(
    target: Target, truth: list[int], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, commit = 0.02, Batch._commit

    def late(self: Batch, *args: object) -> object:
        time.sleep(slow)  # in no verb, and the device waits for it
        return commit(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "_commit", late)
    rounds = []
    for step in engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), policy).run(PROMPT, 20):
        time.sleep(5 * slow)
        rounds += [step.round] if step.round else []
    assert len(rounds) > 3
    for told in rounds[1:]:  # before the first, the prompt was read
        assert told.total_s == pytest.approx(sum(told.parts.values())) and set(told.seconds) <= set(VERBS)
        assert slow < told.parts["aux"] < 4 * slow


def test_what_is_learned_of_a_tree_is_no_price_of_the_plain_round_behind_it(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, observe = 0.1, AcceptanceModel.observe

    def late(self: AcceptanceModel, round: Round, *more: object) -> None:
        time.sleep(slow * round.drafted)
        observe(self, round, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(AcceptanceModel, "observe", late)
    rounds = [
        step.round for step in engine(target, tiny_dflash(target)).run(PROMPT, 90, policy=Pausing(7)) if step.round
    ]
    behind = [told.total_s for tree, told in itertools.pairwise(rounds) if tree.drafted and not told.drafted]
    assert len(behind) > 1 and min(behind) < slow, "and a machine that is busy makes others of them longer"


def test_where_nobody_runs_ahead_a_verify_ends_with_its_verdict(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, verdict = 0.02, Report.verdict
    monkeypatch.setattr(Report, "verdict", lambda self, tree: (time.sleep(slow), verdict(self, tree))[1])
    rounds = [step.round for step in engine(target, registry.drafter("ngram", target)).run(PROMPT, 12) if step.round]
    assert rounds and all(round.seconds["verify"] > slow for round in rounds)


def test_host_and_device_rounds_are_priced_apart(target: Target, truth: list[int]) -> None:
    made = engine(target, Tabled(Noisy("noisy")))
    list(made.run(PROMPT, 12))
    list(made.run(PROMPT, 12, rule=lambda tokens, scores: scores))
    host, device = (made.latency_of(1, backend) for backend in ("host", "device"))
    assert device is made.latency and host.seen > 3 and device.seen > 3
    assert made.fresh().latency_of(1, "host").to_json().keys() == host.to_json().keys()


@pytest.mark.parametrize("policy", ["autoregressive", "ddtree:7", "bastion"])
@pytest.mark.parametrize("backend", ["host", "device"])
def test_the_seconds_of_every_round_are_learned_the_last_included(
    target: Target, truth: list[int], policy: str, backend: str
) -> None:
    """Also where the host learns of a round behind the next one, and none follows the last."""
    made, rounds = engine(target, Tabled(Truthful("truthful", truth=PROMPT + truth)), policy, backend), 0
    for new in (2, 5, 20):
        rounds += sum(step.round is not None for step in made.run(PROMPT, new))
        assert made.latency_of(1, backend).seen == rounds


class Slow(LatencyModel):
    """Prices at which guesses do not pay."""

    def costs(self, n_max: int, context: int) -> Costs:
        return Costs(1.0, 1.0, np.full(1 + n_max, 0.01), np.linspace(1.0, 1.5, 1 + n_max))


@pytest.mark.parametrize("backend", ["host", "device"])
def test_a_look_at_a_useless_drafter_is_one_round(
    target: Target, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is told of a draft a round ahead: before it is known what the one before it brought."""
    monkeypatch.setattr(AcceptanceModel, "charge", lambda *_: None)  # real seconds, which are none of these prices
    latency = Slow(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)
    policy = dataclasses.replace(registry.policy("bastion"), toll=0.1)  # type: ignore[type-var]
    made = Engine(target, Tabled(Noisy("noisy")), policy, latency, backend=backend)
    drafted = [step.round.drafted for step in made.run(PROMPT, 150, Sampling(1.0, seed=3)) if step.round]
    runs = [len(list(group)) for drafts, group in itertools.groupby(drafted) if drafts]
    assert len(runs) > 5 and runs[1:].count(1) >= 0.8 * len(runs[1:]), "but for luck, which is followed"
