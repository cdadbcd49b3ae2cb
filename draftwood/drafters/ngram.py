"""Drafts from the text itself: takes its longest suffix that occurred before, and proposes what followed there.

Needs no model. How far to trust a match (by its length, how often it occurred and whether its followers agree) is
learned from what the target chose, so its masses are probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ref

from draftwood.drafters.automaton import automaton
from draftwood.drafters.options import parse
from draftwood.drafters.pooled import Voice
from draftwood.experts import Expert, Matches, Occurrences


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of the drafter, as in `ngram:max_depth=8`."""

    max_depth: int = field(default=24, metadata={"least": 1, "most": 64})  # tokens of the longest draft
    # how many tokens of earlier texts are searched, too; 0: none
    earlier: int = field(default=0, metadata={"least": 0, "most": 1_000_000})


@dataclass(eq=False)  # no slots: it is referred to weakly
class NgramState:
    """The tokens of one request, and every substring of those that were read so far."""

    tokens: list[int] = field(default_factory=list)
    read: int = 0  # tokens whose substrings are known
    substrings: Occurrences = field(default_factory=automaton)
    earlier: Occurrences | None = None  # the earlier texts that `elsewhere` belongs to
    elsewhere: tuple[int, int] = (0, 0)  # longest suffix of the tokens that earlier texts have: state, length

    def __deepcopy__(self, memo: object) -> NgramState:
        return NgramState(list(self.tokens))  # reading them again is quicker than copying what was found


@dataclass(slots=True, eq=False)
class Heard:
    """A text that grows, and how much of it has been added to the earlier texts."""

    state: ref[NgramState]
    tokens: list[int]  # the state's own list: it still holds the last tokens when the state is gone
    told: int


class NgramDrafter(Voice):
    """Reads no target features and has no weights; the same class serves every target."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.max_depth = options.max_depth
        self.name = "ngram"
        self._earlier = automaton()
        self._heard: list[Heard] = []

    @classmethod
    def load(cls, argument: str, target: object) -> NgramDrafter:
        """From what follows `ngram:`, for example `max_depth=8`; empty for the defaults. Raises BadInput."""
        return cls(parse(Options, "ngram", argument))

    def fresh(self) -> NgramDrafter:
        return NgramDrafter(self.options)

    def open(self, capacity: int) -> NgramState:
        """A fresh state; `capacity` does not matter. Texts opened before become earlier ones, as far as they got."""
        state = NgramState()
        self._listen(state)
        return state

    def extend(self, state: NgramState, tokens: list[int]) -> None:
        """Append tokens. Their substrings are added when a draft needs them: a text without drafts pays for none."""
        state.tokens += tokens

    def rewind(self, state: NgramState, length: int) -> None:
        """Keep the first `length` tokens. An automaton only grows, so a new one is built."""
        assert 0 <= length <= len(state.tokens), f"cannot rewind {len(state.tokens)} tokens to {length}"
        del state.tokens[length:]
        if state.read > length:
            state.read, state.substrings, state.elsewhere = 0, automaton(), (0, 0)
        self._listen(state)  # a copied state is not among the heard ones yet

    def experts(self, state: NgramState, root: int, source: int) -> list[Expert]:
        """Matches in the text itself and, if asked for, in earlier ones."""
        self._read(state)
        here = state.substrings
        found: list[Expert] = [Matches(here, here.step(*here.end, root), source, "ngram")]
        if self.options.earlier:
            found.insert(0, Matches(self._earlier, self._earlier.step(*state.elsewhere, root), source, "earlier"))
        return found

    def _read(self, state: NgramState) -> None:
        """Add every substring that ends in a token appended since."""
        if state.earlier is not self._earlier:
            state.earlier, state.elsewhere = self._earlier, (0, 0)
        unread = state.tokens[state.read :]
        state.substrings.extend(unread)
        if self.options.earlier:
            for token in unread:
                state.elsewhere = self._earlier.step(*state.elsewhere, token)
        state.read = len(state.tokens)

    def _listen(self, state: NgramState) -> None:
        """Let this text become an earlier one, too, from here on; add what the others have written so far."""
        if not self.options.earlier:
            return
        self._remember()
        if all(heard.state() is not state for heard in self._heard):
            self._heard.append(Heard(ref(state), state.tokens, len(state.tokens)))

    def _remember(self) -> None:
        """Add what was written since to the earlier texts; begin anew when these are full."""
        for heard in self._heard:
            news, heard.told = heard.tokens[heard.told :], len(heard.tokens)
            if not news:
                continue
            if self._earlier.states > 2 * self.options.earlier:
                self._earlier = automaton()
            self._earlier.part()
            self._earlier.extend(news)
        self._heard = [heard for heard in self._heard if heard.state() is not None]
