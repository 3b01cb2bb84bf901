"""What an answer must look like: JSON of a schema, a regular expression, one of a few texts.

A `Grammar` is a description that travels with a request. It knows no tokens: those who mask logits
with it make a matcher of its `source`. llguidance reads it, and is loaded when one is first used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import InvalidGrammar, InvalidRequest
from headway.grammar.checker import GrammarChecker
from headway.grammar.json_schema import closed

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "tool_calls")
MAX_CHARACTERS = 100_000
MAX_CHOICE_CHARACTERS = 500_000  # one terminal, which compiles faster than rules do
# One space, or a line break and its indentation: a model cannot go on with blanks for ever.
BLANKS = r" |\n {0,40}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that a model may answer with; made by one of its class methods."""

    kind: str
    text: str
    param: str | None = field(default=None, compare=False, kw_only=True)  # the field it came in

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"a grammar is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidRequest(f"{self.kind} must be a text, not {self.text!r}")
        if not self.text.isascii():
            _check_characters(self.kind, self.text)
        most = MAX_CHOICE_CHARACTERS if self.kind == "choice" else MAX_CHARACTERS
        if len(self.text) > most:
            raise InvalidRequest(f"{self.kind} has {len(self.text)} characters; {most} is the most")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str, *, disable_additional_properties: bool = False
    ) -> Grammar:
        """JSON that a JSON schema accepts; the schema as an object or as its JSON.

        `disable_additional_properties`: as `headway.grammar.json_schema.closed`.
        """
        read = _schema(schema)
        if disable_additional_properties:
            try:
                read = closed(read)
            except RecursionError:
                raise InvalidGrammar("json_schema is nested too deeply; make it flatter") from None
        return cls("json_schema", _json("json_schema", read))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that match a pattern from end to end; no lookaround, no references back."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Exactly one of these texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes)
        if not is_list or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"choice must be a list of at least 1 text, not {texts!r}")
        for text in texts:
            _check_characters("choice", text)
        return cls("choice", _json("choice", list(texts)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar, as llguidance reads Lark's notation."""
        return cls("lark", text)

    @classmethod
    def tool_calls(cls, text: str) -> Grammar:
        """Calls of tools, in Lark that a server has written around their schemas."""
        return cls("tool_calls", text)

    @property
    def limits(self) -> dict[str, Any]:
        """What a matcher may use, as llguidance names it.

        Error messages are short: a long one would quote the text of a user.
        """
        # A user's Lark can be read in many ways at once, and each takes time at every token: with
        # 2000, as large schemas need, a fifth of a second.
        most = 500 if self.kind == "lark" else 2000
        return {"max_items_in_row": most, "max_lexer_states": 50_000, "verbose_errors": False}

    @property
    def source(self) -> str:
        """The grammar as llguidance reads it."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind in ("lark", "tool_calls"):
            return LLMatcher.grammar_from_lark(self.text)
        if self.kind == "choice":
            texts = " | ".join(json.dumps(text) for text in json.loads(self.text))
            texts = texts.replace("\x7f", "\\u007f")  # the one character that only JSON allows
            # A terminal: as a rule, each text would be an item that every step carries along.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        schema = {"type": "object"} if self.kind == "json_object" else json.loads(self.text)
        return json.dumps({"grammars": [{"json_schema": with_few_blanks(schema)}]})


def with_few_blanks(schema: Mapping[str, Any], **more: bool) -> dict[str, Any]:
    """A schema whose blanks are bounded, unless it has its own rules for them."""
    own = _guidance(schema)
    return {**schema, "x-guidance": {"whitespace_pattern": BLANKS, **more, **own}}


def is_known(grammar: Grammar) -> bool:
    """Whether it was checked of late, so that checking it again takes no time."""
    return CHECKER.knows(grammar)


def check(grammar: Grammar) -> None:
    """InvalidGrammar, with the reason, if a grammar cannot be read or allows no text at all."""
    try:
        refuse(grammar, CHECKER.problem(grammar))
    except ImportError:
        raise InvalidGrammar(
            f"{grammar.kind} needs the package llguidance, which is not installed here"
        ) from None


def refuse(grammar: Grammar, problem: str) -> None:
    """InvalidGrammar if there is a problem."""
    if problem:
        raise InvalidGrammar(f"{grammar.kind} cannot be used: {problem}")


CHECKER = GrammarChecker()


def _schema(schema: object) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"json_schema must be an object, not {schema!r}")
    _guidance(schema)
    return dict(schema)


def _guidance(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """llguidance's own settings, which may stand in a schema."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping):
        raise InvalidRequest(f"json_schema: x-guidance must be an object, not {own!r}")
    return own


def _check_characters(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!r} at character {error.start}"
        raise InvalidRequest(f"{name} holds {half}: half of a surrogate pair") from None


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no JSON: {error}") from None
