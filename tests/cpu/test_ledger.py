"""What hope for a drafter may cost: the ledger of what drafting has saved and lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwood.acceptance import AcceptanceModel
from draftwood.ledger import ADVANCE, AFRESH, ODD, SHARE, Ledger
from draftwood.policies.bastion import Bastion
from tests.acceptance_cases import COSTS, a_round, chain, sure


def after_rounds(every: int, plain_s: float | None) -> bool:
    """Whether `bastion` drafts on behind 96 drafted rounds, of which one in so many accepted all of a chain of 4."""
    model = AcceptanceModel()
    for i in range(96):
        tree, seconds = chain(4), float(COSTS.round_s[4])
        record = replace(a_round(tree, 4 * (i % every == 0)), seconds={"verify": seconds})
        model.observe(record)
        if plain_s is not None:
            model.charge(record, plain_s)
    return Bastion().drafts(model.outlook(COSTS))


def test_hope_goes_on_until_it_has_cost_its_share() -> None:
    """1.25 tokens in 1.33 s are a gain of 0.94, which could be bad luck; the drafter lost 7.7 s of 128."""
    assert after_rounds(16, None), "hope alone never ends"
    assert not after_rounds(16, COSTS.plain_s)


def test_what_pays_needs_no_hope() -> None:
    assert after_rounds(8, COSTS.plain_s)


def test_a_machine_that_was_paused_is_no_loss() -> None:
    ledger, slept = Ledger(), replace(a_round(sure(1, 0.5)), seconds={"verify": 3600.0}, predicted={"verify": 1.0})
    ledger.enter(slept, plain_s=1.0)
    assert ledger.saved == 1 - ODD and ledger.affords


def test_what_was_lost_is_forgiven_as_plain_rounds_pass() -> None:
    ledger, lost = Ledger(), replace(a_round(sure(1, 0.5)), seconds={"verify": 1.5})
    while ledger.affords:
        ledger.enter(lost, plain_s=1.0)
    assert ledger.spent / 1.5 >= SHARE * ADVANCE / 0.5
    for _ in range(200):
        ledger.enter(replace(a_round(sure(0, 0.0), drafted=False), seconds={"verify": 1.0}), plain_s=1.0)
    assert ledger.affords


def test_another_text_may_lose_a_little_whatever_was_lost_before() -> None:
    ledger, lost = Ledger(), replace(a_round(sure(1, 0.5)), seconds={"verify": 1.25})
    for _ in range(100):
        ledger.enter(lost, plain_s=1.0)
    assert not ledger.affords
    ledger.turn()
    rounds = 0
    while ledger.affords:
        ledger.enter(lost, plain_s=1.0)
        rounds += 1
    assert rounds == 1 + int(AFRESH / 0.25)


def test_where_drafting_has_saved_much_more_is_hoped_for_and_never_more_than_twice_as_much() -> None:
    ledger, won = Ledger(), replace(a_round(sure(1, 1.0), [1]), seconds={"verify": 1.5})
    afforded = [ledger.affords]
    for _ in range(300):
        ledger.enter(won, plain_s=1.0)
        afforded.append(ledger.affords)
    assert afforded[0] == 1.0 and afforded[-1] == 2.0 and afforded == sorted(afforded)
    assert ledger.wealth == pytest.approx(ledger.saved / (ledger.spent + ADVANCE))


def test_a_text_that_may_lose_more_is_not_cut_short_by_another() -> None:
    ledger = Ledger(spent=100.0, saved=5.0)
    ledger.turn()
    assert ledger.saved == 5.0
