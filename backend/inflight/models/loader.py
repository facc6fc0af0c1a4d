"""Loads a checkpoint's tensors as a model's weights, on its device and in its layout.

The result is the same for every format: q | k | v and gate | up fused, rotated dimensions in
halves, norms' weights in float32 and ready to multiply with, all others in the dtype of the
activations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.models.quantization.unquantized import CpuLinear
from inflight.models.registry import family_of
from inflight.models.spec import ModelSpec
from inflight.models.stored_weights import Shape, Weights, open_weights

Progress = Callable[[str, float], None]

L = TypeVar("L", covariant=True)
"""The weight of a linear layer on some device: `CpuWeight` or `CudaWeight`."""


class WeightPlacement(Protocol[L]):
    """Where weights are kept, and in which layout. Results do not alias the file."""

    def table(self, stored: Tensor) -> Tensor:
        """An embedding table, layout unchanged."""

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        """The weight of a norm plus an offset, in float32."""

    def linear(self, weights: list[Tensor], biases: list[Tensor]) -> L:
        """Several linear layers fused into one, concatenated along rows; biases may be absent."""

    def tied(self, table: Tensor) -> L:
        """The linear layer with a table as its weight."""


class CpuPlacement:
    """In host memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def table(self, stored: Tensor) -> Tensor:
        # A copy even if the dtype is the same: the weights must not depend on the mapped file.
        return stored.to(self._dtype, copy=True)

    def norm(self, stored: Tensor, offset: float = 0.0) -> Tensor:
        # In place: a sum on the meta device would import torch's compiler, which takes seconds.
        return stored.to(torch.float32, copy=True).add_(offset)

    def linear(self, weights: list[Tensor], biases: list[Tensor]) -> CpuLinear:
        return CpuLinear(self._joined(weights), self._joined(biases) if biases else None)

    def tied(self, table: Tensor) -> CpuLinear:
        return CpuLinear(table, None)

    def _joined(self, stored: list[Tensor]) -> Tensor:
        return torch.cat([self.table(part) for part in stored])


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[L]):
    """One layer's weights; norms, in float32, are None if its spec does not have them."""

    attention_norm: Tensor
    qkv: L
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: L
    mlp_norm: Tensor
    gate_up: L
    down: L


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[L]):
    """All weights of a model, placed for its decoder."""

    embedding: Tensor
    layers: list[LayerWeights[L]]
    norm: Tensor
    head: L


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    placement: WeightPlacement[L],
    progress: Progress,
    device: torch.device | str = "cpu",
) -> ModelWeights[L]:
    """Read all weights of a model.

    Args:
        checkpoint: where they are.
        spec: of the model.
        placement: where they are put.
        progress: called with ("weights", fraction) as layers are loaded.
        device: of the placement, where weights are drawn if they are.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec.
    """
    stored = open_weights(checkpoint, spec, weight_shapes(spec), device)

    offset = _norm_offset(checkpoint, spec)

    def load_layer(index: int) -> LayerWeights[L]:
        return _load_layer(stored, spec, index, placement, offset)

    layers: list[LayerWeights[L]] = []
    # Reading is bound by dequantisation in numpy, one core per tensor.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        embedding = pool.submit(lambda: placement.table(stored.read("model.embed_tokens.weight")))
        for done in pool.map(load_layer, range(spec.num_layers)):
            layers.append(done)
            progress("weights", len(layers) / (spec.num_layers + 1))
        table = embedding.result()
    if spec.tie_word_embeddings:
        head = placement.tied(table)
    else:
        head = placement.linear([stored.read("lm_head.weight")], [])
    norm = placement.norm(stored.read("model.norm.weight"), offset)
    progress("weights", 1.0)
    return ModelWeights(embedding=table, layers=layers, norm=norm, head=head)


def weight_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Shapes of all tensors that a checkpoint of this model must have, by name."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        for slot, (shape, bias) in _slots(spec, index).items():
            shapes[_name(spec, index, slot, "weight")] = shape
            if bias:
                shapes[_name(spec, index, slot, "bias")] = shape[:1]
    return shapes


def _slots(spec: ModelSpec, index: int) -> dict[str, tuple[Shape, bool]]:
    """The tensors of a layer: shape, and whether it has a bias."""
    attention, mlp, hidden = spec.layers[index].attention, spec.layers[index].mlp, spec.hidden_size
    slots: dict[str, tuple[Shape, bool]] = {
        "attention_norm": ((hidden,), False),
        "mlp_norm": ((hidden,), False),
        "q": ((attention.q_width, hidden), attention.qkv_bias),
        "k": ((attention.kv_width, hidden), attention.qkv_bias),
        "v": ((attention.kv_width, hidden), attention.qkv_bias),
        "out": ((hidden, attention.q_width), attention.out_bias),
        "gate": ((mlp.width, hidden), mlp.bias),
        "up": ((mlp.width, hidden), mlp.bias),
        "down": ((hidden, mlp.width), mlp.bias),
    }
    if attention.qk_norm:
        slots |= dict.fromkeys(("q_norm", "k_norm"), ((attention.head_dim,), False))
    return slots


def _name(spec: ModelSpec, index: int, slot: str, kind: str) -> str:
    return f"model.layers.{index}.{family_of(spec).tensors[slot][0]}.{kind}"


def _norm_offset(checkpoint: Checkpoint, spec: ModelSpec) -> float:
    """What to add to the weights of norms."""
    centered = checkpoint.format in family_of(spec).zero_centered_norms
    return 1.0 if centered and not checkpoint.random_weights else 0.0


def _load_layer(
    stored: Weights,
    spec: ModelSpec,
    index: int,
    placement: WeightPlacement[L],
    norm_offset: float,
) -> LayerWeights[L]:
    slots = _slots(spec, index)

    def norm(slot: str) -> Tensor | None:
        if slot not in slots:
            return None
        return placement.norm(stored.read(_name(spec, index, slot, "weight")), norm_offset)

    def linear(*names: str) -> L:
        biases = [name for name in names if slots[name][1]]
        return placement.linear(
            [stored.read(_name(spec, index, name, "weight")) for name in names],
            [stored.read(_name(spec, index, name, "bias")) for name in biases],
        )

    attention_norm, mlp_norm = norm("attention_norm"), norm("mlp_norm")
    assert attention_norm is not None and mlp_norm is not None
    return LayerWeights(
        attention_norm=attention_norm,
        qkv=linear("q", "k", "v"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        out=linear("out"),
        mlp_norm=mlp_norm,
        gate_up=linear("gate", "up"),
        down=linear("down"),
    )
