"""Drafts from a prediction: they follow it, find it again after a difference, and change no text."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from headway import Engine, Scheduler, VirtualClock, preset
from headway.drafters.prediction import MAX_CONTEXT, MIN_CONTEXT, PredictionDrafter, find
from headway.errors import InvalidRequest
from headway.plan import Plan, StepResult
from headway.request import Request, RequestParams
from tests.support.drive import result

Tokens = list[int]


def request_of(prediction: Tokens) -> Request:
    return Request("a", [1], RequestParams(prediction=array("i", prediction)))


def place_of(prediction: Tokens, output: Tokens, start: int) -> int | None:
    """By trying all places: the longest context, then the first from `start` on, then the first."""
    for length in range(min(MAX_CONTEXT, len(output)), MIN_CONTEXT - 1, -1):
        places = range(length, len(prediction))
        ends = [end for end in places if prediction[end - length : end] == output[-length:]]
        if ends:
            return next((end for end in ends if end >= start), ends[0])
    return None


@pytest.mark.parametrize("num_letters", [1, 2, 3, 8])
def test_a_place_is_found_by_the_longest_context_then_behind_the_last_place(
    num_letters: int,
) -> None:
    chance, num_found = random.Random(num_letters), 0
    for _ in range(500):
        prediction = chance.choices(range(num_letters), k=chance.randint(1, 60))
        output = chance.choices(range(num_letters), k=chance.randint(1, 30))
        start = chance.randint(0, 60)
        found = find(array("i", prediction), array("i", output[-MAX_CONTEXT:]), start)
        assert found == place_of(prediction, output, start), (prediction, output, start)
        num_found += found is not None
    assert num_found > 50


@pytest.mark.parametrize("num_letters", [2, 5, 1000])
def test_drafts_go_on_where_the_output_follows_or_where_its_last_tokens_occur(
    num_letters: int,
) -> None:
    chance, num_drafts = random.Random(num_letters), 0
    for _ in range(200):
        prediction = chance.choices(range(num_letters), k=chance.randint(1, 50))
        request, drafter = request_of(prediction), PredictionDrafter()
        while len(request.output) < 60:
            output = request.output.tolist()
            most = chance.randint(1, 6)
            drafts = list(drafter.propose(request, most))
            assert drafts == list(drafter.propose(request, most)), "nothing is new"
            if output == prediction[: len(output)]:
                assert drafts == prediction[len(output) :][:most]
            elif drafts:
                place = drafter._places[request].next
                assert place is not None and drafts == prediction[place:][:most]
                assert prediction[place - MIN_CONTEXT : place] == output[-MIN_CONTEXT:]
            else:
                places = range(len(prediction) - MIN_CONTEXT)
                pairs = [prediction[i : i + MIN_CONTEXT] for i in places]
                is_last = prediction[-MIN_CONTEXT:] == output[-MIN_CONTEXT:]
                assert output[-MIN_CONTEXT:] not in pairs or is_last
            num_drafts += len(drafts)
            right = drafts[: chance.randint(0, len(drafts))]
            request.flushed_tokens.extend([*right, chance.randrange(num_letters)])
        drafter.forget(request)
        assert not drafter._places
    assert num_drafts > 1000 or num_letters == 1000


@pytest.mark.parametrize("new", [[], [900], [900, 901, 902], [40, 41, 42, 43]])
@pytest.mark.parametrize("num_removed", [0, 1, 5])
@pytest.mark.parametrize("start", [0, 1, 7, 20])
def test_after_an_edit_the_rest_of_the_prediction_is_drafted_again(
    new: Tokens, num_removed: int, start: int
) -> None:
    prediction = list(range(100, 160))
    output = [*prediction[:start], *new, *prediction[start + num_removed :]]
    request, drafter, wrong = request_of(prediction), PredictionDrafter(), list[int]()
    for place, token in enumerate(output):
        if list(drafter.propose(request, 1)) != [token]:
            wrong.append(place)
        request.flushed_tokens.append(token)
    edited = range(start, start + len(new) + MIN_CONTEXT)
    assert set(wrong) <= set(edited)


def test_a_repeated_text_is_continued_behind_the_place_before_the_difference() -> None:
    line = [1, 2]
    prediction = [10, *line, 11, *line, 12, *line, 13]
    request, drafter = request_of(prediction), PredictionDrafter()
    for tokens, drafts in (
        ([10, 1, 2, 11], [1, 2, 12]), ([5], []), (line, [12, 1, 2]), ([5], []), (line, [12, 1, 2]),
    ):  # fmt: skip
        request.flushed_tokens.extend(tokens)
        assert list(drafter.propose(request, 3)) == drafts, request.output


def test_an_output_that_was_discarded_is_followed_from_its_beginning() -> None:
    request, drafter = request_of([1, 2, 3, 4]), PredictionDrafter()
    request.flushed_tokens.extend([1, 2, 3])
    assert list(drafter.propose(request, 2)) == [4]
    del request.flushed_tokens[:]
    assert list(drafter.propose(request, 2)) == [1, 2]


class Dictated:
    """An executor whose requests generate a text; verifies drafts."""

    def __init__(self, text: Tokens) -> None:
        self.text, self.num_steps = text, 0

    def launch(self, plan: Plan) -> Dictated:
        self.num_steps += 1
        self._result = result(plan, lambda request, place: self.text[place - request.num_prompt])
        return self

    def wait(self) -> StepResult:
        return self._result


def generated(
    text: Tokens, prediction: Tokens | None, **policies: Any
) -> tuple[Tokens, int, Request]:
    executor = Dictated(text)
    engine = Engine(Scheduler(preset("headway", **policies)), executor, VirtualClock())
    given = None if prediction is None else array("i", prediction)
    params = RequestParams(max_tokens=len(text), prediction=given)
    (request,) = engine.add("a", [7], params)
    engine.run()
    return request.output.tolist(), executor.num_steps, request


def test_a_right_prediction_saves_steps_and_a_wrong_one_changes_nothing() -> None:
    chance = random.Random(0)
    text = chance.choices(range(10_000), k=60)
    plain, num_plain, _ = generated(text, None, draft="fixed(4)")
    assert plain == text and num_plain == 60
    same, num_same, request = generated(text, text, draft="fixed(4)")
    history = request.history
    assert same == text and num_same < 60 / 4
    assert 0 < history.num_accepted == history.num_drafted
    wrong, _, request = generated(text, chance.choices(range(10_000), k=60), draft="fixed(4)")
    assert wrong == text and request.history.num_accepted < 3


def test_without_a_draft_rule_a_prediction_has_no_effect() -> None:
    text = list(range(20))
    found, num_steps, request = generated(text, text)
    assert found == text and num_steps == 20 and request.history.num_drafted == 0


@pytest.mark.parametrize(
    "wrong", [[1, 2], (1,), "text", b"text", array("l", [1]), array("i", [-1])]
)
def test_a_wrong_prediction_is_refused(wrong: Any) -> None:
    engine = Engine(Scheduler(preset("headway")), Dictated([]), VirtualClock())
    with pytest.raises(InvalidRequest, match="prediction"):
        engine.add("a", [7], RequestParams(prediction=wrong))
    assert engine.scheduler.is_idle


def test_an_empty_prediction_is_none() -> None:
    text = [1, 2, 3]
    assert generated(text, [], draft="fixed(2)")[0] == text
