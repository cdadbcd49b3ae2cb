"""The watchdog: silent while a drafter does as promised, one sentence once when it does not."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from draftwood.trace import Round
from draftwood.watchdog import ENOUGH, Circumstances, Watchdog


def rounds(accepted: int, n: int = 8, mass: float = 0.1, count: int = ENOUGH, context: int = 100) -> list[Round]:
    path = list(range(1, 1 + accepted))
    return [Round(context, n, True, np.full(n, mass, np.float32), np.ones(n, np.int64), path, {}, {})] * count


def test_it_is_silent_while_the_card_is_right_and_until_it_has_seen_enough() -> None:
    assert Watchdog(2.0).watch(rounds(1), Circumstances()) is None
    assert Watchdog(6.0).watch(rounds(0, count=ENOUGH - 1), Circumstances()) is None


@pytest.mark.parametrize(("every", "told"), [(2, False), (3, False), (4, True), (8, True)])
def test_a_text_harder_than_the_cards_mean_is_no_reason(every: int, told: bool) -> None:
    """A third of the promised draft tokens is what chat may get where maths makes the mean; a quarter is too few."""
    some = rounds(1, count=ENOUGH // every) + rounds(0, count=ENOUGH - ENOUGH // every)
    assert (Watchdog(2.0).watch(some, Circumstances()) is not None) == told


def test_it_speaks_once() -> None:
    dog = Watchdog(6.0)
    sentence = dog.watch(rounds(0), Circumstances())
    assert sentence is not None and "1.00 tokens a round" in sentence and "its card promises 6.00" in sentence
    assert "\n" not in sentence and dog.watch(rounds(0), Circumstances()) is None


def test_without_a_card_the_drafter_is_taken_at_its_word() -> None:
    sentence = Watchdog().watch(rounds(0, mass=0.5), Circumstances())
    assert sentence is not None and "its own confidence promises 5.00" in sentence
    assert Watchdog().watch(rounds(0, mass=0.0), Circumstances()) is None, "it never hoped for anything"


def test_small_trees_cannot_keep_a_cards_promise_and_are_not_held_to_it() -> None:
    assert Watchdog(6.0).watch(rounds(1, n=2, mass=0.5), Circumstances()) is None


@pytest.mark.parametrize(
    ("where", "context", "word"),
    [
        (Circumstances(templated=False), 100, "chat template"),
        (Circumstances(), 9000, "9000 tokens"),
        (Circumstances(thinking=True), 100, "thinking"),
        (Circumstances(temperature=1.0), 100, "temperature 1"),
        (Circumstances(), 100, "fine-tuning"),
    ],
)
def test_the_likely_reason_is_named(where: Circumstances, context: int, word: str) -> None:
    sentence = Watchdog(6.0).watch(rounds(0, context=context), where)
    assert sentence is not None and word in sentence


def test_rounds_without_a_draft_say_nothing() -> None:
    assert Watchdog(6.0).watch(rounds(0, n=0, count=10 * ENOUGH), Circumstances()) is None


@pytest.mark.parametrize("text", ["<think> so", "so </think>"])  # some templates put the first into the prompt
def test_an_llm_tells_its_user(text: str, caplog: pytest.LogCaptureFixture) -> None:
    from types import SimpleNamespace

    from draftwood.llm import LLM

    engine = SimpleNamespace(target=SimpleNamespace(stop_ids=frozenset()), drafter=None)
    llm = LLM(engine, SimpleNamespace(eos_token_id=None))  # type: ignore[arg-type]
    answer = SimpleNamespace(text=text, rounds=rounds(0, mass=0.5))
    with caplog.at_level(logging.WARNING, "draftwood"):
        for _ in range(2):
            llm._watch(0.0, True, answer)  # type: ignore[arg-type]
    assert len(caplog.messages) == 1 and "thinking" in caplog.messages[0]
