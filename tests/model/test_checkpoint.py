"""Checkpoints: every file format gives the same weights with the same names, one at a time."""

from __future__ import annotations

import json
import re
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.errors import ModelError
from headway.model.config import ModelConfig, from_hf
from headway.model.experts import ALIASES
from headway.model.families.table import FAMILIES, INTERLEAVED, Family
from headway.model.loader import open_checkpoint
from headway.model.sharding import Part
from headway.model.weights.checkpoint import DummyCheckpoint, QuantizedMatrix
from headway.model.weights.gguf import read_header, read_metadata
from headway.model.weights.gguf_checkpoint import gguf_name

torch.set_num_threads(1)
VALUES = dict[str, Any](
    model_type="llama", vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2,
)  # fmt: skip
GROUPED = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q8_0: 8}
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
BIG_GROUPS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
Array = np.ndarray[Any, Any]
Encode = Callable[[str, Array], tuple[Array, Kind]]
Q_PROJ, K_PROJ = (f"model.layers.1.self_attn.{which}_proj.weight" for which in "qk")


def config_of(**changes: Any) -> ModelConfig:
    return from_hf({**VALUES, **changes}, "config.json")


def weights_of(config: ModelConfig) -> dict[str, Array]:
    """Different numbers for each tensor of a model."""
    random = np.random.default_rng(5)
    return {n: random.normal(size=s).astype(np.float32) for n, s in config.shapes().items()}


