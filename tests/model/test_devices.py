"""Devices, precisions and the memory of a model; everything here runs without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway import LLM, Config, preset
from headway.errors import ConfigError
from headway.executor import kv_blocks
from headway.executor.cpu import CpuExecutor
from headway.executor.factory import make_executor
from headway.executor.gpu import memory
from headway.executor.sampling.logprobs import SLICE
from headway.loading import GpuRoom, _check_memory, fit
from headway.model import devices
from headway.model.backends.plain import PlainBackend
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.precision import (
    DTYPES,
    FASTEST,
    check_attention,
    choose_backend,
    kv_dtype_for,
    resolved,
    weight_bytes,
)
from headway.model.weights.checkpoint import DummyCheckpoint
from headway.options import EngineOptions
from tests.cli.test_cli import headway, sentence
from tests.cli.test_cli_generate import SHAPE, options_of, save_tiny
from tests.support.waiting import LIMIT

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
without_gpu = pytest.mark.skipif(devices.why_no_cuda() is None, reason="a GPU can be used here")


def fail(message: str) -> None:
    raise RuntimeError(message)


@cache
def model() -> ModelConfig:
    return from_hf({**SHAPE, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}, "here")


@pytest.mark.parametrize(
    ("is_built", "message", "has_triton", "reason"),
    [
        (False, "not called", False, "CUDA"),
        (True, "Found no NVIDIA driver\non your system", False, "GPU: Found no NVIDIA driver$"),
        (True, "", True, "torch cannot use a GPU: RuntimeError"),
        (True, None, False, "pip install triton"),
    ],
)
def test_the_first_problem_is_named_in_one_line(
    is_built: bool, message: str | None, has_triton: bool, reason: str
) -> None:
    def start() -> None:
        if message is not None:
            fail(message)

    found = devices.cuda_problem(is_built=is_built, start=start, has_triton=has_triton)
    assert found is not None and "\n" not in found
    with pytest.raises(ConfigError, match=reason):
        raise ConfigError(found)


def test_without_a_problem_there_is_no_reason() -> None:
    assert devices.cuda_problem(is_built=True, start=lambda: None, has_triton=True) is None


@without_gpu
def test_auto_uses_the_cpu_without_a_gpu_and_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert devices.use_device("auto") == devices.use_device("cpu") == CPU and devices.gpus() == []
    assert capsys.readouterr() == ("", "")


@without_gpu
@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7"])
def test_a_missing_gpu_is_rejected_with_the_reason(wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        devices.use_device(wanted)
    text, reason = str(refused.value), devices.why_no_cuda()
    assert reason and f"device {wanted} " in text and reason in text and "--device cpu" in text


@pytest.mark.parametrize(
    "wanted", ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "mps", "cpu:0"]
)
def test_an_unknown_device_is_rejected_with_the_known_ones(wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"device {wanted!r}.*auto, cpu, cuda, .*cuda:1"):
        devices.use_device(wanted)


@given(st.integers(0, 9), st.integers(1, 8))
def test_a_number_selects_that_gpu_or_raises(number: int, count: int) -> None:
    if number < count:
        assert devices.gpu_index(f"cuda:{number}", count, 0) == number
        assert devices.gpu_index("cuda", count, number) == number
        assert devices.gpu_index("auto", count, number) == number
    else:
        with pytest.raises(ConfigError, match=rf"cuda:{number}: {count} visible.*cuda:0"):
            devices.gpu_index(f"cuda:{number}", count, 0)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_but_auto_is_used_as_given(dtype: str, device: torch.device) -> None:
    own = {"cpu": "float32", "cuda": "bfloat16"}[device.type]
    for quantization in (None, "none"):
        assert resolved(dtype, quantization, device) == (own if dtype == "auto" else dtype)


@pytest.mark.parametrize("quantization", ["int8", "auto"])
def test_quantization_needs_a_cpu_and_float32(quantization: str) -> None:
    wanted = FASTEST if quantization == "auto" else quantization
    assert {resolved(t, quantization, CPU) for t in ("auto", "float32")} == {wanted}
    with pytest.raises(ConfigError, match=rf"quantization {quantization} .*CPU.*--device"):
        resolved("auto", quantization, CUDA)
    with pytest.raises(ConfigError, match=r"needs dtype .*not float16"):
        resolved("float16", quantization, CPU)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_gpu_gets_the_gpu_backend(precision: str) -> None:
    pytest.importorskip("triton")
    backend = choose_backend(model(), precision, "cuda:1", torch.float8_e4m3fn)
    assert (type(backend).__name__, backend.name) == ("GpuBackend", f"gpu {precision}")
    assert str(backend.device) == "cuda:1" and backend.kv_dtype == torch.float8_e4m3fn  # type: ignore[attr-defined]


def test_an_fp8_kv_cache_needs_a_gpu() -> None:
    assert kv_dtype_for("auto", CPU) is kv_dtype_for("auto", CUDA) is None
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs a GPU: .") as refused:
        kv_dtype_for("fp8", CPU)
    assert (devices.why_no_cuda() or "--device cuda") in str(refused.value)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'int4'.*auto, fp8, int8"):
        kv_dtype_for("int4", CPU)


def test_a_missing_attention_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_attention("triton", CPU)
    check_attention("triton", CUDA)
    with pytest.raises(ConfigError, match=r"'sdpa'.*triton, flashinfer, flash-attn"):
        check_attention("sdpa", CUDA)
    with pytest.raises(ConfigError, match="attention flashinfer needs a GPU"):
        check_attention("flashinfer", CPU)
    for name, module, package in (
        ("flashinfer", "flashinfer", "flashinfer-python"),
        ("flash-attn", "flash_attn", "flash-attn"),
    ):
        if find_spec(module) is None:
            with pytest.raises(ConfigError, match=f"pip install {package}.*--attention triton"):
                check_attention(name, CUDA)
        (tmp_path / f"{module}.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        check_attention(name, CUDA)


SIZES = st.integers(0, 80 * GIB)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(1, GIB), st.floats(0.01, 1))
def test_blocks_fill_the_fraction_and_never_more(
    total: int, weights: int, others: int, step: int, reserve: int, block: int, share: float
) -> None:
    budget = memory.Budget(
        total=total, weights=weights, others=others, step=step, reserve=reserve, block=block
    )
    have, need = int(total * share), weights + others + step + reserve
    if have - need >= block:
        num_blocks = memory.num_blocks_in(budget, share)
        assert num_blocks >= 1 and 0 <= have - need - num_blocks * block < block
    else:
        with pytest.raises(ConfigError, match="too little"):
            memory.num_blocks_in(budget, share)


def test_too_little_memory_names_need_limit_difference_and_flags() -> None:
    budget = memory.Budget(
        total=16 * GIB, weights=15 * GIB, others=GIB, step=2 * GIB, reserve=GIB, block=GIB // 2
    )
    with pytest.raises(ConfigError) as refused:
        memory.num_blocks_in(budget, 0.5)
    text = str(refused.value)
    for part in (
        "at least 19.50 GiB", "weights 15.00 GiB", "one step 2.00 GiB", "0.5 of 16.00 GiB is 8.00",
        "11.50 GiB too little", "--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs",
        "--dtype",
    ):  # fmt: skip
        assert part in text


def test_weights_that_do_not_fit_are_rejected_before_loading() -> None:
    half = weight_bytes(model(), PlainBackend(torch.bfloat16))
    decoder = Decoder(DummyCheckpoint(model()), PlainBackend(torch.bfloat16))
    assert decoder.num_bytes <= half < 1.01 * decoder.num_bytes  # num_bytes leaves out the norms
    assert 2 * half == weight_bytes(model(), PlainBackend())
    devices.check_weights(GIB, GIB)
    with pytest.raises(ConfigError, match=r"3.00 GiB.*1.00 GiB.*2.00 GiB too little.*--dtype"):
        devices.check_weights(3 * GIB, GIB)


def test_only_running_out_of_memory_becomes_a_config_error() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.20 GiB "
        "of which 10.00 GiB is free. Including non-PyTorch memory, this process has 69 GiB in use."
    )
    explained = (
        r"^it: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 .*79.20 GiB of "
        r"which 10.00 GiB is free; do this$"
    )
    explain = devices.explain_out_of_memory
    with pytest.raises(ConfigError, match=explained), explain("it", "do this"):
        raise torch.OutOfMemoryError(message)
    with pytest.raises(RuntimeError, match="something else"), explain("it", "do this"):
        fail("something else")


@pytest.mark.parametrize(("message", "start"), [
    ("CUDA error: out of memory\nCUDA kernel errors might be reported\nCompile with", "CUDA error"),
    ("Triton Error [CUDA]: out of memory", "Triton Error"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error"),
])  # fmt: skip
def test_every_out_of_memory_error_is_explained_in_one_line(message: str, start: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"^it: {start}[^\n]*; do this$"),
        devices.explain_out_of_memory("it", "do this"),
    ):
        fail(message)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    assert devices.container_free_memory(tmp_path, 77) == 77, "no container"
    for name, text in (("max", "max\n"), ("current", "600\n"), ("stat", "anon 300\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert devices.container_free_memory(tmp_path, 77) == 77, "no limit"
    (tmp_path / "memory.max").write_text("1000\n")
    assert devices.container_free_memory(tmp_path, 77) == 400
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 100\nactive_file 50\n")
    assert devices.container_free_memory(tmp_path, 77) == 550
    assert 0 < devices.free_memory() < 2**50


def config_of(**changes: Any) -> Config:
    return preset(**{"max_model_len": 40, "block_size": 8, "max_num_seqs": 6, **changes})


@given(st.integers(1, 300), st.integers(2, 90), st.integers(1, 300), st.integers(1, 32))
def test_the_measured_prompts_have_all_tokens_and_valid_lengths(
    num_tokens: int, max_model_len: int, max_num_seqs: int, block_size: int
) -> None:
    config = config_of(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, block_size=block_size
    )
    batch = memory.prompt_batch(config, num_tokens, CPU)
    starts, ends = batch.starts_s.tolist(), batch.ends_s.tolist()
    assert len(batch.tokens_t) == starts[-1] == sum(ends) == num_tokens and starts[0] == 0
    assert max(ends) == batch.longest <= max_model_len and min(ends) > 0
    assert [p for end in ends for p in range(end)] == batch.positions_t.tolist()
    assert batch.slots_t.max() < block_size and batch.tables_sw.max() == 0
    assert batch.tables_sw.shape[1] * block_size >= batch.longest
    assert len(batch.sampled_n) == min(max(max_num_seqs, SLICE), num_tokens)
    assert batch.row_ids_s is not None and len(batch.row_ids_s) == len(ends)


def test_the_measured_step_computes_every_token_and_every_row() -> None:
    class Counting(Decoder):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden))
            return super().logits(hidden)

    rows: list[int] = []
    decoder, config = Counting(DummyCheckpoint(model()), PlainBackend()), config_of()
    blocks = decoder.backend.kv_blocks(decoder.config, 1, config.block_size).zero_()
    memory.run_step(decoder, config, 100, blocks)
    memory.run_step(decoder, config, 6, blocks)
    assert rows == [100, 6] and blocks.abs().sum(dim=(0, 4, 5)).min() > 0, "every layer stored"


def test_the_executors_buffers_are_counted() -> None:
    pytest.importorskip("triton")
    from headway.executor.gpu.executor import GpuExecutor

    decoder = Decoder(DummyCheckpoint(model()), PlainBackend())
    config = config_of(max_num_batched_tokens=4000, num_blocks=3, max_model_len=30000)
    executor = GpuExecutor(decoder, config)
    kept = (executor.mixed._hidden, executor.state.tensors.tables)
    assert memory.buffer_bytes(decoder, config) == sum(each.nbytes for each in kept) > 10**5
    about = replace(model(), sliding_window=8, windowed_layers=frozenset([0]))
    decoder = Decoder(DummyCheckpoint(about), PlainBackend())
    windowed = replace(config, sliding_window=8, num_window_blocks=2, num_host_blocks=0)
    tables = GpuExecutor(decoder, windowed).state.tensors
    assert tables.window_tables is not None
    more = memory.buffer_bytes(decoder, config) - sum(each.nbytes for each in kept)
    assert more == tables.window_tables.nbytes


def test_the_measured_step_stores_in_both_kinds_of_blocks() -> None:
    about = replace(model(), sliding_window=8, windowed_layers=frozenset([0]))
    decoder, config = Decoder(DummyCheckpoint(about), PlainBackend()), config_of()
    both = kv_blocks.allocate(decoder, memory.one_of_each(decoder.config, config))
    for blocks in both:
        assert blocks is not None and len(blocks) == 1
        blocks.zero_()
    memory.run_step(decoder, config, 20, *both)
    assert all(blocks is not None and blocks.any() for blocks in both)


def test_the_measured_step_runs_through_the_gpu_kernels() -> None:
    pytest.importorskip("triton")
    from headway.model.backends.gpu import GpuBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = GpuBackend(torch.float32, device)
    decoder, config = Decoder(DummyCheckpoint(model(), device), backend), config_of()
    blocks = backend.kv_blocks(decoder.config, 1, config.block_size).zero_()
    memory.run_step(decoder, config, 50, blocks)
    assert blocks.abs().sum(dim=(0, 4, 5)).min() > 0 and blocks.isfinite().all()


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from headway import LLM, SamplingParams
with LLM(sys.argv[1], load_format="dummy", threads=1) as llm:
    answer = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0]
print(len(answer.outputs[0].token_ids))
"""


