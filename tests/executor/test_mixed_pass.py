"""Rounded sizes of mixed passes: few, close to the exact size, and all their graphs are kept."""

from __future__ import annotations

from itertools import accumulate

from headway.executor.gpu.mixed_pass import MAX_GRAPHS, PassSize, round_up, round_up_size
from headway.lab.calibration import GPU_CALIBRATION, make_calibration
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.request import FIRST_TOKEN, WorkloadRequest
from headway.model.kernels.splits import SPLIT_COUNTS
from headway.plan import StepReport
from headway.scheduler import preset


def test_rounded_sizes_are_few_and_close() -> None:
    for least, num_steps, most, num_sizes in ((32, 2, 256, 6), (64, 8, 8192, 40)):
        sizes = [round_up(count, least, num_steps) for count in range(1, most + 1)]
        for count, size in enumerate(sizes, start=1):
            assert count <= size < count + max(least, 1 + count / num_steps)
            assert round_up(size, least, num_steps) == size
        assert sizes == sorted(sizes) and len(set(sizes)) == num_sizes
    assert round_up_size(PassSize(0, 0, 0, 8)) == PassSize(0, 0, 0, 8)


def test_all_graph_sizes_of_a_profile_fit_in_the_limit() -> None:
    """Otherwise sizes would be captured again and again, which is as slow as no graphs."""
    profile, sizes = load_profile("qwen3-0.6b-h200-headway"), set[PassSize]()
    num_blocks = profile.kv_tokens // 16
    config = preset(
        "headway", max_num_batched_tokens=8192, num_blocks=num_blocks, max_model_len=33792
    )

    def observe(report: StepReport) -> None:
        if chunks := report.plan.chunks:
            num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            for num_splits in SPLIT_COUNTS:
                sizes.add(
                    round_up_size(
                        PassSize(len(report.plan.decodes), num_tokens, len(chunks), num_splits)
                    )
                )

    waves = make_calibration(config.max_model_len, GPU_CALIBRATION)
    for wave in (*waves.before, waves.held_out):
        places = accumulate((num_prompt for num_prompt, _ in wave), initial=FIRST_TOKEN)
        jobs = [
            WorkloadRequest(
                id=str(place), pieces=(range(place, place + a),), num_output=b, max_tokens=b
            )
            for place, (a, b) in zip(places, wave, strict=False)
        ]
        simulate(jobs, config, profile, async_scheduling=1, observers=[observe])
    assert 40 < len(sizes) <= MAX_GRAPHS
