"""What the server is made of: tool calls in text, rules and grammars at nodes, options. With clients: tests/e2e."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draftwood.accept import Likelihood
from draftwood.errors import BadInput
from draftwood.sampling import Sampling
from draftwood.serve.answer import Delta, Piece
from draftwood.serve.failure import Refused
from draftwood.serve.grammar import Grammar, Grammars, of_lark, of_regex, of_schema
from draftwood.serve.guard import Gate
from draftwood.serve.metrics import Metrics
from draftwood.serve.options import Options
from draftwood.serve.prompts import _message
from draftwood.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Function,
    JsonSchema,
    Message,
    ResponseFormat,
    StreamOptions,
    TokenizeRequest,
    ToolCall,
)
from draftwood.serve.render import chat_logprobs
from draftwood.serve.rules import Shaping
from draftwood.serve.run import bind
from draftwood.serve.scheduler import Job, finish_reason
from draftwood.serve.service import Service
from draftwood.serve.tools import Call, Form, Sieve, moved
from draftwood.text import TextStream
from draftwood.tree import shared
from tests.reference import byte_tokenizer
from tests.serving import tiny_llm

HERMES, LLAMA = Form("<tool_call>", "arguments"), Form("{", "parameters")
WROTE = '<tool_call>\n{"name": "a", "arguments": {"x": {"y": "</tool_call>"}}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "a", "arguments": {x: 1}}\n</tool_call>'
CALL = Call("a", '{"x": {"y": "</tool_call>"}}')


@pytest.mark.parametrize(
    ("form", "text", "rest", "calls"),
    [
        (HERMES, "nothing to call", "nothing to call", []),
        (HERMES, WROTE, "", [CALL]),
        (HERMES, f"Let me see. {WROTE}", "Let me see.", [CALL]),
        (HERMES, f"{WROTE}\n{WROTE}", "", [CALL, CALL]),
        (HERMES, "<tool_call>{broken", "<tool_call>{broken", []),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
        (HERMES, '<tool_call>{"name": "a", "arguments": {}}', "", [Call("a", "{}")]),
        (HERMES, f"With <tool_call> I call: {WROTE}", "With <tool_call> I call:", [CALL]),
        (HERMES, f"{BROKEN}\n{WROTE}", BROKEN, [CALL]),
        (HERMES, f"{WROTE}{BROKEN} so {WROTE} there", f"{BROKEN} so  there", [CALL, CALL]),
        (HERMES, f'<tool_call>["<tool_call>"]{WROTE}', '<tool_call>["<tool_call>"]', [CALL]),
        (LLAMA, '{"name": "a", "parameters": {"x": 1}}', "", [Call("a", '{"x": 1}')]),
        (LLAMA, 'It is {"name": "a", "parameters": {}}', 'It is {"name": "a", "parameters": {}}', []),
        (LLAMA, '{"name": "a"}', '{"name": "a"}', []),
        (LLAMA, '{"name": ' + "[" * 5000, '{"name": ' + "[" * 5000, []),
    ],
)
def test_calls_are_read_whole_or_not_at_all(form: Form, text: str, rest: str, calls: list[Call]) -> None:
    assert form.read(text) == (rest, calls)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "[1e999]", "9" * 9999])
@pytest.mark.parametrize("form", [HERMES, LLAMA])
def test_what_no_json_can_say_is_no_call(form: Form, number: str) -> None:
    for value, reads in ((number, False), ("1e99", True)):
        text = form.opens.removesuffix("{") + f'{{"name": "a", "{form.key}": {{"x": {value}}}}}'
        rest, calls = form.read(text)
        assert [json.loads(call.arguments) for call in calls] == ([{"x": 1e99}] if reads else [])
        assert rest == ("" if reads else text)


@pytest.mark.parametrize("name", [r"\ud800", "", " ", "a b", "a" * 65, r"a\n", "\u00e4"])
def test_what_no_function_may_be_called_is_no_call(name: str) -> None:
    """Half a surrogate pair could not even be sent."""
    text = WROTE.replace('"a"', f'"{name}"')
    assert HERMES.read(text) == (text, []) and HERMES.read(text + WROTE) == (text, [CALL])


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(
    ("text", "streams"), [(f"Well. {WROTE}", "Well. "), ("a < b <tool", "a < b "), (WROTE, ""), ("plain", "plain")]
)
def test_text_streams_until_a_call_may_begin(text: str, streams: str, size: int) -> None:
    sieve = Sieve(HERMES)
    passed = "".join(sieve.push(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = sieve.end()
    assert passed == streams
    assert (passed + rest).strip() == HERMES.read(text)[0] and calls == HERMES.read(text)[1]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_texts_with_calls_are_the_same_streamed_and_whole(size: int) -> None:
    parts = ("", " ", "Well. ", "<tool_call>", BROKEN, WROTE)
    for text in map("".join, itertools.product(parts, repeat=3)):
        sieve = Sieve(HERMES)
        passed = "".join(sieve.push(text[at : at + size]) for at in range(0, len(text), size))
        rest, calls = sieve.end()
        whole = HERMES.read(text)
        assert calls == whole[1] and len(calls) == text.count(WROTE)
        assert (passed + rest).strip() == whole[0].strip() and (calls or passed + rest == text)


def test_templates_say_how_calls_look() -> None:
    assert Form.of("{{ tools }} <tool_call>") == HERMES
    assert Form.of('{{ tools }} {"name": n, "parameters": p}') == LLAMA
    for template in (None, "", "{{ messages }}"):
        with pytest.raises(BadInput, match="knows no tools"):
            Form.of(template)


def test_references_within_a_schema_move_with_it() -> None:
    others = [
        {"$ref": "http://x"},
        {"$ref": "#anchor"},
        {"$id": "x", "items": {"$ref": "#/y"}},
        {"enum": [{"$ref": "#"}]},
    ]
    inner = {"properties": {"$ref": {"$ref": "#"}, "x": {"$ref": "#/$defs/X"}}, "anyOf": others}
    assert moved(inner, "#/there") == {
        "properties": {"$ref": {"$ref": "#/there"}, "x": {"$ref": "#/there/$defs/X"}},
        "anyOf": others,
    }


def test_of_several_templates_the_one_for_tools_says_how_calls_look() -> None:
    llm = tiny_llm()
    template = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": template}
    asked = ChatRequest(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert Service(llm, Options()).prompts.form(asked) == HERMES


def test_arguments_that_are_no_json_stay_text() -> None:
    for text in ("nope", "[" * 100_000):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        message = ChatRequest(model="m", messages=[{"role": "assistant", "tool_calls": [call]}]).messages[0]
        assert _message(message)["tool_calls"][0]["function"]["arguments"] == text


def test_null_is_what_a_field_has_that_is_left_out() -> None:
    """In every part of a request, and in the document."""
    least: dict[type[BaseModel], dict] = {
        ChatRequest: {"model": "m", "messages": [{"role": "user"}]}, CompletionRequest: {"model": "m", "prompt": "x"},
        TokenizeRequest: {"prompt": "x"}, DetokenizeRequest: {"tokens": []}, StreamOptions: {},
        Message: {"role": "user"}, ResponseFormat: {"type": "text"}, JsonSchema: {"name": "x"}, Function: {"name": "f"},
        ToolCall: {"id": "1", "function": {"name": "f", "arguments": "{}"}},
    }  # fmt: skip
    for kind, given in least.items():
        properties = kind.model_json_schema()["properties"]
        optional = properties.keys() - given.keys()
        assert kind.model_validate({**dict.fromkeys(optional), **given}) == kind.model_validate(given)
        for name in optional:
            assert any(one.get("type") == "null" for one in properties[name].get("anyOf", [properties[name]])), name
    with pytest.raises(ValidationError, match="forbidden"):
        StreamOptions.model_validate({"foo": None})


def test_prompts_are_logged_where_that_is_asked_for() -> None:
    """In a process of its own, whose logging nobody has set up."""
    code = (
        "from draftwood.serve.options import Options; from draftwood.serve.protocol import CompletionRequest\n"
        "from draftwood.serve.service import Service; from tests.serving import tiny_llm\n"
        "Service(tiny_llm(), Options(log_prompts=True))._prepare(CompletionRequest(model='m', prompt='a secret'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "a secret" in run.stderr


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0])
def test_a_drain_that_never_ends_is_refused(seconds: float) -> None:
    with pytest.raises(BadInput, match="--drain"):
        Options(drain_s=seconds)


def test_a_port_is_taken_from_the_start() -> None:
    first = bind(Options(port=0))
    with first, pytest.raises(BadInput, match="cannot be listened on"):
        bind(Options(port=first.getsockname()[1]))


def test_what_needs_no_key_needs_none_below_another_path() -> None:
    gate = Gate("secret", 10)
    scope = {"method": "GET", "headers": [], "root_path": "/llm"}
    for path in ("/llm/health", "/llm", "/llm/page/page.js"):
        gate._check_key({**scope, "path": path})
    with pytest.raises(Refused, match="key"):
        gate._check_key({**scope, "path": "/llm/metrics"})


def test_shaping_by_its_formulas() -> None:
    scores = torch.zeros(8)
    shaped = Shaping(2, {5: 3.0}, presence=0.5, frequency=0.25, least=4, ends=frozenset({7}))
    found = shaped([1, 1, 2, 2, 3], scores)
    expected = torch.tensor([0, 0, -1.0, -0.75, 0, 3.0, 0, -math.inf])  # tokens of the prompt are not counted
    assert torch.equal(found, expected) and not scores.any()
    assert torch.equal(shaped([1, 1], scores)[:7], torch.tensor([0, 0, 0, 0, 0, 3.0, 0]))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(), 260, [256])


def allowed(grammars: Grammars, grammar: str, text: str) -> set[int]:
    """Tokens after a text, by a fresh matcher."""
    ids = list(byte_tokenizer()(text).input_ids)
    return set(torch.isfinite(grammars.make(grammar).mask(ids, torch.zeros(260))).nonzero()[:, 0].tolist())


def test_a_grammar_can_be_asked_about_any_node_in_any_order(grammars: Grammars) -> None:
    """Along one branch, back, and along another: always what a fresh matcher says."""
    grammar, one = of_regex("ab(c|d)*e|abx"), grammars.make(of_regex("ab(c|d)*e|abx"))
    texts = ["", "a", "ab", "abc", "abcd", "abcde", "abd", "abx", "a", "abdd"]
    for text, again in itertools.product(texts, repeat=2):
        for asked in (text, again):
            ids = list(byte_tokenizer()(asked).input_ids)
            found = torch.isfinite(one.mask(ids, torch.zeros(260))).nonzero()[:, 0].tolist()
            assert set(found) == allowed(grammars, grammar, asked), (text, again)


@for_all(*[st.lists(st.sampled_from([1, 2]), max_size=40)] * 3)
def test_what_texts_begin_with_alike(begin: list[int], a: list[int], b: list[int]) -> None:
    a, b = begin + a, begin + b
    assert shared(a, b) == sum(a[: n + 1] == b[: n + 1] for n in range(min(len(a), len(b))))


def test_a_finished_form_allows_nothing_but_the_end(grammars: Grammars) -> None:
    assert allowed(grammars, of_regex("ab"), "ab") == {256}
    assert allowed(grammars, of_lark('start: "x" "y"?'), "x") > {256}


def test_behind_an_end_a_grammar_is_as_it_was(grammars: Grammars) -> None:
    """A tree may hold tokens behind an end: the target looks there once it has drawn that."""
    grammar, ids = grammars.make(of_regex("ab")), list(byte_tokenizer()("ab").input_ids)
    for written in ([*ids, 256], [*ids, 256, *ids], ids):
        assert torch.isfinite(grammar.mask(written, torch.zeros(260))).nonzero()[:, 0].tolist() == [256]
    assert torch.isfinite(grammar.mask(ids[:1], torch.zeros(260))).nonzero()[:, 0].tolist() == ids[1:]
    assert not grammar.broken


def test_an_answer_that_came_to_a_limit_of_its_grammar_is_not_called_whole(grammars: Grammars) -> None:
    limits, form = LLParserLimits(step_max_items=3), 'start: (a | b)* "."\na: "x" a?\nb: "x"'
    limited = LLMatcher(from_tokenizer(byte_tokenizer(), 260, [256]), of_lark(form), log_level=0, limits=limits)
    request = tiny_llm().engine.request([1, 2], 8, Sampling(), frozenset({256}))
    request.sampler.commit([256])
    for grammar, why in ((grammars.make(of_lark(form)), "stop"), (Grammar(limited, [256]), "length")):
        shaping = Shaping(2, {}, ends=frozenset({256}), grammar=grammar)
        shaping([1, 2], torch.zeros(260))
        assert finish_reason(Job(request, lambda step: None, math.inf, shaping)) == why


@pytest.mark.parametrize(
    "make", [lambda: of_schema({"type": "nope"}), lambda: of_lark("start: foo"), lambda: of_regex("((")]
)
def test_bad_grammars_are_told(grammars: Grammars, make) -> None:
    with pytest.raises(BadInput, match="cannot be used"):
        grammars.make(make())


def test_tools_may_refer_to_their_own_definitions_and_to_themselves(grammars: Grammars) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/X"}, "rest": {"$ref": "#"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"X": {"enum": [1]}},
    }
    call = {"name": "f", "arguments": {"x": 1, "rest": {"x": 1, "rest": {"x": 1}}}}
    (end,) = byte_tokenizer()("\n").input_ids
    for others in ([], [{"name": "g"}]):
        grammar = HERMES.grammar([*others, {"name": "f", "parameters": parameters}])
        texts = [json.dumps(call, separators=marks) for marks in ((",", ":"), (", ", ": "))]
        assert any(end in allowed(grammars, grammar, f"<tool_call>\n{text}") for text in texts)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/X"}], "$defs": {"X": {"required": ["x"]}}},
        {"$ref": "#/$defs/X", "$defs": {"X": {"properties": {"x": {"type": "integer"}, "rest": {"$ref": "#"}}}}},
        {"enum": [[1], "x", {"x": 1}]},
    ],
)
def test_arguments_are_objects_whatever_a_schema_leaves_open(grammars: Grammars, parameters: dict) -> None:
    for others in ([], [{"name": "g"}]):
        grammar = HERMES.grammar([*others, {"name": "f", "parameters": parameters}])
        begins = '<tool_call>\n{"name":"f","arguments":'
        assert allowed(grammars, grammar, begins) == set(byte_tokenizer()("{").input_ids)
        assert allowed(grammars, grammar, begins + '{"x":1}}') == set(byte_tokenizer()("\n").input_ids)
    with pytest.raises(BadInput, match="cannot be used"):
        grammars.make(HERMES.grammar([{"name": "f", "parameters": {"type": "array"}}]))


def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: a text's own first blank is dropped when it is decoded."""
    pieces = ["<unk>", "\u2581so", "me", "\u2581", "\u2581\u2581x", "<0xC3>"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_text_that_goes_on_keeps_the_blank_before_it() -> None:
    tokenizer = sentencepiece()
    for before, text in (((), "some so"), ((4, 1), " some so")):
        stream = TextStream(tokenizer, (), before)
        assert "".join([*map(stream.push, (1, 2, 1)), stream.flush()]) == text


def test_a_token_of_a_sentencepiece_vocabulary_is_told_with_the_blank_before_it() -> None:
    tokenizer = sentencepiece()
    told = [Likelihood(-0.5, ((token, -0.5),)) for token in range(1, 6)]
    delta = Delta("", [Piece("", token, "bonus", 0) for token in range(1, 6)], tuple(told), None, None)
    found = chat_logprobs([delta], tokenizer)
    assert [one["token"] for one in found[:-1]] == [" so", "me", " ", "  x"]
    assert [bytes(one["bytes"]) for one in found] == [b" so", b"me", b" ", b"  x", b"\xc3"]
    assert found[0]["top_logprobs"][0]["token"] == " so"


@pytest.mark.parametrize("policy", ["autoregressive", "dflash", "ddtree:16", "bastion"])
def test_forms_hold_in_trees(policy: str) -> None:
    """The same text under every policy, and always within the form."""
    llm = tiny_llm()
    made = Grammars(llm.tokenizer, llm.target.vocab_size, llm.stop_ids)
    schema = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 4, "maxItems": 9}
    ids = llm.encode("hello")

    def write(policy: str, seed: int) -> str:
        rule = Shaping(len(ids), {}, ends=llm.stop_ids, grammar=made.make(of_schema(schema)))
        sampling = Sampling(1.0, seed=seed)
        request = llm.engine.run(ids, 200, sampling, llm.stop_ids, rule, policy=llm_policy(policy))
        return str(llm.tokenizer.decode([t for s in request for t in s.tokens], skip_special_tokens=True))

    for seed in range(3):
        text = write(policy, seed)
        assert set(json.loads(text)) <= {1, 22, 333} and text == write("autoregressive", seed)


def llm_policy(name: str):
    from draftwood import registry

    return registry.policy(name)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(port=70000), "--port is 70000"),
        (dict(max_concurrency=0), "--max-concurrency is 0"),
        (dict(kv_tokens=1), "--kv-tokens is 1"),
        (dict(prefix_tokens=-1), "--prefix-tokens is -1"),
        (dict(deadline_s=0), "--deadline"),
        (dict(api_key=" "), "--api-key is empty"),
    ],
)
def test_flags_that_cannot_be(flags: dict, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Options(**flags)


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every name in examples/grafana.json is one that the server tells."""
    told = Metrics("tiny").text(0, 0, 0.0).decode()
    names = set(re.findall(r"# TYPE (\S+) ", told))
    known = names | {f"{name}_bucket" for name in names} | {name for name in names if name.endswith("_total")}
    board = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|draftwood):\w+", target["expr"])
    }
    assert len(asked) > 12 and asked <= known, asked - known
