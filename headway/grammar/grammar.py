"""Grammars that constrain the output: a JSON schema, a regular expression, a choice of texts, Lark.

A `Grammar` is a description that is part of a request. It knows no tokens: the executor compiles
its `source` into a matcher that masks logits. llguidance is imported when a grammar is first used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import InvalidGrammar, InvalidRequest, find_lone_surrogate, shorten
from headway.grammar.checker import GrammarChecker
from headway.grammar.json_schema import MAX_DEPTH, close_objects, is_too_deep
from headway.grammar.sandbox import MatcherLimits

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "tool_calls", "after")
MAX_CHARACTERS = 100_000
MAX_CHOICE_CHARACTERS = 500_000  # a choice is one terminal, which compiles faster than rules
# One space, or a line break with indentation. Unbounded whitespace would let a model never end.
WHITESPACE = r" |\n {0,40}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The set of allowed outputs; use the class methods to make one."""

    kind: str
    text: str
    param: str | None = field(default=None, compare=False, kw_only=True)  # the request's field

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            kinds = ", ".join(KINDS)
            raise InvalidRequest(f"grammar kind must be one of {kinds}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidRequest(f"{self.kind} must be a string, not {shorten(self.text)}")
        _check_characters(self.kind, self.text)
        if self.kind == "after":  # the grammar in it has been checked
            return
        limit = MAX_CHOICE_CHARACTERS if self.kind == "choice" else MAX_CHARACTERS
        if (size := len(self.text)) > limit:
            raise InvalidRequest(f"{self.kind} must have at most {limit} characters, not {size}")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str, *, disable_additional_properties: bool = False
    ) -> Grammar:
        """JSON that satisfies a JSON schema, given as an object or as JSON text.

        `disable_additional_properties` applies `headway.grammar.json_schema.close_objects`.
        """
        parsed = _parse_schema(schema)
        if disable_additional_properties:
            if is_too_deep(parsed):
                raise InvalidGrammar(
                    f"json_schema is nested too deeply; it may have {MAX_DEPTH} levels of objects "
                    "and lists"
                )
            parsed = close_objects(parsed)
        return cls("json_schema", _to_json("json_schema", parsed))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that match a whole pattern; lookaround and backreferences are not supported."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Exactly one of these texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not is_list or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(
                f"choice must be a list of at least 1 string, not {shorten(texts)}"
            )
        for text in texts:
            _check_characters("choice", text)
        return cls("choice", _to_json("choice", list(texts)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in llguidance's Lark syntax."""
        return cls("lark", text)

    @classmethod
    def tool_calls(cls, text: str) -> Grammar:
        """Tool calls, in Lark written by the server around the schemas of the tools."""
        return cls("tool_calls", text)

    @classmethod
    def after(cls, text: str, answer: Grammar) -> Grammar:
        """An answer after some text, such as reasoning: Lark whose @answer is the other grammar."""
        written = _to_json("after", [text, answer.kind, answer.text])
        return cls("after", written, param=answer.param)

    @property
    def answer(self) -> Grammar:
        """The grammar of the answer, without what precedes it."""
        return Grammar(*json.loads(self.text)[1:]) if self.kind == "after" else self

    @property
    def limits(self) -> MatcherLimits:
        if self.kind == "after":
            return self.answer.limits
        # Large schemas need 2000 items. An ambiguous Lark grammar uses them all: 0.2 s per token.
        max_items = 500 if self.kind == "lark" else 2000
        return {"max_items_in_row": max_items, "max_lexer_states": 50_000, "verbose_errors": False}

    @property
    def source(self) -> str:
        """The grammar in llguidance's format."""
        from llguidance import LLMatcher

        if self.kind == "after":
            source = self.answer.source
            is_lark = not source.startswith("{")
            (inner,) = [{"lark_grammar": source}] if is_lark else json.loads(source)["grammars"]
            grammars = [{"lark_grammar": json.loads(self.text)[0]}, {**inner, "name": "answer"}]
            return json.dumps({"grammars": grammars})
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind in ("lark", "tool_calls"):
            return LLMatcher.grammar_from_lark(self.text)
        if self.kind == "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(self.text))
            texts = texts.replace("\x7f", "\\u007f")  # allowed in a JSON string, but not in Lark
            # A terminal, because with a rule every text would be a parser item at every step.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        schema = {"type": "object"} if self.kind == "json_object" else json.loads(self.text)
        return json.dumps({"grammars": [{"json_schema": with_bounded_whitespace(schema)}]})


def with_bounded_whitespace(schema: Mapping[str, Any], **options: bool) -> dict[str, Any]:
    """The schema with bounded whitespace, unless its own `x-guidance` says otherwise."""
    guidance = {"whitespace_pattern": WHITESPACE, **options, **_guidance(schema)}
    return {**schema, "x-guidance": guidance}


def is_checked(grammar: Grammar) -> bool:
    """Whether the verdict on a grammar is cached, so that `check_grammar` returns at once."""
    return CHECKER.knows(grammar)


def check_grammar(grammar: Grammar) -> None:
    """InvalidGrammar, with the reason, if a grammar cannot be compiled or allows no text.

    Of the text before an answer nothing is checked: it may have special tokens of a model.
    """
    grammar = grammar.answer
    try:
        raise_if_invalid(grammar, CHECKER.problem(grammar))
    except ImportError:
        raise InvalidGrammar(
            f"{grammar.kind} needs the package llguidance; install it with `pip install llguidance`"
        ) from None


def raise_if_invalid(grammar: Grammar, problem: str) -> None:
    """InvalidGrammar unless `problem` is empty."""
    if problem:
        raise InvalidGrammar(f"{grammar.answer.kind} cannot be used: {problem}")


CHECKER = GrammarChecker()


def _parse_schema(schema: object) -> Mapping[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"json_schema must be an object, not {shorten(schema)}")
    _guidance(schema)
    return dict(schema)


def _guidance(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """llguidance's settings in a schema."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"json_schema: x-guidance must be an object, not {shorten(own)}")
    return own


def _check_characters(name: str, text: str) -> None:
    if (place := find_lone_surrogate(text)) is not None:
        problem = f"contains the lone surrogate {text[place]!r} at character {place}"
        raise InvalidRequest(f"{name} {problem}; use complete characters")


def _to_json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be encoded as JSON: {error}") from None
