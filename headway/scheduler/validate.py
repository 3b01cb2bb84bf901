"""Refuse at the door what could never run, so that inside the loop failure is impossible."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from headway.config import Config
from headway.errors import InvalidRequest, RequestTooLong, shorten
from headway.request import Request, State, check_pooling
from headway.scheduler.policy_calls import call_chunk

MAX_WHOLE = (1 << 63) - 1
MAX_SECONDS = 1e15
WHOLE_NUMBERS = {  # field: smallest, largest
    "max_tokens": (1, MAX_WHOLE),
    "min_tokens": (0, MAX_WHOLE),
    "n": (1, MAX_WHOLE),
    "priority": (-MAX_WHOLE, MAX_WHOLE),
}
KINDS: dict[str, type] = {"reads_cache": bool, "client": str, "salt": str}


def check(request: Request, config: Config, in_use: Container[str]) -> int:
    """The length at which the request ends; raises a RequestError if it can never get there.

    Raises a PolicyError if the chunk rule fails. `in_use` has the ids that are taken.
    """
    params, name = request.params, f"request {request.id!r}"
    if request.id in in_use:
        raise InvalidRequest(f"{name}: this id is in use")
    if request.state is not State.WAITING or request.num_generated:
        raise InvalidRequest(f"{name} has run before; make a new one")
    _check_prompt(request, name)
    _check_params(request, name)
    if params.pooling is not None:
        _check_pooling(request, name)
    if request.num_prompt >= config.max_model_len:
        raise RequestTooLong(
            f"{name} has {request.num_prompt} prompt tokens and needs room for one more; "
            f"the model's length is {config.max_model_len}",
            need=request.num_prompt + 1,
            limit=config.max_model_len,
        )
    length = min(
        config.max_model_len, request.num_prompt + (params.max_tokens or config.max_model_len)
    )
    if params.max_tokens is None:  # as far as it can run
        length = min(length, config.num_blocks * config.block_size + 1)
        if call_chunk(config.chunk, length, config.max_num_batched_tokens, True) < 1:
            length = min(length, config.max_num_batched_tokens + 1)
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
    if call_chunk(config.chunk, num_stored, config.max_num_batched_tokens, True) < 1:
        raise RequestTooLong(
            f"{name} may grow to {length} tokens and the chunk rule does not cut prompts; "
            f"a step computes at most {config.max_num_batched_tokens}",
            need=num_stored,
            limit=config.max_num_batched_tokens,
        )
    return length


def _check_prompt(request: Request, name: str) -> None:
    if request.num_prompt == 0:
        raise InvalidRequest(f"{name} has an empty prompt; at least one token is needed")
    least_token = np.frombuffer(request.prompt, dtype=np.intc).min()
    if least_token < 0:
        raise InvalidRequest(f"{name}: a token id must not be negative, got {least_token}")


def _check_params(request: Request, name: str) -> None:
    params = request.params
    for field, (low, high) in WHOLE_NUMBERS.items():
        value = getattr(params, field)
        if not (value is None and field == "max_tokens"):
            _check_whole(f"{name}: {field}", value, low, high)
    for field, time in (("deadline", params.deadline), ("arrival", request.arrival)):
        is_number = isinstance(time, int | float) and not isinstance(time, bool)
        if time is not None and not (is_number and -MAX_SECONDS <= time <= MAX_SECONDS):
            wanted = f"a time in seconds of at most {MAX_SECONDS:.0e}"
            raise InvalidRequest(f"{name}: {field} must be {wanted}, not {shorten(time)}")
    for field, kind in KINDS.items():
        if not isinstance(getattr(params, field), kind):
            wrong = shorten(getattr(params, field))
            raise InvalidRequest(f"{name}: {field} must be a {kind.__name__}, not {wrong}")
    if not params.salt.isprintable():
        raise InvalidRequest(f"{name}: salt must be printable text, not {shorten(params.salt)}")


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if is_whole and low <= value <= high:  # type: ignore[operator]
        return
    is_high = is_whole and value > high  # type: ignore[operator]
    limit = f" of at most {high}" if is_high else f" of at least {low}"
    raise InvalidRequest(f"{name} must be a whole number{limit}, not {shorten(value)}")


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
