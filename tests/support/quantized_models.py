"""Models of transformers with quantised linear layers, as a reference: weights and activations are
rounded to 8 bits and back, and products are in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight_kernels.torch_ops.quantization import spread_block, spread_inputs, spread_weight

LARGEST = {"fp8": 448.0, "int8": 127.0}


def rounded(x: Tensor, kind: str) -> Tensor:
    """x [..., k] with each row rounded to 8 bits, times its scale."""
    if kind == "int8_hadamard":
        block = spread_block(x.shape[-1])
        return spread_weight(rounded(spread_inputs(x, block), "int8"), block)  # and back
    scales = x.abs().amax(-1, keepdim=True) / LARGEST[kind]
    values = x / scales
    return scales * (values.to(torch.float8_e4m3fn).float() if kind == "fp8" else values.round())


@torch.no_grad()
def round_weights(model: Any, names: Collection[str], kind: str) -> None:
    """Round these weights of a model, in place."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.copy_(rounded(parameter, kind))


def round_activations(model: Any, names: Collection[str], kind: str) -> None:
    """Round the inputs of the modules with these weights from now on, token by token."""
    for name, module in model.named_modules():
        if f"{name}.weight" in names:
            module.register_forward_pre_hook(
                lambda _, inputs: (rounded(inputs[0], kind), *inputs[1:])
            )


def rounded_logits(
    model: Any, names: Collection[str], kind: str, logits: Callable[[Any], Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of a model with these weights rounded, and with their inputs rounded as well; both
    stay so."""
    round_weights(model, names, kind)
    weights_only = logits(model)
    round_activations(model, names, kind)
    return weights_only, logits(model)


def keep_activations(folder: Path) -> None:
    """Declare that activations of a folder in compressed-tensors' format are not quantised."""
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    for group in settings["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    path.write_text(json.dumps(settings))
