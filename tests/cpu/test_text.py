"""Text from tokens: whole characters, stop strings, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftwood.errors import BadInput
from draftwood.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes: characters span tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


class Counted(Bytes):
    """Counts what it decodes, and knows a special token."""

    special, most = 256, 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(token_ids))
        known = [token for token in token_ids if token != self.special]
        return super().decode(known, skip_special_tokens=skip_special_tokens)


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


@given(st.lists(st.sampled_from([*"a→😀".encode(), 0xFF, 0xC3, Counted.special]), max_size=150))
@example([*"😀".encode()[:3]] * 40 + [*"→a".encode()])
@example([Counted.special] * 100 + [*"→a".encode()])
@example([*"→".encode()[:2]] + [Counted.special] * 100 + [*"→a".encode()[2:]])
def test_bytes_that_are_no_text_lose_nothing_of_it(tokens: list[int]) -> None:
    stream = TextStream(Counted())
    pieces = [*map(stream.push, tokens), stream.flush()]
    assert "".join(pieces) == Counted().decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "tokens", [b"\xff", "😀".encode()[:1], "😀".encode()[:3], "😀→".encode()[1:-1], [Counted.special]], ids=str
)
def test_what_never_becomes_text_is_not_decoded_again_and_again(tokens: bytes | list[int]) -> None:
    tokenizer = Counted()
    stream = TextStream(tokenizer)
    shown = [stream.push(token) for token in [*tokens] * 200]
    assert tokenizer.most < 100
    assert tokens == [Counted.special] or len("".join(shown)) > 100, "some of it is shown before the end"
