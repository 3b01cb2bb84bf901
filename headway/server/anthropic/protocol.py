"""Models of Anthropic's Messages API, and the conversion of its requests to chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from headway.server.http.errors import field_error, format_value
from headway.server.openai.protocol import (
    MAX_NAME_CHARACTERS,
    MAX_STOP_STRINGS,
    ChatMessage,
    ChatRequest,
    RequestModel,
    ResponseFormat,
    ShortText,
    optional,
    short_text,
)

# Fields of a chat request, and their names in this API.
FIELD_NAMES = {"stop": "stop_sequences", "user": "metadata", "response_format": "output_config"}
SERVER_TOOLS = ("container", "mcp_servers")
# The template's variables for a type of thinking; the budget has no effect.
THINKING = {"enabled": {"enable_thinking": True}, "disabled": {"enable_thinking": False}}
THINKING |= {"adaptive": {}, "between_tools": {}}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Metadata(RequestModel):
    user_id: ShortText | None = None


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: ShortText | None = None
    format: JsonFormat | None = None


class CountRequest(RequestModel):
    """The body of /v1/messages/count_tokens; /v1/messages has further fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, description="Maximum number of tokens to generate.")
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = optional(ge=0, le=1)
    top_k: int | None = optional(ge=-1)
    top_p: float | None = optional(gt=0, le=1)
    metadata: Metadata | None = None


class MessagesResponse(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, Any]


class CountResponse(TypedDict):
    input_tokens: int


def chat_request(body: CountRequest) -> ChatRequest:
    """Convert a request to a chat request; ApiError names a field that is wrong or unsupported."""
    kind = (body.thinking or {}).get("type", "adaptive")
    if not isinstance(kind, str) or kind not in THINKING:
        known = ", ".join(THINKING)
        raise field_error("thinking", f"must be of type {known}, not {format_value(kind)}")
    for name in SERVER_TOOLS:
        if (body.model_extra or {}).get(name):
            raise field_error(name, "is not supported: the server runs no tools; leave it out")
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    messages, more = _messages(body), dict[str, object]()
    last = messages[-1]
    if isinstance(body, MessagesRequest):
        more = {
            "max_completion_tokens": body.max_tokens, "stop": body.stop_sequences,
            "temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p,
            "user": body.metadata.user_id if body.metadata else None,
        }  # fmt: skip
    return ChatRequest.model_construct(
        _fields_set=None,
        **{
            "model": body.model, "messages": messages, "tools": _tools(body.tools),
            "continue_final_message": last.role == "assistant" and not last.tool_calls,
            "response_format": _response_format(config.format), "reasoning_effort": config.effort,
            "chat_template_kwargs": {**THINKING[kind]},
            "tool_choice": None if choice is None else _tool_choice(choice),
            "parallel_tool_calls": not (choice or {}).get("disable_parallel_tool_use", False),
            **more,
        },
    )  # fmt: skip


def _response_format(format: JsonFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    schema = {"schema": format.schema_, "strict": True}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})


def _messages(body: CountRequest) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    if body.system:
        found.append(ChatMessage(role="system", content=_text(body.system, "system")))
    for number, message in enumerate(body.messages):
        where = f"messages[{number}].content"
        if isinstance(message.content, str) or message.role == "system":
            found.append(ChatMessage(role=message.role, content=_text(message.content, where)))
        elif message.role == "assistant":
            found.append(_assistant(message.content, where))
        else:
            found += _user(message.content, where)
    return found


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> ChatMessage:
    """An assistant message: thinking, text and tool calls."""
    texts, calls, thoughts = [], [], []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            name, arguments = block.get("name"), json.dumps(block.get("input") or {})
            function = {"name": name, "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_block_text(block, f"{where}[{number}]"))
    text, more = "\n".join(texts), dict[str, Any]()
    if thoughts:
        more["reasoning_content"] = "\n".join(thoughts)
    if not calls:
        return ChatMessage(role="assistant", content=text, **more)
    return ChatMessage(role="assistant", content=text or None, tool_calls=calls, **more)


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[ChatMessage]:
    """A user message: each tool result becomes a separate message, followed by the text."""
    found, texts = [], []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            result = _text(block.get("content") or "", f"{place}.content")
            id = short_text(block.get("tool_use_id"), f"{place}.tool_use_id")
            found.append(ChatMessage(role="tool", content=result, tool_call_id=id))
        else:
            texts.append(_block_text(block, place))
    if texts or not found:
        found.append(ChatMessage(role="user", content="\n".join(texts)))
    return found


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(where, "must be a string or a list of text blocks")
    return "\n".join(_block_text(block, f"{where}[{n}]") for n, block in enumerate(content))


def _block_text(block: object, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        problem = "must be a text block, the only supported kind"
        raise field_error(where, f"{problem}, not {format_value(block)}")
    return text


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[object] | None:
    found: list[object] = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            problem = f'must be "custom", not {format_value(tool["type"])}'
            problem += "; the server runs no tools itself"
            raise field_error(f"tools[{number}].type", problem)
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if "description" in tool:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(choice: Mapping[str, Any]) -> object:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        problem = f"must be of type auto, any, tool or none, not {format_value(kind)}"
        raise field_error("tool_choice", problem)
    return TOOL_CHOICES[kind]
