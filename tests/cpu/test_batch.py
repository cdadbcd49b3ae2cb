"""Batches: who is in, who waits, and how a round's nodes are shared out. That texts stay the same: conformance."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from typing import ClassVar

import numpy as np
import pytest
import torch

from draftwood import registry
from draftwood.acceptance import TRIALS, AcceptanceModel
from draftwood.batch import CHUNK_BESIDE
from draftwood.cache import KVCache
from draftwood.choosing import ALIKE, ASKED, KEPT, MOST_UNASKED, Load
from draftwood.drafters.pooled import Pooled
from draftwood.engine import Engine
from draftwood.errors import BadModel
from draftwood.latency import LatencyModel, Machine
from draftwood.policies.base import OPTIMISM, Costs, Outlook, Prospect
from draftwood.policies.bastion import Bastion
from draftwood.policies.ddtree import DDTree
from draftwood.sampling import Sampling
from draftwood.target import Target
from draftwood.trace import Round
from draftwood.tree import Floats, Lattice, chain_tree
from tests.reference import Noisy, Truthful, tiny_dflash, tiny_target, without_the_block

PROMPT = [(11 * i + 5) % 97 for i in range(13)]


def engine(target: Target, drafter, policy: str = "bastion") -> Engine:
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)
    return Engine(target, drafter, registry.policy(policy), latency, backend="host")


def costs(draft_s: float, per_token: float, nodes: int, requests: int) -> Costs:
    verify = 1.0 + per_token * np.arange(nodes + requests)
    return Costs(1.0, draft_s, np.zeros_like(verify), verify).beside(requests - 1, requests)


class Known:
    """A latency model that learns nothing: a token costs a twentieth of a plain step, a draft a fifth of it."""

    seen = 0

    def costs(self, n_max: int, context: int) -> Costs:
        verify = 1.0 + 0.05 * np.arange(1 + n_max)
        return Costs(1.0, 0.2, np.zeros_like(verify), verify)

    def draft_s(self, context: int) -> float:
        return 0.2

    def position_s(self, context: int) -> float:
        return 0.0

    def predict(self, *_: object) -> dict[str, float]:
        return {}

    def observe(self, *rounds: object, first: bool = False) -> None: ...

    def observe_draft(self, *_: object) -> None: ...


def best_by_definition(masses: list[np.ndarray], price: Costs, fairness: float) -> float:
    """The best rate over all ways to take a prefix of each tree."""
    best = 0.0
    for sizes in itertools.product(*(range(len(mass) + 1) for mass in masses)):
        seconds = price.round_s[sum(sizes)]
        tokens = [1 + mass[:n].sum() for mass, n in zip(masses, sizes, strict=True)]
        if sum(sizes) == 0 or min(tokens) * price.plain_s >= fairness * seconds:
            best = max(best, sum(tokens) / seconds)
    return best


@pytest.mark.parametrize("per_token", [0.0, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_a_shared_budget_is_the_best_there_is(per_token: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masses = [np.sort(rng.random(n).astype(np.float32))[::-1] for n in (4, 5, 3)]
    price = costs(0.1, per_token, 12, 3)
    sizes = Bastion().share(masses, price)
    tokens = sum(1 + mass[:n].sum() for mass, n in zip(masses, sizes, strict=True))
    found = tokens / price.round_s[sum(sizes)]
    assert found == pytest.approx(best_by_definition(masses, price, Bastion().fairness), rel=1e-6)


def test_one_request_gets_what_it_would_choose_alone() -> None:
    mass = np.array([0.9, 0.7, 0.5, 0.2, 0.1], np.float32)
    price = costs(0.1, 0.1, 5, 1)
    assert Bastion().share([mass], price) == [Bastion(slack=0.0).choose(mass, price)]


def test_hopeless_drafts_get_nothing_while_others_speculate() -> None:
    good, bad = np.array([0.9, 0.85, 0.8], np.float32), np.array([0.01, 0.01], np.float32)
    sizes = Bastion().share([good, bad], costs(0.0, 0.05, 5, 2))
    assert sizes[0] == 3 and sizes[1] == 0


def test_drafting_is_decided_for_all_together() -> None:
    """By its definition: over all sets of requests, the one with the best rate; lone drafts are dear, many are not."""
    rng, policy = np.random.default_rng(0), Bastion(toll=0.0, margin=0.0, apart=1.0)
    for _ in range(20):
        price = costs(0.0, float(rng.choice([0.02, 0.1, 0.3])), 40, 4)
        prospects = [Prospect(1 + float(t), float(n)) for t, n in zip(rng.random(4) * 2, [5] * 4, strict=True)]
        draft_s = [0.0, 0.3, 0.35, 0.4, 0.45]

        def rate(chosen: tuple[bool, ...]) -> float:
            some = [p for p, asks in zip(prospects, chosen, strict=True) if asks]  # noqa: B023
            nodes = round(sum(p.nodes for p in some))
            gained = sum(p.tokens - 1 for p in some)
            return (4 + gained) / (draft_s[len(some)] + price.verify_s[nodes])  # noqa: B023

        best = max(map(rate, itertools.product([False, True], repeat=4)))
        assert rate(tuple(policy.together(prospects, 9, price, draft_s))) == pytest.approx(best)


def test_a_batch_drafts_only_where_much_is_expected() -> None:
    price, some = costs(0.0, 0.1, 20, 2), [Prospect(2.0, 1.0)] * 2
    gain = (2 + 2) / (0.1 + price.verify_s[2]) * price.verify_s[0] / 2
    for margin, asked in ((gain - 1.01, True), (gain - 0.99, False)):
        assert all(Bastion(toll=0.0, margin=margin).together(some, 0, price, [0.0, 0.1, 0.1])) is asked


def test_what_is_asked_of_many_requests_has_a_limit() -> None:
    """Where 256 tokens take an eighth longer than 128, drafting for all brings 1.6 times as much."""
    price, some = costs(0.0, 0.001, 200, 128), [Prospect(2.0, 1.0)] * 128
    assert all(Bastion(toll=0.0).together(some, 0, price, [0.0] + [0.1] * 128))


def test_a_batch_hopes_as_a_lone_request_does_and_doubts_do_not_add_up() -> None:
    """Errors of independent guesses cancel: the sum of two is in doubt by the root of 2 times one's."""
    price = costs(0.0, 0.1, 20, 2)
    missing = 2 * (price.verify_s[2] + 0.4) / price.plain_s - 2 * 1.3  # tokens that drafting for both must still bring
    for factor, asked in ((0.99, False), (1.01, True)):
        some = [Prospect(1.3, 1.0, factor * missing / (OPTIMISM * sqrt(2)))] * 2
        assert all(Bastion(toll=0.0, margin=0.0).together(some, 0, price, [0.0, 9.0, 0.4])) is asked


