"""Refuse at the door what could never run, so that inside the loop failure is impossible."""

from __future__ import annotations

import math

import numpy as np

from headway.config import Config
from headway.errors import InvalidRequest, RequestTooLong
from headway.request import Request, check_pooling


def check(request: Request, config: Config) -> int:
    """The length at which the request ends; raises a RequestError if it can never get there."""
    params, name = request.params, f"request {request.id!r}"
    _check_params(request, name)
    if params.pooling is not None:
        _check_pooling(request, name)
    if request.num_prompt >= config.max_length:
        raise RequestTooLong(
            f"{name} has {request.num_prompt} prompt tokens and needs room for one more; "
            f"the model's length is {config.max_length}",
            need=request.num_prompt + 1,
            limit=config.max_length,
        )
    length = min(config.max_length, request.num_prompt + (params.max_tokens or config.max_length))
    if params.max_tokens is None:  # as far as it can run
        length = min(length, config.num_blocks * config.block_size + 1)
        if config.chunk(length, config.max_tokens, True) < 1:
            length = min(length, config.max_tokens + 1)
        length = max(length, request.num_prompt + 1)
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


def _check_params(request: Request, name: str) -> None:
    params = request.params
    if request.num_prompt == 0:
        raise InvalidRequest(f"{name} has an empty prompt; at least one token is needed")
    least_token = np.frombuffer(request.prompt, dtype=np.intc).min()
    if least_token < 0:
        raise InvalidRequest(f"{name}: a token id must not be negative, got {least_token}")
    for field, least in (("max_tokens", 1), ("min_tokens", 0), ("n", 1), ("priority", None)):
        value = getattr(params, field)
        if value is None and field == "max_tokens":
            continue
        if not isinstance(value, int) or (least is not None and value < least):
            wanted = "a whole number" + (f" of at least {least}" if least is not None else "")
            raise InvalidRequest(f"{name}: {field} must be {wanted}, not {value!r}")
    for field, time in (("deadline", params.deadline), ("arrival", request.arrival)):
        if time is not None and not (isinstance(time, int | float) and math.isfinite(time)):
            raise InvalidRequest(f"{name}: {field} must be a time in seconds, not {time!r}")
    if not all(isinstance(token, int) for token in request.stops):
        raise InvalidRequest(f"{name}: stop and end tokens are token ids, not {params.stops}")
    if not isinstance(params.salt, str) or not params.salt.isprintable():
        raise InvalidRequest(f"{name}: salt must be printable text, not {params.salt!r}")


def _check_pooling(request: Request, name: str) -> None:
    """An embedding ends with its prompt; a mean needs the hidden state of every prompt token."""
    params = request.params
    check_pooling(params.pooling)
    if (params.max_tokens, params.n) != (1, 1):
        raise InvalidRequest(
            f"{name}: an embedding needs max_tokens 1 and n 1, not {params.max_tokens!r} and "
            f"{params.n!r}"
        )
    if params.pooling == "mean" and params.reads_cache:
        raise InvalidRequest(f"{name}: pooling 'mean' needs reads_cache=False")
