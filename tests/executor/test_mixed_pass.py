"""Sizes of passes over prompts: few, hardly larger, and their graphs are kept."""

from __future__ import annotations

from itertools import accumulate

from headway.executor.gpu.mixed_pass import MAX_GRAPHS, Size, rounded, rounded_up
from headway.lab.calibration import GPU_CALIBRATION, make_calibration
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.request import FIRST_TOKEN, WorkloadRequest
from headway.model.kernels.splits import SHARINGS
from headway.plan import StepReport
from headway.scheduler import preset


def test_sizes_of_passes_are_few_and_hardly_larger() -> None:
    for least, num_steps, most, num_sizes in ((32, 2, 256, 6), (64, 8, 8192, 40)):
        sizes = [rounded(count, least, num_steps) for count in range(1, most + 1)]
        for count, size in enumerate(sizes, start=1):
            assert count <= size < count + max(least, 1 + count / num_steps)
            assert rounded(size, least, num_steps) == size
        assert sizes == sorted(sizes) and len(set(sizes)) == num_sizes
    assert rounded_up(Size(0, 0, 0, 8)) == Size(0, 0, 0, 8)


def test_graphs_of_all_sizes_that_a_profile_meets_are_kept() -> None:
    """Else each would be captured again and again, which takes as long as to do without."""
    profile, sizes = load_profile("qwen3-0.6b-h200-headway"), set[Size]()
    num_blocks = profile.kv_tokens // 16
    config = preset(
        "headway", max_num_batched_tokens=8192, num_blocks=num_blocks, max_model_len=33792
    )

    def see(report: StepReport) -> None:
        if chunks := report.plan.chunks:
            num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            for sharing in SHARINGS:
                sizes.add(
                    rounded_up(Size(len(report.plan.decodes), num_tokens, len(chunks), sharing))
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
        simulate(jobs, config, profile, async_scheduling=1, observers=[see])
    assert 40 < len(sizes) <= MAX_GRAPHS