def as_llama_cpp(config: ModelConfig, name: str, rows: Array) -> Any:
    """The row order that llama.cpp's converter gives to a Llama's queries and keys."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(name.split(".")[-2][0])
    if config.architecture not in INTERLEAVED or name.split(".")[-2] not in ("q_proj", "k_proj"):
        return rows
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def encoded(kind: Kind) -> Encode:
    """Encode matrices in the given type and the rest as float32."""

    def encode(name: str, rows: Array) -> tuple[Array, Kind]:
        used = kind if rows.ndim == 2 else Kind.F32
        return gguf.quantize(rows, used), used

    return encode


def random_groups(kind: Kind, stored: dict[str, Array]) -> Encode:
    """Encode matrices with 256 inputs as random bytes, which are kept in `stored`."""
    random, group_bytes = np.random.default_rng(3), gguf.GGML_QUANT_SIZES[kind][1]

    def encode(name: str, rows: Array) -> tuple[Array, Kind]:
        if rows.ndim == 1:
            return rows, Kind.F32
        # Small bytes, so that every float16 scale is finite.
        stored[name] = random.integers(1, 17, (len(rows), group_bytes), dtype=np.uint8)
        return stored[name], kind

    return encode


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Array],
    encode: Encode = encoded(Kind.F32),  # noqa: B008
    extra: Mapping[str, Array] | None = None,
    **metadata: Any,
) -> Path:
    """Write a file like llama.cpp's converter; `__` in a metadata key stands for a dot."""
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_token_list([f"<{n}>" for n in range(config.vocab_size)])
    for key, value in metadata.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, values in weights.items():
        stored, kind = encode(name, as_llama_cpp(config, name, values))
        own = gguf_name(name, has_output_norms=config.has_output_norms)
        writer.add_tensor(own, stored, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_safetensors(folder: Path, values: dict[str, Any], num_shards: int = 1) -> dict[str, Any]:
    """Write a folder like transformers; return its tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = from_hf(values, "config.json")
    tensors = {name: torch.from_numpy(part) for name, part in weights_of(config).items()}
    names, place = list(tensors), {}
    for shard in range(num_shards):
        file = (
            "model.safetensors" if num_shards == 1 else f"model-{shard}-of-{num_shards}.safetensors"
        )
        held = names[shard::num_shards]
        save_file({name: tensors[name] for name in held}, folder / file)
        place |= dict.fromkeys(held, file)
    if num_shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return tensors


def expand(groups: QuantizedMatrix) -> torch.Tensor:
    """The matrix scale * q + minimum."""
    q = groups.q.reshape(*groups.scale.shape, 32).float()
    return (groups.scale[..., None] * q + groups.minimum[..., None]).reshape(groups.q.shape)


@pytest.mark.parametrize("kind", [*PLAIN, *GROUPED])
def test_gguf_returns_what_was_written_in_hugging_face_order(kind: Kind, tmp_path: Path) -> None:
    config = config_of()
    weights = weights_of(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights, encoded(kind)))
    assert checkpoint.config.shapes() == config.shapes()
    for name, values in weights.items():
        used = kind if values.ndim == 2 else Kind.F32
        stored = gguf.dequantize(gguf.quantize(values, used), used)  # rows are independent
        tensor = checkpoint.read(name)
        assert tensor.dtype == torch.float32 and checkpoint.has(name)
        np.testing.assert_array_equal(tensor.numpy(), stored)


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_equal_the_dequantized_tensor(kind: Kind, tmp_path: Path) -> None:
    config = config_of()
    path = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encoded(kind))
    checkpoint = open_checkpoint(path)
    for name, shape in config.shapes().items():
        groups = checkpoint.read_groups(name)
        if len(shape) == 1:
            assert groups is None
            continue
        assert groups is not None and groups.bits == GROUPED[kind]
        assert groups.q.dtype == torch.uint8 and tuple(groups.q.shape) == shape
        assert groups.scale.dtype == groups.minimum.dtype == torch.float32
        assert groups.scale.shape == groups.minimum.shape == (shape[0], shape[1] // 32)
        assert int(groups.q.max()) < 2**groups.bits
        torch.testing.assert_close(expand(groups), checkpoint.read(name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", PLAIN)
def test_other_types_have_no_groups(kind: Kind, tmp_path: Path) -> None:
    config = config_of()
    path = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encoded(kind))
    checkpoint = open_checkpoint(path)
    assert all(checkpoint.read_groups(name) is None for name in config.shapes())


@pytest.mark.parametrize("kind", BIG_GROUPS)
def test_types_that_only_dequantize_are_read_by_rows(kind: Kind, tmp_path: Path) -> None:
    config = config_of(hidden_size=256, intermediate_size=256)
    stored = dict[str, Array]()
    encode = random_groups(kind, stored)
    path = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encode)
    checkpoint = open_checkpoint(path)
    for name, raw in stored.items():
        values = checkpoint.read(name).numpy()
        assert np.isfinite(values).all() and np.ptp(values) > 0
        theirs = gguf.dequantize(raw, kind)
        np.testing.assert_array_equal(as_llama_cpp(config, name, values), theirs)
        assert checkpoint.read_groups(name) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "olmo2"},
        {"model_type": "smollm3"},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
    ],
)
def test_every_architecture_is_read_in_its_row_order(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(**changes)
    weights = weights_of(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights))
    assert checkpoint.config.tie_embeddings == config.tie_embeddings
    assert checkpoint.config.shapes() == config.shapes()
    for name, values in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name).numpy(), values)


QWEN = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
EXPERTS: dict[str, dict[str, int]] = {
    "mixtral": {"num_local_experts": 2},
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": QWEN,
}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.gguf])
def test_tensors_have_the_names_of_the_gguf_package(family: Family) -> None:
    config = config_of(model_type=family.model_type, **EXPERTS.get(family.name, {}))
    arch = gguf.MODEL_ARCH[str(family.gguf).upper()]
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    for name in config.shapes():
        own = gguf_name(name, has_output_norms=config.has_output_norms)
        # The package knows stacks of experts, with the names of Qwen's.
        theirs = re.sub(r"(?<=experts)\.\d+", "", name).replace("block_sparse_moe", "mlp")
        theirs = re.sub(r"\bw[123]\b", lambda found: ALIASES[found[0]], theirs)
        assert own == names.get_name(theirs, try_suffixes=(".weight", ".bias")), name


def test_rope_divisors_are_read_from_their_tensor(tmp_path: Path) -> None:
    config, divisors = config_of(), np.arange(1, 9, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", config, weights_of(config), extra={"rope_freqs.weight": divisors}
    )
    assert open_checkpoint(path).config.rope.divisors == tuple(divisors.tolist())


def test_metadata_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"UINT8": 200, "INT8": -3, "UINT16": 60000, "INT16": -300, "UINT32": 1 << 31}
    values |= {"INT32": -70000, "FLOAT32": 0.1, "BOOL": True, "STRING": "Grüße", "UINT64": 1 << 63}
    values |= {"INT64": -(1 << 40), "FLOAT64": 0.1}
    for kind, value in values.items():
        writer.add_key_value(f"one.{kind}", value, gguf.GGUFValueType[kind])
        array, inner = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind]
        writer.add_key_value(f"some.{kind}", [value] * 3, array, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours = read_metadata(tmp_path / "m.gguf")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert ours == {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert len(ours) == 1 + 2 * len(values)
    assert all(type(ours[f"one.{kind}"]) is type(value) for kind, value in values.items())


@cache
def small_gguf() -> bytes:
    """The bytes of a valid file, up to the end of its last tensor."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(num_hidden_layers=1)
        path = write_gguf(Path(folder) / "m.gguf", config, weights_of(config), encoded(Kind.Q8_0))
        last = max(read_header(path).tensors.values(), key=lambda place: place.offset)
        return path.read_bytes()[: last.offset + last.num_bytes]


def opened(folder: Path, content: bytes) -> Any:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return open_checkpoint(path)


def test_a_truncated_gguf_is_rejected(tmp_path: Path) -> None:
    whole = small_gguf()
    assert opened(tmp_path, whole).has("model.norm.weight")
    header = whole.rindex(b"blk.")  # every byte of the header, then samples
    later = range(header + 100, len(whole), 4999)
    for length in (*range(0, header + 100, 7), *later, len(whole) - 1):
        with pytest.raises(ModelError, match="m.gguf: not a valid GGUF"):
            opened(tmp_path, whole[:length])


def test_a_truncated_gguf_is_reported_with_its_end(tmp_path: Path) -> None:
    whole = small_gguf()
    end = f"ends at byte {len(whole)}, the file at byte {len(whole) - 10}"
    with pytest.raises(ModelError, match=f"truncated: tensor output.weight {end}"):
        opened(tmp_path, whole[:-10])
    with pytest.raises(ModelError, match="truncated: .* byte 100"):
        opened(tmp_path, whole[:100])


def other_key(whole: bytes, key: str, other: str) -> bytes:
    """The file with one of its keys renamed."""
    old, new = (struct.pack("<Q", len(text)) + text.encode() for text in (key, other))
    assert whole.count(old) == 1
    return whole.replace(old, new)


def test_a_contradictory_gguf_is_rejected(tmp_path: Path) -> None:
    whole = small_gguf()
    twice = whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight")
    with pytest.raises(ModelError, match="same name"):
        opened(tmp_path, twice)
    with pytest.raises(ModelError, match="llama.block_count occurs twice"):
        opened(tmp_path, other_key(whole, "llama.context_length", "llama.block_count"))
    norm = b"output_norm.weight" + struct.pack("<I", 1)
    empty = whole.replace(norm + struct.pack("<Q", 64), norm + struct.pack("<Q", 0))
    with pytest.raises(ModelError, match=r"output_norm.weight of shape \[0\] is empty"):
        opened(tmp_path, empty)
    deep = whole.replace(norm, b"output_norm.weight" + struct.pack("<I", 7))
    with pytest.raises(ModelError, match="output_norm.weight has 7 dimensions; 1 to 4 "):
        opened(tmp_path, deep)


def test_a_file_that_is_not_gguf_is_rejected(tmp_path: Path) -> None:
    whole = small_gguf()
    with pytest.raises(ModelError, match="does not start with GGUF"):
        opened(tmp_path, b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelError, match="version 9 is not supported"):
        opened(tmp_path, whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(ModelError, match=r"no such file"):
        open_checkpoint(tmp_path / "none.gguf")


@settings(max_examples=400, deadline=None)
@given(at=st.integers(4, 9000), byte=st.integers(0, 255))
def test_a_changed_byte_raises_only_model_errors(at: int, byte: int) -> None:
    changed = bytearray(small_gguf())
    changed[at] = byte
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint = opened(Path(folder), bytes(changed))
            for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
                checkpoint.read_groups(name)
                checkpoint.read(name)
        except ModelError as error:
            assert "m.gguf" in str(error)


@pytest.mark.parametrize("reads", ["read", "read_groups"])
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E00, 0x7C01], ids=hex)  # bits of a float16
def test_a_scale_that_is_nan_or_infinite_is_rejected(
    scale: int, reads: str, tmp_path: Path
) -> None:
    def encode(name: str, rows: Array) -> tuple[Array, Kind]:
        stored, kind = encoded(Kind.Q8_0)(name, rows)
        if name == Q_PROJ:
            stored[0, :2] = np.array([scale], dtype="<u2").view(np.uint8)
        return stored, kind

    config = config_of()
    path = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encode)
    checkpoint = open_checkpoint(path)
    getattr(checkpoint, reads)(Q_PROJ.replace("q_proj", "k_proj"))
    with pytest.raises(ModelError, match=f"{path}: tensor {Q_PROJ} .*NaN"):
        getattr(checkpoint, reads)(Q_PROJ)


