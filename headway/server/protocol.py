"""What clients send, in OpenAI's shapes with our further fields; the OpenAPI schema is this.

Values are checked strictly ("0.5" is no number), null is the same as absent, and fields that
nobody knows are accepted. Limits are those of `headway.sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from headway.sampling import HUGE, RANGES

MOST_STOPS = 64
LONGEST_NAME = 512  # characters of a name that a client gives
MOST_BIASES = 4096

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


class Taken(BaseModel):
    """Anything a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Taken):
    include_usage: bool | None = None


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
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = Field(default=None, description="Lark, as llguidance reads it.")
    disable_additional_properties: bool | None = Field(
        default=None, description="Objects of the schema have only the properties it names."
    )


class Wishes(Taken):
    """What completions and chats have in common."""

    model: Text | None = Field(default=None, description="Absent: the model that is served.")
    n: int | None = _limited("n", "Texts for each prompt.")
    max_tokens: int | None = Field(default=None, ge=0, description="Most tokens to generate.")
    min_tokens: int | None = _limited("min_tokens", "No stop before this many tokens.")
    temperature: float | None = _limited("temperature", "0: always the most probable token.")
    top_p: float | None = _limited("top_p")
    top_k: int | None = _limited("top_k", "0 or -1: off.")
    min_p: float | None = _limited("min_p")
    seed: int | None = _limited("seed")
    frequency_penalty: float | None = _limited("frequency_penalty")
    presence_penalty: float | None = _limited("presence_penalty")
    repetition_penalty: float | None = _limited("repetition_penalty")
    logit_bias: dict[str, float] | None = Field(
        default=None, max_length=MOST_BIASES, description="By token id, from -100 to 100."
    )
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_BIASES)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    allowed_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(Wishes):
    prompt: str | Many[str] | Many[int] | Many[Many[int]] = Field(
        description="Text, token ids, or a list of either."
    )
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
    content: str | list[TextPart] | None = Field(
        default=None, description="Text, or parts of type text."
    )
    name: Text | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Text | None = None


class ChatRequest(Wishes):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens to generate; goes before max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = _limited("logprobs", "Needs logprobs.")
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class TokenizeRequest(Taken):
    model: Text | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = Field(
        default=None, description="Of a prompt; true if absent."
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(Taken):
    model: Text | None = None
    tokens: list[int]
