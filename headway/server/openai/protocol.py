"""Request models: OpenAI's fields and additional ones. The OpenAPI schema is made from them.

Validation is strict ("0.5" is not a number), null means absent, and unknown fields are accepted.
Ranges are those of `headway.sampling_params`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from headway.sampling_params import HUGE, RANGES
from headway.server.http.errors import ApiError, format_value

MAX_STOP_STRINGS = 64
MAX_NAME_CHARACTERS = 512  # of a name sent by a client
MAX_BIASES = 4096
MAX_MESSAGES = 8192

Item = TypeVar("Item")
ShortText = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
# A list that reports only its first wrong item; reporting all of a long list would be slow.
FailFastList = Annotated[list[Item], Field(fail_fast=True)]


def _ranged(name: str, description: str = "") -> Any:
    """A field with the range that SamplingParams has for it."""
    limits = RANGES[name]
    low = limits.low if limits.low > -HUGE else None
    high = limits.high if limits.high < HUGE else None
    if limits.is_open:
        return Field(default=None, gt=low, le=high, description=description or None)
    return Field(default=None, ge=low, le=high, description=description or None)


def _limit_biases(biases: Any) -> Any:
    """Refuse too many biases by their number, before each of them is validated."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        limits = {"max_length": MAX_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", **limits})
    return biases


def short_text(value: Any, where: str, param: str) -> str:
    """A value that must be a ShortText; null means empty. ApiError names the place in the body."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        limit = f"a string of at most {MAX_NAME_CHARACTERS} characters"
        raise ApiError(400, f"{where} must be {limit}, not {format_value(value)}", param=param)
    return value


class RequestModel(BaseModel):
    """Base of all request models."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="Report the usage so far in every chunk; needs include_usage."
    )


class JsonSchema(RequestModel):
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(RequestModel):
    """OpenAI's constraint on the format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestModel):
    """vLLM's constraints on the format of the output; exactly one of json, regex, choice, grammar."""

    json_: dict[str, Any] | str | None = Field(
        default=None, alias="json", description="A JSON schema."
    )
    regex: str | None = None
    choice: Annotated[FailFastList[str], Field(min_length=1)] | None = None
    grammar: str | None = Field(default=None, description="A grammar in llguidance's Lark syntax.")
    disable_additional_properties: bool | None = Field(
        default=None, description="Allow only the properties that the schema names."
    )


class SchedulingFields(RequestModel):
    """Fields of every request that the engine runs: model, client, queueing and cache."""

    model_config = ConfigDict(strict=True, extra="allow")  # `check_supported` checks the rest

    model: ShortText | None = Field(default=None, description="The served model if absent.")
    user: ShortText | None = Field(
        default=None, description="The client, for fair queueing and limits per client."
    )
    priority: int | None = Field(
        default=None, ge=-(2**31), le=2**31 - 1, description="Lower values run first."
    )
    deadline: float | None = Field(
        default=None, ge=0, le=1e9, description="Seconds from now; used by the deadline queue."
    )
    cache_salt: ShortText | None = Field(
        default=None, description="Cached prefixes are shared only between equal salts."
    )


class GenerationFields(SchedulingFields):
    """Fields shared by completions, chats and responses."""

    n: int | None = _ranged("n", "Number of choices per prompt.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Maximum number of tokens to generate."
    )
    min_tokens: int | None = _ranged("min_tokens", "Minimum number of tokens before a stop.")
    temperature: float | None = _ranged("temperature", "0: always take the most probable token.")
    top_p: float | None = _ranged("top_p")
    top_k: int | None = _ranged("top_k", "0 or -1: off.")
    min_p: float | None = _ranged("min_p")
    seed: int | None = _ranged("seed")
    frequency_penalty: float | None = _ranged("frequency_penalty")
    presence_penalty: float | None = _ranged("presence_penalty")
    repetition_penalty: float | None = _ranged("repetition_penalty")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_limit_biases)] | None = Field(
        default=None, max_length=MAX_BIASES, description="Bias by token id, from -100 to 100."
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_BIASES)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    allowed_token_ids: FailFastList[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = _ranged(
        "prompt_logprobs", "Alternatives to report per prompt token; not with stream."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Report prompt_token_ids, and the token_ids of each choice."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description='Write tokens of logprobs as "token_id:123".'
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Keep only the last N tokens of the prompt."
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the tokenizer's special tokens, such as BOS. Default: true for prompts, "
        "false for chats, whose template writes them.",
    )


class CompletionRequest(GenerationFields):
    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]] = Field(
        description="Text, token ids, or a list of either."
    )
    max_tokens: int | None = Field(
        default=None, description="Maximum number of tokens to generate; 0 only with echo.",
        json_schema_extra={"minimum": 0},
    )  # fmt: skip
    echo: bool | None = None
    logprobs: int | None = _ranged("logprobs", "Alternatives to report per token.")
    best_of: int | None = Field(default=None, ge=1, description="Must be equal to n.")
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Chat templates may use additional fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    content: str | FailFastList[TextPart] | None = Field(
        default=None, description="Text, or parts of type text."
    )
    name: ShortText | None = None
    tool_calls: FailFastList[dict[str, Any]] | None = None
    tool_call_id: ShortText | None = None


class ChatRequest(GenerationFields):
    messages: FailFastList[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Maximum number of tokens; overrides max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = _ranged("logprobs", "Needs logprobs.")
    tools: FailFastList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message instead of answering it."
    )
    documents: list[dict[str, Any]] | None = Field(
        default=None, description="For chat templates that show documents."
    )
    reasoning_effort: ShortText | None = Field(
        default=None, description="For chat templates that use it; others ignore it."
    )


class TokenizeRequest(RequestModel):
    model: ShortText | None = None
    prompt: str | None = None
    messages: FailFastList[ChatMessage] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES
    )
    add_special_tokens: bool | None = Field(
        default=None, description="For a prompt; true if absent."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: ShortText | None = None
    tokens: FailFastList[int]
