"""Attention of a model's layers on a GPU: the rotation, the cache's new entries, the product.

Shapes: T tokens in n chunks, s rows of logits, B blocks in the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.models.config import ModelConfig
from inflight.models.layers.rope import inverse_frequencies
from inflight_kernels.ops import attention, rope
from inflight_kernels.ops.attention_operands import AttentionMetadata, AttentionSpec
from inflight_kernels.ops.rope import PagedKV, RopeInputs, rope_write_kv
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


def kernels_of(config: ModelConfig, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Stem and name of the kernels that the layers of a model may launch."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    return [
        *attention.kernels_of(*heads, dtype, is_hopper()),
        *rope.kernels_of(config.head_dim, dtype, norms=False),
    ]


class Attention:
    """What the layers of a model have in common.

    Args:
        config: of the model.
        max_len: the longest sequence: the rotary tables reach that far.
        device: the GPU.
        max_tokens: T at most.
        max_rows: n at most.
        batch_invariant: a token's numbers do not depend on the other tokens of its step.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_len: int,
        device: torch.device,
        *,
        max_tokens: int,
        max_rows: int,
        batch_invariant: bool,
    ) -> None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.spec = AttentionSpec(
            *heads, scale=config.head_dim**-0.5, batch_invariant=batch_invariant
        )
        frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim, max_len)
        self._cos, self._sin = rotary_tables(
            frequencies, max_len, attention_factor, torch.float32, device
        )
        size = attention.workspace_size(
            max_rows, max_tokens, *heads, batch_invariant=batch_invariant
        )
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)

    def begin(
        self, rows: ForwardInputs, num_tokens: int, num_chunks: int, max_q_len: int
    ) -> AttentionPass:
        """Launch the plan of a pass, which all its layers follow."""
        spec = self.spec
        metadata = AttentionMetadata(
            spec,
            rows.query_start[: num_chunks + 1],
            rows.seq_lens[:num_chunks],
            rows.tables[:num_chunks],
            num_tokens,
            self._workspace,
            max_q_len,
            planned=True,
        )
        attention.plan(metadata, pdl=True)
        # One token each: the rotation is part of attention, and q need not come apart.
        rotates = (
            num_tokens == num_chunks
            and max_q_len == 1
            and not spec.batch_invariant
            and attention.prefers_rope_attend(
                num_tokens, spec.num_heads, spec.num_kv_heads, spec.head_dim
            )
        )
        positions, slot_mapping = rows.positions[:num_tokens], rows.slot_mapping[:num_tokens]
        inputs = RopeInputs(positions, slot_mapping, self._cos, self._sin)
        return AttentionPass(metadata, inputs, rotates)


@dataclass(slots=True)
class AttentionPass:
    """One pass over the layers: what they share is checked and laid out once.

    Attributes:
        metadata: of the pass.
        rope: of its tokens.
        rotates: whether attention rotates q and k itself.
        history_ready: whether what the layers have in common, and their caches as other steps left
            them, are complete: once the first layer's attention has been let in.
    """

    metadata: AttentionMetadata
    rope: RopeInputs
    rotates: bool
    history_ready: bool = False

    def layer(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Launch a layer's attention: qkv [T, (H + 2 * G) * D] -> out [T, H * D]."""
        kv, ready = PagedKV(k_cache, v_cache), self.history_ready
        if self.rotates:
            attention.rope_attend(
                qkv, self.rope, kv, self.metadata, out, history_ready=ready, pdl=True
            )
        else:
            q = self._rotate(qkv, kv)
            attention.attend(q, kv, self.metadata, out, history_ready=ready, pdl=True)
        self.history_ready = True

    def write(self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Launch of the last layer only what later passes need: keys and values into the cache."""
        self._rotate(qkv, PagedKV(k_cache, v_cache))

    def _rotate(self, qkv: Tensor, kv: PagedKV) -> Tensor:
        """Rotate q and k, put k and v into the cache -> q [T, H, D], in its place."""
        num_heads, head_dim = self.metadata.spec.num_heads, self.metadata.spec.head_dim
        q = qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
        rope_write_kv(qkv, self.rope, kv, q_out=q, history_ready=self.history_ready, pdl=True)
        return q
