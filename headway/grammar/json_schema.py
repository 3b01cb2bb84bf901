"""Closes the objects of a JSON schema: only the properties that it names are allowed.

By the standard, an object without `additionalProperties` may have any other properties. Knows the
keywords that contain schemas, and nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords that contain schemas for the same value, schemas for parts of it, and maps of schemas.
CONDITIONAL = ("if", "then", "else", "not", "dependentSchemas")
IN_PLACE = ("allOf", "anyOf", "oneOf", *CONDITIONAL)
WITHIN = (
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "propertyNames",
    "additionalProperties", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
MAX_DEPTH = 200  # levels of objects and lists; far below Python's limit for nested calls
OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def is_too_deep(schema: Mapping[str, Any]) -> bool:
    """Whether a schema has more than MAX_DEPTH levels; found without nested calls."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner = [each for value in level for each in _inner_values(value)]
        if not inner:
            return False
        level = list({id(each): each for each in inner}.values())
    return True


def _inner_values(value: Any) -> list[Any]:
    """The objects and lists in an object or a list."""
    elements = value.values() if isinstance(value, Mapping) else value
    return [each for each in elements if isinstance(each, Mapping | list | tuple)]


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object that names its properties.

    Unchanged are objects with rules for other properties, objects that name no properties, and
    schemas that describe one object together, such as those of allOf: each of them would forbid
    the properties that the others name.
    """
    closer = _SchemaCloser()
    closer.find_parts(schema)
    result: dict[str, Any] = closer.close(schema, "#", is_part=False)
    return result


class _SchemaCloser:
    """Closes one schema. A "part" is a schema that describes an object together with another."""

    def __init__(self) -> None:
        self._parts: set[str] = set()  # places of definitions
        self._refs: dict[str, set[str]] = {}  # by place: references to schemas for the same value
        self._named: dict[int, bool] = {}  # by id: whether a schema names properties

    def close(self, schema: Any, place: str, *, is_part: bool) -> Any:
        """A copy with its objects closed."""
        if isinstance(schema, list):
            return [
                self.close(each, f"{place}/{number}", is_part=is_part)
                for number, each in enumerate(schema)
            ]
        if not isinstance(schema, Mapping):
            return schema
        is_part = is_part or place in self._parts or self._num_sources(schema) > 1
        changed = dict(schema)
        for name, where, value in _members(schema, place):
            is_inner = name in CONDITIONAL or (is_part and name in IN_PLACE)
            if name in MAPS:
                changed[name] = {
                    key: self.close(each, f"{where}/{_escaped(key)}", is_part=is_inner)
                    for key, each in value.items()
                }
            else:
                changed[name] = self.close(value, where, is_part=is_inner)
        has_rules = any(name in schema for name in OTHER_PROPERTIES)
        if "properties" in schema and not is_part and not has_rules:
            changed["additionalProperties"] = False
        return changed

    def find_parts(self, schema: Any) -> None:
        """Find the definitions that are parts, directly or through other definitions."""
        self._collect(schema, "#", "#", is_part=False)
        waiting = list(self._parts)
        while waiting:
            found = self._refs.get(waiting.pop(), set()) - self._parts
            self._parts |= found
            waiting += found

    def _collect(self, schema: Any, place: str, owner: str, *, is_part: bool) -> None:
        """Record the references of a schema; `owner` is the place of the value it describes."""
        if isinstance(schema, list):
            for number, each in enumerate(schema):
                self._collect(each, f"{place}/{number}", owner, is_part=is_part)
        if not isinstance(schema, Mapping):
            return
        is_part = is_part or self._num_sources(schema) > 1
        if isinstance(ref := schema.get("$ref"), str):
            self._refs.setdefault(owner, set()).add(ref)
            if is_part:
                self._parts.add(ref)
        for name, where, value in _members(schema, place):
            is_same = name in IN_PLACE
            for key, each in value.items() if name in MAPS else [("", value)]:
                inner = f"{where}/{_escaped(key)}" if name in MAPS else where
                own = owner if is_same else inner
                self._collect(each, inner, own, is_part=is_part and is_same)

    def _num_sources(self, schema: Mapping[str, Any]) -> int:
        """Number of schemas that name properties of the same object."""
        all_of = schema.get("allOf")
        others = [schema.get(name) for name in IN_PLACE if name != "allOf"]
        each = [*(all_of if isinstance(all_of, list) else ()), *others]
        return ("properties" in schema) + ("$ref" in schema) + sum(map(self._is_named, each))

    def _is_named(self, schema: Any) -> bool:
        """Whether any of the schemas for one value names properties, here or by reference."""
        if isinstance(schema, list):
            return any(map(self._is_named, schema))
        if not isinstance(schema, Mapping):
            return False
        found = self._named.get(id(schema))
        if found is None:
            found = "properties" in schema or "$ref" in schema
            found = found or any(self._is_named(schema.get(name)) for name in IN_PLACE)
            self._named[id(schema)] = found
        return found


def _members(schema: Mapping[str, Any], place: str) -> Iterator[tuple[str, str, Any]]:
    """Keywords that contain schemas, with their places and values; others contain data."""
    for name, value in schema.items():
        is_map = name in MAPS and isinstance(value, Mapping)
        if is_map or (name not in MAPS and (name in IN_PLACE or name in WITHIN)):
            yield name, f"{place}/{_escaped(name)}", value


def _escaped(name: str) -> str:
    """A name escaped for a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")
