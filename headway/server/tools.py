"""Tool calls: which tools a model is shown, how it must call them, and calls as clients know them.

A model learns of tools by its chat template, and writes a call as text: `<tool_call>` and JSON
(Qwen, Hermes, SmolLM3) or JSON alone (Llama 3). Reading that text is in tool_calls.py. Knows no
HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

from headway.engine.chat import render_chat
from headway.errors import InvalidRequest, ModelError
from headway.grammar import Grammar, check, with_few_blanks
from headway.server.json_size import excess
from headway.server.tool_calls import JSON_ALONE, TAGGED, CallReader, Style

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# How templates explain a call to the model, with words in the place of name and arguments.
EXPLAINS_TAGS = re.compile(r'<tool_call>\s*\{[^{}]*"arguments"')
EXPLAINS_JSON = re.compile(r'\{"name": [^{}"]*, "parameters": [^{}"]*\}')
PROBE = "a_tool_to_look_for"
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    style: Style
    tools: tuple[Tool, ...]  # to be shown to the model, as its template takes them
    grammar: Grammar | None  # None: the model may call or not

    def reader(self) -> CallReader:
        """A fresh one for every sample: text in, text and calls out."""
        return CallReader(self.style, frozenset(_name(tool) for tool in self.tools))

    def check(self) -> None:
        """InvalidRequest, naming the tool, if nothing could be held to the grammar."""
        assert self.grammar is not None, "only a grammar can be wrong"
        try:
            check(self.grammar)
        except InvalidRequest:
            for number, tool in enumerate(self.tools):
                with _naming(number):
                    check(Grammar.json_schema(_arguments(tool)))
            raise


def tool_use(
    template: str | None,
    tools: Sequence[Tool] | None,
    choice: str | Mapping[str, Any] | None = None,
    *,
    parallel: bool = True,
) -> ToolUse | None:
    """What a request's `tools` and `tool_choice` mean for this model; None if it may use none.

    InvalidRequest, naming the field, for what makes no sense or what the template cannot show.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is given without tools; send tools, or leave it out")
        return None
    _check_tools(tools)
    named = _chosen(choice, tools)
    if choice == "none":
        return None
    style, grammar = style_of(template), None
    if choice == "required":
        is_one = not (parallel and style.between)
        grammar = _calls(style, dict(enumerate(tools)), is_one=is_one)
    elif named is not None:
        grammar = _calls(style, {named: tools[named]}, is_one=True)
    return ToolUse(style=style, tools=tuple(tools), grammar=grammar)


@lru_cache(maxsize=32)
def style_of(template: str | None) -> Style:
    """How a model with this template calls tools; InvalidRequest if it knows none."""
    function = {"name": PROBE, "description": PROBE, "parameters": NOTHING}
    messages = [{"role": "user", "content": "?"}]
    try:
        shown = render_chat(template, messages, tools=[{"type": "function", "function": function}])
    except (InvalidRequest, ModelError) as error:
        raise InvalidRequest(f"tools cannot be shown to this model: {error}") from None
    if PROBE not in shown:
        raise InvalidRequest(
            "tools cannot be used: this model's chat template does not know any; leave them out, "
            "or serve a model that was trained on tools"
        )
    if EXPLAINS_TAGS.search(shown):
        return TAGGED
    if EXPLAINS_JSON.search(shown):
        return JSON_ALONE
    raise InvalidRequest(
        "tools cannot be used: this model calls them in a form that is not known here; known are "
        '<tool_call>{"name": ..., "arguments": ...}</tool_call> and {"name": ..., "parameters": ...}'
    )


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the arguments of earlier calls as objects: templates write them as JSON."""
    found = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not calls:
            found.append(message)
            continue
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidRequest(f"messages[{number}].tool_calls must be a list, not {calls!r}")
        places = (f"messages[{number}].tool_calls[{place}]" for place in range(len(calls)))
        opened = [_opened(call, where) for call, where in zip(calls, places, strict=True)]
        found.append({**message, "tool_calls": opened})
    return found  # type: ignore[return-value]


def _opened(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name and arguments, not {function!r}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        if problem := excess(arguments.encode(errors="replace")):
            raise InvalidRequest(f"{where}.function.arguments {problem}")
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _check_tools(tools: Sequence[Tool]) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidRequest(f"tools must be a list, not {tools!r}")
    names = set[str]()
    for number, tool in enumerate(tools):
        where, function = f"tools[{number}]", tool.get("function") if _is_map(tool) else None
        if not _is_map(tool) or tool.get("type") != "function" or not _is_map(function):
            raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{...}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            problem = "1 to 64 letters, digits, _ and -"
            raise InvalidRequest(f"{where}.function.name must be {problem}, not {name!r}")
        if name in names:
            raise InvalidRequest(f"{where}.function.name {name!r} is there twice")
        names.add(name)
        if parameters is not None and not _is_map(parameters):
            raise InvalidRequest(f"{where}.function.parameters must be a JSON schema, an object")


def _chosen(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> int | None:
    """The number of the tool that a choice names, if it names one."""
    if choice in (None, "none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not _is_map(function):
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": '
            f'{{"name": ...}}}}, not {choice!r}'
        )
    known = {_name(tool): number for number, tool in enumerate(tools)}
    name = function.get("name")
    if not isinstance(name, str) or name not in known:
        names = ", ".join(known)
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools: {names}")
    return known[name]


def _calls(style: Style, tools: Mapping[int, Tool], *, is_one: bool) -> Grammar:
    """One call or more of these tools, and nothing else."""
    lines = [f"start: {'one' if is_one else f'one ({json.dumps(style.between)} one)*'}"]
    lines.append("one: " + " | ".join(f"call{number}" for number in tools))
    for number, tool in tools.items():
        begin = f'{style.begin}{{"name": {json.dumps(_name(tool))}, "{style.arguments}": '
        end = "}" + style.end
        lines.append(f"call{number}: {json.dumps(begin)} json{number} {json.dumps(end)}")
        with _naming(number):
            lines.append(f"json{number}: %json {Grammar.json_schema(_arguments(tool)).text}")
    return Grammar.tool_calls("\n".join(lines))


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments.

    What it says that cannot be held to is left out: tools need not be strict.
    """
    parameters = tool["function"].get("parameters") or NOTHING
    return with_few_blanks(parameters, lenient=True)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Whatever is wrong in here is wrong with this tool's parameters."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"tools[{number}].function.parameters: {error}") from None


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _is_map(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
