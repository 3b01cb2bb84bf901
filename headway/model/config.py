"""The configuration of a model, read from a Hugging Face config.json or from GGUF metadata.

Knows names and sizes, not weights. Does not import torch, so that reading a config is fast.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from headway.errors import ModelError
from headway.model.experts import MATRICES, hf_fields
from headway.model.families.config_keys import refuse_unread, text_values
from headway.model.families.fields import Fields
from headway.model.families.rope import Rope, rope_from_gguf
from headway.model.families.table import family_of_gguf, family_of_hf
from headway.model.families.variant import Variant
from headway.model.quantization import MXFP4, Quantization, stored_quantization

__all__ = ["ModelConfig", "Rope", "from_gguf", "from_hf", "load_hf", "read_json"]

MAX_LAYERS = 10_000  # so that a wrong value does not create a table of billions of tensors


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Variant):
    """Sizes and variants of one decoder; they determine the name and shape of every tensor."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_id: int | None
    eos_ids: frozenset[int]
    quantization: Quantization | None = None  # of the weights in the file

    @property
    def cpu_only(self) -> str | None:
        """The reason that this model runs on a CPU only; None: GPUs run all families."""
        return None

    @property
    def one_rank_only(self) -> str | None:
        """The reason that this model runs on one rank only; None if there is none."""
        if self.windowed_layers or self.attention_window:
            return f"{self.architecture} has layers with a sliding window"
        if self.has_output_norms or self.activation == "gelu":
            return f"{self.architecture} has output norms or the activation {self.activation}"
        if self.unrotated_layers or self.query_growth:
            what = "layers without rope" if self.unrotated_layers else "queries scaled by position"
            return f"{self.architecture} has {what}"
        return None

    def for_length(self, max_model_len: int) -> ModelConfig:
        """This config with the rope, and the window if it hides any, for contexts of this length."""
        rope, window = self.rope.for_length(max_model_len), self.attention_window
        if window is not None and window >= max_model_len:
            window = None
        is_same = rope is self.rope and window == self.attention_window
        return self if is_same else replace(self, rope=rope, attention_window=window)

    def layers_of_kind(self, *, windowed: bool) -> ModelConfig:
        """This config with only the layers of one kind: the sizes of that kind's KV cache."""
        count = len(self.windowed_layers)
        return replace(self, num_layers=count if windowed else self.num_layers - count)

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    @property
    def expert_share(self) -> float:
        """The share of the experts that a token uses; 0 without experts."""
        return self.experts.num_chosen / self.experts.num_experts if self.experts else 0.0

    def num_used(self, *, in_layers: bool = False) -> int:
        """Parameters that a token uses: all but the experts not chosen for it.

        `in_layers`: only those in the matrices of the layers.
        """
        return round(sum(
            math.prod(shape) * (self.expert_share if ".experts." in name else 1)
            for name, shape in self.shapes().items()
            if not in_layers or (".layers." in name and len(shape) == 2)
        ))  # fmt: skip

    def kv_bytes(self, itemsize: int | Fraction) -> int:
        """Bytes of one token's keys and values in `num_layers` layers.

        `itemsize` are the bytes of a number with its part of the row's scale, if rows have a scale.
        """
        return int(2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name; matrices are [out, in]."""
        table, own = (self.vocab_size, self.hidden_size), self._layer_shapes()
        sparse = self.experts.shapes(self.hidden_size) if self.experts else {}
        common = {name: shape for name, shape in own.items() if not name.startswith("mlp.")}
        of_sparse = common | sparse
        layers = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(self.num_layers)
            for name, shape in (of_sparse if self.is_sparse(layer) else own).items()
        }
        head = {} if self.tie_embeddings else {"lm_head.weight": table}
        norm = {"model.norm.weight": (self.hidden_size,)}
        return {"model.embed_tokens.weight": table} | layers | norm | head

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None and layer in self.experts.layers

    def mlp_names(self, layer: int) -> list[str]:
        """The gate, up and down matrix of a layer's MLP.

        In a sparse layer: of the expert that all tokens use; none if there is no such expert.
        """
        names = [f"mlp.{matrix}" for matrix in MATRICES]
        if self.experts is not None and layer in self.experts.layers:
            names = self.experts.shared_names if self.experts.shared_width else []
        return [f"model.layers.{layer}.{name}" for name in names]

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name in a file, which may have q, k and v, and gate and up, in one matrix."""
        if not self.has_fused_projections:
            return self.shapes()
        stored: dict[str, tuple[int, ...]] = {}
        for name, (rows, *columns) in self.shapes().items():
            fused = re.sub(r"\b(q|k|v)_proj", "qkv_proj", name)
            fused = re.sub(r"\b(gate|up)_proj", "gate_up_proj", fused)
            stored[fused] = (stored.get(fused, (0,))[0] + rows, *columns)
        return stored

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.output_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        norms = {"post_attention_layernorm": hidden}
        if self.has_input_norms:
            norms["input_layernorm"] = hidden
        if self.has_output_norms:
            norms["post_feedforward_layernorm"] = hidden
            if self.has_input_norms:
                norms["pre_feedforward_layernorm"] = hidden
        if self.qk_norm:
            is_whole = self.has_whole_qk_norm
            norms["self_attn.q_norm"] = queries if is_whole else self.head_dim
            norms["self_attn.k_norm"] = keys if is_whole else self.head_dim
        shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (s,) for n, s in norms.items()}
        if self.has_sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        for name, (rows, columns, has_bias) in matrices.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes


