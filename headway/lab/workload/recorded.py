"""A decision trace as a workload: its requests, as rows with Headway's field names.

A request has its recorded arrival, prompt, limit and output length; one that had not ended has its
limit as length. Samples of one prompt become one request with `n`, and the mean of their lengths. A
request that another engine had begun has the tokens from there in its prompt, as it was computed.
If drafts were verified, `accept` is how often one was right.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.lab.workload.request import MAX_TOKENS
from headway.lab.workload.rows import Row
from headway.record.lines import (
    AddedLine,
    CompletedLine,
    Line,
    Packed,
    PlannedLine,
    RequestLine,
    ends_of,
)
from headway.record.packing import num_packed
from headway.record.reader import complete, read_journal, split_header

OPTIONAL = ("client", "priority", "deadline")


def is_trace(path: Path) -> bool:
    """Whether the file begins with the header of a trace; False if it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return '"headway_trace"' in file.readline()
    except (OSError, UnicodeDecodeError):
        return False


def trace_rows(path: Path) -> Iterator[Row]:
    """One row for each prompt of a trace, in the order of arrival."""
    header, lines = split_header(read_journal(path))
    with complete(path):
        yield from map(Row, prompts(header.config, list(lines)))


def added_in(lines: Iterable[Line]) -> Iterator[RequestLine]:
    """The requests that arrive."""
    return (each for line in lines if isinstance(line, AddedLine) for each in line.requests)


def acceptance_in(lines: Iterable[Line]) -> dict[str, float]:
    """`accept`: the share of compared drafts that were right, up to the first wrong one."""
    counts, num_right, num_wrong = dict[int, list[int]](), 0, 0
    for line in lines:
        if isinstance(line, PlannedLine) and line.drafts:
            counts[line.step] = [count for _, _, count in line.drafts]
        elif isinstance(line, CompletedLine) and line.step in counts:
            for count, gained in zip(counts.pop(line.step), line.gained, strict=True):
                num_right += max(0, gained - 1)
                num_wrong += 0 < gained <= count
    compared = num_right + num_wrong
    return {"accept": round(num_right / compared, 4)} if compared else {}


def prompts(config: Mapping[str, int], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The requests without a parent; each of the others is one more sample of its parent.

    Ids may repeat in a trace, so requests are numbered.
    """
    lengths = defaultdict[str, deque[int]](deque)  # of outputs by id, in the order of the ends
    for end in (end for line in lines for end in ends_of(line)):
        lengths[end.id].append(num_packed(end.output))
    found: list[tuple[RequestLine, int, list[int]]] = []  # with its limit, and lengths of samples
    samples: dict[str, list[int]] = {}  # of the latest request with each id
    for entry in added_in(lines):
        num_resumed, ends = num_packed(entry.output), lengths[entry.id]
        limit = max(1, _limit(entry, config) - num_resumed)
        if entry.parent is None:
            samples[entry.id] = []
            found.append((entry, limit, samples[entry.id]))
        length = min(limit, max(1, ends.popleft() - num_resumed if ends else limit))
        samples[entry.id if entry.parent is None else entry.parent].append(length)
    accept = acceptance_in(lines)
    return [
        {
            "id": str(number), "arrival": entry.arrival, "max_tokens": limit,
            "prompt": known_tokens(entry), "n": len(outputs),
            "output": round(sum(outputs) / len(outputs)),
            **{name: value for name in OPTIONAL if (value := getattr(entry, name))}, **accept,
        }
        for number, (entry, limit, outputs) in enumerate(found)
    ]  # fmt: skip


def known_tokens(entry: RequestLine) -> Packed:
    """The packed tokens, or their number, that an added request came with."""
    return entry.prompt + entry.output if entry.output else entry.prompt  # type: ignore[operator]


def _limit(entry: RequestLine, config: Mapping[str, int]) -> int:
    """The maximum output; without max_tokens, as much as the model and the KV cache allow."""
    most = min(config["max_model_len"], config["num_blocks"] * config["block_size"] + 1)
    return min(max(1, entry.max_tokens or most - num_packed(entry.prompt)), MAX_TOKENS)
