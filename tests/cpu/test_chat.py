"""A conversation: what is kept of it, its commands, and mistakes that do not end it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftwood import assemble, cli
from draftwood.chat import Chat, converse, prompt_lines, read_lines
from draftwood.cli_show import Screen
from draftwood.errors import BadInput
from draftwood.latency import Machine
from draftwood.llm import LLM, Piece, Stream, load
from draftwood.sampling import Sampling
from tests.reference import byte_tokenizer, tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("chatty")
    tiny_model(dtype=torch.float32, vocab_size=257, max_position_embeddings=400, eos_token_id=256).save_pretrained(
        folder
    )
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "probe", lambda *_: Machine("test", peak=1e12, bandwidth=1e10, launch_s=1e-6))
        return load(str(folder), "ngram", dtype="float32", device="cpu")


@pytest.fixture
def chat(llm: LLM) -> Chat:
    return Chat(llm, Screen.of(False), Sampling(), max_new_tokens=8)


def test_a_turn_answers_the_whole_conversation(chat: Chat, llm: LLM) -> None:
    converse(chat, iter(["hello", "and now?"]))
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[3]["content"] == llm.generate(chat.messages[:3], max_new_tokens=8).text


def test_commands(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/policy ddtree:4",
        "/temperature 0.5",
        "/system Be brief.",
        "hi",
        "more",
        "/undo",
        "/tree",
        "/help",
        "/exit",
    ]
    converse(chat, iter([*lines, "never asked"]))
    assert (chat.policy, chat.sampling.temperature, chat.system) == ("ddtree:4", 0.5, "Be brief.")
    assert chat.shows_tree and [m["content"] for m in chat.messages[::2]] == ["hi"]
    assert "/temperature T" in capsys.readouterr().err
    converse(chat, iter(["/system", "/tree"]))
    assert chat.system is None and chat.messages == [] and not chat.shows_tree


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/polcy x", "/help"),
        ("/policy basion", "'bastion'"),
        ("/temperature hot", "'hot'"),
        ("/temperature -1", "0 (greedy)"),
        ("x" * 500, "context window"),
    ],
)
def test_a_mistake_costs_a_sentence_and_nothing_else(
    chat: Chat, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(chat, iter(["hello", line]))
    err = " ".join(capsys.readouterr().err.split())
    assert said in err and "Traceback" not in err and len(chat.messages) == 2


def test_ctrl_c_keeps_what_was_said(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(_: Screen, piece: Piece) -> None:
        if "".join(written):
            raise KeyboardInterrupt
        written.append(piece.text)

    monkeypatch.setattr(Screen, "write", write)
    chat.max_new_tokens, chat.sampling = 60, Sampling(4.0)  # any bytes, so that some are characters
    converse(chat, iter(["hello"]))
    assert chat.messages[1]["role"] == "assistant"
    assert 1 <= len(chat.messages[1]["content"]) < 60


def test_a_question_whose_answer_never_began_is_forgotten(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stream: Stream, *_: object) -> bool:
        stream.close()
        return True

    monkeypatch.setattr("draftwood.chat.play", interrupted)
    converse(chat, iter(["hello", "/exit ", "never asked"]))
    assert chat.messages == []


def lines_of(*given: str) -> Callable[[], str]:
    left = iter(given)

    def ask() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return ask


def test_a_backslash_continues_a_message() -> None:
    assert [*read_lines(lines_of("a\\", "b", "c"))] == ["a\nb", "c"]
    assert [*read_lines(lines_of("cut off\\"))] == ["cut off\n"]
    for ask in (lambda: b"\xff".decode(), lambda: b"hey \xff".decode(errors="surrogateescape")):
        with pytest.raises(BadInput, match="not valid UTF-8"):
            next(read_lines(ask))


def test_a_closed_stdin_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert not [*prompt_lines()]


def test_piped_lines_are_turns(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("draftwood.llm.load", lambda *args, **options: llm)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/reset\nhello\n"))
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", "--max-new-tokens", "6"])
    first, second = capsys.readouterr().out.split("\n")[:2]
    assert not end.value.code and first == second
