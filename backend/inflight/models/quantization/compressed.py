"""Quantised weights, and what config.json says of them, in the format of compressed-tensors.

FP8 and INT8 have one scale for each output channel, from its largest weight; activations are
quantised by the engine that runs it, per token. INT4 is W4A16: a scale for each group of up to 128
columns, steps about 0, and activations as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inflight.models.quantization.matrix import DTYPES, quantize
from inflight.models.quantization.rounding import group_of, quantize_symmetrically

KINDS = (*DTYPES, "int4")
"""Names of the formats."""


def group_in(kind: str, width: int) -> int | None:
    """Columns with a scale in common, of a matrix with so many; None if it is not quantised."""
    return group_of(width) if kind == "int4" else width


def tensors(name: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    """What is stored in the place of a weight.

    Args:
        name: of the weight.
        weight: [n, k]; with a width for which `group_in` is not None.
        kind: one of KINDS.
    """
    if kind != "int4":
        quantized = quantize(weight, DTYPES[kind])
        return {name: quantized.values, f"{name}_scale": quantized.scales[:, None]}
    group = group_in(kind, weight.shape[1])
    assert group is not None, "the width has no groups"
    matrix = quantize_symmetrically(weight, group)
    octets = matrix.codes[:, ::2] | matrix.codes[:, 1::2] << 4
    return {
        f"{name}_packed": octets.contiguous().view(torch.int32),
        f"{name}_scale": matrix.scales.to(weight.dtype),
        f"{name}_shape": torch.tensor(weight.shape),
    }


def config(kind: str, groups: Mapping[int, Sequence[str]], kept: Sequence[str]) -> dict[str, Any]:
    """The quantization_config.

    Args:
        kind: one of KINDS.
        groups: modules of quantised weights by the columns that have a scale in common; for kinds
            with a scale for each row of any width, it does not matter.
        kept: modules with matrices that stay as they are, the output layer apart.
    """
    form, type_ = {
        "fp8": ("float-quantized", "float"),
        "int8": ("int-quantized", "int"),
        "int4": ("pack-quantized", "int"),
    }[kind]
    common: dict[str, Any] = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": type_,
        "symmetric": True,
    }
    if kind == "int4":
        weights = [
            (common | {"strategy": "group", "group_size": size}, modules)
            for size, modules in groups.items()
        ]
        activations = None
    else:
        weights = [(common | {"strategy": "channel", "group_size": None}, ())]
        activations = common | {"strategy": "token", "group_size": None, "dynamic": True}
    config_groups = {
        f"group_{index}": {
            "targets": ["Linear"] if len(weights) == 1 else list(modules),
            "weights": one | {"dynamic": False},
            "input_activations": activations,
            "output_activations": None,
        }
        for index, (one, modules) in enumerate(weights)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": ["lm_head", *kept],
        "kv_cache_scheme": None,
    }
