"""Validates the fields of generation requests and turns them into SamplingParams.

Fields of other servers that would change the output, but are not supported, are refused. Fields
that change nothing, such as `store`, are accepted and logged once. Sizes are limited where the work
grows with them and the model's length does not bound them; the limits are far above practical use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headway.engine.queries import GetTime
from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.response_format import GUIDED_FIELDS
from headway.server.http.errors import ApiError, field_error, format_value
from headway.server.openai.protocol import GenerationFields

MAX_ID_DIGITS = 18  # of a token id; the engine refuses ids beyond the vocabulary
MAX_STOP_CHARACTERS = 8192  # of all stop strings together, and of all bad words
MAX_LISTED_TOKENS = 1 << 18  # of /tokenize and /detokenize; the model's length if that is larger
MAX_ECHOED_LOGPROBS = 1 << 22  # entries for prompt tokens in all choices of a response
SAME_NAMES = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "bad_words",
    "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "priority",
)  # fmt: skip
PARAM_NAMES = {**{name: name for name in SAME_NAMES}, "user": "client", "cache_salt": "salt"}


class UnsupportedField(NamedTuple):
    """A field that is refused, except for the `accepted` values, which change nothing."""

    accepted: tuple[Any, ...] = ()
    advice: str = "leave it out"


USE_TOOLS = "use tools and tool_choice"
TEXT_ONLY = "the model reads and writes text only"
UNSUPPORTED_FIELDS: dict[str, UnsupportedField] = {
    "audio": UnsupportedField(advice=TEXT_ONLY),
    "chat_template": UnsupportedField(advice="start the server with --chat-template"),
    "echo": UnsupportedField((False,), "send the prompt to /v1/completions"),
    "function_call": UnsupportedField(("none",), USE_TOOLS),
    "functions": UnsupportedField(([],), USE_TOOLS),
    "guided_whitespace_pattern": UnsupportedField(advice="use x-guidance in the schema"),
    "kv_transfer_params": UnsupportedField(),
    "length_penalty": UnsupportedField((1, 1.0)),
    "logits_processors": UnsupportedField(([],), "use logit_bias, bad_words or structured_outputs"),
    "mm_processor_kwargs": UnsupportedField(advice=TEXT_ONLY),
    "modalities": UnsupportedField((["text"],), TEXT_ONLY),
    "spaces_between_special_tokens": UnsupportedField((True,)),
    "structural_tag": UnsupportedField(advice="use structured_outputs"),
    "use_beam_search": UnsupportedField((False,), "use n and temperature"),
    "web_search_options": UnsupportedField(),
}


def check_model(context: Context, name: str | None) -> None:
    """ApiError 404 if the model is not the served one."""
    if name is not None and name != context.model_name:
        problem = f"model {format_value(name)} is not served; available: {context.model_name!r}"
        raise ApiError(404, problem, param="model", code="model_not_found")


async def sampling_params_of(
    context: Context, body: GenerationFields, *, max_tokens: int | None, **more: Any
) -> SamplingParams:
    """The fields as SamplingParams; InvalidRequest or ApiError names the first wrong field."""
    extra = body.model_extra or {}
    for name, value in extra.items():
        field = UNSUPPORTED_FIELDS.get(name)
        if field is not None and value is not None and value not in field.accepted:
            raise field_error(name, f"{format_value(value)} is not supported; {field.advice}")
    known = UNSUPPORTED_FIELDS.keys() | GUIDED_FIELDS.keys()
    context.ignored_fields.report({name: extra[name] for name in extra if name not in known})
    given = {name: getattr(body, field) for field, name in PARAM_NAMES.items()}
    params = {name: value for name, value in given.items() if value is not None}
    if body.logit_bias:
        params["logit_bias"] = _biases(body.logit_bias)
    params["deadline"] = await deadline_of(context, body.deadline)
    check_salt(body.cache_salt)
    if body.stream_options is not None and not body.stream:
        raise field_error("stream_options", "is allowed only with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise field_error("prompt_logprobs", "is not supported with stream: true")
    _check_sizes(context, body)
    return SamplingParams(max_tokens=max_tokens, **params, **more)


async def deadline_of(context: Context, seconds: float | None) -> float | None:
    """A deadline in seconds from now as a time on the engine's clock."""
    return None if seconds is None else await context.engine.ask(GetTime()) + seconds


def check_salt(salt: str | None) -> None:
    """ApiError if a cache salt contains unprintable characters."""
    if salt and not salt.isprintable():
        raise field_error("cache_salt", f"must be printable text, not {format_value(salt)}")


def check_num_choices(context: Context, num_prompts: int, n: int) -> None:
    """ApiError if prompts times `n` exceeds the server's limit."""
    limit = context.settings.max_choices
    if num_prompts * n > limit:
        if num_prompts == 1:
            raise field_error("n", f"must be at most {limit} for 1 prompt, not {n}; lower n")
        total = f"{num_prompts} prompts with n {n} make {num_prompts * n} choices (limit {limit})"
        raise ApiError(400, f"prompt: {total}; send fewer prompts or lower n", param="prompt")


def check_echoed_logprobs(num_tokens: int, logprobs: int | None, field: str = "logprobs") -> None:
    """ApiError if the log probabilities of `num_tokens` prompt tokens would take too much memory.

    `num_tokens` counts the prompt tokens of all choices.
    """
    num_entries = num_tokens * ((logprobs or 0) + 1)
    if logprobs is not None and num_entries > MAX_ECHOED_LOGPROBS:
        problem = f"gives {num_entries} entries for the prompt (limit {MAX_ECHOED_LOGPROBS})"
        raise field_error(field, f"{problem}; request fewer logprobs or send fewer prompts")


def max_listed_tokens(context: Context) -> int:
    """The largest number of token ids that /tokenize returns and /detokenize accepts."""
    return max(context.max_model_len, MAX_LISTED_TOKENS)


def _check_sizes(context: Context, body: GenerationFields) -> None:
    """ApiError for a number of tokens, a list or texts of a size that no request may have."""
    limit = context.max_model_len
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        value = getattr(body, name, None)
        if value is not None and value > limit:
            problem = f"must be at most {limit}, the model's length, not {format_value(value)}"
            raise field_error(name, problem)
    for name in ("stop", "bad_words"):
        value = getattr(body, name)
        if not value:
            continue
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > MAX_STOP_CHARACTERS:
            problem = f"must have at most {MAX_STOP_CHARACTERS} characters in total, not {size}"
            raise field_error(name, problem)
    allowed, limit = body.allowed_token_ids, context.input_processor.vocab_size
    if allowed and len(allowed) > limit:
        problem = f"must have at most {limit} items, the vocabulary size, not {len(allowed)}"
        raise field_error("allowed_token_ids", problem)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not token.isascii() or not token.isdecimal() or len(token) > MAX_ID_DIGITS:
            problem = f'has the key {format_value(token)}; keys must be token ids, such as "42"'
            raise field_error("logit_bias", problem)
    return {int(token): bias for token, bias in biases.items()}