def test_a_part_of_a_split_gguf_is_rejected(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", config_of(), weights_of(config_of()), split__count=3)
    with pytest.raises(ModelError, match="gguf-split"):
        open_checkpoint(path)


def test_a_gguf_type_that_cannot_be_dequantized_is_named(tmp_path: Path) -> None:
    def encode(name: str, rows: Array) -> tuple[Array, Kind]:
        return (rows.astype(np.float64), Kind.F64) if "q_proj" in name else (rows, Kind.F32)

    config = config_of()
    checkpoint = open_checkpoint(
        write_gguf(tmp_path / "m.gguf", config, weights_of(config), encode)
    )
    with pytest.raises(ModelError, match=f"cannot dequantize tensor {Q_PROJ}.*F64"):
        checkpoint.read(Q_PROJ)


def test_reading_a_gguf_tensor_needs_little_extra_memory(tmp_path: Path) -> None:
    config = config_of(vocab_size=8192, hidden_size=512, num_attention_heads=8, num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, weights_of(config), encoded(Kind.Q4_1))
    checkpoint, size = open_checkpoint(path), 8192 * 512 * 4
    tracemalloc.start()
    try:
        checkpoint.read("model.embed_tokens.weight")
        assert size <= tracemalloc.get_traced_memory()[1] < 2 * size
        tracemalloc.reset_peak()
        checkpoint.read("model.norm.weight")
        assert tracemalloc.get_traced_memory()[1] < size // 8
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_safetensors_return_what_was_saved(num_shards: int, is_tied: bool, tmp_path: Path) -> None:
    values = {**VALUES, "tie_word_embeddings": is_tied}
    tensors = write_safetensors(tmp_path / "m", values, num_shards)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.config == from_hf(values, "config.json")
    for name in checkpoint.config.shapes():
        torch.testing.assert_close(checkpoint.read(name), tensors[name], rtol=0, atol=0)
        assert checkpoint.read_groups(name) is None and checkpoint.has(name)
    assert checkpoint.has("lm_head.weight") is not is_tied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_safetensors_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = write_safetensors(tmp_path, VALUES)
    save_file({n: t.to(dtype) for n, t in tensors.items()}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).read(Q_PROJ).dtype is dtype


def test_a_model_saved_without_its_head_is_found_by_full_names(tmp_path: Path) -> None:
    tensors = write_safetensors(tmp_path, {**VALUES, "tie_word_embeddings": True})
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    (tmp_path / "model.safetensors").unlink()
    save_file(short, tmp_path / "other.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())


def test_safetensors_are_read_on_demand(tmp_path: Path) -> None:
    tensors = write_safetensors(tmp_path, VALUES)
    checkpoint = open_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    with file.open("r+b") as written:  # in place, so that the mapped file changes
        written.seek(start)
        written.write(bytes(len(content) - start))
    assert tensors[Q_PROJ].any() and not checkpoint.read(Q_PROJ).any()


def test_truncated_safetensors_are_rejected(tmp_path: Path) -> None:
    write_safetensors(tmp_path, VALUES)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="model.safetensors: not a valid"):
            open_checkpoint(tmp_path)
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not a valid safetensors"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_and_a_broken_index_are_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path, VALUES, 3)
    (tmp_path / "model-1-of-3.safetensors").unlink()
    with pytest.raises(ModelError, match="model-1-of-3.safetensors does not exist"):
        open_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, detail in (("{", "JSON"), ("{}", "weight_map")):
        index.write_text(text)
        with pytest.raises(ModelError, match=detail):
            open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        (tmp_path / "model-0-of-3.safetensors").read_bytes()
    )
    assert open_checkpoint(tmp_path).has("model.embed_tokens.weight")  # preferred to the index
    (tmp_path / "model.safetensors").unlink()
    index.unlink()
    with pytest.raises(ModelError, match="2 safetensors .*model.safetensors.index"):
        open_checkpoint(tmp_path)


