"""Requests for tests of raw bytes: valid and invalid ones, and how to compare their responses."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from tests.support.served import MODEL
from tests.support.wire.server import saying

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
JSON = "application/json"
WORDS = (
    "plain words", "grüße", "世界", "🙂🙃", "naïve", "\n", "  ", "\t", "a < b", "<", "<t", "<tool",
    "<tool_call", "</tool_call>", "tool_call>", '{"name"', "}", "STOP", "ST", "data: [DONE]", "\r\n",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    "Paris", "a </tool_call> b", '"}{"', "é🙂", "", 1, -2.5, None, True, [1, "<tool_call>"],
    {"x": {"y": "\\ \n"}},
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "look-up")
]


@dataclass(frozen=True, slots=True)
class Case:
    """A request; `fields` is its JSON body, `raw` replaces it."""

    path: str
    fields: dict[str, Any] | None = None
    raw: bytes = b""
    method: str = "POST"
    kind: str = JSON
    is_streamed: bool = False

    @property
    def body(self) -> bytes:
        if self.fields is None:
            return self.raw
        fields = {**self.fields, "stream": self.is_streamed}
        if not self.is_streamed:
            fields.pop("stream_options", None)  # only for streams
        return json.dumps(fields).encode()

    def streamed(self) -> Case:
        return replace(self, is_streamed=self.fields is not None)


WRONG = (
    Case(CHAT, raw=b'{"messages": ['),
    Case(CHAT, raw=b"x" * 3000),
    Case(COMPLETIONS, raw=b'{"prompt": "a"}', kind="text/plain"),
    Case(COMPLETIONS, {"prompt": 5}),
    Case(COMPLETIONS, {"prompt": "a", "max_tokens": "many"}),
    Case(CHAT, {"messages": [], "tools": "none"}),
    Case(CHAT, {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}),
    Case(CHAT, {"messages": [{"role": "user", "content": "a"}], "model": "another"}),
    Case(RESPONSES, {"input": []}),
    Case(
        MESSAGES,
        {"model": "another", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
    ),
    Case("/v1/nothing", {"prompt": "a"}),
    Case(CHAT, method="GET", raw=b""),
    Case("/version", method="GET", raw=b""),
    Case("/version", method="GET", raw=b"a body that is not read"),
    Case("/v1/models", method="GET", raw=b""),
)


def words(chance: random.Random, most: int = 12) -> str:
    return "".join(chance.choice(WORDS) for _ in range(chance.randint(0, most)))


def call(chance: random.Random) -> str:
    """The text of a tool call, or text that resembles one."""
    names = ("weather", "look-up", "weather", "no-such-tool")
    arguments = {f"k{n}": chance.choice(VALUES) for n in range(chance.randint(0, 3))}
    found = {"name": chance.choice(names), "arguments": arguments}
    text = json.dumps(found, ensure_ascii=chance.random() < 0.5)
    begin, end = ("<tool_call>\n", "\n</tool_call>") if chance.random() < 0.8 else ("", "")
    text = f"{begin}{text}{end}"
    return text if chance.random() < 0.8 else text[: chance.randint(0, len(text))]


def output(chance: random.Random) -> str:
    """A possible output: words, calls, whitespace, and fragments of them."""
    parts = [
        chance.choice((words, call, words))(chance)
        if chance.random() < 0.9
        else chance.choice(("\n", " ", ""))
        for _ in range(chance.randint(1, 3))
    ]
    return "".join(parts)[:160]


def cases(seed: int, count: int) -> list[Case]:
    """`count` random valid requests, and all invalid ones."""
    chance = random.Random(seed)
    makers = (_chat, _chat, _completion, _response, _message)
    made = [chance.choice(makers)(chance) for _ in range(count)]
    return [*made, *WRONG]


def _chat(chance: random.Random) -> Case:
    n = chance.choice((1, 1, 1, 2, 3))
    outputs = [output(chance) for _ in range(n)]
    fields = {**_common(chance), "n": n}
    if chance.random() < 0.75:
        fields["tools"] = TOOLS
        fields["tool_choice"] = chance.choice(("auto", "auto", "required", "none"))
        if fields["tool_choice"] == "required":
            outputs = [call(chance) for _ in range(n)]
    elif chance.random() < 0.3:
        fields["logprobs"] = True
    fields["messages"] = [{"role": "user", "content": saying(*outputs)}]
    return Case(CHAT, fields)


def _completion(chance: random.Random) -> Case:
    n = chance.choice((1, 1, 2))
    prompts = [
        saying(*(output(chance) for _ in range(n))) for _ in range(chance.choice((1, 1, 1, 3)))
    ]
    fields: dict[str, Any] = {**_common(chance), "n": n, "max_tokens": 400}
    if chance.random() < 0.2:
        fields["logprobs"] = 1
    if chance.random() < 0.2:
        fields["echo"] = True
    return Case(COMPLETIONS, {**fields, "prompt": prompts if len(prompts) > 1 else prompts[0]})


def _response(chance: random.Random) -> Case:
    fields: dict[str, Any] = {"stop": "STOP"} if chance.random() < 0.3 else {}
    if chance.random() < 0.2:
        fields["max_output_tokens"] = chance.randint(1, 40)
    text = output(chance)
    if chance.random() < 0.75:
        fields["tools"] = [{"type": "function", **tool["function"]} for tool in TOOLS]
        fields["tool_choice"] = chance.choice(("auto", "auto", "required", "none"))
        text = call(chance) if fields["tool_choice"] == "required" else text
    return Case(RESPONSES, {**fields, "input": saying(text)})


def _message(chance: random.Random) -> Case:
    most = chance.randint(1, 40) if chance.random() < 0.2 else 400
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": most}
    if chance.random() < 0.3:
        fields["stop_sequences"] = ["STOP", "界"]
    text = output(chance)
    if chance.random() < 0.75:
        fields["tools"] = [
            {"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS
        ]
        kind = chance.choice(("auto", "auto", "any", "none"))
        fields["tool_choice"] = {"type": kind}
        text = call(chance) if kind == "any" else text
    return Case(MESSAGES, {**fields, "messages": [{"role": "user", "content": saying(text)}]})


def _common(chance: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if chance.random() < 0.3:
        fields["stop"] = chance.choice(("STOP", ["TOP", "界"], "}", "\n\n"))
    if chance.random() < 0.2:
        fields["max_tokens"] = chance.randint(1, 40)
    if chance.random() < 0.4:
        fields["stream_options"] = {"include_usage": True}
    return fields
