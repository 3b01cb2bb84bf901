"""Shows tools and earlier calls to the model: through its chat template, or as plain text.

The chat templates of models trained on tools usually render tools and calls. For other templates,
the tools are described in the system message, and earlier calls and results are written as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from headway.errors import InvalidRequest, ModelError
from headway.server.http.json_body import json_limit_error
from headway.server.toolcalls.formats import HERMES, LLAMA3, ToolFormat
from headway.text.chat_template import Message, render_chat

PROBE = "a_tool_to_look_for"
PROBE_ID = "abcdefghi"  # nine letters, as the strictest templates require
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
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
    """Messages for a chat template: arguments of earlier calls are objects instead of JSON text.

    If the template does not render calls, they are written into the content; if it renders only one
    of a message, the others get messages of their own. InvalidRequest names a call that cannot be
    parsed.
    """
    found = [_with_parsed_calls(number, message) for number, message in enumerate(messages)]
    has_calls = any(each.get("tool_calls") or each["role"] == "tool" for each in found)
    if has_calls and not renders_calls(template):
        return [_as_text(message, format) for message in found]
    has_several = any(len(each.get("tool_calls") or ()) > 1 for each in found)
    if has_several and not renders_calls(template, 2):
        return _with_one_call_each(found)
    return found


def with_tools_described(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[Message]:
    """Messages with the tools described in the system message."""
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
def render_tool_prompt(template: str | None) -> str:
    """The prompt that a template renders for a sample tool; empty if it ignores tools."""
    function = {"name": PROBE, "description": PROBE, "parameters": NO_PARAMETERS}
    tools = [{"type": "function", "function": function}]
    try:
        prompt = render_chat(template, [{"role": "user", "content": "?"}], tools=tools)
    except (InvalidRequest, ModelError) as error:
        problem = f"tools cannot be rendered by this model's chat template: {error}"
        raise InvalidRequest(problem) from None
    return prompt if PROBE in prompt else ""


@lru_cache(maxsize=32)
def renders_calls(template: str | None, count: int = 1) -> bool:
    """Whether a template renders as many calls of an earlier message."""
    names = [f"{PROBE}_{number}" for number in range(count)]
    ids = [f"{PROBE_ID[:-1]}{number}" for number in range(count)]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}
        for id, name in zip(ids, names, strict=True)
    ]
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(
            {"role": "tool", "content": "!", "tool_call_id": id, "name": name}
            for id, name in zip(ids, names, strict=True)
        ),
    ]
    try:
        rendered = render_chat(template, messages)
        return all(name in rendered for name in names)
    except (InvalidRequest, ModelError):  # it has rules about calls, so it renders them
        return True


def _with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, followed by its result."""
    groups, by_id = [list[Message]()], dict[str, list[Message]]()
    for message in messages:
        if message["role"] == "tool":
            by_id.get(str(message.get("tool_call_id")), groups[-1]).append(message)
            continue
        calls = message.get("tool_calls") or []
        split = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:]]
        first = {**message, "tool_calls": calls[:1]} if calls else message
        for call, each in zip_longest(calls, (first, *split)):
            groups.append([each])
            if call is not None:
                by_id[str(call.get("id"))] = groups[-1]
    return [message for group in groups for message in group]


def _as_text(message: Message, format: ToolFormat) -> Message:
    """A message with its calls, or with a tool's result, written into the content."""
    if message["role"] == "tool":
        result = f"<tool_response>\n{_plain_text(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": result}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    values = [{"name": each["name"], format.arguments: each["arguments"]} for each in functions]
    calls = [json.dumps(value, ensure_ascii=False) for value in values]
    if format.is_list:
        written = f"{format.open}[{', '.join(calls)}]"
    else:
        written = "\n".join(f"{format.begin}{call}{format.end}" for call in calls)
    content = _plain_text(message.get("content"))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{content}\n{written}" if content else written}


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def _with_parsed_calls(number: int, message: Message) -> Message:
    """A message whose call arguments are objects; the role `developer` becomes `system`."""
    if message.get("role") == "developer":  # OpenAI's newer name, which templates do not know
        message = {**message, "role": "system"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    where = f"messages[{number}].tool_calls"
    parsed = [_parse_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]
    return {**message, "tool_calls": parsed}


def _parse_call(call: Mapping[str, Any], where: str) -> Message:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name and arguments, not {function!r}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        if problem := json_limit_error(arguments.encode(errors="replace")):
            raise InvalidRequest(f"{where}.function.arguments {problem}")
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments}}
