"""Responses of /v1/responses and /v1/messages, whose events are named, as chat chunks."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]
ENDS = ("response.completed", "response.incomplete")


def whole_named(body: dict[str, Any]) -> dict[str, Any]:
    """The text and calls of a complete response."""
    text, calls = "", []
    for item in body.get("output") or body.get("content") or ():
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "text":
            text += item["text"]
        elif item["type"] == "function_call":
            calls.append({"name": item["name"], "arguments": item["arguments"]})
        else:
            calls.append({"name": item["name"], "arguments": json.dumps(item["input"])})
    reason = body.get("stop_reason") or body.get("status")
    is_blank = calls and not text.strip()
    return {
        "text": "" if is_blank else text, "calls": calls, "finish_reason": reason, "scored": [],
    }  # fmt: skip


def named_usage(usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt and output tokens; Anthropic's input tokens exclude cached ones."""
    cached = usage.get("cache_read_input_tokens", 0)
    return usage["input_tokens"] + cached, usage["output_tokens"]


def plain_json(arguments: str) -> str:
    """Arguments as in a complete message: an object, empty if they are incomplete."""
    try:
        found = json.loads(arguments)
    except ValueError:
        found = {}
    return json.dumps(found if isinstance(found, dict) else {})


def chunks_of(events: list[str]) -> list[str]:
    """Named events as chat chunks; [DONE] after the last one."""
    chunks: list[str] = []
    num_calls = 0
    for number, text in enumerate(events):
        name, _, data = text.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}", text
        if event["type"].startswith("response."):
            assert event["sequence_number"] == number, text
        begun = event.get("item") or event.get("content_block") or {}
        is_added = event["type"] in ("response.output_item.added", "content_block_start")
        if is_added and begun["type"] in ("function_call", "tool_use"):
            num_calls += 1
            chunks.append(_call(num_calls - 1, {"name": begun["name"], "arguments": ""}))
        elif delta := _delta(event, num_calls - 1):
            chunks.append(delta)
        chunks += _end(event)
    return chunks


def _delta(event: Event, number: int) -> str | None:
    delta = event.get("delta")
    match event["type"]:
        case "response.output_text.delta":
            return _chunk({"content": delta})
        case "response.function_call_arguments.delta":
            return _call(number, {"arguments": delta})
        case "content_block_delta" if delta["type"] == "text_delta":
            return _chunk({"content": delta["text"]})
        case "content_block_delta":
            return _call(number, {"arguments": delta["partial_json"]})
    return None


def _end(event: Event) -> list[str]:
    """The end of a stream: finish reason, usage, and [DONE]."""
    if event["type"] in ENDS:
        response = event["response"]
        return [_chunk({}, response["status"]), _usage_chunk(response["usage"]), "[DONE]"]
    if event["type"] == "message_delta":
        return [_chunk({}, event["delta"]["stop_reason"]), _usage_chunk(event["usage"])]
    return ["[DONE]"] if event["type"] == "message_stop" else []


def _call(number: int, function: dict[str, Any]) -> str:
    return _chunk({"tool_calls": [{"index": number, "function": function}]})


def _chunk(delta: dict[str, Any], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return json.dumps({"choices": [choice]})


def _usage_chunk(usage: dict[str, Any]) -> str:
    prompt, output = named_usage(usage)
    reported = {"prompt_tokens": prompt, "completion_tokens": output}
    return json.dumps({"choices": [], "usage": reported})
