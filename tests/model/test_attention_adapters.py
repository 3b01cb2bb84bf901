"""Adapters call other attention libraries as documented, and get the results of our kernels.

Most libraries here are stand-ins with the documented signatures, in plain torch. They read the
cache by the indices they receive, so a wrong index gives a wrong number. The real libraries are tested
where they are installed, on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.config import Config
from headway.errors import ConfigError
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig
from headway.model.decoder import Decoder
from headway.model.precision import choose_backend

pytest.importorskip("triton")
from headway.executor.gpu.executor import GpuExecutor
from headway.model.backends import attention_adapters
from headway.model.backends.gpu import AttentionKernels, GpuBackend, TritonAttention
from tests.executor.test_gpu import FAMILIES, Loud, answers, plain, settings

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A stand-in reads its indices on the host, which a captured graph does not allow.
without_gpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="decodes are captured on a GPU")
HEADS, KV_HEADS, DIM, SIZE, LAYERS = 6, 2, 16, 4, 3
POSITIONS = (5, 0)  # of the decodes
CHUNKS = ((3, 9), (0, 4), (7, 8))  # [start, end): after earlier tokens, a whole prompt, one token


def attend(q_thd: Tensor, k_pgd: Tensor, v_pgd: Tensor) -> Tensor:
    """Attention of the last tokens of a sequence over all its tokens."""
    num_queries, length = len(q_thd), len(k_pgd)
    seen = torch.arange(length, device=q_thd.device)
    mask = seen[None] <= seen[length - num_queries :, None]
    heads = (x.transpose(0, 1)[None] for x in (q_thd, k_pgd, v_pgd))
    found = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return found[0].transpose(0, 1)


class Wrapper:
    """FlashInfer's prefill over a paged cache."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) == attention_adapters.WORKSPACE_BYTES
        assert kv_layout == "HND" and not float_workspace_buffer.any()
        self.num_plans = 0

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert causal and all(each.dtype == torch.int32 for each in indices)
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (HEADS, KV_HEADS, DIM)
        self.rows, self.pages, self.indices, self.last = (each.tolist() for each in indices)
        self.size, self.dtypes = page_size, (q_data_type, kv_data_type)
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Tensor:
        assert self.dtypes == (q.dtype, paged_kv_cache.dtype) and q.is_contiguous()
        assert len(q) == self.rows[-1] and out.shape == q.shape
        assert paged_kv_cache.shape[1:] == (2, KV_HEADS, self.size, DIM)
        for s, last in enumerate(self.last):
            held = self.indices[self.pages[s] : self.pages[s + 1]]
            length = (len(held) - 1) * self.size + last
            k, v = paged_kv_cache[held].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
            rows = slice(self.rows[s], self.rows[s + 1])
            out[rows] = attend(q[rows], k, v)
        return out


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor,
    causal: bool,
) -> Tensor:  # fmt: skip
    assert causal and cache_seqlens.dtype == block_table.dtype == torch.int32
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1 and k_cache.shape[2:] == (KV_HEADS, DIM)
    found = []
    for each, length, table in zip(q, cache_seqlens.tolist(), block_table.long(), strict=True):
        k, v = (cache[table].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        found.append(attend(each, k, v))
    return torch.stack(found)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, causal: bool, block_table: Tensor,
) -> Tensor:  # fmt: skip
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    lengths, rows = cu_seqlens_k.diff(), cu_seqlens_q.tolist()
    assert rows[0] == int(cu_seqlens_k[0]) == 0 and rows[-1] == len(q)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= int(lengths.max())
    found = torch.empty_like(q)
    for s, length in enumerate(lengths.tolist()):
        table = block_table[s].long()
        keys, values = (cache[table].flatten(0, 1)[:length] for cache in (k, v))
        found[rows[s] : rows[s + 1]] = attend(q[rows[s] : rows[s + 1]], keys, values)
    return found


FLASH_ATTENTION = SimpleNamespace(
    flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
)
FLASH_INFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def make(
    num_decodes: int, num_chunks: int, dim: int = DIM, size: int = SIZE
) -> tuple[Tensor, ForwardBatch, Tensor]:
    """Queries [T, H, D], a batch and random blocks: as many per sequence for any block size."""
    generator = torch.Generator().manual_seed(3)
    longer = size // SIZE
    positions = [longer * position for position in POSITIONS[:num_decodes]]
    chunks = [(longer * start, longer * end) for start, end in CHUNKS[:num_chunks]]
    places = positions + [place for start, end in chunks for place in range(start, end)]
    starts = [num_decodes]
    for start, end in chunks:
        starts.append(starts[-1] + end - start)
    order = torch.randperm(21, generator=generator).int()
    row_ids = (4, 1, 6, 0, 3)  # of the decodes, then of the chunks
    row_ids = (*row_ids[:num_decodes], *row_ids[2 : 2 + num_chunks])
    heads = torch.randn((len(places), HEADS + 2 * KV_HEADS, dim), generator=generator).to(DEVICE)
    shape = (21, LAYERS, 2, KV_HEADS, size, dim)
    batch = ForwardBatch(
        tokens_t=numbers(*places, dtype=torch.int64),
        positions_t=numbers(*places, dtype=torch.int64), slots_t=numbers(),
        tables_sw=order.view(7, 3).to(DEVICE), starts_s=numbers(*starts),
        ends_s=numbers(*(end for _, end in chunks)), sampled_n=numbers(), row_ids_s=numbers(*row_ids),
        num_decodes=num_decodes, longest=max((end - start for start, end in chunks), default=0),
    )  # fmt: skip
    return heads[:, :HEADS], batch, torch.randn(shape, generator=generator).to(DEVICE)


