"""Checks grammars in another process, which a bad one may bring down without harm.

A grammar can exhaust the stack, the memory or minutes of CPU time of the process that compiles it.
`GrammarChecker` asks `headway.grammar.sandbox` first and remembers the latest verdicts. Waiting for
a verdict does not hold the interpreter. Knows no requests.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import select
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Protocol

from headway.errors import Overloaded
from headway.grammar import sandbox as grammar_sandbox
from headway.grammar.sandbox import Vocabulary

MAX_VERDICTS = 256
MAX_WAIT = 60.0  # seconds for a verdict, on a machine with much else to do
LOST = (EOFError, OSError, pickle.UnpicklingError)


class Checked(Protocol):
    """What a checker reads of a grammar."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def limits(self) -> dict[str, Any]: ...


class GrammarChecker:
    """Verdicts on grammars for one vocabulary; None: every byte is a token. For any thread."""

    def __init__(self, vocabulary: Vocabulary | None = None, *, num_steps: int = 0) -> None:
        self._vocabulary, self._num_steps = vocabulary, num_steps
        self._problems: OrderedDict[bytes, str] = OrderedDict()  # by digest, the oldest first
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it; a fork must not share its pipes
        self._lock = threading.Lock()  # held during a trial

    def knows(self, grammar: Checked) -> bool:
        """Whether the verdict is at hand, so that `problem` returns at once."""
        return _digest(grammar) in self._problems

    def problem(self, grammar: Checked) -> str:
        """What is wrong with a grammar, or ""; Overloaded if no process can be started."""
        digest = _digest(grammar)
        found = self._problems.get(digest)
        if found is None:
            found = self._problems[digest] = self._tried(grammar)
            while len(self._problems) > MAX_VERDICTS:
                self._problems.popitem(last=False)
        return found

    def start(self) -> None:
        """Start the process ahead of the first grammar."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        with self._lock:
            self._end()

    def _tried(self, grammar: Checked) -> str:
        trial = (grammar.source, grammar.limits, self._num_steps)
        with self._lock:
            for is_last in (False, True):  # a process that was killed meanwhile is started again
                try:
                    return _exchange(self._running(), trial)
                except LOST as error:
                    self._end()
                    if is_last:
                        problem = f"{type(error).__name__}: {error}"
                        raise Overloaded(f"grammars cannot be checked now: {problem}") from None
        raise AssertionError("the last attempt returns or raises")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = _started(self._vocabulary), os.getpid()
            weakref.finalize(self, _ended, self._process, self._owner)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _ended(process, self._owner)


def _digest(grammar: Checked) -> bytes:
    text = f"{grammar.kind} {grammar.text}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _started(vocabulary: Vocabulary | None) -> subprocess.Popen[bytes]:
    """A process that has its vocabulary; OSError if there can be none."""
    # One heap for all threads: the reserve of a second one would count as memory in use.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-P", grammar_sandbox.__file__], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    _write(process, vocabulary and tuple(vocabulary))
    return process


def _exchange(process: subprocess.Popen[bytes], trial: object) -> str:
    assert process.stdout is not None, "a pipe was asked for"
    _write(process, trial)
    ready = select.poll()  # unlike select(), for any number of open files
    ready.register(process.stdout, select.POLLIN)
    if not ready.poll(MAX_WAIT * 1000):
        raise OSError(f"no verdict after {MAX_WAIT:.0f} s")
    said: str = pickle.load(process.stdout)
    return said


def _write(process: subprocess.Popen[bytes], value: object) -> None:
    assert process.stdin is not None, "a pipe was asked for"
    process.stdin.write(pickle.dumps(value))
    process.stdin.flush()


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "a pipe was asked for"
        with suppress(OSError):  # what was not written is not needed
            pipe.close()
    process.kill()
    process.wait()
