"""Tensors that quantised matrices of a folder consist of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inflight.checkpoint.safetensors import WEIGHTS, StoredTensor
from inflight.errors import ConfigError
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.matrix import Matrix

Shape = tuple[int, ...]

MIN_GROUP = 16
"""Columns of the smallest group of a GroupedMatrix; what has smaller ones is dequantised."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantised matrix whose tensors fit together.

    Attributes:
        shape: rows and columns.
        bits: of a code.
        group: columns with a scale in common.
        has_minimums: whether each group has a zero of its own.
        read: reads it; thread-safe. Raises ConfigError: a scale is not a finite number.
        levels: [2 ** bits] float32, the values of codes, or any where files have a table of them;
            None if a code is its own value.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    has_minimums: bool
    read: Callable[[], Matrix]
    levels: Tensor | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether it can be read as a GroupedMatrix; otherwise it is dequantised."""
        return self.group >= MIN_GROUP and self.shape[1] % self.group == 0

    def shaped(self) -> Matrix:
        """On the meta device, without reading it; columns are taken to be in order."""
        if not self.is_grouped:
            return torch.empty(self.shape, device="meta")
        n, k = self.shape
        codes = torch.empty(n, k, dtype=torch.uint8, device="meta")
        scales = torch.empty(n, k // self.group, device="meta")
        minimums = torch.empty_like(scales) if self.has_minimums else None
        is_symmetric = minimums is None and self.levels is None
        zero = 1 << self.bits - 1 if is_symmetric else 0
        return GroupedMatrix(codes, self.bits, scales, minimums, zero, self.levels)


class Parts:
    """The tensors of a folder, and which of them are parts of quantised matrices.

    Args:
        stored: by name.
        path: of the folder, for errors.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], path: Path) -> None:
        self._stored = stored
        self._path = path
        self._taken: set[str] = set()

    def modules(self, suffix: str, dtypes: Collection[str]) -> Iterator[str]:
        """Names without this suffix of the tensors of one of these types that have it."""
        for name, tensor in self._stored.items():
            if name.endswith(suffix) and tensor.dtype in dtypes:
                yield name.removesuffix(suffix)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._stored

    def take(
        self, name: str, dtypes: Collection[str], shapes: Collection[Shape] | None = None
    ) -> StoredTensor:
        """A part of a matrix.

        Args:
            name: of the tensor.
            dtypes: the possible ones.
            shapes: the possible ones; None for any.

        Raises:
            ConfigError: it is missing, or has another type or shape.
        """
        tensor = self._stored.get(name)
        if tensor is None:
            raise ConfigError(
                f"{self._path}: the tensor {name!r} is missing, without which what is stored "
                "beside it cannot be read; download the checkpoint again"
            )
        if tensor.dtype not in dtypes:
            raise self.error(name, f"has the type {tensor.dtype}", " or ".join(dtypes))
        if shapes is not None and tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes) or "another shape"
            raise self.error(name, f"has the shape {list(tensor.shape)}", expected)
        self._taken.add(name)
        return tensor

    def error(self, name: str, found: str, expected: str) -> ConfigError:
        """What is wrong with a tensor."""
        return ConfigError(f"{self._path}: the tensor {name!r} {found}; expected {expected}")

    def finite(self, values: Tensor, name: str) -> Tensor:
        """The values of a tensor in float32.

        Raises:
            ConfigError: one of them is not a finite number.
        """
        wide = values.to(torch.float32)
        if not wide.isfinite().all():
            raise self.error(name, "has values that are not finite", "numbers")
        return wide

    def rest(self, dtypes: Collection[str]) -> dict[str, StoredTensor]:
        """The tensors that are parts of no matrix.

        Args:
            dtypes: the possible ones, apart from WEIGHTS.

        Raises:
            ConfigError: one of them has another type.
        """
        found = {name: tensor for name, tensor in self._stored.items() if name not in self._taken}
        for name, tensor in found.items():
            if tensor.dtype not in WEIGHTS and tensor.dtype not in dtypes:
                raise self.error(
                    name,
                    f"has the type {tensor.dtype}, and belongs to no quantised weight",
                    f"{' or '.join(WEIGHTS)}, or the other tensors of that weight",
                )
        return found
