"""Structured output: turns `response_format` and `structured_outputs` into a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from headway.grammar.grammar import Grammar, check_grammar, is_checked
from headway.server.http.errors import ApiError, attribute_errors_to, field_error
from headway.server.openai.protocol import GenerationFields, ResponseFormat, StructuredOutputs
from headway.server.settings import Settings

# One thread, so that checking grammars takes at most one core from the rest of the server.
CHECKS = ThreadPoolExecutor(1, "grammars")
# vLLM's older fields, and the members of structured_outputs that replace them.
GUIDED_FIELDS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar",
}  # fmt: skip
CONSTRUCTORS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}


async def grammar_of(body: GenerationFields, settings: Settings) -> Grammar | None:
    """The grammar of a request's output; None: any text. ApiError if the grammar is invalid."""
    closes = settings.disable_additional_properties  # a request can turn this on, not off
    format, outputs = body.response_format, body.structured_outputs
    sent = ["structured_outputs"]
    if outputs is None:
        extra = body.model_extra or {}
        sent = [name for name in GUIDED_FIELDS if extra.get(name) is not None]
        outputs = _guided_outputs(extra, sent)
    param = "response_format" if outputs is None else "structured_outputs"
    with attribute_errors_to(param):
        grammar = None if format is None else _from_format(format, closes)
        if outputs is not None:
            if grammar is not None:
                raise _exclusive([*sent, "response_format"])
            grammar = _from_outputs(outputs, closes)
        if grammar is not None:
            grammar = replace(grammar, param=param)
            await check_in_thread(grammar, lambda: check_grammar(grammar))
    return grammar


def _exclusive(fields: Sequence[str]) -> ApiError:
    problem = f"{' and '.join(fields)} exclude each other; send only one"
    return ApiError(400, problem, param=fields[0])


def _guided_outputs(extra: Mapping[str, Any], sent: Sequence[str]) -> StructuredOutputs | None:
    """vLLM's older fields, `guided_json` and so on, as `structured_outputs`.

    `sent` are those fields that `extra` has; None if it has none.
    """
    if not sent:
        return None
    try:
        outputs = StructuredOutputs.model_validate({GUIDED_FIELDS[old]: extra[old] for old in sent})
    except ValidationError as error:
        first = error.errors()[0]
        name = next(old for old, new in GUIDED_FIELDS.items() if new == first["loc"][0])
        raise field_error(name, f"is invalid: {first['msg']}") from None
    if len(sent) > 1:
        raise _exclusive(sent)
    return outputs


async def check_in_thread(grammar: Grammar, check: Callable[[], None]) -> None:
    """Run `check`, on another thread unless the verdict on the grammar is cached."""
    if is_checked(grammar):
        return check()
    return await asyncio.get_running_loop().run_in_executor(CHECKS, check)


def grammar_error(grammar: Grammar | None, problem: str, code: str | None = None) -> ApiError:
    """A 400 error for the field that the grammar came from."""
    param = (grammar.param if grammar is not None else None) or "tools"
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def _from_format(format: ResponseFormat, closes: bool) -> Grammar | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar.json_object()
    if format.json_schema is None:
        problem = "is missing; the type json_schema needs it"
        raise field_error("response_format.json_schema", problem)
    closes = closes or bool(format.json_schema.strict)
    return Grammar.json_schema(format.json_schema.schema_, disable_additional_properties=closes)


def _from_outputs(outputs: StructuredOutputs, closes: bool) -> Grammar:
    given = outputs.model_dump(by_alias=True, exclude_none=True)
    closes = given.pop("disable_additional_properties", False) or closes
    if len(given) != 1:
        names = ", ".join(CONSTRUCTORS)
        problem = f"must have exactly one of {names}, not {' and '.join(given) or 'none of them'}"
        raise field_error("structured_outputs", problem)
    ((name, value),) = given.items()
    if name == "json":
        return Grammar.json_schema(value, disable_additional_properties=closes)
    return CONSTRUCTORS[name](value)
