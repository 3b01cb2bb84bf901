"""Prompts from the command line and from files: plain text, or JSON lines with their own parameters.

An invalid line becomes a prompt with an error; the other lines are processed.
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
class PromptEntry:
    """One prompt: text, token ids or messages, with its parameters or its error."""

    index: int = 0
    id: str = ""
    where: str = ""  # file and line, or the place among several prompts of the command line
    content: str | list[int] = ""
    messages: list[Any] | None = None
    params: SamplingParams
    error: str | None = None

    @property
    def shown(self) -> str:
        """The prompt as text for the terminal."""
        if self.messages:
            return str(self.messages[-1]["content"])
        return self.content if isinstance(self.content, str) else f"{len(self.content)} tokens"

    def fail(self, problem: object) -> None:
        """Set the error, with file and line."""
        self.error = f"{self.where}: {problem}" if self.where else str(problem)


def read_prompts(
    prompts: Iterable[str], file: Path | None, params: SamplingParams
) -> list[PromptEntry]:
    """All prompts, numbered: first those of the command line, then those of the file."""
    texts = list(prompts)
    entries = [
        PromptEntry(content=text, params=params, where=f"prompt {place}" if len(texts) > 1 else "")
        for place, text in enumerate(texts, start=1)
    ]
    if file is not None:
        entries += _read(file, params)
    for index, entry in enumerate(entries):
        entry.index, entry.id = index, entry.id or str(index)
    return entries


def apply_chat_template(llm: LLM, entries: Iterable[PromptEntry]) -> list[PromptEntry]:
    """The prompts without errors; messages become token ids by the model's chat template."""
    for entry in entries:
        if entry.messages is not None:
            try:
                entry.content = llm.chat_tokens(entry.messages)
            except HeadwayError as error:
                entry.fail(error)
    return [entry for entry in entries if entry.error is None]


def _read(file: Path, params: SamplingParams) -> Iterator[PromptEntry]:
    name = "stdin" if str(file) == "-" else str(file)
    lines = [(i, line) for i, line in enumerate(_lines(file, name), start=1) if line.strip()]
    if not lines:
        raise FormatError(name, None, "the file contains no prompts")
    is_json = file.suffix == ".jsonl" or (name == "stdin" and lines[0][1].lstrip()[0] == "{")
    for number, line in lines:
        entry = PromptEntry(where=f"{name}:{number}", params=params)
        if is_json:
            _parse(line, entry)
        else:
            entry.content = line
        yield entry


def _lines(file: Path, name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "stdin" else file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FormatError(name, None, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise FormatError(name, None, "not UTF-8 text") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def _parse(line: str, entry: PromptEntry) -> None:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        _fill(entry, row)
    except json.JSONDecodeError as error:
        entry.fail(f"not JSON: {error}")
    except ValueError as error:
        entry.fail(error)


def _fill(entry: PromptEntry, row: dict[str, Any]) -> None:
    """Set prompt and parameters from a line; ValueError (also InvalidRequest) if it is invalid."""
    entry.id = str(row.pop("id", ""))
    found = [name for name in CONTENTS if name in row]
    if len(found) != 1:
        has = " and ".join(found) or "none"
        raise ValueError(f"a line needs exactly one of {', '.join(CONTENTS)}, found {has}")
    content = row.pop(name := found[0])
    kind: Any = str if name == "prompt" else list
    if not isinstance(content, kind):
        wanted = "a string" if name == "prompt" else "a list"
        raise ValueError(f"{name} must be {wanted}, not {content!r}")
    if name == "messages":
        entry.messages = content
    else:
        entry.content = content
    if (unknown := next((key for key in row if key not in PARAMS), None)) is not None:
        raise ValueError(f"unknown field {unknown!r}; known: {', '.join((*CONTENTS, *PARAMS))}")
    if isinstance(row.get("logit_bias"), dict):  # JSON keys are strings
        row["logit_bias"] = {_token(key): value for key, value in row["logit_bias"].items()}
    entry.params = replace(entry.params, **row)


def _token(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ValueError(f"logit_bias: {key!r} is not a token id") from None