def test_a_cpu_needs_no_triton(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON, str(save_tiny(tmp_path))]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "2\n"


def room(blocks: int, seen: list[Config] | None = None, free: int = 80 * GIB) -> GpuRoom:
    def measure(config: Config) -> int:
        if seen is not None:
            seen.append(config)
        return blocks

    return GpuRoom(free=free, measure=measure)


LONG = replace(model(), max_model_len=8192)


@pytest.mark.parametrize(
    ("name", "settings", "limits"),
    [
        ("headway", {}, (256, 8192)),
        ("nano_vllm", {}, (512, 16384)),
        ("headway", {"max_num_seqs": 9000}, (9000, 9000)),
        ("headway", {"max_num_batched_tokens": 100}, (100, 100)),
        ("headway", {"max_num_seqs": 7, "max_num_batched_tokens": 70}, (7, 70)),
    ],
)
def test_a_gpu_uses_the_presets_limits(
    name: str, settings: dict[str, int], limits: tuple[int, int]
) -> None:
    config = fit(LONG, 2, EngineOptions(preset=name, **settings), room(500))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == limits
    assert config.num_blocks == 500
    assert config.block_size == 16
    if not settings:
        on_cpu = fit(LONG, 2, EngineOptions(preset=name, **settings))
        assert (on_cpu.max_num_seqs, on_cpu.max_num_batched_tokens) == (64, 512)


