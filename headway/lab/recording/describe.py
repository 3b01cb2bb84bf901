"""A frame of a recording in plain text, and the answer to "why?" for one request."""

from __future__ import annotations

from collections.abc import Iterator

from headway.lab.recording.reader import RunRecording
from headway.lab.recording.state import Op, RecordedState, Status, split
from headway.record import sentences

MAX_LISTED = 12


def frame_lines(recording: RunRecording, frame: int) -> Iterator[str]:
    """What happens in a frame and where every request is."""
    state, chunk = recording.state(frame), recording.chunk_of(frame)
    value = {name: column[frame - chunk.first] for name, column in chunk.columns.items()}
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
    for r, number, accepted in recording.drafts(frame)[:MAX_LISTED]:
        yield f"  - {sentences.accepted(recording.requests[r][0], number, max(0, accepted))}"
    for op, args in split(recording.ops(frame)):  # the last chunk of a prompt may be in flight
        if op is Op.CHUNK:
            state.requests[args[0]].status = Status.PREFILL
    for status in Status:
        members = [r for r, request in state.requests.items() if request.status is status]
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
    texts = (text for chunk in recording.chunks for text in chunk.texts if text[0] <= frame)
    latest = [text for _, _, number, text in texts if number == r]
    now = f"request {id} has {'ended' if latest else 'not arrived yet'}"
    if r in state.requests:
        now = f"request {_request(recording, state, r)}"
    return "\n".join([now, *(f"  {text}" for text in latest[-3:])])


def _request(recording: RunRecording, state: RecordedState, r: int) -> str:
    (id, num_prompt, limit, *_), request = recording.requests[r], state.requests[r]
    text = (
        f"{id}: {num_prompt} prompt tokens, {state.computed(r)} computed, "
        f"{state.generated(r)} of at most {limit - num_prompt} generated"
    )
    if request.blocks:
        text += f", {len(request.blocks)} blocks"
    if request.blocked:
        reason, need, have = request.blocked
        text += f"; waits: {sentences.why_blocked(recording.header['reasons'][reason], need, have)}"
    return text
