"""Attention of a model's layers on a GPU: the rotation, the cache's new entries, the product.

Shapes: T tokens in n chunks, s rows of logits, B blocks in the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.models.layers.rope import inverse_frequencies
from inflight.models.spec import AttentionSpec, ModelSpec, RopeSpec
from inflight_kernels.ops import attention, rope
from inflight_kernels.ops.rope import rope_write_kv
from inflight_kernels.runtime.launch import is_hopper
from inflight_kernels.torch_ops.transformer import rotary_tables


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Where a forward pass finds what it computes: buffers, of which it takes the first elements.

    Attributes:
        token_ids, positions, slot_mapping: [T] int64.
        query_start: [n + 1] int32, chunk i owns tokens query_start[i]:query_start[i + 1].
        seq_lens: [n] int32, tokens in the KV cache after the pass.
        tables: [n, B] int32, block tables.
        sample_rows: [s] int64, the tokens after which one is to be chosen.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    seq_lens: Tensor
    tables: Tensor
    sample_rows: Tensor


def kernels_of(spec: AttentionSpec, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Stem and name of the kernels that layers with this attention may launch."""
    return [
        *attention.kernels_of(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype, is_hopper()),
        *rope.kernels_of(spec.head_dim, dtype, norms=spec.qk_norm),
    ]


class RotaryTables:
    """cos and sin of each of a model's rotary embeddings, on a GPU.

    Args:
        spec: of the model.
        max_len: positions.
        device: the GPU.
    """

    def __init__(self, spec: ModelSpec, max_len: int, device: torch.device) -> None:
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for layer in spec.attentions:
            frequencies, factor = inverse_frequencies(layer.rope, layer.head_dim, max_len)
            self._tables[layer.rope] = rotary_tables(
                frequencies, max_len, factor, torch.float32, device
            )

    def of(self, rope: RopeSpec) -> tuple[Tensor, Tensor]:
        """[num_positions, head_dim] float32 each."""
        return self._tables[rope]


class Attention:
    """What the layers of one AttentionSpec have in common.

    Args:
        spec: of these layers.
        eps: of the norm of q and k, where there is one.
        tables: cos and sin of their rotary embedding.
        max_tokens: T at most.
        max_rows: n at most.
        batch_invariant: a token's numbers do not depend on the other tokens of its step.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        eps: float,
        tables: tuple[Tensor, Tensor],
        *,
        max_tokens: int,
        max_rows: int,
        batch_invariant: bool,
    ) -> None:
        self.spec = spec
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._scale, self._eps = spec.scale, eps
        self._cos, self._sin = tables
        self._batch_invariant = batch_invariant
        size = attention.workspace_size(
            max_rows, max_tokens, *self._heads, batch_invariant=batch_invariant
        )
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._cos.device)

    def begin(
        self, rows: ForwardInputs, num_tokens: int, num_chunks: int, max_q_len: int
    ) -> AttentionPass:
        """Launch the plan of a pass, which all these layers follow."""
        query_start, seq_lens = rows.query_start[: num_chunks + 1], rows.seq_lens[:num_chunks]
        attention.plan(
            query_start,
            seq_lens,
            self._workspace,
            num_tokens,
            *self._heads,
            self.spec.window,
            max_q_len=max_q_len,
            batch_invariant=self._batch_invariant,
            pdl=True,
        )
        # One token each: the rotation is part of attention, and q need not come apart.
        rotates = (
            num_tokens == num_chunks
            and max_q_len == 1
            and not self._batch_invariant
            and attention.prefers_rope_attend(num_tokens, *self._heads)
        )
        return AttentionPass(
            self,
            rows.positions[:num_tokens],
            rows.slot_mapping[:num_tokens],
            rows.tables[:num_chunks],
            query_start,
            seq_lens,
            max_q_len,
            rotates,
        )


@dataclass(slots=True)
class AttentionPass:
    """One pass over these layers.

    Attributes:
        history_ready: whether what the layers have in common, and their caches as other steps left
            them, are complete: once the first of these layers' attention has been launched.
    """

    shared: Attention
    positions: Tensor
    slots: Tensor
    tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    max_q_len: int
    rotates: bool
    history_ready: bool = False

    def layer(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        """Launch a layer's attention: qkv [T, (H + 2 * G) * D] -> out [T, H * D]."""
        shared = self.shared
        if self.rotates:
            attention.rope_attend(
                qkv,
                self.positions,
                shared._cos,
                shared._sin,
                self.slots,
                k_cache,
                v_cache,
                self.tables,
                self.query_start,
                self.seq_lens,
                out,
                shared._workspace,
                shared._scale,
                shared.spec.window,
                q_weight=q_norm,
                k_weight=k_norm,
                eps=shared._eps,
                planned=True,
                history_ready=self.history_ready,
                pdl=True,
            )
        else:
            attention.attend(
                self._rotate(qkv, k_cache, v_cache, q_norm, k_norm),
                k_cache,
                v_cache,
                self.tables,
                self.query_start,
                self.seq_lens,
                out,
                shared._workspace,
                shared._scale,
                shared.spec.window,
                max_q_len=self.max_q_len,
                batch_invariant=shared._batch_invariant,
                planned=True,
                history_ready=self.history_ready,
                pdl=True,
            )
        self.history_ready = True

    def write(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        """Launch of the last layer only what later passes need: keys and values into the cache."""
        self._rotate(qkv, k_cache, v_cache, q_norm, k_norm)

    def _rotate(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """Rotate q in place and k into the cache with v; q [T, H, D]."""
        shared = self.shared
        num_heads, _, head_dim = shared._heads
        q = qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
        rope_write_kv(
            qkv,
            self.positions,
            shared._cos,
            shared._sin,
            self.slots,
            k_cache,
            v_cache,
            q_out=q,
            q_weight=q_norm,
            k_weight=k_norm,
            eps=shared._eps,
            history_ready=self.history_ready,
            pdl=True,
        )
        return q