def load_hf(path: Path) -> ModelConfig:
    """Read config.json, given its path or folder, with the end tokens of generation_config.json."""
    file = path / "config.json" if path.is_dir() else path
    values = text_values(read_json(file))
    beside = file.with_name("generation_config.json")
    if beside.exists():
        ends = Fields(read_json(beside), str(beside)).ids("eos_token_id")
        values["eos_token_id"] = sorted(ends | Fields(values, str(file)).ids("eos_token_id"))
    return from_hf(values, str(file))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; ModelError if it does not."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read this file as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(
            f"{path}: the JSON value is a {type(values).__name__}; it must be an object"
        )
    return values


def from_hf(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Build the config from the values of a config.json; `where` names the file in errors."""
    values = text_values(values)
    family = family_of_hf(Fields(values, where))
    fields = Fields({**family.defaults, **values}, where)
    key, activation = family.activation
    if (stated := fields.get(key, activation)) != activation:
        raise fields.error(f"{key} {stated!r} is not supported; only {activation} is")
    hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    biases = {key: fields.flag(key) for key in family.bias_keys}
    has_bias = biases.get("attention_bias", False)
    variant = family.read(fields, family.windows)
    if family.experts is not None:
        variant = replace(variant, experts=family.experts(fields))
    config = ModelConfig(
        architecture=family.name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", hidden // num_heads),
        max_model_len=fields.count("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=has_bias or family.has_qkv_bias or biases.get("qkv_bias", False),
        output_bias=has_bias,
        mlp_bias=biases.get("mlp_bias", False),
        qk_norm=family.has_qk_norm,
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        eos_ids=fields.ids("eos_token_id"),
        quantization=stored_quantization(fields),
        **vars(variant),
    )
    refuse_unread(fields)
    return _checked(config, fields)


def from_gguf(
    metadata: Mapping[str, Any],
    where: str,
    *,
    tensors: Collection[str],
    divisors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Build the config from a GGUF file's metadata and tensor names."""
    tokens = Fields(metadata, where)
    family = family_of_gguf(tokens)
    prefix = f"{family.gguf}."
    own = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
    fields = Fields(own, where)
    num_heads = fields.count("attention.head_count")
    head_dim = _gguf_head_dim(fields, num_heads)
    variant = family.read_gguf(fields, head_dim, rope_from_gguf(fields, head_dim, divisors))
    if family.experts is not None:
        named = hf_fields(fields, tensors, is_normalized=family.gguf == "qwen3moe")
        variant = replace(variant, experts=family.experts(named))
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    config = ModelConfig(
        architecture=family.name,
        vocab_size=len(vocabulary) if isinstance(vocabulary, list) else fields.count("vocab_size"),
        hidden_size=fields.count("embedding_length"),
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=fields.count("block_count", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=fields.count("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=family.has_qk_norm,
        bos_id=next(iter(tokens.ids("tokenizer.ggml.bos_token_id")), None),
        eos_ids=tokens.ids(*(f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))),
        **vars(variant),
    )
    return _checked(config, fields)


def _gguf_head_dim(fields: Fields, num_heads: int) -> int:
    head_dim = fields.count("attention.key_length", fields.count("embedding_length") // num_heads)
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.error(
            f"attention.value_length differs from attention.key_length ({head_dim}): not supported"
        )
    return head_dim


def _checked(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Return the config; ModelError if its values contradict each other."""
    given, experts = config.quantization, config.experts
    if given and given.layout == MXFP4 and not (experts and experts.is_stacked):
        raise fields.error(f"mxfp4 is not supported for {config.architecture}; only for gpt_oss")
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"the number of heads, {config.num_heads}, must be a multiple of the number of "
            f"key-value heads, {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise fields.error(f"head_dim {config.head_dim} is odd; rotary embeddings need pairs")
    num_rotated = config.rope.num_rotated(config.head_dim)
    if num_rotated % 2 or num_rotated == 0:
        raise fields.error(
            f"partial_rotary_factor {config.rope.rotated:g} of head_dim {config.head_dim} gives "
            f"{num_rotated} dimensions; rotary embeddings need pairs"
        )
    for divisors in (config.rope.divisors, config.rope.long_divisors):
        if divisors is not None and len(divisors) != num_rotated // 2:
            raise fields.error(
                f"the rope has {len(divisors)} factors; it needs one for each of "
                f"{num_rotated // 2} pairs"
            )
    return config
