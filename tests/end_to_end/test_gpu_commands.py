"""The commands on a GPU: each runs there, and reports what it cannot do in one sentence.

HEADWAY_TEST_MODEL sets the path of the bundled model's file on a machine that cannot download it.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.waiting import LIMIT

# A GPU machine may have only torch. A package that is installed but cannot be imported is an error.
for name in ("typer", "fastapi", "hypothesis", "httpx"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
import fastapi  # noqa: F401
import httpx

from headway.lab.cost import load_profile
from headway.model.registry import resolve
from tests.cli.test_cli import headway, sentence
from tests.cli.test_cli_generate import save_tiny
from tests.support.processes import serving

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> list[str]:
    return ["--model", str(folder), "--load-format", "dummy", "--device", DEVICE]


@pytest.fixture(scope="module")
def bundled() -> list[str]:
    given = os.environ.get("HEADWAY_TEST_MODEL") or resolve("smollm2-135m")
    return ["--model", str(given), "--device", DEVICE, "--dtype", "float32"]


def test_models_lists_the_gpus_by_name() -> None:
    done = headway("models")
    assert done.code == 0 and torch.cuda.get_device_name() in done.out


def test_the_bundled_model_knows_the_capital_of_france(bundled: list[str]) -> None:
    done = headway("generate", "The capital of France is", *bundled, "--max-tokens", "3")
    assert done.code == 0 and "The capital of France is Paris" in done.out


def test_a_run_is_traced_and_replays(bundled: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    done = headway("run", *bundled, "--json", "--trace-out", trace)
    assert done.code == 0 and json.loads(done.out)["summary"]["completed"] == 10
    assert headway("trace", trace, "--replay").code == 0


@pytest.mark.parametrize("more", [(), ("--kv-cache-dtype", "fp8")], ids=["auto", "fp8"])
def test_throughput_counts_all_tokens(tiny: list[str], more: tuple[str, ...]) -> None:
    done = headway(
        "bench", "throughput", *tiny, *more, "--num-prompts", "40", "--input-len", "20-70",
        "--output-len", "30", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["dtype"] == "bfloat16" and found["total_output_tokens"] == 40 * 30
    assert found["output_throughput"] * found["elapsed_time"] == pytest.approx(40 * 30)


def test_latency_is_reported(tiny: list[str]) -> None:
    done = headway(
        "bench", "latency", *tiny, "--input-len", "20", "--output-len", "8", "--num-iters", "3",
        "--num-iters-warmup", "1", "--json",
    )  # fmt: skip
    assert done.code == 0 and json.loads(done.out)["avg_latency"] > 0, done.err


def test_a_written_profile_can_be_simulated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = headway(
        "bench", "profile", folder, "--load-format", "dummy", "--device", DEVICE, "--quick", "--name",
        "mine",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert load_profile("mine.json").machine.copy_bandwidth > 0
    used = headway("simulate", "requests=9,prompt=20,output=5", "--profile", "mine.json", "--json")
    assert used.code == 0 and json.loads(used.out)["completed"] == 9


def test_too_little_memory_names_the_difference_and_a_flag(tiny: list[str]) -> None:
    asked = ("generate", "hello", *tiny)
    many = sentence(*asked, "--num-blocks", str(2**26))
    assert "--num-blocks" in many and "GiB" in many
    small = sentence(*asked, "--gpu-memory-utilization", "0.000001")
    assert "--gpu-memory-utilization" in small and "GiB" in small
    assert f"{DEVICE}:99" in sentence("generate", "hello", *tiny[:-1], f"{DEVICE}:99")


@pytest.mark.parametrize("layout", [(), ("--no-engine-process",)], ids=["apart", "together"])
def test_a_model_is_served(bundled: list[str], layout: tuple[str, ...]) -> None:
    with serving(*bundled, *layout) as (process, printed):
        found = re.search(r"at (http://127.0.0.1:\d+);", printed)
        assert found, printed
        fields = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
        response = httpx.post(f"{found[1]}/v1/completions", json=fields, timeout=LIMIT)
        assert "Paris" in response.json()["choices"][0]["text"]
        assert httpx.get(f"{found[1]}/health", timeout=LIMIT).status_code == 200
        process.terminate()
        assert process.wait(LIMIT) == 0
