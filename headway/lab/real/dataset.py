"""The requests that `headway bench throughput` measures: random, or from a file.

A file has prompts (the format of `headway generate --file`), the lengths of a trace (a workload
file, whose prompts get random tokens), or conversations in ShareGPT's format.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checks import one_of
from headway.errors import ConfigError, FormatError, InvalidRequest
from headway.lab.loadgen.requests import LengthRange, RequestFormat, random_prompt, truncate
from headway.lab.real import prompts
from headway.lab.workload.files import read_workload
from headway.lab.workload.rows import ALIASES
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.llm import LLM

Work = tuple[list[str | list[int]], list[SamplingParams]]
NAMES = ("random", "prompts", "trace", "sharegpt")
BY_SUFFIX = {".csv": "trace", ".json": "sharegpt"}  # any other file has prompts
LENGTH_FIELDS = {"arrival", "output", "headway_trace", *ALIASES}
MIN_TOKENS = 4  # a shorter prompt or reply of a conversation is left out, as in `vllm bench`


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Which requests to make. Lengths in a file are capped by max_input and max_output."""

    count: int
    inputs: LengthRange
    outputs: LengthRange
    name: str | None = None  # one of NAMES; None: by the file's name
    path: Path | None = None
    max_input: int | None = None
    max_output: int | None = None

    def load(self, llm: LLM, source: random.Random) -> tuple[Work, str]:
        """The prompts and their parameters; ConfigError or FormatError if there are none.

        The text says why there are fewer than `count`, and is empty otherwise.
        """
        path, name = self.path, self._name()
        if path is None:
            return random_work(llm, source, self.count, self.inputs, self.outputs), ""
        if name == "sharegpt":
            return self._sharegpt(llm, path, source)
        if name == "prompts":
            work = _read_prompts(llm, path, self.count, source, self.outputs)
        else:
            work = self._capped(_trace(llm, path, self), source)
        return work, self._missing(len(work[0]), f"{path} has no more")

    def _sharegpt(self, llm: LLM, path: Path, source: random.Random) -> tuple[Work, str]:
        found = _read_json(path)
        work = self._capped(_conversations(llm, found), source)
        num_used = len(work[0])
        if not num_used:
            raise FormatError(path, None, f"no conversation has {MIN_TOKENS} tokens on both sides")
        reason = f"{path} has {len(found)} conversations"
        if num_skipped := len(found) - num_used:
            reason += f", and {num_skipped} have fewer than {MIN_TOKENS} tokens on one side"
        return work, self._missing(num_used, reason)

    def _capped(self, pairs: Iterable[tuple[list[int], int]], source: random.Random) -> Work:
        """The first `count` pairs of tokens and output length, with both lengths capped."""
        work: Work = [], []
        for tokens, num_output in islice(pairs, self.count):
            work[0].append(tokens[: self.max_input])
            work[1].append(_params(source, min(num_output, self.max_output or num_output)))
        return work

    def _missing(self, num_found: int, reason: str) -> str:
        if num_found >= self.count:
            return ""
        return f"{num_found} requests instead of {self.count} (--num-prompts): {reason}"

    def _name(self) -> str:
        """The kind of dataset; ConfigError if it does not go with the path."""
        by_path = "random" if self.path is None else BY_SUFFIX.get(self.path.suffix, "prompts")
        name = one_of("dataset-name", self.name or by_path, NAMES)
        if (name == "random") != (self.path is None):
            needs = "has no --dataset-path" if name == "random" else "needs --dataset-path"
            raise ConfigError(f"--dataset-name {name} {needs}")
        return name


def random_work(
    llm: LLM, source: random.Random, count: int, inputs: LengthRange, outputs: LengthRange
) -> Work:
    """Prompts of random tokens, which share no prefix."""
    limit = min(llm.config.max_model_len, llm.config.num_blocks * llm.config.block_size + 1)
    if inputs.high + outputs.high > limit:
        raise ConfigError(
            f"{inputs.high} input and {outputs.high} output tokens exceed the limit of {limit} "
            "tokens (model length and KV cache); lower --input-len or --output-len"
        )
    vocab_size = llm.loaded.decoder.config.vocab_size
    contents: list[str | list[int]] = [
        random_prompt(source, inputs.draw(source), vocab_size) for _ in range(count)
    ]
    return contents, [_params(source, outputs.draw(source)) for _ in range(count)]


def _params(source: random.Random, num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True, seed=source.getrandbits(32))


def _read_prompts(
    llm: LLM, file: Path, count: int, source: random.Random, outputs: LengthRange
) -> Work:
    """The first prompts of a file; InvalidRequest if one of them is invalid."""
    entries = prompts.read_prompts((), file, SamplingParams(max_tokens=None))[:count]
    prompts.apply_chat_template(llm, entries)
    if error := next((entry.error for entry in entries if entry.error), None):
        hint = "; use --dataset-name trace for a file of lengths" if _has_lengths(file) else ""
        raise InvalidRequest(error + hint)
    lengths = (entry.params.max_tokens or outputs.draw(source) for entry in entries)
    return [entry.content for entry in entries], [
        replace(entry.params, max_tokens=length, ignore_eos=True)
        for entry, length in zip(entries, lengths, strict=True)
    ]


def _has_lengths(file: Path) -> bool:
    """Whether the first line is that of a trace or a workload, not a prompt."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            first = json.loads(next(line for line in lines if line.strip()))
    except (OSError, ValueError, StopIteration):
        return False
    return isinstance(first, dict) and not LENGTH_FIELDS.isdisjoint(first)


def _trace(llm: LLM, path: Path, dataset: Dataset) -> Iterator[tuple[list[int], int]]:
    """Tokens and output lengths of a workload file; equal prefixes in the file stay equal."""
    ids = RequestFormat(model="", vocab_size=llm.loaded.decoder.config.vocab_size)
    for request in read_workload(path, limit=dataset.count):
        short = truncate(request, dataset.max_input, dataset.max_output)
        yield ids.tokens(short), short.num_output


def _conversations(
    llm: LLM, conversations: Sequence[Mapping[str, object]]
) -> Iterator[tuple[list[int], int]]:
    """The first question of every conversation, and the length of its answer."""
    if (tokenizer := llm.tokenizer) is None:
        raise ConfigError("--dataset-name sharegpt needs a model with a tokenizer")
    for conversation in conversations:
        turns = conversation.get("conversations")
        first = turns[:2] if isinstance(turns, list) else ()
        texts = [turn.get("value") for turn in first if isinstance(turn, dict)]
        question, answer = (
            tokenizer.encode(text) if isinstance(text, str) else []
            for text in (*texts, None, None)[:2]
        )
        if min(len(question), len(answer)) >= MIN_TOKENS:
            yield question, len(answer)


def _read_json(path: Path) -> Sequence[Mapping[str, object]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(path, None, f"cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(path, None, f"not JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise FormatError(path, None, "must be a list of conversations, each a JSON object")
    return found
