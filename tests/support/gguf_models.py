"""Writes a model that transformers saved as a GGUF file, as llama.cpp's converter does.

Names of tensors and keys are those of the gguf package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

ARCHITECTURES = {  # by model_type; q and k of some are interleaved
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "smollm3": "smollm3", "olmo2": "olmo2",
    "granite": "granite", "gemma3_text": "gemma3",
}  # fmt: skip
INTERLEAVED = ("llama", "smollm3", "granite")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
Array = np.ndarray[Any, Any]


def write(folder: Path, path: Path, kind: Kind = Kind.F32) -> Path:
    """Write the model of a folder; matrices of the layers are of this kind."""
    values = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[values["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    _add_keys(writer, values)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        values["num_hidden_layers"],
    )
    for name, array in _stacked(folder).items():
        stored = name.replace("block_sparse_moe.gate", "mlp.gate")
        own = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        count = heads.get(name.split(".")[-2])
        if count and arch in INTERLEAVED:
            halves = array.reshape(values[count], 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        array = array.squeeze() + (arch == "gemma3" and name.endswith("norm.weight"))
        used = kind if ".layers." in name and array.ndim > 1 and "gate.w" not in name else Kind.F32
        writer.add_tensor(own, gguf.quantize(array, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_keys(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length):
        add(values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    rope = values["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_token_list([f"<{n}>" for n in range(values["vocab_size"])])
    adds = {
        "num_local_experts": writer.add_expert_count, "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "sliding_window": writer.add_sliding_window,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }  # fmt: skip
    for key, add in adds.items():
        if values.get(key) is not None:
            add(values[key])


def _stacked(folder: Path) -> dict[str, Array]:
    """The tensors, with the experts of each layer in one."""
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for file in folder.glob("*.safetensors"):
        for name, array in load_file(file).items():
            if (match := EXPERT.fullmatch(name)) is None:
                found[name] = array
                continue
            block, number, matrix = match.groups()
            block = block.replace("block_sparse_moe", "mlp")
            stack = stacks.setdefault(f"{block}.{MIXTRAL.get(matrix, matrix)}.weight", {})
            stack[int(number)] = array
    return found | {name: np.stack([s[n] for n in sorted(s)]) for name, s in stacks.items()}
