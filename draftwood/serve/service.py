"""One model and what every request to it goes through: parsed request in, OpenAI's answer out. No socket, no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.llm import LLM
from draftwood.serve.answer import Answer, Choice, Delta, live
from draftwood.serve.failure import Refused
from draftwood.serve.grammar import Grammars
from draftwood.serve.metrics import Metrics
from draftwood.serve.options import Options
from draftwood.serve.prompts import Prompts
from draftwood.serve.protocol import ChatRequest, CompletionRequest
from draftwood.serve.render import Chat, Completion, Renderer
from draftwood.serve.scheduler import LOG, Scheduler

Deltas = AsyncIterator[tuple[Choice, Delta]]
Prepared = tuple[list[list[int]], Renderer, int | None]  # prompts, what renders answers, `Request.likelihoods`


class Service:
    """The model, its worker, and its counters."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.options = llm, options
        self.name = options.name or called(llm.target.name)
        self.metrics = Metrics(self.name)
        self.scheduler = Scheduler(llm.engine, options, self.metrics)
        grammars = Grammars(llm.tokenizer, llm.target.vocab_size, llm.stop_ids)
        self.prompts = Prompts(llm, options, self.scheduler.max_len, self.scheduler.kv_tokens, grammars)
        self.started = int(time.time())
        if options.log_prompts:
            logging.basicConfig()  # to stderr, unless the process logs elsewhere
            LOG.setLevel(logging.INFO)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name, self.llm.target.name):
            raise Refused(404, f"The model {name!r} does not exist; this server has {self.name!r}.", "model_not_found")

    async def begin(self, asked: ChatRequest | CompletionRequest) -> Writing:
        """Queue the texts of all choices. Raises Refused and BadInput for what cannot be written."""
        self.check_model(asked.model)
        prompts, renderer, top = await asyncio.to_thread(self._prepare, asked)
        goes_on = isinstance(asked, CompletionRequest)
        answer = Answer(self.scheduler, self.llm.tokenizer, asked.stops, sum(map(len, prompts)), goes_on)

        def make() -> None:
            answer.make([job for ids in prompts for job in self.prompts.jobs(ids, asked, top)])

        await asyncio.to_thread(make)
        answer.submit()
        return Writing(self.llm, asked, answer, renderer, answer.deltas())

    def _prepare(self, asked: ChatRequest | CompletionRequest) -> Prepared:
        return self._chat(asked) if isinstance(asked, ChatRequest) else self._completion(asked)

    def _chat(self, asked: ChatRequest) -> Prepared:
        if self.options.log_prompts:
            LOG.info("chat: %s", asked.messages)
        if asked.top_logprobs and not asked.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true.", None, "top_logprobs")
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        renderer = Chat(self.name, self.llm.tokenizer, self.prompts.form(asked), asked.logprobs)
        return [self.prompts.chat(asked.messages, asked)], renderer, top

    def _completion(self, asked: CompletionRequest) -> Prepared:
        if self.options.log_prompts:
            LOG.info("completion: %s", asked.prompt)
        prompts = self.prompts.texts(asked.prompt)
        if len(prompts) * asked.n > self.options.max_n:
            raise Refused(400, f"At most {self.options.max_n} texts are written for a request.", None, "n")
        return prompts, Completion(self.name, self.llm.tokenizer, asked.logprobs is not None), asked.logprobs


def called(target: str) -> str:
    """What clients call the model: a Hub name as it is, of a folder only the last part."""
    path = Path(target).expanduser()
    return path.resolve().name if target.startswith(".") or path.is_absolute() else target


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """The texts of one request while they are written."""

    llm: LLM
    asked: ChatRequest | CompletionRequest
    answer: Answer
    renderer: Renderer
    deltas: Deltas

    async def whole(self) -> dict[str, Any]:
        """The body of the answer, once all is written. Raises Refused if it is given up."""
        told: dict[int, list[Delta]] = {choice.index: [] for choice in self.answer.choices}
        async for choice, delta in self.deltas:
            told[choice.index].append(delta)
        choices = [self.renderer.whole(choice, told[choice.index]) for choice in self.answer.choices]
        body = self.renderer.envelope(choices, streamed=False)
        return {**body, "usage": self.answer.usage, "metrics": self.answer.metrics}

    async def first(self) -> tuple[Choice, Delta]:
        """The first of the deltas, for `events`. Up to here a failure can still have an HTTP status of its own."""
        return await anext(self.deltas)

    async def events(self, first: tuple[Choice, Delta]) -> AsyncIterator[str]:
        """The stream, event by event; an error comes just before the end."""
        options, answer = self.asked.stream_options, self.answer
        try:
            for choice in answer.choices:
                for chunk in self.renderer.opening(choice):
                    yield json.dumps(self._chunk(chunk))
            async for choice, delta in _with(first, self.deltas):
                for chunk in self.renderer.chunks(choice, delta):
                    body = self._chunk(chunk)
                    if options and options.include_draftwood:
                        body["draftwood"] = live(choice, delta, self.llm)
                    yield json.dumps(body)
            if options and options.include_usage:
                body = self.renderer.envelope([], streamed=True)
                yield json.dumps({**body, "usage": answer.usage, "metrics": answer.metrics})
        except Refused as error:
            yield json.dumps(error.body())
        yield "[DONE]"

    def _chunk(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """As with OpenAI, chunks before the one with the usage have null there."""
        options, body = self.asked.stream_options, self.renderer.envelope([chunk], streamed=True)
        return {**body, "usage": None} if options and options.include_usage else body

    def close(self) -> None:
        """Give up what is not finished."""
        self.answer.close()


async def _with(first: tuple[Choice, Delta], rest: Deltas) -> Deltas:
    yield first
    async for pair in rest:
        yield pair