def test_quantized_safetensors_are_rejected_by_their_type(tmp_path: Path) -> None:
    tensors = write_safetensors(tmp_path, VALUES)
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{Q_PROJ} has type I8.*F64"):
        open_checkpoint(tmp_path).read(Q_PROJ)


def sources(folder: Path, weights: dict[str, Array]) -> list[Any]:
    """The same tensors from both file formats."""
    write_gguf(folder / "m.gguf", config_of(), weights)
    write_safetensors(folder / "m", VALUES)
    tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
    save_file(tensors, folder / "m" / "model.safetensors")
    return [open_checkpoint(folder / "m.gguf"), open_checkpoint(folder / "m")]


def test_a_missing_or_wrong_tensor_is_named(tmp_path: Path) -> None:
    weights = weights_of(config_of())
    del weights[Q_PROJ]
    weights[K_PROJ] = weights[K_PROJ][:, :32].copy()
    for checkpoint in sources(tmp_path, weights):
        assert not checkpoint.has(Q_PROJ)
        with pytest.raises(ModelError, match=f"tensor {Q_PROJ} is missing"):
            checkpoint.read(Q_PROJ)
        wrong = re.escape(f"tensor {K_PROJ} has shape [32, 32]") + r".*\[32, 64\]"
        with pytest.raises(ModelError, match=wrong):
            checkpoint.read(K_PROJ)


