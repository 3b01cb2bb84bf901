"""Suffix decoding: a request goes on as its own text, or finished outputs, went on most often.

Each request has a suffix automaton, which grows with each token. Finished outputs are in two shared
ones; when the newer is full, the older is dropped. Outputs of requests with a `salt` are not shared,
because the speed of other requests would reveal them.
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
MAX_COUNTED = 16  # states in which a token is counted
MAX_INDEXED = 1 << 15  # latest tokens of a request that its automaton has
MAX_ADDED = 4096  # tokens that one call adds to the automaton of a request
NUM_COMPARED = 8  # tokens that show whether a text still is the one that was indexed
RESERVED = 256  # an automaton reserves a multiple of this number of tokens


@dataclass(frozen=True)
class suffix(Checked):
    """Draft what most often followed the longest suffix that occurs earlier.

    The suffix has at least `min` tokens, a draft at most `factor` times as many. A draft ends before
    its probability, estimated from the occurrences, is below `min_probability`. With `shared`,
    finished outputs are searched too. At most `max_tokens` tokens of running requests are kept, and
    as many of finished outputs; a token takes about 400 bytes.
    """

    min: int = count(2, 1)
    factor: float = number(1.0, 0)
    min_probability: float = number(0.1, 0, 1)
    shared: bool = False
    max_tokens: int = count(1 << 18, 2 * RESERVED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shared, bool):
            raise ConfigError(f"suffix: shared must be True or False, not {shorten(self.shared)}")

    def __call__(self) -> SuffixDrafter:
        return SuffixDrafter(self)


class SuffixAutomaton:
    """All substrings of the texts that were added, and how often they occur.

    A state stands for strings that end at the same places; all are suffixes of the longest, which
    has `lengths` tokens. Its link leads to their longest suffix that also ends at other places.
    State 0 is the empty string. A token is counted in the MAX_COUNTED longest states that end with
    it, so all counts are exact unless a text repeats itself with a short period.
    """

    __slots__ = ("_counts", "_edges", "_last", "_latest", "_lengths", "_links", "size")

    def __init__(self) -> None:
        self.size = 0  # tokens added
        self._last = 0  # state of the whole text
        self._edges: list[dict[int, int]] = [{}]  # of each state: token -> next state
        self._lengths, self._links = array("i", [0]), array("i", [-1])
        self._counts, self._latest = array("i", [0]), array("i", [0])  # occurrences, the last one

    def start_text(self) -> None:
        """The next tokens do not follow those added so far."""
        self._last = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        counts, latest, links = self._counts, self._latest, self._links
        for token in tokens:
            self.size += 1
            state = self._last = self._next_state(token)
            for _ in range(MAX_COUNTED):
                if state == 0:
                    break
                counts[state] += 1
                latest[state] = self.size
                state = links[state]

    def repeated(self) -> Match:
        """The longest suffix of the text that occurs earlier."""
        state = max(0, self._links[self._last])
        return Match(self, state, self._lengths[state])

    def match(self, tokens: Iterable[int]) -> Match:
        """The longest suffix of these tokens that occurs, followed by a token."""
        edges, links, lengths = self._edges, self._links, self._lengths
        state = length = 0
        for token in tokens:
            while token not in edges[state] and state:
                state = links[state]
                length = lengths[state]
            if token in edges[state]:
                state, length = edges[state][token], length + 1
        while state and not edges[state]:
            state = links[state]
            length = lengths[state]
        return Match(self, state, length)

    def continuation(self, state: int, most: int, rule: suffix) -> list[int]:
        """The most frequent next tokens, the latest of equally frequent ones; at most `most`."""
        counts, latest, drafts, probability = self._counts, self._latest, list[int](), 1.0
        while len(drafts) < most:
            if not (edges := self._edges[state]):  # the end of a text: go on from a shorter suffix
                state = self._links[state]
                if state < 0 or self._lengths[state] < rule.min:
                    break
                continue
            if len(edges) == 1:  # the usual case, quickly
                [(token, state)] = edges.items()
            else:
                total = sum([counts[target] for target in edges.values()])
                token, state = max(edges.items(), key=lambda e: (counts[e[1]], latest[e[1]]))
                probability *= counts[state] / total
                if probability < rule.min_probability:
                    break
            drafts.append(token)
        return drafts

    def _next_state(self, token: int) -> int:
        """The state of the text with one more token; it is made if it is new."""
        edges, lengths, links = self._edges, self._lengths, self._links
        state, new = self._last, len(lengths)
        while state >= 0 and token not in edges[state]:
            edges[state][token] = new
            state = links[state]
        is_new = state != self._last
        if is_new:
            self._add_state(lengths[self._last] + 1, {})
        target = edges[state][token] if state >= 0 else 0
        if state >= 0 and lengths[target] > lengths[state] + 1:
            target = self._split(state, token)
        if is_new:
            links[new] = target
        return new if is_new else target

    def _split(self, state: int, token: int) -> int:
        """Give the strings of `state` with the token, and shorter ones, a state of their own."""
        edges, links, part = self._edges, self._links, len(self._lengths)
        whole = edges[state][token]
        self._add_state(self._lengths[state] + 1, edges[whole].copy(), whole)
        links[whole] = part
        while state >= 0 and edges[state].get(token) == whole:
            edges[state][token] = part
            state = links[state]
        return part

    def _add_state(self, length: int, edges: dict[int, int], like: int = 0) -> None:
        """Add a state with the link and the counts of another one."""
        self._lengths.append(length)
        self._edges.append(edges)
        for column in (self._links, self._counts, self._latest):
            column.append(column[like])


class Match(NamedTuple):
    """A string of an automaton: one of a state's, with this many tokens."""

    automaton: SuffixAutomaton
    state: int
    length: int


