"""An executor that checks every read and write of a KV cache, and an oracle for its outputs.

A cache slot holds a node of a trie: one salt and all tokens up to and including its position. So
one comparison checks both the content and the position of a slot. The executor keeps rows as a GPU
does: positions, last tokens and block tables are stored here, change only as a plan says, and are
compared with the scheduler's tables at every launch. A plan runs when it is launched; this equals
an execution in order. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headway.plan import Chunk, Draft, Plan, StepResult
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler

VOCABULARY = 8
EOS = 0
MASK = (1 << 64) - 1


class ShadowError(AssertionError):
    """A plan reads or writes a wrong slot, or states something that is not true."""


def fold(state: int, token: int) -> int:
    """The state of the model after one more token."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & MASK


def draw(state: int, seed: int) -> int:
    """The next token; it depends only on the tokens so far and on the request's seed."""
    mixed = (state ^ (seed * 0x9E3779B97F4A7C15)) & MASK
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    return (mixed ^ (mixed >> 33)) % VOCABULARY


def oracle(
    prompt: Iterable[int], params: RequestParams, max_model_len: int
) -> tuple[list[int], str]:
    """The output of a request that runs alone, and its finish reason."""
    state, num_prompt = 0, 0
    for token in prompt:
        state, num_prompt = fold(state, token), num_prompt + 1
    room = max_model_len - num_prompt
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    output: list[int] = []
    while len(output) < most:
        assert isinstance(params.sampling, int), "params.sampling must be the seed"
        output.append(draw(state, params.sampling))
        state = fold(state, output[-1])
        if output[-1] in params.stops and len(output) >= params.min_tokens:
            return output, "stop"
    return output, "length"


class Trie:
    """Numbers every prefix, per salt."""

    def __init__(self) -> None:
        self._children: dict[tuple[int | str, int], int] = {}
        self._parents: list[int | str] = []  # the salt for a first token
        self._tokens: list[int] = []
        self.states: list[int] = []
        self._blocks: dict[int, tuple[list[int | None], int | None]] = {}

    def child(self, parent: int | str, token: int) -> int:
        """The node for `token` after `parent`, which is a node or a salt."""
        node = self._children.get((parent, token))
        if node is None:
            node = self._children[parent, token] = len(self._tokens)
            self._parents.append(parent)
            self._tokens.append(token)
            self.states.append(fold(self.states[parent] if isinstance(parent, int) else 0, token))
        return node

    def path(self, salt: str, tokens: Iterable[int]) -> list[int]:
        """The nodes of all prefixes, shortest first."""
        nodes: list[int] = []
        parent: int | str = salt
        for token in tokens:
            parent = self.child(parent, token)
            nodes.append(parent)
        return nodes

    def block(self, node: int, size: int) -> tuple[list[int | None], int | None]:
        """The nodes of the full block that ends with this node, and the node before the block."""
        if node not in self._blocks:
            nodes: list[int | None] = []
            parent: int | str = node
            while isinstance(parent, int):
                nodes.append(parent)
                parent = self._parents[parent]
            if len(nodes) % size:
                raise ShadowError(f"token {len(nodes)} is not the last of a block of {size}")
            above = nodes[size] if len(nodes) > size else None
            self._blocks[node] = nodes[:size][::-1], above
        return self._blocks[node]


Slots = list[list[int | None]]


def blank(num_blocks: int, block_size: int) -> Slots:
    return [[None] * block_size for _ in range(num_blocks)]


@dataclass(slots=True, eq=False)
class Row:
    """A row of the executor's tables."""

    owner: Request
    blocks: list[int]
    path: list[int] = field(default_factory=list)  # nodes of the computed tokens
    token: int | None = None  # the last sampled token, which the next decode reads


