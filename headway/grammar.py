"""What an answer must look like: JSON of a schema, a regular expression, one of a few texts.

A `Grammar` is a description that travels with a request. It knows no tokens: those who mask logits
with it make a matcher of its `source`. llguidance reads it, and is loaded when one is first used.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLParserLimits

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "tool_calls")
MOST_CHARACTERS = 100_000
QUOTED = re.compile(r"^\s*(?:\d+ \|.*|\^+)$", re.MULTILINE)  # a line of it, or what marks its place
COSTLIEST = 0.5  # seconds of a core that reading a grammar may take
MOST_KNOWN = 256
# One space, or a line break and its indentation: a model cannot go on with blanks for ever.
BLANKS = r" |\n {0,40}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that a model may answer with; made by one of its class methods."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"a grammar is one of {', '.join(KINDS)}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise InvalidRequest(f"{self.kind} must be a text, not {self.text!r}")
        if not self.text.isascii():
            _check_characters(self.kind, self.text)
        if len(self.text) > MOST_CHARACTERS:
            raise InvalidRequest(
                f"{self.kind} has {len(self.text)} characters; {MOST_CHARACTERS} is the most"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a JSON schema accepts; the schema as an object or as its JSON."""
        return cls("json_schema", _json("json_schema", _schema(schema)))

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
    def source(self) -> str:
        """The grammar as llguidance reads it."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind in ("lark", "tool_calls"):
            return LLMatcher.grammar_from_lark(self.text)
        if self.kind == "choice":
            choices = " | ".join(json.dumps(text) for text in json.loads(self.text))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        schema = {"type": "object"} if self.kind == "json_object" else json.loads(self.text)
        return json.dumps({"grammars": [{"json_schema": with_few_blanks(schema)}]})


def with_few_blanks(schema: Mapping[str, Any], **more: bool) -> dict[str, Any]:
    """A schema whose blanks are bounded, unless it has its own rules for them."""
    own = _guidance(schema)
    return {**schema, "x-guidance": {"whitespace_pattern": BLANKS, **more, **own}}


def is_known(grammar: Grammar) -> bool:
    """Whether it was checked of late, so that checking it again takes no time."""
    return grammar in _problems


def check(grammar: Grammar) -> None:
    """InvalidRequest, with the reason, if a grammar cannot be read or allows no text at all."""
    try:
        problem = _problems.get(grammar)
        if problem is None:
            problem = _problems[grammar] = _problem(grammar)
            while len(_problems) > MOST_KNOWN:  # the oldest; another thread may be as fast
                _problems.pop(next(iter(_problems)), None)
    except ImportError:
        raise InvalidRequest(
            f"{grammar.kind} needs the package llguidance, which is not installed here"
        ) from None
    if problem:
        raise InvalidRequest(f"{grammar.kind} cannot be used: {problem}")


_problems: dict[Grammar, str] = {}  # of those that were checked; empty: none


def _problem(grammar: Grammar) -> str:
    from llguidance import LLMatcher, LLTokenizer

    source, begun = grammar.source, time.thread_time()  # whatever else runs here does not count
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=limits(grammar))
    is_read = not matcher.is_error()
    if is_read:
        matcher.compute_bitmask()
    seconds = time.thread_time() - begun
    if matcher.is_error():
        return one_line(matcher.get_error()) if is_read is False else "no text satisfies it"
    if seconds > COSTLIEST:
        return f"it takes {seconds:.1f} s to read and {COSTLIEST} s is the most; make it smaller"
    return ""


def limits(grammar: Grammar) -> LLParserLimits:
    """What a matcher may use. Errors are short: a long one would tell of a user's text."""
    from llguidance import LLParserLimits

    # A user's Lark can be read in many ways at once, and each takes time at every token: with 2000,
    # as large schemas need, a fifth of a second.
    most = 500 if grammar.kind == "lark" else 2000
    return LLParserLimits(max_items_in_row=most, max_lexer_states=50_000, verbose_errors=False)


def one_line(error: str) -> str:
    """llguidance's words without their line breaks, and without what they quote of the grammar."""
    return " ".join(QUOTED.sub("", error.replace("<non-verbose/>", "")).split())[:500]


def _schema(schema: object) -> object:
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
