"""Plans as bytes: nothing is lost, and a decode step is small."""

from __future__ import annotations

import gc
import os
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway import Engine, Plan, Scheduler, StepResult, preset
from headway.executor.cpu import CompletedStep
from headway.parallel.delta import PlanDecoder, PlanEncoder
from headway.parallel.group import connect
from headway.parallel.progress import SharedState, anonymous_file
from headway.parallel.spec import config_of, config_sizes, framed, messages
from headway.request import Request, RequestParams
from headway.sampling_params import Sampling

MAX_BYTES = 2048  # of a step of 256 decodes


def decoding(num_rows: int) -> list[Request]:
    requests = []
    for row in range(num_rows):
        request = Request(str(row), [1, 2, 3], RequestParams())
        request.row, request.kv.blocks, request.limit = row, [row], 40
        requests.append(request)
    return requests


def summary(plan: Plan) -> dict[str, Any]:
    """Everything that an executor reads of a plan, without objects."""
    return {
        "rows": plan.rows.tolist(),
        "num_decodes": len(plan.decodes),
        "num_steps": plan.num_steps,
        "new_blocks": sorted((request.row, block) for request, block in plan.new_blocks),
        "copies": (plan.copies_out, plan.copies_in),
        "admitted": [
            (a.request.row, a.request.kv.blocks, a.request.limit, a.request.num_prompt)
            for a in plan.admitted
        ],
        "chunks": [
            (c.request.row, *c[1:], list(c.request.tokens[c.start : c.end]),
             len(c.request.tokens) - c.request.num_prompt if c.is_last else None)
            for c in plan.chunks
        ],
    }  # fmt: skip


class Checked:
    """An executor that compares every plan with what other ranks decode."""

    def __init__(self, num_rows: int) -> None:
        self.num_plans = 0
        self.encoder, self.decoder = PlanEncoder(num_rows), PlanDecoder(num_rows)

    def launch(self, plan: Plan) -> CompletedStep:
        message = self.encoder.encode(plan)
        assert summary(self.decoder.decode(message)) == summary(plan)
        self.num_plans += 1
        result = StepResult(first_tokens=[9 for chunk in plan.chunks if chunk.is_last])
        if plan.decodes:
            result.decode_tokens = [[self.num_plans % 50] * len(plan.decodes)] * plan.num_steps
        return CompletedStep(result)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("swap", ["swap", "recompute"])
def test_all_plans_of_a_crowded_run_survive_the_way(swap: str, ahead: bool) -> None:
    config = preset(
        "vllm_v1", num_blocks=30, block_size=2, max_num_seqs=5, max_num_batched_tokens=16,
        max_model_len=60, num_host_blocks=60, swap=swap,
    )  # fmt: skip
    executor = Checked(config.max_num_seqs)
    engine = Engine(Scheduler(config), executor, async_scheduling=ahead)
    for number in range(12):
        sampling = Sampling(prompt_logprobs=0) if number % 3 == 0 else None
        prompt = [number % 3] * (3 + number % 5) + list(range(number))
        engine.add(str(number), prompt, RequestParams(max_tokens=12, sampling=sampling))
    engine.run()
    assert engine.fault is None, engine.fault
    assert executor.num_plans > 30


@pytest.mark.parametrize("sampling", [
    Sampling(temperature=0.3, top_k=5, top_p=0.8, min_p=0.1, seed=2**64 - 1),
    Sampling(logprobs=3), Sampling(repetition_penalty=1.1), None,
])  # fmt: skip
def test_a_rank_gets_the_settings_that_a_device_samples_with(sampling: Sampling | None) -> None:
    scheduler = Scheduler(preset(num_blocks=30, max_num_seqs=4, max_model_len=60))
    scheduler.add(Request("r", [1, 2], RequestParams(sampling=sampling)))
    plan = scheduler.schedule()
    (chunk,) = PlanDecoder(4).decode(PlanEncoder(4).encode(plan)).chunks
    found = chunk.request.params.sampling
    assert isinstance(found, Sampling)
    wanted = sampling or Sampling(temperature=0.0)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert getattr(found, name) == getattr(wanted, name)
    needs_host = wanted.logprobs is not None or wanted.edits_logits
    assert (found.logprobs is not None) == needs_host and not found.edits_logits


def test_a_step_of_256_decodes_is_small() -> None:
    """Also in the worst case: all rows are new, and all need a block."""
    requests, encoder = decoding(256), PlanEncoder(256)
    plan = Plan(0, decodes=requests, rows=np.arange(256))
    plan.new_blocks = [(request, 1 << 20) for request in requests]
    assert len(encoder.encode(plan)) <= MAX_BYTES
    plan.new_blocks = plan.new_blocks[::16]
    assert len(encoder.encode(plan)) <= 128, "rows are not sent again"
    plan.rows = plan.rows[::-1].copy()
    assert 256 < len(encoder.encode(plan)) <= 512


def test_a_rank_reads_all_messages_in_order_also_large_ones() -> None:
    """The writer waits while the reader's socket is full."""
    writer, reader = socket.socketpair()
    sent = [bytes([number]) * (number**3) for number in range(150)]

    def write() -> None:
        with writer:
            for message in sent:
                writer.sendall(framed(message))

    thread = threading.Thread(target=write)
    thread.start()
    with reader, reader.makefile("rb") as stream:
        assert list(messages(stream)) == sent
    thread.join()


def test_a_rank_leaves_its_reason_and_advances_its_counter() -> None:
    file = anonymous_file()
    parent, child = SharedState(file, 0), SharedState(file, 2)
    assert parent.report_of(2) == "" and parent.beats(2) == 0
    child.beat()
    child.report("out of memory " * 100)
    assert parent.report_of(2).startswith("out of memory") and parent.report_of(1) == ""
    assert (parent.beats(2), parent.beats(1)) == (1, 0)
    child.publish(7)
    assert (parent.position(2), parent.position(1)) == (7, 0)


def test_ranks_get_the_sizes_of_a_config_and_no_policies() -> None:
    config = preset("vllm", num_blocks=77, block_size=8, max_num_seqs=3)
    copied = config_of(config_sizes(config))
    assert config_sizes(copied) == config_sizes(config)
    with pytest.raises(AssertionError, match="rank 0"):
        copied.chunk(1, 2, True)


def test_a_group_leaves_a_later_file_with_the_same_number_alone(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"")
    file = anonymous_file()
    group = connect(file, 0, 1, torch.device("cpu"))
    later = os.open(path, os.O_RDONLY)
    os.dup2(later, file)  # closes the group's file and takes its number
    num_open = len(os.listdir("/dev/fd"))
    del group
    gc.collect()
    assert len(os.listdir("/dev/fd")) < num_open
    os.close(later)
    os.close(file)
    assert path.read_bytes() == b""
