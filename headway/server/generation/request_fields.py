"""From a request's body to what the engine is asked: prompts as tokens, fields as SamplingParams.

Refuses here, with the field's name, what the engine need not even see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from headway.engine.input_processor import Prompt
from headway.errors import InvalidRequest, ModelError, RequestTooLong
from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.limits import check_sizes, max_listed_tokens
from headway.server.generation.unsupported import check_supported
from headway.server.http.errors import ApiError, refused, shown
from headway.server.http.offload import SHORT, aside
from headway.server.openai.protocol import ChatMessage, GenerationFields
from headway.server.toolcalls.choice import ToolUse
from headway.server.toolcalls.formats import HERMES
from headway.server.toolcalls.prompt import template_messages

MAX_DIGITS = 18  # of a token id; what is too large for the model is told its limit
SAME_NAME = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "priority",
)  # fmt: skip
PER_MESSAGE = 40  # characters that take as long as what each message costs
OTHER_NAME = {"user": "client", "cache_salt": "salt"}


def check_model(context: Context, name: str | None) -> None:
    """404 for a model that is not served here."""
    if name is not None and name != context.model_name:
        problem = f"the model {shown(name)} does not exist here; models: {context.model_name!r}"
        raise ApiError(404, problem, param="model", code="model_not_found")


async def sampling(
    context: Context, body: GenerationFields, *, max_tokens: int | None, **more: Any
) -> SamplingParams:
    """The fields as the engine takes them; InvalidRequest or ApiError names the one it cannot."""
    if body.model_extra:
        check_supported(body.model_extra)
    asked = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    for name, ours in OTHER_NAME.items():
        if (value := getattr(body, name)) is not None:
            asked[ours] = value
    if body.logit_bias:
        asked["logit_bias"] = _biases(body.logit_bias)
    if body.deadline is not None:
        asked["deadline"] = await deadline_of(context, body.deadline)
    check_salt(body.cache_salt)
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "is only for requests with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise refused("prompt_logprobs", "is only for requests without stream")
    _check_lengths(context, body)
    check_sizes(context, body)
    return SamplingParams(max_tokens=max_tokens, **asked, **more)


async def deadline_of(context: Context, seconds: float | None) -> float | None:
    """A client's seconds from now, on the engine's clock."""
    return None if seconds is None else await context.engine.ask("now") + seconds


def check_salt(salt: str | None) -> None:
    if salt and not salt.isprintable():
        raise refused("cache_salt", f"must be printable text, not {shown(salt)}")


def _check_lengths(context: Context, body: GenerationFields) -> None:
    """Refuse what no prompt could have; what is too much for this one ends as `length`."""
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        value, most = getattr(body, name, None), context.max_model_len
        if value is not None and value > most:
            raise refused(name, f"must be at most {most}, the model's length, not {shown(value)}")


def check_num_choices(context: Context, num_prompts: int, n: int) -> None:
    most = context.settings.max_choices
    if num_prompts * n > most:
        problem = f"{num_prompts} prompts with n {n} make {num_prompts * n} texts; at most {most}"
        raise ApiError(400, f"prompt: {problem}", param="prompt" if num_prompts > 1 else "n")


def prompts_of(
    prompt: str | list[str] | list[int] | list[list[int]], field: str = "prompt"
) -> list[Prompt]:
    """One prompt or several, whichever way they are written in this field."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused(field, "is empty; at least one token is needed")
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
    """The tokens of each prompt of this field; at most `max_tokens`, or the model's length."""
    most = context.max_model_len if max_tokens is None else max_tokens

    def tokens_of_each() -> list[list[int]]:
        return [context.asking.tokens(prompt, most, special=special) for prompt in prompts]

    with naming(field):
        tokens = await aside(sum(map(len, prompts)), tokens_of_each)
    empty = next((number for number, each in enumerate(tokens) if not each), None)
    if empty is not None:
        which = f"[{empty}]" if len(tokens) > 1 else ""
        problem = f"{field}{which} has no tokens; at least one is needed"
        raise ApiError(400, problem, param=field)
    return tokens


async def chat_tokens_of(
    context: Context,
    messages: Sequence[ChatMessage],
    use: ToolUse | None,
    options: Mapping[str, Any],
    max_tokens: int | None = None,
) -> list[int]:
    """A conversation's tokens; at most `max_tokens`, or the model's length."""
    most = context.max_model_len if max_tokens is None else max_tokens

    def tokens() -> list[int]:
        given = [message.model_dump(exclude_unset=True) for message in messages]
        template = context.asking.need_tokenizer().chat_template
        plain = template_messages(template, given, use.format if use else HERMES)
        if use is not None:
            plain = list(use.messages(plain))
        return context.asking.chat_tokens(plain, most, **options)

    with naming("messages"):
        return await aside(sum(map(_size, messages)), tokens)


def _size(message: ChatMessage) -> int:
    """About what rendering a message costs, in characters."""
    content = message.content or ""
    size = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    others = [message.tool_calls, *(message.model_extra or {}).values()]
    size += sum(len(each) if isinstance(each, str) else SHORT for each in others if each)
    return PER_MESSAGE + size


def most_tokens(context: Context, body: GenerationFields) -> int | None:
    """Tokens that a prompt may have before it is truncated; None: the model's length."""
    return None if body.truncate_prompt_tokens is None else max_listed_tokens(context)


def truncated(tokens: list[int], body: GenerationFields) -> list[int]:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` keeps."""
    return tokens if body.truncate_prompt_tokens is None else tokens[-body.truncate_prompt_tokens :]


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Whatever is wrong in here is wrong with this field, and the message says so."""
    try:
        yield
    except RequestTooLong as error:
        code = "context_length_exceeded"
        raise ApiError(400, f"{param}: {error}", param=param, code=code) from error
    except (InvalidRequest, ModelError) as error:
        words = str(error) if str(error).startswith(param) else f"{param}: {error}"
        raise ApiError(400, words, param=param) from error


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not token.isascii() or not token.isdecimal() or len(token) > MAX_DIGITS:
            whole = "whole numbers written as strings"
            raise refused("logit_bias", f"has the key {shown(token)}; keys are token ids, {whole}")
    return {int(token): bias for token, bias in biases.items()}
