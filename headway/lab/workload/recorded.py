"""A decision trace as a workload: its requests, as rows with Headway's field names.

A request has its recorded arrival, prompt, limit and output length; one that had not ended has its
limit as length. Samples of one prompt become one request with `n`, and the mean of their lengths. A
request that another engine had begun has the tokens from there in its prompt, as it was computed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headway.errors import FormatError
from headway.lab.workload.request import MAX_TOKENS
from headway.lab.workload.rows import Row
from headway.observe.trace import Line, read_trace
from headway.record.packing import num_packed

OPTIONAL = ("client", "priority", "deadline")


def is_trace(path: Path) -> bool:
    """Whether the file begins with the header of a trace; False if it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return '"headway_trace"' in file.readline()
    except (OSError, UnicodeDecodeError):
        return False


def trace_rows(path: Path) -> Iterator[Row]:
    """One row for each prompt of a trace, in the order of `added`."""
    header, *steps = read_trace(path)
    try:
        yield from map(Row, prompts(header["config"], steps))
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"not a complete Headway trace: {type(error).__name__} {error}"
        raise FormatError(path, None, problem) from None


def prompts(config: Line, steps: list[Line]) -> list[Line]:
    """The requests without a parent; each of the others is one more sample of its parent."""
    lengths = _output_lengths(steps)
    rows: list[Line] = []
    by_id: dict[str, tuple[Line, list[int]]] = {}  # the latest row, and the lengths of its samples
    for entry in (entry for step in steps for entry in step.get("added", ())):
        num_resumed, ends = num_packed(entry.get("output", ())), lengths[entry["id"]]
        limit = max(1, _limit(entry, config) - num_resumed)
        num_output = min(limit, max(1, ends.popleft() - num_resumed if ends else limit))
        if "parent" in entry:
            row, outputs = by_id[entry["parent"]]
        else:
            row, outputs = _row(entry, limit, len(rows)), []
            rows.append(row)
            by_id[entry["id"]] = row, outputs
        outputs.append(num_output)
        row |= {"n": len(outputs), "output": round(sum(outputs) / len(outputs))}
    return rows


def _row(entry: Line, limit: int, number: int) -> Line:
    """The fields that a workload has; ids may repeat in a trace, so requests are numbered."""
    row = {"id": str(number), "arrival": entry["arrival"], "max_tokens": limit}
    optional = {key: entry[key] for key in OPTIONAL if key in entry}
    return row | {"prompt": known_tokens(entry)} | optional


def known_tokens(entry: Line) -> Any:
    """The packed tokens, or their number, that an added request came with."""
    return entry["prompt"] + entry["output"] if "output" in entry else entry["prompt"]


def _output_lengths(steps: Iterable[Line]) -> dict[str, deque[int]]:
    """The output lengths of the requests with each id, in the order in which they ended."""
    lengths = defaultdict[str, deque[int]](deque)
    for end in (end for step in steps for end in step.get("finished", ())):
        lengths[end["id"]].append(num_packed(end["output"]))
    return lengths


def _limit(entry: Line, config: Line) -> int:
    """The maximum output; without max_tokens, as much as the model and the KV cache allow."""
    most = min(config["max_model_len"], config["num_blocks"] * config["block_size"] + 1)
    limit: int = entry["max_tokens"] or most - num_packed(entry["prompt"])
    return min(max(1, limit), MAX_TOKENS)
