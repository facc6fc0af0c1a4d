"""Tensors of a folder that stacks the matrices of experts transposed, as gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.checkpoint.safetensors import StoredTensor
from inflight.models.quantization.matrix import Matrix
from inflight.models.stored.stack import is_stack

_STACK = re.compile(r"(.+\.experts\.(gate_up|down)_proj)(_bias)?")


class TransposedExperts:
    """Tensors of safetensors files, with those of each expert as any other linear layer's.

    NAME [E, k, n] is E tensors NAME.N.weight [n, k], and NAME_bias [E, n] is NAME.N.bias [n]. Rows
    of gate and up, which take turns in the file, are gate | up.

    Args:
        stored: the files' tensors.
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored: dict[str, tuple[StoredTensor, int | None, bool]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in stored.items():
            stack = _STACK.fullmatch(name)
            if stack is None or not is_stack(tensor.shape, 2 if stack[3] else 3):
                self._stored[name] = tensor, None, False
                self.shapes[name] = tensor.shape
                continue
            count, *shape = tensor.shape
            for expert in range(count):
                part = f"{stack[1]}.{expert}.{'bias' if stack[3] else 'weight'}"
                self._stored[part] = tensor, expert, stack[2] == "gate_up"
                self.shapes[part] = tuple(reversed(shape))

    def read(self, name: str) -> Tensor:
        tensor, expert, in_turn = self._stored[name]
        if expert is None:
            return tensor.read()
        rows = tensor.read_part(expert)
        if rows.dim() == 2:
            rows = rows.T
        return torch.cat([rows[::2], rows[1::2]]) if in_turn else rows.contiguous()

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name)
