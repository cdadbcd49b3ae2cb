"""Several opinions about the next token as one conditional draft, weighed by what each was worth so far.

A block drafter's marginals know nothing of each other: after a sibling is taken they still describe what follows the
likeliest token. So they are corrected by s, what the target said earlier about the followers of the token before, in a
log-linear pool,

    p(y | x) = q_d(y)^a s(y | x)^b / Z,

and mixed with opinions g that know the whole path (earlier occurrences in the text, other drafters), each with a share
w that depends on its kind: p <- (1 - w) p + w g. All of a, b and w are learned from what the target chose: a and b by
the gradient of its log-probability, w by expectation maximisation. What is worthless gets a weight near 0. Formulas:
docs/drafters.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, inf, log
from operator import mul
from typing import Any, TypeAlias

from draftwood.experts import Expert, Opinion
from draftwood.noise import Ahead
from draftwood.pool_gain import Case, Gain, Gains
from draftwood.pool_weights import DEPTHS, Array, Weights, known
from draftwood.successors import Successors
from draftwood.tree import FAINT, Child, Growable, Ints, Tree
from draftwood.trellis import Block, Trellis

DEAD = -80.0  # log-probability below which tokens are all alike
FLOOR = 0.003  # probability that the successor table gives to a token that it does not list
LISTED = 16  # likeliest candidates of a row; all others count as a whole


Place: TypeAlias = tuple[int, int, tuple[Any, ...]]  # depth, token, each expert's own place


@dataclass(slots=True, eq=False)
class _Row:
    """One depth of a lattice: what the products there need, in plain numbers."""

    rank: dict[int, int]  # the index of each token
    powers: list[float]  # q^a by rank
    logp: list[float]
    total: float  # sum of all tokens' powers, including tokens that the row does not list


class _Rows:
    """A lattice or trellis, raised to an exponent for each depth. Growth visits few rows: they are made when needed."""

    def __init__(self, draft: Block, exponents: Sequence[float]) -> None:
        self._draft, self._exponents = draft, exponents
        self._apart = isinstance(draft, Trellis)  # whether rows depend on the token before
        self._rows: dict[tuple[int, int], _Row] = {}

    def at(self, depth: int, before: int) -> _Row | None:
        """The row behind the token `before`; None below the lattice."""
        if depth >= len(self._exponents):
            return None
        key = depth, before if self._apart else 0
        row = self._rows.get(key)
        if row is None:
            tokens, logp = self._draft.row(depth, before)
            row = self._rows[key] = _raised(tokens[:LISTED], logp[:LISTED], self._exponents[depth])
        return row


def _raised(tokens: list[int], logp: list[float], exponent: float) -> _Row:
    logp = [min(x, 0.0) if x > DEAD else DEAD for x in logp]  # NaN is dead
    powers = [exp(exponent * x) if x > DEAD else 0.0 for x in logp]
    rest = max(1 - sum(map(exp, logp)), 0.0)
    rank = dict(zip(tokens, range(len(tokens)), strict=True))
    return _Row(rank, powers, logp, max(sum(powers) + rest, 1e-30))


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Probabilities of a place's children: the `listed` ones, and `factor` times the powers of other tokens."""

    factor: float
    listed: dict[int, float]
    sources: dict[int, int]
    seen: int = 0  # times that the table saw the token before
    after: Mapping[int, float] = field(default_factory=dict)  # probabilities of what the table saw follow


@dataclass(frozen=True, slots=True)
class View:
    """A pool's opinion at a place: what it needs to learn from the token that was chosen there."""

    place: Place
    found: _Mixture  # the lattice's row, corrected
    row: _Row | None
    opinions: list[tuple[Opinion, int]]  # and their sources


