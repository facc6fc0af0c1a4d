"""A checkpoint's settings, from a config.json or the metadata of a GGUF file.

A setting that the engine does not implement for any family is rejected here, by name, before any
weights are read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from inflight.checkpoint.checked_fields import CheckedFields, read_json
from inflight.checkpoint.gguf import GgufArray, GgufFile
from inflight.errors import ConfigError
from inflight.models.family import Family, Settings
from inflight.models.spec import RopeSpec

# ---------------------------------------------------------------- Hugging Face


def of_folder(folder: Path, family: Family) -> Settings:
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
    return of_config(fields, family, eos_token_ids)


def of_config(
    fields: CheckedFields, family: Family, eos_token_ids: tuple[int, ...] = ()
) -> Settings:
    """The settings in a config.json.

    Raises:
        ConfigError: as `of_folder`.
    """
    fields = fields.with_defaults(family.defaults)
    rope, sliding_rope = _ropes_of_huggingface(fields)
    return Settings(
        fields=fields,
        format="huggingface",
        rope=rope,
        sliding_rope=sliding_rope,
        vocab_size=fields.count("vocab_size"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        slots=family.tensors,
        has_nextn=family.has_nextn,
    )


def _ropes_of_huggingface(fields: CheckedFields) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embeddings of layers with full attention, and with a sliding window."""
    # Since transformers 5 everything is in rope_parameters; before, rope_theta was beside it.
    found = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise fields.error(f"rope_scaling: {found!r} is not an object")
    if "full_attention" in found or "sliding_attention" in found:
        full, sliding = (
            _rope_of_huggingface(fields, found.get(kind) or {})
            for kind in ("full_attention", "sliding_attention")
        )
        return full, sliding
    rope = _rope_of_huggingface(fields, found)
    return rope, rope