@dataclass(slots=True)
class Handle:
    """A launched plan; `wait` returns its result."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class ShadowExecutor:
    """Runs plans against slots; ShadowError at the first inconsistency."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self._scheduler = scheduler  # read only
        self._size = config.block_size
        self.trie = Trie()
        self.device = blank(config.num_blocks, config.block_size)
        self.host = blank(config.num_host_blocks, config.block_size)
        self.rows: dict[int, Row] = {}
        self._node_of: dict[bytes, int] = {}  # of every key that was ever published
        self._key_of: dict[int, bytes] = {}
        self._below: dict[int, set[bytes]] = {}  # keys of the blocks after the one with this node
        self._checked: dict[int, bytes] = {}  # keys of published blocks, unless written since
        self._num_checked = 0  # of published blocks, at the last check
        self._checked_keys: list[bytes | None] = []  # of all blocks, at the last check
        self._checked_index: dict[bytes, int] = {}

    def launch(self, plan: Plan) -> Handle:
        """Run the copies out, the copies in, then the forward passes."""
        self._update_rows(plan)
        if plan.copies_out or plan.copies_in:
            self._copy(plan)
        ends: list[list[Request]] = []
        result = StepResult()
        self._forward(plan, plan.chunks, result, ends)
        for _ in range(plan.num_steps - 1):
            self._forward(plan, [], result, ends)
        self._check_lengths(plan, ends)
        return Handle(result)

    def _copy(self, plan: Plan) -> None:
        for copies in (plan.copies_out, plan.copies_in):
            if len({copy.target for copy in copies}) != len(copies):
                raise ShadowError(f"a block is the target of two copies in {copies}")
        for copy in plan.copies_out:
            self.host[copy.target] = list(self.device[copy.source])
        for copy in plan.copies_in:
            self.device[copy.target] = list(self.host[copy.source])
            self._checked.pop(copy.target, None)
        self._check_copies_in(plan)

    def crash(self, plans: Iterable[Plan]) -> None:
        """Lose the device's content, and what the plans were copying to the host."""
        self.device = blank(len(self.device), self._size)
        self._checked.clear()
        self.rows.clear()
        for copy in (c for plan in plans for c in plan.copies_out):
            self.host[copy.target] = [None] * self._size

    # Rows.

    def _update_rows(self, plan: Plan) -> None:
        """Apply the plan's changes to the rows, and compare them with the scheduler's tables."""
        for admission in plan.admitted:
            request = admission.request
            self.rows[request.row] = Row(request, list(request.kv.blocks))
        working = plan.requests
        taken = [request.row for request in working]
        most = self._scheduler.config.max_num_seqs
        if len(set(taken)) != len(taken) or (taken and not 0 <= min(taken) <= max(taken) < most):
            raise ShadowError(f"rows {taken} are not distinct rows below max_num_seqs")
        if [*plan.rows] != taken[: len(plan.decodes)]:
            raise ShadowError(f"the decodes have rows {taken}, but the plan has {plan.rows}")
        for request, block in plan.new_blocks:
            self._row(request).blocks.append(block)
        for request in working:
            if self._row(request).blocks != request.kv.blocks:
                raise ShadowError(
                    f"{request}: the device's block table is {self._row(request).blocks}, "
                    f"the scheduler's is {request.kv.blocks}"
                )
        context = sum(len(self._row(request).path) for request in plan.decodes)
        if context != plan.decode_context:
            raise ShadowError(f"decode_context is {plan.decode_context}, not {context}")

    def _row(self, request: Request) -> Row:
        row = self.rows.get(request.row)
        if row is None or row.owner is not request:
            raise ShadowError(f"{request} does not own row {request.row}")
        return row

    def _check_copies_in(self, plan: Plan) -> None:
        """Blocks copied from the host hold the tokens that the admitted requests expect there."""
        targets = {copy.target for copy in plan.copies_in}
        for request, num_cached, num_swapped, *_ in plan.admitted:
            path = self.trie.path(request.params.salt, request.tokens)
            for place, block in enumerate(request.kv.blocks):
                if block in targets:
                    targets.discard(block)
                    first = place * self._size
                    expected = path[first : min(first + self._size, num_cached + num_swapped)]
                    if self.device[block][: len(expected)] != expected:
                        raise ShadowError(
                            f"{request}: wrong content in block {place} from the host"
                        )
        if targets:
            raise ShadowError(f"no admitted request holds blocks {targets}, which were copied in")

    # The forward pass: all stores, then all reads.

    def _forward(
        self, plan: Plan, chunks: list[Chunk], result: StepResult, ends: list[list[Request]]
    ) -> None:
        rows = [self._row(request) for request in plan.decodes]
        live = [len(row.path) < row.owner.limit - 1 for row in rows]
        growing = [row for row, lives in zip(rows, live, strict=True) if lives]
        stores: dict[tuple[int, int], tuple[Request, int]] = {}
        for chunk in chunks:
            self._store_chunk(chunk, plan, stores)
        for row in growing:
            self._store_token(row, stores)
        drafts = plan.drafts if chunks is plan.chunks else []
        for draft in drafts:
            self._store_draft(draft, stores)
        self._write(stores)
        for row in rows:
            self._read(row)
        for draft in drafts:
            self._read(self._row(draft.request))
            result.draft_tokens.append(self._verify(draft))
        for chunk in chunks:
            self._read(self._row(chunk.request))
        sampled = [self._row(chunk.request) for chunk in chunks if chunk.is_last]
        result.first_tokens += [self._sample(row) for row in sampled]
        if rows:  # past its end a row may sample anything; EOS would do the most harm
            column = [
                self._sample(r) if lives else EOS for r, lives in zip(rows, live, strict=True)
            ]
            result.decode_tokens.append(
                np.array(column, dtype=np.intc) if plan.step % 2 else column
            )
        growing += sampled
        ends.append([r.owner for r in growing if len(r.path) >= r.owner.limit - 1])

    def _store_chunk(
        self, chunk: Chunk, plan: Plan, stores: dict[tuple[int, int], tuple[Request, int]]
    ) -> None:
        request, start, end, store_from, is_last = chunk
        row, num_known = self._row(request), len(request.tokens)
        path = self.trie.path(request.params.salt, request.tokens[:end])
        admission = next((a for a in plan.admitted if a.request is request), None)
        expected = len(row.path)
        if admission:
            expected = admission.num_cached + admission.num_swapped
        if start != expected or row.path != path[: len(row.path)]:
            raise ShadowError(f"{request}: the chunk starts at {start} instead of {expected}")
        if not start < end <= num_known or not start <= store_from <= end:
            raise ShadowError(f"{request}: chunk [{start}, {end}) has store_from={store_from}")
        if is_last != (end == num_known) or row.token is not None:
            raise ShadowError(f"{request}: chunk ends at {end}/{num_known} with is_last={is_last}")
        row.path = path
        for position in range(store_from, end):
            self._store(row, position, stores)

    def _store_draft(
        self, draft: Draft, stores: dict[tuple[int, int], tuple[Request, int]]
    ) -> None:
        row, known = self._row(draft.request), draft.request.tokens
        if draft.start != len(known) - 1 or not 0 < draft.count == len(draft.tokens):
            raise ShadowError(f"{draft}: {len(known)} tokens are known")
        if draft.end >= draft.request.limit:
            raise ShadowError(f"{draft} exceeds the limit of {draft.request}")
        for token in (None, *draft.tokens):
            row.token = row.token if token is None else token
            self._store_token(row, stores)

    def _verify(self, draft: Draft) -> list[int]:
        """Sample until a token is not the next draft; the row forgets the drafts that were wrong."""
        row, gained = self._row(draft.request), list[int]()
        path = row.path
        for end in range(draft.start + 1, draft.end + 1):
            row.path = path[:end]
            gained.append(self._sample(row))
            if draft.tokens[len(gained) - 1 : len(gained)] != (gained[-1],):
                break
        del row.blocks[-(-len(row.path) // self._size) :]
        return gained

    def _store_token(self, row: Row, stores: dict[tuple[int, int], tuple[Request, int]]) -> None:
        request, position = row.owner, len(row.path)
        if row.token is None:
            raise ShadowError(f"{request} decodes before its prompt is computed")
        row.path.append(self.trie.child(row.path[-1], row.token))
        self._store(row, position, stores)

    def _store(
        self, row: Row, position: int, stores: dict[tuple[int, int], tuple[Request, int]]
    ) -> None:
        place, offset = divmod(position, self._size)
        if place >= len(row.blocks):
            raise ShadowError(f"{row.owner}: no block for position {position}")
        slot = row.blocks[place], offset
        if slot in stores:
            raise ShadowError(f"{row.owner} and {stores[slot][0]} both store into slot {slot}")
        stores[slot] = row.owner, position

    def _write(self, stores: dict[tuple[int, int], tuple[Request, int]]) -> None:
        """Write all stores; every other holder of a block must expect the same content."""
        touched = {block for block, _ in stores}
        for block in touched:
            self._checked.pop(block, None)
        holders = [
            (request, place, block)
            for request in self._scheduler.running
            for place, block in enumerate(request.kv.blocks)
            if block in touched
        ]
        for (block, offset), (request, position) in stores.items():
            node = self._row(request).path[position]
            for other, place, held in holders:
                if held != block or other is request:
                    continue
                if self._expected(other, place * self._size + offset) != node:
                    raise ShadowError(f"{request} overwrites block {block} of {other}")
            self.device[block][offset] = node

    def _expected(self, request: Request, position: int) -> int | None:
        """The node that a request expects at a position; None if its token is not known yet."""
        path = self._row(request).path  # first: reading `tokens` may flush the token buffer
        if position >= len(path):
            path = self.trie.path(request.params.salt, request.tokens)
        return path[position] if position < len(path) else None

    def _read(self, row: Row) -> None:
        """Check every slot that attention reads for this row."""
        path, size = row.path, self._size
        for place in range(-(-len(path) // size)):
            expected = path[place * size : (place + 1) * size]
            if self.device[row.blocks[place]][: len(expected)] != expected:
                raise ShadowError(f"{row.owner} reads wrong content in its block {place}")

    def _sample(self, row: Row) -> int:
        seed = row.owner.params.sampling
        assert isinstance(seed, int)
        row.token = draw(self.trie.states[row.path[-1]], seed)
        return row.token

    # The scheduler's lengths and its prefix index.

    def _check_lengths(self, plan: Plan, ends: list[list[Request]]) -> None:
        """num_computed equals the rows' lengths; requests reach their limit as the plan says."""
        for request in (*plan.decodes, *(chunk.request for chunk in plan.chunks)):
            if request.num_computed != len(self._row(request).path):
                raise ShadowError(f"{request}: {len(self._row(request).path)} tokens are computed")
        ending = [set(requests) for requests in self._scheduler.last_planned.reaching_limit]
        ending += [set()] * (len(ends) - len(ending))
        if ending != [set(requests) for requests in ends]:
            raise ShadowError(f"reaching_limit is {ending}; by their lengths it is {ends}")

    def check_index(self) -> None:
        """Every published block holds the content of its key, and its prefix is published too."""
        index = self._scheduler.kv.pool.index
        is_same = (index.key_of, index.block_of) == (self._checked_keys, self._checked_index)
        if is_same and len(self._checked) == self._num_checked:  # none was written since
            return
        named = {block: key for block, key in enumerate(index.key_of) if key is not None}
        if set(index.block_of) != set(named.values()):
            raise ShadowError("block_of and key_of contain different keys")
        if [named.get(block) for block in index.block_of.values()] != list(index.block_of):
            raise ShadowError("block_of maps a key to a block with another key")
        for block, key in named.items() - self._checked.items():
            slots = self.device[block]
            last = slots[-1]
            nodes, above = self.trie.block(last, self._size) if last is not None else ([], None)
            if last is None or slots != nodes:
                raise ShadowError(f"block {block} is published but not full")
            if above is not None:
                self._below.setdefault(above, set()).add(key)
            if self._node_of.setdefault(key, last) != last:
                raise ShadowError(f"block {block} is published with the key of other content")
            if self._key_of.setdefault(last, key) != key:
                raise ShadowError(f"block {block} has another key than a block of equal content")
        self._check_prefixes(index.block_of)
        self._checked, self._checked_index = named, dict(index.block_of)
        self._checked_keys, self._num_checked = list(index.key_of), len(named)

    def _check_prefixes(self, block_of: dict[bytes, int]) -> None:
        """The block before each published one is published too; only changed keys can break this."""
        missing = [key for key in self._checked_index if key not in block_of]
        orphans = {key for each in missing for key in self._below.get(self._node_of[each], ())}
        for key in block_of.keys() - self._checked_index.keys():
            above = self.trie.block(self._node_of[key], self._size)[1]
            if above is not None and self._key_of.get(above) not in block_of:
                orphans.add(key)
        for key in orphans & block_of.keys():
            raise ShadowError(f"block {block_of[key]} is published but its prefix is not")
