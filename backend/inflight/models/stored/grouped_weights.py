"""Weights of a Hugging Face folder, some of them codes with scales of groups."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.quantization.folder import QuantizedWeights
from inflight.models.quantization.layouts.parts import StoredMatrix
from inflight.models.quantization.matrix import Matrix, dequantized
from inflight.models.stored.transposed_experts import TransposedExperts


class GroupedWeights:
    """Tensors of safetensors files; `read` and `read_matrix` raise ConfigError if scales are not
    finite numbers.

    Args:
        matrices: the codes, by the name of the weight.
        rest: the other tensors.
        path: of the folder, for errors.

    Attributes:
        shapes: as those of the model that was quantised.

    Raises:
        ConfigError: a weight is among both.
    """

    def __init__(
        self,
        matrices: Mapping[str, StoredMatrix],
        rest: QuantizedWeights | TransposedExperts,
        path: Path,
    ) -> None:
        for name in matrices:
            if name in rest.shapes:
                raise ConfigError(
                    f"{path}: the weight {name!r} is stored twice, quantised and as it was; "
                    "download the checkpoint again"
                )
        self._matrices = matrices
        self._rest = rest
        self.shapes: dict[str, tuple[int, ...]] = {
            **rest.shapes,
            **{name: matrix.shape for name, matrix in matrices.items()},
        }

    def read(self, name: str) -> Tensor:
        """In its stored dtype, or float32 if it is quantised."""
        matrix = self._matrices.get(name)
        return self._rest.read(name) if matrix is None else dequantized(matrix.read())

    def read_matrix(self, name: str) -> Matrix:
        """The weight of a linear layer as it is stored; dequantised if its groups have no form."""
        matrix = self._matrices.get(name)
        return self._rest.read_matrix(name) if matrix is None else matrix.read()

    def shaped_matrix(self, name: str) -> Matrix:
        """On the meta device; columns of codes are taken to be in order."""
        matrix = self._matrices.get(name)
        if matrix is not None:
            return matrix.shaped()
        if isinstance(self._rest, QuantizedWeights):
            return self._rest.shaped_matrix(name)
        return torch.empty(self.shapes[name], device="meta")

    def spare_biases(self, expected: Container[str]) -> set[str]:
        """Biases of quantised layers that the model has not, and that change nothing: zeros, which
        AutoGPTQ writes for all layers."""
        biases = {f"{name.removesuffix('weight')}bias" for name in self._matrices}
        found = (name for name in biases & self._rest.shapes.keys() if name not in expected)
        return {name for name in found if not self._rest.read(name).any()}
