"""`headway chat`: chat with a model in the terminal, with streamed answers.

Reads lines from the terminal or a pipe. Ctrl-C ends an answer, Ctrl-D the chat.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from headway.cli.options.common import option
from headway.cli.options.model import EngineFlags, SamplingOptions, load_model, sampling_option
from headway.cli.view import live
from headway.cli.view.chat_session import ChatSession


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """Sampling options with defaults for chats."""

    max_tokens: int = sampling_option(512, "Maximum number of tokens of an answer.")
    temperature: float = sampling_option(0.7, "Sampling temperature; 0 is greedy.")


def chat_command(
    system: str = option("", "System message.", show_default="the model's own"),
    *,
    model: EngineFlags,
    sampling: ChatOptions,
) -> None:
    """Chat with a model. Commands: /reset, /system, /stats, /help, /exit."""
    params = sampling.params()
    with load_model(model) as llm:
        write = Writer(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
        session = ChatSession(llm, params, system, write.dim)
        session.check()
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # enables line editing and history
            write(
                f"{Path(llm.model_name).name}, at most {llm.config.max_model_len:,} tokens. "
                "/help lists the commands, Ctrl-D exits.\n"
            )
        for line in _lines():
            if not session.take(line, write):
                break


def _lines() -> Iterator[str]:
    """Input lines without empty ones; Ctrl-C discards a line."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except KeyboardInterrupt:
            print("\n(press Ctrl-D or type /exit to exit)")
        except EOFError:
            print(end="\n" if prompt else "")
            return
        else:
            if line.strip():
                yield line.strip()


DIM, PLAIN = "\x1b[2m", "\x1b[22m"
MAX_HELD = 24  # columns; some languages do not separate words


class Writer:
    """Writes to stdout. With a width, wraps lines between words and holds back an incomplete word."""

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._held = ""
        self._style = PLAIN

    def dim(self, text: str) -> None:
        """Write a text that is less important, dimmed if the terminal can."""
        is_dim = self._width is not None and os.environ.get("TERM") != "dumb"
        self._write(text, DIM if is_dim else PLAIN)

    def __call__(self, text: str) -> None:
        self._write(text, PLAIN)

    def _write(self, text: str, style: str) -> None:
        text = live.safe(text)
        if style != self._style:
            held, self._held = self._held, ""
            if self._width is not None:
                self._put(held, self._width)
            print(style, end="")
            self._style = style
        if self._width is None:
            print(text, end="", flush=True)
            return
        *words, self._held = re.split(r"(?<=\s)", self._held + text)
        if cell_len(self._held) > MAX_HELD:
            words, self._held = [*words, self._held], ""
        for word in words:
            self._put(word, self._width)

    def _put(self, word: str, width: int) -> None:
        """Print a word and the space after it, on a new line if it does not fit."""
        if self._column and self._column + cell_len(word.rstrip()) > width:
            print()
            self._column = 0
        print(word, end="", flush=True)
        self._column = 0 if word.endswith("\n") else self._column + cell_len(word)
