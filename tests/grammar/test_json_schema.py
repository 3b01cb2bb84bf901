"""Closed schemas: an object has only the properties that its schema names."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from headway.errors import InvalidRequest
from headway.grammar.grammar import Grammar
from headway.grammar.json_schema import MAX_DEPTH, close_objects
from headway.grammar.sandbox import make_tokenizer

pytest.importorskip("llguidance")

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OPEN, "additionalProperties": False}


def accepts(grammar: Grammar, value: Any) -> bool:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**grammar.limits)
    matcher = LLMatcher(make_tokenizer(None), grammar.source, log_level=0, limits=limits)
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": ["object", "null"], "properties": {}}, {"additionalProperties": False}),
        ({"$defs": {"d": OPEN}}, {"$defs": {"d": CLOSED}}),
        ({"definitions": {"d": OPEN}}, {"definitions": {"d": CLOSED}}),
        ({"items": OPEN}, {"items": CLOSED}),
        ({"prefixItems": [OPEN, True]}, {"prefixItems": [CLOSED, True]}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
        ({"properties": {"b": OPEN}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        (
            {"properties": {"properties": OPEN}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
        ({**OPEN, "anyOf": [{"required": ["a"]}]}, {"additionalProperties": False}),
    ],
)
def test_objects_with_named_properties_are_closed(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == {**schema, **expected}
    assert close_objects(close_objects(schema)) == close_objects(schema)
    assert json.dumps(schema) == before, "the caller's own is not touched"


@pytest.mark.parametrize(
    "schema",
    [
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "string"}},
        {**OPEN, "unevaluatedProperties": True},
        {**OPEN, "patternProperties": {"^x": {"type": "string"}}},
        {"type": "object"},
        {"enum": [OPEN]},
        {"const": OPEN},
        {"properties": 3, "additionalProperties": 4},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {**OPEN, "anyOf": [{"properties": {"b": {}}}]},
        {"allOf": [{"$ref": "#/$defs/d"}, OPEN], "$defs": {"d": {"properties": {"b": {}}}}},
        {
            "allOf": [{"$ref": "#/$defs/d"}, OPEN],
            "$defs": {"d": {"$ref": "#/$defs/e~1f"}, "e/f": {"properties": {"b": {}}}},
        },
    ],
)
def test_objects_with_own_rules_and_parts_of_objects_are_unchanged(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema


def test_an_object_described_by_parts_can_still_be_generated() -> None:
    base = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schema = {"allOf": [{"$ref": "#/$defs/base"}, OPEN], "$defs": {"base": base}}
    grammar = Grammar.json_schema(schema, disable_additional_properties=True)
    assert accepts(grammar, {"b": 1, "a": 2})


def test_a_grammar_is_closed_only_if_requested() -> None:
    free = Grammar.json_schema(OPEN)
    strict = Grammar.json_schema(json.dumps(OPEN), disable_additional_properties=True)
    for value, is_named in (({"a": 1}, True), ({}, True), ({"a": 1, "x": 2}, False)):
        assert accepts(free, value)
        assert accepts(strict, value) == is_named
    own = Grammar.json_schema({**OPEN, "additionalProperties": True})
    assert accepts(own, {"x": 2})


class CountsCalls(dict[str, Any]):
    """Keeps the maximum number of calls in which it is read."""

    most = 0

    def get(self, *given: Any) -> Any:
        self._count()
        return super().get(*given)

    def values(self) -> Any:
        self._count()
        return super().values()

    def _count(self) -> None:
        frame, count = sys._getframe(), 0
        while frame := frame.f_back:  # type: ignore[assignment]
            count += 1
        CountsCalls.most = max(CountsCalls.most, count)


WRAPPED: dict[str, tuple[int, Callable[[Any], Any]]] = {  # by keyword: levels, and how it contains
    "items": (1, lambda schema: schema),
    "allOf": (2, lambda schema: [schema]),
    "properties": (2, lambda schema: {"x": schema}),
}


@pytest.mark.parametrize("keyword", WRAPPED)
def test_a_schema_that_is_nested_too_deeply_is_refused(keyword: str) -> None:
    """And before calls are nested too deeply, because finalizers may run in the deepest of them."""
    num_levels, wrap = WRAPPED[keyword]

    def nested(count: int) -> CountsCalls:
        schema = CountsCalls(type="object")
        for number in range(count):
            schema = CountsCalls({keyword: wrap(schema), "description": str(number)})
        return schema

    here, most = len(inspect.stack(0)), (MAX_DEPTH - 1) // num_levels
    for count, is_refused in ((most, False), (most + 1, True), (5000, True)):
        CountsCalls.most = 0
        problem = pytest.raises(InvalidRequest, match="nested too deeply")
        with problem if is_refused else nullcontext():
            Grammar.json_schema(nested(count), disable_additional_properties=True)
        assert CountsCalls.most - here <= (10 if is_refused else 3 * MAX_DEPTH)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {"items": {}}
    schema["anyOf"] = [schema, schema]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        Grammar.json_schema(schema, disable_additional_properties=True)
