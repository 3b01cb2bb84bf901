"""POST /v1/embeddings: computes one unit vector per input.

Every input is one engine request, scheduled and batched with all others. Vectors are returned in
the order of the inputs. If one input fails, the others are cancelled.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from headway.engine.input_processor import embedding_params
from headway.errors import RequestTooLong
from headway.plan import Embedding
from headway.request import Pooling, RequestParams
from headway.server.context import Context
from headway.server.generation.prompt_runs import failure
from headway.server.generation.prompts import prompts_of, tokens_of
from headway.server.generation.request_fields import check_model, check_salt, deadline_of
from headway.server.generation.stream import new_id
from headway.server.generation.submissions import merge_submissions
from headway.server.http.errors import field_error, too_long
from headway.server.http.middleware import TRACEPARENT
from headway.server.openai.protocol import FailFastList, SchedulingFields, optional

EncodingFormat = Literal["float", "base64"]


class EmbeddingRequest(SchedulingFields):
    input: str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]] = Field(
        description="Text, token ids, or a list of either."
    )
    encoding_format: EncodingFormat | None = optional(
        "float (default), or base64: little-endian float32."
    )
    dimensions: int | None = optional("Only the model's hidden size is accepted.", ge=1)
    pooling: Pooling | None = optional(
        "mean (default): over all tokens of an input; last: the last token."
    )


class EmbeddingItem(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


async def embeddings(context: Context, body: EmbeddingRequest) -> EmbeddingResponse:
    """One vector per input; ApiError names the field that is wrong."""
    check_model(context, body.model)
    size, dimensions = context.input_processor.hidden_size, body.dimensions
    if dimensions is not None and dimensions != size:  # truncated vectors would be meaningless
        problem = f"must be {size}, the model's hidden size, or absent, not {dimensions}"
        raise field_error("dimensions", f"{problem}; shorter vectors are not supported")
    inputs = prompts_of(body.input, "input")
    limit = context.settings.max_choices
    if len(inputs) > limit:
        raise field_error("input", f"must have at most {limit} items, not {len(inputs)}")
    context.ignored_fields.report(body.model_extra or {})
    check_salt(body.cache_salt)
    params = embedding_params(
        body.pooling or "mean",
        priority=body.priority or 0,
        client=body.user or "",
        deadline=await deadline_of(context, body.deadline),
        salt=body.cache_salt or "",
    )
    prompts = await tokens_of(context, inputs, "input")
    vectors = await _embed_all(context, prompts, params)
    num_tokens = sum(map(len, prompts))
    data: list[EmbeddingItem] = [
        {"object": "embedding", "index": index, "embedding": _encode(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return {
        "object": "list",
        "data": data,
        "model": context.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


async def _embed_all(
    context: Context, prompts: Sequence[list[int]], params: RequestParams
) -> list[Embedding]:
    """The vectors in input order. Inputs that find the queue full are submitted again later."""
    id = new_id("embd")
    submissions = [
        partial(_embed, context, f"{id}-{number}", number, prompt, params)
        for number, prompt in enumerate(prompts)
    ]
    async with aclosing(merge_submissions(context.engine, submissions)) as found:
        vectors = {number: vector async for number, vector in found}
    return [vectors[number] for number in range(len(prompts))]


async def _embed(
    context: Context, id: str, number: int, prompt: list[int], params: RequestParams
) -> AsyncIterator[tuple[int, Embedding]]:
    """Submit one input and yield its vector. Leaving the iteration aborts the request."""
    try:
        with context.engine.submitted(id, prompt, params, TRACEPARENT.get()) as stream:
            while stream.num_open:
                for update in await stream.take():
                    if update.embedding is not None:
                        yield number, update.embedding
                    elif update.end is not None:
                        raise failure(context.engine, update.end)
    except RequestTooLong as error:
        raise too_long("input", error) from error


def _encode(vector: Embedding, format: EncodingFormat | None) -> list[float] | str:
    if format == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers
