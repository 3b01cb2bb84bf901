"""POST /v1/embeddings: texts or token ids in, one unit vector for each out.

Every input is a request of the engine, scheduled and batched with all others. Vectors come back in
the order of the inputs; the first input that fails cancels the rest.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from headway.engine.input_processor import embedding_params
from headway.errors import RequestTooLong
from headway.plan import Embedding
from headway.request import Params, Pooling
from headway.server.context import Context
from headway.server.generation.request_fields import (
    check_model,
    check_salt,
    deadline_of,
    prompts_of,
    tokens_of,
)
from headway.server.generation.runs import failure, too_long
from headway.server.generation.stream import Watched, Whole, new_id
from headway.server.http.errors import refused
from headway.server.openai.protocol import Many, Queued

Format = Literal["float", "base64"]


class EmbeddingRequest(Queued):
    input: str | Many[str] | Many[int] | Many[Many[int]] = Field(
        description="Text, token ids, or a list of either."
    )
    encoding_format: Format | None = Field(
        default=None, description="base64: little-endian float32. float if absent."
    )
    dimensions: int | None = Field(default=None, ge=1, description="Only the model's own size.")
    pooling: Pooling | None = Field(
        default=None, description="Over all tokens of an input, or its last; mean if absent."
    )


class EmbeddingItem(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


def embeddings(context: Context, body: EmbeddingRequest) -> Watched:
    """The answer to one request."""
    return Whole(context, lambda: _answer(context, body))


async def _answer(context: Context, body: EmbeddingRequest) -> dict[str, Any]:
    check_model(context, body.model)
    _check_dimensions(context, body.dimensions)
    inputs = prompts_of(body.input, "input")
    most = context.settings.max_choices
    if len(inputs) > most:
        raise refused("input", f"has {len(inputs)} items; at most {most} are allowed")
    params = await _params(context, body)
    prompts = await tokens_of(context, inputs, "input")
    vectors = await _embed_all(context, prompts, params)
    num_tokens = sum(map(len, prompts))
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": context.model_name, "usage": usage}


def _check_dimensions(context: Context, dimensions: int | None) -> None:
    """400 for any size but the model's: a part of its vectors would not mean the same."""
    size = context.asking.hidden_size
    if dimensions is not None and dimensions != size:
        problem = f"must be {size}, the model's size, or absent, not {dimensions}"
        raise refused("dimensions", f"{problem}; shorter vectors are not supported")


async def _params(context: Context, body: EmbeddingRequest) -> Params:
    check_salt(body.cache_salt)
    return embedding_params(
        body.pooling or "mean",
        priority=body.priority or 0,
        client=body.user or "",
        deadline=await deadline_of(context, body.deadline),
        salt=body.cache_salt or "",
    )


async def _embed_all(
    context: Context, prompts: Sequence[list[int]], params: Params
) -> list[Embedding]:
    id = new_id("embd")
    asked = (_embed(context, f"{id}-{n}", each, params) for n, each in enumerate(prompts))
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embed(context: Context, id: str, prompt: list[int], params: Params) -> Embedding:
    """The vector of one input. Being cancelled ends its request."""
    try:
        with context.engine.submitted(id, prompt, params) as stream:
            while True:
                for update in await stream.take():
                    if update.embedding is not None:
                        return update.embedding
                    if update.end is not None:
                        raise failure(context.engine, update.end)
    except RequestTooLong as error:
        raise too_long(error, "input") from error


def _written(vector: Embedding, form: Format | None) -> list[float] | str:
    if form == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers
