"""The request model of POST /v1/responses, and its conversion to a chat request.

The server is stateless, so fields that refer to an earlier response are refused. The input items
are validated here, so that an error names the item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from headway.server.http.errors import field_error, format_value
from headway.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    GenerationFields,
    RequestModel,
    ResponseFormat,
    ShortText,
    optional,
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
    schema_: dict[str, object] | None = optional(alias="schema")


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: ShortText | None = None


class ResponsesRequest(GenerationFields):
    """OpenAI's fields and the additional generation fields of this server."""

    input: str | list[dict[str, Any]] = Field(description="Text, or a list of items.")
    instructions: str | None = None
    max_output_tokens: int | None = optional(ge=1)
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = optional(ge=0, le=100)
    include: list[str] | None = None
    metadata: dict[str, object] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = optional("Ignored; responses are never stored.")
    chat_template_kwargs: dict[str, object] | None = None

    @property
    def effort(self) -> str | None:
        effort = (self.reasoning or {}).get("effort")
        return effort if isinstance(effort, str) else None

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
    names = GenerationFields.model_fields.keys() & body.model_fields_set
    fields = {name: getattr(body, name) for name in names}
    # Fields of chat requests that this API does not have would not be validated: drop them.
    more = {name: given[name] for name in given if name not in ChatRequest.model_fields}
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
            "reasoning_effort": body.effort,
        },
    )  # fmt: skip


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    if body.instructions:
        found.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*found, ChatMessage(role="user", content=body.input)]
    if not body.input:
        raise field_error("input", "is empty; at least one item is needed")
    reasoning = ""
    for number, item in enumerate(body.input):
        _add(found, item, f"input[{number}]")
        if item.get("type") == "reasoning":
            reasoning = _reasoning_text(item)
        else:
            if reasoning and found[-1].role == "assistant":
                found[-1] = found[-1].model_copy(update={"reasoning_content": reasoning})
            reasoning = ""
    if len(found) > 1 and found[0].role == found[1].role == "system":
        # Most templates do not allow two system messages.
        content = f"{found[0].content}\n\n{found[1].content}"
        found[:2] = [ChatMessage(role="system", content=content)]
    return found


def _add(found: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    """Add an input item to the messages."""
    match kind := item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ROLES:
                problem = f"must be one of {', '.join(ROLES)}, not {format_value(role)}"
                raise field_error(f"{where}.role", problem)
            role = "system" if role == "developer" else role
            content = _text(item.get("content"), f"{where}.content")
            found.append(ChatMessage(role=role, content=content))
        case "function_call":
            _add_call(found, item, where)
        case "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            id = short_text(item.get("call_id"), f"{where}.call_id")
            found.append(ChatMessage(role="tool", content=output, tool_call_id=id))
        case "reasoning":  # belongs to the next message
            pass
        case _:
            known = "message, function_call, function_call_output, reasoning"
            raise field_error(f"{where}.type", f"must be one of {known}, not {format_value(kind)}")


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; empty if it is malformed."""
    content = item.get("content")
    parts = (
        [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    )
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _add_call(found: list[ChatMessage], item: Mapping[str, Any], where: str) -> None:
    """Add a call to the preceding assistant message, or to a new one."""
    function = {member: item.get(member) for member in ("name", "arguments")}
    for member, value in function.items():
        if not isinstance(value, str):
            problem = f"must be a string, not {format_value(value)}"
            raise field_error(f"{where}.{member}", problem)
    id = short_text(item.get("call_id"), f"{where}.call_id")
    call = {"id": id, "type": "function", "function": function}
    if not found or found[-1].role != "assistant":
        found.append(ChatMessage(role="assistant", content=None))
    found[-1].tool_calls = [*(found[-1].tool_calls or ()), call]


def _text(content: object, where: str) -> str:
    """Content as one text; ApiError if a part is not text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        problem = f"must be a string or a list of parts, not {format_value(content)}"
        raise field_error(where, problem)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            problem = "must be a part of type input_text or output_text"
            raise field_error(f"{where}[{number}]", f"{problem}, not {format_value(part)}")
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[object] | None:
    """Function tools in the format of chat requests, which nests the function one level deeper."""
    found: list[object] = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            problem = f'must be "function", not {format_value(tool.get("type"))}'
            problem += "; the server runs no tools itself"
            raise field_error(f"tools[{number}].type", problem)
        function = {key: value for key, value in tool.items() if key != "type"}
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(choice: str | Mapping[str, Any] | None) -> object:
    if choice is None or isinstance(choice, str):
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
        raise field_error("text.format.schema", "is missing; json_schema needs it")
    schema = {"name": format.name, "strict": format.strict, "schema": format.schema_}
    is_schema = format.type == "json_schema"
    more = {"json_schema": schema} if is_schema else {}
    return ResponseFormat.model_validate({"type": format.type, **more})