def test_memory_is_measured_unless_blocks_or_bytes_are_given() -> None:
    seen: list[Config] = []
    measured = fit(LONG, 2, EngineOptions(preset="vllm_v1"), room(123, seen))
    assert measured.num_blocks == 123 and len(seen) == 1
    limits = seen[0].max_num_seqs, seen[0].max_num_batched_tokens, seen[0].max_model_len
    assert limits == (256, 8192, 8192)
    block = 16 * LONG.kv_bytes(2)
    for size, num_blocks in (({"num_blocks": 9}, 9), ({"kv_memory": 5 * block}, 5)):
        options = EngineOptions(preset="vllm_v1", **size)
        assert fit(LONG, 2, options, room(123, seen)).num_blocks == num_blocks
    assert len(seen) == 1


def test_a_gpu_divides_its_blocks_among_both_kinds_of_layers() -> None:
    """What the sliding-window layers cannot use is left to the others."""
    about = replace(LONG, sliding_window=64, windowed_layers=frozenset([0]))
    options = EngineOptions(preset="vllm_v1", max_num_seqs=4)
    config = fit(about, 2, options, room(1000))
    assert config.sliding_window == 64 and config.num_window_blocks < 1000 < config.num_blocks
    assert config.num_blocks + config.num_window_blocks <= 2000, "layers of both kinds are as many"
    with pytest.raises(ConfigError, match="of GPU memory is free"):
        fit(about, 2, options, room(1000, free=10**5))


