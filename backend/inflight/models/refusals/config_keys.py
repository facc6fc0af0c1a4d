"""Refuses settings of a checkpoint that nothing has read, unless they are known not to change a
model's outputs.

The settings that a family reads are recorded while it reads them, so they are not repeated here.
A setting that only one family may ignore is listed in that family's `ignored_keys`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inflight.checkpoint.checked_fields import CheckedFields
from inflight.checkpoint.gguf import GgufArray
from inflight.errors import did_you_mean
from inflight.models.family import Family

_ORIGIN = (
    "architectures model_type auto_map custom_pipelines transformers.js_config license name "
    "base_model base_model_name tokenizer_class processor_class unsloth_fixed is_llama_config"
)
_TRAINING = (
    "initializer_range initializer_factor gradient_checkpointing use_cache pretraining_tp "
    "tensor_parallel_degree output_router_logits router_aux_loss_coef z_loss_coefficient "
    "use_flash_attention use_flash_attn attn_implementation cache_implementation "
    "chunk_size_feed_forward dtype torch_dtype weight_dtype rescale_every"
)
# transformers writes these into the config.json of any model, in some of its versions.
_OF_ANY_MODEL = (
    "return_dict output_attentions output_hidden_states output_scores torchscript prefix "
    "tie_encoder_decoder cross_attention_hidden_size pruned_heads task_specific_params is_decoder "
    "finetuning_task problem_type id2label label2id num_labels keys_to_ignore_at_inference "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "num_return_sequences bad_words_ids suppress_tokens begin_suppress_tokens epsilon_cutoff "
    "remove_invalid_values exponential_decay_length_penalty generation_config"
)
_LENGTHS = (
    "max_sequence_length model_max_length seq_length seq_len n_ctx original_vocab_size "
    "org_vocab_size"
)
# Of which a family, the kind of RoPE or the format of the weights reads those that matter.
_READ_IF_NEEDED = (
    "quantization quantization_config vocab_size hidden_act hidden_activation rope_theta "
    "rope_scaling rope_parameters head_dim "
    "rms_norm_eps original_max_position_embeddings max_position_embeddings use_sliding_window"
)
_GGUF = (
    "context_length tensor_data_layout attention.causal attention.key_length "
    "attention.value_length rope.dimension_count rope.freq_base rope.scale_linear "
    "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor rope.scaling.finetuned "
    "rope.scaling.original_context_length rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor"
)
_HARMLESS = frozenset(
    " ".join((_ORIGIN, _TRAINING, _OF_ANY_MODEL, _LENGTHS, _READ_IF_NEEDED, _GGUF)).split()
)

# Special tokens, training, and what the makers of a file note of themselves.
_HARMLESS_PATTERN = re.compile(
    r"_.*"
    r"|.*_token|.*_ids?|.*_token_index"
    r"|.*(dropout|_pdrop|_drop)(_rate|_prob)?"
    r"|.*(_version|_url|_license|_author|_date|_from)"
    r"|unsloth_.*|mergekit.*|neuron.*|onnx.*"
)

_ROPE = (
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate "
    "partial_rotary_factor finetuned short_factor long_factor short_mscale long_mscale alpha "
    "llama_4_scaling_beta max_position_embeddings full_attention sliding_attention"
)
_ROPE_KEYS = frozenset(_ROPE.split())

# Values that change nothing, beside null, false, 0 and what is empty.
_NEUTRAL: Mapping[str, Any] = {
    "embedding_multiplier": 1,
    "embedding_scale": 1,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_causal": True,
    "logit_scale": 1,
    "logits_scaling": 1,
    "mlp_type": "default",
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1,
    "position_embedding_type": "rope",
    "residual_multiplier": 1,
    "residual_scale": 1,
    "rotary_pct": 1,
    "use_rmsnorm": True,
}

# Settings that another one replaces, or makes superfluous.
_REPLACED_BY = {
    "max_window_layers": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "sliding_window_pattern": "layer_types",
}

# Settings that repeat another one, if they have the same value.
_SAME_AS = {
    "layer_switch": "sliding_window_pattern",
    "rope_local_base_freq": "rope_theta",
    "sliding_window_size": "sliding_window",
}

# Settings that published files have: with the values that their architecture has anyway, or `...`
# for any value of one that its code does not read.
_COHERE: Mapping[str, Any] = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}
_OF_MODEL_TYPE: Mapping[str, Mapping[str, Any]] = {
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "hunyuan_v1_dense": {
        "anyres_pooling_size": ...,
        "attention_head_dim": ...,
        "cla_share_factor": ...,
        "dense_list": ...,
        "norm_type": "rms",
        "pool_type": ...,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
    },
    "starcoder2": {
        "activation_function": ...,
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": ...,
        "norm_type": "layer_norm",
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
}

# What a setting does, for its refusal.
_EFFECTS = {
    "alibi": "adds a bias to the scores of attention (ALiBi)",
    "attention_multiplier": "scales the scores of attention",
    "attention.clamp_kqv": "limits queries, keys and values",
    "attention.scale": "scales the scores of attention",
    "attention.sliding_window": "limits attention to a window",
    "attn_logit_softcapping": "caps the scores of attention",
    "clip_qkv": "limits queries, keys and values",
    "dim_model_base": "scales the logits",
    "dual_chunk_attention_config": "changes attention beyond the chunk's length",
    "embedding_multiplier": "scales the embedding",
    "embedding_scale": "scales the embedding",
    "expert_count": "makes a mixture of experts",
    "final_logit_softcapping": "caps the logits",
    "is_causal": "lets attention see later tokens",
    "kv_lora_rank": "makes attention latent (MLA)",
    "layer_types": "gives layers different attention",
    "logit_scale": "scales the logits",
    "logits_scaling": "scales the logits",
    "no_rope_layers": "leaves out RoPE in some layers",
    "num_experts": "makes a mixture of experts",
    "num_local_experts": "makes a mixture of experts",
    "pooling_type": "makes a model for embeddings",
    "num_nextn_predict_layers": "adds layers that predict further tokens",
    "qk_layernorm": "normalises queries and keys",
    "query_pre_attn_scalar": "scales the scores of attention",
    "residual_multiplier": "scales the output of each sublayer",
    "residual_scale": "scales the output of each sublayer",
    "rope_local_base_freq": "is another base of RoPE for sliding windows",
    "rope_interleaved": "rotates neighbouring pairs",
    "scale_depth": "scales the output of each sublayer",
    "scale_emb": "scales the embedding",
    "sliding_window": "limits attention to a window",
    "use_bidirectional_attention": "lets attention see later tokens",
    "use_qk_norm": "normalises queries and keys",
}
_MAX_SHOWN = 3
_MAX_CHARACTERS = 60


def check_keys(fields: CheckedFields, family: Family) -> None:
    """Refuse settings that may change a model's outputs and that the family does not read.

    Args:
        fields: the settings, after the family has read those that it knows.
        family: of the checkpoint.

    Raises:
        ConfigError: there are such settings; the message names them.
    """
    found = {
        key: value
        for key, value in fields.unread().items()
        if key not in family.ignored_keys and not _is_harmless(fields, key, value)
    }
    for key, value in found.items():
        if key in _EFFECTS:
            raise fields.error(
                f"{key}: {_shown(value)} {_EFFECTS[key]}, which is not supported for the family "
                f"{family.name}; allowed: {_allowed(key)}; use a checkpoint without it"
            )
    if found:
        first = next(iter(found))
        more = len(found) - _MAX_SHOWN
        names = [f"{key}: {_shown(found[key])}" for key in list(found)[:_MAX_SHOWN]]
        hint = did_you_mean(first, fields.keys_read())
        raise fields.error(
            f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}: not known for the "
            f"family {family.name}, so the outputs could be wrong; remove what does not change "
            f"them{hint}"
        )
    _check_rope(fields, family)


def _is_harmless(fields: CheckedFields, key: str, value: Any) -> bool:
    is_off = not isinstance(value, GgufArray) and (
        not value or value == _NEUTRAL.get(key, None) or _is_full_attention(key, value)
    )
    if is_off or key in _HARMLESS or _HARMLESS_PATTERN.fullmatch(key):
        return True
    if key in _REPLACED_BY and fields.get(_REPLACED_BY[key]) is not None:
        return True
    if key in _SAME_AS and fields.get(_SAME_AS[key]) == value:
        return True
    if key in ("sliding_window", "max_window_layers") and "use_sliding_window" in fields:
        return not fields.flag("use_sliding_window")
    fixed = _OF_MODEL_TYPE.get(str(fields.get("model_type")), {})
    return key in fixed and fixed[key] in (value, ...)


def _is_full_attention(key: str, value: Any) -> bool:
    kind = {"layer_types": "full_attention", "no_rope_layers": 1}.get(key)
    return kind is not None and isinstance(value, list) and all(one == kind for one in value)


def _check_rope(fields: CheckedFields, family: Family) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        for key in rope if isinstance(rope, dict) else ():
            if key not in _ROPE_KEYS and key not in family.ignored_keys and rope[key]:
                raise fields.error(
                    f"{name}.{key}: {_shown(rope[key])} is unknown, and may change the model's "
                    f"outputs{did_you_mean(key, _ROPE_KEYS)}; allowed: "
                    f"{', '.join(sorted(_ROPE_KEYS))}"
                )


def _allowed(key: str) -> str:
    return f"null or {_NEUTRAL[key]}" if key in _NEUTRAL else "null"


def _shown(value: Any) -> str:
    text = "a list" if isinstance(value, GgufArray) else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
