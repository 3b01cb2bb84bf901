"""Workload files: read and write requests. The format follows from the file's name and content.

docs/simulator.md describes the formats: .csv of Azure, .jsonl of Mooncake (with hash_ids), .jsonl of
Headway, and decision traces. A prompt given as a length gets token ids that no other prompt of the
file has, so it shares no prefix.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from headway.checks import real_number, whole_number
from headway.engine.engine import MAX_SAMPLES
from headway.errors import ConfigError, FormatError
from headway.executor.simulated import Acceptance
from headway.lab.workload.acceptance import format_acceptance, read_acceptance
from headway.lab.workload.recorded import is_trace, trace_rows
from headway.lab.workload.request import (
    LAST_TOKEN,
    MAX_TOKENS,
    Pieces,
    TokenSpace,
    WorkloadRequest,
    join,
)
from headway.lab.workload.rows import Row, read_rows
from headway.lab.workload.synthetic import parse_synthetic

MOONCAKE_BLOCK = 512  # tokens behind one hash id


def is_synthetic(text: str) -> bool:
    """Whether a text describes a workload; otherwise it names a file."""
    return "=" in text and not Path(text).exists()


def load_workload(
    text: str, limit: int | None, speed: float, max_tokens: int | None, accept: str | None = None
) -> list[WorkloadRequest]:
    """The requests of a file or of a synthetic workload."""
    if is_synthetic(text):
        _refuse(text, "--allowed-tokens", "max_tokens", max_tokens)
        _refuse(text, "--accept", "accept", accept)
        return adjust(parse_synthetic(text).generate(), limit, speed)
    requests = read_workload(text, limit=limit, speed=speed, max_tokens=max_tokens or 1)
    if accept is None:
        return requests
    default = read_acceptance(accept)
    return [r if r.accept is not None else replace(r, accept=default) for r in requests]


def _refuse(text: str, option: str, field: str, value: object) -> None:
    """ConfigError if a synthetic workload comes with an option for files."""
    if value is not None:
        raise ConfigError(
            f"{option} is for workload files; a synthetic workload has a field {field}: "
            f"'{text},{field}={value}'"
        )


def read_workload(
    path: str | Path, *, limit: int | None = None, speed: float = 1.0, max_tokens: int = 1
) -> list[WorkloadRequest]:
    """The first `limit` requests of a file, in order of arrival; FormatError if it is invalid.

    Arrivals are divided by `speed`; the time from arrival to deadline stays. A request without a
    limit in the file gets `max_tokens`, or its output length if that is larger.
    """
    make = row_reader(max_tokens)
    rows = _recorded(Path(path), make) if is_trace(Path(path)) else read_rows(Path(path), make)
    requests = adjust(rows, limit, speed)
    if not requests:
        raise FormatError(path, None, "the file contains no requests")
    return requests


def adjust(
    requests: Iterable[WorkloadRequest], limit: int | None, speed: float
) -> list[WorkloadRequest]:
    """The first `limit` requests, in order of arrival, with arrivals `speed` times as fast."""
    if limit is not None:
        whole_number("limit", limit, 1)
    real_number("speed", speed, above=0)
    chosen = sorted(islice(requests, limit), key=lambda request: request.arrival)
    first = min(0.0, chosen[0].arrival) if chosen else 0.0  # negative if dates are out of order
    return [move(request, (request.arrival - first) / speed) for request in chosen]


def move(request: WorkloadRequest, arrival: float) -> WorkloadRequest:
    """The request at another arrival time, with the same time to its deadline."""
    if arrival == request.arrival:
        return request
    due = request.deadline
    deadline = None if due is None else arrival + (due - request.arrival)
    return replace(request, arrival=arrival, deadline=deadline)


def write_workload(path: str | Path, requests: Iterable[WorkloadRequest]) -> None:
    """Write requests in Headway's format; `read_workload` returns equal ones."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_line(r), separators=(",", ":")) + "\n" for r in requests)


