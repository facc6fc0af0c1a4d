"""Folders whose linear layers are quantised by the package of compressed-tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def write(model: Any, folder: Path, form: str, **settings: Any) -> dict[str, Tensor]:
    """Write a model with quantised linear layers, but for the head.

    Args:
        model: which is quantised in place.
        folder: to write.
        form: such as pack-quantized.
        settings: QuantizationArgs of weights.

    Returns:
        The model's tensors as the package dequantises them.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    weights = QuantizationArgs(**settings)
    names = list(model.state_dict())
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
            ignore=["lm_head"],
            quant_method="compressed-tensors",
            format=form,
        ),
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            _calibrate(module, weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    tensors = model.state_dict()
    return {name: tensors[name].float() for name in names}


def _calibrate(module: Any, weights: Any) -> None:
    """Choose scales and zeros by the extremes of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = module.weight.data
    width = weight.shape[1] if weights.strategy == "channel" else weights.group_size
    grouped = weight.unflatten(1, (-1, width))
    low, high = grouped.amin(-1), grouped.amax(-1)
    more: dict[str, Any] = {}
    if weights.strategy == "tensor_group":
        module.weight_global_scale.data = generate_gparam(weight.amin(), weight.amax())
        more = {"global_scale": module.weight_global_scale}
    scale, zero = calculate_qparams(low, high, weights, **more)
    module.weight_scale.data = scale.to(torch.float32)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
