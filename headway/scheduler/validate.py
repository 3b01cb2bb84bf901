"""Refuse requests that could never finish, so that nothing can fail once a request is queued."""

from __future__ import annotations

from array import array
from collections.abc import Container

import numpy as np

from headway.checks import number_problem
from headway.config import Config
from headway.errors import InvalidRequest, RequestTooLong, shorten
from headway.kv.window import most_decoded, most_window_blocks
from headway.request import Request, RequestState, check_pooling
from headway.scheduler.policy_calls import CHUNK, checked

MAX_WHOLE = (1 << 63) - 1
TOKEN = np.dtype(np.intc)
MAX_SECONDS = 1e15
# `arrival`, or a field of RequestParams: smallest value, largest value, whether it is a whole number.
NUMBERS: dict[str, tuple[float, float, bool]] = {
    "arrival": (-MAX_SECONDS, MAX_SECONDS, False),
    "max_tokens": (1, MAX_WHOLE, True),
    "max_total_tokens": (2, MAX_WHOLE, True),
    "min_tokens": (0, MAX_WHOLE, True),
    "n": (1, MAX_WHOLE, True),
    "priority": (-MAX_WHOLE, MAX_WHOLE, True),
    "deadline": (-MAX_SECONDS, MAX_SECONDS, False),
}
OPTIONAL = ("max_tokens", "max_total_tokens", "deadline")
TYPES: dict[str, type] = {"reads_cache": bool, "client": str, "salt": str}


def validate_request(request: Request, config: Config, used_ids: Container[str]) -> int:
    """Return the maximum length of the request.

    Raises RequestError if the request can never run, PolicyError if the chunk rule fails.
    """
    name, params, num_prompt = f"request {request.id!r}", request.params, request.num_prompt
    if request.id in used_ids:
        raise InvalidRequest(f"{name}: this id is used by an open request; choose another id")
    num_resumed = len(request.history.resumed)
    if request.state is not RequestState.WAITING or request.num_generated != num_resumed:
        raise InvalidRequest(f"{name} has run before; create a new one")
    _check_tokens(request, name)
    _check_params(request, name)
    for limit, setting, advice in (
        (config.max_model_len, "max_model_len", ""),
        (params.max_total_tokens, "its max_total_tokens", " or raise max_total_tokens"),
    ):
        if limit is not None and num_prompt >= limit:
            raise RequestTooLong(
                f"{name} has {num_prompt} prompt tokens and needs room for one output token; "
                f"{setting} is {limit}; shorten the prompt{advice}",
                need=num_prompt + 1,
                limit=limit,
            )
    length = _final_length(request, config)
    _check_length(length, request, config, name)
    if request.num_known >= length:
        raise InvalidRequest(
            f"{name}: output has {num_resumed} tokens already; with {num_prompt} prompt tokens the "
            f"request ends at {length}"
        )
    return length


def _final_length(request: Request, config: Config) -> int:
    """The length at which the request ends; without max_tokens, as far as blocks and budget allow."""
    max_tokens, budget = request.params.max_tokens, config.max_num_batched_tokens
    longest = min(config.max_model_len, request.params.max_total_tokens or config.max_model_len)
    if max_tokens is not None:
        return min(longest, request.num_prompt + max_tokens)
    length = min(longest, config.num_blocks * config.block_size + 1)
    if checked(CHUNK, config.chunk)(length, budget, True) < 1:
        length = min(length, budget + 1)
    return max(length, request.num_prompt + 1)


def _check_length(length: int, request: Request, config: Config, name: str) -> None:
    """RequestTooLong if the cache or a step is too small for a request of this length."""
    size, window, budget = config.block_size, config.sliding_window, config.max_num_batched_tokens

    def too_long(need: int, problem: str, setting: str, settings_advice: str) -> RequestTooLong:
        lower = "" if request.params.max_tokens is None else "lower max_tokens or "
        return RequestTooLong(
            f"{name} may grow to {length} tokens and {problem}; {setting} is "
            f"{getattr(config, setting)}; {lower}shorten the prompt{settings_advice}",
            need=need,
            limit=getattr(config, setting),
            settings_advice=settings_advice,
        )

    num_stored = length - 1  # the last token is sampled but never computed
    need, advice = -(-num_stored // size), ", or raise num_blocks"
    if need > config.num_blocks:
        raise too_long(need, f"needs {need} KV blocks", "num_blocks", advice)
    at_once = max(most_decoded(config), min(budget, num_stored))
    need = most_window_blocks(window, size, num_stored, at_once) if window else 0
    if need > config.num_window_blocks:
        problem = f"needs {need} KV blocks of the sliding-window layers"
        raise too_long(need, problem, "num_window_blocks", advice)
    # A preempted request is computed again at any length up to the full one, so check that length.
    if checked(CHUNK, config.chunk)(num_stored, budget, True) < 1:
        advice = ", raise max_num_batched_tokens, or use chunk split_any"
        problem = "the chunk rule does not split prompts"
        raise too_long(num_stored, problem, "max_num_batched_tokens", advice)


def _check_tokens(request: Request, name: str) -> None:
    if request.num_prompt == 0:
        raise InvalidRequest(f"{name} has an empty prompt; at least one token is needed")
    known = request.tokens if request.history.resumed else request.prompt
    tokens = np.frombuffer(known, TOKEN)
    least_token = tokens[tokens.argmin()]  # twice as fast as min()
    if least_token < 0:
        raise InvalidRequest(f"{name}: a token id must not be negative, got {least_token}")


def _check_params(request: Request, name: str) -> None:
    params = request.params
    for field, (low, high, whole) in NUMBERS.items():
        value = request.arrival if field == "arrival" else getattr(params, field)
        if type(value) is int and low <= value <= high:  # most values
            continue
        if value is None and field in OPTIONAL:
            continue
        if problem := number_problem(value, low, high, whole=whole):
            raise InvalidRequest(f"{name}: {field} {problem}")
    for field, kind in TYPES.items():
        if not isinstance(getattr(params, field), kind):
            wrong = shorten(getattr(params, field))
            raise InvalidRequest(f"{name}: {field} must be a {kind.__name__}, not {wrong}")
    if not params.salt.isprintable():
        raise InvalidRequest(f"{name}: salt must be printable text, not {shorten(params.salt)}")
    if params.prediction is not None:
        _check_prediction(params.prediction, name)
    if params.pooling is not None:
        _check_pooling(request, name)


def _check_prediction(prediction: object, name: str) -> None:
    if not isinstance(prediction, array) or prediction.typecode != "i":
        wrong = shorten(prediction)
        raise InvalidRequest(f"{name}: prediction must be an array of type 'i', not {wrong}")
    if prediction and (least_token := np.frombuffer(prediction, TOKEN).min()) < 0:
        raise InvalidRequest(
            f"{name}: prediction: a token id must not be negative, got {least_token}"
        )


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
