"""The shapes of responses, also for the OpenAPI schema."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

LogProbability = float  # natural logarithm


class CachedTokens(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionDetails]


class PromptLogprob(TypedDict):
    logprob: LogProbability
    rank: int
    decoded_token: str


PromptLogprobs = dict[str, PromptLogprob]  # by token id


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[LogProbability | None]
    tokens: list[str]
    top_logprobs: list[dict[str, LogProbability] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: NotRequired[list[PromptLogprobs | None] | None]
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int] | None]


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[str | None]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    token: str
    logprob: LogProbability
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob] | None
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatResponseMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ChatToolCall] | None]


class ChatChoice(TypedDict):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int] | None]


class ChatResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[str | None]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[PromptLogprobs | None] | None]
    prompt_token_ids: NotRequired[list[int] | None]


class ResponsesResponse(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headway"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str] | None]


class DetokenizeResponse(TypedDict):
    prompt: str
