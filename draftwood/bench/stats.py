"""From runs to figures: rates, ratios with bootstrap intervals, and what the rounds were made of.

Every definition is written out in docs/benchmarks.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.trace import Errors, Round, prediction_errors, seconds_by_verb, tau

PLAIN = "autoregressive"  # our own plain decoding: the policy of that name
TRANSFORMERS = "transformers"  # transformers.generate on the same weights
HOST_VERBS = ("grow", "choose", "accept", "commit", "observe")
RESAMPLES = 2000
WHAT_IF_TAUS = (3, 5, 7)
WHAT_IF_ROUNDS = 5  # a width seen less often says too little about its round time
NAN = float("nan")

Totals = NDArray[np.float64]  # [..., 2]: decoded tokens and decode seconds


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One method's answer to one turn of one prompt."""

    prompt: str
    dataset: str
    turn: int
    method: str
    text: str
    tokens: int  # generated, a stop token included
    prefill_s: float  # until the first token came
    decode_s: float  # from the first token to the last
    rounds: Sequence[Round] = ()
    identical: bool | None = None  # to plain decoding's text; None where equality is not to be expected
    prompt_tokens: int = 0
    token_ids: Sequence[int] = ()
    tie: float | None = None  # if it parts from plain decoding's: how near the two tokens are, see `partings.tie`

    def to_json(self) -> dict[str, Any]:
        """Everything but the token ids and the rounds, of which only the number is kept."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "token_ids"}
        return {**fields, "rounds": len(self.rounds)}


@dataclass(frozen=True, slots=True)
class MethodStats:
    """One method over all prompts. NaN or None: not known."""

    prompts: int
    identical: int | None  # prompts whose texts, all turns, equal plain decoding's
    tokens: int
    tokens_per_s: float  # decoding alone
    end_to_end_tokens_per_s: float  # prefill included
    speedup_vs_transformers: float  # ratios of tokens_per_s
    speedup_vs_plain: float
    speedup_vs_transformers_interval: tuple[float, float] | None  # 95 %
    speedup_vs_plain_interval: tuple[float, float] | None
    tau: float  # tokens per round, the bonus token included
    mean_width: float  # tokens per target forward, the root included
    rounds: int
    draftless_rounds: int
    prefill_s: float
    decode_s: float
    first_token_ms: float  # median
    round_ms: float  # median
    verb_ms: Mapping[str, float]  # mean of a round
    host_share: float  # of the rounds' seconds, see HOST_VERBS
    widths: Mapping[int, int]  # tokens verified, the root included -> rounds
    accepted: Mapping[int, int]  # nodes accepted -> rounds
    ties: Sequence[float]  # of the turns that part from plain decoding's, see `partings.tie`
    latency_errors: Mapping[str, Errors]  # of draft, verify, aux and the whole round, each predicted beforehand

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = jsonable(asdict(self))
        return fields


def summarize(runs: Sequence[Run], methods: Sequence[str], seed: int = 0) -> dict[str, MethodStats]:
    """Figures of each method over `runs`, which hold all methods for each turn that they hold."""
    prompts = list(dict.fromkeys(r.prompt for r in runs))
    by_method = {m: [r for r in runs if r.method == m] for m in methods}
    totals = {m: decode_totals(by_method[m], prompts) for m in methods}
    return {m: method_stats(by_method[m], totals[m], totals, seed) for m in methods}


def method_stats(runs: Sequence[Run], ours: Totals, totals: Mapping[str, Totals], seed: int) -> MethodStats:
    rounds = [r for run in runs for r in run.rounds]
    tokens = sum(r.tokens for r in runs)
    prefill_s, decode_s = sum(r.prefill_s for r in runs), sum(r.decode_s for r in runs)
    theirs, plain = totals[TRANSFORMERS], totals[PLAIN]
    return MethodStats(
        prompts=len(ours),
        identical=identical_prompts(runs),
        tokens=tokens,
        tokens_per_s=float(rate(ours.sum(0))),
        end_to_end_tokens_per_s=quotient(tokens, prefill_s + decode_s),
        speedup_vs_transformers=speedup(ours, theirs),
        speedup_vs_plain=speedup(ours, plain),
        speedup_vs_transformers_interval=bootstrap(ours, theirs, seed),
        speedup_vs_plain_interval=bootstrap(ours, plain, seed),
        tau=tau(rounds) if rounds else 1.0,  # without rounds, every forward runs and emits one token
        mean_width=1 + float(np.mean([r.n for r in rounds])) if rounds else 1.0,
        rounds=len(rounds),
        draftless_rounds=sum(not r.drafted for r in rounds),
        prefill_s=prefill_s,
        decode_s=decode_s,
        first_token_ms=1e3 * median(r.prefill_s for r in runs),
        round_ms=1e3 * median(r.total_s for r in rounds),
        verb_ms={v: 1e3 * s / len(rounds) for v, s in seconds_by_verb(rounds).items()} if rounds else {},
        host_share=host_share(rounds),
        widths=histogram(1 + r.n for r in rounds),
        accepted=histogram(r.accepted for r in rounds),
        ties=sorted(r.tie for r in runs if r.tie is not None),
        latency_errors=prediction_errors(rounds),
    )


def decode_totals(runs: Sequence[Run], prompts: Sequence[str]) -> Totals:
    """`[P, 2]` tokens after the first and the seconds they took."""
    return totals_by_prompt(runs, prompts, lambda run: (max(0, run.tokens - 1), run.decode_s))


def rate(totals: Totals) -> NDArray[np.float64]:
    """Tokens per second of `[..., 2]` totals; NaN where no time passed."""
    tokens, seconds = totals[..., 0], totals[..., 1]
    return np.divide(tokens, seconds, out=np.full(tokens.shape, NAN), where=seconds > 0)


def speedup(ours: Totals, theirs: Totals) -> float:
    return quotient(float(rate(ours.sum(0))), float(rate(theirs.sum(0))))


def bootstrap(ours: Totals, theirs: Totals, seed: int) -> tuple[float, float] | None:
    """95 % interval of the ratio of rates over resampled prompts; None for fewer than two prompts.

    The same prompts are drawn for both sides, so that what a prompt does to both of them cancels out. Plain percentiles
    are too narrow for few prompts (88 % with 8), so they are taken further out: the expanded percentile interval of
    Hesterberg, "What teachers should know about the bootstrap" (arXiv 1411.5279).
    """
    count = len(ours)
    if count < 2:
        return None
    picks = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    numerator, denominator = rate(ours[picks].sum(1)), rate(theirs[picks].sum(1))
    known = denominator > 0
    if not known.any():
        return None
    tail = tail_of(count)
    low, high = np.nanquantile(numerator[known] / denominator[known], [tail, 1 - tail])
    return float(low), float(high)


def tail_of(count: int) -> float:
    """The share of resamples of `count` values that is left out on each side, so that 95 % intervals of a mean are as
    wide as Student's, whose quantile is expanded around the normal one (Abramowitz and Stegun, 26.7.5)."""
    normal, freedom = NormalDist(), count - 1
    z = normal.inv_cdf(0.975)
    student = z + sum(
        (
            (z**3 + z) / (4 * freedom),
            (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
        )
    )
    return normal.cdf(-sqrt(count / freedom) * student)


def compare(ours: Sequence[Run], theirs: Sequence[Run], seed: int = 0) -> dict[str, Any]:
    """Ratios of decoding speed, of speed with the prefill, and of tau, each with its 95 % interval over prompts."""
    prompts = list(dict.fromkeys(run.prompt for run in ours))
    figures: dict[str, Callable[[Run], tuple[float, float]]] = {
        "speed": lambda run: (max(0, run.tokens - 1), run.decode_s),
        "end_to_end": lambda run: (run.tokens, run.prefill_s + run.decode_s),
        "tau": lambda run: (sum(1 + r.accepted for r in run.rounds), len(run.rounds)),
    }
    found: dict[str, Any] = {}
    for name, amounts in figures.items():
        mine, other = (totals_by_prompt(runs, prompts, amounts) for runs in (ours, theirs))
        found |= {name: speedup(mine, other), f"{name}_interval": bootstrap(mine, other, seed)}
    return found


def totals_by_prompt(runs: Sequence[Run], prompts: Sequence[str], of: Callable[[Run], tuple[float, float]]) -> Totals:
    """`[P, 2]` two amounts of each run, summed over the turns of each prompt."""
    rows = {prompt: i for i, prompt in enumerate(prompts)}
    totals = np.zeros((len(prompts), 2))
    for run in runs:
        totals[rows[run.prompt]] += of(run)
    return totals


def identical_prompts(runs: Iterable[Run]) -> int | None:
    """Prompts all of whose turns have plain decoding's text; None where that is not to be expected."""
    turns = [(run.prompt, run.identical) for run in runs]
    if any(same is None for _, same in turns):
        return None
    return len({prompt for prompt, _ in turns} - {prompt for prompt, same in turns if not same})


def host_share(rounds: list[Round]) -> float:
    seconds = seconds_by_verb(rounds)
    return quotient(sum(seconds[verb] for verb in HOST_VERBS), sum(seconds.values()))


def what_if(rounds: Sequence[Round], plain_tokens_per_s: float) -> dict[int, dict[str, Any]]:
    """Extrapolation by width: tokens per second if a round took its measured time and emitted tau tokens.

    Leaves out widths seen in fewer than WHAT_IF_ROUNDS drafted rounds and a tau above the width, which no
    round can reach.
    """
    seconds: dict[int, list[float]] = {}
    for r in rounds:
        if r.drafted:
            seconds.setdefault(1 + r.n, []).append(r.total_s)
    return {
        width: extrapolate(width, times, plain_tokens_per_s)
        for width, times in sorted(seconds.items())
        if len(times) >= WHAT_IF_ROUNDS
    }


def extrapolate(width: int, seconds: list[float], plain_tokens_per_s: float) -> dict[str, Any]:
    round_s = median(seconds)
    rates = {t: t / round_s for t in WHAT_IF_TAUS if t <= width}
    return {
        "rounds": len(seconds),
        "round_ms": 1e3 * round_s,
        "tokens_per_s": rates,
        "speedup_vs_plain": {t: quotient(r, plain_tokens_per_s) for t, r in rates.items()},
    }


def quotient(a: float, b: float) -> float:
    """a / b; NaN instead of a division by nothing."""
    return a / b if b > 0 else NAN


def median(values: Iterable[float]) -> float:
    found = list(values)
    return float(np.median(found)) if found else NAN


def histogram(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def jsonable(value: Any) -> Any:
    """The same value with keys as text and None for NaN and infinity, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
