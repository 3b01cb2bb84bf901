"""What clients send, in OpenAI's shapes with our further fields; the OpenAPI schema is this.

Values are checked strictly ("0.5" is no number), null is the same as absent, and fields that
nobody knows are accepted. Limits are those of `headway.sampling_params`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from headway.sampling_params import HUGE, RANGES

MAX_STOPS = 64
LONGEST_NAME = 512  # characters of a name that a client gives
MAX_BIASES = 4096
MAX_MESSAGES = 8192

Item = TypeVar("Item")
Text = Annotated[str, Field(max_length=LONGEST_NAME)]
# Of the wrong kind of list, the first item tells; all of them would take long to list.
Many = Annotated[list[Item], Field(fail_fast=True)]


def _limited(name: str, about: str = "") -> Any:
    """A field within the range that SamplingParams has for it."""
    limits = RANGES[name]
    low = limits.low if limits.low > -HUGE else None
    high = limits.high if limits.high < HUGE else None
    if limits.is_open:
        return Field(default=None, gt=low, le=high, description=about or None)
    return Field(default=None, ge=low, le=high, description=about or None)


def _few(biases: Any) -> Any:
    """Refuse too many by their number alone: a list of what is wrong with each would be long."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        limits = {"max_length": MAX_BIASES, "actual_length": len(biases)}
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", **limits})
    return biases


class Taken(BaseModel):
    """Anything a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Taken):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="Usage so far in every chunk; needs include_usage."
    )


class JsonSchema(Taken):
    name: Text | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Taken):
    """OpenAI's way to say what an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Taken):
    """Further forms of an answer; exactly one of json, regex, choice and grammar."""

    json_: dict[str, Any] | str | None = Field(
        default=None, alias="json", description="A JSON schema."
    )
    regex: str | None = None
    choice: Annotated[Many[str], Field(min_length=1)] | None = None
    grammar: str | None = Field(default=None, description="Lark, as llguidance reads it.")
    disable_additional_properties: bool | None = Field(
        default=None, description="Objects of the schema have only the properties it names."
    )


class Queued(Taken):
    """Fields of every request that the engine runs: its model, its place in the queue, its cache."""

    model_config = ConfigDict(strict=True, extra="allow")  # `unsupported` looks at the rest

    model: Text | None = Field(default=None, description="Absent: the model that is served.")
    user: Text | None = Field(default=None, description="Whose turn it is, for fair queueing.")
    priority: int | None = Field(
        default=None, ge=-(2**31), le=2**31 - 1, description="Lower is sooner."
    )
    deadline: float | None = Field(
        default=None, ge=0, le=1e9, description="Seconds from now; for queues that look at it."
    )
    cache_salt: Text | None = Field(
        default=None, description="Cached prefixes are shared only between equal salts."
    )


class GenerationFields(Queued):
    """What completions and chats have in common."""

    n: int | None = _limited("n", "Texts for each prompt.")
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens to generate.")
    min_tokens: int | None = _limited("min_tokens", "No stop before this many tokens.")
    temperature: float | None = _limited("temperature", "0: always the most probable token.")
    top_p: float | None = _limited("top_p")
    top_k: int | None = _limited("top_k", "0 or -1: off.")
    min_p: float | None = _limited("min_p")
    seed: int | None = _limited("seed")
    frequency_penalty: float | None = _limited("frequency_penalty")
    presence_penalty: float | None = _limited("presence_penalty")
    repetition_penalty: float | None = _limited("repetition_penalty")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few)] | None = Field(
        default=None, max_length=MAX_BIASES, description="By token id, from -100 to 100."
    )
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_BIASES)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    allowed_token_ids: Many[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = _limited(
        "prompt_logprobs", "Alternatives to report for each prompt token; not in streams."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Report prompt_token_ids, and token_ids of each choice."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description='Write tokens of logprobs as "token_id:123".'
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Keep only this many last tokens of a prompt."
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add the tokenizer's own, such as BOS; default: true for prompts, false for "
        "chats, whose template writes them.",
    )


class CompletionRequest(GenerationFields):
    prompt: str | Many[str] | Many[int] | Many[Many[int]] = Field(
        description="Text, token ids, or a list of either."
    )
    max_tokens: int | None = Field(
        default=None, description="Most tokens to generate; 0 only with echo.",
        json_schema_extra={"minimum": 0},
    )  # fmt: skip
    echo: bool | None = None
    logprobs: int | None = _limited("logprobs", "Alternatives to report for each token.")
    best_of: int | None = Field(default=None, ge=1, description="Only what n is.")
    suffix: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; templates may read further fields of it."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    content: str | Many[TextPart] | None = Field(
        default=None, description="Text, or parts of type text."
    )
    name: Text | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: Text | None = None


class ChatRequest(GenerationFields):
    messages: Many[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens to generate; goes before max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = _limited("logprobs", "Needs logprobs.")
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        default=None, description="Go on from the last message instead of answering it."
    )
    documents: list[dict[str, Any]] | None = Field(
        default=None, description="For templates that show documents."
    )
    reasoning_effort: Text | None = Field(
        default=None, description="For templates that know it; others ignore it."
    )


class TokenizeRequest(Taken):
    model: Text | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = Field(
        default=None, description="Of a prompt; true if absent."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Taken):
    model: Text | None = None
    tokens: Many[int]
