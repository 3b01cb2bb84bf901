"""Refuses a request at which the engine or its executor would fail.

A step that fails ends the requests of all callers, and another process may send any value. What
the scheduler checks itself (lengths, numbers of RequestParams) is not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headway.checks import number_problem, token_array
from headway.engine.messages import Submit
from headway.errors import InvalidRequest
from headway.sampling_params import check_sampling, sampling_of

MAX_SECONDS = 1e15


def check_submit(message: Submit, vocab_size: int | None) -> None:
    """InvalidRequest names the wrong value; without `vocab_size` only the times are checked."""
    for name, low in (("age", 0), ("deadline_in", -MAX_SECONDS)):
        value = getattr(message, name)
        if value is None and name == "deadline_in":
            continue
        if problem := number_problem(value, low, MAX_SECONDS, whole=False):
            raise InvalidRequest(f"request {message.id!r}: {name} {problem}")
    if vocab_size is None:
        return
    given = ("prompt", message.prompt), ("prediction", message.params.prediction)
    for name, tokens in (*given, *(("output", o) for o in message.outputs)):
        _check_known(f"request {message.id!r}: {name}", tokens or (), vocab_size)
    sampling = sampling_of(message.id, message.params.sampling)
    try:
        check_sampling(sampling, vocab_size)
    except InvalidRequest as error:
        raise InvalidRequest(f"request {message.id!r}: {error}") from None


def _check_known(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """InvalidRequest for a token that the model does not have."""
    ids = np.frombuffer(token_array(name, tokens), np.intc)
    if ids.size and (largest := ids.max()) >= vocab_size:
        raise InvalidRequest(
            f"{name} has token {largest}; the model's tokens are 0 to {vocab_size - 1}"
        )
