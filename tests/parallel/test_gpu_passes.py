"""The GPU executor as a rank: the same tokens as alone, with both kinds of sums."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from headway.config import Config
from headway.model.config import ModelConfig
from headway.sampling_params import Sampling

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("several ranks need several GPUs", allow_module_level=True)
from headway.executor.gpu.executor import GpuExecutor
from headway.model.backends.gpu import GpuBackend
from tests.executor.test_gpu import Loud, answers, model, on_device, settings
from tests.support.rank_threads import ThreadExecutor, ThreadRanks

pytestmark = pytest.mark.usefixtures("small_padding")
SAMPLINGS = [None, Sampling(temperature=0.8, seed=3), Sampling(temperature=0.9, seed=1, logprobs=1)]


def divided(config: Config, about: ModelConfig, *, is_exact: bool) -> ThreadExecutor:
    ranks = ThreadRanks(
        2, partial(Loud, about), lambda _: GpuBackend(torch.float32, "cpu"), is_exact=is_exact
    )
    return ThreadExecutor(ranks, config, GpuExecutor)


@cache
def of_one_device(config: Config, about: ModelConfig) -> list[list[int]]:
    return answers(on_device, config, about, samplings=SAMPLINGS, async_scheduling=1, count=3)


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_group_generates_the_tokens_of_one_device(is_exact: bool) -> None:
    about = model(
        "Qwen2Moe", num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        num_hidden_layers=2, decoder_sparse_step=2, num_experts=3, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    config = settings(max_num_seqs=3)
    expected = of_one_device(config, about)
    made = list[ThreadExecutor]()

    def make(config: Config, about: ModelConfig) -> ThreadExecutor:
        made.append(divided(config, about, is_exact=is_exact))
        return made[0]

    assert (
        answers(make, config, about, samplings=SAMPLINGS, async_scheduling=1, count=3) == expected
    )
    first, second = made[0].executors
    assert isinstance(first, GpuExecutor) and isinstance(second, GpuExecutor)
    rows = slice(0, config.max_num_seqs)
    for name in ("lengths", "limits", "last", "num_generated", "tables"):
        own, other = (getattr(each.state.tensors, name)[rows] for each in (first, second))
        assert torch.equal(own, other), name
