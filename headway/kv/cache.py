"""The KV cache as the scheduler sees it: what would an admission need, reserve, grow, give back.

Owns the device pool and the host pool. Keeps what a request holds in `request.kv`. Decides
nothing: who is admitted, who is evicted and whether a victim is swapped is asked elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.kv.pool import BlockPool
from headway.kv.prefix_index import extend_keys
from headway.plan import Copy
from headway.request import HostCopy, Request


class AdmissionCost(NamedTuple):
    """What admitting a request would take; valid until the next change of the cache."""

    num_hits: int  # leading blocks found in the device's cache
    num_blocks: int  # for every known token
    num_computed: int  # tokens that need no computing, from cache and host together
    uses_host: bool


class KVCache:
    """Blocks on the device, blocks on the host, and what they hold."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host = BlockPool(num_host_blocks)
        self._leaving_host: list[int] = []

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def survey(self, request: Request) -> AdmissionCost:
        """Look up the longest prefix on the device, and what the host can add to it."""
        held, num_tokens = request.kv, request.num_known
        if len(held.keys) < num_tokens // self.block_size:
            extend_keys(held.keys, request, self.block_size)
        num_hits = self.pool.index.match(held.keys)
        if not request.params.reads_cache:  # but what it has computed itself it may read again
            num_hits = min(num_hits, request.history.max_num_computed // self.block_size)
        num_computed, host = num_hits * self.block_size, held.host
        uses_host = host is not None and host.first <= num_hits and host.num_tokens > num_computed
        if host is not None and uses_host:
            num_computed = host.num_tokens
        # A request found complete still computes its last token: the next one comes from it.
        num_computed = min(num_computed, num_tokens - 1)
        return AdmissionCost(num_hits, self.blocks_for(num_tokens), num_computed, uses_host)

    def num_taken(self, request: Request, survey: AdmissionCost) -> int:
        """Free blocks that the admission would use up: new ones, and hits that nobody holds."""
        block_of, refs = self.pool.index.block_of, self.pool.refs
        keys = request.kv.keys[: survey.num_hits]
        return survey.num_blocks - sum(refs[block_of[key]] > 0 for key in keys)

    def reserve(self, request: Request, survey: AdmissionCost) -> list[Copy]:
        """Give the request blocks for every known token; the copies that bring in host blocks."""
        held, pool = request.kv, self.pool
        hits = list(map(pool.index.block_of.__getitem__, held.keys[: survey.num_hits]))
        pool.share(hits)  # before taking any, so that no hit is evicted for its own request
        held.blocks += hits
        held.blocks += pool.take(survey.num_blocks - survey.num_hits)
        copies: list[Copy] = []
        if held.host is not None:
            if survey.uses_host:
                sources = held.host.blocks[survey.num_hits - held.host.first :]
                copies = list(map(Copy, sources, held.blocks[survey.num_hits :]))
                self.publish(request, survey.num_hits, survey.num_computed // self.block_size)
            self.discard_host_copy(request)
        return copies

    def publish(self, request: Request, start: int, end: int) -> None:
        """Make blocks [start, end) of a request matchable; they are full once the plan has run."""
        held = request.kv
        self.pool.index.add(held.blocks[start:end], held.keys[start:end])

    def release(self, request: Request) -> None:
        """Give back every block; what is full and known stays matchable until it is taken."""
        held = request.kv
        num_known = min(request.num_computed, request.num_known) // self.block_size
        if num_known > len(held.keys):
            extend_keys(held.keys, request, self.block_size)
        self.publish(request, 0, num_known)
        for block in reversed(held.blocks):  # tail first, so that a prefix outlives its tail
            self.pool.drop(block)
        held.blocks.clear()

    def swap_out(self, request: Request) -> list[Copy] | None:
        """Keep the request's blocks on the host and release them; None if the host is full.

        Leading blocks that others hold too are not copied: they are likely to stay.
        """
        held, refs = request.kv, self.pool.refs
        num_used = self.blocks_for(request.num_computed)
        first = 0
        while first < num_used and refs[held.blocks[first]] > 1:
            first += 1
        if not num_used > first or self.host.num_free < num_used - first:
            return None
        targets = self.host.take(num_used - first)
        copies = list(map(Copy, held.blocks[first:num_used], targets))
        held.host = HostCopy(first, targets, request.num_computed)
        self.release(request)
        return copies

    def discard_host_copy(self, request: Request) -> None:
        """Give up host blocks; they are free from the next plan on (this one may read them)."""
        if request.kv.host is not None:
            self._leaving_host += request.kv.host.blocks
            request.kv.host = None

    def settle_host(self) -> None:
        """The plan that may read the given-up host blocks is made: later plans may write them."""
        for block in self._leaving_host:
            self.host.drop(block)
        self._leaving_host.clear()

    def blocks_of(self, request: Request) -> list[int]:
        """Blocks it holds or, while it waits, would find in the cache."""
        keys, index = request.kv.keys, self.pool.index
        return request.kv.blocks or [index.block_of[key] for key in keys[: index.match(keys)]]

    def num_private_blocks(self, request: Request) -> int:
        """Blocks that would become free if the request left."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for block in request.kv.blocks)
