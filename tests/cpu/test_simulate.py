"""Replays do what the engine does, skip what was not recorded, and price machines that are not here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from draftwood.acceptance import LEAST_GROWN, SHALLOWEST
from draftwood.bench.branches import branches
from draftwood.bench.figures_simulated import frontier
from draftwood.bench.prices import Average, learned
from draftwood.bench.simulation import Cell, parts_of, run_simulation, simulate
from draftwood.engine import Engine
from draftwood.errors import BadInput
from draftwood.hardware import CONFIGS, DRAFT_LAYERS, Modelled, draft_work, footprint, hardware, target_config
from draftwood.latency import LatencyModel, Machine
from draftwood.limits import Asked
from draftwood.policies.base import Costs, Outlook
from draftwood.policies.bastion import Bastion
from draftwood.policies.ddtree import DDTree
from draftwood.recording import Answer, Header, Trace
from draftwood.registry import drafter, policy
from draftwood.simulate import Script, replay, scripts
from draftwood.target import Target
from draftwood.trace import Round
from draftwood.tree import FAINT, Lattice, Tree, chain_tree, matched, shared
from tests.reference import Truthful

MACHINE = Machine("made up", 1e12, 1e10, 1e-6)
PROMPT = [1, 2, 3, 4]
FIXED = ("dflash", "ddtree:3", "ddtree:9", "beam:2x3")


@dataclass(frozen=True)
class Flat:
    """Every round costs the same, and a draft a fifth of it."""

    resume_s: float = 0.0

    def costs(self, n_max: int, context: int, positions: int) -> Costs:
        return Costs(1.0, 0.2, np.zeros(1 + n_max), np.ones(1 + n_max), resume_s=self.resume_s)


class Consistent(Truthful):
    """Its likeliest candidates are the same however many are asked for."""

    def propose(self, tokens: list[int], width: int) -> Lattice:
        return super().propose(tokens, 4).narrow(width)


@pytest.fixture(scope="module")
def truth() -> list[int]:
    """What the tiny target writes."""
    from tests.reference import tiny_target

    engine = an_engine(tiny_target())
    return [*PROMPT, *(t for step in engine.run(PROMPT, 60, policy=policy("autoregressive")) for t in step.tokens)]


def an_engine(target: Target, truth: list[int] | None = None) -> Engine:
    drafter = Consistent("consistent", truth=truth or [])
    return Engine(target, drafter, policy("ddtree:4"), LatencyModel(MACHINE, target.work))


def an_answer(target: Target, truth: list[int], spec: str, tokens: int = 40) -> Answer:
    steps = list(an_engine(target, truth).run(PROMPT, tokens, policy=policy(spec)))
    text = [t for step in steps for t in step.tokens]
    rounds = [step.round for step in steps if step.round is not None]
    return Answer("p", "set", spec, 0.0, len(PROMPT), text, 0.0, sum(s.seconds for s in steps), rounds)


@pytest.mark.parametrize("spec", FIXED)
def test_a_replay_does_what_the_engine_did(target: Target, truth: list[int], spec: str) -> None:
    real = an_answer(target, truth, spec, 50)
    played = replay(policy(spec), scripts([an_answer(target, truth, "record", 50)]), Flat())
    # The engine cuts its last trees to what the answer has room for.
    same = sum(r.context < len(PROMPT) + 42 for r in real.rounds)
    assert same > 5 and played.skipped == 0
    for ours, theirs in zip(played.rounds[:same], real.rounds[:same], strict=True):
        assert (ours.context, ours.n, list(ours.path)) == (theirs.context, theirs.n, list(theirs.path))


def test_rounds_of_a_replay_emit_what_it_counts(target: Target, truth: list[int]) -> None:
    record = an_answer(target, truth, "record", 50)
    for end in range(20, 50):  # somewhere a tree holds more than is left of the text
        played = replay(policy("ddtree:9"), scripts([replace(record, tokens=record.tokens[:end])]), Flat())
        assert sum(1 + r.accepted for r in played.rounds) == played.tokens == end - 1


def test_a_replay_writes_the_whole_text_and_counts_its_price(target: Target, truth: list[int]) -> None:
    texts = scripts([an_answer(target, truth, "record")])
    plain, tree = (replay(policy(spec), texts, Flat()) for spec in ("autoregressive", "ddtree:8"))
    assert plain.tokens == tree.tokens == 39 and plain.seconds == 39
    assert tree.seconds == pytest.approx(sum(1.2 if r.drafted else 1.0 for r in tree.rounds))
    assert tree.tokens_per_s > 1.5 * plain.tokens_per_s


def test_a_draft_after_a_pause_costs_what_it_takes_to_resume(target: Target, truth: list[int]) -> None:
    texts = scripts([an_answer(target, truth, "record")])
    on, resumed = (replay(Resting(), texts, Flat(resume_s)) for resume_s in (0.0, 0.5))
    looks = sum(r.drafted for r in resumed.rounds)
    assert looks > 3 and resumed.seconds == pytest.approx(on.seconds + 0.5 * looks)


def test_a_draft_that_no_drafter_ran_for_costs_none_and_is_as_deep_as_it_was(target: Target, truth: list[int]) -> None:
    record = an_answer(target, truth, "record")
    rounds = [replace(r, positions=0 if r.context % 2 else 2) for r in record.rounds]
    texts = scripts([replace(record, rounds=rounds)])
    played = replay(policy("ddtree:4"), texts, Flat(resume_s=0.5)).rounds
    assert {r.asked for r in played} == {True, False}
    assert all(r.asked == (r.context % 2 == 0) for r in played)
    before = [False, *(r.asked for r in played)]
    assert [r.seconds["draft"] for r in played] == [
        0.0 if not r.asked else 0.2 if went_on else 0.7 for r, went_on in zip(played, before, strict=False)
    ]
    pooled = replace(record, rounds=[replace(r, draft=chain_tree(range(9))) for r in rounds])
    (text,) = scripts([pooled])
    assert all(text.draft(r.context, Asked(4, 2)).depths.max() == (2 if r.asked else 8) for r in played)


def test_drafts_are_free_where_they_were_for_policies_and_not_for_a_memory_that_heard_every_token() -> None:
    def said(spec: str, positions: dict[int, int], tokens: list[int]) -> Answer:
        rounds = [replace(a_draft(at), positions=asked) for at, asked in positions.items()]
        return Answer("p", "", spec, 0.0, 2, tokens, 0, 0, rounds)

    text, other = list(range(10)), [0, 1, 2, 3, 9]
    record = said("record", dict.fromkeys(range(2, 11), 0), text)
    plain = said("autoregressive", {}, text)
    one, two = said("dflash", {3: 0, 4: 0, 5: 4}, text), said("ddtree:2", {4: 4, 5: 0, 6: 0}, other)
    assert Script.of(record, [plain]).free == set(range(2, 11))
    assert Script.of(record, [plain, one]).free == {3, 4}
    assert Script.of(record, [plain, one, two]).free == {3}, "context 6 is of another text, and in 4 one of them ran"


@dataclass(frozen=True)
class Resting(DDTree):
    """Drafts in every third round."""

    def drafts(self, outlook: Outlook) -> bool:
        return outlook.idle >= 2


def half_right(deepens: bool) -> Script:
    """A text of which every draft knows the next two tokens and is as sure of ten more, which never come."""
    tokens = np.random.default_rng(0).integers(0, 9, 400).tolist()
    logp = np.log(np.tile([0.9, 0.05], (12, 1))).astype(np.float32)
    drafts = {}
    for at in range(len(tokens) - 2):
        likeliest = [*tokens[at + 1 : at + 3], *range(20, 30)]
        drafts[1 + at] = Lattice(np.array([likeliest, range(40, 52)]).T, logp)
    return Script(Answer("p", "", "record", 0.0, 1, tokens, 0, 0), drafts, sorted(drafts), deepens)


def test_a_replay_drafts_as_deep_as_the_engine_would_and_pays_for_that() -> None:
    prices = Noting()
    rounds = replay(policy("bastion"), [half_right(deepens=True)], prices).rounds
    assert prices.positions[0] > 12 and set(prices.positions[-50:-5]) == {SHALLOWEST}
    assert max(r.depths.max(initial=0) for r in rounds[-50:]) <= SHALLOWEST


def test_a_replay_grows_no_more_than_the_engine_would() -> None:
    rounds = replay(Bastion(slack=0.1), [half_right(deepens=False)], Noting()).rounds  # nodes cost nothing there
    assert max(r.grown or 0 for r in rounds[-50:]) <= LEAST_GROWN < max(len(r.draft.tokens) for r in rounds if r.draft)


@dataclass(frozen=True)
class Noting(Flat):
    """Notes how many positions are asked for."""

    positions: list[int] = field(default_factory=list)

    def costs(self, n_max: int, context: int, positions: int) -> Costs:
        self.positions.append(positions)
        return super().costs(n_max, context, positions)


def test_a_gap_in_the_record_is_skipped_and_counted(target: Target, truth: list[int]) -> None:
    whole = an_answer(target, truth, "record")
    gap = [r for r in whole.rounds if not 10 <= r.context < 14]
    played = replay(policy("ddtree:1"), scripts([replace(whole, rounds=gap)]), Flat())
    assert 0 < played.skipped <= 4 and played.tokens + played.skipped == 39


def test_drafts_of_other_answers_count_as_far_as_these_say_the_same() -> None:
    one = Answer("p", "", "record", 0.0, 2, [5, 6, 7, 8], 0, 0)
    assert shared([5, 6, 7], [5, 6, 9]) == 2 and shared([], [1]) == 0 and shared([1], [1]) == 1
    other = replace(one, tokens=[5, 6, 9, 9], policy="x", rounds=[a_draft(2), a_draft(3), a_draft(4)])
    assert Script.of(one, [other]).places == [2, 3], "context 4 holds the token in which they differ"


def test_how_sure_the_target_was_is_replayed_where_any_round_told_it(target: Target, truth: list[int]) -> None:
    record, told = an_answer(target, truth, "record"), an_answer(target, truth, "bastion")
    known = {r.context: r.confidence for r in told.rounds if r.confidence is not None}
    script = Script.of(record, [told])
    assert len(known) > 1 and script.confidences == known
    played = replay(policy("ddtree:1"), [script], Flat())
    assert all(r.confidence == known.get(r.context) for r in played.rounds) and len(played.rounds) > 5


def a_draft(context: int):
    from draftwood.recording import round_from_json

    return round_from_json({"c": context, "a": [], "s": {}, "t": [[1, 2]], "l": [[-0.1, -3.0]]})


def test_matched_follows_the_text_and_stops_where_it_leaves_the_tree() -> None:
    tree = Tree(np.array([9, 1, 2, 3]), np.array([-1, 0, 0, 2]), np.array([0, 1, 1, 2]), np.ones(4, np.float32))
    assert matched(tree, [2, 3, 4]) == [2, 3] and matched(tree, [1, 3]) == [1]
    assert matched(tree, [7]) == [] and matched(tree, []) == []


def test_trees_that_take_every_recorded_candidate_are_counted(target: Target, truth: list[int]) -> None:
    texts = scripts([an_answer(target, truth, "record")])
    assert replay(policy("ddtree:2"), texts, Flat()).clipped == 0
    assert replay(policy("ddtree:60"), texts, Flat()).clipped > 0


def test_trees_that_the_recording_cut_are_counted_where_all_of_them_is_taken() -> None:
    def clipped(spec: str, nodes: int, asked: str, end: int = 400) -> int:
        tokens, parents, depths = np.arange(1 + nodes), np.array([-1] + [0] * nodes), np.array([0] + [1] * nodes)
        tree = Tree(tokens, parents, depths, np.array([1] + [0.1] * nodes, np.float32))
        answer = Answer("p", "", spec, 0.0, 1, [0] * end, 0, 0)
        script = Script(answer, dict.fromkeys(range(1, end), tree), range(1, end))
        return replay(policy(asked), [script], Flat()).clipped

    assert clipped("ddtree:8", 8, "ddtree:8") == clipped("ddtree:8", 8, "ddtree:7") == 0
    assert clipped("ddtree:8", 8, "ddtree:9", end=12) == 9, "in all rounds but the last two, which the text's end cuts"
    assert clipped("record", 8, "ddtree:9") == 0, "the record took all that there was"
    assert clipped("record", 256, "ddtree:300") > 390


def test_a_chain_ends_where_it_would_have_in_the_draft_and_a_tree_does_not() -> None:
    mass = np.array([1, 0.5, 0.02, 0.005, 0.001], np.float32)
    chain = replace(chain_tree([0] * 5), mass=mass)
    answer = Answer("p", "", "record", 0.0, 1, [0] * 9, 0, 0, [a_round(c, chain, 0.01) for c in range(1, 9)])

    def nodes(spec: str, answer: Answer) -> int:
        return replay(policy(spec), scripts([answer]), Flat()).rounds[0].n

    assert nodes("dflash", answer) == 2 and nodes("dflash:1", answer) == 1 and nodes("ddtree:9", answer) == 4
    unlimited = replace(answer, rounds=[replace(r, faint=0.0) for r in answer.rounds])
    assert nodes("dflash", unlimited) == 4


def test_it_is_recorded_where_chains_of_a_draft_end(target: Target) -> None:
    pooled = Engine(
        target, drafter(["ngram", "recycling"], target), policy("record"), LatencyModel(MACHINE, target.work)
    )
    rounds = [step.round for step in pooled.run(PROMPT, 20) if step.round]
    assert {r.faint for r in rounds if r.draft is not None} == {FAINT}


def a_round(context: int, draft: Tree, faint: float) -> Round:
    nothing = np.zeros(0, np.float32), np.zeros(0, np.int64)
    return Round(context, 0, True, *nothing, [], {}, {}, draft=draft, faint=faint)


# --- machines -------------------------------------------------------------------------------------


def test_a_card_that_reads_faster_decodes_faster() -> None:
    sizes = footprint(CONFIGS["qwen3-8b"])
    assert sizes.weight_bytes == pytest.approx(15.1e9, rel=0.01)  # 8.2 B parameters less the input embedding, bf16
    plain = {
        n: LatencyModel(hardware(n).machine, sizes.work).costs(0, 500).plain_s for n in ("rtx4090", "a100", "h200")
    }
    assert plain["rtx4090"] > plain["a100"] > plain["h200"]


def test_only_captured_widths_run_on_a_card() -> None:
    card = hardware("h100")
    sizes, draft = footprint(CONFIGS["qwen3-8b"]), draft_work(CONFIGS["qwen3-8b"])
    prices = Modelled(LatencyModel(card.machine, sizes.work, draft), card.widths)
    costs = prices.costs(100, 500)
    assert len(costs.verify_s) == len(costs.aux_s) == 101
    assert costs.verify_s[4] == costs.verify_s[7] < costs.verify_s[8] == costs.verify_s[15]
    assert 0 < costs.draft_s < costs.plain_s
    assert len(prices.costs(0, 500).verify_s) == 1


def test_a_machine_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"peak": 1e13, "bandwidth": 1e11, "launch_s": 1e-6, "widths": [8, 1, 4]}))
    read = hardware(str(path))
    assert read.machine == Machine("mine", 1e13, 1e11, 1e-6, overlap=1.0) and read.widths == (1, 4, 8)


FIGURES = '{"peak": 1, "bandwidth": 1, "launch_s": 1'


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"peak": 1, "bandwidth": 0, "launch_s": 1}', '{"peak": "x"}', FIGURES + ', "overlap": 2}'],
)
def test_a_file_that_is_no_machine_or_model_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    for read in (hardware, target_config):
        with pytest.raises(BadInput, match=r"mine\.json"):
            read(str(path))


@pytest.mark.parametrize("figure", ["NaN", "Infinity", "-1"])
def test_figures_of_a_machine_are_positive_and_finite(tmp_path: Path, figure: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(f'{{"peak": 1, "bandwidth": {figure}, "launch_s": 1}}')
    with pytest.raises(BadInput, match="positive and finite"):
        hardware(str(path))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"head_dim": "x"}, "head_dim is x"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"num_experts": 128}, "mixture of experts"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"n_routed_experts": 64}, "mixture of experts"),
        ({"moe_num_experts": 64}, "mixture of experts"),
        ({"sliding_window": 512}, "does not say in which layers"),
        ({"sliding_window": "x"}, "sliding_window is x"),
    ],
)
def test_a_model_that_is_no_dense_decoder_is_refused(tmp_path: Path, changed: dict, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["qwen3-8b"], **changed}))
    with pytest.raises(BadInput, match=says):
        target_config(str(path))


def test_a_dense_model_may_leave_open_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["llama-3.1-8b"], "head_dim": None, "num_local_experts": 1}))
    assert footprint(target_config(str(path))) == footprint(CONFIGS["llama-3.1-8b"])


@pytest.mark.parametrize(
    ("told", "near"),
    [
        ({"sliding_window_pattern": 6}, 30),
        ({"layer_types": ["sliding_attention", "full_attention"] * 18}, 18),
        ({"model_type": "mistral"}, 36),
        ({"use_sliding_window": False}, 0),
    ],
)
def test_layers_with_a_window_read_no_more_than_that(tmp_path: Path, told: dict, near: int) -> None:
    path, whole = tmp_path / "config.json", footprint(CONFIGS["qwen3-8b"])
    path.write_text(json.dumps({**CONFIGS["qwen3-8b"], "sliding_window": 512, **told}))
    sizes = footprint(target_config(str(path)))
    assert sizes.work(9, 512, 2) == whole.work(9, 512, 2)
    unread = whole.work(1, 4096).bytes - sizes.work(1, 4096).bytes
    assert unread == pytest.approx((4096 - 512) * whole.kv_bytes * near / 36)


def test_a_drafter_has_no_windows_of_a_target_of_as_many_layers() -> None:
    config = {**CONFIGS["qwen3-8b"], "num_hidden_layers": DRAFT_LAYERS}
    near = {**config, "model_type": "mistral", "sliding_window": 512}
    assert draft_work(near)(4096) == draft_work(config)(4096)
    assert footprint(near).work(1, 4096).bytes < footprint(config).work(1, 4096).bytes


def test_unknown_names_suggest_known_ones() -> None:
    with pytest.raises(BadInput, match="h100"):
        hardware("h10")
    with pytest.raises(BadInput, match="qwen3-8b"):
        target_config("qwen3-8")


# --- the command ----------------------------------------------------------------------------------


def a_trace(target: Target, truth: list[int]) -> Trace:
    facts = {"machine": asdict(MACHINE), "footprint": asdict(target.footprint), "draft_work": {"0": [0.0, 0.0, 1]}}
    return Trace(
        Header("t", "d", facts), [an_answer(target, truth, s) for s in ("autoregressive", "ddtree:4", "record")]
    )


def alike(spec: str, draft_s: float = 0.002, host_s: float = 0.001, positions: int = 16) -> Answer:
    """An answer of rounds that all took the same."""
    seconds = {"draft": draft_s, "verify": 0.02, "observe": host_s}
    round = Round(100, 1, True, np.ones(1, np.float32), np.ones(1, np.int64), [1], seconds, {}, positions=positions)
    return Answer("p", "set", spec, 0.0, 100, [1] * 60, 0.0, 2.0, [round] * 60)


def timed(*answers: Answer) -> Trace:
    sizes = footprint(CONFIGS["qwen3-8b"])
    facts = {"machine": asdict(MACHINE), "footprint": asdict(sizes), "draft_work": {"0": [1e6, 1e6, 1]}}
    return Trace(Header("t", "d", facts), answers)


def test_a_draft_is_priced_by_its_positions_and_not_by_those_for_the_record() -> None:
    trace = timed(alike("ddtree:2", 0.002, positions=2), alike("ddtree:6", 0.004, positions=6), alike("record", 0.1))
    prices = Average.of(learned(trace), trace)
    drafts = {positions: prices.costs(8, 100, positions).draft_s for positions in (1, 2, 4, 6, 16)}
    assert drafts == pytest.approx({1: 0.002, 2: 0.002, 4: 0.003, 6: 0.004, 16: 0.004}, rel=1e-6)


def test_drafts_that_no_drafter_ran_for_make_the_others_no_cheaper() -> None:
    usual, free = alike("bastion", 0.004), alike("bastion", 0.0, positions=0)
    one, both = (timed(*answers) for answers in ((usual,), (usual, free)))
    prices = [Average.of(learned(trace), trace).costs(8, 100, 16).draft_s for trace in (one, both)]
    assert prices == pytest.approx([0.004, 0.004], rel=1e-3)


def test_the_host_is_priced_as_a_policy_that_ran_kept_it_busy() -> None:
    trace = timed(alike("ddtree:1", host_s=0.001), alike("bastion", host_s=0.003))
    prices = Average.of(learned(trace), trace)
    hosts = [prices.hosted(trace, spec).costs(8, 100).aux_s[1] for spec in ("ddtree:1", "bastion", "dflash")]
    assert hosts == pytest.approx([0.001, 0.003, 0.002], rel=0.01)


def test_every_policy_on_every_machine(target: Target, truth: list[int]) -> None:
    found = simulate(a_trace(target, truth), ["ddtree:4", "bastion"], ["this", "a100"])
    assert [(c.hardware, c.policy) for c in found.cells] == [
        (h, p) for h in ("this", "a100") for p in ("autoregressive", "ddtree:4", "bastion")
    ]
    plain, tree = found.cells[:2]
    assert plain.speedup == plain.work == plain.tau == 1 and tree.tau > 1 and tree.skipped == 0
    assert tree.measured > 0 and np.isfinite(tree.error) and np.isnan(found.cells[2].measured)
    assert np.isnan(found.cells[4].measured), "nothing was measured on a card"


def test_a_policy_is_foretold_by_the_rounds_of_others(target: Target, truth: list[int]) -> None:
    trace = a_trace(target, truth)
    slower = [
        replace(a, rounds=[replace(r, seconds={verb: 9 * s for verb, s in r.seconds.items()}) for r in a.rounds])
        if a.policy == "ddtree:4"
        else a
        for a in trace.answers
    ]
    usual, slow = (
        {c.policy: c for c in simulate(replace(trace, answers=of), ["ddtree:4"], ["this"]).cells}["ddtree:4"]
        for of in (trace.answers, slower)
    )
    assert slow.foretold == usual.foretold > 0, "its own rounds say nothing"
    assert slow.tokens_per_s < 0.5 * usual.tokens_per_s
    assert slow.error_foretold == pytest.approx(slow.foretold / slow.measured - 1)
    alone = replace(trace, answers=[a for a in trace.answers if a.policy == "ddtree:4"])
    assert np.isnan(simulate(alone, ["ddtree:4"], ["this"]).cells[1].foretold), "nobody else drafted"


def test_rounds_wider_than_any_that_ran_are_counted_where_prices_are_learned(
    target: Target, truth: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, path = a_trace(target, truth), tmp_path / "trace.jsonl"  # whose trees are of 4 nodes
    found = {
        (c.hardware, c.policy): c.unseen for c in simulate(trace, ["ddtree:4", "ddtree:9"], ["this", "h100"]).cells
    }
    assert found["this", "autoregressive"] == found["this", "ddtree:4"] == 0 < 0.5 < found["this", "ddtree:9"] < 1
    assert not any(found["h100", spec] for spec in ("autoregressive", "ddtree:4", "ddtree:9"))
    trace.save(path)
    run_simulation(path, ["ddtree:4", "ddtree:9"], ["this"], None, None, as_json=False)
    assert capsys.readouterr().out.count("wider than any that was recorded") == 1


def test_operators_are_launched_on_a_card_whatever_was_compiled_where_it_was_recorded() -> None:
    trace = timed(alike("ddtree:2"))
    recorded = trace.header.facts["footprint"]
    compiled = replace(
        trace, header=replace(trace.header, facts={**trace.header.facts, "footprint": {**recorded, "launches": 0}})
    )
    assert parts_of(compiled, "h100", None)[1] == footprint(CONFIGS["qwen3-8b"])
    assert parts_of(compiled, "this", None)[1].launches == 0


def test_the_command_prints_a_table_and_writes_its_files(
    target: Target, truth: list[int], tmp_path: Path, capsys
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    a_trace(target, truth).save(path)
    run_simulation(path, ["ddtree:4"], ["this", "h200"], "qwen3-8b", tmp_path / "out", as_json=False)
    printed = capsys.readouterr().out
    assert "Simulated on h200" in printed
    facts = json.loads(printed.splitlines()[-1])
    assert facts == json.loads((tmp_path / "out" / "simulation.json").read_text())
    assert (tmp_path / "out" / "pareto.png").stat().st_size > 0


def test_without_matplotlib_there_is_a_note_instead_of_a_plot(
    target: Target, truth: list[int], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    a_trace(target, truth).save(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run_simulation(path, ["ddtree:4"], ["this"], None, tmp_path / "out", as_json=True)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["cells"] and "matplotlib is not installed" in printed.err
    assert (tmp_path / "out" / "simulation.json").exists()


def test_a_trace_without_drafts_cannot_be_replayed(target: Target, truth: list[int]) -> None:
    silent = Trace(a_trace(target, truth).header, [an_answer(target, truth, "autoregressive")])
    with pytest.raises(BadInput, match="no drafts"):
        simulate(silent, ["ddtree:4"], ["this"])


def test_the_frontier_is_what_nobody_beats() -> None:
    def cell(work: float, speedup: float) -> Cell:
        return Cell("m", f"{work}", 1.0, speedup, 1.0, 1.0, work, 1.0, 1, 0.0, 0.0, float("nan"))

    cells = [cell(1, 1.0), cell(2, 1.5), cell(3, 1.4), cell(4, 2.0), cell(2, 1.2)]
    assert [c.work for c in frontier(cells)] == [1, 2, 4]


def test_what_is_known_after_a_sibling() -> None:
    """The text takes the second child of the root, whose first child is right, then leaves the tree."""
    tree = Tree(
        np.array([5, 6, 7, 8, 9, 1]), np.array([-1, 0, 0, 1, 2, 4]), np.array([0, 1, 1, 2, 2, 3]),
        np.array([1, 0.6, 0.4, 0.3, 0.2, 0.1], np.float32),
    )  # fmt: skip
    rounds = [Round(2, 0, True, tree.mass[1:1], tree.depths[1:1], 0, {}, {}, draft=tree)]

    def counts(text: list[int]) -> dict[str, tuple[int, int]]:
        answer = Answer("p", "", "record", 0.0, 2, text, 0, 0, rounds)
        return {where: (branch.nodes, branch.right) for where, branch in branches([answer]).items()}

    assert counts([5, 7, 9, 2]) == {"spine": (0, 0), "sibling": (2, 1)}
    assert counts([5, 6, 8, 2]) == {"spine": (1, 1), "sibling": (0, 0)}
    assert counts([5, 4, 8]) == {"spine": (0, 0), "sibling": (0, 0)}
