"""Verifies drafts: which of the sampled tokens a request gains.

The token after each draft is sampled as without drafts, so a draft is right if it is the token that
was sampled before it. A token that may end the request is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headway.executor.sampling.logprobs import ExtraOutputs
from headway.executor.sampling.sampler import Sampler
from headway.plan import Draft, Rows, StepResult


def is_right(draft: Draft, place: int, token: int) -> bool:
    """Whether the draft at this place is the token that was sampled for it, and generation goes on."""
    goes_on = place < draft.count and token not in draft.request.stops
    return goes_on and token == draft.tokens[place]


def right_tokens(draft: Draft, sampled: Sequence[int]) -> list[int]:
    """The tokens up to the first that is not the next draft."""
    places = range(len(sampled))
    end = next(place for place in places if not is_right(draft, place, sampled[place]))
    return list(sampled[: end + 1])


def verify(
    drafts: Sequence[Draft],
    sample: Callable[[Rows, Rows], list[int]],
    sampler: Sampler,
    extras: ExtraOutputs,
    result: StepResult,
) -> list[list[int]]:
    """Sample one token after the other, for requests whose sampling depends on the tokens before.

    `sample(places, rows)` samples these places of the drafts' tokens for the requests of these rows.
    """
    firsts = np.cumsum([0, *(1 + draft.count for draft in drafts[:-1])])
    gained: list[list[int]] = [[] for _ in drafts]
    active, place = list(range(len(drafts))), 0
    while active:
        requests = [drafts[number].request for number in active]
        rows = np.array([request.row for request in requests], dtype=np.intp)
        tokens = sample(firsts[active] + place, rows)
        if logprobs := sampler.take_logprobs():
            extras.add_logprobs(logprobs, requests)
        if failed := sampler.grammars.take_failed(place):
            result.failed = failed | result.failed
        for number, token in zip(active, tokens, strict=True):
            gained[number].append(token)
        active = [
            number for number in active if is_right(drafts[number], place, gained[number][-1])
        ]
        place += 1
    return gained
