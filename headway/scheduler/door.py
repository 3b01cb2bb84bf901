"""Refuse at the door what could never run, so that inside the loop failure is impossible."""

from __future__ import annotations

from headway.config import Config
from headway.errors import InvalidRequest, RequestTooLong
from headway.request import Request


def check(request: Request, config: Config) -> int:
    """The length at which the request ends; raises a RequestError if it can never get there."""
    params, name = request.params, f"request {request.id!r}"
    if request.num_prompt == 0:
        raise InvalidRequest(f"{name} has an empty prompt; at least one token is needed")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest(f"{name}: max_tokens must be at least 1, not {params.max_tokens}")
    if params.min_tokens < 0:
        raise InvalidRequest(f"{name}: min_tokens must not be negative, got {params.min_tokens}")
    if request.num_prompt >= config.max_length:
        raise RequestTooLong(
            f"{name} has {request.num_prompt} prompt tokens and needs room for one more; "
            f"the model's length is {config.max_length}",
            need=request.num_prompt + 1,
            limit=config.max_length,
        )
    length = config.max_length
    if params.max_tokens is not None:
        length = min(length, request.num_prompt + params.max_tokens)
    num_stored = length - 1  # the last token is sampled but never computed
    num_blocks = -(-num_stored // config.block_size)
    if num_blocks > config.num_blocks:
        raise RequestTooLong(
            f"{name} may grow to {length} tokens and needs {num_blocks} blocks; "
            f"the cache has {config.num_blocks}",
            need=num_blocks,
            limit=config.num_blocks,
        )
    # A preempted request is computed again at any length up to the full one, so ask for that.
    if config.chunk(num_stored, config.max_tokens, True) < 1:
        raise RequestTooLong(
            f"{name} may grow to {length} tokens and the chunk rule does not cut prompts; "
            f"a step computes at most {config.max_tokens}",
            need=num_stored,
            limit=config.max_tokens,
        )
    return length
