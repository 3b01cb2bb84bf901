"""`headway chat`: talk to a model in the terminal, answers as they are generated.

Reads lines: typed ones, or a pipe's. Ctrl-C ends an answer, Ctrl-D the chat.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len

from headway.cli.options.model import SAMPLING, ModelOptions, SamplingOptions, spread
from headway.cli.view import live
from headway.cli.view.talk import Talk

System = Annotated[str, typer.Option(help="The system message.", show_default="the model's own")]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions):
    """A chat is livelier than a completion."""

    max_tokens: Annotated[
        int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=SAMPLING)
    ] = 512
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest answer.", rich_help_panel=SAMPLING)
    ] = 0.7


@spread
def chat_command(system: System = "", *, model: ModelOptions, sampling: ChatOptions) -> None:
    """Talk to a model. Commands: /reset, /system, /stats, /help, /exit."""
    params = sampling.params()
    with model.load() as llm:
        talk = Talk(llm, params, system)
        talk.check()
        write = Writer(shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # lines can be edited, earlier ones come back
            write(
                f"{Path(llm.model_name).name}, {llm.config.max_model_len:,} tokens of room. "
                "/help lists the commands, Ctrl-D leaves.\n"
            )
        for line in _lines():
            if not talk.take(line, write):
                break


def _lines() -> Iterator[str]:
    """What is typed, line by line, until it ends; a line given up with Ctrl-C is left out."""
    mark = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(mark)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")
        except EOFError:
            print(end="\n" if mark else "")
            return
        else:
            if line.strip():
                yield line.strip()


LONGEST_HELD = 24  # columns: some languages write without blanks


class Writer:
    """Writes to stdout at once; at a width, whole words only, the latest held until it is over."""

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._column = 0
        self._held = ""

    def __call__(self, text: str) -> None:
        text = live.safe(text)
        if self._width is None:
            print(text, end="", flush=True)
            return
        *words, self._held = re.split(r"(?<=\s)", self._held + text)
        if cell_len(self._held) > LONGEST_HELD:
            words, self._held = [*words, self._held], ""
        for word in words:
            self._put(word, self._width)

    def _put(self, word: str, width: int) -> None:
        """A word and the blank behind it, on a new line where it would not fit."""
        if self._column and self._column + cell_len(word.rstrip()) > width:
            print()
            self._column = 0
        print(word, end="", flush=True)
        self._column = 0 if word.endswith("\n") else self._column + cell_len(word)
