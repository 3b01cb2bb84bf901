"""Interprets a request's `tools` and `tool_choice` for the served model.

The chat template shows the tools to the model, which writes calls as text. If `tool_choice`
requires a call, a grammar allows only calls. Knows no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from random import Random
from typing import Any, NamedTuple, TypeGuard

from headway.errors import InvalidRequest, shorten
from headway.grammar.grammar import Grammar, check_grammar, with_bounded_whitespace
from headway.grammar.json_schema import close_objects
from headway.server.toolcalls.formats import (
    AUTO,
    FORMATS,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    new_call_id,
)
from headway.server.toolcalls.parser import ToolCallParser
from headway.server.toolcalls.prompt import NO_PARAMETERS, render_tool_prompt, with_tools_described
from headway.text.chat_template import Message

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# How templates explain the format of a call to the model, with placeholders for the values.
FORMAT_PATTERNS = (
    (re.compile(r'<tool_call>\s*\{[^{}]*"arguments"'), HERMES),
    (re.compile(r'\{"name": [^{}"]*, "parameters": [^{}"]*\}'), LLAMA3),
    (re.compile(r"\[AVAILABLE_TOOLS\]"), MISTRAL),
)
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    format: ToolFormat
    tools: tuple[Tool, ...]  # shown to the model
    names: frozenset[str]  # of the tools that the model may call
    grammar: Grammar | None  # allows only calls; None: a call is optional
    is_described: bool  # in the system message, because the template ignores tools
    are_closed: bool = False  # no additional properties for all tools, not only for strict ones

    def parser(self, seed: str | None = None) -> ToolCallParser:
        """A new parser, for one sample; equal seeds give equal ids of calls."""
        new_id = partial(new_call_id, self.format, Random(seed))
        is_forced = self.grammar is not None
        return ToolCallParser(self.format, self.names, new_id, is_forced=is_forced)

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation as shown to the model."""
        if not self.is_described:
            return messages
        return with_tools_described(messages, self.tools, self.format)

    def check(self) -> None:
        """InvalidRequest, naming the tool, if the grammar is invalid."""
        assert self.grammar is not None, "only a grammar can be invalid"
        try:
            check_grammar(self.grammar)
        except InvalidRequest:
            for number, tool in enumerate(self.tools):
                with _attribute_errors_to(number):
                    schema = _arguments_schema(tool, is_closed=self.are_closed)
                    check_grammar(Grammar.json_schema(schema))
            raise


class ToolChoice(NamedTuple):
    """A request's `tool_choice`: whether a call is required, and of which tools."""

    must_call: bool
    allowed: dict[int, Tool]  # by index among the tools
    is_one: bool = False  # exactly one call


