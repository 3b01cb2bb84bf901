"""The content of a response, complete or merged from events."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.support.wire.named import chunks_of, named_usage, plain_json, whole_named

Choices = dict[int, dict[str, Any]]


class Answer(NamedTuple):
    """The content of a response without ids, times and cache counts."""

    status: int
    choices: Choices
    rest: Any  # for a body without choices, such as an error
    usage: Any = None


def answer(status: int, body: bytes) -> Answer:
    """The content of a complete JSON response."""
    found = json.loads(body)
    if found.get("object") == "response" or found.get("type") == "message":
        return Answer(status, {0: whole_named(found)}, None, named_usage(found["usage"]))
    if "choices" not in found:
        return Answer(status, {}, {**found, "created": None, "data": None})
    return Answer(status, {c["index"]: _whole(c) for c in found["choices"]}, None, _usage(found))


def streamed_answer(status: int, body: bytes) -> Answer:
    """The content of an event stream; AssertionError if an event is wrong."""
    events = events_of(body)
    assert body.endswith(b"\n\n") and events and events[-1] == "[DONE]", body[-200:]
    choices = joined(events[:-1])
    if body.startswith(b"event: message_start"):
        for call in choices[0]["calls"]:
            call["arguments"] = plain_json(call["arguments"])
    return Answer(status, choices, None, _usage(json.loads(events[-2])))


def events_of(body: bytes) -> list[str]:
    """The data of every complete event; named events are converted to chunks."""
    events = body.decode("ascii").split("\n\n")[:-1]
    if body.startswith(b"event: "):
        return chunks_of(events)
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    return [event.removeprefix("data: ") for event in events]


def joined(events: list[str]) -> Choices:
    """The choices merged from chunks."""
    choices: Choices = {}
    for event in events:
        chunk = json.loads(event)
        assert "choices" in chunk, chunk
        for piece in chunk["choices"]:
            empty = {"text": "", "calls": [], "finish_reason": None, "scored": []}
            into = choices.setdefault(piece["index"], empty)
            assert into["finish_reason"] is None, "a piece after the end"
            _add(into, piece)
    return {index: _without_blanks(choices[index]) for index in sorted(choices)}


def _add(into: dict[str, Any], piece: dict[str, Any]) -> None:
    delta = piece.get("delta") or {"content": piece.get("text", "")}
    into["text"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or ():
        calls, function = into["calls"], call["function"]
        if call["index"] == len(calls):
            calls.append({"name": function["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += function.get("arguments") or ""
    into["scored"] += _scored(piece["logprobs"])
    into["finish_reason"] = piece["finish_reason"]


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
    ]
    found = {"text": message["content"] or "", "calls": calls}
    rest = {"finish_reason": choice["finish_reason"], "scored": _scored(choice["logprobs"])}
    return _without_blanks({**found, **rest})


def _without_blanks(choice: dict[str, Any]) -> dict[str, Any]:
    """Whitespace around calls is optional: a complete response has null instead."""
    is_blank = choice["calls"] and not choice["text"].strip()
    return {**choice, "text": ""} if is_blank else choice


def _scored(logprobs: dict[str, Any] | None) -> list[str]:
    """The tokens with a log probability."""
    if logprobs is None:
        return []
    if "tokens" in logprobs:
        return [str(token) for token in logprobs["tokens"]]
    return [str(entry["token"]) for entry in logprobs["content"] or ()]


def _usage(body: dict[str, Any]) -> tuple[int, int] | None:
    usage = body.get("usage")
    return None if usage is None else (usage["prompt_tokens"], usage["completion_tokens"])
