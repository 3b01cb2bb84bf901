"""Turns the prompts and conversations of request bodies into tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from headway.engine.input_processor import Prompt, template_variables
from headway.server.context import Context
from headway.server.generation.request_fields import max_listed_tokens
from headway.server.http.errors import attribute_errors_to, field_error
from headway.server.http.offload import MAX_INLINE_SIZE, offload
from headway.server.openai.protocol import ChatMessage, ChatRequest, GenerationFields
from headway.server.toolcalls.choice import ToolUse
from headway.server.toolcalls.formats import HERMES
from headway.server.toolcalls.prompt import template_messages

MESSAGE_COST = 40  # fixed cost of rendering one message, in characters


def prompts_of(
    prompt: str | list[str] | list[int] | list[list[int]], field: str = "prompt"
) -> list[Prompt]:
    """The prompts in a field that holds a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise field_error(field, "is empty; at least one token is needed")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def tokens_of(
    context: Context,
    prompts: Sequence[Prompt],
    field: str = "prompt",
    *,
    max_tokens: int | None = None,
    special: bool = True,
) -> list[list[int]]:
    """Tokens of each prompt. ApiError if one is empty or longer than `max_tokens`.

    `max_tokens` defaults to the model's length.
    """
    limit = context.max_model_len if max_tokens is None else max_tokens

    def tokens_of_each() -> list[list[int]]:
        process = context.input_processor.tokens
        return [process(prompt, limit, special=special) for prompt in prompts]

    with attribute_errors_to(field):
        tokens = await offload(sum(map(len, prompts)), tokens_of_each)
    empty = next((number for number, each in enumerate(tokens) if not each), None)
    if empty is not None:
        which = f"[{empty}]" if len(tokens) > 1 else ""
        raise field_error(f"{field}{which}", "has no tokens; at least one is needed")
    return tokens


async def chat_tokens_of(
    context: Context, body: ChatRequest, use: ToolUse | None, max_tokens: int
) -> list[int]:
    """Tokens of a conversation. ApiError if there are more than `max_tokens`."""
    options, processor = _template_options(body, use), context.input_processor

    def tokens() -> list[int]:
        given = [message.model_dump(exclude_unset=True) for message in body.messages]
        template = processor.need_tokenizer().chat_template
        rendered = template_messages(template, given, use.format if use else HERMES)
        if use is not None:
            rendered = list(use.messages(rendered))
        return processor.chat_tokens(rendered, max_tokens, **options)

    with attribute_errors_to("messages"):
        return await offload(sum(map(_rendering_cost, body.messages)), tokens)


async def prediction_of(context: Context, body: ChatRequest) -> array[int] | None:
    """Tokens of the prediction. ApiError if there are more than the model's length."""
    if body.prediction is None:
        return None
    text, limit = body.prediction.text, context.max_model_len

    def tokens() -> list[int]:
        return context.input_processor.tokens(text, limit, special=False)

    with attribute_errors_to("prediction"):
        return array("i", await offload(len(text), tokens))


def _rendering_cost(message: ChatMessage) -> int:
    """Approximate cost of rendering a message, in characters."""
    content = message.content or ""
    size = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    others = [message.tool_calls, *(message.model_extra or {}).values()]
    size += sum(len(each) if isinstance(each, str) else MAX_INLINE_SIZE for each in others if each)
    return MESSAGE_COST + size


def _template_options(body: ChatRequest, use: ToolUse | None) -> dict[str, Any]:
    """Variables of the chat template other than the messages."""
    with attribute_errors_to("chat_template_kwargs"):
        options = template_variables(body.chat_template_kwargs)
    for name in ("add_generation_prompt", "documents", "reasoning_effort"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if body.reasoning_effort == "none":  # the names of most templates
        options = {"enable_thinking": False, "thinking": False, **options}
    if body.continue_final_message:
        options["continue_final_message"] = True
    if body.add_special_tokens is not None:
        options["special"] = body.add_special_tokens
    if use is not None and not use.is_described:
        options["tools"] = list(use.tools)
    return options


def max_prompt_tokens(context: Context, body: GenerationFields) -> int:
    """Tokens that a prompt may have before it is truncated."""
    is_truncated = body.truncate_prompt_tokens is not None
    return max_listed_tokens(context) if is_truncated else context.max_model_len


def truncate_prompt(tokens: list[int], body: GenerationFields) -> list[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt; all if the field is absent."""
    return tokens if body.truncate_prompt_tokens is None else tokens[-body.truncate_prompt_tokens :]
