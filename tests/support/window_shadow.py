"""The shadow executor for models with sliding-window layers: it checks their slots too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headway import Request, Scheduler
from headway.plan import Chunk, Draft, Plan
from tests.support.shadow import Row, ShadowError, ShadowExecutor, blank


class WindowShadow(ShadowExecutor):
    """Keeps a second table for each row, and the slots of the sliding-window layers.

    The tables keep entries of blocks that were given back, as a device's do.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._window = scheduler.config.sliding_window
        self.window_device = blank(scheduler.config.num_window_blocks, self._size)
        self._tables: dict[Request, dict[int, int]] = {}
        self._first: dict[Request, int] = {}  # position of the first token of the latest pass

    def crash(self, plans: Iterable[Plan]) -> None:
        super().crash(plans)
        self.window_device = blank(len(self.window_device), self._size)

    def _update_rows(self, plan: Plan) -> None:
        super()._update_rows(plan)
        for admission in plan.admitted:
            self._tables[admission.request] = {}
        for request, first, blocks in plan.window_blocks:
            self._tables[request].update(enumerate(blocks, start=first))

    def _store_chunk(
        self, chunk: Chunk, plan: Plan, stores: dict[tuple[int, int], tuple[Request, int]]
    ) -> None:
        self._first[chunk.request] = chunk.start
        super()._store_chunk(chunk, plan, stores)

    def _store_token(self, row: Row, stores: dict[tuple[int, int], tuple[Request, int]]) -> None:
        self._first[row.owner] = len(row.path)
        super()._store_token(row, stores)

    def _store_draft(
        self, draft: Draft, stores: dict[tuple[int, int], tuple[Request, int]]
    ) -> None:
        super()._store_draft(draft, stores)
        self._first[draft.request] = draft.start

    def _write(self, stores: dict[tuple[int, int], tuple[Request, int]]) -> None:
        super()._write(stores)
        written: dict[tuple[int, int], Request] = {}
        for request, position in stores.values():
            place, offset = divmod(position, self._size)
            block = self._tables[request].get(place)
            if block is None:
                raise ShadowError(f"{request}: no block of windowed layers for {position}")
            other = written.setdefault((block, offset), request)
            if other is not request:
                raise ShadowError(f"{request} and {other} both store into {block}")
            self.window_device[block][offset] = self._row(request).path[position]

    def _read(self, row: Row) -> None:
        super()._read(row)
        table = self._tables[row.owner]
        for position in range(max(0, self._first[row.owner] - self._window + 1), len(row.path)):
            place, offset = divmod(position, self._size)
            if place not in table:
                raise ShadowError(f"{row.owner} reads token {position}, which has no block")
            if self.window_device[table[place]][offset] != row.path[position]:
                raise ShadowError(f"{row.owner} reads wrong content at {position} in its window")

    def check_index(self) -> None:
        """Also: published blocks of windowed layers hold the content of their keys."""
        super().check_index()
        cache = self._scheduler.kv.window
        assert cache is not None
        for block, key in enumerate(cache.pool.index.key_of):
            if key is None:
                continue
            slots = self.window_device[block]
            if slots[-1] is None or slots != self.trie.block(slots[-1], self._size)[0]:
                raise ShadowError(f"block {block} of windowed layers is published but not full")
            if self._node_of.setdefault(key, slots[-1]) != slots[-1]:
                raise ShadowError(f"block {block} of windowed layers has the key of other content")
        self._check_accounting()

    def _check_accounting(self) -> None:
        """Reference counts are those of the running requests; none holds more than it reserved."""
        cache, running = self._scheduler.kv.window, self._scheduler.running
        assert cache is not None
        held = [request.kv.window for request in running]
        if None in held:
            raise ShadowError("a running request has no blocks of windowed layers")
        allocations = [each for each in held if each is not None]
        counts = Counter(block for each in allocations for block in each.blocks)
        if cache.pool.refs != [counts[block] for block in range(cache.pool.num_blocks)]:
            raise ShadowError(f"the holders are {counts}, the counts {cache.pool.refs}")
        reserved = sum(each.num_reserved for each in allocations)
        if cache.num_unreserved != cache.pool.num_blocks - reserved or cache.num_unreserved < 0:
            raise ShadowError(f"{reserved} reserved, {cache.num_unreserved} not reserved")
        if any(len(each.blocks) > each.num_reserved for each in allocations):
            raise ShadowError("a request holds more blocks than it reserved")
