"""A decision trace as a workload: its requests, as rows with Headway's field names.

A request has its recorded arrival, prompt, limit and output length; one that had not ended has its
limit as length. Samples of one prompt become one request with `n`, and the mean of their lengths. A
request that another engine had begun has the tokens from there in its prompt, as it was computed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.lab.workload.request import MAX_TOKENS
from headway.lab.workload.rows import Row
from headway.record.lines import AddedLine, Line, Packed, RequestLine, ends_of
from headway.record.packing import num_packed
from headway.record.reader import complete, read_journal, split_header


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


def prompts(config: Mapping[str, int], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The requests without a parent; each of the others is one more sample of its parent."""
    lengths = _output_lengths(lines)
    rows: list[dict[str, Any]] = []
    by_id: dict[str, tuple[dict[str, Any], list[int]]] = {}  # the latest row, lengths of samples
    for entry in added_in(lines):
        num_resumed, ends = num_packed(entry.output), lengths[entry.id]
        limit = max(1, _limit(entry, config) - num_resumed)
        num_output = min(limit, max(1, ends.popleft() - num_resumed if ends else limit))
        if entry.parent is None:
            rows.append(_row(entry, limit, len(rows)))
            by_id[entry.id] = rows[-1], []
        row, outputs = by_id[entry.parent or entry.id]
        outputs.append(num_output)
        row |= {"n": len(outputs), "output": round(sum(outputs) / len(outputs))}
    return rows


def _row(entry: RequestLine, limit: int, number: int) -> dict[str, Any]:
    """The fields that a workload has; ids may repeat in a trace, so requests are numbered."""
    optional = {"client": entry.client, "priority": entry.priority, "deadline": entry.deadline}
    return {
        "id": str(number), "arrival": entry.arrival, "max_tokens": limit,
        "prompt": known_tokens(entry), **{key: value for key, value in optional.items() if value},
    }  # fmt: skip


def known_tokens(entry: RequestLine) -> Packed:
    """The packed tokens, or their number, that an added request came with."""
    return entry.prompt + entry.output if entry.output else entry.prompt  # type: ignore[operator]


def _output_lengths(lines: Iterable[Line]) -> dict[str, deque[int]]:
    """The output lengths of the requests with each id, in the order in which they ended."""
    lengths = defaultdict[str, deque[int]](deque)
    for line in lines:
        for end in ends_of(line):
            lengths[end.id].append(num_packed(end.output))
    return lengths


def _limit(entry: RequestLine, config: Mapping[str, int]) -> int:
    """The maximum output; without max_tokens, as much as the model and the KV cache allow."""
    most = min(config["max_model_len"], config["num_blocks"] * config["block_size"] + 1)
    return min(max(1, entry.max_tokens or most - num_packed(entry.prompt)), MAX_TOKENS)
