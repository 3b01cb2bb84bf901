"""Checks grammars in a separate process, so that a bad grammar cannot harm this one.

Compiling a grammar can exhaust the stack, the memory or minutes of CPU time. `GrammarChecker` tries
a grammar in `headway.grammar.sandbox` first and caches the latest verdicts. Waiting for a verdict
does not hold the GIL. Knows no requests.
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
from typing import TYPE_CHECKING

from headway.errors import Overloaded
from headway.grammar import sandbox as grammar_sandbox
from headway.grammar.sandbox import GrammarVocabulary

if TYPE_CHECKING:
    from headway.grammar.grammar import Grammar

MAX_VERDICTS = 256
MAX_WAIT = 60.0  # seconds for a verdict, even on a busy machine
LOST = (EOFError, OSError, pickle.UnpicklingError)


class GrammarChecker:
    """Checks grammars for one vocabulary; None: every byte is a token. Thread-safe."""

    def __init__(self, vocabulary: GrammarVocabulary | None = None, *, num_steps: int = 0) -> None:
        self._vocabulary, self._num_steps = vocabulary, num_steps
        self._problems: OrderedDict[bytes, str] = OrderedDict()  # by digest, oldest first
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it; a fork must not share the pipes
        self._lock = threading.Lock()  # held during a check

    def knows(self, grammar: Grammar) -> bool:
        """Whether the verdict is cached, so that `problem` returns at once."""
        return _digest(grammar) in self._problems

    def problem(self, grammar: Grammar) -> str:
        """What is wrong with a grammar, "" if nothing; Overloaded if no process can be started."""
        digest = _digest(grammar)
        found = self._problems.get(digest)
        if found is None:
            found = self._problems[digest] = self._check(grammar)
            while len(self._problems) > MAX_VERDICTS:
                self._problems.popitem(last=False)
        return found

    def start(self) -> None:
        """Start the process ahead of the first grammar."""
        with self._lock:
            self._running_process()

    def close(self) -> None:
        """Stop the process; the next check starts another."""
        with self._lock:
            self._stop()

    def _check(self, grammar: Grammar) -> str:
        trial = (grammar.source, grammar.limits, self._num_steps)
        with self._lock:
            for is_last in (False, True):  # restart the process once if it was killed
                try:
                    return _exchange(self._running_process(), trial)
                except LOST as error:
                    self._stop()
                    if is_last:
                        problem = f"{type(error).__name__}: {error}"
                        message = f"the grammar checker is not available: {problem}"
                        raise Overloaded(message) from None
        raise AssertionError("the last attempt returns or raises")

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            self._process, self._owner = _start_process(self._vocabulary), os.getpid()
            weakref.finalize(self, _stop_process, self._process, self._owner)
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _stop_process(process, self._owner)


def _digest(grammar: Grammar) -> bytes:
    text = f"{grammar.kind} {grammar.text}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _start_process(vocabulary: GrammarVocabulary | None) -> subprocess.Popen[bytes]:
    """Start a process and send it the vocabulary; OSError if that fails."""
    # One malloc arena: the address space reserved for a second one would count as memory in use.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-P", grammar_sandbox.__file__, *map(str, grammar_sandbox.seconds())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
    )  # fmt: skip
    _write(process, vocabulary and tuple(vocabulary))
    return process


def _exchange(process: subprocess.Popen[bytes], trial: object) -> str:
    assert process.stdout is not None, "started with a pipe"
    _write(process, trial)
    ready = select.poll()  # unlike select(), it supports any number of open files
    ready.register(process.stdout, select.POLLIN)
    if not ready.poll(MAX_WAIT * 1000):
        raise OSError(f"no verdict after {MAX_WAIT:.0f} s")
    verdict: str = pickle.load(process.stdout)
    return verdict


def _write(process: subprocess.Popen[bytes], value: object) -> None:
    assert process.stdin is not None, "started with a pipe"
    process.stdin.write(pickle.dumps(value))
    process.stdin.flush()


def _stop_process(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "started with pipes"
        with suppress(OSError):  # closing may flush to a dead process
            pipe.close()
    process.kill()
    process.wait()