def test_what_sets_one_of_many_apart_is_half_luck() -> None:
    price, draft_s = costs(0.0, 0.1, 20, 4), [0.0, 0.2, 0.6, 1.0, 1.4]
    some = [Prospect(3.0, 4.0), *[Prospect(1.0, 4.0)] * 3]
    assert Bastion(toll=0.0, margin=0.0, apart=1.0).together(some, 0, price, draft_s)[0]
    assert not any(Bastion(toll=0.0, margin=0.0, apart=0.1).together(some, 0, price, draft_s))


def test_a_prompt_that_is_read_beside_is_no_reason_to_draft() -> None:
    """Whatever it takes, it takes without drafts as well: only what a node costs at that width counts."""
    verify = np.array([1.0, 1.1, 1.2, 1.3, 3.0, 3.5, 4.0, 4.6])
    price = Costs(1.5, 0.2, np.arange(8) / 10, verify).beside(1, 2, read=3)
    np.testing.assert_allclose(price.verify_s, verify[4:] - verify[4] + verify[1])
    assert price.plain_s == pytest.approx(1.5 + 0.1) and price.draft_s == 0.2 and price.requests == 2
    np.testing.assert_allclose(price.aux_s, [0.0, 0.1, 0.2, 0.3])


def test_everybody_is_looked_at_now_and_then() -> None:
    price, hopeless = costs(0.0, 0.1, 20, 2), [Prospect(1.01, 3.0)] * 2
    asked = [any(Bastion().together(hopeless, idle, price, [0.0, 0.5, 0.6])) for idle in range(900)]
    assert not any(asked[:60]) and all(asked[600:]), "rarely, as a look costs a third of a round"
    assert Bastion().together([None, Prospect(1.0, 0.0)], 0, price, [0.0, 0.5, 0.6]) == [True, True]


