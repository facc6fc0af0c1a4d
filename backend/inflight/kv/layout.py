"""What a token leaves in the KV cache: the shape of keys and values, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config import Dtype

_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have the same shape and are visible for as long.

    Attributes:
        layers: their indices, ascending.
        num_kv_heads: heads of keys and values.
        k_dim, v_dim: values of a head's key and of its value.
        window: tokens that a query sees, its own included; 0 for all before it.
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
        groups: each layer is in one of them.
        dtype: of keys and values.
    """

    groups: tuple[KVGroup, ...]
    dtype: Dtype

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def block_bytes(self, block_size: int) -> int:
        """Memory of one KV block: block_size tokens in all layers."""
        values = sum(group.values_per_token for group in self.groups)
        return values * block_size * _ITEM_BYTES[self.dtype]
