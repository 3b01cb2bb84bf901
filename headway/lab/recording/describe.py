"""A frame of a recording in plain text, and the answer to "why?" for one request."""

from __future__ import annotations

from collections.abc import Iterator

from headway.lab.recording.reader import RunRecording
from headway.lab.recording.state import Op, RecordedRequest, RecordedState, Status, split
from headway.record import sentences

MAX_LISTED = 12


def frame_lines(recording: RunRecording, frame: int) -> Iterator[str]:
    """What happens in a frame and where every request is."""
    state, chunk = recording.state(frame), recording.chunk_of(frame)
    value = {name: recording.column(name, frame) for name in chunk.columns}
    started, ended = chunk.times[frame - chunk.first][1:]
    budget = recording.header["config"]["max_num_batched_tokens"]
    step = f"step {value['step']}" if value["step"] >= 0 else "after the last plan"
    yield (
        f"{step} of {recording.num_frames - 1}  {started:.4f} s to {ended:.4f} s  "
        f"{value['decodes']} decodes and {value['prefill']} prompt tokens of a budget of {budget}; "
        f"{value['free']} blocks free"
    )
    for _, _, _, text in recording.texts(frame):
        yield f"  - {text}"
    prefilling = {args[0] for op, args in split(recording.ops(frame)) if op is Op.CHUNK}
    for status in Status:
        members = [r for r, each in state.requests.items() if _shown(r, each, prefilling) is status]
        if members:
            yield f"  {status.name.lower()} ({len(members)}):"
        for r in members[:MAX_LISTED]:
            yield f"    {_request(recording, state, r)}"
        if len(members) > MAX_LISTED:
            yield f"    and {len(members) - MAX_LISTED} more"
    yield f"  finished: {state.num_finished}"


def why(recording: RunRecording, frame: int, id: str) -> str:
    """The state of a request at a frame, and the latest decision about it."""
    numbers = [r for r, request in enumerate(recording.requests) if request[0] == id]
    if not numbers:
        return f"there is no request {id}"
    state, r = recording.state(frame), numbers[-1]
    latest = [text for at, _, number, text in _texts_until(recording, frame) if number == r]
    if r not in state.requests:
        is_gone = any(number == r for _, _, number, _ in _texts_until(recording, frame))
        now = f"request {id} has ended" if is_gone else f"request {id} has not arrived yet"
    else:
        now = f"request {_request(recording, state, r)}"
    return "\n".join([now, *(f"  {text}" for text in latest[-3:])])


def _texts_until(recording: RunRecording, frame: int) -> Iterator[tuple[int, str, int, str]]:
    for chunk in recording.chunks:
        if chunk.first > frame:
            return
        yield from (text for text in chunk.texts if text[0] <= frame)


def _shown(r: int, request: RecordedRequest, prefilling: set[int]) -> Status:
    """A request whose last chunk is in flight is still in its prefill."""
    return Status.PREFILL if r in prefilling else request.status


def _request(recording: RunRecording, state: RecordedState, r: int) -> str:
    id, num_prompt, limit, *_ = recording.requests[r]
    request = state.requests[r]
    text = (
        f"{id}: {num_prompt} prompt tokens, "
        f"{state.computed(r)} computed, {state.generated(r)} of at most {limit - num_prompt} generated"
    )
    if request.blocks:
        text += f", {len(request.blocks)} blocks"
    if request.blocked:
        reason, need, have = request.blocked
        text += f"; waits: {sentences.why_blocked(recording.header['reasons'][reason], need, have)}"
    return text
