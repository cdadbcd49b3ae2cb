"""`draftwood simulate --users`: recorded drafts replayed for many users at once, through the engine's own batch loop.

Each user asks one recorded prompt after the other and gets its recorded text. The batch decides for which users to
draft and shares the nodes among them, as in the engine; only the target is replaced, by the recorded text, and the
clock, by modelled seconds. Prompts cost nothing here: they are in the cache already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from draftwood.accept import Verdict
from draftwood.acceptance import AcceptanceModel
from draftwood.batch import Batch
from draftwood.bench.loads import Load
from draftwood.choosing import mean_context
from draftwood.clock import Clock
from draftwood.drafting import Proposal, grown, ran
from draftwood.footprint import Footprint
from draftwood.hardware import Hardware, Modelled, drafts_work
from draftwood.latency import LatencyModel, Work
from draftwood.limits import asked
from draftwood.policies.base import Costs, Policy
from draftwood.request import Part, Request
from draftwood.rounds import Prefix
from draftwood.sampling import Sampler, Sampling
from draftwood.simulate import Script
from draftwood.trace import Round
from draftwood.tree import matched

ANSWERS_EACH = 2  # for every user


@dataclass(frozen=True, slots=True)
class Priced:
    """Modelled seconds instead of a latency model that learns: nothing is timed, so there is nothing to learn."""

    modelled: Modelled

    @property
    def seen(self) -> int:
        return 0

    def costs(self, n_max: int, context: int) -> Costs:
        return self.modelled.costs(n_max, context)

    def draft_s(self, context: int) -> float:
        return self.costs(0, context).draft_s

    def position_s(self, context: int) -> float:
        return self.costs(0, context).position_s

    def predict(self, n: int, context: int, drafted: bool, padding: int = 0) -> dict[str, float]:
        return {}

    def observe(self, *rounds: Round, first: bool = False) -> None:
        pass

    def observe_draft(self, seconds: float, context: int, first: bool = False, positions: int | None = None) -> None:
        pass


def prices(machine: Hardware, sizes: Footprint, draft: Callable[[int], Work], more: int = 0) -> Callable[[int], Priced]:
    """What rounds of so many users cost, each with `more` tokens of context: weights are read once for all users."""
    made: dict[int, Priced] = {}

    def of(users: int) -> Priced:
        if users not in made:
            model = LatencyModel(
                machine.machine,
                lambda tokens, context: sizes.work(tokens, context + more, users),
                lambda context: drafts_work(draft, context + more, users),
            )
            made[users] = Priced(Modelled(model, machine.widths))
        return made[users]

    return of


@dataclass(slots=True, eq=False)
class Recorded:
    """Rounds without a target: drafts come from scripts, verdicts from their texts, seconds from `prices`."""

    prices: Callable[[int], Priced]
    scripts: dict[Request, Script] = field(default_factory=dict)
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0  # of all users
    drafted: int = 0
    run: int = 0  # tokens of the target
    batches: int = 0
    _parts: Sequence[Part] = ()
    _round: dict[str, float] = field(default_factory=dict)  # modelled seconds of the current one, by verb

    ahead = False
    widths = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def load(
        self, name: str, policy: str, users: int, plain: float, stored: float, price: float | None, measured: float
    ) -> Load:
        """The figures of what was played; `plain` are plain decoding's tokens per second, `stored` is in bytes."""
        return Load(
            name,
            policy,
            users,
            self.tokens_per_s,
            self.tokens_per_s / users,
            self.tokens_per_s / plain,
            self.tokens / self.rounds,
            self.run / self.batches,
            self.drafted / self.rounds,
            stored / 2**30,
            float("nan") if price is None else price / (3600 * self.tokens_per_s) * 1e6,
            measured,
        )

    def join(self, request: Request, prefix: Prefix | None = None) -> None:
        pass

    def leave(self, request: Request) -> None:
        self.scripts.pop(request)

    def propose(self, requests: Sequence[Request], drafts: Sequence[bool], clock: Clock) -> list[Proposal | None]:
        found = [self._proposal(request) if asks else None for request, asks in zip(requests, drafts, strict=True)]
        self.drafted += sum(map(bool, found))
        drafters = ran(found)
        self._round = {"draft": self.prices(drafters).costs(0, mean_context(requests)).draft_s} if drafters else {}
        return found

    def _proposal(self, request: Request) -> Proposal | None:
        script = self.scripts[request]
        if request.filled not in script.drafts:
            return None
        wanted = asked(request.policy, request.acceptance, request.remaining)
        tree = grown(request, script.draft(request.filled, wanted))
        return Proposal(tree, tree, 0 if request.filled in script.free else None)

    def verify(self, parts: Sequence[Part], clock: Clock) -> None:
        self._parts, users = parts, len(parts)
        width = sum(part.size for part in parts)
        costs = self.prices(users).costs(width - 1, mean_context([part.request for part in parts]))
        host = costs.aux_s[-1] if width > users else costs.plain_s - costs.verify_s[0]
        self._round |= {"verify": float(costs.verify_s[-1]), "commit": float(host)}
        self.seconds += sum(self._round.values())
        self.run, self.batches = self.run + width, self.batches + 1

    def draft_ahead(self, drafts: Sequence[bool]) -> None:
        raise AssertionError("these rounds draft when the tree is needed")

    def settle(self, clock: Clock) -> list[Verdict | None]:
        # Modelled seconds, not those of this process: what learns from them is to learn about the modelled machine.
        clock.seconds, clock.exposed = self._round, self._round["commit"]
        verdicts: list[Verdict | None] = []
        for part in self._parts:
            text = self.scripts[part.request].answer.continuation(part.request.filled)
            path = matched(part.tree, text)
            verdicts.append(Verdict(path, list(text[: len(path)]), int(text[len(path)])))
            self.tokens += 1 + len(path)
            self.rounds += 1
        return verdicts


def replay_load(policy: Policy, texts: Sequence[Script], price: Callable[[int], Priced], users: int) -> Recorded:
    """Run users side by side, each for `ANSWERS_EACH` answers or until every text was written; no user waits."""
    rounds = Recorded(price)
    batch = Batch(rounds, policy.n_max > 0, price)  # type: ignore[arg-type]  # it uses no other part of a latency model
    models: dict[float, AcceptanceModel] = {}
    queue = islice(cycle(texts), max(ANSWERS_EACH * users, len(texts)))
    while True:
        while len(batch.requests) < users and (script := next(queue, None)) is not None:
            request = _request(policy, script, models.setdefault(script.answer.temperature, AcceptanceModel()))
            rounds.scripts[request] = script
            batch.join(request)
        if len(batch.requests) < users:  # the last requests have more of the machine than one user would
            return rounds
        batch.round()


def _request(policy: Policy, script: Script, acceptance: AcceptanceModel) -> Request:
    """A user whose prompt is read and whose first token is written."""
    answer = script.answer
    sampler = Sampler(Sampling(answer.temperature), [0] * answer.prompt_tokens + [int(answer.tokens[0])])
    end = answer.prompt_tokens + len(answer.tokens)
    return Request(sampler, answer.prompt_tokens, end, policy, acceptance, filled=answer.prompt_tokens)
