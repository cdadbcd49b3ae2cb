"""The server as its users meet it: the real openai client over a real socket."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from draftwood.batch import Batch
from draftwood.llm import LLM
from draftwood.serve import playground
from draftwood.serve.service import called
from tests.serving import Running, serving, tiny_llm

HELLO = [{"role": "user", "content": "hello, who are you?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SLOW = {"ignore_eos": True, "policy": "autoregressive"}
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture(scope="module")
def running(llm: LLM) -> Iterator[Running]:
    with serving(llm, max_concurrency=4, max_waiting=8) as running:
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, **options):
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 20, **options})


def alone(llm: LLM, messages=HELLO, **options) -> str:
    return llm.generate(messages, **{"max_new_tokens": 20, **options}).text


# --- texts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_says_what_the_model_says_alone(client: openai.OpenAI, llm: LLM, temperature: float) -> None:
    answer = ask(client, temperature=temperature, seed=5)
    assert answer.choices[0].message.content == alone(llm, temperature=temperature, seed=5)
    assert answer.choices[0].finish_reason in ("length", "stop") and answer.model == "tiny"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    told = answer.metrics["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]


def test_a_stream_adds_up_to_the_same(client: openai.OpenAI, llm: LLM) -> None:
    chunks = list(ask(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone(llm)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens <= 20
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("length", "stop")


def test_a_watcher_sees_trees_and_origins(client: openai.OpenAI) -> None:
    stream = ask(client, temperature=0, stream=True, extra_body={"stream_options": {"include_draftwood": True}})
    told = [chunk.draftwood for chunk in stream if getattr(chunk, "draftwood", None)]
    assert (
        "".join(p["text"] for t in told for p in t["pieces"]) == ask(client, temperature=0).choices[0].message.content
    )
    for one in told[1:]:
        tree, accepted = one["tree"], one["tree"]["accepted"]
        assert len(tree["tokens"]) == len(tree["texts"]) == len(tree["parents"]) == len(tree["mass"]) == one["width"]
        drafted = [p for p in one["pieces"] if p["origin"] == "draft"]
        assert [p["token"] for p in drafted] == [tree["tokens"][i] for i in accepted][: len(drafted)]
        assert one["tau"] >= 1 and one["tokens_per_s"] > 0 and one["drafter"] == "ngram"
        assert tree["drafters"] == [None] + ["ngram"] * (one["width"] - 1) and one["plain_s"] > 0
        assert all(p["drafter"] == ("ngram" if p["origin"] == "draft" else None) for p in one["pieces"])


def test_others_are_told_nothing_of_rounds(client: openai.OpenAI) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        assert not any(getattr(chunk, "draftwood", None) for chunk in ask(client, stream=True, **options))


def test_each_drafted_token_has_its_drafter() -> None:
    with serving(tiny_llm(["ngram", "recycling"])) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any")
        body = {"stream_options": {"include_draftwood": True}, "ignore_eos": True}
        stream = ask(client, temperature=0, stream=True, max_tokens=120, extra_body=body)
        told = [chunk.draftwood for chunk in stream if getattr(chunk, "draftwood", None)][1:]
    named = set()
    for one in told:
        drafted = [p for p in one["pieces"] if p["origin"] == "draft"]
        nodes = one["tree"]["accepted"][: len(drafted)]
        assert [p["drafter"] for p in drafted] == [one["tree"]["drafters"][node] for node in nodes]
        named |= set(one["tree"]["drafters"][1:])
    assert named == {"ngram", "recycling"}


def test_several_choices_have_seeds_of_their_own(client: openai.OpenAI, llm: LLM) -> None:
    answer = ask(client, temperature=1, seed=7, n=3)
    expected = [alone(llm, temperature=1.0, seed=7 + i) for i in range(3)]
    assert [choice.message.content for choice in answer.choices] == expected and answer.metrics is None
    streamed = ["", "", ""]
    for chunk in ask(client, temperature=1, seed=7, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == expected


def test_stop_strings(client: openai.OpenAI, llm: LLM) -> None:
    whole = alone(llm, temperature=1.0, seed=3)
    stop = whole[6:8]
    answer = ask(client, temperature=1, seed=3, stop=[stop])
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_policies_do_not_change_a_text(client: openai.OpenAI) -> None:
    texts = {
        ask(client, temperature=1, seed=1, extra_body={"policy": policy}).choices[0].message.content
        for policy in ("autoregressive", "ddtree:8", "bastion", "dflash")
    }
    assert len(texts) == 1


def test_completions_of_texts_and_of_tokens(client: openai.OpenAI, llm: LLM) -> None:
    ids = list(llm.tokenizer("once upon").input_ids)
    for prompt, count in (("once upon", 1), (ids, 1), (["once upon", "a time"], 2), ([ids, ids[:4]], 2)):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        assert len(answer.choices) == count
        assert answer.choices[0].text == llm.generate("once upon", raw=True, max_new_tokens=9).text


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    told = answer.logprobs.content
    assert bytes(byte for t in told for byte in t.bytes).decode(errors="replace") == answer.message.content
    assert len(told) == 20 and all(len(t.top_logprobs) == 3 for t in told)
    assert all(t.logprob == t.top_logprobs[0].logprob <= 0 for t in told), "greedy takes the likeliest"
    plain = ask(client, temperature=0, logprobs=True, top_logprobs=3, extra_body={"policy": "autoregressive"})
    for a, b in zip(told, plain.choices[0].logprobs.content, strict=True):
        assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-6)
    streamed = [t for chunk in ask(client, temperature=0, logprobs=True, stream=True) if chunk.choices
                for t in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]  # fmt: skip
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in told], abs=1e-6)
    old = client.completions.create(model="tiny", prompt="abc", max_tokens=5, temperature=0, logprobs=2).choices[0]
    assert len(old.logprobs.tokens) == len(old.logprobs.token_logprobs) == len(old.logprobs.text_offset) == 5


@pytest.mark.parametrize("policy", ["autoregressive", "ddtree:8"])
def test_biases_and_penalties_hold_at_every_node(client: openai.OpenAI, policy: str) -> None:
    forced = ask(client, logit_bias={"65": 100}, temperature=0, extra_body={"policy": policy})
    assert len(set(forced.choices[0].message.content)) == 1
    varied = ask(client, frequency_penalty=2, presence_penalty=2, temperature=0, extra_body={"policy": policy})
    plain = ask(client, frequency_penalty=2, presence_penalty=2, temperature=0)
    assert varied.choices[0].message.content == plain.choices[0].message.content


# --- forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["autoregressive", "ddtree:8", "bastion"])
def test_answers_follow_a_schema(client: openai.OpenAI, policy: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}
    texts = set()
    for seed in range(3):
        answer = ask(client, response_format=form, seed=seed, max_tokens=60, extra_body={"policy": policy})
        found = json.loads(answer.choices[0].message.content)
        assert 1 <= found["age"] <= 99 and answer.choices[0].finish_reason == "stop"
        texts.add(answer.choices[0].message.content)
    assert len(texts) > 1


def test_objects_and_grammars(client: openai.OpenAI) -> None:
    short = {"type": "grammar", "syntax": "regex", "definition": "(yes|no)!"}
    answer = ask(client, extra_body={"response_format": short})
    assert answer.choices[0].message.content in ("yes!", "no!") and answer.choices[0].finish_reason == "stop"
    lark = {"type": "grammar", "definition": 'start: "a" | "b"'}
    assert ask(client, extra_body={"response_format": lark}).choices[0].message.content in "ab"
    assert ask(client, response_format={"type": "json_object"}, temperature=0).choices[0].message.content[0] == "{"


def test_tools_that_must_be_called(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=200)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Bonn", "Rome")
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"
    results = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask(client, messages=results, tools=[WEATHER]).choices


def test_parameters_of_tools_may_refer_to_their_definitions(client: openai.OpenAI) -> None:
    closed = {"type": "object", "additionalProperties": False}
    city = {**closed, "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
    nested = {**closed, "properties": {"at": {"$ref": "#/$defs/City"}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "where", "parameters": {**nested, "$defs": {"City": city}}}}
    answer = ask(client, tools=[tool], tool_choice="required", max_tokens=300, temperature=0)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["at"]["city"] == "Bonn"


def test_what_a_server_told_may_be_sent_back(client: openai.OpenAI) -> None:
    nulls = dict.fromkeys(("audio", "function_call", "annotations", "refusal"))
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "weather", "arguments": "{}"}}
    call["function"]["parsed_arguments"] = {}
    told = {"role": "assistant", "content": None, "parsed": None, "tool_calls": [call], **nulls}
    results = [*HELLO, told, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    assert ask(client, messages=results, tools=[WEATHER]).choices


def test_parts_of_messages_are_their_text(client: openai.OpenAI) -> None:
    cached = {"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}}
    said, refused = {"type": "text", "text": "I "}, {"type": "refusal", "refusal": "will not."}
    asked = [{"role": "user", "content": [cached, {"type": "text", "text": "lo"}]}]
    parts = ask(client, messages=[*asked, {"role": "assistant", "content": [said, refused]}, *HELLO], temperature=0)
    whole = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I will not."}, *HELLO]
    assert parts.choices[0].message.content == ask(client, messages=whole, temperature=0).choices[0].message.content
    assert parts.usage.prompt_tokens == ask(client, messages=whole).usage.prompt_tokens


def test_a_finished_form_ends_though_more_tokens_were_asked_for(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "ab"}
    answer = ask(client, extra_body={"response_format": form, "min_tokens": 9})
    assert answer.choices[0].message.content == "ab"


# --- refusals -------------------------------------------------------------------------------------------------


def schema(body: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": body}}


DEEP = json.loads('{"not": ' * 300 + "{}" + "}" * 300)
MISTAKES = {
    "unknown model": ({"model": "gpt-9"}, 404, "model_not_found"),
    "unknown field": ({"extra_body": {"foo": 1}}, 400, "unknown_parameter"),
    "out of range": ({"temperature": 9}, 400, "invalid_value"),
    "no messages": ({"messages": []}, 400, "invalid_value"),
    "too many choices": ({"n": 100}, 400, None),
    "too long": ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "context_length_exceeded"),
    "empty stop": ({"stop": [""]}, 400, None),
    "many stops": ({"stop": ["x"] * 40}, 400, None),
    "bad policy": ({"extra_body": {"policy": "ddtre"}}, 400, None),
    "bad schema": ({"response_format": schema({"type": "nope"})}, 400, None),
    "empty grammar": ({"extra_body": {"response_format": {"type": "grammar", "definition": ""}}}, 400, None),
    "large schema": ({"response_format": schema({"enum": ["x" * 70000]})}, 400, None),
    "deep schema": ({"response_format": schema(DEEP)}, 400, None),
    "deep tool": (
        {"tools": [{"type": "function", "function": {"name": "deep", "parameters": DEEP}}]},
        400, "context_length_exceeded",
    ),
    "unknown tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, None,
    ),
    "bias of no token": ({"logit_bias": {"hello": 1}}, 400, None),
    "bias of a token behind zeros": ({"logit_bias": {"0000000000999999": 1}}, 400, None),
    "what is not the template's": ({"extra_body": {"chat_template_kwargs": {"padding": "max_length"}}}, 400, None),
    "a template": ({"extra_body": {"chat_template_kwargs": {"chat_template": "hi"}}}, 400, None),
    "wide policy": ({"extra_body": {"policy": "ddtree:4096"}}, 400, None),
    "stop at no token": ({"extra_body": {"stop_token_ids": [10**6], "min_tokens": 1}}, 400, None),
    "options of no stream": ({"stream_options": {"include_usage": True}}, 400, "invalid_value"),
    "choice of no tools": ({"tool_choice": "required"}, 400, "invalid_value"),
    "too many logprobs": ({"logprobs": True, "top_logprobs": 99}, 400, None),
}  # fmt: skip


@pytest.mark.parametrize(("options", "status", "code"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_as_openai_tells_them(
    client: openai.OpenAI, options: dict, status: int, code: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **options)
    assert caught.value.status_code == status and caught.value.code == code
    assert set(caught.value.body) == {"message", "type", "param", "code"} and caught.value.body["message"]


def test_the_part_of_a_message_that_is_wrong_is_named(client: openai.OpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    for content, param in (([picture], "messages.0.content.0.type"), (5, "messages.0.content")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, messages=[{"role": "user", "content": content}])
        assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match=r"'prompt\.0'"):
        client.completions.create(model="tiny", prompt=[1.5])  # type: ignore[list-item]


def test_seeds_may_be_negative(client: openai.OpenAI) -> None:
    first, second = (ask(client, temperature=1, seed=-1).choices[0].message.content for _ in range(2))
    assert first == second != ask(client, temperature=1, seed=1).choices[0].message.content


@pytest.mark.parametrize(
    ("target", "name"),
    [("org/model-8b", "org/model-8b"), ("/home/me/models/tiny", "tiny"), ("./models/tiny", "tiny"), ("~/tiny", "tiny")],
)
def test_a_folder_is_called_by_its_last_part(target: str, name: str) -> None:
    assert called(target) == name


def test_bodies(running: Running) -> None:
    url = f"{running.url}/v1/chat/completions"
    lone = {"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}
    bodies = [
        (b"{nope", 400, "invalid_json"), (b"[1]", 400, "invalid_json"), (b"", 400, "missing_required_parameter"),
        (b'{"a":' * 100_000, 400, None), (b"x" * (5 << 20), 413, "body_too_large"),
        ((b"x" * 100_000 for _ in range(60)), 413, "body_too_large"), (json.dumps(lone).encode(), 400, None),
        (json.dumps({"\ud800": 1}).encode(), 400, None),
    ]  # fmt: skip
    for content, status, code in bodies:
        answer = httpx.post(url, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status and code in (None, answer.json()["error"]["code"])
    assert httpx.post(url, content=b"plain text").json()["error"]["code"] == "invalid_json"
    assert httpx.get(f"{running.url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(url).status_code == 405


def test_keys(llm: LLM) -> None:
    with serving(llm, api_key="sésame") as running:
        for key, status in ((None, 401), ("sesame", 401), ("sésame", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status
        for given, status in ((b"bearer %s", 200), (b"BEARER  %s", 200), (b"Basic %s", 401), (b"Bearer%s", 401)):
            headers = {"Authorization": given % "sésame".encode()}
            assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        assert httpx.get(running.url).status_code == httpx.get(f"{running.url}/page/main.js").status_code == 200


def test_probes_may_ask_for_heads_alone(running: Running) -> None:
    for path in ("/health", "/", "/page/main.js"):
        head, whole = httpx.head(running.url + path), httpx.get(running.url + path)
        assert head.status_code == whole.status_code == 200 and not head.content
        assert head.headers["content-length"] == str(len(whole.content))


def test_browsers_may_not_call_unless_asked(llm: LLM, running: Running) -> None:
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in httpx.get(f"{running.url}/v1/models", headers=origin).headers
    with serving(llm, cors=("https://example.org",)) as other:
        found = httpx.get(f"{other.url}/v1/models", headers=origin).headers["access-control-allow-origin"]
        assert found == "https://example.org"


# --- load and leaving -----------------------------------------------------------------------------------------


def long(client: openai.OpenAI, **options):
    return ask(client, stream=True, max_tokens=900, extra_body=SLOW, **options)


def test_a_client_that_leaves_frees_its_seat(client: openai.OpenAI, running: Running) -> None:
    before = running.service.scheduler.prefixes.tokens
    for take in (1, 3):
        stream = long(client)
        list(itertools.islice(stream, take))
        assert running.service.scheduler.load[0] == 1 and running.service.scheduler.reserved > 900
        stream.close()
        running.wait_until_idle()
        assert running.service.scheduler.reserved == 0
    with pytest.raises(openai.APITimeoutError):
        ask(client, max_tokens=900, extra_body=SLOW, timeout=0.2)
    running.wait_until_idle()
    assert running.service.scheduler.prefixes.tokens <= max(before, running.service.scheduler.prefixes.capacity)


def test_a_full_queue_sends_away_with_retry_after(llm: LLM) -> None:
    with serving(llm, max_concurrency=1, max_waiting=1) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        first = long(client)
        next(iter(first))
        waiting = threading.Thread(target=lambda: ask(client, max_tokens=2))
        waiting.start()
        while running.service.scheduler.load != (1, 1):
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        first.close()
        waiting.join(20)
        assert not waiting.is_alive()


def test_deadlines(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, max_tokens=900, extra_body={"deadline": 0.15, "ignore_eos": True, "policy": "autoregressive"})
    assert caught.value.status_code == 504 and caught.value.code == "deadline_exceeded"
    running.wait_until_idle()


def test_an_answer_without_a_limit_takes_what_memory_there_is(llm: LLM) -> None:
    with serving(llm, kv_tokens=200) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        answer = ask(client, max_tokens=None, extra_body=SLOW)
        assert answer.choices[0].finish_reason == "length" and 100 < answer.usage.total_tokens < 200


def test_more_choices_than_there_will_ever_be_seats_for(llm: LLM) -> None:
    with serving(llm, max_concurrency=1, max_waiting=1) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="no more than 2"):
            ask(client, n=3)


def test_memory_is_reserved_before_a_request_starts(llm: LLM) -> None:
    room = 2 * 300
    with serving(llm, max_concurrency=8, kv_tokens=room) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="needs memory for"):
            ask(client, max_tokens=900, extra_body={"policy": "autoregressive"})
        most, done = [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                scheduler = running.service.scheduler
                most[0] = max(most[0], scheduler.reserved)
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        options = {"max_tokens": 100, "temperature": 0, "extra_body": {"policy": "autoregressive", "ignore_eos": True}}
        threads = [threading.Thread(target=lambda: ask(client, **options)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        done.set()
        watcher.join()
        assert 0 < most[0] <= room


def test_sigterm_lets_requests_end(llm: LLM) -> None:
    with serving(llm) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        stream = ask(client, stream=True, max_tokens=60, extra_body=SLOW)
        first = next(iter(stream))
        running.server.handle_exit(signal.SIGTERM, None)
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        running.thread.join(20)
        assert not running.thread.is_alive() and not running.service.scheduler._thread.is_alive()


def test_what_outlasts_the_drain_is_told_so(llm: LLM) -> None:
    with serving(llm, drain_s=0.3) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        stream, told = long(client), []
        next(iter(stream))

        def whole() -> None:
            try:
                ask(client, max_tokens=900, extra_body=SLOW)
            except openai.APIStatusError as error:
                told.append((error.status_code, error.code))

        waiting = threading.Thread(target=whole)
        waiting.start()
        while running.service.scheduler.load != (2, 0):
            time.sleep(0.01)
        running.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.APIError, match="going down"):
            list(stream)
        waiting.join(20)
        running.thread.join(20)
        assert told == [(503, "shutting_down")] and not running.thread.is_alive()


# --- around it ------------------------------------------------------------------------------------------------


def test_helpers(running: Running, client: openai.OpenAI) -> None:
    url = running.url
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    told = httpx.post(f"{url}/tokenize", json={"prompt": "grün"}).json()
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 1024
    assert httpx.post(f"{url}/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "grün"}
    assert httpx.post(f"{url}/tokenize", json={"messages": HELLO}).json()["count"] > 10
    assert httpx.post(f"{url}/detokenize", json={"tokens": [-1]}).status_code == 400
    assert httpx.get(f"{url}/health").status_code == 200 and httpx.get(f"{url}/version").json()["version"]


def test_the_page_is_whole_and_asks_nobody_else(running: Running) -> None:
    """Whatever its files name lies beside them; what they may load and call is this server."""
    page, files = httpx.get(running.url), {path.name: path.read_text() for path in playground.FOLDER.iterdir()}
    assert page.text == files["index.html"] and "'none'" in page.headers["content-security-policy"]
    named = set(re.findall(r'"page/([\w.]+)"', page.text))
    named |= {name for text in files.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert named | {"index.html"} == set(files)
    for name in named:
        got = httpx.get(f"{running.url}/page/{name}")
        assert got.text == files[name] and got.headers["cache-control"] == "no-cache"
    assert httpx.get(f"{running.url}/page/nothing.js").status_code == 404
    assert httpx.get(f"{running.url}/page/..%2fapp.py").status_code == 404
    for text in files.values():
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text)


def test_metrics_carry_the_names_that_dashboards_know(running: Running, client: openai.OpenAI) -> None:
    ask(client, temperature=0)
    text = httpx.get(f"{running.url}/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    label = '{model_name="tiny"}'
    drafted, accepted = (values[f"vllm:spec_decode_num_{kind}_tokens_total{label}"] for kind in ("draft", "accepted"))
    assert drafted >= accepted > 0 and values[f"vllm:spec_decode_num_drafts_total{label}"] > 0
    by_depth = [
        v for name, v in values.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    ]
    assert sum(by_depth) == accepted and by_depth == sorted(by_depth, reverse=True)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds",
                 "e2e_request_latency_seconds"):  # fmt: skip
        assert values[f"vllm:{name}_count{label}"] > 0
    assert values[f"draftwood:latency_model_error_count{label}"] > 0
    assert 0 <= values[f"vllm:kv_cache_usage_perc{label}"] <= 1
    assert values[f"vllm:prefix_cache_hits_total{label}"] > 0


def test_a_round_of_several_requests_counts_once(running: Running, client: openai.OpenAI) -> None:
    def rounds() -> float:
        text = httpx.get(f"{running.url}/metrics").text
        return float(re.search(r'draftwood:round_tokens_count{model_name="tiny"} (\S+)', text)[1])

    before = rounds()
    ask(client, n=4, max_tokens=20, extra_body=SLOW)
    assert 19 <= rounds() - before < 40


def test_a_request_that_fails_is_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(llm) as running, monkeypatch.context() as patch:
        patch.setattr(Batch, "round", lambda self: 1 / 0)
        with pytest.raises(openai.InternalServerError):
            ask(openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0))
        assert 'finished_reason="error",model_name="tiny"} 1.0' in httpx.get(f"{running.url}/metrics").text


def test_nothing_of_a_prompt_is_logged(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="draftwood")
    ask(client, messages=[{"role": "user", "content": "my secret"}])
    assert not any("secret" in r.getMessage() for r in caplog.records if r.name.startswith("draftwood"))
