"""SamplingParams: which values are accepted, what errors name, and what an executor receives."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InvalidRequest
from headway.grammar.grammar import Grammar
from headway.sampling_params import (
    Sampling,
    SamplingParams,
    StructuredOutputsParams,
    check_tokens,
    token_level,
)

VOCAB = 50

# Refused values by field and the limit that the message must name.
VALUES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("n", "1 to 1024"): (0, 1025),
    ("n", "whole number"): (True, 1.0, None),
    ("max_tokens", "at least 1"): (0,),
    ("max_tokens", "whole number"): (2.5,),
    ("min_tokens", "at least 0"): (-1,),
    ("min_tokens", "max_tokens (16)"): (129,),
    ("temperature", "0 to 1000"): (-0.1, 1001, 10**400, math.nan, math.inf),
    ("temperature", "number"): ("1", True, None),
    ("top_k", "at least -1"): (-2,),
    ("top_k", "whole number"): (3.0,),
    ("top_p", "above 0 and at most 1"): (0, 1.01, math.nan),
    ("min_p", "0 to 1"): (-0.01, 1.5),
    ("repetition_penalty", "0.001 to 1000"): (0, -1.0, math.inf),
    ("frequency_penalty", "-2 to 2"): (2.1,),
    ("presence_penalty", "-2 to 2"): (-2.1, math.nan),
    ("logit_bias", "map"): ([1],),
    ("logit_bias", "whole numbers"): ({"1": 1.0},),
    ("logit_bias", "at least 0"): ({-1: 1.0},),
    ("logit_bias", "-100 to 100"): ({3: 101}, {3: math.nan}),
    ("seed", "18446744073709551615"): (2**64,),
    ("seed", "-9223372036854775808"): (-(2**63) - 1,),
    ("seed", "whole number"): (1.5,),
    ("grammar", "a Grammar or None"): ('{"type": "object"}',),
    ("structured_outputs", "StructuredOutputsParams"): (5,),
    ("structured_outputs", "unknown"): ({"xml": "a"},),
    ("structured_outputs", "one of json, regex, choice, grammar"): ({"json": None},),
    ("structured_outputs", "regex and choice"): ({"regex": "a", "choice": ["b"]},),
    ("logprobs", "0 to 100"): (-1, 101, True),
    ("prompt_logprobs", "0 to 100"): (101,),
    ("stop", "non-empty"): ("", ["a", ""]),
    ("stop", "texts"): ([1], 5),
    ("bad_words", "list"): ("word",),
    ("bad_words", "non-empty"): ([""],),
    ("stop_token_ids", "at least 0"): ([-1],),
    ("stop_token_ids", "list"): ("12",),
    ("stop_token_ids", "whole numbers"): ([True],),
    ("allowed_token_ids", "whole numbers"): ([1.0],),
    ("allowed_token_ids", "list"): (3,),
    ("include_stop_str_in_output", "bool"): (1,),
    ("ignore_eos", "bool"): ("no",),
    ("skip_special_tokens", "bool"): (None,),
    ("priority", "whole number"): (0.5,),
    ("client", "str"): (3,),
    ("deadline", "number"): (math.nan, math.inf),
    ("salt", "str"): (None,),
}
REFUSED = [(name, value, limit) for (name, limit), each in VALUES.items() for value in each]


@pytest.mark.parametrize(("name", "value", "limit"), REFUSED)
def test_a_refusal_names_the_field_the_value_and_the_limit(
    name: str, value: Any, limit: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{name: value})
    message = str(refusal.value)
    assert message.startswith(name) and limit in message
    wrong = next(iter(value.values())) if isinstance(value, dict) else value
    parts = value if isinstance(value, list | dict) else ()
    names = [repr(value), repr(wrong), *map(repr, parts), *map(str, parts), "none"]
    assert any(text in message for text in names), message


def test_every_field_can_be_refused() -> None:
    assert {name for name, _, _ in REFUSED} == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    "written",
    [
        {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 1},
        {"temperature": 1000, "top_k": 10**30, "top_p": 1e-9, "repetition_penalty": 0.001},
        {"frequency_penalty": -2, "presence_penalty": 2.0},
        {"max_tokens": None, "min_tokens": 10**9},
        {"max_tokens": 7, "min_tokens": 7},
        {"seed": 2**64 - 1}, {"seed": -(2**63)},
        {"logprobs": 0, "prompt_logprobs": 100, "n": 1024},
        {"stop": "a"}, {"stop": ("a", "b")}, {"stop": []},
        {"logit_bias": {0: -100, 7: 100.0}}, {"logit_bias": {}},
        {"stop_token_ids": {1, 2}, "allowed_token_ids": range(3)},
        {"deadline": -1.0, "priority": -5, "client": "c", "salt": "s"},
    ],
)  # fmt: skip
def test_both_limits_of_every_range_are_accepted(written: dict[str, Any]) -> None:
    SamplingParams(**written)


@given(st.floats() | st.integers() | st.booleans() | st.none() | st.text(max_size=3))
def test_any_value_is_accepted_or_refused_with_the_name_of_its_field(value: Any) -> None:
    for field in fields(SamplingParams):
        try:
            SamplingParams(**{field.name: value})
        except InvalidRequest as refusal:
            assert str(refusal).startswith(field.name)


def test_params_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = -1.0  # type: ignore[misc]


def test_stop_is_one_text_or_several() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert list(SamplingParams(stop=["a", "b"]).stop_strings) == ["a", "b"]
    assert list(SamplingParams().stop_strings) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {VOCAB - 1: 1.0, VOCAB: 1.0}),
        ("allowed_token_ids", [0, VOCAB]),
        ("stop_token_ids", [VOCAB]),
    ],
)
def test_a_token_that_the_model_does_not_have_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name} has token {VOCAB}\b.* 0 to {VOCAB - 1}"):
        check_tokens(SamplingParams(**{name: value}), VOCAB)
    check_tokens(SamplingParams(**{name: value}), VOCAB + 1)


def test_allowing_no_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids is empty"):
        check_tokens(SamplingParams(allowed_token_ids=[]), VOCAB)
    check_tokens(SamplingParams(), VOCAB)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(name: str) -> None:
    check_tokens(SamplingParams(**{name: VOCAB}), VOCAB)
    with pytest.raises(InvalidRequest, match=re.escape(f"{name} must be at most {VOCAB}")):
        check_tokens(SamplingParams(**{name: VOCAB + 1}), VOCAB)


def test_the_executor_receives_every_field() -> None:
    written: dict[str, Any] = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "repetition_penalty": 1.5,
        "frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {4: 2.0}, "logprobs": 2,
        "prompt_logprobs": 1, "grammar": Grammar.json_object(),
    }  # fmt: skip
    params = SamplingParams(allowed_token_ids=[4, 4, 5], bad_words=["x"], seed=1, **written)
    sampling = token_level(params, seed=9, bad_words=((1, 2),))
    expected = Sampling(**written, seed=9, bad_words=((1, 2),), allowed_tokens=frozenset({4, 5}))
    assert sampling == expected
    assert all(getattr(expected, f.name) != getattr(Sampling(), f.name) for f in fields(Sampling))


def test_a_later_change_of_the_callers_mapping_has_no_effect() -> None:
    bias = {1: 1.0}
    sampling = token_level(SamplingParams(logit_bias=bias), seed=0, bad_words=())
    bias[1] = 5.0
    assert sampling.logit_bias == {1: 1.0}


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="bad_words"):
        token_level(SamplingParams(bad_words=["x"]), seed=0, bad_words=((1,), ()))


@pytest.mark.parametrize(
    "written",
    [
        {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1},
        {"logit_bias": {1: 1.0}}, {"bad_words": ((1,),)}, {"allowed_tokens": frozenset({1})},
        {"grammar": Grammar.json_object()},
    ],
)  # fmt: skip
def test_masks_biases_and_penalties_edit_logits(written: dict[str, Any]) -> None:
    assert Sampling(**written).edits_logits


@pytest.mark.parametrize(
    "written",
    [
        {"logprobs": 0}, {"prompt_logprobs": 0},
        {"temperature": 0.3, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3},
    ],
)  # fmt: skip
def test_logprobs_and_the_choice_of_a_token_edit_no_logits(written: dict[str, Any]) -> None:
    assert not Sampling(**written).edits_logits


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": {"type": "object"}}, Grammar.json_schema({"type": "object"})),
        ({"json": '{"type": "object"}'}, Grammar.json_schema({"type": "object"})),
        ({"regex": "a+"}, Grammar.regex("a+")), ({"choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"json_object": True}, Grammar.json_object()),
    ],
)  # fmt: skip
def test_structured_outputs_set_the_grammar(given: dict[str, Any], grammar: Grammar) -> None:
    for written in (StructuredOutputsParams(**given), given):
        params = SamplingParams(structured_outputs=written)
        assert params.grammar == grammar
        assert replace(params, seed=4).grammar == grammar
    with pytest.raises(InvalidRequest, match="structured_outputs and grammar"):
        SamplingParams(structured_outputs=given, grammar=Grammar.regex("other"))


def test_none_in_place_of_a_list_is_an_empty_one() -> None:
    params = SamplingParams(stop_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert params == SamplingParams()
