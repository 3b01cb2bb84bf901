"""How many values a JSON text may hold, found without parsing it.

Parsing, checking and freeing values holds the GIL: 0.2 us for a number, ten times that for a message
or a member of an object. And an empty list takes 30 times its two bytes of memory.
"""

from __future__ import annotations

import sys

from headway.server.http.offload import pause

MAX_VALUES = 1 << 19  # numbers, texts, lists and all others together
MAX_CONTAINERS = 1 << 14  # lists and objects
MAX_MEMBERS = 1 << 16  # of all objects
WINDOW = 1 << 16  # bytes looked at between two pauses


class Counts:
    """What of a JSON text's punctuation has been seen; texts in it left out."""

    def __init__(self) -> None:
        self.containers = self.closed = self.commas = self.members = 0

    def add(self, outside: bytes) -> None:
        self.containers += outside.count(b"[") + outside.count(b"{")
        self.closed += outside.count(b"]") + outside.count(b"}")
        self.commas += outside.count(b",")
        self.members += outside.count(b":")

    def excess(self) -> str | None:
        """The first count above its limit, in words; None if all are within."""
        depth, several = sys.getrecursionlimit(), "send fewer in one request"
        if self.containers - self.closed > depth:
            return f"holds lists and objects nested over {depth} deep"
        if self.containers > MAX_CONTAINERS:
            return f"holds more than {MAX_CONTAINERS} lists and objects; {several}"
        if self.members > MAX_MEMBERS:
            return f"holds objects with more than {MAX_MEMBERS} members in all; {several}"
        if self.containers + self.commas >= MAX_VALUES:
            return f"holds more than {MAX_VALUES} values; {several}"
        return None


def excess(data: bytes) -> str | None:
    """What is too much in a JSON text, in words; None if nothing is."""
    if len(data) <= 2 * MAX_CONTAINERS:  # each takes two bytes, and members take more
        return None
    counts = Counts()
    counts.add(data)
    if counts.excess() is None:
        return None  # even if all of it is outside of texts
    return _excess_outside_texts(data)


def _excess_outside_texts(data: bytes) -> str | None:
    start, in_text, counts = 0, False, Counts()
    while start < len(data):
        window = data[start : start + WINDOW]
        if (len(window) - len(window.rstrip(b"\\"))) % 2 and len(window) > 1:
            window = window[:-1]  # it escapes what follows
        start += len(window)
        parts = window.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        counts.add(b"".join(parts[int(in_text) :: 2]))
        in_text ^= len(parts) % 2 == 0
        if problem := counts.excess():
            return problem
        pause()
    return None
