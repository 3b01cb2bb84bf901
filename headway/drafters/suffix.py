"""Suffix decoding: a request goes on as its own text, or finished outputs, went on most often.

A suffix automaton has all substrings of its texts and the number of times that each occurs. It grows
with each token. Each request has its own; finished outputs are in two shared ones, of which the older
is dropped when the newer is full. Outputs of requests with a `salt` are not shared, because the
speed of other requests would reveal them. An indexed token takes about 130 bytes and 5 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headway.checks import Checked, count, number
from headway.errors import ConfigError, shorten
from headway.request import Request

MAX_CONTEXT = 24  # last tokens of a request that are looked up in shared outputs
MAX_COUNTED = 32  # states whose count a new token increases
MAX_INDEXED = 1 << 15  # latest tokens of a request that its automaton has
MAX_ADDED = 4096  # tokens that one call adds to the automaton of a request
RESERVED = 256  # an automaton reserves a multiple of this number of tokens
NUM_COMPARED = 8  # tokens that show whether a text still is the one that was indexed
NO_EDGES: dict[int, int] = {}


@dataclass(frozen=True)
class suffix(Checked):
    """Draft what most often followed the longest suffix that occurs earlier.

    Drafts end before their probability, estimated from the occurrences, is below `min_probability`,
    and at `factor` times the length of the suffix. With `shared`, outputs of other requests are
    searched too. `max_tokens` of all requests are kept, and as many shared ones.
    """

    min: int = count(2, 1)
    factor: float = number(1.0, 0)
    min_probability: float = number(0.1, 0, 1)
    shared: bool = False
    max_tokens: int = count(1 << 20, 2 * RESERVED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shared, bool):
            raise ConfigError(f"suffix: shared must be True or False, not {shorten(self.shared)}")

    def __call__(self) -> SuffixDrafter:
        return SuffixDrafter(self)


class Edges:
    """A map from a state and a token to the next state, -1 if there is none.

    Most states have one edge, so only further edges are in dicts: a third of the memory.
    """

    __slots__ = ("_more", "_targets", "_tokens")

    def __init__(self) -> None:
        self._tokens, self._targets = array("i"), array("i")
        self._more: dict[int, dict[int, int]] = {}

    def add_state(self) -> None:
        self._tokens.append(-1)
        self._targets.append(-1)

    def add_copy(self, state: int) -> None:
        """Add a state that has the edges of another one."""
        if state in self._more:
            self._more[len(self._tokens)] = self._more[state].copy()
        self._tokens.append(self._tokens[state])
        self._targets.append(self._targets[state])

    def get(self, state: int, token: int) -> int:
        if self._tokens[state] == token:
            return self._targets[state]
        return self._more.get(state, NO_EDGES).get(token, -1)

    def set(self, state: int, token: int, target: int) -> None:
        if self._targets[state] < 0 or self._tokens[state] == token:
            self._tokens[state], self._targets[state] = token, target
        elif state in self._more:
            self._more[state][token] = target
        else:
            self._more[state] = {token: target}

    def of(self, state: int) -> list[tuple[int, int]]:
        """All pairs of token and next state."""
        if self._targets[state] < 0:
            return []
        first = (self._tokens[state], self._targets[state])
        return [first, *self._more.get(state, NO_EDGES).items()]


class SuffixAutomaton:
    """All substrings of the texts that were added, and how often they occur.

    A state stands for strings that end at the same places: suffixes of the longest one, `lengths`
    tokens. Its link leads to their longest suffix that ends at more places. State 0 is the empty
    string. A token is counted in the longest MAX_COUNTED states that it ends, so counts are exact
    except those of short strings in texts with a long period.
    """

    __slots__ = ("_counts", "_edges", "_last", "_latest", "_lengths", "_links", "size")

    def __init__(self) -> None:
        self.size = 0  # tokens added
        self._last = 0  # state of the whole text
        self._lengths, self._links = array("i", [0]), array("i", [-1])
        self._counts, self._latest = array("i", [0]), array("i", [0])  # occurrences, the last one
        self._edges = Edges()
        self._edges.add_state()

    def start_text(self) -> None:
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        counts, latest, links = self._counts, self._latest, self._links
        for token in tokens:
            self.size += 1
            state = self._last = self._next_state(token)
            for _ in range(MAX_COUNTED):
                if not state:
                    break
                counts[state] += 1
                latest[state] = self.size
                state = links[state]

    def longest_repeat(self) -> Match:
        """The longest suffix of the text that occurs earlier."""
        state = max(0, self._links[self._last])
        return Match(self, state, self._lengths[state])

    def match(self, tokens: Iterable[int]) -> Match:
        """The longest suffix of these tokens that occurs and is followed by a token."""
        edges, links, lengths = self._edges, self._links, self._lengths
        state = length = 0
        for token in tokens:
            while (target := edges.get(state, token)) < 0 and state:
                state = links[state]
                length = lengths[state]
            if target >= 0:
                state, length = target, length + 1
        while state and not edges.of(state):
            state = links[state]
            length = lengths[state]
        return Match(self, state, length)

    def continuation(self, state: int, most: int, rule: suffix) -> list[int]:
        """The most frequent next tokens, the latest of equally frequent ones; at most `most`."""
        counts, latest, drafts, probability = self._counts, self._latest, list[int](), 1.0
        while len(drafts) < most:
            edges = self._edges.of(state)
            if not edges:  # the end of a text: go on with a shorter suffix
                state = self._links[state]
                if state < 0 or self._lengths[state] < rule.min:
                    break
                continue
            total = sum([counts[target] for _, target in edges])
            token, state = max(edges, key=lambda edge: (counts[edge[1]], latest[edge[1]]))
            probability *= counts[state] / total
            if probability < rule.min_probability:
                break
            drafts.append(token)
        return drafts

    def _next_state(self, token: int) -> int:
        """The state of the text with one more token; it is made if it is new."""
        edges, lengths, links = self._edges, self._lengths, self._links
        state, target, new = self._last, -1, len(lengths)
        while state >= 0 and (target := edges.get(state, token)) < 0:
            edges.set(state, token, new)
            state = links[state]
        if is_new := state != self._last:
            edges.add_state()
            self._add(lengths[self._last] + 1, 0, 0, 0)
        if state >= 0 and lengths[target] != lengths[state] + 1:
            target = self._split(state, token, target)
        if not is_new:
            return target
        links[new] = max(target, 0)
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """Make a state for those strings of `target` that are one of `state` and the token."""
        edges, links, part = self._edges, self._links, len(self._lengths)
        edges.add_copy(target)
        counts = self._counts[target], self._latest[target]
        self._add(self._lengths[state] + 1, links[target], *counts)
        links[target] = part
        while state >= 0 and edges.get(state, token) == target:
            edges.set(state, token, part)
            state = links[state]
        return part

    def _add(self, length: int, link: int, num: int, latest: int) -> None:
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(num)
        self._latest.append(latest)


class Match(NamedTuple):
    """A string of an automaton, as the state and the number of tokens."""

    automaton: SuffixAutomaton
    state: int
    length: int


@dataclass(slots=True)
class TextIndex:
    """The automaton of a request. It has the latest tokens up to token `end`."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    end: int = 0
    tail: array[int] = field(default_factory=lambda: array("i"))  # the last tokens before `end`

    def add(self, tokens: array[int]) -> None:
        self.automaton.extend(tokens)
        self.end += len(tokens)
        self.tail = (self.tail + tokens)[-NUM_COMPARED:]

    @property
    def num_reserved(self) -> int:
        return _reserved(self.automaton.size)


