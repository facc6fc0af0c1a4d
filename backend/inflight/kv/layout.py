"""Layout of the KV cache: the shapes of keys and values by layer."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config import Dtype

_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have the same shape and attention window.

    Attributes:
        layers: their indices, ascending.
        num_kv_heads: heads of keys and values.
        k_dim, v_dim: elements of a head's key and value.
        window: tokens that a query attends to, its own included; 0 for all previous ones.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    @property
    def values_per_token(self) -> int:
        return len(self.layers) * self.num_kv_heads * (self.k_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache of one model.

    Attributes:
        groups: each layer is in exactly one.
        dtype: of keys and values.
    """

    groups: tuple[KVGroup, ...]
    dtype: Dtype

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block: block_size tokens in all layers."""
        values = sum(group.values_per_token for group in self.groups)
        return values * block_size * _ITEM_BYTES[self.dtype]
