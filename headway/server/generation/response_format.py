"""Structured output: what a body asks of the answer's form, as a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from headway.grammar.grammar import Grammar, check, is_known
from headway.server.generation.request_fields import naming
from headway.server.generation.unsupported import GUIDED, guided
from headway.server.http.errors import ApiError, refused
from headway.server.openai.protocol import GenerationFields, ResponseFormat, StructuredOutputs
from headway.server.settings import Settings

# One thread: however much there is to read, it takes one core from everybody else at most.
READER = ThreadPoolExecutor(1, "grammars")
FORMS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}


async def grammar_of(body: GenerationFields, settings: Settings) -> Grammar | None:
    """The grammar of an answer; None: any text."""
    closes = settings.disable_additional_properties  # a request can turn it on, not off
    wanted, also = body.response_format, body.structured_outputs
    if also is None and (older := guided(body.model_extra)):
        also = _validated(older)
    param = "response_format" if also is None else "structured_outputs"
    with naming(param):
        grammar = None if wanted is None else _from_format(wanted, closes)
        if also is not None:
            if grammar is not None:
                raise refused(param, "and response_format: only one may be given")
            grammar = _from_outputs(also, closes)
        if grammar is not None:
            grammar = replace(grammar, param=param)
            await checked(grammar, lambda: check(grammar))
    return grammar


def _validated(given: dict[str, Any]) -> StructuredOutputs:
    """vLLM's older fields, `guided_json` and so on, as `structured_outputs`."""
    try:
        return StructuredOutputs.model_validate(given)
    except ValidationError as error:
        name = next(old for old, new in GUIDED.items() if new == error.errors()[0]["loc"][0])
        raise refused(name, f"is wrong: {error.errors()[0]['msg']}") from None


async def checked(grammar: Grammar, check: Callable[[], None]) -> None:
    """Check a grammar, aside if it is not known: reading one may take a while."""
    if is_known(grammar):
        return check()
    return await asyncio.get_running_loop().run_in_executor(READER, check)


def grammar_error(grammar: Grammar | None, problem: str, code: str | None = None) -> ApiError:
    """A 400 that names the field that the grammar of a request came in."""
    param = (grammar.param if grammar is not None else None) or "tools"
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def _from_format(wanted: ResponseFormat, closes: bool) -> Grammar | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    if wanted.json_schema is None:
        problem = "response_format.json_schema is missing; the type json_schema needs it"
        raise ApiError(400, problem, param="response_format")
    closes = closes or bool(wanted.json_schema.strict)
    return Grammar.json_schema(wanted.json_schema.schema_, disable_additional_properties=closes)


def _from_outputs(wanted: StructuredOutputs, closes: bool) -> Grammar:
    given = wanted.model_dump(by_alias=True, exclude_none=True)
    closes = given.pop("disable_additional_properties", False) or closes
    if len(given) != 1:
        names = ", ".join(FORMS)
        raise refused("structured_outputs", f"must have exactly one of {names}, not {len(given)}")
    ((name, value),) = given.items()
    if name == "json":
        return Grammar.json_schema(value, disable_additional_properties=closes)
    return FORMS[name](value)
