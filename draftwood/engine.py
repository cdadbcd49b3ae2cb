"""What answers share: a target, a drafter, a policy, and what their rounds have taught. `batch.py` runs the rounds.

The engine knows tokens, not text. Engines share nothing but the models they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftwood.acceptance import AcceptanceModel, temperature_bucket
from draftwood.batch import Batch, Keep, Step
from draftwood.device.hosted import HostedRounds
from draftwood.device.rounds import Device, DeviceRounds
from draftwood.drafters.base import Drafter, Learner
from draftwood.errors import BadInput, check_one_of
from draftwood.latency import LatencyModel, Work
from draftwood.offline_profile import ConvexCosts
from draftwood.policies.base import Policy
from draftwood.request import Request
from draftwood.rounds import HostRounds, Rounds
from draftwood.sampling import Rule, Sampler, Sampling, finite
from draftwood.target import Target

BACKENDS = ("auto", "host", "device")
MOST_KINDS = 64  # pairs of policy and temperature whose acceptance is learned separately


@dataclass(frozen=True, slots=True)
class Backend:
    """Where rounds run, `host` or `device`, and why."""

    name: str
    reason: str


class Engine:
    """Tree speculative decoding with one target, drafter and policy, for one request or several at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: Policy,
        latency: LatencyModel,
        offline: ConvexCosts | None = None,
        remember: Callable[[], None] = lambda: None,
        backend: str = "auto",
        foresight: bool = True,
    ) -> None:
        """`latency` is the model for batches of one; `offline` prices policies that need convex costs; `remember` is
        called when a run ends. Without `foresight` trees ignore the random numbers of draws to come, as in the papers:
        the texts are the same and take longer.

        `backend` is auto (the device where it is a GPU and can run all of a request's rounds), host or device.

        Raises
        ------
        BadInput: an unknown backend, or the device for parts that cannot run there.
        """
        self.target, self.drafter, self.policy, self.latency = target, drafter, policy, latency
        self._offline, self.remember = offline, remember
        self._acceptance: dict[tuple[str, float], AcceptanceModel] = {}
        self._asked, self.device = backend, Device(target, drafter)
        self.foresight = foresight
        check_one_of("backend", backend, BACKENDS)
        if backend == "device" and (reason := self.device.declines(policy, None)):
            raise BadInput(f"Rounds cannot run on the device: {reason}; use the backend auto or host.")
        self._latencies = {(self.backend().name, 1): latency}
        self.tap()

    def tap(self) -> None:
        """Make the target return what this engine's drafter reads. Needed before each round: engines may share a
        target."""
        self.target.tap(self.drafter.tap_layers if self.drafter else ())

    def fresh(self, foresight: bool | None = None) -> Engine:
        """An engine of the same parts that has learned nothing from texts and keeps prices of its own, since another
        policy's rounds may differ.

        What it learns is not saved. It has `foresight` if this engine has, unless the argument says otherwise.
        """
        drafter = self.drafter.fresh() if isinstance(self.drafter, Learner) else self.drafter
        prices = {kind: model.copy() for kind, model in self._latencies.items()}
        made = Engine(
            self.target,
            drafter,
            self.policy,
            prices[next(iter(self._latencies))],
            self._offline,
            backend=self._asked,
            foresight=self.foresight if foresight is None else foresight,
        )
        made._latencies = prices
        return made

    def acceptance(self, policy: str, temperature: float) -> AcceptanceModel:
        """What texts have taught so far about the trees of a policy, at a temperature and those in its bucket."""
        kind, known = (policy, temperature_bucket(temperature)), list(self._acceptance)
        if kind not in known and len(known) >= MOST_KINDS:  # clients may name any number of policies
            others = (old for old in known if old[0] != self.policy.name)
            self._acceptance.pop(next(others, kind), None)
        return self._acceptance.setdefault(kind, AcceptanceModel())

    def experience(self) -> list[list[object]]:
        """What texts have taught about acceptance, for `recall` in a later process with the same target and drafter."""
        models = ((*kind, model.to_json()) for kind, model in list(self._acceptance.items()))
        return [[policy, kind, known] for policy, kind, known in models if known]

    def recall(self, experience: Any) -> None:
        """Go on from what `experience` gave. Raises BadInput, changing nothing, if it is anything else."""
        try:
            found = {(str(policy), float(kind)): AcceptanceModel.of_json(row) for policy, kind, row in experience}
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise BadInput("This is not what this version keeps of acceptance; it will be learned anew.") from None
        self._acceptance |= found

    def backend(self, policy: Policy | None = None, rule: Rule | None = None) -> Backend:
        """Where the rounds of a request would run if it started now, alone."""
        if self._asked == "host":
            return Backend("host", "it was asked for")
        if self._asked == "auto" and self.target.device.type != "cuda":
            return Backend("host", f"on a {self.target.device.type} nothing is gained by static shapes")
        reason = self.device.declines(policy or self.policy, rule)
        if reason is not None:
            return Backend("host", reason)
        all_of_it = "everything but the draft" if self.device.hosted else "every part of the round"
        return Backend("device", f"{all_of_it} can run there")

    def run(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
        rule: Rule | None = None,
        policy: Policy | None = None,
        heat: float | None = None,
    ) -> Generator[Step, None, None]:
        """Yield the rounds of one answer; the first step is the token that follows the prompt.

        Stops after `max_new_tokens`, or with the first token of `stop_ids` (which is emitted). If a `rule` applies a
        temperature itself, `heat` may name that temperature, so that drafts can foresee draws. Closing the iterator at
        any time is harmless. Several threads may run answers at once: their rounds take turns.
        """
        with self.target.lock:
            request = self.request(prompt, max_new_tokens, sampling, stop_ids, rule, policy, heat)
            batch = self.batch_of_one(request.policy, rule)
        try:
            with self.target.lock:
                batch.join(request)
            while not request.finished:
                with self.target.lock:
                    self.tap()
                    steps = batch.round()
                yield from steps.values()
        finally:
            with self.target.lock:
                batch.close()
                self.remember()

    def batch(self, keep: Keep = lambda request, prefix: None) -> Batch:
        """Rounds on the host for any number of requests, which may join at any time.

        `keep` gets what the caches hold of each request that leaves.
        """
        return self._batch(HostRounds(self.target, self.drafter), "host", keep)

    def request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] = frozenset(),
        rule: Rule | None = None,
        policy: Policy | None = None,
        heat: float | None = None,
    ) -> Request:
        """A request that may join a batch. Raises BadInput for one that cannot be served."""
        self.check(prompt, max_new_tokens)
        sampling, policy = sampling or Sampling(), policy or self.policy
        end = min(self.target.context_limit, len(prompt) + int(max_new_tokens))
        acceptance = self.acceptance(policy.name, sampling.temperature)
        sampler = Sampler(sampling, prompt, rule, heat)
        foresees = self.foresight and not sampling.greedy
        return Request(sampler, len(prompt), end, policy, acceptance, stop_ids, foresees=foresees)

    def check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raise BadInput for a request that cannot be served."""
        if not prompt:
            raise BadInput("The prompt is empty; give at least one token of text.")
        known = self.target.vocab_size
        strange = next((token for token in (min(prompt), max(prompt)) if not 0 <= token < known), None)
        if strange is not None:
            raise BadInput(
                f"The prompt has the token id {strange}, but {self.target.name} knows the ids 0 to {known - 1}; "
                "encode it with this model's own tokenizer."
            )
        limit = self.target.context_limit
        if len(prompt) >= limit:
            raise BadInput(
                f"The prompt has {len(prompt)} tokens, but {self.target.name} has a context window of {limit}; "
                "shorten the prompt or name a target with a longer window."
            )
        if not finite(max_new_tokens) or max_new_tokens != int(max_new_tokens) or max_new_tokens < 1:
            raise BadInput(f"max_new_tokens is {max_new_tokens!r}; it must be a whole number from 1 up.")

    def latency_of(self, requests: int, backend: str) -> LatencyModel:
        """The latency model of a `backend`'s rounds of so many requests; sizes above 4 share that of the next power of
        two."""
        size = requests if requests <= 4 else 1 << (requests - 1).bit_length()
        kind = backend, size
        if kind not in self._latencies:
            verify = partial(self.target.work, requests=size)
            draft = partial(_drafts_work, self.drafter, size) if self.drafter else None
            nearest = min(self._latencies, key=lambda known: (known[0] != backend, abs(known[1] - size)))
            self._latencies[kind] = self._latencies[nearest].resembling(verify, draft)
        return self._latencies[kind]

    def batch_of_one(self, policy: Policy, rule: Rule | None, keep: Keep = lambda request, prefix: None) -> Batch:
        """A batch for a single request, on the backend where its rounds run best."""
        if self.backend(policy, rule).name == "device":
            made = HostedRounds if self.device.hosted else DeviceRounds
            return self._batch(made(self.device, self.target), "device", keep)
        return self.batch(keep)

    def _batch(self, rounds: Rounds, backend: str, keep: Keep) -> Batch:
        # Prices are learned per backend: captured rounds take a half or a third of eager ones, which an engine with a
        # device runs for some requests, too.
        prices = partial(self.latency_of, backend=backend)
        return Batch(rounds, self.drafter is not None, prices, self._offline, keep, self.target.group.decide)


def _drafts_work(drafter: Drafter, requests: int, context: int) -> Work:
    """The work of drafts for several requests, which read the weights once."""
    one = drafter.work(context)
    return Work(one.flops * requests, one.bytes, one.launches * requests)
