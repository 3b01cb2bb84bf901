"""Laws of `headway bench profile`: it writes a usable profile and reports its error."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.cli.view.render import warn_of_profile
from headway.lab.cost import load_profile
from headway.lab.profiling import calibration
from headway.lab.profiling.fit import observations
from headway.lab.real import profiling
from headway.llm import LLM
from headway.model.config import load_hf
from headway.model.footprint import footprint
from headway.model.weights.checkpoint import DummyCheckpoint
from headway.record.lines import CompletedLine, Line, PlannedLine
from tests.cli.test_cli import headway, sentence

TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RANDOM = ("--load-format", "dummy", "--kv-memory", "64MiB", "--threads", "1")
MEASURED: list[profiling.Measurement] = []  # see measured_once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the config of a tiny model, in the working directory."""
    monkeypatch.chdir(tmp_path)
    yield write(tmp_path / "Tiny-0.6B")


def write(path: Path, **changes: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**TINY, **changes}))
    return path


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `headway bench profile` measure the tiny model once in all; it takes seconds."""

    def shared(llm: LLM, name: str, *, is_quick: bool, bar: Any) -> profiling.Measurement:
        if not MEASURED:
            MEASURED.append(profiling.measure(llm, name, is_quick=is_quick))
        return MEASURED[0]._replace(profile=replace(MEASURED[0].profile, name=name))

    monkeypatch.setattr("headway.cli.commands.bench.measure", shared)


@pytest.mark.usefixtures("measured_once")
def test_the_written_profile_can_be_simulated(folder: Path) -> None:
    done = headway("bench", "profile", folder, *RANDOM, "--quick", "--json", "--name", "mine")
    assert done.code == 0, done.err
    said, profile = json.loads(done.out), load_profile("mine.json")
    assert said["out"] == "mine.json" and said["profile"]["name"] == profile.name == "mine"
    assert set(said["held_out"]) == set(calibration.HeldOutError._fields)
    assert 0 <= said["held_out"]["median"] <= said["held_out"]["p90"]
    assert all(error >= -1 for error in said["held_out"].values())
    assert profile.kv_tokens == 64 * 2**20 // (3 * 2 * 2 * 16 * 4) // 16 * 16
    assert profile.machine.host_seconds > 0 and profile.machine.copy_bandwidth > 0
    assert f"{said['held_out']['median']:.1%} (median)" in profile.description
    used = headway("simulate", "requests=9,prompt=20,output=5", "--profile", "mine.json", "--json")
    assert used.code == 0 and json.loads(used.out)["completed"] == 9


@pytest.mark.usefixtures("measured_once")
def test_the_table_has_units_and_names_the_next_command(folder: Path) -> None:
    done = headway("bench", "profile", folder, *RANDOM, "--quick")
    assert done.code == 0, done.err
    marks = ("GB/s", "GFLOP/s", "(median)", "(p90)", "simulated duration", "tiny-0.6b-float32")
    assert [mark for mark in marks if mark not in done.out] == []
    assert "headway simulate --profile tiny-0.6b-float32.json" in done.out
    assert load_profile("tiny-0.6b-float32.json").name == "tiny-0.6b-float32"


def test_a_large_error_and_undetermined_rates_give_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = calibration.HeldOutError(median=0.1, p90=0.5, total=-0.2, simulated=0.15, ttft=0.9)
    warn_of_profile(good, [])
    assert capsys.readouterr().err == ""
    for bad in ({"median": 0.21}, {"total": -0.21}, {"simulated": 0.21}):
        error = calibration.HeldOutError(
            **{**dict.fromkeys(calibration.HeldOutError._fields, 0.0), **bad}
        )
        warn_of_profile(error, [])
        assert "warning" in (text := capsys.readouterr().err) and "21%" in text
    warn_of_profile(good, ["flops is unknown"])
    assert capsys.readouterr().err.strip() == "warning: flops is unknown"


def test_errors_are_one_sentence_and_leave_an_old_profile_unchanged(tmp_path: Path) -> None:
    short = write(tmp_path / "short", max_position_embeddings=40)
    old = tmp_path / "old.json"
    old.write_text("precious")
    found = sentence("bench", "profile", short, *RANDOM, "--out", old)
    assert "40 tokens" in found and "64" in found
    assert "cannot be written" in sentence(
        "bench", "profile", short, *RANDOM, "--out", tmp_path / "a/b"
    )
    assert "no model" in sentence("bench", "profile", tmp_path, "--out", old)
    assert "40 tokens" in sentence(
        "bench", "profile", short, *RANDOM, "--out", tmp_path / "new.json"
    )
    assert old.read_text() == "precious" and not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_work_of_a_model_follows_from_its_shapes(tmp_path: Path, is_tied: bool) -> None:
    path = write(tmp_path / "model", tie_word_embeddings=is_tied)
    with LLM(str(path), load_format="dummy", kv_memory="4MiB", threads=1) as llm:
        work = profiling.model_work(llm)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128  # q, k and v; o; gate, up and down
    assert work.dense_flops == 2 * 3 * layer
    assert work.head_flops == 2 * 64 * 512
    assert work.attention_flops == 4 * 3 * 4 * 16
    assert work.kv_bytes == 2 * 3 * 2 * 16 * 4
    assert work.weight_bytes == pytest.approx(4 * (3 * layer + 64 * 512), rel=0.01)
    assert work.max_model_len == 512
    found = footprint(DummyCheckpoint(load_hf(path)), torch.device("cpu"))
    before = profiling.work_of(found.config, read=found.read, experts=0, kv=found.kv)
    assert before.weight_bytes == pytest.approx(work.weight_bytes, rel=0.01)
    assert replace(before, weight_bytes=work.weight_bytes) == work


@pytest.mark.usefixtures("measured_once")
def test_a_profile_says_how_fast_a_model_will_run(folder: Path) -> None:
    assert headway("bench", "profile", folder, *RANDOM, "--quick").code == 0
    own = ("--profile", "tiny-0.6b-float32.json")
    shown = json.loads(headway("models", folder, *own, "--device", "cpu", "--json").out)["CPU"]
    profile = load_profile(own[1])
    step = profile.pass_seconds(32, 32, 32 * 512, 32 * 512)
    assert shown["tokens_per_second_of_32"] == pytest.approx(32 / step, rel=0.05)
    assert shown["speed"].startswith("by the profile tiny-0.6b-float32. Measured on this machine")
    given = (*own, "--device", "cuda", "--memory", "1GiB")
    done = headway("models", folder, *given)
    assert "fitted to another model" in done.out and "prompt tokens per second" in done.out
    assert "--device" in sentence("models", folder, *own)


def test_timing_copies_leaves_the_blocks_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    with LLM(str(path), load_format="dummy", kv_memory="512KiB", threads=1) as llm:
        llm.generate([[5, 6, 7] * 20])
        blocks = llm.executor.device_blocks.view(torch.int32)  # as bits: unused values may be NaN
        before = blocks.clone()
        seen = observations(profiling.copy_blocks(llm))
        assert torch.equal(before, blocks)
        sizes = seen.copies[:, 1].tolist()  # it has 42 device and 42 host blocks
        assert sizes == [size for size in (1, 4, 16) for _ in range(2 * profiling.TIMES_COPIED)]


def test_a_copy_is_timed_until_it_has_finished(tmp_path: Path) -> None:
    class Slow:
        def finish(self) -> None:
            time.sleep(0.004)

    path = write(tmp_path / "model")
    with LLM(str(path), load_format="dummy", kv_memory="512KiB", threads=1) as llm:
        llm.executor.swapper = Slow()  # type: ignore[union-attr, assignment]
        assert observations(profiling.copy_blocks(llm)).seconds.min() >= 0.004


def has_two_in_flight(lines: list[Line]) -> bool:
    """Whether a plan was made before the previous one had ended."""
    steps = [line for line in lines if isinstance(line, PlannedLine | CompletedLine)]
    return any(
        isinstance(a, PlannedLine) and isinstance(b, PlannedLine) and a.step < b.step
        for a, b in pairwise(steps)
    )


def test_with_async_scheduling_the_host_time_comes_from_a_run_without_it(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    with LLM(
        str(path), load_format="dummy", kv_memory="4MiB", threads=1, async_scheduling=1
    ) as llm:
        logs = profiling.run(
            llm, calibration.make_calibration(512, calibration.QUICK_CPU_CALIBRATION)
        )
        assert llm.engine.async_scheduling == 1
        assert has_two_in_flight(logs.fitted) and has_two_in_flight(logs.held_out)
        assert logs.synchronous and not has_two_in_flight(logs.synchronous)
        assert len(logs.synchronous) < len(logs.fitted) / 2  # they measure the host alone
        profile, found, _ = profiling.fit_profile(llm, "mine", logs, profiling.copy_blocks(llm))
    assert profile.machine.host_seconds == pytest.approx(
        np.median(observations(logs.synchronous).gaps)
    )
    again = calibration.held_out_error(logs.held_out, llm.config, profile, async_scheduling=1)
    other = calibration.held_out_error(logs.held_out, llm.config, profile, async_scheduling=0)
    assert found == again != other
