"""Latent attention (MLA, arXiv:2405.04434) on a GPU: queries and keys, cache writes, attention
itself, and the values of each head.

Shapes: T tokens in n chunks, H heads; see `LatentSpec` for the columns of queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.core.step_size import StepSize
from inflight.models.layers.attention import ForwardInputs, PassLimits
from inflight.models.layers.linear import CudaWeight, whole_tiles
from inflight.models.spec import AttentionSpec, LatentSpec
from inflight_kernels.ops.latent import attention, products, rows
from inflight_kernels.ops.latent.operands import LatentNorm, Projections
from inflight_kernels.ops.residual_norm import norm_columns
from inflight_kernels.ops.rope import PagedKV, RopeInputs


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """A layer's weights, apart from the projections of its input and of its output.

    Attributes:
        norm: of latents.
        k_up, v_up: [H, nope_dim, rank] and [H, v_dim, rank], which make keys and values of latents.
        q_norm: [q_rank] float32; None, as q_b, if queries are not products of a vector.
        q_b: which makes queries of normed vectors.
    """

    norm: LatentNorm
    k_up: Tensor
    v_up: Tensor
    q_norm: Tensor | None = None
    q_b: CudaWeight | None = None


class LatentAttention:
    """The shared part of the layers with one AttentionSpec, whose attention is latent.

    Args:
        spec: of these layers.
        tables: cos and sin of their rotary embedding.
        limits: of passes.
        batch_invariant: results for a token do not depend on the other tokens of its step.
        dtype: of activations.

    Attributes:
        latent: see `AttentionSpec`.
        absorbed: [whole_tiles(max_tokens), H, key_dim], queries that score the cached keys.
        sums: [whole_tiles(max_tokens), H, rank], of latents.
        queries: [whole_tiles(max_tokens), H * qk_dim], where they are products of a vector.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        tables: tuple[Tensor, Tensor],
        limits: PassLimits,
        *,
        batch_invariant: bool,
        dtype: torch.dtype,
    ) -> None:
        assert spec.latent is not None
        self.latent: LatentSpec = spec.latent
        self._params = attention.LatentParams(spec.num_heads, spec.scale, batch_invariant)
        self._cos, self._sin = tables
        size = attention.workspace_size(
            limits.max_rows, limits.max_tokens, spec.num_heads, batch_invariant=batch_invariant
        )
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._cos.device)

        def buffer(*shape: int) -> Tensor:
            num_rows = whole_tiles(limits.max_tokens)
            return torch.zeros(num_rows, *shape, dtype=dtype, device=self._cos.device)

        self.absorbed = buffer(spec.num_heads, self.latent.key_dim)
        self.sums = buffer(spec.num_heads, self.latent.rank)
        self.queries = buffer(spec.num_heads * self.latent.qk_dim if self.latent.q_rank else 0)

    def begin(
        self,
        inputs: ForwardInputs,
        size: StepSize,
        table_index: int = 0,
        block_size: int | None = None,
        history_ready: bool = False,
    ) -> LatentPass:
        """Launch the planning of a pass, which all its layers use; they share that block table. No
        prefix is shared, so the block size is not needed. For history_ready, see `Attention`."""
        table, num_tokens, num_chunks = inputs.tables[table_index], size.num_tokens, size.num_chunks
        metadata = attention.LatentMetadata(
            self._params,
            inputs.query_start[: num_chunks + 1],
            inputs.seq_lens[:num_chunks],
            table.block_tables[:num_chunks],
            num_tokens,
            self._workspace,
            size.max_q_len,
            planned=True,
        )
        attention.plan(metadata, history_ready=history_ready, pdl=True)
        positions, slot_mapping = inputs.positions[:num_tokens], table.slot_mapping[:num_tokens]
        rope = RopeInputs(positions, slot_mapping, self._cos, self._sin)
        return LatentPass(self, metadata, rope)


@dataclass(slots=True)
class LatentPass:
    """One pass over the layers; their shared inputs are checked and prepared once.

    Attributes:
        shared: what its layers share.
        metadata: of the pass.
        rope: of its tokens.
        history_ready: see `AttentionPass`.
    """

    shared: LatentAttention
    metadata: attention.LatentMetadata
    rope: RopeInputs
    history_ready: bool = False

    def layer(
        self,
        qkv: Tensor,
        kv: PagedKV,
        out: Tensor,
        weights: LatentLayer,
        following: CudaWeight | None = None,
    ) -> Tensor:
        """Launch a layer's attention: qkv [T or more, qkv_width] -> out [T, H * v_dim], always in
        16 bits."""
        shared, num_tokens = self.shared, self.metadata.num_tokens
        absorbed, sums = shared.absorbed[:num_tokens], shared.sums[:num_tokens]
        ready, batch_invariant = self.history_ready, self.metadata.spec.batch_invariant
        k_cache, _ = kv.values
        products.prepare(
            self._projections(qkv, weights),
            weights.k_up,
            weights.norm,
            self.rope,
            k_cache,
            queries=absorbed,
            batch_invariant=batch_invariant,
            history_ready=ready,
        )
        attention.attend(absorbed, k_cache, self.metadata, sums, history_ready=ready, pdl=True)
        products.project_values(
            sums,
            weights.v_up,
            out=out[:num_tokens].view(num_tokens, -1, shared.latent.v_dim),
            batch_invariant=batch_invariant,
            pdl=True,
        )
        self.history_ready = True
        return out

    def write(self, qkv: Tensor, kv: PagedKV, weights: LatentLayer) -> None:
        """Launch only the KV cache write, for a last layer whose output is not needed."""
        k_cache, _ = kv.values
        rows.write_latent(
            self._projections(qkv, weights),
            weights.norm,
            self.rope,
            k_cache,
            queries=self.shared.absorbed[: self.metadata.num_tokens],
            history_ready=self.history_ready,
            pdl=True,
        )

    def rows(
        self, qkv: Tensor, kv: PagedKV, tokens: Tensor, out: Tensor, weights: LatentLayer
    ) -> bool:
        """Not supported: a last layer computes the attention of all tokens."""
        return False

    def _projections(self, qkv: Tensor, weights: LatentLayer) -> Projections:
        """Queries, and what keys are made of, of the T tokens."""
        latent, num_tokens = self.shared.latent, self.metadata.num_tokens
        first_key = qkv.shape[1] - latent.key_dim
        q = qkv[:, :first_key]
        if weights.q_b is not None and weights.q_norm is not None:
            norm_columns(qkv[:num_tokens], 0, weights.q_norm, latent.norm_eps, pdl=True)
            weights.q_b.product(q, self.shared.queries, num_tokens)
            q = self.shared.queries
        heads = q[:num_tokens].view(num_tokens, -1, latent.qk_dim)
        return Projections(heads, qkv[:num_tokens, first_key:])
