"""Keys of a config.json that have no effect on the logits; a key that nothing reads is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.model.families.fields import Fields

# Keys without an effect on inference: of training, of generation's defaults, of other programs.
IGNORED = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash",
    "_experts_implementation", "_flash_attn_2_enabled", "_from_auto", "_name_or_path",
    "_output_attentions", "architectures", "attention_dropout", "attn_implementation", "auto_map",
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "custom_pipelines", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "dtype", "early_stopping", "embd_pdrop", "encoder_no_repeat_ngram_size",
    "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_llama_config", "keys_to_ignore_at_inference",
    "label2id", "length_penalty", "max_length", "max_sequence_length",
    "min_length", "model_max_length", "model_type", "name_or_path", "neftune_noise_alpha",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
    "pad_token_id", "router_aux_loss_coef", "router_jitter_noise", "prefix",
    "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class",
    "tokenizer_model_max_length", "tokenizer_padding_side", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip
# Keys that change the result of some models, and the values with which they do not. A family that
# has such a key reads it. null has no effect in any key.
OFF: dict[str, object] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "interpolate_factor": 1,
    "is_encoder_decoder": False,
    "lm_head_bias": False,
    "logits_scaling": 1.0,
    "mlp_bias": False,
    "pruned_heads": {},
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_mrope": False,
}

# Of models with images: their names, and the keys beside text_config that the text does not use.
WITH_IMAGES = ["Mistral3ForConditionalGeneration"]
OF_IMAGES = frozenset({
    "architectures", "image_token_id", "image_token_index", "model_type",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "text_config",
    "vision_config", "vision_feature_layer",
})  # fmt: skip


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model's text part, which alone is loaded of a model with images."""
    inner = values.get("text_config")
    if values.get("architectures") != WITH_IMAGES or not isinstance(inner, Mapping):
        return dict(values)
    outer = {key: value for key, value in values.items() if key not in OF_IMAGES}
    return outer | {key: value for key, value in inner.items() if value is not None}


def refuse_unread(
    fields: Fields, ignored: frozenset[str] = IGNORED, off: dict[str, object] = OFF
) -> None:
    """ModelError for a key that was not read, unless it has no effect or its value is off."""
    for key, value in fields.values.items():
        if key in fields.read or key in ignored or value is None:
            continue
        if key not in off or value != off[key]:
            shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:80]}..."
            raise fields.error(
                f"{key} {shown} is not supported: the results may depend on it; remove the key if "
                "the model does not use it"
            )