def test_nobody_pays_too_much_for_the_others() -> None:
    """One request with splendid drafts would stretch every round; the other keeps half of its plain speed."""
    good, bad = np.full(60, 0.99, np.float32), np.zeros(0, np.float32)
    price = costs(0.0, 0.05, 60, 2)
    n = Bastion().share([good, bad], price)[0]
    assert Bastion(fairness=0.0).share([good, bad], price)[0] > n > 0
    assert price.round_s[n] <= price.plain_s / Bastion().fairness


def test_one_request_falls_back_while_another_speculates() -> None:
    """The drafter knows one text and is wrong about the other: after some trials only the one is drafted for."""
    target = tiny_target()
    plain = engine(target, None, "autoregressive")
    truth = [t for s in plain.run(PROMPT, 230) for t in s.tokens]
    made = engine(target, Truthful("truthful", truth=PROMPT + truth, slip=1000))
    made.latency_of = lambda requests, backend: Known()  # type: ignore[method-assign, assignment]
    batch = made.batch()
    known, unknown = made.request(PROMPT, 230), made.request(PROMPT[::-1], 230)
    batch.join(known)
    batch.join(unknown)
    drafted: dict = {known: [], unknown: []}
    while len(batch.requests) == 2:
        for request, step in batch.round().items():
            if step.round:
                drafted[request].append(step.round.n)
    assert min(drafted[known]) > 0 and drafted[unknown][0] > 0
    assert drafted[unknown][-10:].count(0) > 5


def test_only_a_request_that_is_alone_looks_at_its_text_afresh() -> None:
    """Beside others it starts from a model of its own, and theirs goes on."""
    made = engine(tiny_target(), Noisy("noisy"))
    batch, first, second = made.batch(), made.request(PROMPT, 5), made.request(PROMPT, 5)
    assert first.acceptance is second.acceptance
    for _ in range(100):
        first.acceptance.observe(Round(0, 0, True, np.zeros(0, np.float32), np.zeros(0, np.int64), [], {}, {}))
    settled = first.acceptance.prospect()
    batch.join(first)
    doubtful = first.acceptance.prospect()
    batch.join(second)
    assert settled is not None and doubtful is not None and doubtful.doubt > settled.doubt
    assert first.acceptance.prospect() == doubtful


def test_prompts_are_read_in_chunks_beside_trees() -> None:
    target = tiny_target(max_position_embeddings=2048)
    made = engine(target, Noisy("noisy"), "ddtree:3")
    batch = made.batch()
    writer, reader = made.request(PROMPT, 50), made.request(PROMPT * 50, 2)
    batch.join(writer)
    batch.round()
    batch.join(reader)
    rounds = 0
    while reader.reads:
        steps = batch.round()
        rounds += 1
        assert writer in steps, "who writes is not held up"
    assert rounds == -(-len(PROMPT) * 50 // CHUNK_BESIDE)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_drafter_of_another_vocabulary_is_told_so(target: Target, shift: int) -> None:
    class Strange(Noisy):
        def propose(self, tokens: list[int], width: int) -> Lattice:
            found = super().propose(tokens, width)
            return Lattice(found.tokens + shift * self.vocab, found.logp)

    says = rf"drafter odd proposed the token id {'-' if shift < 0 else ''}\d+, but .* knows the ids 0 to"
    with pytest.raises(BadModel, match=says):
        list(engine(target, Strange("odd"), "ddtree:8").run([1, 2, 3], 20))


def test_every_round_is_learned_from_before_the_last_request_is_gone() -> None:
    """Rounds are learned from together, but an answer of few rounds leaves nothing behind for another day."""
    served, rounds = engine(tiny_target(), None, "autoregressive"), 0
    for tokens in (2, 6, 9):
        rounds += len(list(served.run(PROMPT, tokens))) - 1  # the first token ends the prompt
        assert served.latency._learned.plain_host.seen == rounds


def test_answers_of_several_threads_take_turns_and_are_as_they_would_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    made, inside, verify = engine(target, Noisy("noisy")), threading.Lock(), Target.verify

    def alone(self: Target, *args: object) -> object:
        assert inside.acquire(blocking=False), "another thread's round is under way"
        try:
            time.sleep(1e-4)  # lets go of the interpreter
            return verify(self, *args)  # type: ignore[arg-type]
        finally:
            inside.release()

    def answer(seed: int) -> list[int]:
        return [token for step in made.run([seed, *PROMPT], 40, Sampling(0.5, seed=seed)) for token in step.tokens]

    expected = [answer(seed) for seed in range(6)]
    monkeypatch.setattr(Target, "verify", alone)
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(answer, range(6))) == expected


