"""Decoder on the CPU: executes a model's spec, independently of its family.

The forward pass in terms of `torch_ops.transformer`.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.kv.cache import KVCache
from inflight.models.layers.linear import CpuWeight
from inflight.models.layers.rope import inverse_frequencies
from inflight.models.loader import CpuPlacement, LayerWeights, ModelWeights, Progress, load_weights
from inflight.models.spec import AttentionSpec, ModelSpec, RopeSpec
from inflight_kernels.torch_ops import transformer as ops


class Decoder:
    """The weights of one model on the CPU, ready to run.

    Args:
        checkpoint: where the weights are.
        spec: of the model.
        dtype: of weights and activations.
        max_len: maximum sequence length; the size of the rotary tables.
        progress: called with ("weights", fraction) as layers are loaded.

    Attributes:
        weights: of the model.
        features: [T, len(aux_layers) * hidden_size], of the last step; None without auxiliary
            layers.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        max_len: int,
        progress: Progress,
    ) -> None:
        self.spec = spec
        self.features: Tensor | None = None
        self._aux_layers: tuple[int, ...] = ()
        self._ropes = RotaryTables(spec, max_len, dtype)
        self.weights: ModelWeights[CpuWeight] = load_weights(
            checkpoint, spec, CpuPlacement(dtype), progress
        )

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the input hidden states of these layers, concatenated, in `features`; num_layers
        denotes the last layer's output.
        """
        self._aux_layers = layers

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        plan: ops.AttentionPlan,
        sample_rows: Tensor,
        cache: KVCache,
        num_layers: int | None = None,
    ) -> Tensor:
        """Run T tokens: write their keys and values into the cache and compute logits.

        Args:
            token_ids, positions, slot_mapping: [T] int64.
            plan: attention plan.
            sample_rows: [s] int64, the rows that need logits.
            cache: of all layers; updated in place.
            num_layers: run only so many layers, then the final norm and the head; None for all.

        Returns:
            Logits [s, vocab_size] float32.
        """
        spec, weights = self.spec, self.weights
        eps, last = spec.norm_eps, (num_layers or spec.num_layers) - 1
        aux_layers = self._aux_layers if num_layers is None else ()
        # After its keys and values, the last layer is computed only for these rows.
        kept = None if spec.num_layers in aux_layers else sample_rows
        ropes = self._ropes.at(positions)
        x = ops.embedding(token_ids, weights.embedding)
        residual: Tensor | None = None
        aux: dict[int, Tensor] = {}
        layers = zip(spec.layers, weights.layers, cache.layers, strict=True)
        for index, (layer, own, (k_cache, v_cache)) in enumerate(islice(layers, last + 1)):
            x, residual = ops.rms_norm(x, own.attention_norm, eps, residual)
            if index in aux_layers:
                aux[index] = residual
            q, k, v = project(x, layer.attention, own, eps, *ropes[layer.attention.rope])
            ops.write_kv(k, v, k_cache, v_cache, slot_mapping)
            if index == last and kept is not None and not len(kept):
                break
            visible = plan.within(layer.attention.window)
            x = ops.attend(q, k_cache, v_cache, visible, layer.attention.scale)
            if index == last and kept is not None:
                x, residual = x.index_select(0, kept), residual.index_select(0, kept)
            x, residual = ops.rms_norm(own.out(x), own.mlp_norm, eps, residual)
            x = own.down(ops.silu_mul(own.gate_up(x)))
        assert residual is not None
        if kept is None:
            aux[spec.num_layers] = x + residual
            x, residual = x.index_select(0, sample_rows), residual.index_select(0, sample_rows)
        if aux_layers:
            self.features = torch.cat([aux[layer] for layer in aux_layers], -1)
        if not len(sample_rows):
            return torch.empty(0, spec.vocab_size)
        x, _ = ops.rms_norm(x, weights.norm, eps, residual)
        return weights.head(x).float()


class RotaryTables:
    """cos and sin of each of a model's rotary embeddings.

    Args:
        spec: of the model.
        max_len: positions.
        dtype: of activations.
    """

    def __init__(self, spec: ModelSpec, max_len: int, dtype: torch.dtype) -> None:
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for attention in spec.attentions:
            frequencies, factor = inverse_frequencies(attention.rope, attention.head_dim, max_len)
            tables = ops.rotary_tables(frequencies, max_len, factor, dtype)
            self._tables[attention.rope] = tables

    def at(self, positions: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """The table rows [T, head_dim] for positions [T]."""
        return {
            rope: (cos.index_select(0, positions), sin.index_select(0, positions))
            for rope, (cos, sin) in self._tables.items()
        }


def project(
    x: Tensor,
    attention: AttentionSpec,
    weights: LayerWeights[CpuWeight],
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normed hidden states [T, hidden_size] -> q [T, H, D], k and v [T, G, D], q and k rotated."""
    heads = weights.qkv(x).view(len(x), -1, attention.head_dim)
    num_heads, num_qk = attention.num_heads, attention.num_heads + attention.num_kv_heads
    qk, v = heads[:, :num_qk], heads[:, num_qk:]
    if weights.q_norm is not None and weights.k_norm is not None:
        q, _ = ops.rms_norm(qk[:, :num_heads], weights.q_norm, eps)
        k, _ = ops.rms_norm(qk[:, num_heads:], weights.k_norm, eps)
        qk = torch.cat((q, k), 1)
    qk = ops.rotary(qk, cos, sin)
    return qk[:, :num_heads], qk[:, num_heads:], v
