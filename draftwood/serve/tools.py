"""Tool calls in the two forms that chat templates use: Hermes' `<tool_call>` tags and Llama's bare JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from draftwood.errors import BadInput
from draftwood.serve.grammar import of_lark
from draftwood.serve.protocol import NAME
from draftwood.text import overlap

DATA = ("const", "enum", "default", "examples")  # keys of a schema whose values are not schemas
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _number(text: str) -> float:
    """Raises ValueError for what no JSON can say: NaN, Infinity, and what becomes infinite as a float."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


JSON = json.JSONDecoder(parse_float=_number, parse_constant=_number)


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a model wrote."""

    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Form:
    """How a model writes a call."""

    opens: str  # text that only a call begins with
    key: str  # of the arguments

    @classmethod
    def of(cls, template: str | None) -> Form:
        """From a chat template. Raises BadInput if it knows no tools."""
        if template and "tools" in template and OPEN in template:
            return cls(OPEN, "arguments")
        if template and "tools" in template and '"parameters"' in template:
            return cls("{", "parameters")
        raise BadInput("This model's chat template knows no tools that draftwood can read; leave tools out.")

    def grammar(self, functions: Sequence[dict[str, Any]]) -> str:
        """Exactly one call of one of these functions."""
        places = ["#"] if len(functions) == 1 else [f"#/anyOf/{i}" for i in range(len(functions))]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": f["name"]},
                    self.key: an_object(f.get("parameters") or {}, f"{place}/properties/{self.key}"),
                },
                "required": ["name", self.key],
                "additionalProperties": False,
            }
            for place, f in zip(places, functions, strict=True)
        ]
        schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": {"whitespace_flexible": False}}
        body = f"call: %json {json.dumps(schema)}"
        tags = f'"{OPEN}\\n" call "\\n{CLOSE}"' if self.opens == OPEN else "call"
        return of_lark(f"start: {tags}\n{body}\n")

    def read(self, text: str) -> tuple[str, list[Call]]:
        """What is not a call, and the calls. What only looks like one stays text."""
        calls, rest, at, sought = [], [], 0, 0
        if self.opens != OPEN and not text.lstrip().startswith("{"):
            return text, []
        while (found := text.find(self.opens, sought)) >= 0:
            start = found + (len(OPEN) if self.opens == OPEN else 0)
            call, sought = self._call(text, start)
            if call is not None:
                rest.append(text[at:found])
                calls.append(call)
                at = sought
            elif self.opens != OPEN:  # a brace inside unreadable text does not begin a call
                break
        rest.append(text[at:])
        return ("".join(rest).strip() if calls else text), calls

    def _call(self, text: str, start: int) -> tuple[Call | None, int]:
        """The call that begins at `start`, if it is one, and where to read on."""
        start += len(text[start:]) - len(text[start:].lstrip())
        try:
            value, end = JSON.raw_decode(text, start)
        except (ValueError, RecursionError):
            return None, start
        arguments = value.get(self.key, value.get("arguments")) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or not _is_name(value.get("name")):
            return None, end
        close = text.find(CLOSE, end) if self.opens == OPEN else -1
        end = close + len(CLOSE) if close >= 0 and not text[end:close].strip() else end
        return Call(value["name"], json.dumps(arguments)), end


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(NAME, value) is not None


def an_object(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """`schema` at `place` of another one, for objects alone: a schema that names no type allows every type."""
    return {"allOf": [moved(schema, f"{place}/allOf/0"), {"type": "object"}]}


def moved(schema: Any, place: str) -> Any:
    """A schema moved to `place` of another one: its references begin there now."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references are relative to an $id
        return schema
    within = {key: part if key in DATA else moved(part, place) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        within["$ref"] = place + reference[1:]
    return within


class Sieve:
    """Lets text through while it streams and holds back what may be a call."""

    def __init__(self, form: Form) -> None:
        self._form, self._held, self._passed, self._caught = form, "", "", False

    def push(self, text: str) -> str:
        self._held += text
        if self._caught:
            return ""
        found = self._held.find(self._form.opens)
        if found >= 0 and (self._form.opens == OPEN or not (self._passed + self._held[:found]).strip()):
            self._caught = True
            return self._release(found)
        return self._release(len(self._held) - overlap(self._held, self._form.opens))

    def end(self) -> tuple[str, list[Call]]:
        """What is left of the text, and the calls in it."""
        text, calls = self._form.read(self._passed + self._held)
        passed, self._held = self._passed.lstrip() if calls else self._passed, ""
        return text[len(passed) :], calls

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        self._passed += text
        return text
