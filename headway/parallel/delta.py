"""A plan as bytes, for the other ranks: what changes in their row tables, and the work of the step.

Requests are named by their row. A rank keeps a `Request` for each row, with as much of it as an
executor reads. Rows of decodes are sent only if they differ from those of the previous plan.

Layout: a header, then arrays in the order of `PlanEncoder.encode`. Rows have the smallest type that holds them.
"""

from __future__ import annotations

import struct
from array import array

import numpy as np

from headway.config import Config
from headway.plan import Admission, Chunk, Copy, Plan, Rows
from headway.request import Request, RequestParams
from headway.sampling_params import Sampling, sampling_of

HEADER = struct.Struct("<B7I")  # see PlanEncoder.encode
ADMISSION = struct.Struct("<IIIIB")  # row, prompt tokens, limit, blocks, is scored
CHUNK = struct.Struct("<IIIIB")  # row, start, end, store_from, is_last
SAMPLING = struct.Struct("<dqddQB")  # temperature, top_k, top_p, min_p, seed, needs_host


def row_type(num_rows: int) -> np.dtype[np.unsignedinteger]:
    return np.min_scalar_type(max(1, num_rows - 1))


def largest_delta(config: Config) -> int:
    """Bytes of the largest plan of a scheduler, at most."""
    num_rows, blocks = config.max_num_seqs, -(-config.max_model_len // config.block_size)
    copies = 8 * (config.num_blocks + config.num_host_blocks)
    row = 8 * blocks + 128  # its table when it is admitted, and new blocks
    return HEADER.size + num_rows * row + 2 * copies + 4 * config.max_num_batched_tokens


class PlanEncoder:
    """Encodes the plans of one engine, in order."""

    def __init__(self, num_rows: int) -> None:
        self._row_type = row_type(num_rows)
        self._rows: Rows | None = None  # of the previous plan

    def encode(self, plan: Plan) -> bytes:
        """InvalidRequest for sampling parameters that no executor can use; nothing changes then."""
        chunks = [_chunk(chunk) for chunk in plan.chunks]
        has_rows = self._rows is None or not np.array_equal(self._rows, plan.rows)
        parts = [
            HEADER.pack(
                has_rows, plan.num_steps, len(plan.decodes),
                len(plan.new_blocks), len(plan.copies_out), len(plan.copies_in),
                len(plan.admitted), len(plan.chunks),
            )
        ]  # fmt: skip
        if has_rows:
            self._rows = plan.rows.copy()
            parts.append(plan.rows.astype(self._row_type).tobytes())
        if plan.new_blocks:
            rows = np.array([request.row for request, _ in plan.new_blocks], self._row_type)
            blocks = np.array([block for _, block in plan.new_blocks], np.uint32)
            parts += (rows.tobytes(), blocks.tobytes())
        for copies in (plan.copies_out, plan.copies_in):
            parts.append(np.array(copies, np.uint32).tobytes())
        parts += [_admission(each.request) for each in plan.admitted]
        return b"".join(parts + chunks)


def _admission(request: Request) -> bytes:
    sampling = request.params.sampling
    is_scored = isinstance(sampling, Sampling) and sampling.prompt_logprobs is not None
    blocks = request.kv.blocks
    head = ADMISSION.pack(request.row, request.num_prompt, request.limit, len(blocks), is_scored)
    return head + np.array(blocks, np.uint32).tobytes()


def _chunk(chunk: Chunk) -> bytes:
    request, start, end, store_from, is_last = chunk
    tokens = np.frombuffer(request.tokens[start:end], np.intc)
    head = CHUNK.pack(request.row, start, end, store_from, is_last) + tokens.tobytes()
    return head + _sampling(request, end) if is_last else head


def _sampling(request: Request, num_known: int) -> bytes:
    """What a device needs to sample a row; `num_known` tokens are known."""
    sampling = sampling_of(request.id, request.params.sampling)
    has_processor = (
        sampling.edits_logits or num_known - request.num_prompt < request.params.min_tokens
    )
    seed = sampling.seed_of(request.sample)
    return SAMPLING.pack(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed,
        has_processor or sampling.logprobs is not None,
    )  # fmt: skip


class PlanDecoder:
    """Decodes plans on a rank, and keeps a request for each row."""

    def __init__(self, num_rows: int) -> None:
        self._row_type = row_type(num_rows)
        self._rows: Rows = np.zeros(0, np.intp)
        self._decodes: list[Request] = []
        self._requests: dict[int, Request] = {}
        self._data, self._at = b"", 0

    def decode(self, data: bytes) -> Plan:
        self._data, self._at = data, 0
        has_rows, num_steps, num_decodes, new, num_out, num_in, admitted, chunks = self._take(
            HEADER
        )
        if has_rows:
            self._rows = self._array(num_decodes, self._row_type).astype(np.intp)
            self._decodes = [self._requests[row] for row in self._rows.tolist()]
        rows = self._array(new, self._row_type).tolist()
        blocks = self._array(new, np.dtype(np.uint32)).tolist()
        plan = Plan(0, decodes=self._decodes, rows=self._rows, num_steps=num_steps)
        plan.copies_out, plan.copies_in = self._copies(num_out), self._copies(num_in)
        plan.admitted = [self._admission() for _ in range(admitted)]
        plan.new_blocks = [
            (self._requests[row], block) for row, block in zip(rows, blocks, strict=True)
        ]
        plan.chunks = [self._chunk() for _ in range(chunks)]
        return plan

    def _take(self, layout: struct.Struct) -> tuple[int, ...]:
        self._at += layout.size
        return layout.unpack_from(self._data, self._at - layout.size)

    def _array(self, count: int, kind: np.dtype[np.unsignedinteger]) -> np.ndarray:
        found = np.frombuffer(self._data, kind, count, self._at) if count else np.zeros(0, kind)
        self._at += found.nbytes
        return found

    def _copies(self, count: int) -> list[Copy]:
        pairs = self._array(2 * count, np.dtype(np.uint32)).tolist()
        return [Copy(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def _admission(self) -> Admission:
        row, num_prompt, limit, num_blocks, is_scored = self._take(ADMISSION)
        sampling = Sampling(prompt_logprobs=0) if is_scored else None
        known = array("i", bytes(4 * num_prompt)) if is_scored else array("i", (0,))
        request = Request(str(row), known, RequestParams(sampling=sampling))
        request.row, request.num_prompt, request.limit = row, num_prompt, limit
        request.kv.blocks = self._array(num_blocks, np.dtype(np.uint32)).tolist()
        self._requests[row] = request
        return Admission(request, 0, 0, False)

    def _chunk(self) -> Chunk:
        row, start, end, store_from, is_last = self._take(CHUNK)
        request = self._requests[row]
        tokens = self._array(end - start, np.dtype(np.uint32)).tolist()
        known = request.prompt
        known.frombytes(bytes(4 * max(0, end - len(known))))  # positions that were cached
        known[start:end] = array("i", tokens)
        if is_last:
            request.prompt = known[:end]
            request.params = self._params(request)
        return Chunk(request, start, end, store_from, bool(is_last))

    def _params(self, request: Request) -> RequestParams:
        temperature, top_k, top_p, min_p, seed, needs_host = self._take(SAMPLING)
        before = request.params.sampling
        return RequestParams(
            sampling=Sampling(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
                logprobs=0 if needs_host else None,
                prompt_logprobs=before.prompt_logprobs if isinstance(before, Sampling) else None,
            )
        )  # fmt: skip
