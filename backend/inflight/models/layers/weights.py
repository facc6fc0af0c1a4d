"""The weights of layers, and of all of a model, as they are placed on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from torch import Tensor

from inflight.models.layers.linear import CpuWeight
from inflight.models.layers.norm import NormWeights

L = TypeVar("L", covariant=True)
"""The weight of a linear layer on some device: `CpuWeight` or `CudaWeight`."""
X = TypeVar("X", covariant=True)
"""The experts of a layer on some device: `CpuExperts` or `CudaExperts`."""
E = TypeVar("E")
"""The embedding on some device: `CpuEmbedding`, or a table [vocab_size, hidden_size] on a GPU."""


@dataclass(frozen=True, slots=True)
class MlpWeights(Generic[L]):
    """Weights of a feed-forward part, or of one expert.

    Attributes:
        gate_up: gate | up, or up alone if there is no gate.
    """

    gate_up: L
    down: L


CpuExperts: TypeAlias = list[MlpWeights[CpuWeight]]
"""The experts of a layer in host memory, one by one."""


@dataclass(frozen=True, slots=True)
class MoeWeights(Generic[L, X]):
    """Weights of a mixture of experts.

    Attributes:
        router: [E, hidden_size] float32, as its placement keeps it.
        router_bias: [E] float32; None without one.
        select_bias: [E] float32; None without one.
        experts: E of them, as their placement keeps them.
        shared: the expert of all tokens, if there is one and it is not among `experts`, behind the
            others.
        shared_gate: [1, hidden_size] float32, as the router; None if the shared expert has none.
    """

    router: Tensor
    router_bias: Tensor | None
    select_bias: Tensor | None
    experts: X
    shared: MlpWeights[L] | None
    shared_gate: Tensor | None


@dataclass(frozen=True, slots=True)
class LatentWeights(Generic[L]):
    """Weights of latent attention beside those that all attention has (see `torch_ops.latent`).

    Attributes:
        q_norm, q_b: of queries that are products of a vector: its norm [q_rank], and the linear
            layer [H * (nope_dim + rope_dim), q_rank]. None if queries are not.
        kv_norm: [rank], of the latent.
        k_up: [H, nope_dim, rank], which makes keys of latents; not quantised.
        v_up: [H, v_dim, rank], which makes values of latents; not quantised.
    """

    q_norm: NormWeights | None
    q_b: L | None
    kv_norm: NormWeights
    k_up: Tensor
    v_up: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[L, X]):
    """One layer's weights; norms are None if its spec does not have them.

    Attributes:
        qkv: q | k | v; with latent attention q | kv_a, or q_a | kv_a if queries have a rank. kv_a
            [rank + rope_dim, hidden_size] makes the latent and the part of the key that all heads
            share.
        sinks: [H] float32; None without sinks.
        latent: None without latent attention.
    """

    attention_norm: NormWeights | None
    qkv: L
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    sinks: Tensor | None
    latent: LatentWeights[L] | None
    out: L
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: MlpWeights[L] | MoeWeights[L, X]
    mlp_post_norm: NormWeights | None

    @property
    def dense_mlp(self) -> MlpWeights[L]:
        """See `LayerSpec.dense_mlp`."""
        assert isinstance(self.mlp, MlpWeights)
        return self.mlp


@dataclass(frozen=True, slots=True)
class ModelWeights(Generic[L, X, E]):
    """All weights of a model, placed for its decoder."""

    embedding: E
    layers: list[LayerWeights[L, X]]
    norm: NormWeights
    head: L
