"""Prompts from the command line and from files: plain text, or JSON lines with their own params.

A line that cannot be read becomes a prompt with an error, so that the others go on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import FormatError, HeadwayError
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

CONTENTS = ("prompt", "prompt_token_ids", "messages")
PARAMS = tuple(field.name for field in fields(SamplingParams))


@dataclass(slots=True, kw_only=True)
class Ask:
    """One prompt: a text, token ids, or messages; or why it cannot be asked."""

    index: int = 0
    id: str = ""
    where: str = ""  # file and line; empty for the command line
    content: str | list[int] = ""
    messages: list[Any] | None = None
    params: SamplingParams
    error: str | None = None

    @property
    def shown(self) -> str:
        """The prompt for people to read."""
        if self.messages:
            return str(self.messages[-1]["content"])
        return self.content if isinstance(self.content, str) else f"{len(self.content)} tokens"

    def refuse(self, problem: object) -> None:
        """It cannot be asked, or was not answered."""
        self.error = f"{self.where}: {problem}" if self.where else str(problem)


def gather(prompts: Iterable[str], file: Path | None, params: SamplingParams) -> list[Ask]:
    """All prompts, numbered: the command line's, then the file's."""
    asks = [Ask(content=text, params=params) for text in prompts]
    if file is not None:
        asks += _read(file, params)
    for index, ask in enumerate(asks):
        ask.index, ask.id = index, ask.id or str(index)
    return asks


def readable(llm: LLM, asks: Iterable[Ask]) -> list[Ask]:
    """Those that can be given to the model; messages become tokens by the model's template."""
    for ask in asks:
        if ask.messages is not None:
            try:
                ask.content = llm.chat_tokens(ask.messages)
            except HeadwayError as error:
                ask.refuse(error)
    return [ask for ask in asks if ask.error is None]


def _read(file: Path, params: SamplingParams) -> Iterator[Ask]:
    name = "stdin" if str(file) == "-" else str(file)
    lines = [(i, line) for i, line in enumerate(_lines(file, name), start=1) if line.strip()]
    if not lines:
        raise FormatError(name, None, "there are no prompts in it")
    is_json = file.suffix == ".jsonl" or (name == "stdin" and lines[0][1].lstrip()[0] == "{")
    for number, line in lines:
        where = f"{name}:{number}"
        if is_json:
            yield _parse(line, where, params)
        else:
            yield Ask(where=where, content=line, params=params)


def _lines(file: Path, name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "stdin" else file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FormatError(name, None, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise FormatError(name, None, "not UTF-8 text") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def _parse(line: str, where: str, params: SamplingParams) -> Ask:
    ask = Ask(where=where, params=params)
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        _fill(ask, row)
    except json.JSONDecodeError as error:
        ask.refuse(f"not JSON: {error}")
    except ValueError as error:
        ask.refuse(error)
    return ask


def _fill(ask: Ask, row: dict[str, Any]) -> None:
    """What a line says; ValueError (of which InvalidRequest is one) if it makes no sense."""
    ask.id = str(row.pop("id", ""))
    found = [name for name in CONTENTS if name in row]
    if len(found) != 1:
        has = " and ".join(found) or "none"
        raise ValueError(f"it needs one of {', '.join(CONTENTS)}, and has {has}")
    [name] = found
    content = row.pop(name)
    kind: Any = str if name == "prompt" else list
    if not isinstance(content, kind):
        wanted = "a text" if kind is str else "a list"
        raise ValueError(f"{name} must be {wanted}, not {content!r}")
    if name == "messages":
        ask.messages = content
    else:
        ask.content = content
    unknown = next((key for key in row if key not in PARAMS), None)
    if unknown is not None:
        raise ValueError(f"unknown field {unknown!r}; there are {', '.join((*CONTENTS, *PARAMS))}")
    if isinstance(row.get("logit_bias"), dict):  # JSON has no numbers as keys
        row["logit_bias"] = {_token(key): value for key, value in row["logit_bias"].items()}
    ask.params = replace(ask.params, **row)


def _token(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"logit_bias: {key!r} is not a token id") from None
