"""Text in, text out: one target, one drafter, one policy behind `generate` and `stream`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftwood import registry
from draftwood.assemble import build_engine
from draftwood.drafters.base import Carded
from draftwood.embedded import embedded_target
from draftwood.engine import Engine, Step
from draftwood.errors import BadInput
from draftwood.loading import load_target, load_tokenizer, parse_device, tokenized
from draftwood.parallel import ALONE, Group
from draftwood.policies.base import Policy
from draftwood.sampling import Sampling
from draftwood.text import TextStream
from draftwood.trace import Round, seconds_by_verb, tau
from draftwood.tree import Tree
from draftwood.watchdog import Circumstances, Watchdog

Messages = list[dict[str, str]]
LOG = logging.getLogger("draftwood")  # Python shows its warnings on stderr unless told otherwise


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text, and whether the drafter guessed its tokens or the target added them (bonus)."""

    text: str
    origin: Literal["draft", "bonus"]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One answer and how it came about. Seconds are wall time; prefill and decoding are counted separately."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: Literal["stop", "length", "abandoned"]
    policy: str
    rounds: list[Round]
    prefill_s: float
    decode_s: float

    @property
    def tau(self) -> float:
        """Tokens per round, the bonus token included; NaN if there was no round."""
        return tau(self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first, per second after the prefill."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s else float("nan")

    @property
    def widths(self) -> Counter[int]:
        """How many rounds verified how many tokens, the root included."""
        return Counter(1 + r.n for r in self.rounds)

    @property
    def mean_width(self) -> float:
        return float(np.mean([1 + r.n for r in self.rounds])) if self.rounds else float("nan")

    @property
    def seconds_by_verb(self) -> dict[str, float]:
        return seconds_by_verb(self.rounds)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; NaN becomes None."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "policy": self.policy,
            "tau": _number(self.tau),
            "rounds": len(self.rounds),
            "tokens_per_s": _number(self.tokens_per_s),
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "seconds_by_verb": self.seconds_by_verb,
            "widths": {str(width): count for width, count in sorted(self.widths.items())},
        }


@dataclass(slots=True, eq=False)
class _Record:
    """What a stream has seen so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    step: Step | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    reason: Literal["stop", "length", "abandoned"] = "abandoned"


class Stream:
    """An answer on its way: iterate over its pieces, stop whenever you like.

    `generation` is the answer so far (finish_reason "abandoned" until the end is reached).
    """

    def __init__(
        self,
        steps: Generator[Step, None, None],
        text: TextStream,
        stop_ids: frozenset[int],
        prompt_tokens: int,
        policy: str,
        ended: Callable[[Generation], None] = lambda generation: None,
    ) -> None:
        """`ended` is called with the answer when no more of it will come."""
        self._steps, self._text, self._stop_ids, self._ended = steps, text, stop_ids, ended
        self._prompt_tokens, self._policy = prompt_tokens, policy
        self._seen = _Record()
        self._pieces = self._watched()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def close(self) -> None:
        """Abandon the rest."""
        self._pieces.close()
        self._steps.close()

    @property
    def last_round_tree(self) -> Tree | None:
        """The tree that the last round verified."""
        return self._seen.step.tree if self._seen.step else None

    @property
    def last_accepted(self) -> list[int]:
        """The accepted nodes of `last_round_tree`."""
        return self._seen.step.path if self._seen.step else []

    @property
    def generation(self) -> Generation:
        seen = self._seen
        return Generation(
            "".join(seen.texts),
            list(seen.token_ids),
            self._prompt_tokens,
            seen.reason,
            self._policy,
            list(seen.rounds),
            seen.prefill_s,
            seen.decode_s,
        )

    def _watched(self) -> Generator[Piece, None, None]:
        try:
            yield from self._iterate()
        finally:
            self._ended(self.generation)

    def _iterate(self) -> Generator[Piece, None, None]:
        seen = self._seen
        for step in self._timed():
            for i, token in enumerate(step.tokens):
                seen.token_ids.append(token)
                text = "" if token in self._stop_ids else self._text.push(token)
                yield self._piece(text, "draft" if i < len(step.path) else "bonus", (token,))
                if self._text.stopped:
                    seen.reason = "stop"
                    self._steps.close()
                    return
        seen.reason = "stop" if seen.token_ids[-1] in self._stop_ids else "length"
        rest = self._text.flush()
        if rest:
            yield self._piece(rest, "bonus", ())

    def _timed(self) -> Iterator[Step]:
        seen = self._seen
        for step in self._steps:
            seen.step = step
            if step.round is None:
                seen.prefill_s = step.seconds
            else:
                seen.decode_s += step.seconds
                seen.rounds.append(step.round)
            yield step

    def _piece(self, text: str, origin: Literal["draft", "bonus"], ids: tuple[int, ...]) -> Piece:
        self._seen.texts.append(text)
        return Piece(text, origin, ids)


class LLM:
    """A target, a drafter and a policy, ready to write. Threads may share it: the rounds of their answers take turns.

    For many answers at once, `draftwood serve` and `draftwood batch` run rounds of all of them together.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.target, self.drafter = engine.target, engine.drafter
        promise = self.drafter.promised_tau if isinstance(self.drafter, Carded) else None
        self._watchdog = Watchdog(promise)
        end = tokenizer.eos_token_id
        self.stop_ids = self.target.stop_ids | (frozenset() if end is None else {end})

    def fresh(self) -> LLM:
        """The same models, for comparisons. It has learned nothing from texts, and it corrects prices for itself."""
        return LLM(self.engine.fresh(), self.tokenizer)

    def blind(self) -> LLM:
        """The same models without foresight, as in the papers, for comparisons. The texts are the same, but slower."""
        return LLM(self.engine.fresh(foresight=False), self.tokenizer)

    def with_drafter(self, drafter: registry.Named) -> LLM:
        """The same target with other drafters, for comparisons. Raises BadInput, BadModel."""
        return LLM(build_engine(self.target, drafter, self.engine.policy), self.tokenizer)

    def encode(self, prompt: str | Messages, system: str | None = None, raw: bool = False) -> list[int]:
        """Token ids of a prompt: through the chat template, or as it stands if `raw` or there is no template."""
        _check_prompt(prompt)
        if raw or self.tokenizer.chat_template is None:
            if not isinstance(prompt, str) or system is not None:
                raise BadInput("Messages and system prompts need a chat template; give plain text without --system.")
            return list(tokenized(self.tokenizer, prompt).input_ids)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            messages.insert(0, {"role": "system", "content": _readable(system)})
        template = self.tokenizer.apply_chat_template
        return list(tokenized(template, messages, add_generation_prompt=True, return_dict=True)["input_ids"])

    def stream(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Iterable[str] | None = (),
        system: str | None = None,
        raw: bool = False,
        policy: str | Policy | None = None,
    ) -> Stream:
        """Pieces of the answer as they come. See `Sampling` for the sampling values.

        Raises
        ------
        BadInput: a value out of range, an empty prompt, or one longer than the context window.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        rule = self.engine.policy if policy is None else _policy(policy)
        ids = self.encode(prompt, system, raw)
        self.engine.check(ids, max_new_tokens)
        steps = self.engine.run(ids, max_new_tokens, sampling, self.stop_ids, policy=rule)
        templated = not raw or self.tokenizer.chat_template is None
        ended = partial(self._watch, temperature, templated)
        goes_on = raw or self.tokenizer.chat_template is None
        text = TextStream(self.tokenizer, stop, ids if goes_on else ())
        return Stream(steps, text, self.stop_ids, len(ids), rule.name, ended)

    def generate(self, prompt: str | Messages, **options: Any) -> Generation:
        """The whole answer; takes what `stream` takes."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.generation

    def _watch(self, temperature: float, templated: bool, answer: Generation) -> None:
        where = Circumstances(temperature, "</think>" in answer.text or "<think>" in answer.text, templated)
        if sentence := self._watchdog.watch(answer.rounds, where):
            LOG.warning(sentence)


