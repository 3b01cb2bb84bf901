"""One forward pass as data: what the decoder and its attention are given, and nothing hidden.

Legend: T tokens in the flat batch, S sequences, W blocks that a table has room for, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Tokens of many sequences end to end; each sequence reads its earlier tokens by its table."""

    tokens_t: Tensor  # int64
    positions_t: Tensor  # int64
    slots_t: Tensor  # int64: block * block_size + offset to store at; negative: nowhere
    tables_sw: Tensor  # int32: the blocks of each sequence, in order
    starts_s: Tensor  # int32, S + 1 of them: the rows of sequence s are [starts[s], starts[s + 1])
    ends_s: Tensor  # int32: tokens sequence s has in the cache once this pass has stored its own
    sampled_n: Tensor  # int64: rows whose logits are wanted
    # For backends with kernels of their own for decodes, which come first in the batch; `starts_s`
    # and `ends_s` are then of the other sequences alone:
    seats_s: Tensor | None = None  # int32: the row of `tables` of each sequence; None: its own
    num_decodes: int = 0
    sharing: int = 1  # programs for a long one of them, where there are many
    longest: int = 0  # rows of the longest sequence that is no decode
