"""Malicious grammars do not harm the serving process: they are refused or cheap to follow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.errors import InvalidGrammar, Overloaded
from headway.executor.sampling.matchers import Matchers
from headway.grammar import sandbox
from headway.grammar.checker import GrammarChecker
from headway.grammar.grammar import Grammar, check_grammar
from headway.request import RequestParams
from headway.sampling_params import Sampling
from tests.support import real
from tests.support.grammar_bombs import ACCEPTED, SLOW, bombs
from tests.support.waiting import LIMIT, wait_until

pytest.importorskip("llguidance")

ROOT = Path(__file__).parents[2]
REFUSED = {
    "regex: nested counts", "regex: count of 11 digits", "regex: deep groups", "regex: lookahead",
    "regex: lookbehind", "regex: back reference", "regex: empty language", "regex: unclosed",
    "regex: 3000 wildcards", "lark: itself alone", "lark: 4000 rules in a chain", "lark: dead end",
    "lark: doubling rules", "lark: doubling terminals", "lark: deep groups", "lark: file import",
    "lark: equal alternatives", "lark: 9000 alternatives", "json: reference to itself",
    "json: reference cycle", "json: product of unions", "json: 60 patterns at once",
    "json: deep anyOf", "json: deep allOf", "json: deep arrays", "json: large multiple",
    "json: lengths that conflict", "json: types that conflict", "json: unknown type",
    "json: type of a wrong type", "json: properties of a wrong type", "json: no values",
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, dict[str, Any]]:
    """The verdicts on all grammars by name, from a separate process that a crash would end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.grammar_bombs"], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=3 * LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


def test_every_bomb_is_refused_or_cheap_to_follow(verdicts: dict[str, dict[str, Any]]) -> None:
    assert set(bombs()) == set(verdicts) - {"memory"}
    for name in bombs():
        found = verdicts[name]
        if not found["problem"]:
            assert found["first"] < 0.5 * SLOW, found
            assert found["slowest"] < 0.05 * SLOW, found
    for name in REFUSED:
        assert verdicts[name]["problem"], name
    for name in ACCEPTED:
        assert not verdicts[name]["problem"] and not verdicts[name]["error"], name
    assert max(verdicts["memory"]["megabytes"]) < 300


def test_an_exceeded_limit_is_named(verdicts: dict[str, dict[str, Any]]) -> None:
    assert "CPU time" in verdicts["regex: 3000 wildcards"]["problem"]
    assert "nested" in verdicts["lark: 4000 rules in a chain"]["problem"]
    assert "no text" in verdicts["regex: empty language"]["problem"]
    assert "items" in verdicts["lark: 9000 alternatives"]["problem"]


def test_memory_is_limited() -> None:
    script = (
        "from headway.grammar import sandbox as s\n"
        "from headway.grammar.grammar import Grammar\n"
        "s.MAX_BYTES, s.MAX_COMPILE_SECONDS = 16 << 20, 60.0\n"
        "grammar = Grammar.regex('|'.join(f'word{n}x' for n in range(9000)))\n"
        "print(s._try_in_child(s.make_tokenizer(None), (grammar.source, grammar.limits, 0)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "memory" in done.stdout


def test_a_checker_restarts_its_killed_process() -> None:
    checker = GrammarChecker()
    assert checker.problem(Grammar.regex("a")) == ""
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    assert checker.problem(Grammar.regex("[")) != ""
    first = checker._process
    checker.close()
    assert first.returncode is not None and checker.problem(Grammar.regex("b")) == ""
    checker.close()


def test_a_checker_that_cannot_start_raises_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    with pytest.raises(Overloaded, match="grammar checker"):
        GrammarChecker().problem(Grammar.regex("a"))


def test_verdicts_are_cached_and_bounded() -> None:
    checker, bad = GrammarChecker(), Grammar.regex("[")
    assert not checker.knows(bad)
    problem = checker.problem(bad)
    assert problem and checker.knows(bad)
    checker._problems.update((str(n).encode(), "") for n in range(1000))
    checker.problem(Grammar.regex("x"))
    assert len(checker._problems) <= 256 and not checker.knows(bad)
    checker.close()


def test_other_threads_run_while_a_grammar_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_COMPILE_SECONDS", 0.3)
    # more than one: the system may not run the other thread although it could
    wait_until(lambda: turns_during_check() > 20)


def turns_during_check() -> int:
    """How often this thread ran while another one checked a grammar that is too large."""
    checker, problems = GrammarChecker(), list[str]()
    slow = Grammar.lark("start: " + " | ".join(['"b" start'] * 4000) + ' | "b"')
    thread = threading.Thread(target=lambda: problems.append(checker.problem(slow)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        thread.join(0.005)
        num_turns += 1
    checker.close()
    assert len(problems) == 1 and problems[0]
    return num_turns


@pytest.fixture(scope="module")
def matchers(smollm2: Path) -> Matchers:
    matchers = Matchers(real.tokenizer().vocab_size)
    matchers.use(real.tokenizer(), {2})
    matchers.warm_up()
    return matchers


@pytest.mark.parametrize(
    ("name", "is_accepted"),
    [
        ("regex: nested counts", False),
        ("regex: wide exponential automaton", True),
        ("lark: ambiguous", True),
        ("lark: dead end", False),
        ("json: reference to itself", False),
        ("choice: 10000 items", True),
    ],
)
def test_a_request_is_prepared_or_refused(matchers: Matchers, name: str, is_accepted: bool) -> None:
    params = RequestParams(sampling=Sampling(grammar=bombs()[name]))
    if is_accepted:
        assert matchers.ready(matchers.make_ready(params)) is not None
    else:
        with pytest.raises(InvalidGrammar, match="cannot be used"):
            matchers.make_ready(params)


def test_a_dead_end_after_required_text_is_found(matchers: Matchers) -> None:
    begin = json.dumps('<tool_call>\n{"name": "look_up_the_weather", "arguments": ')
    grammar = Grammar.tool_calls(f'start: {begin} call "}}"\ncall: %json {{"$ref": "#"}}')
    check_grammar(grammar)
    with pytest.raises(InvalidGrammar, match="no text satisfies it"):
        matchers.make_ready(RequestParams(sampling=Sampling(grammar=grammar)))
