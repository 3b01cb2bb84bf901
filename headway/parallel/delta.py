"""A plan as bytes, for the other ranks: what changes in their row tables, and the work of the step.

Requests are named by their row. A rank keeps a `Request` for each row, with as much of it as an
executor reads. Rows of decodes are sent only if they differ from those of the previous plan.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np

from headway.plan import Admission, Chunk, Copy, Plan, Rows
from headway.request import Request, RequestParams
from headway.sampling_params import Sampling, sampling_of


class AdmissionDelta(msgspec.Struct, array_like=True):
    row: int
    num_prompt: int
    limit: int
    is_scored: bool
    blocks: list[int]


class ChunkDelta(msgspec.Struct, array_like=True):
    row: int
    start: int
    end: int
    store_from: int
    tokens: bytes  # int32
    sampling: Sampling | None  # of the last chunk


class Delta(msgspec.Struct, array_like=True):
    num_steps: int
    rows: bytes | None  # of decodes, in the smallest type that holds them; None: as before
    new_rows: list[int]  # of decodes with a new block
    new_blocks: list[int]
    copies: tuple[list[Copy], list[Copy]]  # out, in
    admitted: list[AdmissionDelta]
    chunks: list[ChunkDelta]


def row_type(num_rows: int) -> np.dtype[np.unsignedinteger]:
    return np.min_scalar_type(max(1, num_rows - 1))


class PlanEncoder:
    """Encodes the plans of one engine, in order."""

    def __init__(self, num_rows: int) -> None:
        self._row_type = row_type(num_rows)
        self._rows: Rows | None = None  # of the previous plan
        self._encode = msgspec.msgpack.Encoder().encode

    def encode(self, plan: Plan) -> bytes:
        """InvalidRequest for sampling parameters that no executor can use; nothing changes then."""
        chunks, rows = [_chunk(chunk) for chunk in plan.chunks], None
        if self._rows is None or not np.array_equal(self._rows, plan.rows):
            self._rows, rows = plan.rows.copy(), plan.rows.astype(self._row_type).tobytes()
        new_rows = [request.row for request, _ in plan.new_blocks]
        new_blocks = [block for _, block in plan.new_blocks]
        copies = plan.copies_out, plan.copies_in
        admitted = [_admission(each.request) for each in plan.admitted]
        return self._encode(
            Delta(plan.num_steps, rows, new_rows, new_blocks, copies, admitted, chunks)
        )


def _admission(request: Request) -> AdmissionDelta:
    sampling, blocks = request.params.sampling, request.kv.blocks
    is_scored = isinstance(sampling, Sampling) and sampling.prompt_logprobs is not None
    return AdmissionDelta(request.row, request.num_prompt, request.limit, is_scored, blocks)


def _chunk(chunk: Chunk) -> ChunkDelta:
    request, start, end, store_from, is_last = chunk
    tokens = request.tokens[start:end].tobytes()
    sampling = _sampling(request, end) if is_last else None
    return ChunkDelta(request.row, start, end, store_from, tokens, sampling)


def _sampling(request: Request, num_known: int) -> Sampling:
    """What a device needs to sample a row; `num_known` tokens are known."""
    sampling = sampling_of(request.id, request.params.sampling)
    has_processor = (
        sampling.edits_logits or num_known - request.num_prompt < request.params.min_tokens
    )
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed_of(request.sample),
        logprobs=0 if has_processor or sampling.logprobs is not None else None,  # needs the host
        prompt_logprobs=None if sampling.prompt_logprobs is None else 0,
    )


class PlanDecoder:
    """Decodes plans on a rank, and keeps a request for each row."""

    def __init__(self, num_rows: int) -> None:
        self._row_type = row_type(num_rows)
        self._rows: Rows = np.zeros(0, np.intp)
        self._decodes: list[Request] = []
        self._requests: dict[int, Request] = {}
        self._decode = msgspec.msgpack.Decoder(Delta).decode

    def decode(self, data: bytes) -> Plan:
        delta, requests = self._decode(data), self._requests
        if delta.rows is not None:
            self._rows = np.frombuffer(delta.rows, self._row_type).astype(np.intp)
            self._decodes = [requests[row] for row in self._rows.tolist()]
        plan = Plan(0, decodes=self._decodes, rows=self._rows, num_steps=delta.num_steps)
        plan.copies_out, plan.copies_in = delta.copies
        plan.admitted = [self._admission(each) for each in delta.admitted]
        plan.new_blocks = [
            (requests[row], block)
            for row, block in zip(delta.new_rows, delta.new_blocks, strict=True)
        ]
        plan.chunks = [self._chunk(each) for each in delta.chunks]
        return plan

    def _admission(self, admitted: AdmissionDelta) -> Admission:
        sampling = Sampling(prompt_logprobs=0) if admitted.is_scored else None
        known = array("i", bytes(4 * admitted.num_prompt if admitted.is_scored else 4))
        request = Request(str(admitted.row), known, RequestParams(sampling=sampling))
        request.row, request.num_prompt = admitted.row, admitted.num_prompt
        request.limit, request.kv.blocks = admitted.limit, admitted.blocks
        self._requests[request.row] = request
        return Admission(request, 0, 0, False)

    def _chunk(self, chunk: ChunkDelta) -> Chunk:
        request, is_last = self._requests[chunk.row], chunk.sampling is not None
        known = request.prompt
        known.frombytes(bytes(4 * max(0, chunk.end - len(known))))  # positions that were cached
        known[chunk.start : chunk.end] = array("i", chunk.tokens)
        if is_last:
            request.prompt = known[: chunk.end]
            request.params = RequestParams(sampling=chunk.sampling)
        return Chunk(request, chunk.start, chunk.end, chunk.store_from, is_last)
