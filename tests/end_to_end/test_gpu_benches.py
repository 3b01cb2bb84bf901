"""GPU benchmarks also run without a GPU, slowly, as a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import printed_by

pytest.importorskip("triton")


def test_every_kernel_of_a_decode_step_is_timed(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    options = ("--tiny", "--only", "decode", "--out", str(written))
    printed = json.loads(printed_by("bench/gpu/kernels.py", *options))
    assert printed == json.loads(written.read_text())
    assert list(printed["decode"]["kernels"]) == [
        "qkv", "attention", "output", "gate and up", "down", "head", "draw"
    ]  # fmt: skip
    for by_rows in printed["decode"]["kernels"].values():
        assert list(by_rows) == ["1", "3"]
        assert all(found["us"] > found["floor_us"] > 0 for found in by_rows.values())


def test_every_way_to_multiply_by_an_fp8_matrix_is_timed_and_right() -> None:
    by_rows = json.loads(printed_by("bench/gpu/fp8.py", "--tiny"))["products"]["tiny"]
    ways = {"bfloat16", "scaled_mm", "quantize", "kernel", "errors"}
    assert set(by_rows["1"]) == set(by_rows["3"]) == ways
    assert all(figures["us"] > 0 for figures in by_rows["3"]["kernel"])
    for error in by_rows["3"]["errors"].values():
        assert error["own"] < 1e-5 and error["total"] < 0.06


def test_prefill_kernels_are_timed() -> None:
    printed = json.loads(
        printed_by("bench/gpu/kernels.py", "--tiny", "--only", "attention", "gated")
    )
    for part in ("attention", "gated"):
        (found,) = printed[part].values()
        assert found["kernel"]["us"] > 0 and found["plain"]["us"] > 0 and found["difference"] == 0