class SuffixDrafter:
    """The drafter of the rule `suffix`.

    A request's automaton has its latest MAX_INDEXED tokens, fewer if `max_tokens` are reserved; a
    full one is made anew from the latest half. A call adds at most MAX_ADDED tokens, and until all
    are added the own text is not used. The last NUM_COMPARED tokens that were added are compared,
    so an output that was discarded is noticed.
    """

    def __init__(self, rule: suffix | None = None) -> None:
        self.rule = rule or suffix()
        self._own = WeakKeyDictionary[Request, TextIndex]()
        self._shared = [SuffixAutomaton(), SuffixAutomaton()]  # the newer, the older

    def propose(self, request: Request, most: int) -> list[int]:
        """What followed the longest suffix most often, in the own text if both have it."""
        rule = self.rule
        best = self._own_match(request)
        if self._shares(request) and best.length < MAX_CONTEXT:
            context = _tokens_from(request, max(0, request.num_known - MAX_CONTEXT))
            for automaton in self._shared:
                best = max(best, automaton.match(context), key=lambda match: match.length)
        if best.length < rule.min:
            return []
        limit = int(min(most, max(1.0, rule.factor * best.length)))
        return best.automaton.continuation(best.state, limit, rule)

    def forget(self, request: Request) -> None:
        """Drop the request's automaton; with `shared`, add its output to the shared ones."""
        self._own.pop(request, None)
        if not self._shares(request):
            return
        most = self.rule.max_tokens // 2
        output = request.output[-most:]
        if self._shared[0].size + len(output) > most:
            self._shared = [SuffixAutomaton(), self._shared[0]]
        self._shared[0].start_text()
        self._shared[0].extend(output)

    def _shares(self, request: Request) -> bool:
        return self.rule.shared and not request.params.salt

    def _own_match(self, request: Request) -> Match:
        """The longest suffix that occurs earlier in the own text; extends the automaton first."""
        index = self._own.get(request) or TextIndex()
        known = _tokens_from(request, index.end - len(index.tail))
        if known[: len(index.tail)] != index.tail:
            index, known = TextIndex(), request.tokens
        new = known[len(index.tail) :]
        num_wanted = _reserved(index.automaton.size + len(new))
        if num_wanted > index.num_reserved and num_wanted > (room := self._room(request)):
            start = request.num_known - room // 2
            index, new = TextIndex(end=start), _tokens_from(request, start)
        index.add(new[:MAX_ADDED])
        self._own[request] = index
        is_behind = len(new) > MAX_ADDED
        return Match(index.automaton, 0, 0) if is_behind else index.automaton.longest_repeat()

    def _room(self, request: Request) -> int:
        """The most tokens that the automaton of this request may reserve."""
        others = sum([own.num_reserved for key, own in self._own.items() if key is not request])
        left = min(MAX_INDEXED, self.rule.max_tokens - others)
        return left - left % RESERVED


def _reserved(num_tokens: int) -> int:
    return -(-num_tokens // RESERVED) * RESERVED


def _tokens_from(request: Request, start: int) -> array[int]:
    """The known tokens from this one on."""
    num_prompt, output = request.num_prompt, request.output
    return output[start - num_prompt :] if start >= num_prompt else request.prompt[start:] + output
