"""Recognises layouts of codes with scales of groups by a folder's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.models.quantization.layouts.layout import ROW, Layout

FORMATS = ("pack-quantized", "nvfp4-pack-quantized")
"""Of compressed-tensors."""
_BITS = (4, 8)
_MXFP4_GROUP, _NVFP4_GROUP = 32, 16

# What an entry of GPTQ's `dynamic` may say of its modules: tensors tell the first two, and the
# others change no value's meaning.
_DYNAMIC = {"bits", "group_size", "desc_act", "act_group_aware", "static_groups", "damp_percent"}


def awq(config: Mapping[str, Any]) -> Layout | None:
    """AutoAWQ's; None if it is another version than gemm, or not of 4 bits."""
    bits = config.get("bits", config.get("w_bit", 4))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    group = _group(config.get("group_size", config.get("q_group_size", 128)))
    if version != "gemm" or bits != 4 or group is None or config.get("zero_point") is False:
        return None
    return Layout("awq", "int4", frozenset({4}), frozenset({group}), symmetric=False)


def gptq(config: Mapping[str, Any]) -> Layout | None:
    """AutoGPTQ's and GPTQModel's; None if it has other bits or another version, or if `dynamic`
    changes what tensors do not tell."""
    stored = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    dynamic = config.get("dynamic") or {}
    if stored not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        return None
    if not isinstance(dynamic, Mapping):
        return None
    kinds = [config]
    for pattern, changes in dynamic.items():
        if str(pattern).startswith("-"):
            continue  # these modules are not quantised
        if not isinstance(changes, Mapping) or not changes.keys() <= _DYNAMIC:
            return None
        kinds.append({**config, **changes})
    bits = frozenset(kind["bits"] for kind in kinds if kind.get("bits") in _BITS)
    sizes = [_group(kind.get("group_size", 128)) for kind in kinds]
    groups = frozenset(size for size in sizes if size is not None)
    others = [kind for kind in kinds if kind.get("bits") not in _BITS]
    if others or None in sizes or config.get("pack_dtype", "int32") != "int32":
        return None
    return Layout(
        "gptq",
        " and ".join(f"int{each}" for each in sorted(bits)),
        bits,
        groups,
        symmetric=bool(config.get("sym", True)),
        stored_less=1 if stored == "gptq" else 0,
        has_order=any(bool(kind.get("desc_act")) for kind in kinds),
    )


def mxfp4(config: Mapping[str, Any]) -> Layout:
    """Of gpt-oss: experts with a power of 2 for each 32 columns."""
    return Layout("mxfp4", "mxfp4", frozenset({4}), frozenset({_MXFP4_GROUP}))


def bitsandbytes(config: Mapping[str, Any]) -> Layout | None:
    """Of 4 bits; None for LLM.int8. The size of blocks is stored beside each matrix."""
    kind = str(config.get("bnb_4bit_quant_type", "fp4")).lower()
    in_4_bits = config.get("load_in_4bit") or config.get("_load_in_4bit")
    if not in_4_bits or config.get("load_in_8bit") or kind not in ("nf4", "fp4"):
        return None
    return Layout("bitsandbytes", kind, frozenset({4}), frozenset())


def modelopt(config: Mapping[str, Any]) -> Layout | None:
    """ModelOpt's NVFP4; None if it is another format."""
    return _nvfp4() if config.get("quant_algo") == "NVFP4" else None


def compressed(weights: Mapping[str, Any], stored: str) -> Layout | None:
    """Of one group of compressed-tensors.

    Args:
        weights: of the group.
        stored: its format, one of FORMATS.
    """
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if strategy is None and weights.get("group_size"):
        strategy = "group"
    if weights.get("dynamic"):
        return None
    if stored == "nvfp4-pack-quantized":
        is_nvfp4 = (kind, bits, strategy) == ("float", 4, "tensor_group")
        has_groups = weights.get("group_size") in (None, _NVFP4_GROUP)
        return _nvfp4() if is_nvfp4 and has_groups and weights.get("symmetric", True) else None
    group = ROW if strategy == "channel" else _group(weights.get("group_size"))
    if kind != "int" or bits not in _BITS or strategy not in ("group", "channel") or group is None:
        return None
    return Layout(
        "packed",
        f"int{bits}",
        frozenset({bits}),
        frozenset({group}),
        symmetric=bool(weights.get("symmetric", True)),
        has_order=weights.get("actorder") not in (None, False, "weight", "static"),
    )


def _nvfp4() -> Layout:
    return Layout("nvfp4", "nvfp4", frozenset({4}), frozenset({_NVFP4_GROUP}))


def _group(size: Any) -> int | None:
    """Columns of a group; None if it is no size of one."""
    if isinstance(size, bool) or not isinstance(size, int):
        return None
    if size == -1:
        return ROW
    return size if size > 0 else None
