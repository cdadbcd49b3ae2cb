"""From a client's request to requests of the engine: prompts as tokens, sampling, rules and limits."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

from jinja2.exceptions import TemplateError
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from draftwood import registry
from draftwood.batch import Step
from draftwood.errors import BadInput
from draftwood.llm import LLM
from draftwood.policies.base import Policy
from draftwood.request import SPARE
from draftwood.sampling import Sampling
from draftwood.serve.failure import Refused
from draftwood.serve.grammar import ANY_OBJECT, Grammars, of_lark, of_regex, of_schema
from draftwood.serve.options import Options
from draftwood.serve.protocol import Asked, ChatRequest, Message, NamedTool, ResponseFormat
from draftwood.serve.rules import Shaping
from draftwood.serve.scheduler import Job
from draftwood.serve.tools import Form

# Parameters of `apply_chat_template` itself, not of the template: a client must not set them.
OWN = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"documents", "kwargs"}
WIDE = 256  # most nodes of a policy that a client names, if the server's own has no more

MakeJob = Callable[[Callable[[Step | Refused], None]], Job]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Turns requests into jobs for one model."""

    llm: LLM
    options: Options
    max_len: int
    kv_tokens: int
    grammars: Grammars

    # --- prompts -----------------------------------------------------------------------------------------
    def chat(self, messages: Sequence[Message], asked: ChatRequest | None = None, generate: bool = True) -> list[int]:
        """Token ids of a conversation through the model's chat template."""
        if self.llm.tokenizer.chat_template is None:
            raise BadInput("This model has no chat template; use /v1/completions.")
        tools = asked.tools if asked is not None and asked.tool_choice != "none" else None
        more = dict(asked.chat_template_kwargs or {}) if asked is not None else {}
        if taken := OWN & more.keys():
            message = f"chat_template_kwargs may not name {min(taken)}."
            raise Refused(400, message, None, "chat_template_kwargs")
        if tools:
            Form.of(self._template)  # refuses a template without tools
            more["tools"] = [_dumped(tool, exclude_none=True) for tool in tools]
        try:
            found: Any = self.llm.tokenizer.apply_chat_template(
                [_message(message) for message in messages],
                **{**more, "add_generation_prompt": generate, "return_dict": True, "tokenize": True},
            )
        except (TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise Refused(400, f"The chat template refuses these messages: {error}", None, "messages") from None
        return list(found["input_ids"])

    def texts(self, prompt: str | list[Any], special: bool = True) -> list[list[int]]:
        """Token ids of each prompt of a completion."""
        if isinstance(prompt, str):
            return [self.encode(prompt, special)]
        if not prompt:
            raise Refused(400, "The prompt is empty.", None, "prompt")
        if isinstance(prompt[0], int):
            return [self._checked(prompt)]
        return [self.encode(p, special) if isinstance(p, str) else self._checked(p) for p in prompt]

    def encode(self, text: str, special: bool = True) -> list[int]:
        try:
            return list(self.llm.tokenizer(text, add_special_tokens=special).input_ids)
        except (UnicodeError, TypeError):
            raise Refused(400, "The prompt is not valid Unicode text.", None, "prompt") from None

    def _checked(self, ids: Sequence[int]) -> list[int]:
        vocab = self.llm.target.vocab_size
        if any(token >= vocab for token in ids):
            raise Refused(400, f"A token of the prompt is {max(ids)}; this model has {vocab}.", None, "prompt")
        return list(ids)

    @property
    def _template(self) -> str | None:
        template = self.llm.tokenizer.chat_template
        if isinstance(template, dict):  # several named templates: transformers uses this one for tools
            template = template.get("tool_use") or template.get("default")
        return template if isinstance(template, str) else None

    # --- jobs --------------------------------------------------------------------------------------------
    def form(self, asked: ChatRequest) -> Form | None:
        """How tool calls are written, if the answer may have any."""
        return Form.of(self._template) if asked.tools and asked.tool_choice != "none" else None

    def jobs(self, ids: Sequence[int], asked: Asked, top: int | None) -> list[MakeJob]:
        """One job for each choice; they differ in their seed. `top`: see `Request.likelihoods`."""
        self._limits(asked, len(ids), top)
        seed = secrets.randbits(62) if asked.seed is None else asked.seed % 2**63  # OpenAI's may be negative
        grammar = self._grammar(asked)
        sampling = Sampling(
            asked.temperature, max(asked.top_k, 0), asked.top_p, asked.min_p, asked.repetition_penalty, seed
        )
        return [
            partial(self._job, list(ids), asked, replace(sampling, seed=(seed + i) % 2**63), grammar, top)
            for i in range(asked.n)
        ]

    def _job(
        self,
        ids: list[int],
        asked: Asked,
        sampling: Sampling,
        grammar: str | None,
        top: int | None,
        tell: Callable[[Step | Refused], None],
    ) -> Job:
        ends = frozenset(asked.stop_token_ids or ()) | (frozenset() if asked.ignore_eos else self.llm.stop_ids)
        rule = self._rule(len(ids), asked, ends, grammar)
        policy = self._policy(asked.policy)
        new = min(self._most(asked, len(ids)), self.max_len - len(ids))
        request = self.llm.engine.request(ids, new, sampling, ends, rule, policy)
        request.likelihoods = top
        until = time.monotonic() + min(asked.deadline or self.options.deadline_s, self.options.deadline_s)
        return Job(request, tell, until, rule)

    def _policy(self, name: str | None) -> Policy | None:
        """The policy that a client names, if it leaves room for the trees of others."""
        policy, most = registry.policy(name) if name else None, max(self.llm.engine.policy.n_max, WIDE)
        if policy is not None and policy.n_max > most:
            raise Refused(
                400, f"{name} verifies up to {policy.n_max} nodes; at most {most} are served.", None, "policy"
            )
        return policy

    def _rule(self, prompt: int, asked: Asked, ends: frozenset[int], grammar: str | None) -> Shaping | None:
        presence, frequency = asked.presence_penalty, asked.frequency_penalty
        if not (asked.logit_bias or presence or frequency or asked.min_tokens or grammar is not None):
            return None
        bias = {self._token(key): value for key, value in (asked.logit_bias or {}).items()}
        made = None if grammar is None else self.grammars.make(grammar)
        known = frozenset(end for end in ends if end < self.llm.target.vocab_size)  # a tokenizer's may be larger
        return Shaping(prompt, bias, presence, frequency, asked.min_tokens, known, made)

    def _token(self, key: str) -> int:
        known = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < self.llm.target.vocab_size
        if not known:
            raise Refused(400, f"logit_bias has the key {key[:99]!r}; expected token ids.", None, "logit_bias")
        return int(key)

    def _most(self, asked: Asked, prompt: int) -> int:
        """Tokens to write; where the client names no limit, no more than memory can hold."""
        if not isinstance(asked, ChatRequest):
            return asked.max_tokens or 16
        room = self.kv_tokens - prompt - 1 - SPARE
        return asked.max_completion_tokens or asked.max_tokens or max(1, min(self.options.default_max_tokens, room))

    def _grammar(self, asked: Asked) -> str | None:
        if isinstance(asked, ChatRequest) and asked.tools and asked.tool_choice not in (None, "none", "auto"):
            return self._forced_call(asked)
        return _of_format(asked.response_format)

    def _forced_call(self, asked: ChatRequest) -> str:
        functions = [_dumped(tool.function, exclude_none=True) for tool in asked.tools or ()]
        if isinstance(asked.tool_choice, NamedTool):
            name = asked.tool_choice.function.name
            functions = [function for function in functions if function["name"] == name]
            if not functions:
                raise Refused(400, f"tool_choice names {name!r}, which is not among the tools.", None, "tool_choice")
        return Form.of(self._template).grammar(functions)

    def _limits(self, asked: Asked, prompt: int, top: int | None) -> None:
        limits = self.options
        if prompt >= self.max_len:
            message = f"This model's maximum context length is {self.max_len} tokens; the prompt has {prompt}."
            param = "messages" if isinstance(asked, ChatRequest) else "prompt"
            raise Refused(400, message, "context_length_exceeded", param)
        if asked.n > limits.max_n:
            raise Refused(400, f"n is {asked.n}; this server allows {limits.max_n}.", None, "n")
        if top is not None and top > limits.max_top_logprobs:
            raise Refused(400, f"{top} log-probabilities were asked for; at most {limits.max_top_logprobs} are given.")
        if len(asked.stops) > limits.max_stops or any(not 0 < len(s) <= limits.max_stop_chars for s in asked.stops):
            message = f"stop: at most {limits.max_stops} strings of 1 to {limits.max_stop_chars} characters."
            raise Refused(400, message, None, "stop")
        vocab = self.llm.target.vocab_size
        if any(token >= vocab for token in asked.stop_token_ids or ()):
            raise Refused(400, f"stop_token_ids are ids below {vocab} for this model.", None, "stop_token_ids")
        forms = _dumped(asked.response_format) if asked.response_format else None
        tools = [_dumped(tool) for tool in asked.tools or ()] if isinstance(asked, ChatRequest) else []
        if len(json.dumps([forms, tools])) > limits.max_schema_bytes:
            raise Refused(400, f"Schemas may have {limits.max_schema_bytes} bytes in all.", None, "response_format")


def _dumped(part: BaseModel, **options: Any) -> dict[str, Any]:
    try:
        return part.model_dump(**options)
    except (ValueError, RecursionError):
        raise Refused(400, "A schema is nested too deeply.") from None


def _of_format(form: ResponseFormat | None) -> str | None:
    if form is None or form.type == "text":
        return None
    if form.type == "grammar":
        return (of_lark if form.syntax == "lark" else of_regex)(form.definition or "")
    return of_schema(ANY_OBJECT if form.json_schema is None else form.json_schema.schema_)


def _message(message: Message) -> dict[str, Any]:
    """As chat templates expect it: text as one string, arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        calls = [call.model_dump() for call in message.tool_calls]
        for call in calls:
            call["function"]["arguments"] = _object(call["function"]["arguments"])
        found["tool_calls"] = calls
    return found | {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