def test_no_more_blocks_are_allocated_than_all_requests_can_fill() -> None:
    options = EngineOptions(preset="vllm_v1", max_num_seqs=3, max_model_len=100)
    assert fit(LONG, 2, options, room(10**6)).num_blocks == 3 * 7


def test_max_model_len_above_the_models_limit_is_rejected_with_both_numbers() -> None:
    assert fit(LONG, 2, EngineOptions(preset="vllm_v1", max_model_len=8192)).max_model_len == 8192
    with pytest.raises(ConfigError, match="max_model_len .*8192.*9000"):
        fit(LONG, 2, EngineOptions(preset="vllm_v1", max_model_len=9000))


@pytest.mark.parametrize("settings", [{"num_blocks": 10**6}, {"num_host_blocks": 5 * 10**7}])
def test_blocks_that_do_not_fit_on_gpu_or_host_are_rejected(
    settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.loading.free_memory", lambda: 8 * GIB)
    with pytest.raises(ConfigError, match=r"needs [0-9.]+ GiB.* [0-9.]+ GiB .*--kv-memory"):
        fit(LONG, 2, EngineOptions(preset="vllm_v1", **settings), room(10, free=GIB))


def test_swapping_pins_at_most_a_fraction_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.loading.free_memory", lambda: 64 * GIB)
    wide, seen = 2**12, list[Config]()  # so wide that the host could not hold as many blocks
    block = 16 * LONG.kv_bytes(wide)
    config = fit(LONG, wide, EngineOptions(preset="headway"), room(10**7, seen, 10**9 * GIB))
    assert 0 < config.num_host_blocks < config.num_blocks
    assert 7 * GIB < config.num_host_blocks * block <= 8 * GIB
    assert seen[0].num_host_blocks > 0, "the measurement includes the staging buffers"
    assert fit(LONG, 2, EngineOptions(preset="headway"), room(50)).num_host_blocks == 50
    assert fit(LONG, 2, EngineOptions(preset="vllm_v1"), room(50)).num_host_blocks == 0
    three = EngineOptions(preset="headway", num_host_blocks=3)
    assert fit(LONG, 2, three, room(50)).num_host_blocks == 3


def test_a_failure_to_pin_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.executor.gpu.swap import _pin

    refusing = SimpleNamespace(
        cudaHostRegister=lambda *_: 2, cudaError=SimpleNamespace(success=0),
        cudaGetErrorString={2: "out of memory"}.get,
    )  # fmt: skip
    launched = list[object]()

    def launch(*_: object, **where: object) -> None:
        launched.append(where)
        raise RuntimeError("CUDA error: out of memory")

    blocks = torch.empty((2, 2**19), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch, "zeros", launch)
    with pytest.raises(ConfigError, match=r"2.0 MiB .*\(out of memory\).*--num-host-blocks"):
        _pin(blocks)
    assert launched == [{"device": "cuda"}], "the next launch would report the error again"


@pytest.mark.parametrize("is_lost", [False, True])
def test_memory_is_unpinned_after_the_last_copy_even_if_the_device_is_lost(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.executor.gpu.swap import _unpin

    done = list[object]()

    def wait() -> None:
        done.append("waited")
        if is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runtime = SimpleNamespace(cudaHostUnregister=done.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    blocks, stream = torch.empty((2, 8)), SimpleNamespace(synchronize=wait)
    _unpin(blocks, stream)  # type: ignore[arg-type]
    assert done == ["waited", blocks.data_ptr()]


def test_the_memory_of_all_graphs_is_counted() -> None:
    """On an H200, with 28 layers, 91 graphs of mixed passes took 88 MiB and 34 of decodes 16."""
    config = preset("headway", max_num_seqs=256, max_num_batched_tokens=8192)
    for num_layers in (1, 28, 80):
        count = 10**7 * num_layers
        decoder = SimpleNamespace(
            config=SimpleNamespace(
                num_layers=num_layers, num_params=count, num_used=partial(int, count)
            ),
            num_bytes=4 * count,
            norm=torch.zeros(1), shard=None, max_kv_heads=8,
        )  # fmt: skip
        num_mixed, num_decodes = len(memory.graph_sizes(decoder, config)), 61  # type: ignore[arg-type]
        need = num_layers / 28 * (num_mixed * 88 / 91 + num_decodes * 16 / 34) * 2**20
        assert num_mixed > 20 and need < memory.graph_bytes(decoder, config) < 1.5 * need  # type: ignore[arg-type]


def test_a_cache_that_does_not_fit_names_what_swapping_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.loading.free_memory", lambda: 8 * GIB)
    with pytest.raises(ConfigError, match=r"900.00 GiB, and 900.00 GiB for swapped.* 1800.00 GiB"):
        _check_memory(900 * 2**30, 900 * 2**30, None)
    with pytest.raises(ConfigError, match=r"KV cache needs 900.00 GiB, but"):
        _check_memory(900 * 2**30, 0, None)


class Unlaunched:
    """A kernel that is not launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("kv_heads", "max_length"), [(1, 5000), (4, 40000), (8, 300)])
def test_partial_results_of_decodes_are_reserved(
    kv_heads: int, max_length: int, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from headway.executor.gpu.graphs import padded_rows
    from headway.executor.gpu.mixed_pass import MixedPass
    from headway.model.backends.deterministic import DeterministicBackend, InvariantAttention
    from headway.model.backends.gpu import GpuBackend, TritonAttention
    from headway.model.kernels.attention import decode, invariant_attention
    from headway.model.kernels.attention.splits import split_counts

    config = preset("headway", max_num_seqs=200, max_model_len=max_length)
    model = SimpleNamespace(num_heads=8, num_kv_heads=kv_heads, head_dim=64)
    backend = (DeterministicBackend if is_deterministic else GpuBackend)(torch.float32, "cpu")
    kernels = (InvariantAttention if is_deterministic else TritonAttention)()
    decoder: Any = SimpleNamespace(
        config=model, norm=torch.zeros(1), max_kv_heads=kv_heads, backend=backend
    )
    needs, allocate = [0], decode.PartialAttention.allocate

    def noted(*given: Any) -> Any:
        made = allocate(*given)
        needs.append(made.sums.nbytes + made.tops.nbytes + made.weights.nbytes)
        return made

    monkeypatch.setattr(decode.PartialAttention, "allocate", staticmethod(noted))
    for module in (decode, invariant_attention):
        monkeypatch.setattr(module, "_attend", Unlaunched())
        monkeypatch.setattr(module, "_join", Unlaunched())
    passes: Any = SimpleNamespace(decoder=decoder, _largest=SimpleNamespace(tokens=0))
    prompt: Any = SimpleNamespace(start=0, end=9000)  # too large for a captured pass
    sizes = set[tuple[int, int]]()
    for count in range(1, config.max_num_seqs + 1):
        size, _ = MixedPass._size(passes, np.arange(count), [prompt])
        rows = padded_rows(count)
        sizes |= {(size.decodes, size.num_splits)}
        sizes |= {(rows, num_splits) for num_splits in split_counts(rows * kv_heads)}
    width = -(-max_length // config.block_size)
    with torch.device("meta"):
        blocks = torch.empty((1, 1, 2, kv_heads, config.block_size, model.head_dim))
        for num_rows, num_splits in sizes:
            q = torch.empty((num_rows, model.num_heads, model.head_dim))
            batch: Any = SimpleNamespace(
                num_decodes=num_rows, num_splits=num_splits, tables_sw=torch.empty((1, width)),
                row_ids_s=torch.empty(num_rows), positions_t=torch.empty(num_rows),
            )  # fmt: skip
            kernels.decode(0, q, torch.empty_like(q), batch, blocks)
    assert len(needs) > 1 and max(needs) == memory.partial_bytes(decoder, config)


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(16, 8), (28, 4), (1, 1)])
def test_partial_results_of_prompts_with_few_tokens_are_reserved(
    num_heads: int, kv_heads: int
) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from headway.model.kernels.attention.split_tiles import shared_sums
    from headway.model.kernels.attention.splits import MAX_TILE_ROWS, prefill_splits
    from headway.model.kernels.products.tiles import device_limits

    decoder: Any = SimpleNamespace(config=SimpleNamespace(head_dim=128))
    needs = []
    for num_tokens in range(1, 20_000):
        num_tiles = -(-num_tokens * num_heads // kv_heads // MAX_TILE_ROWS) * kv_heads
        if prefill_splits(num_tiles, device_limits()[0]) > 1:
            sums = shared_sums(num_tokens * num_heads, 128, torch.device("meta"))
            needs.append(sums.nbytes)
    assert 0.8 * memory.shared_bytes(decoder) < max(needs) <= memory.shared_bytes(decoder)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_fraction_of_memory_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization .*above 0 and at most 1"):
        EngineOptions(gpu_memory_utilization=share)
    assert EngineOptions(gpu_memory_utilization=1).gpu_memory_utilization == 1


def test_the_cpu_executor_runs_on_a_cpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "threads": 1}
    with LLM(str(save_tiny(tmp_path)), **options) as llm:
        assert (llm.loaded.device, llm.loaded.precision) == ("cpu", "float32")
        assert llm.engine.async_scheduling == 0 and isinstance(llm.executor, CpuExecutor)
        assert isinstance(make_executor(llm.loaded.decoder, llm.config), CpuExecutor)
    with LLM(str(tmp_path), async_scheduling=1, **options) as llm:
        assert llm.engine.async_scheduling == 1


COMMANDS = [
    ("run",), ("generate", "a"), ("chat",), ("bench", "throughput"), ("bench", "latency"),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return options_of(save_tiny(tmp_path_factory.mktemp("tiny")))


@without_gpu
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_says_why_no_gpu_is_used(command: tuple[str, ...], tiny: list[str]) -> None:
    text = sentence(*command, *tiny, "--device", "cuda")
    assert "device cuda " in text and (devices.why_no_cuda() or "") in text


@without_gpu
def test_profile_says_why_no_gpu_is_used(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = sentence("bench", "profile", str(tmp_path), "--device", "cuda", "--out", out)
    assert "device cuda " in text and (devices.why_no_cuda() or "") in text and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--device", "tpu"), "device 'tpu'"),
        (("--kv-cache-dtype", "fp8"), "kv_cache_dtype fp8 needs a GPU"),
        (("--kv-cache-dtype", "int4"), "kv_cache_dtype 'int4'"),
        (("--quantization", "fp8"), "quantization fp8 needs a GPU"),
        (("--attention", "flashinfer"), "attention flashinfer needs a GPU"),
        (("--gpu-memory-utilization", "1.5"), "gpu_memory_utilization"),
    ],
)
def test_options_that_need_a_gpu_are_rejected_on_a_cpu(
    tiny: list[str], arguments: tuple[str, ...], problem: str
) -> None:
    on_cpu = () if "--device" in arguments else ("--device", "cpu")
    assert problem in sentence("generate", "a", *tiny, *on_cpu, *arguments)


def test_models_lists_the_gpus() -> None:
    done = headway("models")
    reason = devices.why_no_cuda()
    assert done.code == 0
    shown = " ".join(done.out.split())
    first = f"No GPU is used: {reason}" if reason else f"GPU cuda:0: {devices.gpus()[0].name}"
    assert first in shown