def tool_use(
    template: str | None,
    tools: Sequence[Tool] | None,
    choice: str | Mapping[str, Any] | None = None,
    *,
    parallel: bool = True,
    parser: str = AUTO,
    disable_additional_properties: bool = False,
) -> ToolUse | None:
    """The tools of a request; None if the model may use none.

    `parser` names the format of calls; `auto` detects it in the template. Strict tools, and all
    tools with `disable_additional_properties`, allow only the arguments that they name.
    InvalidRequest names the field that is wrong, or says what the template lacks.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is given without tools; send tools, or leave it out")
        return None
    _check_tools(tools)
    chosen = _parse_choice(choice, tools)
    if choice == "none":
        return None
    format, is_described = format_of(template, parser)
    grammar, are_closed = None, disable_additional_properties
    if chosen.must_call:
        if format is HARMONY:
            problem = f"must be auto or none with --reasoning-parser {HARMONY.name}"
            raise InvalidRequest(f"tool_choice {problem}, not {shorten(choice)}")
        is_one = chosen.is_one or not (parallel and format.between)
        grammar = _calls_grammar(format, chosen.allowed, is_one=is_one, is_closed=are_closed)
    return ToolUse(
        format=format, tools=tuple(tools), grammar=grammar, is_described=is_described,
        are_closed=are_closed, names=frozenset(map(_name, chosen.allowed.values())),
    )  # fmt: skip


@lru_cache(maxsize=32)
def format_of(template: str | None, parser: str = AUTO) -> tuple[ToolFormat, bool]:
    """The format of calls of a model, and whether tools must be described in the system message."""
    prompt = render_tool_prompt(template)
    if parser not in (AUTO, HARMONY.name):
        return FORMATS[parser], not prompt
    if not prompt:
        raise InvalidRequest(
            "tools are not supported by this model's chat template; leave them out, or start the "
            f"server with --tool-call-parser {HERMES.name} to describe them in the system message"
        )
    if parser == HARMONY.name:
        return HARMONY, False
    for pattern, format in FORMAT_PATTERNS:
        if pattern.search(prompt):
            return format, False
    raise InvalidRequest(
        "tools are in a format that cannot be detected in this model's chat template; start the "
        f"server with --tool-call-parser set to one of {', '.join(FORMATS)}"
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    names = set[str]()
    for number, tool in enumerate(tools):
        if problem := _tool_problem(tool, names):
            raise InvalidRequest(f"tools[{number}].{problem}")
        names.add(_name(tool))


def _tool_problem(tool: Tool, names: Collection[str]) -> str | None:
    """What is wrong with a tool; None if it is valid and its name is new."""
    kind, function = tool.get("type"), tool.get("function")
    if kind != "function":
        return f"type must be 'function', not {shorten(kind)}"
    if not _is_map(function):
        return f"function must be an object, not {shorten(function)}"
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"function.name must be 1 to 64 letters, digits, _ and -, not {name!r}"
    if name in names:
        return f"function.name {name!r} is a duplicate; names are unique"
    if parameters is not None and not _is_map(parameters):
        limit = "must be a JSON schema (an object)"
        return f"function.parameters {limit}, not {shorten(parameters)}"
    return None


def _parse_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice in (None, "none", "auto", "required"):
        return ToolChoice(choice == "required", dict(enumerate(tools)))
    if _is_map(choice) and choice.get("type") == "allowed_tools":
        return _parse_allowed(choice.get("allowed_tools"), tools)
    function = choice.get("function") if _is_map(choice) else None
    if not _is_map(function):
        raise InvalidRequest(
            'tool_choice must be none, auto, required, {"type": "function", "function": '
            f'{{"name": ...}}}} or {{"type": "allowed_tools", ...}}, not {choice!r}'
        )
    index = _index_of(function, tools)
    return ToolChoice(True, {index: tools[index]}, is_one=True)


def _parse_allowed(allowed: Any, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `allowed_tools`: a subset of the tools, and whether a call is required."""
    mode, named = (allowed.get("mode"), allowed.get("tools")) if _is_map(allowed) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise InvalidRequest(
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of at least "
            f"1 tool, not {allowed!r}"
        )
    functions = [tool.get("function") if _is_map(tool) else None for tool in named]
    indices = sorted({_index_of(function, tools) for function in functions})
    return ToolChoice(mode == "required", {index: tools[index] for index in indices})


def _index_of(function: Any, tools: Sequence[Tool]) -> int:
    """The index of a named tool among the tools."""
    known = {_name(tool): number for number, tool in enumerate(tools)}
    name = function.get("name") if _is_map(function) else None
    if not isinstance(name, str) or name not in known:
        names = ", ".join(known)
        raise InvalidRequest(f"tool_choice names {name!r}, which is not one of the tools: {names}")
    return known[name]


def _calls_grammar(
    format: ToolFormat, tools: Mapping[int, Tool], *, is_one: bool, is_closed: bool
) -> Grammar:
    """A grammar of one or more calls of these tools, and nothing else."""
    calls = "one" if is_one else f"one ({json.dumps(format.between)} one)*"
    lines = [f'start: "[" {calls} "]"' if format.is_list else f"start: {calls}"]
    lines.append("one: " + " | ".join(f"call{number}" for number in tools))
    for number, tool in tools.items():
        begin = f'{format.begin}{{"name": {json.dumps(_name(tool))}, "{format.arguments}": '
        end = "}" + format.end
        lines.append(f"call{number}: {json.dumps(begin)} json{number} {json.dumps(end)}")
        with _attribute_errors_to(number):
            schema = _arguments_schema(tool, is_closed=is_closed)
            lines.append(f"json{number}: %json {Grammar.json_schema(schema).text}")
    return replace(Grammar.tool_calls("\n".join(lines)), param="tools")


def _arguments_schema(tool: Tool, *, is_closed: bool) -> dict[str, Any]:
    """The schema of a tool's arguments; keywords that cannot be enforced are ignored."""
    function = tool["function"]
    parameters = function.get("parameters") or NO_PARAMETERS
    if is_closed or function.get("strict") is True:
        parameters = close_objects(parameters)
    return with_bounded_whitespace(parameters, lenient=True)


@contextmanager
def _attribute_errors_to(number: int) -> Iterator[None]:
    """Make InvalidRequest raised inside name the parameters of this tool."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"tools[{number}].function.parameters: {error}") from None


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _is_map(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
