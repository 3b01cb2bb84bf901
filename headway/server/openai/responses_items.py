"""The output items of a response and the events that report them.

The output is a sequence of items: text messages and function calls. One item is open at a time.
"""

from __future__ import annotations

import copy
import secrets
from typing import Any

from headway.server.generation.prepared_chat import OutputParser
from headway.server.generation.prompt_runs import Delta
from headway.server.toolcalls.formats import CallDelta

ResponseEvent = dict[str, Any]


class OutputItems:
    """The items of one response; the last one may be open."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._items: list[dict[str, Any]] = []
        self._is_open = False

    @property
    def output(self) -> list[dict[str, Any]]:
        """A copy of all items."""
        return copy.deepcopy(self._items)

    def push(self, delta: Delta, logprobs: list[dict[str, Any]] | None) -> list[ResponseEvent]:
        """The events of a delta; `logprobs` are attached to its first text."""
        events: list[ResponseEvent] = []
        for piece in self._parser.push(delta):
            if isinstance(piece, CallDelta):
                events += self._call(piece)
            else:
                events += self._text(piece, logprobs or [])
                logprobs = None
        return events

    def close(self, status: str = "completed") -> list[ResponseEvent]:
        """The events that close the open item; none if no item is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        at = self._place()
        done: ResponseEvent
        if item["type"] == "function_call":
            done = {
                "type": "response.function_call_arguments.done", **at,
                "arguments": item["arguments"], "name": item["name"],
            }  # fmt: skip
            events = [done]
        else:
            (part,) = item["content"]
            done = {
                "type": "response.output_text.done", **at, "content_index": 0,
                "text": part["text"], "logprobs": part["logprobs"],
            }  # fmt: skip
            ended = {"type": "response.content_part.done", **at, "content_index": 0, "part": part}
            events = [done, ended]
        events.append({
            "type": "response.output_item.done", "output_index": at["output_index"], "item": item,
        })  # fmt: skip
        return copy.deepcopy(events)

    def _text(self, text: str, logprobs: list[dict[str, Any]]) -> list[ResponseEvent]:
        events = []
        if not self._is_open or self._items[-1]["type"] != "message":
            events = [*self.close(), *self._begin_message()]
        (part,) = self._items[-1]["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        delta: ResponseEvent = {
            "type": "response.output_text.delta", **self._place(), "content_index": 0,
            "delta": text, "logprobs": logprobs,
        }  # fmt: skip
        return [*events, delta]

    def _call(self, piece: CallDelta) -> list[ResponseEvent]:
        events = []
        if piece.id is not None:
            events = [*self.close(), *self._begin_call(piece)]
        if not piece.arguments:
            return events
        self._items[-1]["arguments"] += piece.arguments
        delta: ResponseEvent = {
            "type": "response.function_call_arguments.delta", **self._place(),
            "delta": piece.arguments,
        }  # fmt: skip
        return [*events, delta]

    def _begin_message(self) -> list[ResponseEvent]:
        part: dict[str, Any] = {
            "type": "output_text", "text": "", "annotations": [], "logprobs": [],
        }  # fmt: skip
        added = self._begin({
            "id": _new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress",
            "content": [],
        })  # fmt: skip
        self._items[-1]["content"].append(part)
        begun: ResponseEvent = {
            "type": "response.content_part.added", **self._place(), "content_index": 0,
            "part": copy.deepcopy(part),
        }  # fmt: skip
        return [added, begun]

    def _begin_call(self, piece: CallDelta) -> list[ResponseEvent]:
        item = {
            "id": _new_id("fc"), "type": "function_call", "status": "in_progress",
            "call_id": piece.id, "name": piece.name, "arguments": "",
        }  # fmt: skip
        return [self._begin(item)]

    def _begin(self, item: dict[str, Any]) -> ResponseEvent:
        self._items.append(item)
        self._is_open = True
        place = len(self._items) - 1
        return {
            "type": "response.output_item.added", "output_index": place,
            "item": copy.deepcopy(item),
        }  # fmt: skip

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
