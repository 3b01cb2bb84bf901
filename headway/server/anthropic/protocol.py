"""Models of Anthropic's Messages API, and the conversion of its requests to chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.server.http.errors import ApiError, field_error, format_value
from headway.server.openai.protocol import (
    MAX_NAME_CHARACTERS,
    MAX_STOP_STRINGS,
    ChatMessage,
    ChatRequest,
    RequestModel,
    ResponseFormat,
    ShortText,
    short_text,
)

# Fields of a chat request, and their names in this API.
FIELD_NAMES = {"stop": "stop_sequences", "user": "metadata", "response_format": "output_config"}
SERVER_TOOLS = ("container", "mcp_servers")
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Metadata(RequestModel):
    user_id: ShortText | None = None


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


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
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    metadata: Metadata | None = None


class MessagesResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class CountResponse(BaseModel):
    input_tokens: int


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorBody


def chat_request(body: CountRequest) -> ChatRequest:
    """Convert a request to a chat request; ApiError names a field that is wrong or unsupported."""
    if (kind := (body.thinking or {}).get("type", "disabled")) not in ("disabled", "adaptive"):
        raise field_error("thinking", f"must be disabled or adaptive, not {format_value(kind)}")
    for name in SERVER_TOOLS:
        if (body.model_extra or {}).get(name):
            raise field_error(name, "is not supported: the server runs no tools; leave it out")
    choice, config = body.tool_choice or {}, body.output_config or OutputConfig()
    messages = _messages(body)
    last = messages[-1]
    fields: dict[str, Any] = {
        "model": body.model, "messages": messages, "tools": _tools(body.tools),
        "continue_final_message": last.role == "assistant" and not last.tool_calls,
        "response_format": _response_format(config.format), "reasoning_effort": config.effort,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
    }  # fmt: skip
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens, "stop": body.stop_sequences,
            "temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p,
            "user": body.metadata.user_id if body.metadata else None,
        }  # fmt: skip
    return ChatRequest.model_construct(**fields)


def _response_format(format: JsonFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    schema = {"schema": format.schema_, "strict": True}
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": schema})


def _messages(body: CountRequest) -> list[ChatMessage]:
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        where = f"messages[{number}].content"
        if isinstance(message.content, str) or message.role == "system":
            found.append({"role": message.role, "content": _text(message.content, where)})
        elif message.role == "assistant":
            found.append(_assistant(message.content, where))
        else:
            found += _user(message.content, where)
    return [ChatMessage.model_validate(each) for each in found]


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """An assistant message: text and tool calls."""
    texts, calls = [], []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            name, arguments = block.get("name"), json.dumps(block.get("input") or {})
            function = {"name": name, "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # not shown to the model again
            texts.append(_block_text(block, f"{where}[{number}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """A user message: each tool result becomes a separate message, followed by the text."""
    found, texts = [], []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            result = _text(block.get("content") or "", f"{place}.content")
            id = short_text(block.get("tool_use_id"), f"{place}.tool_use_id", "messages")
            found.append({"role": "tool", "content": result, "tool_call_id": id})
        else:
            texts.append(_block_text(block, place))
    if texts or not found:
        found.append({"role": "user", "content": "\n".join(texts)})
    return found


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be a string or a list of text blocks", param="messages")
    return "\n".join(_block_text(block, f"{where}[{n}]") for n, block in enumerate(content))


def _block_text(block: Any, where: str) -> str:
    is_text = isinstance(block, Mapping) and block.get("type") == "text"
    if not is_text or not isinstance(block.get("text"), str):
        problem = f"{where} must be a text block, the only supported kind"
        problem = f"{problem}, not {format_value(block)}"
        raise ApiError(400, problem, param="messages")
    text: str = block["text"]
    return text


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    found = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            problem = f'tools[{number}].type must be "custom", not {format_value(tool["type"])}'
            raise ApiError(400, f"{problem}; the server runs no tools itself", param="tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if "description" in tool:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        problem = f"must be of type auto, any, tool or none, not {format_value(kind)}"
        raise field_error("tool_choice", problem)
    return TOOL_CHOICES[kind]
