"""The bodies of POST /v1/messages and /v1/messages/count_tokens, read as chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from headway.server.http.errors import ApiError, refused, shown
from headway.server.openai.protocol import (
    LONGEST_NAME,
    MAX_STOPS,
    ChatMessage,
    ChatRequest,
    ResponseFormat,
    Taken,
    Text,
)

RENAMED = {"stop": "stop_sequences", "user": "metadata", "response_format": "output_config"}
NOT_RUN_HERE = ("container", "mcp_servers")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Metadata(Taken):
    user_id: Text | None = None


class Turn(Taken):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class JsonFormat(Taken):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Taken):
    effort: Text | None = None
    format: JsonFormat | None = None


class CountRequest(Taken):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=LONGEST_NAME)]
    messages: list[Turn] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, description="Most tokens to generate.")
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    metadata: Metadata | None = None


def chat_request(body: CountRequest) -> ChatRequest:
    """The same request as a chat; ApiError names what is wrong or cannot be done here."""
    if (kind := (body.thinking or {}).get("type", "disabled")) not in ("disabled", "adaptive"):
        raise refused("thinking", f"must be disabled or adaptive, not {shown(kind)}")
    for name in NOT_RUN_HERE:
        if (body.model_extra or {}).get(name):
            raise refused(name, "is not supported: the server runs no tools; leave it out")
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
    for number, turn in enumerate(body.messages):
        where = f"messages[{number}].content"
        if isinstance(turn.content, str) or turn.role == "system":
            content = _text(turn.content, where)
            found.append({"role": turn.role, "content": content})
        elif turn.role == "assistant":
            found.append(_assistant(turn.content, where))
        else:
            found += _user(turn.content, where)
    return [ChatMessage.model_validate(message) for message in found]


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """An assistant's turn: text and calls."""
    texts, calls = [], []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            name, arguments = block.get("name"), json.dumps(block.get("input") or {})
            function = {"name": name, "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):  # which no model here reads again
            texts.append(_block_text(block, f"{where}[{number}]"))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return message


def _user(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """A user's turn: results of tools, each a message of its own, and text."""
    found, texts = [], []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        if block.get("type") == "tool_result":
            result = _text(block.get("content") or "", f"{place}.content")
            id = str(block.get("tool_use_id", ""))
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
        problem = f"{where} must be a text block: the model reads text only, not {shown(block)}"
        raise ApiError(400, problem, param="messages")
    text: str = block["text"]
    return text


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    found = []
    for number, tool in enumerate(tools or ()):
        if tool.get("type", "custom") != "custom":
            problem = f'tools[{number}].type must be "custom", not {shown(tool["type"])}'
            raise ApiError(400, f"{problem}: no other tools run here", param="tools")
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
    if kind not in CHOICES:
        raise refused("tool_choice", f"must be of type auto, any, tool or none, not {shown(kind)}")
    return CHOICES[kind]
