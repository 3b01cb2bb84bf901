"""Drafts from a text that a request was given: its prediction, such as a file that is to be edited.

The output follows the prediction from its beginning. After a difference, drafts go on where the last
tokens of the output occur in the prediction.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from headway.request import Request

MIN_CONTEXT = 2  # last tokens of the output that must occur in the prediction
MAX_CONTEXT = 16  # those that are compared
NO_DRAFTS: array[int] = array("i")


@dataclass(slots=True)
class Place:
    """Where a request is in its prediction."""

    num_seen: int = 0  # tokens of the output that were compared
    confirmed: int = 0  # the place after the latest token that was predicted there
    next: int | None = 0  # the place of the next draft; None: unknown


class PredictionDrafter:
    """Keeps a place for each request with a prediction."""

    def __init__(self) -> None:
        self._places = WeakKeyDictionary[Request, Place]()

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """The prediction from the request's place on; none without one."""
        prediction, output = request.params.prediction, request.output
        if not prediction:
            return NO_DRAFTS
        place = self._places.get(request)
        if place is None or place.num_seen > len(output):  # its output was discarded
            place = self._places[request] = Place()
        self._follow(place, prediction, output)
        return NO_DRAFTS if place.next is None else prediction[place.next : place.next + most]

    def forget(self, request: Request) -> None:
        self._places.pop(request, None)

    def _follow(self, place: Place, prediction: array[int], output: array[int]) -> None:
        """Bring a place up to date with the output."""
        new = output[place.num_seen :]
        place.num_seen = len(output)
        if place.next is not None:
            num_equal = _num_equal(new, prediction[place.next : place.next + len(new)])
            if num_equal:
                place.next = place.confirmed = place.next + num_equal
            if num_equal == len(new):
                return
        place.next = find(prediction, output[-MAX_CONTEXT:], place.confirmed)


def find(prediction: array[int], context: array[int], start: int) -> int | None:
    """The place after the longest end of `context` that the prediction contains.

    Of several, the first that is not before `start`, else the first. None if not even the last
    MIN_CONTEXT tokens occur. The end of the prediction is not a place.
    """
    known, found = np.frombuffer(prediction, np.intc), None
    starts = np.ones(len(known), dtype=np.bool_)  # where the last tokens of the context begin
    for length in range(1, min(len(context), len(known) - 1) + 1):
        starts = starts[1:] & (known[:-length] == context[-length])
        if not starts.any():
            break
        if length >= MIN_CONTEXT:
            found = starts, length
    if found is None:
        return None
    starts, length = found
    later = starts[max(0, start - length) :]
    first = int(later.argmax()) + max(0, start - length) if later.any() else int(starts.argmax())
    return first + length


def _num_equal(a: array[int], b: array[int]) -> int:
    """The number of equal tokens at the beginning."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(a), len(b)))
