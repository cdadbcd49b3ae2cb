"""Each rule chooses what its paper's formula gives, worked out by hand, and keeps what `Policy` promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import registry
from draftwood.errors import BadInput
from draftwood.policies.base import Costs, Outlook, Policy
from draftwood.policies.bastion import Bastion, BastionPaper
from draftwood.policies.caddtree import CaDDTree
from draftwood.tree import Lattice

SPECS = (
    "autoregressive",
    "dflash",
    "ddtree:8",
    "beam:3x4",
    "caddtree:40",
    "caddtree:paper",
    "bastion:40",
    "bastion:paper",
    "record",
)


def costs(verify: list[float], draft: float = 1.0, aux: float = 0.0) -> Costs:
    return Costs(verify[0], draft, np.full(len(verify), aux), np.array(verify, np.float64))


def masses(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


# --- CaDDTree -------------------------------------------------------------------------------------


def test_caddtree_stops_at_the_first_node_that_does_not_pay() -> None:
    # C_d = 1, C_v(1..5 tokens) = 1 1 1 2 2.
    # theta: 1/2, 1.5/2, 1.75/2, then 1.9/3 < 1.75/2: two nodes.
    assert CaDDTree().choose(masses([0.5, 0.25, 0.15, 0.1]), costs([1, 1, 1, 2, 2])) == 2


def test_caddtree_does_not_look_past_a_step() -> None:
    # theta: 1/2, 1.4/3 stops it at once, though 3.4/3 would follow.
    mass, steps = masses([0.4, 1.0, 1.0]), costs([1, 2, 2, 2])
    assert CaDDTree().choose(mass, steps) == 0
    assert Bastion().choose(mass, steps) == 3


def test_caddtree_stops_when_the_rate_stays_equal() -> None:
    # theta: 1/2, then 1.5/3: equal, and the rule stops at "does not rise".
    assert CaDDTree().choose(masses([0.5]), costs([1, 2])) == 0


def test_caddtree_paper_prices_a_node_later() -> None:
    # The authors look up C_v(n) at n tokens: n = 0 and 1 both cost T(1), the step to T(3) is met at 3.
    # theta: 1/2, 1.5/2, 1.9/2, then 2.1/3: two nodes. Root-inclusive: 1/2, 1.5/2, then 1.9/3: one.
    mass, steps = masses([0.5, 0.4, 0.2]), costs([1, 1, 2, 2])
    assert CaDDTree(root_inclusive=False).choose(mass, steps) == 2
    assert CaDDTree().choose(mass, steps) == 1


def test_caddtree_ignores_what_the_host_spends() -> None:
    mass = masses([0.5, 0.3])
    assert CaDDTree().choose(mass, costs([1, 1, 1.1], aux=0.0)) == CaDDTree().choose(mass, costs([1, 1, 1.1], aux=9.0))


# --- BASTION --------------------------------------------------------------------------------------


def test_bastion_takes_the_maximum_beyond_a_step() -> None:
    # Tokens 1..4 cost 1, 5..8 cost 2; draft 1. Rates: 1/2, 1.6/2, 2/2, 2.3/2, 2.6/3, ... 3.5/3 > 2.3/2.
    mass = masses([0.6, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3])
    assert Bastion(slack=0.0).choose(mass, costs([1] * 4 + [2] * 4)) == 7
    # One node fewer in the second step: 3.2/3 < 2.3/2 = 1.15.
    assert Bastion(slack=0.0).choose(mass[:6], costs([1] * 4 + [2] * 4)) == 3
    # It is 1.4 % better than the smaller tree: within the slack, but not within half of it.
    assert Bastion(slack=0.02).choose(mass, costs([1] * 4 + [2] * 4)) == 3
    assert Bastion(slack=0.01).choose(mass, costs([1] * 4 + [2] * 4)) == 7


def test_bastion_verifies_nothing_when_no_node_pays() -> None:
    # Rates: 1/2, 1.1/3, 1.2/4.
    assert Bastion().choose(masses([0.1, 0.1]), costs([1, 2, 3])) == 0


def test_bastion_counts_the_draft_and_the_host() -> None:
    mass, verify = masses([0.5]), [1, 2]
    assert Bastion().choose(mass, costs(verify, draft=0.5)) == 0  # 1/1.5 > 1.5/2.5
    assert Bastion().choose(mass, costs(verify, draft=1.5)) == 1  # 1/2.5 < 1.5/3.5
    assert Bastion().choose(mass, costs(verify, draft=0.5, aux=1)) == 1  # the same, paid to the host


def test_bastion_keeps_to_the_widths_worth_running() -> None:
    # Every node is worth 0.5; cost 1 up to 4 tokens, then 10: the best is 3 nodes.
    mass, steps = masses([0.5] * 7), costs([1] * 4 + [10] * 4)
    assert Bastion().choose(mass, steps) == 3
    assert Bastion(widths=(1, 3, 8)).choose(mass, steps) == 2  # 3 tokens are 2 nodes
    assert Bastion(widths=(64,)).choose(mass[:3], steps) == 3  # padded up to 64: all there are
    assert Bastion(widths=(64,)).choose(mass, steps) in (0, 7)


def test_bastion_paper_is_the_released_rule() -> None:
    # T_v(s) = 1 up to 40 tokens, 1.2 from 41 on; T_draft + T_aux = 1. Masses 0.5 everywhere.
    # At 40 tokens: 0.5 * (1 + 1) = 1 against (1 + 39 * 0.5) * 0.2 = 4.1: stop there, cut to 32: 31 nodes.
    steps = costs([1.0] * 40 + [1.2] * 88)
    assert BastionPaper().choose(masses([0.5] * 127), steps) == 31
    # Without the step there is no violation (0.5 * 2 > 0): all 128 tokens; of 120 tokens 96 are a multiple.
    assert BastionPaper().choose(masses([0.5] * 127), costs([1.0] * 128)) == 127
    assert BastionPaper().choose(masses([0.5] * 119), costs([1.0] * 128)) == 95
    # It does not look beyond the step, nor below 32 tokens even if every node is a loss.
    assert BastionPaper().choose(masses([1e-6] * 60), costs([float(s) for s in range(1, 62)])) == 31
    assert BastionPaper().choose(masses([0.5] * 9), costs([1.0] * 10)) == 9


def test_bastion_paper_stops_by_the_cost_of_the_next_token() -> None:
    # T_v(s) = 1 up to 64, then 1 + 0.05 (s - 64). At s: 0.1 * (1 + T_v(s)) <= (1 + 0.1 (s - 1)) * 0.05 ?
    # s = 64: 0.2 <= 0.365: stop; 64 is a multiple of 32: 63 nodes.
    ramp = [1.0] * 64 + [1 + 0.05 * k for k in range(1, 65)]
    assert BastionPaper().choose(masses([0.1] * 127), costs(ramp)) == 63


@given(
    st.lists(st.floats(0.001, 1), max_size=60),
    st.lists(st.floats(0.01, 2), min_size=61, max_size=61),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_no_size_beats_bastions_by_more_than_its_slack(mass: list[float], verify: list[float], slack: float) -> None:
    ordered = masses(sorted(mass, reverse=True))
    price = costs(verify, draft=0.3, aux=0.01)
    rate = [(1 + float(ordered[:n].sum())) / (0.3 + 0.01 + verify[n]) for n in range(1 + len(mass))]
    chosen = Bastion(slack=slack).choose(ordered, price)
    assert rate[chosen] >= (1 - slack - 1e-5) * max(rate)
    assert all(worse <= (1 - slack + 1e-5) * max(rate) for worse in rate[:chosen])


@given(st.lists(st.floats(0.001, 1), max_size=60), st.lists(st.floats(0.0, 0.2), min_size=60, max_size=60))
def test_on_convex_costs_caddtree_finds_the_maximum(mass: list[float], slopes: list[float]) -> None:
    verify = 1 + np.concatenate([[0], np.cumsum(np.sort(slopes))])  # slopes that never fall: convex
    ordered = masses(sorted(mass, reverse=True))
    rate = np.cumsum([1.0, *ordered]) / (0.5 + verify[: 1 + len(ordered)])
    assert rate[CaDDTree().choose(ordered, costs(verify.tolist(), draft=0.5))] == pytest.approx(rate.max())


# --- whether to draft -----------------------------------------------------------------------------


def test_bastion_drafts_while_it_pays_and_while_nothing_is_known() -> None:
    assert Bastion().drafts(Outlook(gain=float("nan"), idle=0))
    assert Bastion().drafts(Outlook(gain=1.3, idle=0))
    assert not Bastion().drafts(Outlook(gain=0.9, idle=0))
    assert Bastion().drafts(Outlook(gain=0.9, idle=0, hope=0.15))


def test_bastion_goes_on_with_what_pays_and_resumes_what_clearly_does() -> None:
    assert Bastion().drafts(Outlook(gain=1.01, idle=0, resume=0.3))
    assert not Bastion().drafts(Outlook(gain=1.01, idle=1, resume=0.3))
    assert Bastion().drafts(Outlook(gain=1.05, idle=1, resume=0.3))


def first_probe(gain: float, resume: float = 0.0) -> int:
    """Idle rounds after which the drafter gets another look."""
    return next(idle for idle in range(100_000) if Bastion().drafts(Outlook(gain, idle, resume)))


def test_probes_get_rarer_the_worse_the_drafter() -> None:
    # Wasted per probe: 1/g - 1 of the time of its tokens; at most 0.3 % of the idle rounds: (1/g - 1) / 0.003.
    assert [first_probe(g) for g in (0.99, 0.9, 0.5)] == [4, 38, 334]
    # And what a draft after a pause takes beyond others, here 0.3 of a plain step.
    assert [first_probe(g, 0.3) for g in (0.99, 0.9, 0.5)] == [104, 138, 434]


def test_looks_may_cost_a_tenth_of_what_drafting_has_saved_besides() -> None:
    saved = [next(k for k in range(1000) if Bastion().drafts(Outlook(0.9, k, saved=w))) for w in (0.0, 0.03, 0.3)]
    assert saved == [38, 19, 4]


def test_a_drafter_without_any_gain_is_never_probed() -> None:
    assert not Bastion().drafts(Outlook(gain=0.0, idle=10**9))


@given(st.floats(0.05, 1.5), st.integers(1, 5000))
def test_waiting_longer_never_makes_drafting_less_likely(gain: float, idle: int) -> None:
    assert Bastion().drafts(Outlook(gain, idle + 1)) >= Bastion().drafts(Outlook(gain, idle))


@pytest.mark.parametrize("spec", ["dflash", "ddtree", "beam", "caddtree", "bastion:paper"])
def test_the_papers_rules_always_draft_and_plain_decoding_never(spec: str) -> None:
    hopeless = Outlook(gain=0.01, idle=0)
    assert registry.policy(spec).drafts(hopeless)
    assert not registry.policy("autoregressive").drafts(Outlook(gain=9.0, idle=9))


# --- what every policy promises -------------------------------------------------------------------


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    depth, width = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    logits = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).normal(size=(depth, width)) * 3
    logp = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True) + 1)), axis=1)
    return Lattice(np.arange(depth * width).reshape(depth, width), logp.astype(np.float32))


@pytest.mark.parametrize("spec", SPECS)
@given(draft=lattices(), verify=st.lists(st.floats(0.001, 3), min_size=1, max_size=1), seed=st.integers(0, 999))
def test_every_policy_keeps_its_promises(spec: str, draft: Lattice, verify: list[float], seed: int) -> None:
    policy: Policy = registry.policy(spec)
    before = draft.tokens.copy(), draft.logp.copy()
    tree = policy.grow(draft.narrow(policy.width), 3)
    assert len(tree) <= policy.n_max and tree.tokens[0] == 3 and (np.diff(tree.mass) <= 0).all()

    mass = tree.mass[1:].copy()
    steps = verify[0] + np.random.default_rng(seed).uniform(0, 1, 1 + policy.n_max)
    price = Costs(steps[0], 0.2, np.zeros_like(steps), steps.copy())
    frozen = [np.array(a) for a in (mass, price.aux_s, price.verify_s)]
    n = policy.choose(mass, price)
    assert isinstance(n, int) and 0 <= n <= len(mass)
    assert n == policy.choose(mass, price)
    for array, copy in zip(
        (mass, price.aux_s, price.verify_s, draft.tokens, draft.logp), (*frozen, *before), strict=True
    ):
        assert np.array_equal(array, copy)


@pytest.mark.parametrize("spec", [*SPECS, "dflash:7", "caddtree", "bastion"])
def test_a_policy_is_named_as_it_is_written(spec: str) -> None:
    policy = registry.policy(spec)
    assert policy.name == spec
    assert registry.policy(policy.name) == policy


def test_dflash_is_a_chain_and_beam_a_beam() -> None:
    draft = Lattice(np.arange(8).reshape(4, 2), np.log(np.full((4, 2), 0.5, np.float32)))
    assert registry.policy("dflash:3").grow(draft, 9).tokens.tolist() == [9, 0, 2, 4]
    assert np.bincount(registry.policy("beam:2x3").grow(draft, 9).depths).tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "spec",
    [
        "ddtree:x",
        "ddtree:0",
        "ddtree:-3",
        "ddtree:",
        "ddtree:1e9",
        "ddtree:9999999999",
        "ddtree:٣",
        "dflash:2.5",
        "beam:4",
        "beam:4x",
        "beam:0x3",
        "beam:x",
        "caddtree:papr",
        "bastion:nan",
        "autoregressive:1",
    ],
)
def test_a_parameter_that_cannot_be_used_is_one_sentence(spec: str) -> None:
    with pytest.raises(BadInput, match=spec.split(":")[0]) as problem:
        registry.policy(spec)
    assert spec in str(problem.value) and "write" in str(problem.value) and "\n" not in str(problem.value)


@given(st.sampled_from(registry.policy_names()), st.text(max_size=8))
def test_any_parameter_gives_a_policy_or_a_sentence(name: str, argument: str) -> None:
    try:
        policy = registry.policy(f"{name}:{argument}")
    except BadInput:
        return
    assert 0 <= policy.n_max <= 4096
