"""The KV blocks on the device: of layers that see all tokens, and of sliding-window layers."""

from __future__ import annotations

from torch import Tensor

from headway.config import Config
from headway.model.decoder import Decoder


def allocate(decoder: Decoder, config: Config) -> tuple[Tensor, Tensor | None]:
    """Both kinds of blocks; None for the second without sliding-window layers."""
    model, window, size = decoder.config, config.sliding_window or None, config.block_size
    wanted = model.sliding_window if model.windowed_layers else None
    assert window == wanted, f"sliding_window is {window}, that of the model {wanted}"
    full, windowed = (model.layers_of_kind(windowed=kind) for kind in (False, True))
    make = decoder.backend.kv_blocks
    blocks = make(full, config.num_blocks, size)
    return blocks, None if window is None else make(windowed, config.num_window_blocks, size)
