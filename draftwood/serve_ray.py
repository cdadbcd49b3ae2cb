"""The server on Ray Serve: as many replicas as the queue needs, and each request where its beginning is known.

    DRAFTWOOD_SERVE_NUM_REPLICAS=2 serve run draftwood.serve_ray:app
    serve.run(build_app(target=…, drafter=…, num_replicas=2))

Each replica is the whole server of `draftwood serve` without its socket. In front of them stands a thin `Door`, which
names the conversation that a request belongs to. Ray's consistent-hash router sends all requests of one name to the
same replica, or to the next one where that one is full, so that known prefixes are found.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from math import inf
from os import PathLike, fspath
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import Message

from draftwood import registry
from draftwood.config import deployed
from draftwood.errors import BadInput, BadModel, check_one_of, nearest
from draftwood.names import DTYPES, PATHS, model_name
from draftwood.serve.door import Door
from draftwood.serve.options import Options

LOG = logging.getLogger("draftwood.serve")
REPLICA = b"x-draftwood-replica"  # a header of answers
ROUTER: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
AHEAD = 2  # requests that a replica accepts for each that it can run at once; further ones go elsewhere
UPSCALE_S = 30.0  # that a queue must be too long before another replica starts: Ray's own default
TEXTS = ("target", "policy", "dtype", "device", "target_path", "name", "api_key")  # settings that are not read as JSON


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas there are, and what each gets."""

    replicas: int = 1
    most: int | None = None  # replicas, when the queue is long; None: always the same number
    gpus: float = 0.0
    cpus: float = 1.0
    doors: int = 1
    health_s: float = 10.0  # between two health checks of a replica

    def __post_init__(self) -> None:
        for name, count in (("num_replicas", self.replicas), ("num_doors", self.doors)):
            if count < 1:
                raise BadInput(f"{name} is {count}; it must be 1 or more.")
        if self.most is not None and self.most < self.replicas:
            raise BadInput(f"max_replicas is {self.most}; it must be no less than num_replicas, {self.replicas}.")
        for name, share in (("num_gpus", self.gpus), ("num_cpus", self.cpus)):
            if not 0 <= share < inf:
                raise BadInput(f"{name} is {share}; expected a number that is 0 or more.")
        if not 0 < self.health_s < inf:
            raise BadInput(f"health_check_s is {self.health_s}; it must be above 0 seconds.")


