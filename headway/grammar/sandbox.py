"""A process that tries grammars, so that a bad grammar cannot harm the serving process.

`headway.grammar.checker` runs this file as a script and sends it grammars on stdin. Each grammar is
tried in a forked child with limits on CPU time, memory and stack. The operating system kills a
child that exceeds a limit. Imports nothing of the package, so that it starts within 0.1 s.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypedDict

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILE_SECONDS = 0.5  # CPU time to compile a grammar and to compute its first mask
MAX_MASK_SECONDS = 0.05  # CPU time of a later mask
MAX_PROBE_SECONDS = 0.25  # CPU time after which a probe ends without a verdict
MAX_BYTES = 128 << 20
STACK_BYTES = 1 << 20  # less than the stack of any thread of a serving process
MAX_PROBE_TOKENS = 256
MAX_SPELLINGS = 32  # if at most this many tokens are allowed, they may all begin one required text
QUOTED = re.compile(r"^\s*(?:\d+ \|.*|\^+)$", re.MULTILINE)  # a quoted line, or its marker
TOO_LARGE = f"it needs more than {MAX_BYTES >> 20} MB of memory; make it smaller"
TOO_SLOW = f"it takes more than {MAX_COMPILE_SECONDS} s of CPU time to compile; make it smaller"
TOO_DEEP = "its rules are nested too deeply; make it smaller"
BY_SIGNAL = {
    signal.SIGPROF: TOO_SLOW,
    signal.SIGSEGV: TOO_DEEP,
    signal.SIGBUS: TOO_DEEP,
    signal.SIGABRT: TOO_LARGE,
    signal.SIGKILL: TOO_LARGE,
}


class MatcherLimits(TypedDict):
    """Fields of llguidance's LLParserLimits."""

    max_items_in_row: int
    max_lexer_states: int
    verbose_errors: bool  # these quote the user's text


# A grammar in llguidance's format, the limits of its matcher, and the steps to probe it.
Trial = tuple[str, MatcherLimits, int]


def seconds() -> tuple[float, ...]:
    return MAX_COMPILE_SECONDS, MAX_MASK_SECONDS, MAX_PROBE_SECONDS


class GrammarVocabulary(NamedTuple):
    """The tokens of a model: bytes by id, ids of special tokens, ids that end an output."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]


def one_line(error: str) -> str:
    """An error message of llguidance without line breaks and quotations of the grammar."""
    return " ".join(QUOTED.sub("", error.replace("<non-verbose/>", "")).split())[:500]


def problem_of(matcher: LLMatcher) -> str:
    error = one_line(matcher.get_error())
    return "no text satisfies it" if error.startswith("NoExtension") else error


def try_grammar(tokenizer: LLTokenizer, trial: Trial) -> str:
    """Compile a grammar, compute its first mask and probe it; return its problem or ""."""
    from llguidance import LLMatcher, LLParserLimits

    source, limits, num_steps = trial
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        return one_line(matcher.get_error())
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return problem_of(matcher)
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)  # from here on, for the probe
    return probe(tokenizer, matcher, mask, num_steps)


def probe(tokenizer: LLTokenizer, matcher: LLMatcher, mask: bytes, num_steps: int) -> str:
    """Follow a grammar along a random text with `num_steps` choices; return its problem or "".

    Required text does not count as a choice.
    """
    draw, begun = random.Random(0), time.thread_time()
    for _ in range(MAX_PROBE_TOKENS if num_steps else 0):
        token, is_choice = _next_token(tokenizer, mask, draw)
        num_steps -= is_choice
        before = time.thread_time()
        if token is None or num_steps < 0 or before - begun > MAX_PROBE_SECONDS:
            break
        if matcher.consume_token(token):
            mask = matcher.compute_bitmask()
        if matcher.is_error():
            return f"it fails in the middle of a text: {problem_of(matcher)}"
        if (seconds := time.thread_time() - before) > MAX_MASK_SECONDS:
            limit = f"limit {MAX_MASK_SECONDS * 1e3:.0f} ms"
            return f"a token takes {seconds * 1e3:.0f} ms of CPU time ({limit}); make it smaller"
        if matcher.is_stopped():
            break
    return ""


def _next_token(
    tokenizer: LLTokenizer, mask: bytes, draw: random.Random
) -> tuple[int | None, bool]:
    """An allowed token, None if only end tokens are allowed, and whether it was a choice."""
    allowed = int.from_bytes(mask, "little")
    bits = allowed
    for end in tokenizer.eos_tokens:
        bits &= ~(1 << end)
    if not bits:
        return None, False
    if bits == allowed and bits.bit_count() <= MAX_SPELLINGS:
        spelled = {tokenizer.decode_bytes([token]): token for token in _set_bits(bits)}
        if len({piece[:1] for piece in spelled}) == 1:
            return spelled[max(spelled, key=len)], False
    start = draw.randrange(bits.bit_length())
    return start + _lowest_bit(bits >> start), True


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        yield _lowest_bit(bits)
        bits &= bits - 1


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def main() -> None:
    """Read a vocabulary, then grammars until the pipe closes; write a verdict on each grammar.

    The arguments of the program are the limits of `seconds`.
    """
    global MAX_COMPILE_SECONDS, MAX_MASK_SECONDS, MAX_PROBE_SECONDS
    MAX_COMPILE_SECONDS, MAX_MASK_SECONDS, MAX_PROBE_SECONDS = map(float, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops this one
    threading.stack_size(STACK_BYTES)
    requests, verdicts = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError):
        tokenizer = make_tokenizer(pickle.load(requests))
        while True:
            verdicts.write(pickle.dumps(_try_in_child(tokenizer, pickle.load(requests))))
            verdicts.flush()


def _try_in_child(tokenizer: LLTokenizer, trial: Trial) -> str:
    """Return the verdict of a forked child, or the reason why the child was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _set_limits()
        thread = threading.Thread(target=_write_verdict, args=(writer, tokenizer, trial))
        thread.start()
        thread.join()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        verdict = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return BY_SIGNAL.get(signal.Signals(number), f"compiling it ended with signal {number}")
    return verdict.decode()


def _write_verdict(writer: int, tokenizer: LLTokenizer, trial: Trial) -> None:
    try:
        verdict = try_grammar(tokenizer, trial)
    except MemoryError:
        verdict = TOO_LARGE
    except BaseException as error:  # a panic in llguidance is not an Exception
        verdict = f"{type(error).__name__}: {one_line(str(error))}"
    os.write(writer, verdict.encode())


def _set_limits() -> None:
    """Limit the resources of a child. A signal that Python does not handle kills it at once."""
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_SECONDS)
    with suppress(OSError, ValueError):  # some systems cannot report or limit memory
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def make_tokenizer(vocabulary: tuple[list[bytes], list[int], list[int]] | None) -> LLTokenizer:
    """A tokenizer for llguidance; without a vocabulary, every byte is a token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if vocabulary is None:
        return LLTokenizer("byte")
    adapter = _TokenizerAdapter(*vocabulary)
    wrapper = TokenizerWrapper(adapter)
    adapter.trie = LLTokenizer(wrapper, n_vocab=len(adapter.tokens), eos_token=adapter.eos_ids)
    return adapter.trie


class _TokenizerAdapter:
    """A vocabulary with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_ids: list[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_ids = tokens, special_ids, eos_ids
        self.eos_token_id = eos_ids[0]
        self.trie: LLTokenizer | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Some tokens of a text; a verdict does not depend on how the model would split it."""
        text = text if isinstance(text, str) else text.decode()
        return [] if self.trie is None else self.trie.greedy_tokenize(text)


if __name__ == "__main__":
    main()