@pytest.mark.parametrize("policy", ["ddtree:8", "autoregressive"])
def test_no_rule_is_asked_behind_the_end_of_a_text(target: Target, policy: str) -> None:
    """It may have no answer there."""
    text, asked = [11, 12, 13, 2, 7, 8], list[list[int]]()

    def rule(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        asked.append(tokens[len(PROMPT) :])
        only = torch.full_like(scores, -torch.inf)
        only[text[len(asked[-1])]] = 0.0
        return only

    drafter = Truthful("truthful", truth=[*PROMPT, *text], slip=99)
    steps = list(engine(target, drafter, policy).run(PROMPT, 20, stop_ids=frozenset({2}), rule=rule))
    assert [token for step in steps for token in step.tokens] == text[:4]
    assert all(2 not in tokens for tokens in asked)


def test_the_last_round_keeps_nothing_of_who_has_left(target: Target) -> None:
    made = engine(target, tiny_dflash(target))
    batch, request = made.batch(), made.request(PROMPT, 5)
    batch.join(request)
    row = weakref.ref(batch._rounds._rows[request])
    while not request.finished:
        batch.round()
    gc.collect()
    assert row() is None


def test_leaving_gives_memory_back() -> None:
    target = tiny_target()
    drafter = tiny_dflash(target)
    made = engine(target, drafter)
    batch = made.batch()
    requests = [made.request(PROMPT, 30) for _ in range(3)]
    for request in requests:
        batch.join(request)
    batch.round()
    batch.leave(requests[1])
    assert len(batch._rounds._rows) == 2 and len(batch.requests) == 2  # type: ignore[attr-defined]
    batch.close()
    assert not batch._rounds._rows and not batch.requests  # type: ignore[attr-defined]


class Eager(Bastion):
    """Drafts whether it pays or not."""

    def drafts(self, outlook: Outlook) -> bool:
        return True

    def choose(self, mass: np.ndarray, costs: Costs) -> int:
        return min(4, len(mass))


class Resting(Bastion):
    """Never drafts."""

    def drafts(self, outlook: Outlook) -> bool:
        return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rounds_know_how_sure_the_target_was_of_what_it_visited(dtype: torch.dtype) -> None:
    target, prompt = tiny_target(dtype=dtype), [1, 2, 3]
    made = engine(target, Noisy("noisy", max_depth=3))
    made.policy = Eager()
    steps = list(made.run(prompt, 40, Sampling(0.8)))
    text = [*prompt, *(token for step in steps for token in step.tokens)]
    cache = KVCache(target.num_layers, [target.new_row(len(text))])
    sure = (
        target.verify(target.plan([chain_tree(text)], cache, [0], [False]), cache).logits.double().softmax(-1).amax(-1)
    )
    rounds = [step.round for step in steps if step.round is not None]
    assert 0.1 < np.mean([round.confidence is not None for round in rounds]) < 0.5, "behind every fourth token"
    for step in steps:
        if step.round is not None and step.round.confidence is not None:
            visited = sure[step.round.context :][: len(step.round.path) + 1]
            assert step.round.confidence == pytest.approx(
                float(visited.mean()), rel=0.03 if dtype.itemsize == 2 else 1e-5
            )


def test_plain_decoding_does_not_look_and_where_nothing_is_drafted_every_fourth_token_is_enough() -> None:
    plain = [step.round for step in engine(tiny_target(), None, "autoregressive").run([1, 2, 3], 20) if step.round]
    assert all(round.confidence is None for round in plain)
    made = engine(tiny_target(), Noisy("noisy", max_depth=3))
    made.policy = Resting()
    rests = [step.round for step in made.run([1, 2, 3], 21) if step.round]
    assert sum(round.confidence is not None for round in rests) == 5 and not any(round.drafted for round in rests)


class Hesitant(Bastion):
    """Lets three questions go by, then drafts."""

    asked: ClassVar[list[int]] = []  # idle rounds at each question

    def drafts(self, outlook: Outlook) -> bool:
        self.asked.append(outlook.idle)
        return len(self.asked) > 3


def test_a_lone_request_that_rests_is_asked_at_the_start_of_its_answer_and_behind_every_fourth_token() -> None:
    made, Hesitant.asked = engine(tiny_target(), Noisy("noisy", max_depth=3)), []
    made.policy = Hesitant()
    first = [step.round.drafted for step in made.run([1, 2, 3], 14) if step.round]
    assert len(first) == 13 and not any(first) and Hesitant.asked == [0, 4, 8]
    second = [step.round.drafted for step in made.run([1, 2, 3], 14) if step.round]
    assert second[:-1] and all(second[:-1]), "the last round may have no room for a draft"


class Doubtful(Bastion):
    """Never drafts for several."""

    asked: ClassVar[list[int]] = []  # requests at each question

    def together(
        self, prospects: Sequence[Prospect | None], idle: int, costs: Costs, draft_s: Sequence[float]
    ) -> list[bool]:
        self.asked.append(len(prospects))
        return [False] * len(prospects)


def test_several_that_rest_are_asked_every_few_rounds_and_at_once_when_another_one_joins() -> None:
    made, Doubtful.asked = engine(tiny_target(), Noisy("noisy", max_depth=3)), []
    made.policy = Doubtful()
    batch = made.batch()
    for _ in range(2):
        batch.join(made.request(PROMPT, 40))
    for _ in range(2 * ASKED):  # the first of these reads the prompts; in the next one none is asked
        batch.round()
    assert Doubtful.asked == [2, 2]
    batch.join(made.request(PROMPT[:1], 40))
    batch.round()
    batch.round()
    assert Doubtful.asked[2:] == [3]


class Hearing(Known):
    """Keeps what it is told of drafts."""

    def __init__(self) -> None:
        self.positions: list[int | None] = []

    def observe_draft(self, seconds: float, context: int, first: bool = False, positions: int | None = None) -> None:
        self.positions.append(positions)


def test_a_batchs_draft_is_as_long_as_its_longest() -> None:
    target, heard = tiny_target(), Hearing()
    made = engine(target, tiny_dflash(target), "ddtree:5")
    made.latency_of = lambda requests, backend: heard  # type: ignore[method-assign, assignment]
    batch = made.batch()
    for tokens in (4, 30):  # little is left of the first
        batch.join(made.request(PROMPT, tokens))
    longest = []
    while len(batch.requests) == 2:
        rounds = [step.round for step in batch.round().values() if step.round]
        if any(round.drafted for round in rounds):
            longest.append(max(round.positions for round in rounds if round.positions is not None))
    batch._timings.learn()
    assert longest and heard.positions[: len(longest)] == longest


def test_a_draft_that_no_drafter_ran_for_is_no_word_on_what_drafts_take() -> None:
    target = tiny_target()
    drafter = without_the_block(Pooled([tiny_dflash(target), *registry.drafter("ngram", target).parts]))
    rounds = [step.round for step in engine(target, drafter, "ddtree:5").run(PROMPT, 60) if step.round]
    free = [round for round in rounds if not round.asked]
    assert 0 < len(rounds) - len(free) < len(free), "it is looked at again, seldom"
    assert all(round.drafted and not round.predicted.get("draft") for round in free)
    assert all(("draft" in round.seconds) == round.asked for round in rounds)


class Counting(DDTree):
    """Drafts, and counts the questions."""

    asked: ClassVar[int] = 0

    def drafts(self, outlook: Outlook) -> bool:
        Counting.asked += 1
        return True


@pytest.mark.parametrize(("knows", "share"), [(True, 1 / (1 + MOST_UNASKED)), (False, 1)])
def test_the_more_a_lone_request_gains_the_less_often_it_is_asked(target: Target, knows: bool, share: float) -> None:
    text = [t for s in engine(target, None, "autoregressive").run(PROMPT, 200) for t in s.tokens]
    made, Counting.asked = engine(target, Truthful("truthful", truth=PROMPT + text if knows else [], slip=1000)), 0
    made.latency_of = lambda requests, backend: Known()  # type: ignore[method-assign, assignment]
    drafted = sum(s.round.drafted for s in made.run(PROMPT, 200, policy=Counting(2)) if s.round)
    assert drafted > 60 and Counting.asked == pytest.approx(TRIALS + share * (drafted - TRIALS), abs=4)


class Choosing(Bastion):
    """Counts how often it chooses; if it `wavers`, every fourth choice is another one."""

    chosen: ClassVar[int] = 0
    wavers: ClassVar[bool] = False

    def drafts(self, outlook: Outlook) -> bool:
        return True

    def choose(self, mass: Floats, costs: Costs) -> int:
        Choosing.chosen += 1
        return 2 if self.wavers and Choosing.chosen % 4 == 0 else 1


class Wavering(Choosing):
    wavers: ClassVar[bool] = True


@pytest.mark.parametrize(("policy", "share"), [(Choosing, 1 / (1 + KEPT)), (Wavering, 1)])
def test_choices_that_come_out_alike_are_kept_for_a_while(target: Target, policy: type[Choosing], share: float) -> None:
    made, Choosing.chosen = engine(target, Noisy("noisy")), 0
    made.latency_of = lambda requests, backend: Known()  # type: ignore[method-assign, assignment]
    rounds = [s.round for s in made.run(PROMPT, 200, policy=policy(64)) if s.round]
    drafted = sum(round.drafted for round in rounds)
    assert drafted > 60 and Choosing.chosen == pytest.approx(ALIKE + share * (drafted - ALIKE), abs=2)
    assert {round.n for round in rounds if round.drafted} <= {1, 2}


def test_another_request_begins_with_a_choice_of_its_own(target: Target) -> None:
    made = engine(target, Noisy("noisy"))
    made.latency_of = lambda requests, backend: Known()  # type: ignore[method-assign, assignment]
    policy, batch = Choosing(64), made.batch()
    for request in (made.request(PROMPT, 60, policy=policy), made.request(PROMPT, 60, policy=policy)):
        Choosing.chosen = 0
        batch.join(request)
        drafted = 0
        while not request.finished:
            drafted += any(step.round is not None and step.round.drafted for step in batch.round().values())
        assert drafted > ALIKE + KEPT and Choosing.chosen >= ALIKE


class Joining(Bastion):
    """Always drafts for all, and notes how long that is said to be ago."""

    idle: ClassVar[list[int]] = []

    def together(
        self, prospects: Sequence[Prospect | None], idle: int, costs: Costs, draft_s: Sequence[float]
    ) -> list[bool]:
        self.idle.append(idle)
        return [True] * len(prospects)


def test_who_never_drafts_does_not_keep_the_others_looking() -> None:
    made, Joining.idle = engine(tiny_target(), Noisy("noisy", max_depth=3)), []
    batch, plain = made.batch(), registry.policy("autoregressive")
    for policy in (Joining(), Joining(), plain):
        batch.join(made.request(PROMPT, 12, policy=policy))
    model = batch.requests[0].acceptance
    while len(batch.requests) == 3:
        batch.round()
    assert len(Joining.idle) > 4 and set(Joining.idle) == {0}
    assert len(model._recent) > 4, "nor do its rounds say nothing of drafting"


def test_what_a_request_learned_alone_is_its_own_when_another_one_joins() -> None:
    made = engine(tiny_target(), Noisy("noisy", max_depth=3))
    made.policy = Eager()
    batch, first = made.batch(), made.request(PROMPT, 60)
    batch.join(first)
    for _ in range(12):
        batch.round()
    assert len(first.own._recent) < len(first.acceptance._recent)
    batch.join(made.request(PROMPT, 9))
    assert len(first.own._recent) == len(first.acceptance._recent) > 6


def test_what_others_read_is_not_charged_to_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[Round] = []
    monkeypatch.setattr(AcceptanceModel, "charge", lambda model, round, plain_s: charged.append(round))
    made = engine(tiny_target(max_position_embeddings=2048), Noisy("noisy"), "ddtree:3")
    batch, writer, reader = made.batch(), made.request(PROMPT, 90), made.request(PROMPT * 50, 2)
    batch.join(writer)
    for _ in range(3):
        batch.round()
    before = len(charged)
    batch.join(reader)
    assert before == 2, "the first round reads the prompt"
    while reader.reads:
        batch.round()
        load = Load([writer], 2, 0)
        assert batch._chooser.costs(load)[made.policy].draft_s == batch._chooser.draft_s(1, writer.filled)
    assert len(charged) == before


def test_prices_reach_as_far_as_all_requests_together_may_go() -> None:
    made = engine(tiny_target(), Noisy("noisy"), "bastion:8")
    batch, requests = made.batch(), [made.request(PROMPT, 9) for _ in range(3)]
    for size in (1, 2, 3):
        (price,) = batch._chooser.costs(Load(requests[:size], size, 0)).values()
        assert len(price.verify_s) == 1 + 8 * size
