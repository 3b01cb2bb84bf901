"""The KV cache as the scheduler sees it: the cost of an admission, allocation, release, swap.

Owns the device pool and the host pool, and keeps each request's allocation in `request.kv`. Makes
no decisions: the scheduler chooses which request is admitted, preempted or swapped.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.kv.pool import BlockPool
from headway.kv.prefix_index import extend_keys
from headway.kv.window import WindowCache
from headway.plan import Blocked, Copy, Plan
from headway.request import HostCopy, Request


class AdmissionCost(NamedTuple):
    """What admitting a request would take; valid until the cache changes."""

    num_hits: int  # leading blocks found in the device's cache
    num_blocks: int  # for all known tokens
    num_computed: int  # tokens found in cache and host copy together
    uses_host: bool
    num_window_blocks: int  # to reserve for the sliding-window layers


class KVCache:
    """Blocks on the device, blocks on the host, and their content."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        window: WindowCache | None = None,
    ) -> None:
        self.block_size = block_size
        self.window = window  # None: the model has no sliding-window layers
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self._leaving_host: list[int] = []

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_window_free(self) -> int:
        """Blocks of the sliding-window layers that no running request has reserved."""
        return 0 if self.window is None else self.window.num_unreserved

    @property
    def is_unused(self) -> bool:
        """Whether no request holds or reserves a block, on the device or on the host."""
        pools = [self.pool, self.host]
        if self.window is not None:
            pools.append(self.window.pool)
            if self.window.num_unreserved < self.window.pool.num_blocks:
                return False
        return all(pool.num_free == pool.num_blocks for pool in pools)

    def start_plan(self, plan: Plan) -> None:
        """From now on this plan gets new entries of block tables for sliding-window layers."""
        if self.window is not None:
            self.window.new_entries = plan.window_blocks

    def admission_cost(self, request: Request) -> AdmissionCost:
        """Look up the longest prefix in the device's cache, and what the host copy adds to it."""
        kv, num_tokens = request.kv, request.num_known
        num_hits = self._num_hits(request, num_tokens)
        num_computed, host = num_hits * self.block_size, kv.host
        uses_host = host is not None and host.first <= num_hits and host.num_tokens > num_computed
        if host is not None and uses_host:
            num_computed = host.num_tokens
        # The last token is computed even after a full hit: the next one is sampled from it.
        num_computed = min(num_computed, num_tokens - 1)
        num_window = self.window.num_needed(request, num_computed) if self.window else 0
        num_blocks = -(-num_tokens // self.block_size)
        return AdmissionCost(num_hits, num_blocks, num_computed, uses_host, num_window)

    def _num_hits(self, request: Request, num_tokens: int) -> int:
        """Leading blocks that all layers have in the device's cache and the request may read."""
        keys = request.kv.keys  # of all full blocks, or up to one without a hit: no later one has
        if not keys:
            extend_keys(keys, request, self.block_size, 1)
        if len(keys) < num_tokens // self.block_size and keys[-1] in self.pool.index.block_of:
            extend_keys(keys, request, self.block_size)
        if not request.params.reads_cache:  # tokens that it computed itself may still be read
            keys = keys[: request.history.max_num_computed // self.block_size]
        num_hits = self.pool.index.match(keys)
        return num_hits if self.window is None else self.window.num_usable(keys, num_hits)

    def num_blocks_needed(self, request: Request, cost: AdmissionCost) -> int:
        """Free blocks that the admission uses up: new blocks, and hits without a holder."""
        block_of, refs = self.pool.index.block_of, self.pool.refs
        keys = request.kv.keys[: cost.num_hits]
        return cost.num_blocks - sum(refs[block_of[key]] > 0 for key in keys)

    def check_admission(self, request: Request, cost: AdmissionCost) -> Blocked | None:
        """Blocked if blocks that the admission takes are not free."""
        need, free = cost.num_blocks - cost.num_hits, self.num_free
        if need <= free < cost.num_blocks:  # it depends on how many hits have holders
            need = self.num_blocks_needed(request, cost)
        if need > free:
            return Blocked(request, "blocks", need, free)
        if cost.num_window_blocks > self.num_window_free:
            have = self.num_window_free
            return Blocked(request, "window_blocks", cost.num_window_blocks, have)
        return None

    def num_missing(self, request: Request, num_more: int) -> tuple[int, int]:
        """Blocks, and blocks of sliding-window layers, to free for an admission and `num_more`."""
        cost = self.admission_cost(request)
        num_blocks = self.num_blocks_needed(request, cost) + num_more
        return num_blocks - self.num_free, cost.num_window_blocks - self.num_window_free

    def num_freed(self, request: Request) -> tuple[int, int]:
        """Blocks, and blocks of sliding-window layers, that become free if the request leaves."""
        window = request.kv.window
        return self.num_private_blocks(request), 0 if window is None else window.num_reserved

    def allocate(self, request: Request, cost: AdmissionCost) -> list[Copy]:
        """Give the request blocks for all known tokens; returns the copies from the host."""
        kv, pool = request.kv, self.pool
        hits = list(map(pool.index.block_of.__getitem__, kv.keys[: cost.num_hits]))
        pool.share(hits)  # before taking blocks, so that no hit is evicted for its own request
        kv.blocks += hits
        kv.blocks += pool.take(cost.num_blocks - cost.num_hits)
        if self.window is not None:
            self.window.allocate(request, cost.num_hits, cost.num_computed)
        copies: list[Copy] = []
        if kv.host is not None:
            if cost.uses_host:
                sources = kv.host.blocks[cost.num_hits - kv.host.first :]
                copies = list(map(Copy, sources, kv.blocks[cost.num_hits :]))
                self.publish(request, cost.num_hits, cost.num_computed // self.block_size)
            self.discard_host_copy(request)
        return copies

    def append_blocks(self, requests: list[Request]) -> list[tuple[Request, int]]:
        """Give each request one more block; the caller has checked that they are free."""
        added = list(zip(requests, self.pool.take(len(requests)), strict=True))
        for request, block in added:
            request.kv.blocks.append(block)
        if self.window is not None:
            for request in requests:
                self.window.extend(request, request.num_computed, request.num_computed + 1)
        return added

    @property
    def max_drafts(self) -> int | None:
        """The most drafts that a request has blocks of sliding-window layers for; None: any number."""
        return None if self.window is None else self.window.max_drafts

    def num_slots(self, request: Request, num_more: int) -> int:
        """Tokens for which a decoding request has blocks if it gets `num_more` for drafts.

        The block that its next token needs is not one of them.
        """
        num_due = request.num_computed % self.block_size == 0
        return (len(request.kv.blocks) + num_due + max(0, num_more)) * self.block_size

    def extend(self, request: Request, start: int, end: int) -> list[tuple[Request, int]]:
        """Give a request the blocks for tokens [start, end) that it lacks; they must be free."""
        blocks = request.kv.blocks
        added = self.pool.take(max(0, -(-end // self.block_size) - len(blocks)))
        blocks += added
        if self.window is not None:
            self.window.extend(request, start, end)
        return [(request, block) for block in added]

    def cut(self, request: Request, end: int) -> None:
        """Free the blocks of a request after those of tokens before `end`; they have no keys."""
        blocks = request.kv.blocks
        first = -(-end // self.block_size)
        self.pool.drop(reversed(blocks[first:]))
        del blocks[first:]
        if self.window is not None:
            self.window.cut(request, end)

    def store(self, request: Request, start: int, end: int) -> int:
        """Hold and publish the blocks of tokens [start, end), which the plan computes.

        Returns the first token to store: only a full hit starts in a published block, which must
        not be written.
        """
        first = request.kv.blocks[start // self.block_size]
        is_stored = self.pool.index.key_of[first] is not None
        if self.window is not None:
            self.window.extend(request, start, end)
        self.publish(request, start // self.block_size, end // self.block_size)
        return end if is_stored else start

    def end_prefill(self, request: Request) -> None:
        """From now on the request decodes; called when the plan has been built."""
        if self.window is not None:
            self.window.end_prefill(request)

    def publish(self, request: Request, start: int, end: int) -> None:
        """Make blocks [start, end) of a request matchable; they are full once the plan has run."""
        kv = request.kv
        if len(kv.keys) < end:
            extend_keys(kv.keys, request, self.block_size, end)
        self.pool.index.add(kv.blocks[start:end], kv.keys[start:end])
        if self.window is not None:
            self.window.publish(request, start, end)

    def release(self, request: Request) -> None:
        """Free all blocks of a request; full blocks of known tokens stay matchable."""
        kv = request.kv
        num_known = min(request.num_computed, request.num_known) // self.block_size
        key_of, first = self.pool.index.key_of, num_known
        while first and key_of[kv.blocks[first - 1]] is None:  # blocks are published in order
            first -= 1
        self.publish(request, first, num_known)
        self.pool.drop(reversed(kv.blocks))  # tail first, so that a prefix outlives its tail
        kv.blocks.clear()
        if self.window is not None:
            self.window.release(request)

    def forget_all(self) -> None:
        """Forget the content of all blocks on the device."""
        self.pool.forget_all()
        if self.window is not None:
            self.window.pool.forget_all()

    def import_prefix(self, request: Request) -> None:
        """Cache the full blocks of a prompt that was computed elsewhere, as far as blocks are free."""
        extend_keys(request.kv.keys, request, self.block_size)
        keys, index = request.kv.keys, self.pool.index
        blocks = [index.block_of[key] for key in keys[: index.match(keys)]]
        self.pool.share(blocks)  # so that none of them is evicted for the others
        new = self.pool.take(min(len(keys) - len(blocks), self.pool.num_free))
        index.add(new, keys[len(blocks) : len(blocks) + len(new)])
        self.pool.drop(reversed(blocks + new))

    def trim_keys(self, request: Request) -> None:
        """Forget the keys of blocks beyond the known tokens."""
        del request.kv.keys[request.num_known // self.block_size :]

    def swap_out(self, request: Request) -> list[Copy] | None:
        """Copy the request's blocks to the host and release them; None if the host is full.

        Leading blocks that other requests hold too are not copied: they are likely to stay.
        """
        kv, refs = request.kv, self.pool.refs
        num_used = -(-request.num_computed // self.block_size)
        first = 0
        while first < num_used and refs[kv.blocks[first]] > 1:
            first += 1
        if not num_used > first or self.host.num_free < num_used - first:
            return None
        targets = self.host.take(num_used - first)
        copies = list(map(Copy, kv.blocks[first:num_used], targets))
        kv.host = HostCopy(first, targets, request.num_computed)
        self.release(request)
        return copies

    def discard_host_copy(self, request: Request) -> None:
        """Mark the request's host blocks for release; the current plan may still read them."""
        if request.kv.host is not None:
            self._leaving_host += request.kv.host.blocks
            request.kv.host = None

    def free_host_blocks(self) -> None:
        """Free host blocks that are marked for release; called when the plan has been built."""
        if self._leaving_host:
            self.host.drop(self._leaving_host)
            self._leaving_host.clear()

    def blocks_of(self, request: Request) -> list[int]:
        """Blocks that a running request holds, or that a waiting one would use from the cache."""
        if request.kv.blocks:
            return request.kv.blocks
        num_hits, block_of = self._num_hits(request, request.num_known), self.pool.index.block_of
        return list(map(block_of.__getitem__, request.kv.keys[:num_hits]))

    def num_private_blocks(self, request: Request) -> int:
        """Blocks that become free if the request leaves."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for block in request.kv.blocks)
