"""Ids of server-sent events, with which a client continues a stream whose gateway was lost.

The id of an event says how many tokens of each choice had been encoded before its batch of events
and after it, and which event of the batch it is. From the same tokens, divided at the same places,
another gateway makes the same events, and leaves out those that the client has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Scope

from headway.engine.outputs import Delta
from headway.errors import NotResumable
from headway.server.http.errors import ApiError, format_value

if TYPE_CHECKING:
    from headway.server.generation.prompt_runs import TextEvent
    from headway.server.generation.stream import Output

MAX_CHOICES = 32  # of a stream with ids, which would be long
FIRST, BATCH, LAST = "fbl"  # parts of a stream
NUMBERS = r"\d{1,9}e?(?:,\d{1,9}e?)*"
PATTERN = re.compile(
    rf"([a-z]+-[0-9a-f]{{24}})/(\d{{1,11}})/([fbl])(\d{{1,9}})/({NUMBERS})/({NUMBERS})/(\d{{1,9}})"
)
Position = tuple[int, bool]  # the tokens of a choice, and whether it has ended
START: Position = (0, False)


class Cursor(NamedTuple):
    """An event of a stream, as its id says."""

    response_id: str
    created: int  # Unix seconds
    part: str
    num_events: int  # numbered ones before the batch: see Output.num_events
    before: list[Position]  # by choice
    after: list[Position]
    number: int  # of the event in its batch


CURSOR: ContextVar[Cursor | None] = ContextVar("cursor", default=None)


def wants_ids(scope: Scope) -> bool:
    """Whether the client is one for server-sent events."""
    names = {name for name, value in scope["headers"]}
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return b"last-event-id" in names or b"text/event-stream" in accepted.lower()


def cursor_of(scope: Scope) -> Cursor | None:
    """The event that the client has received last; ApiError 400 if its id is malformed."""
    given = [value for name, value in scope["headers"] if name == b"last-event-id"]
    if not given:
        return None
    text = b",".join(given).decode("latin-1")
    if (found := PATTERN.fullmatch(text)) is None:
        raise ApiError(
            400, f"Last-Event-ID is not the id of an event of this server: {format_value(text)}",
            param="Last-Event-ID",
        )  # fmt: skip
    id, created, part, num_events, before, after, number = found.groups()
    cursor = Cursor(
        id, int(created), part, int(num_events), _positions(before), _positions(after), int(number)
    )
    if len(cursor.before) != len(cursor.after):
        raise ApiError(400, "Last-Event-ID contradicts itself", param="Last-Event-ID")
    return cursor


def _positions(text: str) -> list[Position]:
    return [(int(each.removesuffix("e")), each.endswith("e")) for each in text.split(",")]


def _text(positions: Sequence[Position]) -> str:
    return ",".join([f"{num}e" if is_ended else str(num) for num, is_ended in positions])


class EventIds:
    """Adds ids to the events of one stream, and leaves out those that its client has."""

    def __init__(self, output: Output, cursor: Cursor | None) -> None:
        """NotResumable if the cursor is that of another body."""
        if cursor is not None and len(cursor.before) != output.num_choices:
            problem = "the response of Last-Event-ID has another number of choices"
            raise NotResumable(problem, differs=True)
        self._output, self._cursor = output, cursor
        self._positions = [START] * output.num_choices
        self._num_events = 0
        self._held: list[tuple[bytes, list[Delta]]] = []  # until the client's batch is complete
        self._awaits_batch = cursor is not None and cursor.before != cursor.after
        if cursor is not None:
            self._positions = list(cursor.before)
        self._head = f"id: {output.id}/{output.created}/"

    def first(self) -> bytes:
        """The events before those of the first deltas."""
        events, cursor, skip = self._output.first(), self._cursor, 0
        if cursor is not None:
            skip = cursor.number + 1 if cursor.part == FIRST else len(events)
        numbered = self._with_ids(FIRST, events, [START] * len(self._positions), skip)
        if cursor is not None:
            self._positions = list(cursor.before)
            if cursor.part != FIRST:
                self._count_from(cursor.num_events)
        return numbered

    def encode(self, deltas: list[Delta]) -> bytes:
        return self._numbered(self._output.encode(deltas), deltas)

    async def encode_batch(self, deltas: list[Delta]) -> bytes:
        return self._numbered(await self._output.encode_batch(deltas), deltas)

    def _numbered(self, events: bytes, deltas: Sequence[Delta]) -> bytes:
        """The encoded events of these deltas, with ids."""
        cursor, after = self._cursor, self._positions.copy()
        for delta in deltas:
            after[delta.choice] = delta.num_tokens, delta.finish_reason is not None
        if cursor is None:
            return self._with_ids(BATCH, events, after)
        changed = [delta.choice for delta in deltas]
        if all(after[choice] <= cursor.before[choice] for choice in changed):
            self._count_from(cursor.num_events)
            return b""
        if not self._awaits_batch:
            return self._with_ids(BATCH, events, after)
        if any(after[choice] > cursor.after[choice] for choice in changed):
            self._held.append((events, list(deltas)))  # of another prompt
            return b""
        self._awaits_batch = False
        found = self._with_ids(BATCH, events, after, cursor.number + 1)
        return found + b"".join([self._numbered(*each) for each in self._held])

    def text_event(self) -> TextEvent | None:
        """Encodes a text of the only choice, as the output does."""
        encode = self._output.text_event()
        if encode is None:
            return None
        (run,) = self._output.runs
        (sample,) = run.samples
        return lambda text: self._with_ids(BATCH, encode(text), [(len(sample.tokens), False)])

    def last(self) -> bytes:
        """The events after those of the last deltas."""
        cursor, events = self._cursor, self._output.last()
        skip = cursor.number + 1 if cursor is not None and cursor.part == LAST else 0
        return self._with_ids(LAST, events, self._positions, skip)

    def _with_ids(
        self, part: str, events: bytes, after: list[Position], num_skipped: int = 0
    ) -> bytes:
        head = f"{self._head}{part}{self._num_events}/{_text(self._positions)}/{_text(after)}/"
        self._positions, self._num_events = after, self._output.num_events
        ids, found = head.encode("ascii"), events.split(b"\n\n")[:-1]
        return b"".join([
            b"%s%d\n%s\n\n" % (ids, number, event)
            for number, event in enumerate(found) if number >= num_skipped
        ])  # fmt: skip

    def _count_from(self, num_events: int) -> None:
        self._num_events = self._output.num_events = num_events
