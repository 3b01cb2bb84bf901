"""The model that makes drafts: a smaller decoder beside the one that generates the tokens.

Its KV blocks have the numbers of the large decoder's blocks, and it computes every batch that the
large decoder computes. So both caches have the same tokens whatever the scheduler does: shared
blocks, prefix hits, preemptions and drafts that were wrong need nothing more. Its keys and values
of drafts are stored twice: when it makes them, and with the batch that verifies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headway.config import Config
from headway.errors import ExecutorError
from headway.executor.row_table import RowTable
from headway.model.batch import ForwardBatch
from headway.model.decoder import Decoder
from headway.plan import UNKNOWN_TOKEN, Draft, Plan

# Makes drafts, given the longest first: [place, draft], of which a draft uses its first `count`.
DraftMaker = Callable[[Sequence[Draft]], npt.NDArray[np.integer]]


class DraftModel:
    """The small decoder and its KV blocks. A draft has the token with the highest logit."""

    def __init__(self, decoder: Decoder, config: Config) -> None:
        decoder.use_length(config.max_model_len)
        self.decoder = decoder
        make = decoder.backend.kv_blocks
        self.blocks = make(decoder.config, config.num_blocks, config.block_size)

    def compute(self, batch: ForwardBatch) -> None:
        """Store the keys and values of a batch of the large decoder."""
        own = replace(batch, sampled_n=batch.sampled_n[:0], windowed=None, window=None)
        self.decoder.run(own, self.blocks)

    def make(self, rows: RowTable, drafts: Sequence[Draft]) -> npt.NDArray[np.integer]:
        """A DraftMaker for a CPU."""
        own, counts = rows.branch(), np.array([draft.count for draft in drafts])
        row_ids = np.array([draft.request.row for draft in drafts], dtype=np.intp)
        tokens = np.full((counts[0], len(drafts)), UNKNOWN_TOKEN)
        for place, line in enumerate(tokens):
            num_rows = np.count_nonzero(counts > place)
            active = row_ids[:num_rows]
            output = self.decoder.run(own.batch(active, ()), self.blocks)
            assert output.logits is not None, "decodes are sampled"
            best = output.logits.argmax(-1).numpy() if output.best is None else output.best
            line[:num_rows] = best
            own.advance(active, best)
        return tokens


def no_draft_model(_drafts: Sequence[Draft]) -> npt.NDArray[np.integer]:
    """The DraftMaker without a draft model: ExecutorError."""
    raise ExecutorError(
        "the drafter `model` needs its model, which this engine has not loaded; start the engine with "
        "this drafter"
    )


def completed(plan: Plan, make: DraftMaker) -> Plan:
    """The plan with the drafts that the executor makes."""
    unknown = [draft for draft in plan.drafts if UNKNOWN_TOKEN in draft.tokens]
    if not unknown:
        return plan
    unknown.sort(key=lambda draft: -draft.count)
    tokens = dict(zip(unknown, make(unknown).T.tolist(), strict=True))
    drafts = [
        replace(draft, tokens=tuple(tokens[draft][: draft.count])) if draft in tokens else draft
        for draft in plan.drafts
    ]
    return replace(plan, drafts=drafts)