class Replica:
    """One model and its server."""

    def __init__(self, load: Callable[[], Any], options: Options) -> None:
        from draftwood.serve.app import build_app

        self._app = build_app(load(), options)
        self._scheduler = self._app.state.service.scheduler
        self._scheduler.start()
        self._id = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """What the application sends; closing the iterator tells it that the client is gone."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, given = asyncio.Event(), False

        async def receive() -> Message:
            nonlocal given
            if given:
                await gone.wait()
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        task = asyncio.create_task(self._app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (REPLICA, self._id)]
                yield message
        finally:
            gone.set()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and (error := task.exception()):  # there is no web server here to log it
                LOG.error("a request could not be answered", exc_info=error)

    async def metrics(self, scope: dict[str, Any]) -> tuple[str, str] | None:
        """This replica's id and the application's metrics; None if it refuses to give them."""
        start, *rest = [message async for message in self.answer(scope, b"")]
        told = b"".join(message.get("body", b"") for message in rest).decode()
        return (self._id.decode(), told) if start["status"] == 200 else None

    def check_health(self) -> None:
        """Called by Ray Serve now and then, which restarts a replica that raises."""
        if why := self._scheduler.sick:
            raise RuntimeError(why)


def application(load: Callable[[], Any], options: Options, scale: Scale) -> serve.Application:
    """Replicas of what `load` returns, an `LLM`, behind a door.

    A replica that is replaced may finish what it has begun, for as long as any request may take.
    """
    patience: dict[str, Any] = dict(
        graceful_shutdown_timeout_s=options.deadline_s, graceful_shutdown_wait_loop_s=0.5, health_check_timeout_s=30
    )
    size: dict[str, Any] = dict(num_replicas=scale.replicas)
    if scale.most is not None:
        target: dict[str, Any] = dict(target_ongoing_requests=options.max_concurrency, upscale_delay_s=UPSCALE_S)
        size = dict(autoscaling_config=dict(min_replicas=scale.replicas, max_replicas=scale.most, **target))
    replica = serve.deployment(
        name="Replica",
        ray_actor_options=dict(num_cpus=scale.cpus, num_gpus=scale.gpus),
        max_ongoing_requests=AHEAD * options.max_concurrency,
        max_queued_requests=max(1, options.max_waiting),
        health_check_period_s=scale.health_s,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **size,
        **patience,
    )(Replica)
    door = serve.deployment(
        name="Door",
        num_replicas=scale.doors,
        ray_actor_options=dict(num_cpus=0.1),
        max_ongoing_requests=1 << 16,
        **patience,
    )(Door)
    return door.bind(replica.bind(load, options), options)


def build_app(
    target: str | PathLike[str] | None = None,
    drafter: registry.Named | None = None,
    policy: str | None = None,
    *,
    num_replicas: int = 1,
    max_replicas: int | None = None,
    num_gpus: float | None = None,
    num_cpus: float = 1.0,
    num_doors: int = 1,
    health_check_s: float = 10.0,
    dtype: str = "auto",
    device: str = "auto",
    target_path: str = "auto",
    trust_remote_code: bool = False,
    **limits: Any,
) -> serve.Application:
    """What `serve.run` deploys.

    With `max_replicas` the number of replicas follows the queue. `num_gpus` and `num_cpus` are those of one replica;
    None: one GPU if this machine has any. Models are named as in `draftwood.load`, and `limits` are the settings of
    `draftwood serve` (`max_concurrency`, `api_key`, `kv_tokens` …) by their names in `Options`.

    Raises
    ------
    BadInput: a setting that does not exist, or a value that is not allowed.
    """
    given = {**locals(), **limits}  # before anything else is local
    _check_names(limits)
    _check_kinds(given)
    _check_models(target, drafter, policy)
    check_one_of("dtype", dtype, DTYPES)
    check_one_of("target_path", target_path, PATHS)
    options = Options(**limits)
    from draftwood.llm import load

    gpus = _gpus(device) if num_gpus is None else num_gpus
    make = partial(
        load, target, drafter, policy, dtype=dtype, device=device, target_path=target_path,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    scale = Scale(num_replicas, max_replicas, gpus, num_cpus, num_doors, health_check_s)
    return application(make, options, scale)


SETTINGS = [name for name in signature(build_app).parameters if name != "limits"]


def _check_names(limits: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(Options)]
    for name in limits:
        if name not in known:
            raise BadInput(f"Replicas have no setting {name!r}.{nearest(name, [*known, *SETTINGS])}")


def _check_kinds(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        kind = Sequence[str] if name == "cors" else _kind(name)  # a list will do, too
        try:
            TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            raise BadInput(f"{name} is {value!r}; expected {_told(kind)}.") from None


def _check_models(target: str | PathLike[str] | None, drafter: registry.Named | None, policy: str | None) -> None:
    """Check names as the command line does: here a mistake becomes one sentence, in a replica it would never start."""
    if drafter is not None:
        registry.check_drafters(drafter)
    if policy is not None:
        registry.policy(policy)
    if target is not None:
        try:
            model_name(fspath(target))
        except BadModel as why:
            raise BadInput(str(why)) from None


def _kind(name: str) -> Any:
    return (get_type_hints(Options) | get_type_hints(build_app)).get(name, Any)


def _told(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _gpus(device: str) -> float:
    import torch

    return float(device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()))


def _value(name: str, text: str) -> Any:
    """A setting from the environment: JSON if it can be read as such, else text. Raises BadInput for a wrong value."""
    value: Any = text
    if name not in TEXTS:
        with suppress(ValueError):
            value = json.loads(text)
    if name == "cors" and isinstance(value, str):
        value = [value]
    kind = _kind(name)
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        raise BadInput(f"DRAFTWOOD_SERVE_{name.upper()} is {text!r}; expected {_told(kind)}.") from None


def __getattr__(name: str) -> Any:
    """`app` is built when it is asked for, from DRAFTWOOD_SERVE_…; importing does nothing."""
    if name == "app":
        return build_app(**{key: _value(key, text) for key, text in deployed().items()})
    raise AttributeError(name)
