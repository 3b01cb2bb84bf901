"""Workload files: read them as jobs, write jobs to them. The kind is told by name and content.

    .csv    Azure: arrival_s (or TIMESTAMP, a date), prompt_tokens (ContextTokens), output_tokens
            (GeneratedTokens) and, where there is one, client_id
    .jsonl  Mooncake: arrival_s (or timestamp, ms), prompt_tokens (input_length), output_tokens
            (output_length), hash_ids: one for every 512 tokens, equal ids for equal tokens
    .jsonl  our own, where a line has no hash_ids:
              arrival        seconds
              prompt         a length, or a list of token ids in which [first, count, 1] stands for
                             consecutive ids and [first, count, 0] for one id repeated
              output         the tokens it really generates, the end token included
              max_tokens     what its user allows; `output` unless given
              prefix         the name of a shared prefix that comes in front of `prompt`
              prefix_tokens  the length of that prefix
              client, priority, deadline (seconds, on the clock of `arrival`), n, id: optional

A prompt given as a length has ids that no other prompt of its file has, so it shares nothing.
Knows no distribution and nothing of how a job is served.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from headway.engine.engine import MAX_SAMPLES
from headway.errors import ConfigError, FormatError
from headway.lab.workload.jobs import EOS, LAST_TOKEN, MAX_TOKENS, Job, Pieces, TokenSpace, join
from headway.lab.workload.rows import Row, each, whole

__all__ = ["EOS", "Job", "Reuse", "TokenSpace", "adjust", "block_reuse", "read_jobs", "write_jobs"]

MOONCAKE_BLOCK = 512  # tokens behind one hash id


class Reuse(NamedTuple):
    """How many of a trace's prompt blocks a cache without limit would have had."""

    num_blocks: int
    num_hits: int

    @property
    def share(self) -> float:
        return self.num_hits / self.num_blocks


def read_jobs(
    path: str | Path, *, limit: int | None = None, speed: float = 1.0, max_tokens: int = 1
) -> list[Job]:
    """The jobs of a file's first `limit` requests, by arrival; FormatError if it is bad.

    Arrivals are divided by `speed`; the time from arrival to deadline stays. Where the file does
    not say what a user allowed, it is `max_tokens` or, if that is more, the real output.
    """
    jobs = adjust(_jobs(Path(path), max_tokens), limit, speed)
    if not jobs:
        raise FormatError(path, None, "there are no requests in it")
    return jobs


def adjust(jobs: Iterable[Job], limit: int | None, speed: float) -> list[Job]:
    """The first `limit` of the jobs, by arrival, `speed` times as fast."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}")
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed must be a number above 0, not {speed}")
    chosen = sorted(islice(jobs, limit), key=lambda job: job.arrival)
    first = min(0.0, chosen[0].arrival) if chosen else 0.0  # below 0 where dates are not in order
    return [_move(job, (job.arrival - first) / speed) for job in chosen]


def _move(job: Job, arrival: float) -> Job:
    """The same job at another time, its deadline as far away as before."""
    if arrival == job.arrival:
        return job
    deadline = None if job.deadline is None else arrival + (job.deadline - job.arrival)
    return replace(job, arrival=arrival, deadline=deadline)


def write_jobs(path: str | Path, jobs: Iterable[Job]) -> None:
    """Write jobs in our own format; `read_jobs` gives equal ones back."""
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_describe(job), separators=(",", ":")) + "\n" for job in jobs)


def _describe(job: Job) -> dict[str, Any]:
    prompt: list[Any] = []
    for piece in job.pieces:
        prompt += [[piece[0], len(piece), 1]] if isinstance(piece, range) else piece.tolist()
    line: dict[str, Any] = {
        "id": job.id, "arrival": job.arrival, "prompt": prompt, "output": job.num_output,
        "max_tokens": job.max_tokens, "client": job.client, "priority": job.priority, "n": job.n,
    }  # fmt: skip
    return line if job.deadline is None else {**line, "deadline": job.deadline}


def block_reuse(path: str | Path, skip: Container[str] = ()) -> Reuse:
    """Count the hash ids of a Mooncake file, and those a cache without limit would serve.

    Requests whose ids are in `skip`, such as rejected ones, do not count and fill no cache. Every hash id counts as one block, also the last of a prompt that fills it only in part. A
    block is a hit if it and all before it in its prompt were in prompts of earlier lines.
    """
    seen: set[int | str] = set()
    num_blocks = num_hits = 0
    numbers = count()  # a line without an id is named by its number, as in `read_jobs`
    rows = each(Path(path), lambda row: (row.text("id", str(next(numbers))), row.hashes()))
    for hashes in (hashes for id, hashes in rows if id not in skip):
        new = (place for place, block in enumerate(hashes) if block not in seen)
        num_hits += next(new, len(hashes))
        num_blocks += len(hashes)
        seen.update(hashes)
    return Reuse(num_blocks, num_hits)


def _jobs(path: Path, max_tokens: int) -> Iterator[Job]:
    space, ids = TokenSpace(), set[str]()

    def job_of(row: Row) -> Job:
        id = row.text("id", str(len(ids)))
        if id in ids:
            raise ValueError(f"id {id!r} is used twice")
        ids.add(id)
        output = row.whole("output", 1)
        if row.whole("n", 1, 1) > MAX_SAMPLES:
            raise ValueError(f"n must be at most {MAX_SAMPLES}, not {row.whole('n', 1, 1)}")
        allowed = row.whole("max_tokens", 1, max(output, max_tokens))
        if allowed < output:
            raise ValueError(f"output ({output}) is more than max_tokens ({allowed}) allows")
        return Job(
            id=id, arrival=row.seconds("arrival"), pieces=_pieces(row, space), num_output=output,
            max_tokens=allowed, client=row.text("client", ""), n=row.whole("n", 1, 1),
            priority=row.whole("priority", -MAX_TOKENS, 0),
            deadline=row.seconds("deadline") if "deadline" in row else None,
        )  # fmt: skip

    return each(path, job_of)


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
        raise ValueError("the prompt is empty")
    return join(pieces)


def _blocks(num_tokens: int, hashes: list[int | str], space: TokenSpace) -> Pieces:
    num_blocks = -(-num_tokens // MOONCAKE_BLOCK)
    if len(hashes) != num_blocks:
        raise ValueError(
            f"{num_tokens} prompt tokens make {num_blocks} blocks of {MOONCAKE_BLOCK}, "
            f"but there are {len(hashes)} hash_ids"
        )
    runs = [space.shared(block, MOONCAKE_BLOCK)[0] for block in hashes]
    runs[-1] = runs[-1][: num_tokens - (num_blocks - 1) * MOONCAKE_BLOCK]
    return join([*runs])


def _tokens(items: list[Any], space: TokenSpace) -> list[range | array[int]]:
    pieces: list[range | array[int]] = []
    for item in items:
        if isinstance(item, list):
            if len(item) != 3:
                raise ValueError(f"a run of tokens is [first, count, 0 or 1], not {item!r}")
            count = whole(item[1], "the count of a run", 1, MAX_TOKENS)
            first = whole(item[0], "the first token of a run", 0, LAST_TOKEN - count + 1)
            is_rising = whole(item[2], "the third number of a run", 0, 1)
            pieces.append(range(first, first + count) if is_rising else array("i", [first]) * count)
            space.skip(first + count)
        else:
            token = whole(item, "a token", 0, LAST_TOKEN)
            if not pieces or isinstance(pieces[-1], range):
                pieces.append(array("i"))
            pieces[-1].append(token)  # type: ignore[union-attr]
    return pieces
