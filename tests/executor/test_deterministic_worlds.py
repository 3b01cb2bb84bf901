"""With the deterministic backend, a request gets the same bits in every random world."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from headway.executor.gpu.executor import GpuExecutor
from headway.model.backends.deterministic import DeterministicBackend
from headway.model.decoder import Decoder
from headway.model.kernels.attention import invariant_attention
from headway.scheduler import preset
from tests.model.test_deterministic import DEVICE, DTYPE, VOCABULARY, Loud, tiny
from tests.support import schedule_worlds as worlds
from tests.support.ordered_dots import use_ordered_dots

NUM_WORLDS = 3 if DEVICE == "cpu" else 60
LIMITS = preset(
    "vllm_v1", block_size=8, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=48,
    num_blocks=40, num_host_blocks=40,
)  # fmt: skip


@pytest.fixture
def executor(small_padding: None) -> Iterator[GpuExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariant_attention, "SPLIT", 32)
        use_ordered_dots(patch)
        decoder = Decoder(Loud(tiny()), DeterministicBackend(DTYPE, DEVICE))
        yield GpuExecutor(decoder, LIMITS)


def test_tokens_and_logprobs_are_those_of_the_request_alone(executor: GpuExecutor) -> None:
    rng, seen = random.Random(207), Counter[str]()  # few steps, but all that is counted below
    text = [rng.randrange(VOCABULARY) for _ in range(60)]
    targets = worlds.random_requests(rng, text, 3, longest=30, num_output=6)
    expected = [worlds.alone(executor, each, LIMITS) for each in targets]
    for _ in range(NUM_WORLDS):
        world = worlds.random_world(rng, targets, LIMITS)
        for asked, found in zip(
            world.requests, worlds.run_world(executor, world, seen), strict=True
        ):
            wrong = worlds.differences(found, expected[targets.index(asked)])
            assert not wrong, (wrong, world)
    assert min(seen[name] for name in ("recomputed", "swapped", "cached_tokens")) > 0, seen


def test_a_changed_bit_is_seen() -> None:
    one = worlds.Outcome([1, 2], [worlds.TokenLogprobs(1, -0.5, 1)], {})
    other = worlds.Outcome([1, 2], [worlds.TokenLogprobs(1, -0.5000000001, 1)], {})
    (found,) = worlds.differences(other, one)
    assert found.startswith("logprobs 0:") and worlds.differences(one, one) == []
