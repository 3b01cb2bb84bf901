"""Chooses the arithmetic that a model runs in, from the user's settings or by a short benchmark.

On a CPU, a type's name says nothing about its speed: half-precision floats are a hundred times
slower than float32 on some CPUs and several times faster on others. The benchmark multiplies by the
matrices of one layer, for one row and for many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import prod
from timeit import repeat

import torch

from headway.errors import ConfigError
from headway.model.backends.base import Backend
from headway.model.backends.native import backend as native
from headway.model.backends.native.build import NativeUnavailable, load
from headway.model.backends.native.forms import Forms, MatrixProbe
from headway.model.backends.native.forms import probe as probe_forms
from headway.model.backends.native.weights import layout
from headway.model.backends.plain import PlainBackend
from headway.model.config import ModelConfig
from headway.model.devices import why_no_cuda
from headway.model.quantization import FP8, INT4, keeps_fp8, keeps_int4
from headway.model.weights.checkpoint import Checkpoint, DummyCheckpoint
from headway.model.weights.fp8 import float_layers

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "fp8", "auto")
FASTEST = "fastest"  # measured when the model is loaded
KV_DTYPES = ("auto", "fp8", "int8")
# Attention libraries: (module, package).
ATTENTIONS = {
    "flashinfer": ("flashinfer", "flashinfer-python"),
    "flash-attn": ("flash_attn", "flash-attn"),
}
FP8_SINCE = (8, 9)  # compute capability
FP8_MULTIPLE = 16
MANY = 32  # rows
TRIES = 8
TOO_SLOW = 4.0  # a type this many times slower than the best for one row is not tried with many


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Seconds for the matrices of one layer; `many` is None if one row was too slow."""

    precision: str
    one: float
    many: float | None


def choose_backend(
    config: ModelConfig,
    precision: str,
    device: torch.device | str = "cpu",
    kv_dtype: torch.dtype | None = None,
    attention: str = "triton",
    forms: Forms | None = None,
    *,
    deterministic: bool = False,
) -> Backend:
    """The backend for a precision; on a CPU the native kernels, if they can be built and used.

    `forms` are those of int8 matrices where they differ from the default. ConfigError if
    `deterministic` and no backend for these gives the same bits in any batch.
    """
    device = torch.device(device)
    check_runs(config, precision, device, kv_dtype)
    if device.type == "cuda":
        if deterministic:
            return _deterministic_backend(precision, device, kv_dtype, attention)
        return _gpu_backend(config, precision, device, kv_dtype, attention)
    if deterministic:
        check_deterministic(config, precision)
    if precision in ("bfloat16", "float16"):
        return PlainBackend(getattr(torch, precision))
    if why_not_native(config) is None:
        return native.NativeBackend(
            is_quantized=precision == "int8", forms=forms, kv_dtype=kv_dtype
        )
    return PlainBackend()


def check_runs(
    config: ModelConfig, precision: str, device: torch.device, kv_dtype: torch.dtype | None
) -> None:
    """ConfigError unless the device can compute this model in this precision."""
    if device.type == "cuda":
        if config.cpu_only:
            raise ConfigError(f"{config.cpu_only}, which runs on CPUs only; use --device cpu")
        if precision == FP8:
            check_fp8(config)
    if device.type == "cuda" or (precision != "int8" and kv_dtype != torch.int8):
        return
    reason = why_not_native(config)
    if precision == "int8" and reason:
        raise ConfigError(f"quantization int8 needs the native kernels: {reason}")
    if precision in ("bfloat16", "float16"):
        reason = f"they compute in float32 or with quantization int8, not in {precision}"
    if kv_dtype == torch.int8 and reason:
        raise ConfigError(
            f"kv_cache_dtype int8 needs the native kernels: {reason}; or use --kv-cache-dtype auto"
        )


def _gpu_backend(
    config: ModelConfig,
    precision: str,
    device: torch.device,
    kv_dtype: torch.dtype | None,
    attention: str,
) -> Backend:
    from headway.model.backends.fp8 import Fp8Backend  # needs triton
    from headway.model.backends.gpu import GpuBackend

    is_fp8 = precision == FP8
    dtype = torch.bfloat16 if precision in (FP8, INT4) else getattr(torch, precision)
    kernels = None
    if attention != "triton":
        from headway.model.backends.attention_adapters import kernels_for

        _check_other_attention(config, attention)
        kernels = kernels_for(ATTENTIONS[attention][0], dtype, kv_dtype, device)
    if precision == INT4:
        from headway.model.backends.int4 import Int4Backend

        assert config.quantization is not None, "only files have this precision"
        return Int4Backend(dtype, str(device), kv_dtype, kernels, quantization=config.quantization)
    if not is_fp8:
        return GpuBackend(dtype, str(device), kv_dtype, kernels)
    is_stored = keeps_fp8(config.quantization)
    return Fp8Backend(
        dtype, str(device), kv_dtype, kernels, folds_norms=not is_stored,
        float_layers=float_layers(config),
    )  # fmt: skip


