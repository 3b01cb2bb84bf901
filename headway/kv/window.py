"""The KV blocks of sliding-window layers: a request holds only those that a later token reads.

These layers have a pool of their own. Blocks are taken as tokens are planned, and given back when
the window has passed them; a block that is given back stays cached until it is reused. A request
reserves at its admission the most blocks that it can hold at once, so no decode lacks a block.
"""

from __future__ import annotations

from headway.config import Config
from headway.kv.pool import BlockPool
from headway.plan import WindowBlocks
from headway.request import Request, WindowAllocation

MAX_DRAFTS = 8  # of a request in a step; it reserves blocks for all of them


def most_window_blocks(window: int, block_size: int, num_stored: int, num_computed: int) -> int:
    """The most blocks that a request of `num_stored` tokens holds at once.

    One plan computes at most `num_computed` of its tokens. The first of them reads `window - 1`
    tokens before it.
    """
    in_window = -(-(window + num_computed - 2) // block_size) + 1
    return min(-(-num_stored // block_size), in_window)


def most_decoded(config: Config) -> int:
    """The most tokens that a step computes of a decoding request."""
    return 1 if config.draft is None else 1 + MAX_DRAFTS


def most_useful_window_blocks(window: int, config: Config) -> int:
    """The most blocks that `max_num_seqs` requests use, one of them with its prompt not computed."""
    num_stored = config.max_model_len - 1
    at_once = min(config.max_num_batched_tokens, num_stored)
    decoded = most_decoded(config)
    decode, prefill = (
        most_window_blocks(window, config.block_size, num_stored, count)
        for count in (decoded, max(decoded, at_once))
    )
    return config.max_num_seqs * decode + prefill - decode


class WindowCache:
    """The pool of the sliding-window layers, and what running requests have reserved of it."""

    def __init__(self, config: Config) -> None:
        self.pool = BlockPool(config.num_window_blocks)
        self._window, self._block_size = config.sliding_window, config.block_size
        self._at_once = most_decoded(config)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._num_reserved = 0
        self.new_entries: list[WindowBlocks] = []  # of the plan that is being built

    @property
    def max_drafts(self) -> int:
        return self._at_once - 1

    @property
    def num_unreserved(self) -> int:
        return self.pool.num_blocks - self._num_reserved

    def num_usable(self, keys: list[bytes], num_hits: int) -> int:
        """The most of `num_hits` leading blocks that are hits here too.

        A hit needs the blocks of the last window before its end, not those before them. The window
        starts at the last token of the hit: after a full hit that token is computed again.
        """
        num_needed, cached = -(-self._window // self._block_size), self.pool.index.block_of
        end, num_found = num_hits, 0
        for place in reversed(range(num_hits)):
            if keys[place] not in cached:
                end, num_found = place, 0
                continue
            num_found += 1
            if num_found == min(num_needed, end):
                return end
        return 0

    def num_needed(self, request: Request, num_computed: int) -> int:
        """Blocks that a request reserves if it is admitted with `num_computed` tokens."""
        num_known = request.num_known
        at_once = min(self._max_num_batched_tokens, num_known - num_computed)
        prefill = most_window_blocks(self._window, self._block_size, num_known, at_once)
        return max(prefill, self._num_for_decodes(request))

    def _num_for_decodes(self, request: Request) -> int:
        return most_window_blocks(self._window, self._block_size, request.limit - 1, self._at_once)

    def allocate(self, request: Request, num_hits: int, num_computed: int) -> None:
        """Reserve blocks, and hold the hits that the next token reads; num_needed has been checked."""
        first = self._first_read(num_computed)
        block_of = self.pool.index.block_of
        hits = [block_of[key] for key in request.kv.keys[first:num_hits]]
        self.pool.share(hits)
        num_reserved = self.num_needed(request, num_computed)
        self._num_reserved += num_reserved
        request.kv.window = WindowAllocation(first, hits, num_reserved)
        if hits:
            self.new_entries.append(WindowBlocks(request, first, tuple(hits)))

    def extend(self, request: Request, start: int, end: int) -> None:
        """Hold the blocks that computing tokens [start, end) reads and writes."""
        held = self._held(request)
        self._drop_before(held, start)
        first = held.first + len(held.blocks)
        num_new = -(-end // self._block_size) - first
        if num_new > 0:
            new = self.pool.take(num_new)
            held.blocks += new
            assert len(held.blocks) <= held.num_reserved, f"{request} holds more than it reserved"
            self.new_entries.append(WindowBlocks(request, first, tuple(new)))

    def cut(self, request: Request, end: int) -> None:
        """Give back the blocks after those of tokens before `end`."""
        held = self._held(request)
        first = -(-end // self._block_size) - held.first
        self.pool.drop(held.blocks[first:])
        del held.blocks[first:]

    def end_prefill(self, request: Request) -> None:
        """Reduce the reservation to what decodes need; called when the plan has been built."""
        held, num_reserved = self._held(request), self._num_for_decodes(request)
        self._drop_before(held, request.num_computed)
        self._num_reserved += num_reserved - held.num_reserved
        held.num_reserved = num_reserved

    def publish(self, request: Request, start: int, end: int) -> None:
        """Make those of blocks [start, end) that the request holds matchable."""
        held = self._held(request)
        start = max(start, held.first)
        if start < end:
            blocks = held.blocks[start - held.first : end - held.first]
            self.pool.index.add(blocks, request.kv.keys[start:end])

    def release(self, request: Request) -> None:
        """Free all blocks of a request, and its reservation."""
        held = self._held(request)
        self.pool.drop(held.blocks)
        self._num_reserved -= held.num_reserved
        request.kv.window = None

    def _held(self, request: Request) -> WindowAllocation:
        assert request.kv.window is not None, f"{request} has no blocks of sliding-window layers"
        return request.kv.window

    def _first_read(self, position: int) -> int:
        """The first block that the token at a position, or any later one, reads."""
        return max(0, position - self._window + 1) // self._block_size

    def _drop_before(self, held: WindowAllocation, position: int) -> None:
        """Give back the blocks that the token at a position, and all later ones, do not read."""
        num_passed = self._first_read(position) - held.first
        if num_passed > 0:
            self.pool.drop(held.blocks[:num_passed])
            del held.blocks[:num_passed]
            held.first += num_passed