def test_an_unknown_tensor_is_rejected(tmp_path: Path) -> None:
    every = [*sources(tmp_path, weights_of(config_of())), DummyCheckpoint(config_of())]
    for checkpoint in every:
        for name in ("model.layers.1.self_attn.q_proj.bias", "model.layers.7.mlp.x.weight", ""):
            assert not checkpoint.has(name)
            with pytest.raises(
                ModelError, match=re.escape(f"unexpected tensor {name}: a llama model")
            ):
                checkpoint.read(name)


def test_dummy_weights_are_reproducible_and_have_the_right_shapes(tmp_path: Path) -> None:
    config = config_of()
    one, two = DummyCheckpoint(config), DummyCheckpoint(config)
    for name, shape in config.shapes().items():
        assert torch.equal(one.read(name), two.read(name)) and tuple(one.read(name).shape) == shape
        assert bool((one.read(name) == 1).all()) == name.endswith("norm.weight")
    assert not torch.equal(one.read(Q_PROJ), one.read(Q_PROJ.replace(".1.", ".0.")))
    assert one.read("model.embed_tokens.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert one.path is None and one.read_groups(Q_PROJ) is None


def test_dummy_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    for path in (tmp_path, tmp_path / "config.json"):
        assert open_checkpoint(path, "dummy").config == config_of()
    with pytest.raises(ModelError, match="no model"):
        open_checkpoint(tmp_path)
    bare = write_gguf(tmp_path / "bare.gguf", config_of(), {})
    dummy = open_checkpoint(bare, "dummy")
    assert isinstance(dummy, DummyCheckpoint) and dummy.config.num_layers == 2


def test_the_content_of_a_folder_decides_its_format(tmp_path: Path) -> None:
    config = config_of()
    with pytest.raises(ModelError, match=r"config.json with \*.safetensors, or a .gguf"):
        open_checkpoint(tmp_path)
    one = write_gguf(tmp_path / "one.gguf", config, weights_of(config))
    assert open_checkpoint(tmp_path).path == one
    write_gguf(tmp_path / "two.gguf", config, weights_of(config))
    with pytest.raises(ModelError, match=r"2 GGUF files \(one.gguf, two.gguf\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "two.gguf").unlink()
    write_safetensors(tmp_path, VALUES)
    assert open_checkpoint(tmp_path).path == tmp_path  # safetensors are preferred
    assert open_checkpoint(tmp_path, "gguf").path == one


def test_a_wrong_format_or_file_names_the_valid_ones(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "one.gguf", config_of(), {})
    with pytest.raises(ModelError, match=r"'pickle'.*auto, safetensors"):
        open_checkpoint(one, "pickle")
    with pytest.raises(ModelError, match="one.gguf.*config.json"):
        open_checkpoint(one, "safetensors")
    (tmp_path / "w.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"w.bin: .*\.gguf file"):
        open_checkpoint(tmp_path / "w.bin")


FUSED = dict[str, Any](
    VALUES, architectures=["Phi3ForCausalLM"], hidden_size=128, partial_rotary_factor=0.25
)


def write_fused(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model with fused projections; return its tensors as the file has them."""
    config = from_hf(FUSED, "x")
    random = np.random.default_rng(5)
    tensors = {
        name: torch.from_numpy(random.normal(size=shape).astype(np.float32))
        for name, shape in config.stored_shapes().items()
    }
    (folder / "config.json").write_text(json.dumps(FUSED))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_fused_projections_are_split_and_their_rotated_rows_paired(tmp_path: Path) -> None:
    stored, checkpoint = write_fused(tmp_path), open_checkpoint(tmp_path)
    first = "model.layers.0."
    q, k, v = stored[f"{first}self_attn.qkv_proj.weight"].split([128, 64, 64])
    # Of a head of 32, 8 dimensions rotate: 0 with 4, ..., 3 with 7.
    order = [*range(4), *range(8, 20), *range(4, 8), *range(20, 32)]
    for name, rows in (("q", q), ("k", k)):
        expected = rows.view(-1, 32, 128)[:, order].reshape(rows.shape)
        assert torch.equal(checkpoint.read(f"{first}self_attn.{name}_proj.weight"), expected)
    gate, up = stored[f"{first}mlp.gate_up_proj.weight"].chunk(2)
    for name, rows in (("self_attn.v", v), ("mlp.gate", gate), ("mlp.up", up)):
        assert torch.equal(checkpoint.read(f"{first}{name}_proj.weight"), rows)


def test_a_part_of_a_converted_tensor_is_that_of_the_whole(tmp_path: Path) -> None:
    write_fused(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name, shape in checkpoint.config.shapes().items():
        whole, half = checkpoint.read(name), Part(slice(shape[0] // 2, shape[0]), slice(0, 32))
        assert tuple(whole.shape) == shape == checkpoint.shape(name) and checkpoint.has(name)
        if len(shape) == 2:
            assert torch.equal(checkpoint.read(name, half), whole[half])


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_factors_of_a_family_are_multiplied_into_its_weights(kind: Kind, tmp_path: Path) -> None:
    """Also into groups; llama.cpp interleaves the rows of this family."""
    named = {"architectures": ["GraniteForCausalLM"], "rms_norm_eps": 1e-5}
    plain = from_hf({**VALUES, **named, "attention_multiplier": 0.25}, "x")
    assert not plain.is_converted
    weights = weights_of(plain)
    path = write_gguf(
        tmp_path / "m.gguf", plain, weights, encoded(kind), granite__residual_scale=2,
        granite__logit_scale=8, granite__attention__scale=1,
    )  # fmt: skip
    checkpoint, factors = open_checkpoint(path), {"q_proj": 4.0, "o_proj": 2.0, "down_proj": 2.0}
    for name, values in weights.items():
        used = kind if values.ndim == 2 else Kind.F32
        factor = factors.get(name.split(".")[-2], 0.125 if name == "model.norm.weight" else 1.0)
        expected = torch.from_numpy(factor * gguf.dequantize(gguf.quantize(values, used), used))
        torch.testing.assert_close(checkpoint.read(name), expected)
        if values.ndim == 2 and (groups := checkpoint.read_groups(name)) is not None:
            torch.testing.assert_close(expand(groups), expected)