def load(
    target: str | PathLike[str] | None = None,
    drafter: registry.Named | None = None,
    policy: str | Policy | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    target_path: str = "auto",
    trust_remote_code: bool = False,
    width_invariant: bool = False,
    tensor_parallel: bool = False,
) -> LLM:
    """Load a target and a drafter by folder or Hugging Face name.

    With nothing named, it loads SmolLM2-135M-Instruct and the drafter that ships with draftwood.

    - `drafter`: several drafters, as a list, propose together. Where none is named, `ngram` and `recycling`, which need
      no training and work for every model, draft alone or help. `"none"` decodes plainly.
    - `target_path`: how the target's forward runs: auto (lean where the model allows it), lean or universal.
    - `width_invariant`: on a GPU in bf16 or fp16, too, every policy writes plain decoding's text to the bit; slower.
    - `tensor_parallel`: the processes that torchrun started hold a part of the target each, and run the same program
      with the same prompts; the first one decides and draws for all.
    """
    group = Group.join() if tensor_parallel else ALONE
    rule = _policy(policy or "bastion")  # before a model is loaded, which takes long: it may be a typo
    name = str(embedded_target()) if target is None else fspath(target)
    if drafter is None:
        drafter = default_drafters(target is None, parse_device(group.place(device)))
    weigh = partial(registry.drafter_bytes, drafter)
    model = load_target(name, dtype, device, target_path, trust_remote_code, weigh, width_invariant, group)
    return LLM(build_engine(model, drafter, rule), load_tokenizer(name, trust_remote_code))


def default_drafters(embedded: bool, device: torch.device) -> Sequence[str]:
    """The drafters where none is named. On a GPU a trained drafter stays alone, since a pool drafts on the host."""
    if not embedded:
        return registry.UNTRAINED
    return ["shipped", *(registry.UNTRAINED if device.type == "cpu" else ())]


def _check_prompt(prompt: object) -> None:
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise BadInput("The prompt is empty; give some text to continue or to answer.")
    messages = isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt)
    if not isinstance(prompt, str) and not messages:
        raise BadInput(f"The prompt is {prompt!r}; give a text, or a list of messages with role and content.")


def _policy(policy: str | Policy) -> Policy:
    return registry.policy(policy) if isinstance(policy, str) else policy


def _readable(system: str) -> str:
    try:
        system.encode()
    except UnicodeError:
        raise BadInput("The system prompt is not valid UTF-8 text; convert it first.") from None
    return system


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
