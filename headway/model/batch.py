"""The inputs of one forward pass: everything that the decoder and its attention read.

Legend: T tokens in the flat batch, S sequences, W blocks in a row of the tables, N sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """Tokens of many sequences, concatenated; a block table finds a sequence's earlier tokens."""

    tokens_t: Tensor  # int64
    positions_t: Tensor  # int64
    slots_t: Tensor  # int64: block * block_size + offset to store at; negative: do not store
    tables_sw: Tensor  # int32: the blocks of each sequence, in order
    starts_s: Tensor  # int32 [S + 1]: sequence s has the rows [starts[s], starts[s + 1])
    ends_s: Tensor  # int32: cached tokens of sequence s after this pass
    sampled_n: Tensor  # int64: rows whose logits are needed
    # For backends with separate kernels for decodes, which come first in the batch. `starts_s` and
    # `ends_s` then describe only the other sequences.
    row_ids_s: Tensor | None = None  # int32: row of `tables_sw` of each sequence; None: row s
    num_decodes: int = 0
    num_splits: int = 1  # programs per long sequence in a batch of many decodes
    longest: int = 0  # rows of the longest sequence that is not a decode
    # For models with sliding-window layers: the batch as those layers see it, with slots and tables
    # in their own blocks. Entries of `tables_sw` before the window are not read.
    windowed: ForwardBatch | None = None
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
