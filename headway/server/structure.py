"""Structured output: what a body asks of the answer's form, as a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from headway.grammar import Grammar, check
from headway.server.errors import refused, shown
from headway.server.protocol import Wishes
from headway.server.wishes import naming

FORMS = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}


async def grammar_of(body: Wishes) -> Grammar | None:
    """The grammar of an answer; None: any text."""
    wanted, also = body.response_format, body.structured_outputs
    param = "response_format" if also is None else "structured_outputs"
    with naming(param):
        grammar = None if wanted is None else _from_format(wanted)
        if also is not None:
            if grammar is not None:
                raise refused(param, "and response_format: only one may be given")
            grammar = _from_outputs(also)
        if grammar is not None:  # reading one may take a while; what it says is kept
            await asyncio.to_thread(check, grammar)
    return grammar


def _from_format(wanted: Mapping[str, Any]) -> Grammar | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_object()
    if kind != "json_schema":
        types = "text, json_object or json_schema"
        raise refused("response_format", f"has the type {shown(kind)}; types are {types}")
    about = wanted.get("json_schema")
    if not isinstance(about, Mapping) or not isinstance(about.get("schema"), Mapping):
        raise refused("response_format", "must have json_schema.schema, which is an object")
    return Grammar.json_schema(about["schema"])


def _from_outputs(wanted: Mapping[str, Any]) -> Grammar:
    given = [name for name in FORMS if wanted.get(name) is not None]
    if len(given) != 1:
        names = ", ".join(FORMS)
        raise refused("structured_outputs", f"must have exactly one of {names}, not {len(given)}")
    return FORMS[given[0]](wanted[given[0]])