class Pool(Growable):
    """A conditional draft below one root: a first lattice or none, the successor table or none, and experts."""

    faint = FAINT

    def __init__(
        self,
        root: int,
        lattice: Block | None,
        table: Successors | None,
        experts: Sequence[Expert],
        weights: Weights,
        max_depth: int,
        own: int = 0,
        table_source: int = 0,
        quicker: Quicker | None = None,
        case: Case | None = None,
    ) -> None:
        """`own` is the lattice's source, `table_source` that of tokens which only the table knows. `quicker` grows and
        learns faster where it can, and `case` records how good the pool was."""
        self.lattice, self.table, self.experts, self.weights = lattice, table, experts, weights
        self.root, self.max_depth, self.own, self.table_source = root, max_depth, own, table_source
        self._quicker, self.case = quicker, case or Gains().case(0, Gain())
        self._known: dict[tuple[int, int], _Mixture] = {}

    @cached_property
    def _rows(self) -> _Rows | None:
        if self.lattice is None or not len(self.lattice):
            return None
        a = self.weights.exponents[:, 0].tolist() if self.table else [1.0] * DEPTHS
        return _Rows(self.lattice, [a[min(d, DEPTHS - 1)] for d in range(len(self.lattice))])

    @property
    def asked(self) -> bool:
        return self.case.asks

    def grown(
        self,
        root: int,
        n_max: int,
        most: float,
        barren: float,
        ahead: Ahead | None = None,
        shifts: Ints | None = None,
        vocab: int = 0,
    ) -> Tree | None:
        """As in `Growable`. With `shifts` [max_depth] the tokens of each depth are moved on by so many of `vocab` ids
        (`worse.py`)."""
        assert root == self.root, f"this draft is of the root {self.root}, not of {root}"
        return self._quicker.grow(self, n_max, most, barren, ahead, shifts, vocab) if self._quicker else None

    def start(self) -> Place:
        return 0, self.root, tuple(expert.start() for expert in self.experts)

    def step(self, place: Place, token: int) -> Place:
        theirs = place[2]
        return (
            place[0] + 1,
            token,
            tuple(
                [None if at is None else e.step(at, token) for e, at in zip(self.experts, theirs, strict=True)],
            ),
        )

    def children(self, place: Place) -> Iterator[Child]:
        if place[0] >= self.max_depth:
            return
        mixture = self._mix(place)
        rest = self._rest(place, mixture)
        ahead = next(rest, None)
        for p, token in sorted([(p, token) for token, p in mixture.listed.items()], reverse=True):
            while ahead is not None and ahead[0] > p:
                yield -log(ahead[0]), ahead[1], self.own
                ahead = next(rest, None)
            if p <= 0:
                return
            yield -log(p), token, mixture.sources.get(token, self.own)
        while ahead is not None:
            yield -log(ahead[0]), ahead[1], self.own
            ahead = next(rest, None)

    def learn(self, chosen: Sequence[int]) -> None:
        """Learn from the tokens that the target wrote behind the root."""
        judged = self._quicker.learn(self, chosen) if self._quicker else None
        if judged is not None:
            for row in judged.tolist():
                self.case.judge(*row)
            return
        place = self.start()
        for token in chosen[: self.max_depth]:
            self.learn_at(self._view(place), token)
            place = self.step(place, token)

    def learn_at(self, view: View, token: int) -> None:
        """Learn from the `token` that the target wrote where the pool had this view."""
        place, weights, row = view.place, self.weights, view.row
        p, without = self._of(view.found, place, token), view.found.after.get(token, 0.0)
        for opinion, _ in reversed(view.opinions):
            own = opinion.probs.get(token, 0.0)
            share = weights.credit(opinion, p, own)
            p, without = p + share * (own - p), without + share * (own - without)
        if row is not None:
            rank = row.rank.get(token)
            self.case.judge(p, 0.0 if rank is None else exp(row.logp[rank]), without)
            self._follow_gradient(view, row, token)

    def expected(self, chosen: int) -> list[tuple[View, int]]:
        """Views along the likeliest path below `chosen`, each with its likeliest child, where the next view is; none if
        `chosen` is not the likeliest child of the root. What table and experts learn later does not change them."""
        views: list[tuple[View, int]] = []
        best, place = self._likeliest(), self.start()
        while best is not None and (views or best == chosen) and place[0] + 1 < self.max_depth:
            place = self.step(place, best)
            best = self._first(place)
            views.append((self._view(place), -1 if best is None else best))
        return views

    def _likeliest(self) -> int | None:
        """The root's likeliest child."""
        tree = self.grown(self.root, 1, inf, inf)
        return self._first(self.start()) if tree is None else next(iter(tree.tokens[1:].tolist()), None)

    def _first(self, place: Place) -> int | None:
        return next((token for _, token, _ in self.children(place)), None)

    def _view(self, place: Place) -> View:
        return View(place, self._corrected(*place[:2]), self._row(*place[:2]), self._opinions(place))

    def _mix(self, place: Place) -> _Mixture:
        """The mixture of all opinions about the children: each gets its share of what the better ones leave."""
        found, opinions = self._corrected(place[0], place[1]), self._opinions(place)
        if not opinions:
            return found
        left, shares = 1.0, []
        for opinion, source in opinions:
            share = self.weights.share(opinion)
            shares.append((left * share, opinion.probs, source))
            left *= 1 - share
        listed, sources = {token: left * p for token, p in found.listed.items()}, dict(found.sources)
        for share, probs, source in shares:
            for token, p in probs.items():
                before = listed.get(token)
                if before is None:
                    before = left * self._of(found, place, token)
                listed[token] = before + share * p
                if share * p > before:
                    sources[token] = source
        return _Mixture(left * found.factor, listed, sources)

    def _opinions(self, place: Place) -> list[tuple[Opinion, int]]:
        """Opinions and their sources, the best first."""
        pairs = zip(self.experts, place[2], strict=True)
        return [(opinion, e.source) for e, at in pairs if at is not None for opinion in e.opinions(at)]

    def _rest(self, place: Place, mixture: _Mixture) -> Iterator[tuple[float, int]]:
        """Probabilities, falling, and tokens of the lattice that the mixture does not list."""
        row = self._row(*place[:2])
        if row is not None:
            for power, token in zip(row.powers, row.rank, strict=True):
                p = mixture.factor * power
                if p <= 0:
                    return
                if token not in mixture.listed:
                    yield p, token

    def _of(self, mixture: _Mixture, place: Place, token: int) -> float:
        """A child's probability."""
        p = mixture.listed.get(token)
        if p is not None:
            return p
        row = self._row(*place[:2])
        rank = None if row is None else row.rank.get(token)
        return 0.0 if row is None or rank is None else mixture.factor * row.powers[rank]

    def _row(self, depth: int, before: int) -> _Row | None:
        return None if self._rows is None else self._rows.at(depth, before)

    def _corrected(self, depth: int, token: int) -> _Mixture:
        """The lattice's probabilities, given the token before."""
        key = depth, token
        if key not in self._known:
            self._known[key] = self._correct(depth, token)
        return self._known[key]

    def _correct(self, depth: int, token: int) -> _Mixture:
        seen, after = self.table.of(token) if self.table else (0, {})
        row = self._row(depth, token)
        if row is None:
            return _Mixture(0.0, after, dict.fromkeys(after, self.table_source), seen, after)
        b = float(self.weights.exponents[min(depth, DEPTHS - 1), known(seen)]) if seen else 0.0
        low = FLOOR**b
        total, least, listed, sources = row.total * low, 0.5 * row.powers[-1], {}, {}
        for follower, s in after.items():
            rank = row.rank.get(follower)
            if rank is None:
                weight = least * (s + FLOOR) ** b
                sources[follower] = self.table_source
            else:
                weight = row.powers[rank] * (s + FLOOR) ** b
                total -= row.powers[rank] * low
            listed[follower] = weight
            total += weight
        total = max(total, 1e-30)
        shares = {follower: weight / total for follower, weight in listed.items()}
        return _Mixture(low / total, shares, sources, seen, after)

    def _follow_gradient(self, view: View, row: _Row, chosen: int) -> None:
        """Move the exponents towards a larger log p(chosen): log q and log s there, less their means under p."""
        found, after = view.found, view.found.after
        rank, outside = row.rank, row.logp[-1]
        if self.table is None or not found.listed or (chosen not in rank and chosen not in found.listed):
            return
        mean_q, mean_s, spoken = found.factor * sum(map(mul, row.powers, row.logp)), 0.0, 0.0
        for token, p in found.listed.items():
            at = rank.get(token)
            log_q = outside if at is None else row.logp[at]
            mean_q += p * log_q - (0.0 if at is None else found.factor * row.powers[at] * log_q)
            mean_s += p * log(after.get(token, 0.0) + FLOOR)
            spoken += p
        mean_s += (1 - spoken) * log(FLOOR)
        log_q = row.logp[rank[chosen]] if chosen in rank else outside
        self.weights.move(view.place[0], 0, log_q - mean_q)
        self.weights.move(view.place[0], known(found.seen), log(after.get(chosen, 0.0) + FLOOR) - mean_s)


@dataclass(frozen=True, slots=True)
class Quicker:
    """Quicker ways to grow and to learn, for pools whose parts allow it; for others they return None."""

    # The pool; most nodes; the highest cost of a node and of one with children; noise ahead; the `shifts` and `vocab`
    # of `Pool.grown`.
    grow: Callable[[Pool, int, float, float, Ahead | None, Ints | None, int], Tree | None]
    # The pool and the chosen tokens -> `[n, 3]`: the probability that the pool gave each token, that of the lattice
    # alone, and that of all but the lattice.
    learn: Callable[[Pool, Sequence[int]], Array | None]