def _check_other_attention(config: ModelConfig, attention: str) -> None:
    """ConfigError for a model whose scores the adapters of other libraries do not describe."""
    has_window = config.attention_window or config.windowed_layers
    if has_window or config.has_sinks or config.attention_scale is not None:
        raise ConfigError(
            f"attention {attention} does not support the sliding window, the attention sinks or the "
            f"attention scale that {config.architecture} has; use --attention triton"
        )


def _exceeds_quantized(config: ModelConfig) -> bool:
    """Whether the model has what the passes with fp8 or int4 matrices do not compute."""
    return bool(config.experts or config.has_output_norms or config.activation != "silu")


def check_fp8(config: ModelConfig) -> None:
    """ConfigError for what its passes do not compute, and for sizes that are no multiples of 16."""
    if _exceeds_quantized(config):
        raise ConfigError(
            "quantization fp8 is not supported for experts, norms of outputs or another activation "
            f"than silu, which {config.architecture} has; use --dtype bfloat16 and no quantization"
        )
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % FP8_MULTIPLE:
            raise ConfigError(
                f"quantization fp8 needs sizes that are multiples of {FP8_MULTIPLE}, but "
                f"{name} is {getattr(config, name)}; use --dtype bfloat16 and no quantization"
            )


def _deterministic_backend(
    precision: str, device: torch.device, kv_dtype: torch.dtype | None, attention: str
) -> Backend:
    from headway.model.backends.deterministic import DeterministicBackend  # needs triton

    if attention != "triton":
        raise ConfigError(
            f"deterministic needs our own attention kernels, not {attention}, whose results depend "
            "on the batch; use --attention triton"
        )
    if precision not in DTYPES:
        known = ", ".join(DTYPES[1:])
        raise ConfigError(f"deterministic on a GPU needs dtype {known}, not {precision}")
    return DeterministicBackend(getattr(torch, precision), str(device), kv_dtype)


def check_deterministic(config: ModelConfig, precision: str) -> None:
    """ConfigError unless the native CPU kernels compute in this precision."""
    if precision in ("bfloat16", "float16"):
        raise ConfigError(
            f"deterministic on a CPU needs dtype float32 or quantization int8, not {precision}, "
            "for which torch orders sums by the batch; use --dtype float32, or --device cuda"
        )
    if reason := why_not_native(config):
        raise ConfigError(f"deterministic on a CPU needs the native kernels: {reason}")


def resolved(dtype: str, quantization: str | None, device: torch.device) -> str:
    """The precision a model runs in: a float type, "int8", "fp8", or FASTEST.

    ConfigError if a name is unknown, if the device does not support it, or if the two exclude each
    other.
    """
    quantization = quantization or "none"
    for name, value, known in (
        ("dtype", dtype, DTYPES), ("quantization", quantization, QUANTIZATIONS),
    ):  # fmt: skip
        if value not in known:
            raise ConfigError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
    if quantization == "none":
        return {"auto": "bfloat16" if device.type == "cuda" else "float32"}.get(dtype, dtype)
    if quantization == FP8:
        if dtype not in ("auto", "bfloat16"):
            raise ConfigError(f"quantization fp8 needs dtype auto or bfloat16, not {dtype}")
        _require_fp8("quantization fp8", "--quantization none or int8", device)
        return FP8
    if device.type == "cuda":
        raise ConfigError(
            f"quantization {quantization} is supported on CPUs only; use none or fp8, or "
            "--device cpu"
        )
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"quantization {quantization} needs dtype auto or float32, not {dtype}")
    return "int8" if quantization == "int8" else FASTEST


