"""A frame of a film in plain text, and the answer to "why?" for one request."""

from __future__ import annotations

from collections.abc import Iterator

from headway.lab.film.reader import Film
from headway.lab.film.state import FilmRequest, FilmState, Op, Status, split
from headway.record import sentences

MAX_LISTED = 12


def frame_lines(film: Film, frame: int) -> Iterator[str]:
    """What happens in a frame and where every request is."""
    state, chunk = film.state(frame), film.chunk_of(frame)
    value = {name: film.column(name, frame) for name in chunk.columns}
    started, ended = chunk.times[frame - chunk.first][1:]
    budget = film.header["config"]["max_num_batched_tokens"]
    step = f"step {value['step']}" if value["step"] >= 0 else "after the last plan"
    yield (
        f"{step} of {film.num_frames - 1}  {started:.4f} s to {ended:.4f} s  "
        f"{value['decodes']} decodes and {value['prefill']} prompt tokens of a budget of {budget}; "
        f"{value['free']} blocks free"
    )
    for _, _, _, text in film.texts(frame):
        yield f"  - {text}"
    prefilling = {args[0] for op, args in split(film.ops(frame)) if op is Op.CHUNK}
    for status in Status:
        members = [r for r, each in state.requests.items() if _shown(r, each, prefilling) is status]
        if members:
            yield f"  {status.name.lower()} ({len(members)}):"
        for r in members[:MAX_LISTED]:
            yield f"    {_request(film, state, r)}"
        if len(members) > MAX_LISTED:
            yield f"    and {len(members) - MAX_LISTED} more"
    yield f"  finished: {state.num_finished}"


def why(film: Film, frame: int, id: str) -> str:
    """The state of a request at a frame, and the latest decision about it."""
    numbers = [r for r, request in enumerate(film.requests) if request[0] == id]
    if not numbers:
        return f"there is no request {id}"
    state, r = film.state(frame), numbers[-1]
    latest = [text for at, _, number, text in _texts_until(film, frame) if number == r]
    if r not in state.requests:
        is_gone = any(number == r for _, _, number, _ in _texts_until(film, frame))
        now = f"request {id} has ended" if is_gone else f"request {id} has not arrived yet"
    else:
        now = f"request {_request(film, state, r)}"
    return "\n".join([now, *(f"  {text}" for text in latest[-3:])])


def _texts_until(film: Film, frame: int) -> Iterator[tuple[int, str, int, str]]:
    for chunk in film.chunks:
        if chunk.first > frame:
            return
        yield from (text for text in chunk.texts if text[0] <= frame)


def _shown(r: int, request: FilmRequest, prefilling: set[int]) -> Status:
    """A request whose last chunk is in flight is still in its prefill."""
    return Status.PREFILL if r in prefilling else request.status


def _request(film: Film, state: FilmState, r: int) -> str:
    id, num_prompt, limit, *_ = film.requests[r]
    request = state.requests[r]
    text = (
        f"{id}: {num_prompt} prompt tokens, "
        f"{state.computed(r)} computed, {state.generated(r)} of at most {limit - num_prompt} generated"
    )
    if request.blocks:
        text += f", {len(request.blocks)} blocks"
    if request.blocked:
        reason, need, have = request.blocked
        text += f"; waits: {sentences.why_blocked(film.header['reasons'][reason], need, have)}"
    return text