def _line(request: WorkloadRequest) -> dict[str, object]:
    prompt: list[object] = []
    for piece in request.pieces:
        prompt += [[piece[0], len(piece), 1]] if isinstance(piece, range) else piece.tolist()
    line: dict[str, object] = {
        "id": request.id, "arrival": request.arrival, "prompt": prompt,
        "output": request.num_output, "max_tokens": request.max_tokens, "client": request.client,
        "priority": request.priority, "n": request.n,
    }  # fmt: skip
    if request.deadline is not None:
        line["deadline"] = request.deadline
    if request.accept is not None:
        line |= {"accept": format_acceptance(request.accept), "seed": request.accept.seed}
    return line


def row_reader(max_tokens: int = 1) -> Callable[[Row], WorkloadRequest]:
    """A function that makes a request of a row; ValueError if the row is invalid."""
    space, ids = TokenSpace(), set[str]()

    def make(row: Row) -> WorkloadRequest:
        id = row.text("id", str(len(ids)))
        if id in ids:
            raise ValueError(f"id {id!r} is used twice")
        ids.add(id)
        output = row.whole("output", 1)
        limit = row.whole("max_tokens", 1, default=max(output, max_tokens))
        if limit < output:
            raise ValueError(f"output ({output}) exceeds max_tokens ({limit})")
        return WorkloadRequest(
            id=id, arrival=row.seconds("arrival"), pieces=_pieces(row, space), num_output=output,
            max_tokens=limit, client=row.text("client", ""),
            n=row.whole("n", 1, MAX_SAMPLES, default=1),
            priority=row.whole("priority", -MAX_TOKENS, default=0),
            deadline=row.seconds("deadline") if "deadline" in row else None,
            accept=_accept(row),
        )  # fmt: skip

    return make


def _accept(row: Row) -> Acceptance | None:
    if "accept" not in row:
        return None
    value = row.get("accept")
    text = str(value) if isinstance(value, float) else row.text("accept")
    return read_acceptance(text, row.whole("seed", 0, default=0))


def _recorded(path: Path, make: Callable[[Row], WorkloadRequest]) -> Iterator[WorkloadRequest]:
    for place, row in enumerate(trace_rows(path)):
        try:
            yield make(row)
        except ValueError as error:
            raise FormatError(path, None, f"request {place}: {error}") from None


def _pieces(row: Row, space: TokenSpace) -> Pieces:
    if "hash_ids" in row:
        return _blocks(row.whole("prompt", 1), row.hashes(), space)
    pieces: list[range | array[int]] = []
    if "prefix" in row or "prefix_tokens" in row:
        pieces += space.shared(row.text("prefix"), row.whole("prefix_tokens", 1))
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        pieces += _tokens(prompt, space)
    else:
        pieces.append(space.take(row.whole("prompt", 0 if pieces else 1)))
    if not any(pieces):
        raise ValueError("prompt must not be empty")
    return join(pieces)


def _blocks(num_tokens: int, hashes: list[int | str], space: TokenSpace) -> Pieces:
    num_blocks = -(-num_tokens // MOONCAKE_BLOCK)
    if len(hashes) != num_blocks:
        raise ValueError(
            f"{num_tokens} prompt tokens need {num_blocks} hash_ids (one for every "
            f"{MOONCAKE_BLOCK} tokens), but there are {len(hashes)}"
        )
    runs = [space.shared(block, MOONCAKE_BLOCK)[0] for block in hashes]
    runs[-1] = runs[-1][: num_tokens - (num_blocks - 1) * MOONCAKE_BLOCK]
    return join([*runs])


def _tokens(items: list[Any], space: TokenSpace) -> list[range | array[int]]:
    pieces: list[range | array[int]] = []
    for item in items:
        if isinstance(item, list | tuple):
            if len(item) != 3:
                raise ValueError(f"a run of tokens must be [first, count, 0 or 1], not {item!r}")
            count = whole_number("the count of a run", item[1], 1, MAX_TOKENS)
            first = whole_number("the first token of a run", item[0], 0, LAST_TOKEN - count + 1)
            is_rising = whole_number("the third number of a run", item[2], 0, 1)
            pieces.append(range(first, first + count) if is_rising else array("i", [first]) * count)
            space.skip(first + count)
        else:
            token = whole_number("a token id", item, 0, LAST_TOKEN)
            if not pieces or isinstance(pieces[-1], range):
                pieces.append(array("i"))
            pieces[-1].append(token)  # type: ignore[union-attr]
    return pieces
