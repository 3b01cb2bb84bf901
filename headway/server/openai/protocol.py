"""Request models: OpenAI's fields and additional ones. The OpenAPI schema is made from them.

Validation is strict ("0.5" is not a number), null means absent, and unknown fields are accepted.
Ranges are those of `headway.sampling_params`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from headway.sampling_params import HUGE, RANGES
from headway.server.http.errors import field_error, format_value

MAX_STOP_STRINGS = 64
MAX_NAME_CHARACTERS = 512  # of a name sent by a client
MAX_BIASES = 4096
MAX_MESSAGES = 8192

Item = TypeVar("Item")
ShortText = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
# A list that reports only its first wrong item; reporting all of a long list would be slow.
FailFastList = Annotated[list[Item], Field(fail_fast=True)]


def optional(description: str | None = None, **limits: Any) -> Any:
    """A field that may be absent or null."""
    return Field(default=None, description=description, **limits)


def _ranged(name: str, description: str | None = None) -> Any:
    """An optional field with the range that SamplingParams has for it."""
    limits = RANGES[name]
    low = limits.low if limits.low > -HUGE else None
    high = limits.high if limits.high < HUGE else None
    return optional(description, le=high, **{"gt" if limits.is_open else "ge": low})


def _limit_biases(biases: Any) -> Any:
    """Refuse too many biases by their number, before each of them is validated."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        limits = {"max_length": MAX_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", **limits})
    return biases


def short_text(value: object, place: str) -> str:
    """A value that must be a ShortText; null means empty. ApiError names the place in the body."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        limit = f"a string of at most {MAX_NAME_CHARACTERS} characters"
        raise field_error(place, f"must be {limit}, not {format_value(value)}")
    return value


class RequestModel(BaseModel):
    """Base of all request models."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = optional(
        "Report the usage so far in every chunk; needs include_usage."
    )


class JsonSchema(RequestModel):
    name: ShortText | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, object] = Field(alias="schema")


class ResponseFormat(RequestModel):
    """OpenAI's constraint on the format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(RequestModel):
    """vLLM's constraints on the format of the output; exactly one of json, regex, choice, grammar."""

    json_: dict[str, object] | str | None = optional("A JSON schema.", alias="json")
    regex: str | None = None
    choice: Annotated[FailFastList[str], Field(min_length=1)] | None = None
    grammar: str | None = optional("A grammar in llguidance's Lark syntax.")
    disable_additional_properties: bool | None = optional(
        "Allow only the properties that the schema names."
    )


class SchedulingFields(RequestModel):
    """Fields of every request that the engine runs: model, client, queueing and cache."""

    model_config = ConfigDict(strict=True, extra="allow")  # `sampling_params_of` checks the rest

    model: ShortText | None = optional("The served model if absent.")
    user: ShortText | None = optional("The client, for fair queueing and limits per client.")
    priority: int | None = optional("Lower values run first.", ge=-(2**31), le=2**31 - 1)
    deadline: float | None = optional("Seconds from now; used by the deadline queue.", ge=0, le=1e9)
    cache_salt: ShortText | None = optional("Cached prefixes are shared only between equal salts.")


class GenerationFields(SchedulingFields):
    """Fields shared by completions, chats and responses."""

    n: int | None = _ranged("n", "Number of choices per prompt.")
    max_tokens: int | None = optional("Maximum number of tokens to generate.", ge=1)
    min_tokens: int | None = _ranged("min_tokens", "Minimum number of tokens before a stop.")
    temperature: float | None = _ranged("temperature", "0: always take the most probable token.")
    top_p: float | None = _ranged("top_p")
    top_k: int | None = _ranged("top_k", "0 or -1: off.")
    min_p: float | None = _ranged("min_p")
    seed: int | None = _ranged("seed")
    frequency_penalty: float | None = _ranged("frequency_penalty")
    presence_penalty: float | None = _ranged("presence_penalty")
    repetition_penalty: float | None = _ranged("repetition_penalty")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_limit_biases)] | None = optional(
        "Bias by token id, from -100 to 100.", max_length=MAX_BIASES
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
    return_token_ids: bool | None = optional(
        "Report prompt_token_ids, and the token_ids of each choice."
    )
    return_tokens_as_token_ids: bool | None = optional(
        'Write tokens of logprobs as "token_id:123".'
    )
    truncate_prompt_tokens: int | None = optional(
        "Keep only the last N tokens of the prompt.", ge=1
    )
    add_special_tokens: bool | None = optional(
        "Add the tokenizer's special tokens, such as BOS. Default: true for prompts, "
        "false for chats, whose template writes them."
    )


class CompletionRequest(GenerationFields):
    prompt: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]] = Field(
        description="Text, token ids, or a list of either."
    )
    max_tokens: int | None = optional(
        "Maximum number of tokens to generate; 0 only with echo.", json_schema_extra={"minimum": 0}
    )
    echo: bool | None = None
    logprobs: int | None = _ranged("logprobs", "Alternatives to report per token.")
    best_of: int | None = optional("Must be equal to n.", ge=1)
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Chat templates may use additional fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    content: str | FailFastList[TextPart] | None = optional("Text, or parts of type text.")
    name: ShortText | None = None
    tool_calls: FailFastList[dict[str, Any]] | None = None
    tool_call_id: ShortText | None = None


class Prediction(RequestModel):
    """A text that the output may resemble, such as a file that is to be edited."""

    type: Literal["content"]
    content: str | FailFastList[TextPart] = Field(description="Text, or parts of type text.")

    @property
    def text(self) -> str:
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatRequest(GenerationFields):
    messages: FailFastList[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = optional(
        "Maximum number of tokens; overrides max_tokens.", ge=1
    )
    logprobs: bool | None = None
    top_logprobs: int | None = _ranged("logprobs", "Needs logprobs.")
    tools: FailFastList[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = optional(
        "Continue the last message instead of answering it."
    )
    prediction: Prediction | None = optional("Text that the output may resemble; for drafts.")
    documents: list[dict[str, object]] | None = optional("For chat templates that show documents.")
    reasoning_effort: ShortText | None = optional(
        "For chat templates that use it; others ignore it."
    )


class TokenizeRequest(RequestModel):
    model: ShortText | None = None
    prompt: str | None = None
    messages: FailFastList[ChatMessage] | None = optional(min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = optional("For a prompt; true if absent.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: ShortText | None = None
    tokens: FailFastList[int]
