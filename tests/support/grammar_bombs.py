"""Grammars that are large, contradictory or explosive, and a program that tries them all.

`python -m tests.support.grammar_bombs` tries each one as a server does: the checker first, then, if it
is accepted, a matcher in this process for some tokens. Prints one line of JSON per grammar.
Does not import torch.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headway.errors import InvalidRequest
from headway.grammar import sandbox
from headway.grammar.checker import GrammarChecker
from headway.grammar.grammar import CHECKER, Grammar, check_grammar
from headway.grammar.sandbox import GrammarVocabulary, make_tokenizer

NUM_STEPS = 32
END = 256
PIECES = [b"aa", b"aaaa", b'{"', b'": ', b'"}', b"item ", b"<tool_call>", b"the ", "é".encode()]
VOCABULARY = GrammarVocabulary([*(bytes([n]) for n in range(256)), b"<end>", *PIECES], [END], [END])
ACCEPTED = {
    "regex: 9000 alternatives", "regex: equal alternatives", "regex: nested stars",
    "lark: left recursion", "lark: right recursion", "json: endless tree", "json: 6000 values",
    "json: huge pattern", "json: long text", "choice: 10000 items", "choice: prefixes",
    "choice: long items",
}  # fmt: skip
LARGE = {"lark: 9000 alternatives"}  # refused for its size, but it takes long to find out
SLOW = 10  # factor by which this machine may be slower than the limits assume
STRICT = 0.6  # of the usual limit: five grammars that are refused take all the time they may


def nested(keyword: str, async_scheduling: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(async_scheduling):
        schema = {"type": "array", "items": schema} if keyword == "items" else {keyword: [schema]}
    return schema


def doubled(form: Any, last: str, async_scheduling: int = 60) -> str:
    """Rules, each of which uses the next one twice."""
    rules = [form(number) for number in range(async_scheduling)]
    return "\n".join([f"start: {last[0]}0", *rules, f"{last[0]}{async_scheduling}: {last[1:]}"])


def regexes() -> dict[str, str]:
    return {
        "nested counts": "((a{1,1000}){1,1000}){1,1000}",
        "five nested counts": "(((((a{1,50}){1,50}){1,50}){1,50}){1,50})",
        "huge count": "a{1,2000000000}",
        "count of 11 digits": "a{99999999999}",
        "exact count": "(ab?){100000}",
        "exponential automaton": "(a|b)*a(a|b){40}",
        "wide exponential automaton": "[^x]*a[^y]{1000}b",
        "equal alternatives": "(a|a)*b",
        "nested stars": "((a*)*)*b",
        "2000 stars": "(" + "|".join(["a*"] * 2000) + ")*b",
        "Unicode counts": r"(\p{L}|\p{M}|\w){2000}",
        "Unicode classes": r"([\p{Han}\p{Hiragana}]{3,300}[^\p{Latin}]{2,200}){1,50}",
        "folded case": "(?i)" + "strasse" * 3000,
        "long literal": "a" * 60_000,
        "9000 alternatives": "|".join(f"word{n}x" for n in range(9000)),
        "deep groups": "(" * 20_000 + "a" + ")" * 20_000,
        "3000 wildcards": ".*" * 3000,
        "lookahead": "(?=a)b",
        "lookbehind": "(?<!a)b",
        "back reference": r"(a+)\1",
        "empty language": "a[^\\s\\S]",
        "unclosed": "(",
    }


def larks() -> dict[str, str]:
    chain = "\n".join(f'r{n}: "a" r{n + 1}' for n in range(4000))
    return {
        "ambiguous": 'start: start start | "a"',
        "more ambiguous": 'start: s\ns: s s | s s s | s s s s | "x"\n',
        "right recursion": 'start: "a" start | "a"',
        "left recursion": 'start: start "a" | "a"',
        "itself alone": "start: start",
        "empty cycle": 'start: a* "x"\na: b*\nb: a* \n',
        "4000 rules in a chain": f'start: r0\n{chain}\nr4000: "z"\n',
        "doubling rules": doubled(lambda n: f"r{n}: r{n + 1} r{n + 1}", 'r"z"'),
        "doubling options": doubled(lambda n: f"r{n}: r{n + 1}? r{n + 1}?", 'r"z"?'),
        "doubling terminals": doubled(lambda n: f"T{n}: T{n + 1} T{n + 1}", 'T"z"'),
        "nested counts": 'start: x{1,1000}\nx: y{1,1000}\ny: ("a"|"b"){1,1000}',
        "9000 alternatives": "start: " + " | ".join(f'"k{n}"' for n in range(9000)),
        "equal alternatives": "start: " + " | ".join(['"a" start'] * 5000) + ' | "b"',
        "deep groups": "start: " + "(" * 8000 + '"a"' + ")" * 8000,
        "overlapping terminals": "start: ("
        + " | ".join(f"T{n}" for n in range(300))
        + ")*\n"
        + "\n".join(f"T{n}: /[a-z]{{1,{n + 1}}}/" for n in range(300)),
        "intersections": "start: T\nT: /.{0,300}a.{0,300}/ & /.{0,300}b.{0,300}/ & ~/.*d.{50}/\n",
        "complements": "start: T\nT: ~(/.*a.{30}/) & ~(/.*b.{31}/)\n",
        "dead end": 'start: "a" NEVER\nNEVER: /[^\\s\\S]/\n',
        "file import": "%import /etc/passwd\nstart: NUMBER",
    }


def schemas() -> dict[str, dict[str, Any]]:
    twice = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(30)
    }
    both = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    return {
        "reference to itself": {"$ref": "#"},
        "reference cycle": {"$ref": "#/$defs/a", "$defs": both},
        "endless tree": {"type": "object", "properties": {"l": {"$ref": "#"}}, "required": ["l"]},
        "doubling references": {"$ref": "#/$defs/d0", "$defs": {**twice, "d30": {"type": "null"}}},
        "product of unions": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{n}": {"const": m}}} for m in range(4)]}
                for n in range(12)
            ]
        },
        "60 patterns at once": {
            "allOf": [{"type": "string", "pattern": f"a.*{n}.*b"} for n in range(60)]
        },
        "deep anyOf": nested("anyOf", 300),
        "deep allOf": nested("allOf", 300),
        "deep arrays": nested("items", 300),
        "6000 values": {"enum": [f"value {n}" for n in range(6000)]},
        "huge pattern": {
            "type": "string",
            "pattern": "^(" + "|".join(f"word{n}x" for n in range(8000)) + ")$",
        },
        "counts in a pattern": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
        "long text": {"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000},
        "long list": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}},
        "large multiple": {"type": "integer", "multipleOf": 999_983},
        "lengths that conflict": {"type": "string", "minLength": 5, "maxLength": 2},
        "types that conflict": {"allOf": [{"type": "string"}, {"type": "integer"}]},
        "unknown type": {"type": "person"},
        "type of a wrong type": {"type": {"a": 1}},
        "properties of a wrong type": {"type": "object", "properties": [1]},
        "no values": {"enum": []},
        "blanks that explode": {
            "type": "object", "x-guidance": {"whitespace_pattern": "((a{1,1000}){1,1000})*"},
        },
    }  # fmt: skip


def bombs() -> dict[str, Grammar]:
    """Grammars by name; a name begins with the kind of the grammar."""
    choices = {
        "10000 items": [f"item {n}" for n in range(10_000)],
        "long items": ["a" * 45_000, "a" * 45_000 + "b"],
        "prefixes": ["a" * n for n in range(1, 420)],
    }
    return {
        **{f"regex: {name}": Grammar.regex(text) for name, text in regexes().items()},
        **{f"lark: {name}": Grammar.lark(text) for name, text in larks().items()},
        **{f"json: {name}": Grammar.json_schema(each) for name, each in schemas().items()},
        **{f"choice: {name}": Grammar.choice(texts) for name, texts in choices.items()},
    }


def followed(grammar: Grammar) -> dict[str, Any]:
    """The cost of following an accepted grammar along a random text."""
    from llguidance import LLMatcher, LLParserLimits

    draw, begun = random.Random(1), time.thread_time()
    limits = LLParserLimits(**grammar.limits)
    matcher = LLMatcher(make_tokenizer(VOCABULARY), grammar.source, log_level=0, limits=limits)
    slowest, first, num_steps = 0.0, 0.0, 0
    while num_steps < NUM_STEPS and not matcher.is_stopped():
        mask, now = matcher.compute_bitmask(), time.thread_time()
        if num_steps:
            slowest = max(slowest, now - begun)
        else:
            first = now - begun
        bits = int.from_bytes(mask, "little")
        allowed = [n for n in range(len(VOCABULARY.tokens)) if bits >> n & 1 and n != END]
        if matcher.is_error() or not allowed:
            break
        num_steps, begun = num_steps + 1, time.thread_time()
        matcher.consume_token(draw.choice(allowed))
    return {"first": first, "slowest": slowest, "steps": num_steps, "error": matcher.get_error()}


def tried(grammar: Grammar, checker: GrammarChecker) -> dict[str, Any]:
    """The verdict on a grammar, and its cost if it is accepted."""
    try:
        check_grammar(grammar)
    except InvalidRequest as error:
        return {"problem": str(error)}
    problem = checker.problem(grammar)
    found: dict[str, Any] = {"problem": problem}
    if not problem:  # on a thread, as in an engine, with a smaller stack than the main thread
        thread = threading.Thread(target=lambda: found.update(followed(grammar)))
        thread.start()
        thread.join()
    return found


def be_patient() -> None:
    """Let grammars take more CPU time from here on."""
    sandbox.MAX_COMPILE_SECONDS *= SLOW
    sandbox.MAX_MASK_SECONDS *= SLOW
    sandbox.MAX_PROBE_SECONDS *= SLOW


def main() -> None:
    patient, usual = ACCEPTED | LARGE, sandbox.MAX_PROBE_SECONDS
    sandbox.MAX_COMPILE_SECONDS *= STRICT
    for names in (bombs().keys() - patient, LARGE, ACCEPTED):
        if names == LARGE:
            sandbox.MAX_COMPILE_SECONDS /= STRICT
            be_patient()
        elif names == ACCEPTED:
            sandbox.MAX_PROBE_SECONDS = usual  # not a limit: a probe then ends without a problem
        checker = GrammarChecker(VOCABULARY, num_steps=16)
        for name, grammar in bombs().items():
            if name in names:
                print(json.dumps({"name": name, **tried(grammar, checker)}), flush=True)
        checker.close()
        CHECKER.close()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    # unlike ru_maxrss, it excludes the parent process
    own = int(status.split("VmHWM:")[1].split()[0])
    used = (own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    print(json.dumps({"name": "memory", "megabytes": [each >> 10 for each in used]}))


if __name__ == "__main__":
    sys.exit(main())
