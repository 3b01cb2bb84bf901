"""A fake KV cache that knows what every slot holds, and the oracle its outputs must equal.

A slot holds a node of a trie: one salt and all tokens up to and including its position. So a slot
that is read says by one comparison whether both its content and its position are right. The
executor keeps rows as a GPU would: positions, last tokens and block tables live here, are changed
only by what a plan says, and are compared with the host's view at every launch. It runs a plan when
it is launched, which is what plans that run in order amount to. Knows nothing of policies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from headway.plan import Chunk, Plan, StepResult
from headway.request import Params, Request
from headway.scheduler import Scheduler

VOCABULARY = 8
EOS = 0
MASK = (1 << 64) - 1


class ShadowError(AssertionError):
    """A plan reads, writes or promises something that is not so."""


def fold(state: int, token: int) -> int:
    """The state of a model that has read one more token."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & MASK


def draw(state: int, seed: int) -> int:
    """The token that follows, which depends on the tokens so far and the request's seed alone."""
    mixed = (state ^ (seed * 0x9E3779B97F4A7C15)) & MASK
    mixed = ((mixed ^ (mixed >> 33)) * 0xFF51AFD7ED558CCD) & MASK
    return (mixed ^ (mixed >> 33)) % VOCABULARY


def oracle(prompt: Iterable[int], params: Params, max_model_len: int) -> tuple[list[int], str]:
    """What a request generates with the model to itself, and why it ends."""
    state, num_prompt = 0, 0
    for token in prompt:
        state, num_prompt = fold(state, token), num_prompt + 1
    room = max_model_len - num_prompt
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    output: list[int] = []
    while len(output) < most:
        assert isinstance(params.sampling, int), "the seed travels as the sampling parameters"
        output.append(draw(state, params.sampling))
        state = fold(state, output[-1])
        if output[-1] in params.stops and len(output) >= params.min_tokens:
            return output, "stop"
    return output, "length"


class Trie:
    """Every prefix ever seen, under its salt, as one number."""

    def __init__(self) -> None:
        self._children: dict[tuple[int | str, int], int] = {}
        self._parents: list[int | str] = []  # the salt, at the first token
        self._tokens: list[int] = []
        self.states: list[int] = []
        self._blocks: dict[int, tuple[list[int | None], int | None]] = {}

    def child(self, parent: int | str, token: int) -> int:
        """The node of one more token after `parent`, a node or a salt."""
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
        """The nodes of the full block that ends with this one, and the last one before it."""
        if node not in self._blocks:
            nodes: list[int | None] = []
            parent: int | str = node
            while isinstance(parent, int):
                nodes.append(parent)
                parent = self._parents[parent]
            if len(nodes) % size:
                raise ShadowError(f"a block of {size} ends with token {len(nodes)}")
            above = nodes[size] if len(nodes) > size else None
            self._blocks[node] = nodes[:size][::-1], above
        return self._blocks[node]


Slots = list[list[int | None]]


def blank(num_blocks: int, block_size: int) -> Slots:
    return [[None] * block_size for _ in range(num_blocks)]


@dataclass(slots=True, eq=False)
class Row:
    """A seat as the device keeps it."""

    owner: Request
    blocks: list[int]
    path: list[int] = field(default_factory=list)  # of the tokens computed
    token: int | None = None  # sampled, and the input of the next decode


