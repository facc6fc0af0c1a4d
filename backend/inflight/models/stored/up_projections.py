"""Weights that make keys and values of latents, as GGUF files have them."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.quantization.matrix import Matrix
from inflight.models.stored.gguf_weights import GgufWeights, Shape

_KEYS, _VALUES, _BOTH = (f"self_attn.{part}_b_proj.weight" for part in ("k", "v", "kv"))


class JoinedUpProjections:
    """Tensors of a GGUF file, with k_b and v_b of a layer as kv_b.

    k_b [H, rank, nope_dim] and v_b [H, v_dim, rank] are kv_b [H * (nope_dim + v_dim), rank], both
    parts of each head one below the other, as in folders and in older files. What does not fit
    together is left, and so refused under its own name.

    Args:
        stored: the file's tensors.
    """

    def __init__(self, stored: GgufWeights) -> None:
        self._stored = stored
        self.shapes: dict[str, Shape] = dict(stored.shapes)
        for name, keys in stored.shapes.items():
            layer = name.removesuffix(_KEYS)
            values = stored.shapes.get(f"{layer}{_VALUES}", ())
            if layer == name or not _fit(keys, values):
                continue
            del self.shapes[name], self.shapes[f"{layer}{_VALUES}"]
            self.shapes[f"{layer}{_BOTH}"] = (keys[0] * (keys[2] + values[1]), keys[1])

    def read(self, name: str) -> Tensor:
        if name in self._stored.shapes:
            return self._stored.read(name)
        layer = name.removesuffix(_BOTH)
        keys, values = (self._stored.read(f"{layer}{part}") for part in (_KEYS, _VALUES))
        return torch.cat([keys.mT, values], 1).flatten(0, 1)

    def read_matrix(self, name: str) -> Matrix:
        return self._stored.read_matrix(name) if name in self._stored.shapes else self.read(name)

    def shaped_matrix(self, name: str) -> Matrix:
        if name in self._stored.shapes:
            return self._stored.shaped_matrix(name)
        return torch.empty(self.shapes[name], device="meta")


def _fit(keys: Shape, values: Shape) -> bool:
    return len(keys) == len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2])
