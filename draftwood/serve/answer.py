"""From rounds to what a client reads: text, why it ended, likelihoods, and how the rounds went."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftwood.accept import Likelihood
from draftwood.batch import Step
from draftwood.drafters.base import Drafter
from draftwood.drafters.pooled import Pooled
from draftwood.llm import LLM
from draftwood.request import Request
from draftwood.serve.failure import Refused
from draftwood.serve.scheduler import Job, Scheduler, finish_reason
from draftwood.text import TextStream
from draftwood.trace import Round
from draftwood.tree import Tree


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text and where it came from: `draft` at a depth of the tree, or the target's own `bonus`."""

    text: str
    token: int
    origin: str
    depth: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round adds to one choice."""

    text: str
    pieces: list[Piece]
    likelihoods: tuple[Likelihood, ...]
    step: Step
    finish: str | None  # `stop` or `length` in a choice's last delta


@dataclass(slots=True)
class Choice:
    """One of the texts that a client asked for."""

    index: int
    job: Job
    text: TextStream
    rounds: list[Round] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    def push(self, step: Step) -> Delta:
        """Add a step. Once `finish` is set, no further step may come."""
        request, pieces = self.job.request, []
        for i, token in enumerate(step.tokens):
            text = "" if token in request.stop_ids else self.text.push(token)
            drafted = i < len(step.path)
            pieces.append(Piece(text, token, "draft" if drafted else "bonus", i + 1))
            if self.text.stopped:
                break
        self.tokens += [piece.token for piece in pieces]
        self.rounds += [step.round] if step.round else []
        self.finish = self._ended(request, step)
        rest = self.text.flush() if self.finish else ""
        if rest:
            pieces[-1] = replace(pieces[-1], text=pieces[-1].text + rest)
        likelihoods = (step.likelihoods or ())[: len(pieces)]
        return Delta("".join(piece.text for piece in pieces), pieces, likelihoods, step, self.finish)

    def _ended(self, request: Request, step: Step) -> str | None:
        if self.text.stopped:
            return "stop"
        # The worker may be ahead: this step is the last if it holds the last token of the text.
        last = request.finished and len(self.tokens) == len(request.sampler.tokens) - request.prompt
        return finish_reason(self.job) if last else None


class Answer:
    """All choices of one HTTP request while they are written. Leaving it early gives up unfinished ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        prompt_tokens: int,
        goes_on: bool,
    ) -> None:
        """`goes_on`: an answer continues the text of its prompt."""
        self._scheduler, self._tokenizer, self._stops = scheduler, tokenizer, stops
        self._prompt_tokens, self._goes_on = prompt_tokens, goes_on
        self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Step | Refused]]()
        self.choices: list[Choice] = []

    def make(self, jobs: Sequence[Callable[[Callable[[Step | Refused], None]], Job]]) -> None:
        """Make a choice of each job, which is built from the callback for its steps. Raises Refused and BadInput."""
        for index, make in enumerate(jobs):
            job = make(self._teller(index))
            before = job.request.sampler.tokens if self._goes_on else ()
            self.choices.append(Choice(index, job, TextStream(self._tokenizer, self._stops, before)))

    def submit(self) -> None:
        """Queue all of them. Raises Refused if there is no room."""
        self._scheduler.submit([choice.job for choice in self.choices])

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """Rounds as they come, until every choice is finished. Raises Refused if one is given up."""
        try:
            while any(choice.finish is None for choice in self.choices):
                index, step = await self._arrived.get()
                choice = self.choices[index]
                if choice.finish is not None:
                    continue
                if isinstance(step, Refused):
                    raise step.with_traceback(None)  # several may raise it: none keeps the others' frames
                delta = choice.push(step)
                if delta.finish and not choice.job.request.finished:
                    self._scheduler.cancel(choice.job, delta.finish)
                yield choice, delta
        finally:
            self.close()

    def close(self) -> None:
        """Give up what is not finished."""
        for choice in self.choices:
            if choice.finish is None:
                self._scheduler.cancel(choice.job)

    def _teller(self, index: int) -> Callable[[Step | Refused], None]:
        return lambda step: _post(self._loop, self._arrived, (index, step))

    @property
    def usage(self) -> dict[str, Any]:
        prompt = self._prompt_tokens
        written = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    @property
    def metrics(self) -> dict[str, Any] | None:
        """vLLM's record of one request's speculation; None for several choices."""
        if len(self.choices) != 1:
            return None
        return {"speculative_decoding": speculation(self.choices[0].rounds, self.choices[0].job.request.policy.n_max)}


def _post(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], item: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, item)


def speculation(rounds: Sequence[Round], most: int) -> dict[str, Any]:
    """Field names are vLLM's. Histograms are by accepted tokens, over the rounds that verified a draft."""
    drafts = [r for r in rounds if r.n]
    drafted, accepted = sum(r.n for r in drafts), sum(r.accepted for r in drafts)
    by_length: dict[int, list[Round]] = {}
    for r in drafts:
        by_length.setdefault(r.n, []).append(r)
    return {
        "mean_acceptance_length": 1 + accepted / len(drafts) if drafts else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": _histogram(drafts),
        "acceptance_histogram_by_draft_length": {str(n): _histogram(some) for n, some in sorted(by_length.items())},
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
    }


def _histogram(rounds: Sequence[Round]) -> list[int]:
    counts = Counter(r.accepted for r in rounds)
    return [counts[n] for n in range(1 + max(counts, default=-1))]


def live(choice: Choice, delta: Delta, llm: LLM) -> dict[str, Any]:
    """What a round did, for clients that show it; docs/serve.md lists the fields."""
    step, record = delta.step, delta.step.round
    rounds = choice.rounds
    authors = _authors(llm.drafter, step.tree)
    drafters = [*(authors[node] for node in step.path), None]
    return {
        "pieces": [{**asdict(piece), "drafter": name} for piece, name in zip(delta.pieces, drafters, strict=False)],
        "tree": None if step.tree is None else _tree(step.tree, step.path, authors, llm.tokenizer),
        "drafter": llm.drafter.name if llm.drafter else None,
        "policy": choice.job.request.policy.name,
        "seconds": step.seconds,
        "context": None if record is None else record.context,
        "drafted": None if record is None else record.drafted,
        "width": None if step.tree is None else 1 + len(step.tree),
        "tau": 1 + sum(r.accepted for r in rounds) / len(rounds) if rounds else None,
        "tokens_per_s": _pace(choice),
        "predicted_s": record.predicted_s if record is not None and record.predicted else None,
        "plain_s": step.plain_s,
    }


def _authors(drafter: Drafter | None, tree: Tree | None) -> list[str | None]:
    """Which drafter each node is from; None for the root."""
    if tree is None:
        return []
    if isinstance(drafter, Pooled):
        return [None, *drafter.authors(tree)[1:]]
    return [None] + [drafter.name if drafter else None] * len(tree)


def _tree(
    tree: Tree, path: Sequence[int], authors: Sequence[str | None], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Parallel lists, the root first; `accepted` are indices."""
    return {
        "tokens": tree.tokens.tolist(),
        "texts": [str(tokenizer.decode([token])) for token in tree.tokens.tolist()],
        "parents": tree.parents.tolist(),
        "depths": tree.depths.tolist(),
        "mass": [round(float(mass), 5) for mass in tree.mass],
        "drafters": list(authors),
        "accepted": list(path),
    }


def _pace(choice: Choice) -> float | None:
    """Tokens after the first, per second of the rounds that wrote them."""
    seconds = sum(r.total_s for r in choice.rounds)
    return (len(choice.tokens) - 1) / seconds if seconds else None