def _rope_of_huggingface(fields: CheckedFields, found: dict[str, Any]) -> RopeSpec:
    rope = CheckedFields(found, f"{fields.where}: rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "yarn" and "long_factor" in rope:
        kind = "longrope"  # as old files of Phi 3 call it
    parse = _SCALING.get(kind) if isinstance(kind, str) else None
    if parse is None:
        allowed = ", ".join(name for name in _SCALING if name != "su")
        raise rope.error(f"rope_type: {kind!r}; allowed: {allowed}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    num_heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", fields.count("hidden_size") // num_heads)
    rotary_dim = 0 if share == 1.0 else int(head_dim * share)
    return parse(RopeSpec(theta, rotary_dim=rotary_dim), rope, fields)


def _default(spec: RopeSpec, rope: CheckedFields, fields: CheckedFields) -> RopeSpec:
    return spec


def _linear(spec: RopeSpec, rope: CheckedFields, fields: CheckedFields) -> RopeSpec:
    return replace(spec, type="linear", factor=rope.number("factor"))


def _dynamic(spec: RopeSpec, rope: CheckedFields, fields: CheckedFields) -> RopeSpec:
    alpha = rope.get("alpha")
    if alpha:
        # Hunyuan: NTK-aware scaling of the base by a constant.
        dim = fields.count("head_dim")
        return replace(spec, theta=spec.theta * rope.number("alpha") ** (dim / (dim - 2)))
    trained = _max_position(fields)
    return replace(
        spec, type="dynamic", factor=rope.number("factor"), original_max_position=trained
    )


def _llama3(spec: RopeSpec, rope: CheckedFields, fields: CheckedFields) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return replace(
        spec,
        type="llama3",
        factor=rope.number("factor"),
        original_max_position=_original(rope, fields),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(spec: RopeSpec, rope: CheckedFields, fields: CheckedFields) -> RopeSpec:
    original = _original(rope, fields)
    attention_factor = rope.get("attention_factor")
    return replace(
        spec,
        type="yarn",
        factor=rope.number("factor", _max_position(fields) / original),
        original_max_position=original,
        attention_factor=None if attention_factor is None else rope.number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number("mscale", 0.0, low=0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, low=0.0),
        truncate=rope.flag("truncate", True),
    )


def _longrope(spec: RopeSpec, rope: CheckedFields, fields: CheckedFields) -> RopeSpec:
    original = _original(rope, fields)
    attention_factor = rope.get("attention_factor")
    short, long = (tuple(rope.positive_numbers(f"{kind}_factor")) for kind in ("short", "long"))
    return replace(
        spec,
        type="longrope",
        factor=rope.number("factor", _max_position(fields) / original),
        original_max_position=original,
        attention_factor=None if attention_factor is None else rope.number("attention_factor"),
        divisors=short,
        long_divisors=long,
    )


_SCALING = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # its first name
}


def _max_position(fields: CheckedFields) -> int:
    return fields.count("max_position_embeddings", 2048)


def _original(rope: CheckedFields, fields: CheckedFields) -> int:
    """The trained context length; at the top level it takes precedence."""
    original = rope.count("original_max_position_embeddings", _max_position(fields))
    return fields.count("original_max_position_embeddings", original)


# ---------------------------------------------------------------- GGUF


def of_gguf(file: GgufFile, family: Family) -> Settings:
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
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        own["attention.sliding_window_pattern"] = file.items(pattern)
    fields = CheckedFields(own, f"{file.path}: {prefix.removesuffix('.')}")
    if fields.get("expert_count") and "router" not in family.tensors:
        raise fields.error(
            f"expert_count: {fields.get('expert_count')}: mixtures of experts are not supported "
            f"for the family {family.name}; allowed: 0"
        )
    num_heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", fields.count("embedding_length") // num_heads)
    # Families with latent attention read both.
    if (
        "kv_b" not in family.tensors
        and fields.count("attention.value_length", head_dim) != head_dim
    ):
        raise fields.error(
            f"attention.value_length: {fields.get('attention.value_length')}; allowed: that of the "
            f"keys, {head_dim}"
        )
    rope = _rope_of_gguf(fields, file, fields.count("context_length"))
    rotary_dim = fields.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope = replace(rope, rotary_dim=rotary_dim)
    sliding_rope = rope
    if "rope.freq_base_swa" in fields:
        sliding_rope = replace(rope, theta=fields.number("rope.freq_base_swa"))
    vocabulary = file.metadata.get("tokenizer.ggml.tokens")
    counted = vocabulary.count if isinstance(vocabulary, GgufArray) else None
    tokenizer = CheckedFields(file.metadata, str(file.path))
    ends = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return Settings(
        fields=fields,
        format="gguf",
        rope=rope,
        sliding_rope=sliding_rope,
        vocab_size=fields.count("vocab_size", counted),
        tie_word_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tokenizer.token_ids(*ends),
        bos_token_id=next(iter(tokenizer.token_ids("tokenizer.ggml.bos_token_id")), None),
        tensors=file.tensors.keys(),
        slots=family.tensors,
        has_nextn=family.has_nextn,
    )


def _rope_of_gguf(fields: CheckedFields, file: GgufFile, max_position_embeddings: int) -> RopeSpec:
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type", "none")
    # Llama 3's scaling.
    divisors = _rope_divisors(file, "rope_freqs.weight")
    # rope.scale_linear is the older key.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    original = fields.count("rope.scaling.original_context_length", max_position_embeddings)
    long_divisors = _rope_divisors(file, "rope_factors_long.weight")
    if long_divisors is not None:
        short = _rope_divisors(file, "rope_factors_short.weight")
        if short is None:
            raise ConfigError(
                f"{file.path}: rope_factors_short.weight is missing beside rope_factors_long.weight"
            )
        # The converter computes it; without the key there is none.
        scale = fields.number("rope.scaling.attn_factor", 1.0)
        return RopeSpec(
            theta,
            "longrope",
            original_max_position=original,
            attention_factor=scale,
            divisors=short,
            long_divisors=long_divisors,
        )
    if kind in ("none", "linear"):
        if factor == 1.0:
            return RopeSpec(theta, divisors=divisors)
        return RopeSpec(theta, "linear", factor, divisors=divisors)
    if kind == "yarn":
        # llama.cpp derives the attention factor and multiplies it by this.
        extra = fields.number("rope.scaling.attn_factor", 1.0)
        derived = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        if fields.get("rope.scaling.yarn_log_multiplier"):
            derived = 1.0  # mscale and mscale_all_dim cancel out
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


def _rope_divisors(file: GgufFile, name: str) -> tuple[float, ...] | None:
    """RoPE scaling that GGUF stores as one divisor per frequency; None without this tensor."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name != "F32":
        raise ConfigError(f"{file.path}: {name} has the type {tensor.type.name}; allowed: F32")
    values = np.frombuffer(tensor.data.tobytes(), "<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"{file.path}: {name} has values that are not positive")
    return tuple(float(value) for value in values)
