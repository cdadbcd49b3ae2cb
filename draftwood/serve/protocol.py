"""What clients send: OpenAI's requests, the fields that vLLM added to them, and two of our own.

Unknown fields are refused, as OpenAI does. Fields that cannot change the text here (`user`, `store` …) are accepted and
ignored; so is whatever else a message has that a client got from a server and sends back.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from draftwood.sampling import LENIENT

Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
NAME = r"^[a-zA-Z0-9_-]{1,64}$"  # of a function


def _nullable(schema: dict[str, Any]) -> None:
    """Let the API's schema say that a field that may be left out may be null."""
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and field.get("default") is not None:
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], "default": field["default"]}


class Told(BaseModel):
    """A field that is null counts as left out: clients send null for whatever they do not set."""

    model_config = ConfigDict(json_schema_extra=_nullable)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in found.items() if value is not None or name not in optional}


class Strict(Told):
    model_config = ConfigDict(extra="forbid")


class Echoed(Told):
    """Part of a message: clients add what they parsed, and nulls for the fields of OpenAI's servers."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Strict):
    include_usage: StrictBool = False
    include_draftwood: StrictBool = Field(False, description="ours: each chunk tells what its round did")


class JsonSchema(Strict):
    name: StrictStr
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")
    description: StrictStr | None = None
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """`text`, `json_object`, `json_schema`, or ours: `grammar` in llguidance's Lark, or a regular expression."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    syntax: Literal["lark", "regex"] = "lark"
    definition: StrictStr | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("a response_format of type json_schema needs json_schema")
        if self.type == "grammar" and self.definition is None:
            raise ValueError("a response_format of type grammar needs a definition")
        return self


class Asked(Strict):
    """What completions and chat completions have in common."""

    model: StrictStr
    n: Count = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=LENIENT, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: StrictBool = False
    response_format: ResponseFormat | None = None
    policy: StrictStr | None = Field(None, description="ours: how much to verify, as on the command line")
    deadline: Annotated[float, Field(gt=0, le=86400)] | None = Field(None, description="ours: seconds")
    user: StrictStr | None = None
    store: StrictBool | None = None
    metadata: dict[str, str] | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None

    @model_validator(mode="after")
    def _streamed(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Asked):
    prompt: StrictStr | list[StrictStr] | list[Token] | list[list[Token]]
    logprobs: Annotated[int, Field(strict=True, ge=0)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None


class Part(Echoed):
    type: Literal["text"]
    text: StrictStr


class Refusal(Echoed):
    """What a model wrote instead of an answer."""

    type: Literal["refusal"]
    text: StrictStr = Field(alias="refusal")


class FunctionCall(Echoed):
    name: StrictStr
    arguments: StrictStr


class ToolCall(Echoed):
    id: StrictStr
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Echoed):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[Part | Refusal] | None = None
    name: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None
    refusal: StrictStr | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


class Function(Strict):
    name: Annotated[str, Field(strict=True, pattern=NAME)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: StrictStr


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _choice_of_tools(self) -> ChatRequest:
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice is only allowed when tools are given")
        return self


class TokenizeRequest(Strict):
    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    model: StrictStr | None = None
    tokens: Annotated[list[StrictInt], Field(max_length=1 << 20)]
