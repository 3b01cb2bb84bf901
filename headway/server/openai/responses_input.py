"""The request model of POST /v1/responses, and its conversion to a chat request.

The server is stateless, so fields that refer to an earlier response are refused. The input items
are validated here, so that an error names the item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from headway.server.http.errors import ApiError, field_error, format_value
from headway.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    GenerationFields,
    RequestModel,
    ResponseFormat,
    ShortText,
    short_text,
)

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
STATEFUL = {
    "previous_response_id": "send the earlier items in input",
    "conversation": "send the earlier items in input",
    "prompt": "send instructions and input",
    "background": "wait for the response, or stream it",
}
# Fields of a chat request, and their names in this API.
FIELD_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
LOGPROBS = "message.output_text.logprobs"


class TextFormat(RequestModel):
    """The format of the output text."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: ShortText | None = None


class ResponsesRequest(GenerationFields):
    """OpenAI's fields and the additional generation fields of this server."""

    input: str | list[dict[str, Any]] = Field(description="Text, or a list of items.")
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=100)
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = Field(default=None, description="Ignored; responses are never stored.")
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Convert a request to a chat request; ApiError names a field that is wrong or unsupported."""
    given = body.model_extra or {}
    for name, advice in STATEFUL.items():
        if given.get(name):
            raise field_error(name, f"is not supported: responses are not stored; {advice}")
    if body.truncation == "auto":
        raise field_error("truncation", 'must be "disabled"; use truncate_prompt_tokens instead')
    if (body.n or 1) > 1:
        raise field_error("n", f"must be 1, not {body.n}; a response has one output")
    fields = {
        name: getattr(body, name)
        for name in GenerationFields.model_fields
        if name in body.model_fields_set
    }
    # Fields of chat requests that this API does not have would not be validated: drop them.
    more = {name: given[name] for name in given if name not in ChatRequest.model_fields}
    effort = (body.reasoning or {}).get("effort")
    return ChatRequest.model_construct(
        _fields_set=None,
        **{
            **fields, **more,
            "messages": _messages(body), "max_completion_tokens": body.max_output_tokens,
            "logprobs": body.wants_logprobs, "top_logprobs": body.top_logprobs,
            "tools": _tools(body.tools), "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _response_format(body.text),
            "chat_template_kwargs": body.chat_template_kwargs,
            "reasoning_effort": effort if isinstance(effort, str) else None,
        },
    )  # fmt: skip


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    found: list[dict[str, Any]] = []
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        found.append({"role": "user", "content": body.input})
        return _validate(found)
    if not body.input:
        raise field_error("input", "is empty; at least one item is needed")
    for number, item in enumerate(body.input):
        _add(found, item, f"input[{number}]")
    return _validate(found)


def _validate(messages: list[dict[str, Any]]) -> list[ChatMessage]:
    """Validate messages; join two leading system messages, which most templates do not allow."""
    if len(messages) > 1 and all(message["role"] == "system" for message in messages[:2]):
        contents = [message["content"] for message in messages[:2]]
        messages = [{"role": "system", "content": "\n\n".join(contents)}, *messages[2:]]
    return [ChatMessage.model_validate(message) for message in messages]


def _add(found: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add an input item to the messages."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise ApiError(
                400, f"{where}.role must be one of {', '.join(ROLES)}, not {format_value(role)}",
                param="input",
            )  # fmt: skip
        role = "system" if role == "developer" else role
        found.append({"role": role, "content": _text(item.get("content"), f"{where}.content")})
    elif kind == "function_call":
        _add_call(found, item, where)
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{where}.output")
        found.append({"role": "tool", "content": output, "tool_call_id": _call_id(item, where)})
    elif kind != "reasoning":  # reasoning items are not shown to the model again
        known = "message, function_call, function_call_output, reasoning"
        problem = f"{where}.type must be one of {known}, not {format_value(kind)}"
        raise ApiError(400, problem, param="input")


def _add_call(found: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add a call to the preceding assistant message, or to a new one."""
    function = {member: item.get(member) for member in ("name", "arguments")}
    for member, value in function.items():
        if not isinstance(value, str):
            problem = f"{where}.{member} must be a string, not {format_value(value)}"
            raise ApiError(400, problem, param="input")
    call = {"id": _call_id(item, where), "type": "function", "function": function}
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": None})
    found[-1].setdefault("tool_calls", []).append(call)


def _call_id(item: Mapping[str, Any], where: str) -> str:
    return short_text(item.get("call_id"), f"{where}.call_id", "input")


def _text(content: Any, where: str) -> str:
    """Content as one text; ApiError if a part is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problem = f"{where} must be a string or a list of parts, not {format_value(content)}"
        raise ApiError(400, problem, param="input")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            problem = f"{where}[{number}] must be a part of type input_text or output_text"
            raise ApiError(400, f"{problem}, not {format_value(part)}", param="input")
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Function tools in the format of chat requests, which nests the function one level deeper."""
    found = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            kind = format_value(tool.get("type"))
            problem = f'tools[{number}].type must be "function", not {kind}'
            raise ApiError(400, f"{problem}; the server runs no tools itself", param="tools")
        function = {key: value for key, value in tool.items() if key != "type"}
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [
            {"type": "function", "function": {"name": tool.get("name")}}
            for tool in (tools if isinstance(tools, list) else [])
            if isinstance(tool, dict)
        ]
        allowed = {"mode": choice.get("mode"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    allowed_values = "none, auto, required, a function or allowed_tools"
    raise field_error("tool_choice", f"must be {allowed_values}, not {format_value(choice)}")


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    format = text.format if text else None
    if format is None:
        return None
    if format.type == "json_schema" and format.schema_ is None:
        raise ApiError(400, "text.format.schema is missing; json_schema needs it", param="text")
    schema = {"name": format.name, "strict": format.strict, "schema": format.schema_}
    value: dict[str, Any] = {"type": format.type}
    if format.type == "json_schema":
        value["json_schema"] = schema
    return ResponseFormat.model_validate(value)
