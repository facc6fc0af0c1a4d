"""Decoder on the CPU: executes a model's spec, independently of its family.

The forward pass in terms of `torch_ops.transformer`, or of `cpu_ops.transformer` where it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.config import KVDtype, Quantization
from inflight.kv.cache import KVCache
from inflight.models.layers.cpu_ops import cpu_ops, has_kernels
from inflight.models.layers.linear import CpuEmbedding, CpuWeight
from inflight.models.layers.norm import NormWeights
from inflight.models.layers.rope import inverse_frequencies
from inflight.models.layers.routing import routing_of
from inflight.models.layers.weights import (
    CpuExperts,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)
from inflight.models.linear.grouped_cpu import CpuGroupedLinear
from inflight.models.loader import CpuPlacement, Progress, load_weights
from inflight.models.quantization.choice import cpu_format
from inflight.models.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    QueryScaling,
    RopeSpec,
)
from inflight_kernels.torch_ops import latent as latent_ops
from inflight_kernels.torch_ops import moe as moe_ops
from inflight_kernels.torch_ops import transformer as ops
from inflight_kernels.torch_ops.kv_quantization import KVMemory


class TableInputs(NamedTuple):
    """Where the T tokens of a step, and those before them, are in the layers of one block table.

    Attributes:
        slot_mapping: [T] int64.
        plan: of attention.
    """

    slot_mapping: Tensor
    plan: ops.AttentionPlan


class Decoder:
    """The weights of one model on the CPU, ready to run.

    Args:
        checkpoint: where the weights are.
        spec: of the model.
        dtype: of weights and activations.
        max_len: maximum sequence length; the size of the rotary tables.
        progress: called with ("weights", fraction) as layers are loaded.
        quantization: of linear layers, as in settings.
        kv_cache_dtype: of keys and values; `auto` for `dtype`.

    Attributes:
        dtype: of weights and activations.
        weights: of the model.
        has_own_threads: whether linear layers run on threads other than torch's.
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
        quantization: Quantization = "auto",
        kv_cache_dtype: KVDtype = "auto",
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.features: Tensor | None = None
        self._aux_layers: tuple[int, ...] = ()
        is_latent = any(attention.latent is not None for attention in spec.attentions)
        # As on GPUs, keys that are rounded to 8 bits are not rounded to bfloat16 before.
        in_bytes = kv_cache_dtype in ("fp8", "int8") and not is_latent
        self._ropes = RotaryTables(spec, max_len, torch.float32 if in_bytes else dtype)
        found = cpu_format(checkpoint, quantization, keeps_groups=has_kernels())
        self.weights: ModelWeights[CpuWeight, CpuExperts, CpuEmbedding] = load_weights(
            checkpoint,
            spec,
            CpuPlacement(dtype, found),
            progress,
            balances_keys=kv_cache_dtype == "int8",
        )
        rounds_inputs = isinstance(self.weights.layers[0].out, CpuGroupedLinear)
        self._ops = cpu_ops(dtype, rounds_inputs=rounds_inputs)
        self.has_own_threads = rounds_inputs

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the input hidden states of these layers, concatenated, in `features`; num_layers
        denotes the last layer's output.
        """
        self._aux_layers = layers

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        tables: Sequence[TableInputs],
        sample_rows: Tensor,
        cache: KVCache,
        num_layers: int | None = None,
    ) -> Tensor:
        """Run T tokens: write their keys and values into the cache and compute logits.

        Args:
            token_ids, positions: [T] int64.
            tables: by block table of the cache.
            sample_rows: [s] int64, the rows that need logits.
            cache: of all layers; updated in place.
            num_layers: run only so many layers, then the final norm and the head; None for all.

        Returns:
            Logits [s, vocab_size] float32.
        """
        spec, weights = self.spec, self.weights
        last = (num_layers or spec.num_layers) - 1
        aux_layers = self._aux_layers if num_layers is None else ()
        # After its keys and values, the last layer is computed only for these rows.
        kept = None if spec.num_layers in aux_layers else sample_rows
        ropes = self._ropes.at(positions)
        # The stream is x + residual: x is what the last sublayer adds to it.
        x, residual = self._embed(token_ids), None
        aux: dict[int, Tensor] = {}
        layers = zip(spec.layers, weights.layers, cache.layers, cache.table_of, strict=True)
        for index, (layer, own, caches, which) in enumerate(islice(layers, last + 1)):
            attention, (slots, plan) = layer.attention, tables[which]
            x, residual = self._enter(x, residual, own.attention_norm)
            if index in aux_layers:
                aux[index] = residual
            rope = ropes[attention.rope]
            q = self._write_keys(x, attention, own, positions, rope, caches, slots)
            if index == last and kept is not None and not len(kept):
                break
            attended = self._attend(q, attention, own, caches, plan)
            if index == last and kept is not None:
                attended, residual = (rows.index_select(0, kept) for rows in (attended, residual))
                x = x.index_select(0, kept) if layer.parallel else x
            x, residual = self._end_block(layer, own, attended, x, residual)
        assert residual is not None
        if kept is None:
            aux[spec.num_layers] = x + residual
            x, residual = x.index_select(0, sample_rows), residual.index_select(0, sample_rows)
        if aux_layers:
            self.features = torch.cat([aux[layer] for layer in aux_layers], -1)
        if not len(sample_rows):
            return torch.empty(0, spec.vocab_size)
        x, _ = self._enter(x, residual, weights.norm)
        return self._logits(x)

    def _end_block(
        self,
        layer: LayerSpec,
        weights: LayerWeights[CpuWeight, CpuExperts],
        attended: Tensor,
        x: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The rest of a layer after attention; x is the norm that attention and MLP share if they
        run in parallel. Returns what the layer adds to the stream, and the stream.
        """
        added = self._leave(weights.out(attended), weights.attention_post_norm)
        if layer.parallel:
            added = added + self._feed_forward(x, layer.mlp, weights.mlp)
            return _scaled(added, layer.residual_scale), residual
        added = _scaled(added, layer.residual_scale)
        x, residual = self._enter(added, residual, weights.mlp_norm)
        added = self._leave(self._feed_forward(x, layer.mlp, weights.mlp), weights.mlp_post_norm)
        return _scaled(added, layer.residual_scale), residual

    def _embed(self, token_ids: Tensor) -> Tensor:
        x = self.weights.embedding(token_ids)
        if self.spec.embedding_scale == 1.0:
            return x
        return x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)

    def _logits(self, x: Tensor) -> Tensor:
        logits = _scaled(self.weights.head(x).float(), self.spec.logit_scale)
        return ops.soft_cap(logits, self.spec.logit_cap) if self.spec.logit_cap else logits

    def _enter(
        self, x: Tensor, residual: Tensor | None, norm: NormWeights | None
    ) -> tuple[Tensor, Tensor]:
        """The input of a sublayer and the residual stream, x + residual."""
        if norm is None:
            total = x if residual is None else x + residual
            return total, total
        return self._norm(x, norm, residual)

    def _leave(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        """What a sublayer with the output x adds to the residual stream."""
        return x if norm is None else self._norm(x, norm)[0]

    def _norm(
        self, x: Tensor, norm: NormWeights, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        eps = self.spec.norm_eps
        if self.spec.norm == "layer":
            return ops.layer_norm(x, norm.weight, norm.bias, eps, residual)
        return self._ops.rms_norm(x, norm.weight, eps, residual)

    def _write_keys(
        self,
        x: Tensor,
        attention: AttentionSpec,
        weights: LayerWeights[CpuWeight, CpuExperts],
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        caches: tuple[KVMemory, KVMemory],
        slots: Tensor,
    ) -> Tensor:
        """Write keys and values of the input [T, hidden_size] into slots of a layer's cache.

        Returns:
            Queries [T, H, D], rotated; with latent attention [T, H, nope_dim + rope_dim].
        """
        if attention.latent is not None:
            return _write_latent(x, attention, weights, rope, caches[0], slots)
        q, k, v = self._project(x, attention, weights, positions, *rope)
        self._ops.write_kv(k, v, *caches, slots)
        return q

    def _project(
        self,
        x: Tensor,
        attention: AttentionSpec,
        weights: LayerWeights[CpuWeight, CpuExperts],
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Input [T, hidden_size] -> q [T, H, D], k and v [T, G, D], q and k rotated."""
        heads = weights.qkv(x).view(x.shape[0], -1, attention.head_dim)
        num_heads, num_qk = attention.num_heads, attention.num_heads + attention.num_kv_heads
        qk, v = heads[:, :num_qk].to(cos.dtype), heads[:, num_qk:]
        if attention.norm_after_rope:
            qk = self._qk_norm(self._ops.rotary(qk, cos, sin), attention, weights)
        else:
            qk = self._ops.rotary(self._qk_norm(qk, attention, weights), cos, sin)
        q = qk[:, :num_heads].to(x.dtype)
        if attention.query_scaling is not None:
            q = q * _query_scales(attention.query_scaling, positions, q.dtype)
        return q, qk[:, num_heads:], v

    def _qk_norm(
        self, qk: Tensor, attention: AttentionSpec, weights: LayerWeights[CpuWeight, CpuExperts]
    ) -> Tensor:
        """The norms of q [T, H, D] and k [T, G, D], which are concatenated."""
        if weights.q_norm is None or weights.k_norm is None:
            return qk
        parts = torch.split(qk, [attention.num_heads, attention.num_kv_heads], 1)
        normed = []
        for part, norm in zip(parts, (weights.q_norm, weights.k_norm), strict=True):
            rows = part.flatten(1) if attention.qk_norm == "full" else part
            normed.append(self._norm(rows, norm)[0].view(part.shape))
        return torch.cat(normed, 1)

    def _attend(
        self,
        q: Tensor,
        attention: AttentionSpec,
        weights: LayerWeights[CpuWeight, CpuExperts],
        caches: tuple[KVMemory, KVMemory],
        plan: ops.AttentionPlan,
    ) -> Tensor:
        """Attention of a layer's queries over its cache -> [T, out_width]."""
        visible, own = plan.within(attention.window), weights.latent
        if own is None:
            scale, cap = attention.scale, attention.score_cap
            return self._ops.attend(q, *caches, visible, scale, cap, weights.sinks)
        return latent_ops.attend(q, own.k_up, own.v_up, caches[0], visible, attention.scale)

    def _feed_forward(
        self,
        x: Tensor,
        spec: MlpSpec | MoeSpec,
        weights: MlpWeights[CpuWeight] | MoeWeights[CpuWeight, CpuExperts],
    ) -> Tensor:
        if isinstance(spec, MlpSpec):
            assert isinstance(weights, MlpWeights)
            return self._mlp(x, spec, weights)
        assert isinstance(weights, MoeWeights)
        return self._moe(x, spec, weights)

    def _mlp(self, x: Tensor, mlp: MlpSpec, weights: MlpWeights[CpuWeight]) -> Tensor:
        gate_up = weights.gate_up(x)
        if mlp.gated and mlp.activation == "silu":
            return weights.down(self._ops.silu_mul(gate_up))
        return weights.down(_ACTIVATIONS[mlp.activation, mlp.gated](gate_up))

    def _moe(self, x: Tensor, moe: MoeSpec, weights: MoeWeights[CpuWeight, CpuExperts]) -> Tensor:
        logits = ops.linear(x.float(), weights.router, weights.router_bias)
        experts, scores = moe_ops.route(logits, routing_of(moe), weights.select_bias)
        out = moe_ops.sum_of_experts(
            x,
            experts,
            scores,
            lambda index, rows: self._mlp(rows, moe.expert, weights.experts[index]),
        )
        if moe.shared is None or weights.shared is None:
            return out
        shared = self._mlp(x, moe.shared, weights.shared)
        if weights.shared_gate is not None:
            shared = shared * ops.linear(x.float(), weights.shared_gate).sigmoid().to(x.dtype)
        return out + shared


def _write_latent(
    x: Tensor,
    attention: AttentionSpec,
    weights: LayerWeights[CpuWeight, CpuExperts],
    rope: tuple[Tensor, Tensor],
    k_cache: KVMemory,
    slots: Tensor,
) -> Tensor:
    """`Decoder._write_keys` with latent attention."""
    latent, own = attention.latent, weights.latent
    assert latent is not None and own is not None
    q, kv = weights.qkv(x).tensor_split((-latent.key_dim,), -1)
    latent_ops.write_latent(kv, own.kv_norm.weight, latent.norm_eps, *rope, k_cache, slots)
    if own.q_b is not None and own.q_norm is not None:
        q = own.q_b(ops.rms_norm(q, own.q_norm.weight, latent.norm_eps)[0])
    return latent_ops.rotate_queries(q.view(len(q), -1, latent.qk_dim), *rope)


_ACTIVATIONS: dict[tuple[Activation, bool], Callable[[Tensor], Tensor]] = {
    ("gelu_tanh", True): ops.gelu_tanh_mul,
    ("clamped_swiglu", True): ops.clamped_swiglu,
    ("gelu_tanh", False): ops.gelu_tanh,
    ("relu2", False): ops.relu2,
}
"""Those that are always torch's, by activation, and whether there is a gate."""


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _query_scales(scaling: QueryScaling, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 1, 1] for positions [T]."""
    steps = torch.floor(positions / scaling.length)
    return (1 + scaling.beta * torch.log1p(steps)).to(dtype)[:, None, None]


class RotaryTables:
    """cos and sin of each of a model's rotary embeddings; half is kept, see `rotary_tables`.

    Args:
        spec: of the model.
        max_len: positions.
        dtype: of activations.
    """

    def __init__(self, spec: ModelSpec, max_len: int, dtype: torch.dtype) -> None:
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for attention in spec.attentions:
            frequencies, factor = inverse_frequencies(attention.rope, attention.rope_dim, max_len)
            half = attention.rope_dim // 2
            cos, sin = ops.rotary_tables(frequencies, max_len, factor, dtype)
            self._tables[attention.rope] = cos[:, half:].clone(), sin[:, half:].clone()

    def at(self, positions: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """The table rows [T, rope_dim] for positions [T]."""
        found = {}
        for rope, tables in self._tables.items():
            cos, sin = (table.index_select(0, positions) for table in tables)
            found[rope] = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return found
