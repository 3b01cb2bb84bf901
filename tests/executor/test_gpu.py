"""The GPU executor generates the tokens of the CPU executor, whatever the scheduler does."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from headway import Config, Scheduler, preset
from headway.engine.engine import Engine, Observer
from headway.engine.input_processor import embedding_params
from headway.errors import ConfigError
from headway.events import Completed, Event
from headway.executor.base import Executor
from headway.executor.cpu import CpuExecutor
from headway.executor.gpu.graphs import Graphs, padded_rows
from headway.executor.gpu.mixed_pass import PassInputs, PassSize, captured_sizes
from headway.executor.sampling.logprobs import ExtraOutputs
from headway.model.backends.base import Backend
from headway.model.backends.plain import PlainBackend
from headway.model.batch import ForwardBatch
from headway.model.config import ModelConfig, from_hf
from headway.model.decoder import Decoder
from headway.model.footprint import footprint
from headway.model.loader import open_checkpoint
from headway.model.precision import weight_bytes
from headway.model.weights.checkpoint import DummyCheckpoint
from headway.plan import Chunk, Copy, Embedding, Plan
from headway.request import Pooling, Request, RequestParams
from headway.sampling_params import Sampling

pytest.importorskip("triton")
from headway.executor.gpu.executor import GpuExecutor
from headway.executor.gpu.row_state import DeviceRowState
from headway.executor.gpu.swap import MAX_STAGED_BLOCKS, _pin, _unpin
from headway.model.backends import gpu, gpu_passes
from headway.model.backends.deterministic import DeterministicBackend
from headway.model.backends.fp8 import Fp8Backend
from headway.model.backends.gpu import GpuBackend
from headway.model.backends.int4 import Int4Backend
from headway.model.kernels.attention.splits import HALVES, LEADING, SPLIT_COUNTS
from headway.model.kernels.products.int4 import dequantized
from tests.model.test_checkpoint import encoded, random_groups, weights_of, write_gguf
from tests.support import quantized
from tests.support.events import Events

pytestmark = pytest.mark.usefixtures("small_padding")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 61


class Loud(DummyCheckpoint):
    """Random weights large enough for clear choices, and norm weights other than 1."""

    def whole(self, name: str) -> Tensor:
        quiet = super().whole(name)
        if name.endswith("norm.weight"):
            noise = torch.randn(quiet.shape, generator=torch.Generator().manual_seed(len(name)))
            return quiet + 0.3 * noise
        return quiet * 10


def model(kind: str = "Qwen3", **more: object) -> ModelConfig:
    numbers = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    return from_hf(numbers | more, "tiny")


def settings(name: str = "headway", **more: object) -> Config:
    numbers: dict[str, object] = {
        "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 24, "num_blocks": 60,
    }  # fmt: skip
    return preset(name, **(numbers | more))


def settings_for(about: ModelConfig) -> Config:
    """With windows of some layers prompts are split: blocks of both kinds get other numbers then."""
    if not about.windowed_layers:
        return settings()
    config = settings(max_num_batched_tokens=14, chunk="at_most(7)", num_host_blocks=0)
    return replace(config, sliding_window=about.sliding_window or 0, num_window_blocks=20)


def plain(config: Config, about: ModelConfig) -> CpuExecutor:
    return CpuExecutor(Decoder(Loud(about), PlainBackend()), config)


def on_device(config: Config, about: ModelConfig) -> GpuExecutor:
    return GpuExecutor(Decoder(Loud(about), GpuBackend(torch.float32, DEVICE)), config)


def answers(
    make: Callable[[Config, ModelConfig], Executor],
    config: Config,
    about: ModelConfig,
    *,
    async_scheduling: int = 0,
    samplings: list[Sampling | None] | None = None,
    count: int = 4,
    watch: Observer | None = None,
) -> list[list[int]]:
    """The outputs of a few requests; every second one shares a prefix."""
    engine = Engine(Scheduler(config), make(config, about), async_scheduling=async_scheduling)
    if watch is not None:
        engine.observers.append(watch)
    source = random.Random(7)
    shared = [source.randrange(VOCABULARY) for _ in range(9)]
    requests: list[Request] = []
    for number in range(count):
        own = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 8))]
        sampling = samplings[number % len(samplings)] if samplings else None
        params = RequestParams(max_tokens=2 + number % 4, sampling=sampling)
        requests += engine.add(str(number), (shared if number % 2 else []) + own, params)
    engine.run()
    assert engine.fault is None, engine.fault
    return [request.tokens[request.num_prompt :] for request in requests]


FAMILIES = {
    "norms of heads": model(),
    "seven heads, biases": model("Qwen2", num_attention_heads=7, num_key_value_heads=1),
    "its own head": model("Llama", tie_word_embeddings=False, num_attention_heads=4),
}
ALTERNATE = {"sliding_window": 6, "num_attention_heads": 4}
WINDOWED = {
    "a window and sinks": replace(
        model("Mistral", **ALTERNATE), has_sinks=True, attention_scale=0.4
    ),
    "a window in every second layer": replace(  # norms of inputs need squares of the other pass
        model(
            "Qwen2", num_hidden_layers=3, use_sliding_window=True, **ALTERNATE,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        has_sinks=True, embedding_scale=0.02,
    ),
    "gemma3": model("Gemma3", num_hidden_layers=2, sliding_window_pattern=2, **ALTERNATE),
    "olmo2": model("Olmo2", num_attention_heads=4),
    "olmo3": model("Olmo3", num_hidden_layers=2, sliding_window_pattern=2, **ALTERNATE),
}  # fmt: skip


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
QWEN = HEADS | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SPARSE = {
    "experts": model("Mixtral", num_local_experts=4, num_experts_per_tok=2, **HEADS),
    "an expert for all": model("Qwen2Moe", shared_expert_intermediate_size=40, **QWEN),
    "experts in one of two layers": model(
        "Qwen3Moe", num_hidden_layers=2, mlp_only_layers=[1], norm_topk_prob=True, **QWEN
    ),
    "experts with biases": model(
        "GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
        rope_scaling=None, **HEADS,
    ),
}  # fmt: skip


ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
DERIVED = {
    "granite": model("Granite", embedding_multiplier=12.0, num_attention_heads=2),
    "smollm3": model("SmolLM3", no_rope_layers=[0], num_attention_heads=2),
    "phi3": model("Phi3", original_max_position_embeddings=128, num_attention_heads=2),
    "ministral3": model("Ministral3", rope_theta=None, rope_parameters=ROPE, num_attention_heads=2),
}
EVERY = FAMILIES | WINDOWED | SPARSE | DERIVED  # docs/models.md lists their families


@pytest.mark.parametrize("about", EVERY.values(), ids=list(EVERY))
def test_every_architecture_generates_the_tokens_of_plain_torch(about: ModelConfig) -> None:
    config = settings_for(about)
    assert answers(on_device, config, about, async_scheduling=1) == answers(plain, config, about)


def test_the_deterministic_backend_computes_norms_of_outputs_and_gelu() -> None:
    about = WINDOWED["gemma3"]
    backend = DeterministicBackend(torch.float32, DEVICE)
    invariant = GpuExecutor(Decoder(Loud(about), backend), settings_for(about))
    found = answers(lambda *_: invariant, settings_for(about), about, count=2)
    assert found == answers(plain, settings_for(about), about, count=2)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_weights_of_a_gguf_file_are_dequantized_for_a_gpu(kind: Kind, tmp_path: Path) -> None:
    about = model("Llama", hidden_size=256, intermediate_size=256)
    encode = random_groups(kind, {})
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", about, weights_of(about), encode))
    backend = GpuBackend(torch.bfloat16, DEVICE)
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        weight = backend.weight(checkpoint, [f"model.layers.0.{name}"])
        stored = checkpoint.read(f"model.layers.0.{name}.weight")
        assert stored.std() > 0 and torch.equal(weight.matrix.cpu(), stored.bfloat16())
    assert footprint(checkpoint, torch.device("cuda")).weights == weight_bytes(about, backend)


@pytest.mark.parametrize("name", quantized.SCHEMES)
def test_weights_of_a_quantized_file_are_read_for_a_gpu(name: str, tmp_path: Path) -> None:
    """In the 8-bit floats or 4-bit integers of the file, if it has them, or dequantized."""
    scheme, matrix = quantized.SCHEMES[name], "model.layers.1.mlp.down_proj"
    floats = quantized.write(tmp_path, scheme)
    checkpoint, kind = open_checkpoint(tmp_path), GpuBackend
    if scheme.has_fp8:
        kind = partial(Fp8Backend, folds_norms=False)
    elif scheme.bits == 4:
        kind = partial(Int4Backend, quantization=checkpoint.config.quantization)
    found = kind(torch.bfloat16, DEVICE).weight(checkpoint, [matrix])
    if scheme.bits == 4:
        wide = dequantized(found, torch.float32)
        assert torch.equal(wide.cpu(), floats[f"{matrix}.weight"])
    elif scheme.has_fp8:
        assert found.scale is not None
        wide = found.matrix.float().cpu() * found.scale.cpu()[:, None]
        torch.testing.assert_close(wide, floats[f"{matrix}.weight"])
    else:
        assert torch.equal(found.matrix.cpu(), floats[f"{matrix}.weight"].bfloat16())


def test_a_gguf_file_generates_the_same_tokens_on_a_gpu(tmp_path: Path) -> None:
    about, config = model(num_attention_heads=2, intermediate_size=64), settings()
    file = write_gguf(tmp_path / "m.gguf", about, weights_of(about), encoded(Kind.Q8_0))

    def with_file(make: Callable[[Decoder], Executor], backend: Backend) -> list[list[int]]:
        decoder = Decoder(open_checkpoint(file), backend)
        return answers(lambda *_: make(decoder), config, about, count=2)

    found = with_file(lambda each: GpuExecutor(each, config), GpuBackend(torch.float32, DEVICE))
    assert found == with_file(lambda each: CpuExecutor(each, config), PlainBackend())


@pytest.mark.parametrize("max_model_len", [16, 64])
def test_partial_rotation_and_scaled_embeddings_need_only_other_tables(max_model_len: int) -> None:
    """Longrope has other angles above the original length."""
    parameters = {
        "rope_type": "longrope", "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
    }  # fmt: skip
    about = model(
        "Phi3", rope_theta=None, rope_parameters=parameters, num_attention_heads=2,
        original_max_position_embeddings=32,
    )  # fmt: skip
    about = replace(about, embedding_scale=0.5)
    config = settings(max_model_len=max_model_len)
    found = answers(on_device, config, about, count=2)
    assert found == answers(plain, config, about, count=2)


@pytest.mark.parametrize("about", FAMILIES.values(), ids=list(FAMILIES))
def test_products_of_decodes_by_cublas_generate_the_same_tokens(
    about: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MAX_FUSED_ROWS", 0)
    monkeypatch.setattr(gpu, "LARGE_MATRIX", 1)
    monkeypatch.setattr(gpu_passes.FusedDecodePass, "layer", None)  # fails if it is called
    config = settings()
    assert answers(on_device, config, about, async_scheduling=1) == answers(plain, config, about)


def test_cublas_multiplies_more_than_128_rows_of_a_large_layer() -> None:
    large = model(hidden_size=3584, intermediate_size=18944)
    small = model(hidden_size=1024, intermediate_size=3072)
    found = [[gpu.prefers_cublas(rows, each) for rows in (128, 129)] for each in (large, small)]
    assert found == [[False, True], [False, False]]


def test_many_decodes_and_prompt_chunks_share_a_pass() -> None:
    """The decodes' rows would fill tiles of the prefill attention."""
    config = settings(max_num_seqs=16, max_num_batched_tokens=24, num_blocks=120)
    about, seen = FAMILIES["seven heads, biases"], Events()
    found = answers(on_device, config, about, async_scheduling=1, count=14, watch=seen)
    assert any(len(plan.decodes) > 4 and plan.chunks for plan in seen.plans)
    assert found == answers(plain, config, about, count=14)


