"""The prefix cache: a hit gives the text and the drafts of a miss, and memory stays within its bound."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood import prefix as prefixes
from draftwood import registry
from draftwood.cache import Row
from draftwood.engine import Engine
from draftwood.latency import LatencyModel, Machine
from draftwood.prefix import LEAST, PrefixCache, common
from draftwood.request import Request
from draftwood.rounds import Prefix
from draftwood.sampling import Sampling
from draftwood.target import Target
from tests.reference import tiny_dflash, tiny_target

SYSTEM = [(11 * i + 5) % 97 for i in range(40)]


def engine(target: Target, drafter) -> Engine:
    latency = LatencyModel(Machine("made-up", peak=1e13, bandwidth=1e9, launch_s=1e-9), target.work, None)
    return Engine(target, drafter, registry.policy("ddtree:7"), latency, backend="host")


def write(made: Engine, cache: PrefixCache, request: Request) -> tuple[list[int], list[object]]:
    """The answer, and what was drafted for it."""
    batch, text, drafts = made.batch(cache.keep), [], []
    batch.join(request, cache.find(request))
    while not request.finished:
        for step in batch.round().values():
            text += step.tokens
            drafts += [step.tree.tokens.tolist()] if step.tree else []
    return text, drafts


@pytest.mark.parametrize("name", ["dflash", "ngram", "none"])
@pytest.mark.parametrize("of", ["llama", "qwen3_sliding"])
def test_a_hit_is_a_miss_that_reads_less(name: str, of: str) -> None:
    target = tiny_target(of)
    drafters = [tiny_dflash(target) if name == "dflash" else registry.drafter(name, target) for _ in range(2)]
    made, without = (engine(target, drafter) for drafter in drafters)  # a drafter that learns does so for itself
    cache, cold = PrefixCache(drafters[0], 1000), PrefixCache(drafters[1], 0)
    turns, history = [[7, 8, 9], [3], list(range(20))], list(SYSTEM)
    for turn, sampling in zip(turns, (Sampling(), Sampling(1.0, seed=3), Sampling()), strict=True):
        history += turn
        warm, fresh = (each.request(history, 12, sampling) for each in (made, without))
        expected = write(without, cold, fresh)
        assert write(made, cache, warm) == expected, "the drafter's state is as warm as the target's"
        history += expected[0]
    saved = cache.counts.hits
    assert saved > len(SYSTEM) and cold.counts.hits == 0
    other = made.request([*SYSTEM, 50, 51], 12)
    assert write(made, cache, other) == write(without, cold, without.request([*SYSTEM, 50, 51], 12))
    assert cache.counts.hits == saved + len(SYSTEM), "texts that go on differently share their beginning"


def test_a_prompt_that_is_known_to_its_end_still_gives_logits() -> None:
    target = tiny_target()
    made, cache = engine(target, None), PrefixCache(None, 1000)
    first = write(made, cache, made.request(SYSTEM, 5))
    assert write(made, cache, made.request(SYSTEM, 5)) == first
    assert cache.counts.hits == len(SYSTEM) - 1


def test_a_text_that_fills_its_cache_is_kept_as_it_is() -> None:
    """And what others write behind it does not get into it."""
    target = tiny_target()
    made, cache = engine(target, None), PrefixCache(None, 1000)
    prompt, rows = [*SYSTEM * 4], list[object]()

    def keep(request: Request, prefix: Prefix) -> None:
        rows.append(prefix.row)
        cache.keep(request, prefix)

    for tokens in (1, 60):
        batch = made.batch(keep)
        batch.join(request := made.request([tokens, *prompt], tokens))
        batch.round()
        batch.close()  # of 60 tokens it has one by now, and room for the rest
        assert cache.find(made.request([*request.sampler.tokens, 1], 1)) is not None
        assert any(prefix.row is rows[-1] for _, prefix in cache._kept.values()) == (tokens == 1)
    for ending in ([9, 9], [8]):
        text = [1, *prompt, *ending]
        assert write(made, cache, made.request(text, 6)) == write(made, PrefixCache(None, 0), made.request(text, 6))


def test_what_was_not_used_for_the_longest_time_goes_first() -> None:
    target = tiny_target()
    made, cache = engine(target, None), PrefixCache(None, 100)
    texts = [[i] * 40 for i in (1, 2)]
    for text in (*texts, texts[0], [3] * 40):
        write(made, cache, made.request(text, 1))
        assert cache.tokens <= 100
    assert cache.find(made.request([*texts[0], 5], 1)) is not None
    assert cache.find(made.request([*texts[1], 5], 1)) is None


def test_one_text_is_kept_once() -> None:
    target = tiny_target()
    made, cache = engine(target, None), PrefixCache(None, 1000)
    for _ in range(3):
        write(made, cache, made.request(SYSTEM, 6))
    assert cache.tokens == len(SYSTEM) + 5
    write(made, cache, made.request(SYSTEM, 9))
    assert cache.tokens == len(SYSTEM) + 8, "the longer text replaces its beginning"


def test_short_and_oversized_texts_are_not_kept() -> None:
    target = tiny_target()
    made, cache = engine(target, None), PrefixCache(None, 30)
    write(made, cache, made.request(SYSTEM, 5))
    write(made, cache, made.request(SYSTEM[: LEAST - 3], 2))
    assert cache.tokens == 0
    cache.shrink(0)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([3, 90]), max_size=6)), max_size=30))
def test_among_many_texts_the_longest_beginning_is_found(target: Target, texts: list[tuple[bool, list[int]]]) -> None:
    """By looking at each of them."""
    made, cache, seen = engine(target, None), PrefixCache(None, 150), list[list[int]]()
    for keeps, ending in texts:
        request = made.request([*range(LEAST), *ending, 7], 1)
        known = [tokens for tokens, _ in cache._kept.values()]
        longest = max((common(tokens, np.array(request.sampler.tokens[:-1])) for tokens in known), default=0)
        cache.find(request)
        assert request.filled == longest
        if keeps:
            row = Row(0, 100)
            row.advance(len(request.sampler.tokens) - 1)
            cache.keep(request, Prefix(row, None))
            seen.append(request.sampler.tokens[:-1])
    kept = [tokens.tolist() for tokens, _ in cache._kept.values()]
    assert cache.tokens == sum(map(len, kept)) <= cache.capacity and all(text in seen for text in kept)
    assert not any(a != b and a == b[: len(a)] for a in kept for b in kept), "no text is the beginning of another"


def test_a_text_is_found_without_looking_at_all_of_them(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made, cache, looks = engine(target, None), PrefixCache(None, 10_000), []
    monkeypatch.setattr(prefixes, "common", lambda a, b: looks.append(1) or common(a, b))
    for number in range(64):
        request, row = made.request([*SYSTEM, number, 5], 1), Row(0, 100)
        cache.find(request)
        row.advance(len(SYSTEM) + 1)
        cache.keep(request, Prefix(row, None))
    assert cache.tokens == 64 * (len(SYSTEM) + 1) and len(looks) <= 2 * 64


def test_common_beginnings() -> None:
    a = np.array([1, 2, 3])
    assert common(a, np.array([1, 2, 4, 5])) == 2 and common(a, a) == 3 and common(a, a[:0]) == 0


def test_a_copied_row_is_written_where_it_lies() -> None:
    """Some drafters' states hold rows, whose addresses compiled forwards keep."""
    row, like = Row(2, 8), torch.zeros(1, 1, 4)
    before = row.addresses(like).copy()
    copied = copy.deepcopy(row)
    assert (copied.addresses(like) != before).all() and (row.addresses(like) == before).all()
    assert copied.addresses(like)[0, 0] == copied.layer(0, like, like)[0].data_ptr()