@dataclass(slots=True)
class TextIndex:
    """The automaton of a request: of its latest tokens before token `end`."""

    end: int = 0
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    tail: array[int] = field(default_factory=lambda: array("i"))  # the last tokens that were added

    def extend(self, tokens: array[int]) -> None:
        self.automaton.extend(tokens)
        self.end += len(tokens)
        self.tail = (self.tail + tokens[-NUM_COMPARED:])[-NUM_COMPARED:]


NEW = TextIndex()  # of a request that has none


class SuffixDrafter:
    """The drafter of the rule `suffix`.

    A request's automaton has at most MAX_INDEXED tokens, and fewer if other requests reserve them; a
    full one is made anew from the latest half. A call adds MAX_ADDED tokens; until all are added,
    the own text is not used. An output that was discarded is noticed by the last NUM_COMPARED tokens
    that were added.
    """

    def __init__(self, rule: suffix) -> None:
        self.rule = rule
        self._own = WeakKeyDictionary[Request, TextIndex]()
        self._shared = [SuffixAutomaton(), SuffixAutomaton()]  # the newer, the older

    def propose(self, request: Request, most: int) -> list[int]:
        """What followed the longest suffix most often; in the own text, if both have that suffix."""
        best = self._own_match(request)
        if self._is_shared(request) and best.length < MAX_CONTEXT:
            context = _tokens_from(request, max(0, request.num_known - MAX_CONTEXT))
            matches = [automaton.match(context) for automaton in self._shared]
            best = max(best, *matches, key=lambda match: match.length)
        if best.length < self.rule.min:
            return []
        limit = int(min(most, max(1.0, self.rule.factor * best.length)))
        return best.automaton.continuation(best.state, limit, self.rule)

    def forget(self, request: Request) -> None:
        """Drop the request's automaton; with `shared`, add its output to the shared one."""
        self._own.pop(request, None)
        if not self._is_shared(request):
            return
        most = self.rule.max_tokens // 2
        output = request.output[-most:]
        if self._shared[0].size + len(output) > most:
            self._shared = [SuffixAutomaton(), self._shared[0]]
        self._shared[0].start_text()
        self._shared[0].extend(output)

    def _is_shared(self, request: Request) -> bool:
        return self.rule.shared and not request.params.salt

    def _own_match(self, request: Request) -> Match:
        """The longest suffix that occurs earlier in the own text, after adding its new tokens."""
        index = self._own.get(request, NEW)
        known = _tokens_from(request, index.end - len(index.tail))
        if index is NEW or known[: len(index.tail)] != index.tail:
            index = self._own[request] = TextIndex()
            known = request.tokens
        new = known[len(index.tail) :]
        size = index.automaton.size
        after = _reserved(size + len(new))
        if after > _reserved(size) and after > (room := self._room(request)):
            start = request.num_known - room // 2
            index = self._own[request] = TextIndex(start)
            new = _tokens_from(request, start)
        index.extend(new[:MAX_ADDED])
        is_behind = len(new) > MAX_ADDED
        return Match(index.automaton, 0, 0) if is_behind else index.automaton.repeated()

    def _room(self, request: Request) -> int:
        """The most tokens that the automaton of this request may reserve."""
        sizes = [own.automaton.size for key, own in self._own.items() if key is not request]
        left = min(MAX_INDEXED, self.rule.max_tokens - sum(map(_reserved, sizes)))
        return left - left % RESERVED


def _reserved(num_tokens: int) -> int:
    return -(-num_tokens // RESERVED) * RESERVED


def _tokens_from(request: Request, start: int) -> array[int]:
    """The known tokens from number `start` on."""
    num_prompt, output = request.num_prompt, request.output
    return output[start - num_prompt :] if start >= num_prompt else request.prompt[start:] + output
