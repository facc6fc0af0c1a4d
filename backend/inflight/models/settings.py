"""A checkpoint's settings, from a config.json or the metadata of a GGUF file.

A setting that the engine does not implement for any family is rejected here, by name, before any
weights are read.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from inflight.checkpoint.checked_fields import CheckedFields, read_json
from inflight.checkpoint.gguf import GgufArray, GgufFile
from inflight.errors import ConfigError
from inflight.models.family import Settings
from inflight.models.spec import RopeSpec

# ---------------------------------------------------------------- Hugging Face


def of_folder(folder: Path) -> Settings:
    """Read config.json, and generation_config.json for further EOS ids.

    Raises:
        ConfigError: unreadable, or not supported by any family.
    """
    fields = read_json(folder / "config.json")
    names = fields.get("architectures") or []
    if names and not any(str(name).endswith("ForCausalLM") for name in names):
        raise fields.error(f"architectures: {names} do not generate text; allowed: ...ForCausalLM")
    eos_token_ids = fields.token_ids("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        more = read_json(generation).token_ids("eos_token_id")
        eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *more)))
    return of_config(fields, eos_token_ids)


def of_config(fields: CheckedFields, eos_token_ids: tuple[int, ...] = ()) -> Settings:
    """The settings in a config.json.

    Raises:
        ConfigError: as `of_folder`.
    """
    if fields.get("quantization_config"):
        raise fields.error(
            "quantization_config: quantised Hugging Face checkpoints are not supported; "
            "use the unquantised one, or a GGUF file"
        )
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error(f"hidden_act: {fields.get('hidden_act')!r}; allowed: silu")
    return Settings(
        fields=fields,
        format="huggingface",
        rope=_rope_of_huggingface(fields, fields.count("max_position_embeddings", 2048)),
        vocab_size=fields.count("vocab_size"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
    )


def _rope_of_huggingface(fields: CheckedFields, max_position_embeddings: int) -> RopeSpec:
    # Since transformers 5 everything is in rope_parameters; before, rope_theta was beside it.
    nested = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise fields.error(f"rope_scaling: {nested!r} is not an object")
    rope = CheckedFields(nested, f"{fields.where}: rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    for place in (fields, rope):
        if place.get("partial_rotary_factor", 1.0) != 1.0:
            raise place.error("partial_rotary_factor: only 1.0 is supported")
    if kind == "default":
        return RopeSpec(theta)
    original = rope.count("original_max_position_embeddings", max_position_embeddings)
    # At the top level it takes precedence.
    original = fields.count("original_max_position_embeddings", original)
    if kind == "linear":
        return RopeSpec(theta, "linear", rope.number("factor"))
    if kind == "dynamic":
        return RopeSpec(theta, "dynamic", rope.number("factor"), max_position_embeddings)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return RopeSpec(
            theta,
            "llama3",
            rope.number("factor"),
            original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        attention_factor = rope.get("attention_factor")
        return RopeSpec(
            theta,
            "yarn",
            rope.number("factor", max_position_embeddings / original),
            original,
            attention_factor=None if attention_factor is None else rope.number("attention_factor"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number("mscale", 0.0, low=0.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0, low=0.0),
            truncate=rope.flag("truncate", True),
        )
    raise rope.error(f"rope_type: {kind!r}; allowed: default, linear, dynamic, yarn, llama3")


# ---------------------------------------------------------------- GGUF


def of_gguf(file: GgufFile) -> Settings:
    """Read a GGUF file's metadata.

    Raises:
        ConfigError: as `of_folder`.
    """
    prefix = f"{file.metadata.get('general.architecture')}."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    fields = CheckedFields(own, f"{file.path}: {prefix.removesuffix('.')}")
    if fields.get("expert_count"):
        raise fields.error("expert_count: mixtures of experts are not supported")
    num_heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", fields.count("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, head_dim) != head_dim:
            raise fields.error(f"{key}: {fields.get(key)}; allowed: that of the keys, {head_dim}")
    vocabulary = file.metadata.get("tokenizer.ggml.tokens")
    counted = vocabulary.count if isinstance(vocabulary, GgufArray) else None
    tokenizer = CheckedFields(file.metadata, str(file.path))
    ends = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return Settings(
        fields=fields,
        format="gguf",
        rope=_rope_of_gguf(fields, file, fields.count("context_length")),
        vocab_size=fields.count("vocab_size", counted),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tokenizer.token_ids(*ends),
        bos_token_id=next(iter(tokenizer.token_ids("tokenizer.ggml.bos_token_id")), None),
        tensors=file.tensors.keys(),
    )


def _rope_of_gguf(fields: CheckedFields, file: GgufFile, max_position_embeddings: int) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type", "none")
    divisors = _rope_divisors(file)
    # rope.scale_linear is the older key.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    original = fields.count("rope.scaling.original_context_length", max_position_embeddings)
    if kind in ("none", "linear"):
        if factor == 1.0:
            return RopeSpec(theta, divisors=divisors)
        return RopeSpec(theta, "linear", factor, divisors=divisors)
    if kind == "yarn":
        # llama.cpp derives the attention factor and multiplies it by this.
        extra = fields.number("rope.scaling.attn_factor", 1.0)
        derived = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        return RopeSpec(
            theta,
            "yarn",
            factor,
            original,
            attention_factor=derived * extra,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            divisors=divisors,
        )
    raise fields.error(f"rope.scaling.type: {kind!r}; allowed: none, linear, yarn")


def _rope_divisors(file: GgufFile) -> tuple[float, ...] | None:
    """Llama 3 RoPE scaling, which GGUF stores as one divisor per frequency."""
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ConfigError(f"{file.path}: {name}: this RoPE scaling is not supported")
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type.name != "F32":
        raise ConfigError(
            f"{file.path}: rope_freqs.weight has the type {tensor.type.name}; allowed: F32"
        )
    values = np.frombuffer(tensor.data.tobytes(), "<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"{file.path}: rope_freqs.weight has values that are not positive")
    return tuple(float(value) for value in values)