def stored_precision(
    config: ModelConfig,
    precision: str,
    dtype: str,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> str:
    """The precision, or fp8 or int4 for a file in it if neither dtype nor quantization was chosen.

    On other devices, and if the passes cannot compute the model, such a file is dequantized; one in
    int4 also if the order of sums is fixed.
    """
    given = config.quantization
    if dtype != "auto" or precision != "bfloat16" or _exceeds_quantized(config):
        return precision
    if keeps_int4(given) and device.type == "cuda" and not deterministic:
        return INT4
    return FP8 if keeps_fp8(given) and why_no_fp8(device) is None else precision


def measured_precision(config: ModelConfig, precision: str) -> str:
    """The precision, with FASTEST replaced by the fastest one on this machine."""
    return fastest(probe(config)) if precision == FASTEST else precision


def fastest_forms(checkpoint: Checkpoint) -> Forms:
    """The fastest forms of a model's int8 matrices on this CPU, where they are not the default."""
    measured = probe_products(checkpoint)
    return {each.matrix: each.chosen for each in measured if each.chosen != each.default}


def with_forms(precision: str, forms: Forms) -> str:
    """The name of a precision with these forms: results depend on both."""
    text = ", ".join(f"{matrix} {form}" for matrix, form in forms.items())
    return f"{precision} ({text})" if text else precision


def weight_bytes(config: ModelConfig, backend: Backend) -> int:
    """Bytes of a model's weights on a GPU."""
    assert isinstance(backend, PlainBackend), "other backends are for CPUs"
    shapes = config.shapes().items()
    layers = sum(prod(shape) for name, shape in shapes if ".layers." in name and len(shape) == 2)
    others = config.num_params - layers
    return int(layers * backend.matrix_itemsize) + others * backend.dtype.itemsize


def kv_dtype_for(name: str, device: torch.device) -> torch.dtype | None:
    """The type of the KV cache, None for the model's type; ConfigError if it is not supported."""
    if name not in KV_DTYPES:
        known = ", ".join(KV_DTYPES)
        raise ConfigError(f"unknown kv_cache_dtype {name!r}; use one of {known}")
    if name == "auto":
        return None
    if name == "int8":
        if device.type == "cuda":
            raise ConfigError(
                "kv_cache_dtype int8 is supported on CPUs only; use --kv-cache-dtype fp8 or auto, "
                "or --device cpu"
            )
        return torch.int8
    _require_fp8(f"kv_cache_dtype {name}", "--kv-cache-dtype auto", device)
    return torch.float8_e4m3fn


def _require_fp8(option: str, instead: str, device: torch.device) -> None:
    """ConfigError with the reason if the device has no fp8; `instead` is what to use there."""
    if reason := why_no_fp8(device):
        raise ConfigError(f"{option} needs a GPU{reason}; or use {instead}")


def why_no_fp8(device: torch.device) -> str | None:
    """The reason that fp8 cannot be used on a device, as the end of a sentence; None if it can."""
    if device.type != "cuda":
        return f": {why_no_cuda() or 'the model runs on the CPU; use --device cuda'}"
    if device.index is None:  # a GPU of another machine
        return None
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip or capability >= FP8_SINCE:
        return None
    return (
        f" of compute capability 8.9 or later; {torch.cuda.get_device_name(device)} has "
        f"{capability[0]}.{capability[1]}"
    )


def check_attention(name: str, device: torch.device) -> None:
    """ConfigError unless this attention backend can be used on the device."""
    if name == "triton":
        return
    if name not in ATTENTIONS:
        known = ", ".join(("triton", *ATTENTIONS))
        raise ConfigError(f"unknown attention {name!r}; use one of {known}")
    if device.type != "cuda":
        raise ConfigError(f"attention {name} needs a GPU, but the model runs on the CPU")
    module, package = ATTENTIONS[name]
    if find_spec(module) is None:
        raise ConfigError(
            f"attention {name} needs the package {package}, which is not installed; "
            f"pip install {package}, or use --attention triton"
        )


def use_threads(count: int) -> None:
    """Set the number of threads for torch and for the native kernels, which share one pool."""
    torch.set_num_threads(count)


def num_threads() -> int:
    return torch.get_num_threads()


def why_not_native(config: ModelConfig | None = None) -> str | None:
    """The reason that the native kernels cannot be used; None if they can."""
    try:
        load()
    except NativeUnavailable as reason:
        return str(reason)
    return native.unsupported_reason(config) if config else None


def byte_products() -> str:
    """The instructions that the native kernels use for quantized weights."""
    return layout().byte_products


def probe_products(checkpoint: Checkpoint) -> list[MatrixProbe]:
    """Benchmark the forms of a model's quantized matrices on this CPU; takes about two seconds."""
    return probe_forms(checkpoint, native.NativeBackend().linear)


def fastest(results: list[ProbeResult]) -> str:
    """The precision with the smallest total slowdown against the best, for one row and for many."""
    whole = [result for result in results if result.many is not None]
    one, many = min(s.one for s in whole), min(s.many for s in whole if s.many is not None)
    return min(whole, key=lambda s: s.one / one + (s.many or 0.0) / many).precision


def probe(config: ModelConfig) -> list[ProbeResult]:
    """Benchmark the precisions on this machine; takes a fraction of a second."""
    layer = DummyCheckpoint(
        replace(config, num_layers=1, vocab_size=64, eos_ids=frozenset(), experts=None)
    )
    names = ["float32", "bfloat16", "float16"]
    if why_not_native(config) is None:
        names.insert(1, "int8")
    results, best = list[ProbeResult](), float("inf")
    for name in names:
        multiply = _layer_products(layer, choose_backend(config, name))
        one = _seconds(multiply, 1)
        best = min(best, one)
        many = None if one > TOO_SLOW * best else _seconds(multiply, MANY)
        results.append(ProbeResult(name, one, many))
    return results


def _layer_products(layer: DummyCheckpoint, backend: Backend) -> Callable[[int], None]:
    prefix, config = "model.layers.0", layer.config
    weights = [
        backend.weight(layer, [f"{prefix}.{name}_proj"])
        for name in ("mlp.gate", "mlp.up", "mlp.down", "self_attn.o")
    ]
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    widths = (hidden, hidden, config.intermediate_size, queries)
    kind = backend.kv_blocks(config, 0, 1).dtype

    def multiply(rows: int) -> None:
        for weight, width in zip(weights, widths, strict=True):
            backend.linear(torch.ones(rows, width, dtype=kind), weight)

    return multiply


def _seconds(multiply: Callable[[int], None], rows: int) -> float:
    """The best of several attempts, because other load only adds time."""
    multiply(rows)
    return min(repeat(partial(multiply, rows), number=1, repeat=TRIES))
