"""Random request bodies: valid ones of /v1/messages and /v1/responses with a few members changed.

A body depends only on the path, the seed and its number.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
MAX_CHANGES = 3  # of one body
DEPTHS = (3, 60, 250)  # of nested values
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARTS = [{"type": "text", "text": "Name a"}, {"type": "text", "text": "city."}]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {
        "model": "smollm2-135m", "max_tokens": 2, "stream": False, "system": "Be brief.",
        "messages": [
            {"role": "user", "content": PARTS},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
        ],
        "tools": [{"name": "weather", "description": "Weather.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"}, "thinking": {"type": "disabled"},
        "stop_sequences": ["\n\n"], "temperature": 0.5, "top_k": 5, "top_p": 0.9,
        "metadata": {"user_id": "someone"},
    },
    RESPONSES: {
        "model": "smollm2-135m", "max_output_tokens": 2, "stream": False,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Name a city."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather",
             "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
        "tool_choice": "auto", "parallel_tool_calls": False, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "truncation": "disabled",
        "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "store": False,
    },
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, 1e308, float("inf"), float("nan"), 2**31, 2**63, -(2**64),
    10**400, "", "a", "9" * 400, "a" * 20_000, "\x00", "\ud800", "\udfff\ud800", "😀\u202e\ufeff",
    [], {}, [None], [[]], [{}], {"": None}, {"type": None}, {"type": "text"}, {"type": "image"},
    {"type": "json_schema", "schema": {}}, {"type": "json_schema", "schema": {"$ref": "#"}},
    {"$ref": "#/none"}, "user", "assistant", "system", "developer", "tool", "robot", "required",
    "any", "json_object", {"type": "function", "name": "weather"}, {"type": "tool", "name": "a"},
)  # fmt: skip
UNKNOWN = ("n", "best_of", "extra", "logit_bias", "stop", "seed", "priority", "cache_control", "")


def random_bodies(path: str, count: int, seed: int) -> Iterator[bytes]:
    """Bodies for a path; a string or number in them may be one that JSON does not allow."""
    for number in range(count):
        source = random.Random(f"{path} {seed} {number}")
        body = copy.deepcopy(BODIES[path])
        body["stream"] = source.random() < 0.5
        for _ in range(source.randint(1, MAX_CHANGES)):
            _change(body, source)
        data = json.dumps(body, ensure_ascii=source.random() < 0.8)
        yield data.encode("utf-8", "surrogatepass")


def _change(body: dict[str, Any], source: random.Random) -> None:
    """Replace, remove, repeat, wrap or add one member of a random object or list."""
    at = source.choice(list(_containers(body)))
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    key = source.choice(keys) if keys else None
    kind = source.choice(("replace", "replace", "replace", "remove", "repeat", "wrap", "add"))
    if kind == "add" or key is None:
        value = source.choice(VALUES)
        if isinstance(at, dict):
            at[source.choice(UNKNOWN)] = value
        else:
            at.append(value)
    elif kind == "replace":
        at[key] = copy.deepcopy(source.choice(VALUES))
    elif kind == "remove":
        del at[key]
    elif kind == "repeat":
        at[key] = [copy.deepcopy(at[key]) for _ in range(source.choice((2, 100)))]
    else:
        for _ in range(source.choice(DEPTHS)):
            at[key] = [at[key]] if source.random() < 0.5 else {"a": at[key]}


def _containers(value: Any) -> Iterator[Any]:
    """All objects and lists in a value that is not deeply nested."""
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if isinstance(at, dict | list):
            yield at
            waiting.extend(at.values() if isinstance(at, dict) else at)
