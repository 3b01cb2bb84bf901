"""Laws of `headway chat`: answers are streamed, and the conversation is complete."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from headway import LLM, SamplingParams
from headway.cli.commands.chat import MAX_HELD, Writer
from headway.cli.view.chat_session import HELP, ChatSession
from headway.engine.outputs import Delta
from tests.cli.test_cli import headway, refused, sentence
from tests.cli.test_cli_generate import ROOT, SHAPE, options_of, save_tiny, typed
from tests.support.waiting import LIMIT

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), load_format="dummy", threads=1)


def said(session: ChatSession, *lines: str) -> str:
    """The output of the conversation for these lines."""
    pieces: list[str] = []
    for line in lines:
        session.take(line, pieces.append)
    return "".join(pieces)


@pytest.mark.usefixtures("shared_weights")
def test_the_bundled_model_chats_through_a_pipe(smollm2: Path) -> None:
    with typed("What is the capital of France?\n/stats\n\n/exit\nnever read\n"):
        done = headway(
            "chat", "--model", smollm2, "--threads", "1", "--temperature", "0",
            "--max-tokens", "12",
        )  # fmt: skip
    assert done.code == 0 and "Paris" in done.out.splitlines()[0], done
    assert "last answer" in done.out and "tokens" in done.out and ">" not in done.out


def test_an_answer_is_streamed_and_kept(llm: LLM) -> None:
    session, pieces = ChatSession(llm, GREEDY), list[str]()
    session.take("hello", pieces.append)
    user, assistant = session.messages
    assert user == {"role": "user", "content": "hello"} and assistant["role"] == "assistant"
    assert len(pieces) > 4
    assert "".join(pieces) == assistant["content"] + " (limit reached: 8 tokens)\n"


def test_earlier_messages_are_found_in_the_prefix_cache(llm: LLM) -> None:
    llm.reset_cache()
    session = ChatSession(llm, GREEDY, system="be kind " * 8)
    said(session, "hello")
    assert session.num_cached == 0
    said(session, "and again")
    assert session.num_cached > len(session.system) and len(session.messages) == 4
    assert session.metrics.requests[-1].num_prompt == len(session._prompt(session.messages[:3]))


def test_commands_have_their_effects(llm: LLM) -> None:
    session = ChatSession(llm, GREEDY)
    assert "no answers" in said(session, "/stats")
    assert "model's own" in said(session, "/system")
    said(session, "/system be brief", "hello")
    assert said(session, "/system") == "be brief\n"
    system = llm.chat_tokens([{"role": "system", "content": "be brief"}])
    assert system[:16] == session._prompt(session.messages)[:16]
    stats = said(session, "/stats")
    for word in ("8 tokens", "tokens/s", "cached", "KV cache", "steps", "preemptions", "512",
                 "1 answer, "):  # fmt: skip
        assert word in stats, stats
    said(session, "/reset")
    assert not session.messages and session.system == "be brief"
    assert said(session, "/help") == HELP + "\n"
    assert "unknown command /hepl" in said(session, "/hepl")
    assert session.take("/exit", print) is False


def test_a_conversation_that_is_too_long_is_reported_and_not_trimmed(llm: LLM) -> None:
    session = ChatSession(llm, GREEDY)
    said(session, "x" * 300)
    before = list(session.messages)
    reply = said(session, "y" * 300)
    assert "/reset" in reply and "512" in reply
    assert session.messages == before, "the rejected message is not kept"
    assert "/reset" not in said(session, "/reset", "y" * 300)


def test_an_answer_that_reaches_the_models_length_is_marked(llm: LLM) -> None:
    session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    reply = said(session, "x" * (512 - len("user: \nassistant: ") - 6))
    assert "model length" in reply and "6 tokens" in reply


def test_reasoning_is_dimmed_and_not_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    template = llm.tokenizer.chat_template or ""
    with_tags = llm.tokenizer.with_chat_template(template + "{# <think> #}")
    monkeypatch.setattr(llm, "tokenizer", with_tags)
    for said, thought, answer in (("<think>hm</think>yes", "hm", "yes"), ("<think>h", "h", "")):
        deltas = [Delta(0, letter) for letter in said] + [Delta(0, "", finish_reason="length")]
        monkeypatch.setattr(llm, "stream", lambda *given, deltas=deltas: iter(deltas))
        dim, pieces = list[str](), list[str]()
        session = ChatSession(llm, GREEDY, write_dim=dim.append)
        session.take("hello", pieces.append)
        assert "".join(dim) == thought
        assert "".join(pieces).partition(" (")[0].strip() == answer
        assert [each["content"] for each in session.messages[1:]] == [answer] * bool(answer)


def test_dimmed_text_is_marked_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for term, width, marks in (("xterm", 20, True), ("dumb", 20, False), ("xterm", None, False)):
        monkeypatch.setenv("TERM", term)
        with redirect_stdout(io.StringIO()) as out:
            write = Writer(width)
            write.dim("hm, ")
            write.dim("hm")
            write("\n\nyes\n")
        shown = "\x1b[2mhm, hm\x1b[22m\n\nyes\n"
        assert out.getvalue() == (shown if marks else "hm, hm\n\nyes\n")


def interrupting(after: int, times: int, pieces: list[str]) -> Callable[[str], None]:
    """A write function that sends SIGINT after `after` pieces, `times` times."""
    numbers = count(1)

    def write(text: str) -> None:
        pieces.append(text)
        if after <= next(numbers) < after + times:
            os.kill(os.getpid(), signal.SIGINT)

    return write


def test_an_interrupt_ends_the_answer_and_keeps_the_chat(llm: LLM) -> None:
    session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    pieces: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    session.take("hello", interrupting(3, 1, pieces))
    assert signal.getsignal(signal.SIGINT) is before
    assert pieces[-1] == " (stopped)\n" and len(pieces) < 10
    assert session.messages[-1]["content"] == "".join(pieces[:-1]) != ""
    assert not llm.engine.has_work and llm.engine.is_healthy
    said(session, "go on")
    assert len(session.messages) == 4 and session.num_cached > 0


def test_a_second_interrupt_does_not_end_the_chat(llm: LLM) -> None:
    session = ChatSession(llm, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    pieces: list[str] = []
    session.take("hello", interrupting(3, 2, pieces))
    assert pieces[-1] == " (stopped)\n" and not llm.engine.has_work
    said(session, "/reset", "hello")
    assert len(session.messages) == 2


def test_a_model_without_chat_template_is_reported_at_once(tmp_path: Path) -> None:
    with typed("hello\n"):
        assert "no chat template" in sentence(
            "chat", *options_of(save_tiny(tmp_path, template=None))
        )


def test_invalid_options_are_reported() -> None:
    assert "top_p" in sentence("chat", "--top-p", "2")
    refused("chat", "-n", "3")


def written(pieces: list[str], width: int | None) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        write = Writer(width)
        for piece in pieces:
            write(piece)
    return out.getvalue()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab \n大", max_size=9), max_size=12), st.integers(4, 20))
def test_lines_are_wrapped_between_words(pieces: list[str], width: int) -> None:
    text, given = written([*pieces, "\n"], width), "".join([*pieces, "\n"])
    assert "".join(text.split()) == "".join(given.split()), "no text is lost"
    if all(cell_len(word) <= MAX_HELD for word in given.split()):
        assert text.split() == given.split(), "no word is split"
    for line in text.split("\n"):
        assert len(line.split()) <= 1 or cell_len(line.rstrip()) <= width


def test_a_text_without_spaces_is_written_before_its_end() -> None:
    assert len(written(["大" * 5] * 20, 40)) >= 80


def test_a_pipe_gets_incomplete_words() -> None:
    assert written(["half a wo"], None) == "half a wo"


def _enable_ctrl_c() -> None:
    """Let Ctrl-C send SIGINT, even if the parent process ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._file, inner = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway", *command],
            stdin=inner, stdout=inner, stderr=inner, cwd=ROOT, start_new_session=True,
            preexec_fn=_enable_ctrl_c,
        )  # fmt: skip
        os.close(inner)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._file)

    def wait_for(self, pattern: str, *, again: str = "") -> None:
        """Read until the pattern appears after the previous match.

        A key that is sent just as a prompt appears may be lost, so `again` is sent every 10 s, once
        all output is read.
        """
        begun = pressed = time.monotonic()
        while not (found := re.search(pattern, self.shown)):
            now = time.monotonic()
            assert now - begun < LIMIT, f"no {pattern!r} in {self.shown!r}"
            is_late = bool(again) and now - pressed > 10
            if not select.select([self._file], [], [], 0.0 if is_late else 0.5)[0]:
                if is_late:
                    self.type(again)
                    pressed = now
                continue
            try:
                self.shown += os.read(self._file, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {pattern!r}: {self.shown}") from None
        self.shown = self.shown[found.end() :]

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def end(self) -> int:
        """Read all output and return the exit code."""
        with suppress(OSError):  # reading fails when the process has ended
            while os.read(self._file, 4096):
                pass
        return self._process.wait(LIMIT)


def test_on_a_terminal_ctrl_c_stops_and_ctrl_d_exits(tmp_path: Path) -> None:
    config = save_tiny(tmp_path) / "config.json"
    config.write_text(json.dumps({**SHAPE, "max_position_embeddings": 50_000}))
    arguments = (*options_of(tmp_path), "--max-tokens", "40000", "--top-k", "1")
    with Terminal("chat", *arguments) as terminal:
        terminal.wait_for("Ctrl-D exits")
        terminal.wait_for("> ")
        terminal.type("half a line\x03")
        terminal.wait_for("to exit\\)", again="\x03")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("hello\r\n.")
        terminal.type("\x03")
        terminal.wait_for("\\(stopped\\)", again="\x03")
        terminal.wait_for("> ")
        terminal.type("/stats\n")
        terminal.wait_for("last answer")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_the_end_of_a_pipe_ends_the_chat(folder: Path) -> None:
    with typed("hello\nagain"):
        done = headway("chat", *options_of(folder), "--max-tokens", "3", "--temperature", "0")
    assert done.code == 0 and not done.err and done.out.count("(limit reached: 3 tokens)\n") == 2
