"""Text from tokens: whole characters, stop strings, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import BadInput
from draftwood.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes: characters span tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def run(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), stops)
    pieces = []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, stream
    return [*pieces, stream.flush()], stream


@given(st.text(max_size=40))
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces, _ = run(text)
    assert "".join(pieces) == text


@given(st.text(alphabet="ab→", max_size=30), st.lists(st.text(alphabet="ab→", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, stream = run(text, tuple(stops))
    first = min((at for at in map(text.find, stops) if at >= 0), default=-1)
    if first < 0:
        assert "".join(pieces) == text and not stream.stopped
    else:
        # of several stop strings the one that is complete first ends the text
        ends = {text.find(s): text.find(s) + len(s) for s in stops if text.find(s) >= 0}
        earliest = min(ends.values())
        allowed = {text[:start] for start, end in ends.items() if end <= earliest or start < earliest}
        assert stream.stopped and "".join(pieces) in allowed


def test_a_stop_string_is_never_shown_in_part() -> None:
    pieces, _ = run("say END now", ("END",))
    assert "".join(pieces) == "say " and not any("E" in p for p in pieces)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadInput, match="empty"):
        TextStream(Bytes(), ("",))