WAYS: dict[str, tuple[Config, int]] = {
    "alone in flight": (settings(), 0),
    "short pieces": (settings(max_num_batched_tokens=5, chunk="at_most(3)"), 1),
    "recomputed": (settings(num_blocks=7, headroom="watermark(0)"), 1),
    "swapped": (settings("vllm", num_blocks=7, num_host_blocks=40, swap="swap"), 1),
    "several steps": (settings(num_scheduler_steps=3), 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_the_schedule(way: str) -> None:
    config, async_scheduling = WAYS[way]
    seen = Events()
    found = answers(
        on_device, config, FAMILIES["norms of heads"], async_scheduling=async_scheduling, watch=seen
    )
    assert found == answers(plain, settings(), FAMILIES["norms of heads"])
    if way in ("recomputed", "swapped"):
        assert any(each.is_swap == (way == "swapped") for each in seen.preempted)
    if way == "several steps":
        assert any(plan.num_steps > 1 for plan in seen.plans)


class Scores(dict[str, list[float]]):
    """Observer that collects logprobs, of outputs by request and of prompts."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Completed) and isinstance(event.result.extra, ExtraOutputs):
            for request, found in event.result.extra.logprobs.items():
                self.setdefault(request.id, []).extend(one.logprob for one in found)
            for request, places in event.result.extra.prompt.items():
                scores = [one.logprob for _, one in places]
                self.setdefault(f"{request.id} prompt", []).extend(scores)

    def check(self, others: Scores) -> None:
        assert self.keys() == others.keys()
        for name, scores in others.items():
            np.testing.assert_allclose(self[name], scores, atol=2e-4)


def test_requests_that_need_the_host_equal_the_cpu_executor() -> None:
    asked = [
        Sampling(temperature=0.0, repetition_penalty=1.8, logprobs=2),
        Sampling(temperature=0.0, prompt_logprobs=1),
        Sampling(temperature=0.0, logit_bias={3: 50.0}),
        None,
    ]
    about, config = FAMILIES["norms of heads"], settings()
    wanted, found = Scores(), Scores()
    expected = answers(plain, config, about, samplings=asked, watch=wanted)
    made = answers(on_device, config, about, async_scheduling=1, samplings=asked, watch=found)
    assert made == expected
    assert wanted.keys() == {"0", "1 prompt"}
    found.check(wanted)


class Vectors(dict[str, Embedding]):
    """Observer that collects embeddings by request."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Completed) and isinstance(event.result.extra, ExtraOutputs):
            self.update({r.id: v for r, v in event.result.extra.embeddings.items()})


def embeddings(
    make: Callable[[Config, ModelConfig], Executor], config: Config, async_scheduling: int
) -> Vectors:
    """Embeddings of a few prompts with both poolings, beside requests that generate."""
    found, source = Vectors(), random.Random(3)
    executor = make(config, FAMILIES["norms of heads"])
    engine = Engine(Scheduler(config), executor, async_scheduling=async_scheduling)
    engine.observers.append(found)
    for number in range(4):
        prompt = [source.randrange(VOCABULARY) for _ in range(source.randint(3, 14))]
        pooling: Pooling = "last" if number % 2 else "mean"
        engine.add(f"text {number}", prompt[:5], RequestParams(max_tokens=4))
        engine.add(f"{pooling} {number}", prompt, embedding_params(pooling))
    engine.run()
    assert engine.fault is None, engine.fault
    return found


@pytest.mark.parametrize("way", ["short pieces", "recomputed"])
def test_embeddings_equal_the_cpu_executor(way: str) -> None:
    config, async_scheduling = WAYS[way]
    found = embeddings(on_device, config, async_scheduling)
    expected = embeddings(plain, settings(), 0)
    assert found.keys() == expected.keys() == {"mean 0", "last 1", "mean 2", "last 3"}
    for name, vector in expected.items():
        np.testing.assert_allclose(found[name], vector, atol=1e-5)


def test_a_seed_gives_the_same_tokens_in_any_batch_and_through_the_host() -> None:
    about, config = FAMILIES["norms of heads"], settings()
    drawn = Sampling(temperature=1.0, seed=5)
    together = answers(on_device, config, about, async_scheduling=1, samplings=[drawn])
    beside = [replace(drawn, logprobs=0), drawn, replace(drawn, logit_bias={1: 0.0}), drawn]
    assert answers(on_device, config, about, samplings=beside) == together
    others = answers(on_device, config, about, samplings=[replace(drawn, seed=6)], count=2)
    assert others != together[:2]


def test_swapped_blocks_return_unchanged() -> None:
    executor = on_device(settings(num_blocks=6, num_host_blocks=6), FAMILIES["norms of heads"])
    blocks = executor.device_blocks
    blocks.copy_(torch.randn(blocks.shape))
    before = blocks.clone()
    out = executor.launch(Plan(0, copies_out=[Copy(1, 4), Copy(3, 0)])).wait()
    blocks.zero_()
    back = executor.launch(Plan(1, copies_in=[Copy(4, 5), Copy(0, 2)])).wait()
    assert out.swap_in == 0 < back.swap_in <= back.ended - back.started
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(blocks[5], before[1]) and torch.equal(blocks[2], before[3])
    assert not blocks[[0, 1, 3, 4]].any()


def test_more_blocks_than_the_staging_buffers_hold_are_swapped() -> None:
    executor = on_device(settings(num_blocks=400, num_host_blocks=400), FAMILIES["norms of heads"])
    blocks, count = executor.device_blocks, 3 * MAX_STAGED_BLOCKS + 5
    blocks.copy_(torch.randn(blocks.shape))
    before = blocks.clone()
    executor.launch(Plan(0, copies_out=[Copy(n, n) for n in range(count)])).wait()
    executor.launch(Plan(1, copies_in=[Copy(n, count - 1 - n) for n in range(count)])).wait()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(blocks[:count], before[:count].flip(0))
    assert torch.equal(blocks[count:], before[count:])


def test_the_latest_value_of_a_word_is_kept() -> None:
    state = DeviceRowState(3, 5, torch.device(DEVICE))
    state.set_blocks(1, 0, [7, 8, 9])
    state.set_blocks(1, 1, [4])
    state.set_length(2, 11)
    state.set_limit(2, 12)
    state.send()
    assert state.tensors.tables[1].tolist() == [7, 4, 9, 0, 0]
    assert state.tensors.lengths.tolist() == [0, 0, 11, 0]
    assert state.tensors.limits.tolist() == [0, 0, 12, 0]


def exactly_on_device(config: Config, about: ModelConfig) -> GpuExecutor:
    """No pass has padding rows, as with another library's attention."""
    executor = on_device(config, about)
    executor.decoder.backend.supports_padding = False
    return executor


def test_passes_without_padding_rows_generate_the_same_tokens() -> None:
    """Those with padding rows do: see the same settings in WAYS."""
    (config, _), about = WAYS["short pieces"], FAMILIES["norms of heads"]
    assert answers(exactly_on_device, config, about) == answers(plain, config, about)


def fail_captures(graphs: Graphs, error: Exception, is_late: bool) -> list[object]:
    """Let every capture fail, or the first replay if `is_late`; return the sizes tried so far.

    Some of a graph's memory is only allocated when it is first replayed.
    """
    tried: list[object] = []

    class Unlaunchable:
        def replay(self) -> None:
            raise error

    def capture(size: Any) -> None:
        tried.append(size)
        if not is_late:
            raise error
        graphs[size] = Unlaunchable()  # type: ignore[assignment]

    graphs.capture = capture  # type: ignore[method-assign]
    graphs._stream = graphs._stream or object()  # type: ignore[assignment]
    return tried


@pytest.mark.parametrize(("error", "is_late"), [
    (torch.OutOfMemoryError("no room for a graph"), False),
    (RuntimeError("CUDA error: out of memory\nX"), True),
])  # fmt: skip
def test_a_pass_that_cannot_be_captured_runs_uncaptured(error: Exception, is_late: bool) -> None:
    config, about = settings(max_num_batched_tokens=8), FAMILIES["norms of heads"]
    executor = on_device(config, about)
    graphs = executor.mixed.graphs
    tried = fail_captures(graphs, error, is_late)
    executor.mixed.capture(lambda *_: None)
    assert len(tried) == 1 and not len(graphs), "after one failure nothing more is captured"
    expected = answers(plain, config, about, count=2)
    assert answers(lambda *_: executor, config, about, count=2) == expected


class Replayed:
    """A stand-in for a CUDA graph on a CPU."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


def test_small_passes_run_in_graphs_that_were_captured_at_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.executor.gpu.mixed_pass.MIN_TOKENS", 8)
    config, about = settings(max_num_batched_tokens=12), FAMILIES["norms of heads"]
    executor, replayed, tried = on_device(config, about), list[PassSize](), list[PassSize]()
    mixed, graphs, step = executor.mixed, executor.mixed.graphs, executor.mixed._step

    def capture(size: Any) -> None:
        def replay() -> None:
            replayed.append(size)
            step(*size)

        graphs[size] = Replayed(replay)  # type: ignore[assignment]

    graphs.capture = capture  # type: ignore[method-assign]
    graphs._stream = graphs._stream or object()  # type: ignore[assignment]
    graphs._step = lambda *size: tried.append(PassSize(*size))
    mixed.capture(lambda *_: None)
    assert set(replayed) == set(graphs) == set(mixed.sizes), "each ran once"
    replayed.clear()
    samplings = [None, Sampling(temperature=0.0, prompt_logprobs=1)]
    wanted, found = Scores(), Scores()
    expected = answers(plain, config, about, samplings=samplings, watch=wanted)
    outputs = answers(lambda *_: executor, config, about, samplings=samplings, watch=found)
    assert outputs == expected and not tried
    found.check(wanted)
    assert {size.decodes for size in replayed} == {0, 8}


@pytest.mark.parametrize("num_heads", [2, 8])
def test_a_pass_is_padded_to_a_captured_size_or_is_large(num_heads: int) -> None:
    about = model(num_attention_heads=num_heads, num_key_value_heads=num_heads)
    config = settings(max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=8192)
    mixed, source = on_device(config, about).mixed, random.Random(3)
    mixed._max_tokens, captured = 2000, set(captured_sizes(256, 2000, num_heads))
    mixed._largest = max(captured, key=lambda size: size.decodes + size.tokens)
    kinds = set[tuple[bool, bool]]()
    for _ in range(2000):
        num_chunks = source.choice((0, 1, 4, 60, 200))
        sizes = [source.choice((1, 3, 60, 400)) for _ in range(num_chunks)]
        rows = np.arange(source.randint(0 if num_chunks else 1, 256 - num_chunks))
        mixed._rows.lengths[rows] = source.choice((10, 2000))
        mixed._rows.lengths[:1] = source.choice((10, 5000))
        size, is_small = mixed._size(rows, [Chunk(None, 0, n, 0, True) for n in sizes])  # type: ignore[arg-type]
        assert size.decodes >= len(rows) and size.tokens >= sum(sizes)
        assert size.chunks >= num_chunks and (size in captured) == is_small
        if is_small and num_chunks:
            assert size.tokens <= max(64, 1.25 * max(sum(sizes), 4 * num_chunks) + 64)
            assert size.decodes <= max(8, 2 * len(rows) + 32)
        else:
            assert is_small or (size.tokens == sum(sizes) and size.chunks == num_chunks)
        kinds.add((is_small, bool(num_chunks)))
    assert kinds == {(True, True), (True, False), (False, True)}


def test_the_inputs_of_every_pass_are_aligned() -> None:
    """Otherwise Triton compiles another kernel for some sizes."""
    for decodes, tokens, chunks in product((0, 8, 32), (1, 7, 9001), (1, 3, 100)):
        inputs = PassInputs.allocate(PassSize(decodes, tokens, chunks), torch.device("cpu"))
        assert inputs.longs.shape == (3, decodes + tokens)
        assert all(row.data_ptr() % 16 == 0 for row in (*inputs.longs, *inputs.ints))


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU needs pinned memory")
def test_host_blocks_are_unpinned_when_the_executor_is_gone() -> None:
    for _ in range(2):
        executor = on_device(settings(num_host_blocks=6), FAMILIES["norms of heads"])
        blocks = executor.host_blocks
        assert blocks.is_pinned() and len(blocks) == 6
        del executor
        gc.collect()
        assert not blocks.is_pinned()


@pytest.mark.skipif(DEVICE != "cuda", reason="only a GPU needs pinned memory")
def test_a_failure_to_pin_does_not_fail_later_launches() -> None:
    blocks, ones = torch.empty((2, 2**19)), torch.ones(4, device="cuda")
    _pin(blocks)
    with pytest.raises(ConfigError, match=r"already mapped\).*--num-host-blocks"):
        _pin(blocks)
    assert int((ones * 2).sum()) == 8
    _unpin(blocks, torch.cuda.Stream())  # type: ignore[no-untyped-call]
    _pin(blocks)
    _unpin(blocks, torch.cuda.Stream())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("num_heads", [2, 8, 32])
def test_all_decode_sizes_are_captured_at_warm_up(num_heads: int) -> None:
    about = model(num_attention_heads=num_heads, num_key_value_heads=num_heads)
    executor = on_device(
        settings(max_num_seqs=256, max_num_batched_tokens=256, max_model_len=8192), about
    )
    lengths, ahead, ways = executor.rows.lengths, executor._steps(), set[int]()
    for count in range(1, 257):
        rows = np.arange(count)
        for most, longest in ((10, 10), (3000, 3000), (10, 3000), (3000, 8000)):
            lengths[:count] = most
            lengths[0] = longest
            ways.add(executor._num_splits(rows))
            assert (padded_rows(count), executor._num_splits(rows)) in ahead
    assert ways == {1, HALVES, LEADING} | (set() if num_heads == 2 else set(SPLIT_COUNTS))
    assert len(ahead) == len(set(ahead)) <= len(SPLIT_COUNTS) * 28


@pytest.mark.parametrize(("longest", "num_rows", "is_small", "num_splits"), [
    (1020, 100, True, 8),  # padded to 128 rows, which makes enough programs
    (1020, 100, False, 16),
    (10, 100, True, 1),
    (1020, 96, True, 16),
])  # fmt: skip
def test_the_number_of_splits_follows_the_rows_of_the_padded_pass(
    longest: int, num_rows: int, is_small: bool, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = model(num_attention_heads=8, num_key_value_heads=8)
    monkeypatch.setattr("headway.executor.gpu.mixed_pass.MIN_DECODES", 32)
    executor = on_device(
        settings(max_num_seqs=192, max_num_batched_tokens=256, max_model_len=1024), about
    )
    executor.rows.lengths[:num_rows] = 10
    executor.rows.lengths[num_rows - 1] = longest
    executor.decoder.backend.supports_padding = is_small
    sizes = list[PassSize]()

    def forward(batch: ForwardBatch, _blocks: Tensor, **_: object) -> Tensor:
        sizes.append(PassSize(batch.num_decodes, 0, 0, batch.num_splits))
        return torch.zeros((len(batch.tokens_t), 32), device=DEVICE)

    executor.decoder.forward = forward  # type: ignore[assignment,method-assign]
    executor.mixed.run(np.arange(num_rows), [])
    assert sizes == [PassSize(128 if is_small and num_rows > 96 else num_rows, 0, 0, num_splits)]


def test_only_a_backend_that_supports_padding_is_warmed_up() -> None:
    config, about = settings(), FAMILIES["its own head"]
    executor, sizes = exactly_on_device(config, about), list[object]()
    executor.mixed._step = lambda *size: sizes.append(size)  # type: ignore[method-assign]
    executor.mixed.try_sizes()
    assert not sizes
    executor.decoder.backend.supports_padding = True
    executor.mixed.try_sizes()
    assert sizes == executor.mixed.sizes


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a GPU only")
def test_a_captured_prefill_generates_the_same() -> None:
    config, about = settings(max_num_batched_tokens=8), FAMILIES["norms of heads"]
    executor = on_device(config, about)
    executor.warm_up()
    results = [answers(lambda *_: executor, config, about, async_scheduling=1) for _ in range(4)]
    assert executor.mixed.graphs and results == [answers(plain, config, about)] * 4


def test_a_step_reports_what_it_had_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    config, about = settings(), FAMILIES["norms of heads"]
    executor, built = on_device(config, about), iter(range(0, 2000, 3))
    monkeypatch.setattr("headway.executor.gpu.executor.num_builds", lambda: next(built))
    events = Events()
    answers(lambda *_: executor, config, about, watch=events)
    counts = [completed.result.num_builds for completed in events.completed]
    assert 3 in counts and set(counts) <= {3, 4}, "a decode size is captured when it first comes"


@pytest.mark.skipif(DEVICE != "cuda", reason="nothing is compiled or captured on a CPU")
def test_nothing_is_built_after_warm_up() -> None:
    """Random workloads: any number of rows, chunks and lengths, and requests that need the host."""
    about = model(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=4096)
    config = settings(
        max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096, num_blocks=8000
    )
    executor = on_device(config, about)
    executor.warm_up()
    engine = Engine(Scheduler(config), executor, async_scheduling=True)
    engine.observers.append(events := Events())
    source = random.Random(7)
    for number in range(200):
        prompt = [source.randrange(32) for _ in range(source.choice((1, 5, 40, 300, 2500)))]
        sampling = source.choice((
            None, Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=1.0, top_k=5),
            Sampling(temperature=0.0, logprobs=2), Sampling(temperature=0.7, logit_bias={3: 5.0}),
        ))  # fmt: skip
        engine.add(
            str(number), prompt, RequestParams(max_tokens=source.randint(1, 30), sampling=sampling)
        )
        for _ in range(source.choice((0, 0, 1, 5))):
            engine.step()
    engine.run()
    counts = [completed.result.num_builds for completed in events.completed]
    assert len(counts) > 100 and not any(counts)


def test_a_batch_is_padded_a_little_and_never_shortened() -> None:
    for count in range(1, 2000):
        padded = padded_rows(count)
        assert count <= padded <= count + max(3, count // 8 + 8)
        assert padded_rows(padded) == padded
