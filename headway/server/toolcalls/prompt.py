"""Tools and earlier calls on their way to the model: through its chat template, or as plain text.

Most templates of models that were trained on tools write them by themselves. For other templates
the tools are described in the system message, and earlier calls and results are written as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from headway.errors import InvalidRequest, ModelError
from headway.server.http.json_size import excess
from headway.server.toolcalls.formats import HERMES, LLAMA3, ToolFormat
from headway.text.chat_template import render_chat

Message = Mapping[str, Any]
PROBE = "a_tool_to_look_for"
PROBE_ID = "abcdefghi"  # nine letters: what the strictest templates want
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CALL = '{{"name": <function name>, "{arguments}": <arguments as a JSON object>}}'
TOOLS = """\
You can call functions. These are the functions, each described by a JSON object:
<tools>
{tools}
</tools>
To call a function, {how}:
{call}"""


def template_messages(
    template: str | None, messages: Sequence[Message], format: ToolFormat = HERMES
) -> list[Message]:
    """Messages as a template takes them: arguments of earlier calls are objects, not JSON text.

    InvalidRequest names a call that cannot be read. Calls are written into the content where the
    template would leave them out.
    """
    found = [_with_opened_calls(number, message) for number, message in enumerate(messages)]
    if any(_is_about_calls(message) for message in found) and not shows_calls(template):
        return [_as_text(message, format) for message in found]
    return found


def with_tools_described(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[Message]:
    """Messages whose system message describes the tools, for templates that know no tools."""
    how = "write this and nothing else" if format is LLAMA3 else "write"
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = CALL.format(arguments=format.arguments)
    if format.is_list:
        call = f"{format.open}[{call}]"
    elif format.open:
        call = f"{format.begin}{call}{format.end}"
    text = TOOLS.format(tools=listed, how=how, call=call)
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{_plain_text(first.get('content'))}\n\n{text}"}, *rest]


@lru_cache(maxsize=32)
def shown_tools(template: str | None) -> str:
    """The prompt that a template writes for a tool; empty if it leaves tools out."""
    function = {"name": PROBE, "description": PROBE, "parameters": NOTHING}
    messages = [{"role": "user", "content": "?"}]
    try:
        shown = render_chat(template, messages, tools=[{"type": "function", "function": function}])
    except (InvalidRequest, ModelError) as error:
        raise InvalidRequest(f"tools cannot be shown to this model: {error}") from None
    return shown if PROBE in shown else ""


@lru_cache(maxsize=32)
def shows_calls(template: str | None) -> bool:
    """Whether a template writes the calls of earlier messages."""
    call = {"id": PROBE_ID, "type": "function", "function": {"name": PROBE, "arguments": {}}}
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "!", "tool_call_id": PROBE_ID, "name": PROBE},
    ]
    try:
        return PROBE in render_chat(template, messages)
    except (InvalidRequest, ModelError):  # it has rules about calls, so it knows them
        return True


def _is_about_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) or message["role"] == "tool"


def _as_text(message: Message, format: ToolFormat) -> Message:
    """A message with its calls, or a tool's result, written into the content."""
    if message["role"] == "tool":
        result = f"<tool_response>\n{_plain_text(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": result}
    if not message.get("tool_calls"):
        return message
    calls = [
        json.dumps(
            {"name": call["function"]["name"], format.arguments: call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in message["tool_calls"]
    ]
    if format.is_list:
        written = f"{format.open}[{', '.join(calls)}]"
    else:
        written = "\n".join(f"{format.begin}{call}{format.end}" for call in calls)
    content = _plain_text(message.get("content"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{content}\n{written}" if content else written}


def _plain_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _with_opened_calls(number: int, message: Message) -> Message:
    """A message whose calls have their arguments as objects; `developer` is the system's role."""
    if message.get("role") == "developer":  # OpenAI's newer name; templates know the older one
        message = {**message, "role": "system"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise InvalidRequest(f"messages[{number}].tool_calls must be a list, not {calls!r}")
    places = (f"messages[{number}].tool_calls[{place}]" for place in range(len(calls)))
    opened = [_opened(call, where) for call, where in zip(calls, places, strict=True)]
    return {**message, "tool_calls": opened}


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
