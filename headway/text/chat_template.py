"""Renders a conversation with the model's chat template (Jinja), as transformers does.

Templates come with models and are not trusted, so they run in a sandbox. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.errors import ConfigError, InvalidRequest, ModelError

Message = Mapping[str, Any]
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
PROBE = "a text to look for"


def render_chat(
    template: str | None, messages: Sequence[Message], *, bos: str = "", eos: str = "",
    add_generation_prompt: bool | None = None, continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None, **more: Any,
) -> str:  # fmt: skip
    """The prompt for these messages; `more` are further variables for the template.

    With `continue_final_message` the prompt ends with the content of the last message, and the
    model continues it. Otherwise the prompt ends where the answer begins. InvalidRequest if the
    messages are malformed or the template rejects them.
    """
    if not template:
        raise ModelError(
            "the model has no chat template and cannot take messages; send a plain prompt instead"
        )
    _check(messages)
    if not _reads_parts(template):  # else the template fails, or prints a Python list
        messages = [_with_plain_content(message) for message in messages]
    messages = [_with_reasoning(message) for message in messages]
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest("add_generation_prompt and continue_final_message cannot both be true")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    variables = {
        "documents": None, **more, "tools": tools, "bos_token": bos, "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }  # fmt: skip
    text = _render_messages(template, messages, variables)
    return _up_to_content(text, messages[-1]) if continue_final_message else text


def _render_messages(
    template: str, messages: Sequence[Message], variables: Mapping[str, Any]
) -> str:
    """Render; if the template fails, again with what it may not know in another form."""
    given = [_without_empty_fields(message) for message in messages]
    tools = variables["tools"]
    filled = [{**message, "content": message.get("content") or ""} for message in given]
    described = tools and [_with_description(tool) for tool in tools]
    joined = [_with_reasoning_in_content(message) for message in filled]
    for form, others in ((given, tools), (filled, described)):
        try:
            return _render(template, {**variables, "messages": form, "tools": others})
        except InvalidRequest:
            continue
    return _render(template, {**variables, "messages": joined, "tools": described})


def _without_empty_fields(message: Message) -> Message:
    """Without `tool_calls` and other fields that are null: templates ask whether they exist."""
    found = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not found.get("tool_calls"):
        found.pop("tool_calls", None)
    return found


def _with_description(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    return {**tool, "function": {"description": "", **function}}


def _with_reasoning_in_content(message: Message) -> Message:
    """A message with calls has either content or `thinking` in gpt-oss's template."""
    if not (message.get("tool_calls") and message["content"] and message.get("thinking")):
        return message
    found = {**message, "content": f"{message['thinking']}\n{message['content']}"}
    del found["thinking"]
    return found


def _up_to_content(text: str, message: Message) -> str:
    """The rendered text up to the end of the content of the last message."""
    content = _with_plain_content(message).get("content") or ""
    for written in (content, content.strip()):
        start = text.rfind(written)
        if written and start >= 0:
            return text[: start + len(written)]
    raise InvalidRequest(
        "continue_final_message needs a last message whose content the chat template copies "
        f"unchanged, not {content!r}"
    )


def _render(template: str, variables: Mapping[str, Any]) -> str:
    compiled = _compile(template)
    try:
        return compiled.render(variables)
    except SecurityError as error:
        raise ModelError(f"the chat template is not allowed to do this: {error}") from error
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the chat template rejects these messages: {error}") from error
    except Exception as error:  # a template can raise anything
        problem = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"the chat template fails on these messages: {problem}") from error


def _check(messages: Sequence[Message]) -> None:
    """InvalidRequest names the message and field that no template can render."""
    if not messages:
        raise InvalidRequest("messages is empty; at least one message is needed")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            wanted = "an object with role and content"
            raise InvalidRequest(f"{where} is {message!r}; it must be {wanted}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InvalidRequest(f"{where}.role is {message.get('role')!r}; it must be a string")
        _check_content(message.get("content"), where, is_optional=bool(message.get("tool_calls")))


def _check_content(content: Any, where: str, is_optional: bool) -> None:
    if isinstance(content, str) or (content is None and is_optional):
        return
    if content is None:
        problem = "is missing; only messages with tool_calls may omit it"
        raise InvalidRequest(f"{where}.content {problem}")
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where}.content is {content!r}; it must be a string or text parts")
    for number, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where}.content[{number}] is {part!r};"
                ' only text parts are supported: {"type": "text", "text": "..."}'
            )


def _with_plain_content(message: Message) -> Message:
    """The message with its text parts joined by newlines."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning, if any, by all the names under which templates look for it."""
    texts = (message.get(name) for name in REASONING_NAMES)
    text = next((text for text in texts if isinstance(text, str) and text), None)
    if text is None or message["role"] != "assistant":
        return message
    return {**message, **dict.fromkeys(REASONING_NAMES, text)}


@lru_cache(maxsize=32)
def _reads_parts(template: str) -> bool:
    """True if a template handles content in parts; others print the list, or fail."""
    message = {"role": "user", "content": [{"type": "text", "text": PROBE}]}
    variables = {"messages": [message], "tools": None, "bos_token": "", "eos_token": ""}
    try:
        found = _render(template, variables)
    except (InvalidRequest, ModelError):
        return False
    return PROBE in found and f"{PROBE}'" not in found


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks model output for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012  (Jinja does not declare it as a ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        problem = f"a syntax error in line {error.lineno}: {error}"
        raise ModelError(f"the chat template has {problem}") from error


def read_template(path: str | Path) -> str:
    """The chat template in a file; ConfigError if it cannot be read or is not a Jinja template.

    The error names the line of a syntax error.
    """
    try:
        template = Path(path).read_text(encoding="utf-8")
        _compile(template)
    except (OSError, UnicodeDecodeError, ModelError) as error:
        raise ConfigError(f"--chat-template {path} cannot be used: {error}") from error
    return template


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Plain JSON; Jinja's filter would escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