@dataclass(slots=True)
class Handle:
    """A launched plan; `wait` gives what it sampled."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class ShadowExecutor:
    """Runs plans against slots, and objects to the first thing that is wrong."""

    def __init__(self, scheduler: Scheduler) -> None:
        config = scheduler.config
        self._scheduler = scheduler  # looked at, never changed
        self._size = config.block_size
        self.trie = Trie()
        self.device = blank(config.num_blocks, config.block_size)
        self.host = blank(config.num_host_blocks, config.block_size)
        self.rows: dict[int, Row] = {}
        self._node_of: dict[bytes, int] = {}  # what every key ever published names
        self._key_of: dict[int, bytes] = {}

    def launch(self, plan: Plan) -> Handle:
        """Copies out, copies in, then one forward pass after the other."""
        self._seat(plan)
        for copies in (plan.copies_out, plan.copies_in):
            if len({copy.target for copy in copies}) != len(copies):
                raise ShadowError(f"a block is copied to twice in {copies}")
        for copy in plan.copies_out:
            self.host[copy.target] = list(self.device[copy.source])
        for copy in plan.copies_in:
            self.device[copy.target] = list(self.host[copy.source])
        self._check_arrivals(plan)
        ends: list[list[Request]] = []
        result = StepResult()
        self._forward(plan, plan.chunks, result, ends)
        for _ in range(plan.num_steps - 1):
            self._forward(plan, [], result, ends)
        self._check_promises(plan, ends)
        return Handle(result)

    def crash(self, plans: Iterable[Plan]) -> None:
        """All that was on the device is lost, and what the plans were writing to the host."""
        self.device = blank(len(self.device), self._size)
        self.rows.clear()
        for copy in (c for plan in plans for c in plan.copies_out):
            self.host[copy.target] = [None] * self._size

    # Rows: what the plan says, against what the host believes.

    def _seat(self, plan: Plan) -> None:
        """Bring the rows up to date by what changed, and compare them with the host's tables."""
        for admission in plan.admitted:
            request = admission.request
            self.rows[request.row] = Row(request, list(request.kv.blocks))
        working = [*plan.decodes, *(chunk.request for chunk in plan.chunks)]
        taken = [request.row for request in working]
        if len(set(taken)) != len(taken) or not all(
            0 <= row < self._scheduler.config.max_num_seqs for row in taken
        ):
            raise ShadowError(f"rows {taken} are not one seat for each")
        if [*plan.rows] != taken[: len(plan.decodes)]:
            raise ShadowError(f"the decodes sit in rows {taken}, the plan says {plan.rows}")
        for request, block in plan.new_blocks:
            self._row(request).blocks.append(block)
        for request in working:
            if self._row(request).blocks != request.kv.blocks:
                raise ShadowError(
                    f"{request}: the device's table is {self._row(request).blocks}, "
                    f"the host's {request.kv.blocks}"
                )
        context = sum(len(self._row(request).path) for request in plan.decodes)
        if context != plan.decode_context:
            raise ShadowError(f"decode_context is {plan.decode_context}, not {context}")

    def _row(self, request: Request) -> Row:
        row = self.rows.get(request.row)
        if row is None or row.owner is not request:
            raise ShadowError(f"{request} has not been given row {request.row}")
        return row

    def _check_arrivals(self, plan: Plan) -> None:
        """What came in from the host is what the admitted requests will take it for."""
        targets = {copy.target for copy in plan.copies_in}
        for request, num_cached, num_swapped, _ in plan.admitted:
            path = self.trie.path(request.params.salt, request.tokens)
            for place, block in enumerate(request.kv.blocks):
                if block in targets:
                    targets.discard(block)
                    first = place * self._size
                    expected = path[first : min(first + self._size, num_cached + num_swapped)]
                    if self.device[block][: len(expected)] != expected:
                        raise ShadowError(f"{request}: block {place} came back wrong from the host")
        if targets:
            raise ShadowError(f"blocks {targets} were copied in for nobody")

    # The forward pass: all stores, then all reads.

    def _forward(
        self, plan: Plan, chunks: list[Chunk], result: StepResult, ends: list[list[Request]]
    ) -> None:
        limits = [request.limit - 1 for request in plan.decodes]
        rows = [self._row(request) for request in plan.decodes]
        live = [len(r.path) < limit for r, limit in zip(rows, limits, strict=True)]
        stores: dict[tuple[int, int], tuple[Request, int]] = {}
        for chunk in chunks:
            self._store_chunk(chunk, plan, stores)
        for row, lives in zip(rows, live, strict=True):
            if lives:
                self._store_token(row, stores)
        self._write(stores)
        for row in (*rows, *(self._row(chunk.request) for chunk in chunks)):
            self._read(row)
        sampled = [chunk.request for chunk in chunks if chunk.is_last]
        result.firsts += [self._sample(self._row(request)) for request in sampled]
        if rows:  # a row past its end computes nonsense, and what nonsense does worst is stop
            column = [
                self._sample(r) if lives else EOS for r, lives in zip(rows, live, strict=True)
            ]
            result.columns.append(np.array(column, dtype=np.intc) if plan.step % 2 else column)
        growing = [r for r, lives in zip(rows, live, strict=True) if lives]
        growing += [self._row(request) for request in sampled]
        ends.append([r.owner for r in growing if len(r.path) >= r.owner.limit - 1])

    def _store_chunk(
        self, chunk: Chunk, plan: Plan, stores: dict[tuple[int, int], tuple[Request, int]]
    ) -> None:
        request, start, end, store_from, is_last = chunk
        row, num_known = self._row(request), len(request.tokens)
        path = self.trie.path(request.params.salt, request.tokens[:end])
        begun = next((a for a in plan.admitted if a.request is request), None)
        expected = begun.num_cached + begun.num_swapped if begun else len(row.path)
        if start != expected or row.path != path[: len(row.path)]:
            raise ShadowError(f"{request}: a chunk starts at {start}, not at {expected}")
        if not start < end <= num_known or not start <= store_from <= end:
            raise ShadowError(f"{request}: chunk {start}..{end} stored from {store_from}")
        if is_last != (end == num_known) or row.token is not None:
            raise ShadowError(f"{request}: chunk to {end} of {num_known} has is_last={is_last}")
        row.path = path
        for position in range(store_from, end):
            self._store(row, position, stores)

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
            raise ShadowError(f"{row.owner} and {stores[slot][0]} store into slot {slot} at once")
        stores[slot] = row.owner, position

    def _write(self, stores: dict[tuple[int, int], tuple[Request, int]]) -> None:
        """Store, once nobody else can be hurt by it: others who hold a block must expect this."""
        touched = {block for block, _ in stores}
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
                    raise ShadowError(f"{request} stores into block {block} of {other}")
            self.device[block][offset] = node

    def _expected(self, request: Request, position: int) -> int | None:
        """What a request counts on at a position; None if it cannot know yet."""
        path = self._row(request).path  # looked at first: reading `tokens` may change the host
        if position >= len(path):
            path = self.trie.path(request.params.salt, request.tokens)
        return path[position] if position < len(path) else None

    def _read(self, row: Row) -> None:
        """Every slot up to the end holds what it should."""
        path, size = row.path, self._size
        for place in range(-(-len(path) // size)):
            expected = path[place * size : (place + 1) * size]
            if self.device[row.blocks[place]][: len(expected)] != expected:
                raise ShadowError(f"{row.owner} reads something else in its block {place}")

    def _sample(self, row: Row) -> int:
        seed = row.owner.params.sampling
        assert isinstance(seed, int)
        row.token = draw(self.trie.states[row.path[-1]], seed)
        return row.token

    # What the host counts on, and what its index says.

    def _check_promises(self, plan: Plan, ends: list[list[Request]]) -> None:
        """Lengths advanced as the host counts them; who ends does so when the plan says."""
        for request in (*plan.decodes, *(chunk.request for chunk in plan.chunks)):
            if request.num_computed != len(self._row(request).path):
                raise ShadowError(f"{request} has {len(self._row(request).path)} computed")
        ending = [set(requests) for requests in plan.reaching_limit]
        ending += [set()] * (len(ends) - len(ending))
        if ending != [set(requests) for requests in ends]:
            raise ShadowError(f"the plan ends {ending}, their lengths {ends}")

    def check_index(self) -> None:
        """Every published block holds what its key names, and so do its prefixes."""
        index = self._scheduler.kv.pool.index
        named = {block: key for block, key in enumerate(index.key_of) if key is not None}
        if set(index.block_of) != set(named.values()):
            raise ShadowError("the index and the blocks' keys are not the same")
        if any(named.get(block) != key for key, block in index.block_of.items()):
            raise ShadowError("a key leads to a block of another key")
        for block, key in named.items():
            slots = self.device[block]
            last = slots[-1]
            if last is None or slots != self.trie.block(last, self._size)[0]:
                raise ShadowError(f"block {block} is published and holds no run of tokens")
            if self._node_of.setdefault(key, last) != last:
                raise ShadowError(f"block {block} is published under another's key")
            if self._key_of.setdefault(last, key) != key:
                raise ShadowError(f"block {block} has another key than its equals")
        for key in index.block_of:
            above = self.trie.block(self._node_of[key], self._size)[1]
            if above is not None and self._key_of.get(above) not in index.block_of:
                raise ShadowError(f"block {index.block_of[key]} is published, its prefix is not")