def found_by(
    kernels: AttentionKernels, q: Tensor, batch: ForwardBatch, blocks: Tensor
) -> list[Tensor]:
    """The output of each layer."""
    outs = []
    for layer in range(LAYERS):
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
        if batch.num_decodes:
            kernels.decode(layer, q, out, batch, blocks)
        if batch.longest:
            kernels.prefill(layer, q, out, batch, blocks)
        outs.append(out)
    return outs


MIXES = [(0, 1), (2, 0), (2, 3), (1, 2)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_another_library_gives_the_results_of_our_kernels(name: str, mix: tuple[int, int]) -> None:
    given = make(*mix)
    other: AttentionKernels = attention_adapters.FlashAttention(FLASH_ATTENTION)
    if name == "flashinfer":
        other = attention_adapters.FlashInfer(FLASH_INFER, DEVICE)
    for own, found in zip(
        found_by(TritonAttention(), *given), found_by(other, *given), strict=True
    ):
        torch.testing.assert_close(found, own, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the libraries need a GPU")
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(("module", "size"), [("flashinfer", 16), ("flash_attn", 256)])
def test_an_installed_library_gives_the_results_of_our_kernels(
    module: str, size: int, mix: tuple[int, int]
) -> None:
    pytest.importorskip(module)
    wide_q, batch, wide_blocks = make(*mix, dim=64, size=size)
    q, blocks = wide_q.bfloat16(), wide_blocks.bfloat16()
    theirs = found_by(
        attention_adapters.kernels_for(module, q.dtype, None, DEVICE), q, batch, blocks
    )
    ours = found_by(TritonAttention(), q.float(), batch, blocks.float())
    for found, own in zip(theirs, ours, strict=True):
        torch.testing.assert_close(found.float(), own, atol=0.02, rtol=0.02)


def test_flashinfer_plans_once_per_pass() -> None:
    kernels = attention_adapters.FlashInfer(FLASH_INFER, DEVICE)
    for num_passes, mix in enumerate([(0, 1), (2, 3), (0, 2)], start=1):
        found_by(kernels, *make(*mix))
        assert kernels._prompts.num_plans == num_passes


class Small(attention_adapters.FlashAttention):
    """Accepts small blocks; counts batches that have only decodes."""

    block_multiple, num_alone = 1, 0

    def decode(self, layer: int, q: Tensor, out: Tensor, batch: ForwardBatch, *given: Any) -> None:
        self.num_alone += not batch.longest
        super().decode(layer, q, out, batch, *given)


@pytest.mark.parametrize("change", ["attention_window", "has_sinks", "attention_scale"])
def test_models_with_scores_of_their_own_are_refused(change: str) -> None:
    about = replace(FAMILIES["norms of heads"], **{change: 1})
    with pytest.raises(ConfigError, match="--attention triton"):
        choose_backend(about, "bfloat16", "cuda", None, "flashinfer")


@without_gpu
@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_the_executor_generates_the_same_with_another_library(name: str) -> None:
    small = Small(FLASH_ATTENTION)
    library = attention_adapters.FlashInfer(FLASH_INFER, DEVICE) if name == "flashinfer" else small

    def with_library(config: Config, about: ModelConfig) -> GpuExecutor:
        backend = GpuBackend(torch.float32, "cpu", None, library)
        return GpuExecutor(Decoder(Loud(about), backend), config)

    about, config = FAMILIES["norms of heads"], settings(chunk="at_most(5)")
    found = answers(with_library, config, about, async_scheduling=1, count=3)
    assert found == answers(plain, config, about, count=3)
    assert (small.num_alone > 0) == (name == "flash-attn")


def test_unsupported_block_sizes_are_rejected() -> None:
    about = FAMILIES["norms of heads"]
    backend = GpuBackend(
        torch.bfloat16, str(DEVICE), None, attention_adapters.FlashAttention(FLASH_ATTENTION)
    )
    with pytest.raises(ConfigError, match=r"block_size is 16.* 256.*--block-size 256"):
        backend.kv_blocks(about, 2, 16)
    assert backend.kv_blocks(about, 0, 1).element_size() == 2  # no blocks: only the type matters
    assert backend.kv_blocks(about, 1, 512).shape[4] == 512
    assert GpuBackend(torch.bfloat16, str(DEVICE)).kv_blocks(about, 1, 3).shape[4] == 3


REFUSED: list[tuple[str, Any, Any, str]] = [
    ("flashinfer", torch.float32, None, r"float32.*--dtype bfloat16"),
    ("flash_attn", torch.float32, None, r"float32.*--dtype bfloat16"),
    ("flash_attn", torch.bfloat16, torch.float8_e4m3fn, r"8-bit.*--kv-cache-dtype auto"),
]


@pytest.mark.parametrize(("module", "dtype", "kv_dtype", "message"), REFUSED)
def test_unsupported_types_are_rejected_before_the_library_is_loaded(
    module: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attention_adapters.kernels_for(module, dtype, kv_dtype, DEVICE)
