"""Laws of where a model runs and of the memory it is given; all of them hold without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway import Config, preset
from headway.errors import ConfigError
from headway.executor.cpu import TorchExecutor
from headway.executor.extra import SLICE
from headway.executor.factory import make_executor
from headway.executor.gpu.memory import (
    Budget,
    graph_bytes,
    kept_bytes,
    num_blocks_in,
    prompts,
    run_step,
)
from headway.llm import LLM
from headway.loading import GpuRoom, LoadOptions, fit
from headway.model.backends.plain import PlainBackend
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.devices import (
    check_weights,
    explaining,
    free_memory,
    gpus,
    numbered,
    room_in_group,
    use_device,
    why_no_cuda,
    why_not,
)
from headway.model.precision import (
    DTYPES,
    FASTEST,
    QUANTIZATIONS,
    check_attention,
    choose_backend,
    kv_dtype_for,
    resolved,
    weight_bytes,
)
from headway.model.weights.checkpoint import DummyCheckpoint
from tests.cli.test_cli import headway, sentence
from tests.cli.test_cli_generate import SHAPE, options_of, save_tiny

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
without_gpu = pytest.mark.skipif(why_no_cuda() is None, reason="a GPU can be used here")


def fail(said: str) -> None:
    raise RuntimeError(said)


@cache
def model() -> ModelConfig:
    return from_hf({**SHAPE, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}, "here")


# Which device.


@pytest.mark.parametrize(
    ("is_built", "said", "has_triton", "reason"),
    [
        (False, "unheard", False, "torch is built without CUDA"),
        (True, "Found no NVIDIA driver\non your system", False, "GPU: Found no NVIDIA driver"),
        (True, "", True, "torch cannot use a GPU: RuntimeError"),
        (True, None, False, "triton.* is not installed: pip install triton"),
    ],
)
def test_the_first_thing_in_the_way_is_named_in_one_line(
    is_built: bool, said: str | None, has_triton: bool, reason: str
) -> None:
    def start() -> None:
        if said is not None:
            fail(said)

    found = why_not(is_built=is_built, start=start, has_triton=has_triton)
    assert found is not None and "\n" not in found
    with pytest.raises(ConfigError, match=reason):
        raise ConfigError(found)


def test_with_nothing_in_the_way_there_is_no_reason() -> None:
    assert why_not(is_built=True, start=lambda: None, has_triton=True) is None


@without_gpu
def test_auto_takes_the_cpu_where_there_is_no_gpu_and_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert use_device("auto") == use_device("cpu") == CPU and gpus() == []
    assert capsys.readouterr() == ("", "")


@without_gpu
@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        use_device(wanted)
    text, reason = str(refused.value), why_no_cuda()
    assert reason and text.startswith(f"device {wanted}: {reason}") and "--device cpu" in text


@pytest.mark.parametrize(
    "wanted", ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "mps", "cpu:0"]
)
def test_an_unknown_device_is_refused_with_those_there_are(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; there are auto, cpu, cuda, and cuda:1"):
        use_device(wanted)


@given(st.integers(0, 9), st.integers(1, 8))
def test_a_number_means_that_gpu_or_none(number: int, count: int) -> None:
    if number < count:
        assert numbered(f"cuda:{number}", count, 0) == numbered("cuda", count, number) == number
        assert numbered("auto", count, number) == number
    else:
        with pytest.raises(ConfigError, match=rf"cuda:{number}: {count} can be seen.*cuda:0"):
            numbered(f"cuda:{number}", count, 0)


# Which arithmetic.


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_means_itself_but_for_auto(dtype: str, device: torch.device) -> None:
    own = {"cpu": "float32", "cuda": "bfloat16"}[device.type]
    for quantization in (None, "none"):
        assert resolved(dtype, quantization, device) == (own if dtype == "auto" else dtype)


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_quantization_is_for_cpus_and_float32(quantization: str) -> None:
    wanted = FASTEST if quantization == "auto" else quantization
    assert {resolved(t, quantization, CPU) for t in ("auto", "float32")} == {wanted}
    with pytest.raises(ConfigError, match=rf"quantization {quantization} .*CPU.*--device"):
        resolved("auto", quantization, CUDA)
    with pytest.raises(ConfigError, match=r"needs dtype .*not float16"):
        resolved("float16", quantization, CPU)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_on_a_gpu_the_backend_is_the_gpus(precision: str) -> None:
    pytest.importorskip("triton")
    backend = choose_backend(model(), precision, "cuda:1", torch.float8_e4m3fn)
    assert (type(backend).__name__, backend.name) == ("GpuBackend", f"gpu {precision}")
    assert str(backend.device) == "cuda:1" and backend.kv_dtype == torch.float8_e4m3fn  # type: ignore[attr-defined]


def test_keys_and_values_in_eight_bits_need_a_gpu() -> None:
    assert kv_dtype_for("auto", CPU) is kv_dtype_for("auto", CUDA) is None
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs a GPU: .") as refused:
        kv_dtype_for("fp8", CPU)
    assert (why_no_cuda() or "--device cuda") in str(refused.value)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'int4' is unknown; there are auto, fp8"):
        kv_dtype_for("int4", CPU)


def test_an_attention_is_there_or_its_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_attention("triton", CPU)
    check_attention("triton", CUDA)
    with pytest.raises(ConfigError, match="unknown; there are triton, flashinfer, flash-attn"):
        check_attention("sdpa", CUDA)
    with pytest.raises(ConfigError, match="attention flashinfer needs a GPU"):
        check_attention("flashinfer", CPU)
    for name, module, package in (
        ("flashinfer", "flashinfer", "flashinfer-python"),
        ("flash-attn", "flash_attn", "flash-attn"),
    ):
        if find_spec(module) is None:
            with pytest.raises(ConfigError, match=f"pip install {package}, or --attention triton"):
                check_attention(name, CUDA)
        (tmp_path / f"{module}.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        check_attention(name, CUDA)


# Memory, counted.

SIZES = st.integers(0, 80 * GIB)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(1, GIB), st.floats(0.01, 1))
def test_blocks_fill_the_share_and_never_more(
    total: int, weights: int, others: int, step: int, reserve: int, block: int, share: float
) -> None:
    budget = Budget(
        total=total, weights=weights, others=others, step=step, reserve=reserve, block=block
    )
    have, need = int(total * share), weights + others + step + reserve
    if have - need >= block:
        num_blocks = num_blocks_in(budget, share)
        assert num_blocks >= 1 and 0 <= have - need - num_blocks * block < block
    else:
        with pytest.raises(ConfigError, match="too little"):
            num_blocks_in(budget, share)


def test_too_little_memory_is_told_with_need_limit_lack_and_flags() -> None:
    budget = Budget(
        total=16 * GIB, weights=15 * GIB, others=GIB, step=2 * GIB, reserve=GIB, block=GIB // 2
    )
    with pytest.raises(ConfigError) as refused:
        num_blocks_in(budget, 0.5)
    text = str(refused.value)
    for said in (
        "at least 19.50 GiB", "weights 15.00 GiB", "one step 2.00 GiB", "0.5 of 16.00 GiB is 8.00",
        "11.50 GiB too little", "--gpu-memory-utilization", "--max-num-batched-tokens", "--max-num-seqs",
        "--dtype",
    ):  # fmt: skip
        assert said in text


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded() -> None:
    half = weight_bytes(model(), PlainBackend(torch.bfloat16))
    decoder = Decoder(DummyCheckpoint(model()), PlainBackend(torch.bfloat16))
    assert decoder.num_bytes <= half < 1.01 * decoder.num_bytes  # norms are small
    assert 2 * half == weight_bytes(model(), PlainBackend())
    check_weights(GIB, GIB)
    with pytest.raises(
        ConfigError, match=r"need 3.00 GiB and 1.00 GiB.*2.00 GiB too little.*--prec"
    ):
        check_weights(3 * GIB, GIB)


def test_running_out_of_memory_becomes_a_sentence_and_nothing_else_does() -> None:
    said = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.20 GiB "
        "of which 10.00 GiB is free. Including non-PyTorch memory, this process has 69 GiB in use."
    )
    with (
        pytest.raises(
            ConfigError,
            match=r"^it: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 .*79.20 GiB of "
            r"which 10.00 GiB is free; do this$",
        ),
        explaining("it", "do this"),
    ):
        raise torch.OutOfMemoryError(said)
    with pytest.raises(RuntimeError, match="something else"), explaining("it", "do this"):
        fail("something else")


@pytest.mark.parametrize(("said", "told"), [
    ("CUDA error: out of memory\nCUDA kernel errors might be reported\nCompile with", "CUDA error"),
    ("Triton Error [CUDA]: out of memory", "Triton Error"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error"),
])  # fmt: skip
def test_whoever_runs_out_of_memory_is_explained_in_a_line(said: str, told: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"^it: {told}[^\n]*; do this$"),
        explaining("it", "do this"),
    ):
        fail(said)


def test_a_container_leaves_what_its_limit_says(tmp_path: Path) -> None:
    assert room_in_group(tmp_path, 77) == 77, "no container"
    for name, text in (("max", "max\n"), ("current", "600\n"), ("stat", "anon 300\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert room_in_group(tmp_path, 77) == 77, "no limit"
    (tmp_path / "memory.max").write_text("1000\n")
    assert room_in_group(tmp_path, 77) == 400
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 100\nactive_file 50\n")
    assert room_in_group(tmp_path, 77) == 550
    assert 0 < free_memory() < 2**50


# The step that memory is measured with.


def config_of(**changes: Any) -> Config:
    return preset(**{"max_model_len": 40, "block_size": 8, "max_num_seqs": 6, **changes})


@given(st.integers(1, 300), st.integers(2, 90), st.integers(1, 300), st.integers(1, 32))
def test_the_tried_prompts_have_all_tokens_and_no_length_too_many(
    num_tokens: int, max_model_len: int, seats: int, block_size: int
) -> None:
    config = config_of(max_model_len=max_model_len, max_num_seqs=seats, block_size=block_size)
    batch = prompts(config, num_tokens, CPU)
    starts, ends = batch.starts_s.tolist(), batch.ends_s.tolist()
    assert len(batch.tokens_t) == starts[-1] == sum(ends) == num_tokens and starts[0] == 0
    assert max(ends) == batch.longest <= max_model_len and min(ends) > 0
    assert [p for end in ends for p in range(end)] == batch.positions_t.tolist()
    assert batch.slots_t.max() < block_size and batch.tables_sw.max() == 0
    assert batch.tables_sw.shape[1] * block_size >= batch.longest
    assert len(batch.sampled_n) == min(max(seats, SLICE), num_tokens)
    assert batch.seats_s is not None and len(batch.seats_s) == len(ends)


def test_the_tried_step_computes_every_token_and_every_seat() -> None:
    class Counting(Decoder):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            rows.append(len(hidden))
            return super().logits(hidden)

    rows: list[int] = []
    decoder, config = Counting(DummyCheckpoint(model()), PlainBackend()), config_of()
    blocks = decoder.backend.kv_blocks(decoder.config, 1, config.block_size).zero_()
    run_step(decoder, config, 100, blocks)
    run_step(decoder, config, 6, blocks)
    assert rows == [100, 6] and blocks.abs().sum(dim=(0, 4, 5)).min() > 0, "every layer stored"


def test_what_an_executor_keeps_is_counted() -> None:
    pytest.importorskip("triton")
    from headway.executor.gpu.executor import DeviceExecutor

    decoder = Decoder(DummyCheckpoint(model()), PlainBackend())
    config = config_of(max_num_batched_tokens=4000, num_blocks=3, max_model_len=30000)
    executor = DeviceExecutor(decoder, config)
    kept = (executor.mixed._hidden, executor.seats.tensors.tables)
    assert kept_bytes(decoder, config) == sum(each.nbytes for each in kept) > 10**5


def test_the_tried_step_runs_through_the_gpus_kernels() -> None:
    pytest.importorskip("triton")
    from headway.model.backends.gpu import GpuBackend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = GpuBackend(torch.float32, device)
    decoder, config = Decoder(DummyCheckpoint(model(), device), backend), config_of()
    blocks = backend.kv_blocks(decoder.config, 1, config.block_size).zero_()
    run_step(decoder, config, 50, blocks)
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
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "2\n"


# What a config becomes on a GPU.


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
        ("headway", {"max_tokens": 100}, (100, 100)),
        ("headway", {"max_num_seqs": 7, "max_num_batched_tokens": 70}, (7, 70)),
    ],
)
def test_a_gpu_has_the_presets_seats_and_tokens(
    name: str, settings: dict[str, int], limits: tuple[int, int]
) -> None:
    config = fit(LONG, 2, name, None, settings, room(500))
    assert (
        config.max_num_seqs,
        config.max_num_batched_tokens,
    ) == limits and config.num_blocks == 500
    assert config.block_size == 16
    if not settings:
        on_cpu = fit(LONG, 2, name, None, settings)
        assert (on_cpu.max_num_seqs, on_cpu.max_tokens) == (64, 512)


def test_memory_is_measured_unless_blocks_or_bytes_are_given() -> None:
    seen: list[Config] = []
    measured = fit(LONG, 2, "vllm_v1", None, {}, room(123, seen))
    assert measured.num_blocks == 123 and len(seen) == 1
    assert (seen[0].max_num_seqs, seen[0].max_tokens, seen[0].max_model_len) == (256, 8192, 8192)
    assert fit(LONG, 2, "vllm_v1", None, {"num_blocks": 9}, room(123, seen)).num_blocks == 9
    block = 16 * LONG.kv_bytes(2)
    assert fit(LONG, 2, "vllm_v1", 5 * block, {}, room(123, seen)).num_blocks == 5
    assert len(seen) == 1


def test_no_more_blocks_are_taken_than_all_seats_can_fill() -> None:
    config = fit(LONG, 2, "vllm_v1", None, {"max_num_seqs": 3, "max_model_len": 100}, room(10**6))
    assert config.num_blocks == 3 * 7


@pytest.mark.parametrize("settings", [{"num_blocks": 10**6}, {"num_host_blocks": 5 * 10**7}])
def test_blocks_that_gpu_or_host_cannot_hold_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"needs [0-9.]+ GiB.* [0-9.]+ GiB .*--kv-memory"
    ):
        fit(LONG, 2, "vllm_v1", None, settings, room(10, free=GIB))


def test_swapping_pins_at_most_a_share_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.loading.free_memory", lambda: 64 * GIB)
    wide, seen = 2**12, list[Config]()  # so wide that the host could not hold as many blocks
    block = 16 * LONG.kv_bytes(wide)
    config = fit(LONG, wide, "headway", None, {}, room(10**7, seen, 10**9 * GIB))
    assert 0 < config.num_host_blocks < config.num_blocks
    assert 7 * GIB < config.num_host_blocks * block <= 8 * GIB
    assert seen[0].num_host_blocks > 0, "what is measured knows that blocks are swapped"
    assert fit(LONG, 2, "headway", None, {}, room(50)).num_host_blocks == 50
    assert fit(LONG, 2, "vllm_v1", None, {}, room(50)).num_host_blocks == 0
    assert fit(LONG, 2, "headway", None, {"num_host_blocks": 3}, room(50)).num_host_blocks == 3


def test_what_cannot_be_pinned_is_told_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match=r"2.0 MiB of .* pinned \(out of mem.* --num-host-blocks"):
        _pin(blocks)
    assert launched == [{"device": "cuda"}], "nothing that is launched later is told of the error"


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


def test_all_graphs_that_may_be_kept_are_counted() -> None:
    """On an H200 91 of passes with prompts took 88 MiB, of 28 layers, and 34 of decodes took 16."""
    for num_layers in (1, 28, 80):
        need = num_layers / 28 * (192 * 88 / 91 + 84 * 16 / 34) * 2**20
        assert need < graph_bytes(num_layers, 256) < 1.5 * need


# As a user asks for it.


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_of_memory_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0 and at most 1"):
        LoadOptions(gpu_memory_utilization=share)
    assert LoadOptions(gpu_memory_utilization=1).gpu_memory_utilization == 1


def test_on_a_cpu_all_is_as_it_was(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "threads": 1}
    with LLM(str(save_tiny(tmp_path)), **options) as llm:
        assert (llm.loaded.device, llm.loaded.precision) == ("cpu", "float32")
        assert llm.engine.async_scheduling == 0 and isinstance(llm.executor, TorchExecutor)
        assert isinstance(make_executor(llm.loaded.decoder, llm.config), TorchExecutor)
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
def test_every_command_says_why_there_is_no_gpu(command: tuple[str, ...], tiny: list[str]) -> None:
    text = sentence(*command, *tiny, "--device", "cuda")
    assert f"device cuda: {why_no_cuda()}" in text


@without_gpu
def test_profiling_says_why_there_is_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    text = sentence("profile", str(tmp_path), "--device", "cuda", "--out", out)
    assert f"device cuda: {why_no_cuda()}" in text and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--device", "tpu"), "device 'tpu' is unknown"),
        (("--kv-cache-dtype", "fp8"), "kv_cache_dtype fp8 needs a GPU"),
        (("--kv-cache-dtype", "int4"), "kv_cache_dtype 'int4' is unknown"),
        (("--attention", "flashinfer"), "attention flashinfer needs a GPU"),
        (("--gpu-memory-utilization", "1.5"), "gpu_memory_utilization"),
    ],
)
def test_wishes_that_a_cpu_cannot_grant_are_told(
    tiny: list[str], arguments: tuple[str, ...], problem: str
) -> None:
    on_cpu = () if "--device" in arguments else ("--device", "cpu")
    assert problem in sentence("generate", "a", *tiny, *on_cpu, *arguments)


def test_models_says_what_gpus_there_are() -> None:
    done = headway("models")
    reason = why_no_cuda()
    assert done.code == 0
    shown = " ".join(done.out.split())
    assert (
        f"no GPU is used: {reason}" in shown if reason else f"GPU cuda:0: {gpus()[0].name}" in shown
    )
