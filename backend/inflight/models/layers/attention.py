"""Attention layers on a GPU: RoPE, KV cache writes and attention itself.

Shapes: T tokens in n chunks, s rows of logits, B blocks in the longest block table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.core.step_size import StepSize
from inflight.models.layers.linear import CudaWeight
from inflight.models.layers.rope import inverse_frequencies
from inflight.models.spec import AttentionSpec, ModelSpec, RopeSpec
from inflight_kernels.ops.attention import attention, planning
from inflight_kernels.ops.attention.operands import (
    BLOCK_SIZES,
    AttentionMetadata,
    AttentionParams,
    AttentionWeights,
    Cascade,
    DequantizedKV,
    QuantizedOut,
)
from inflight_kernels.ops.attention.rows import TokenChunks, find_chunks
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.linear.operands import Operand
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.torch_ops.transformer import rotary_tables

# Until a pass names that of the cache.
_BLOCK_SIZE = 16
# Keys of prompts that are dequantised at once, in full steps: more than a step's own tokens, as
# earlier chunks and cached prefixes count too. A step with more of them has a slower kernel.
_DEQUANTIZED_STEPS = 4

# Of a last layer, up to so many rows are attended alone, in steps of at least so many tokens that
# have a chunk of at least so many. By what tiles take (benchmarks/notes.md), the attention of all
# takes 40 us in the smallest of these, and 160 in a step of 8,192 tokens with shorter chunks.
_MAX_LAST_ROWS = 64
_MIN_STEP_TOKENS = 2048
_MIN_CHUNK_TOKENS = 1024

# In steps of at least so many tokens attention quantises its output itself. Of fewer, many rows are
# those of units that several blocks share, which leave them in 16 bits, and a kernel that quantises
# all rows takes 4 us.
_MIN_QUANTIZED_TOKENS = 1024


def max_dequantized_keys(max_len: int, max_tokens: int) -> int:
    """Keys of prompts that a step dequantises at most, where a KV cache of 8 bits is dequantised.

    Args:
        max_len: maximum sequence length.
        max_tokens: maximum T.
    """
    return max(max_len, _DEQUANTIZED_STEPS * max_tokens)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The largest pass that there is memory for.

    Attributes:
        max_tokens: maximum T.
        max_rows: maximum n.
        max_len: maximum sequence length.
    """

    max_tokens: int
    max_rows: int
    max_len: int


@dataclass(frozen=True, slots=True)
class TableInputs:
    """Where the tokens of a pass, and those before them, are in the layers of one block table.

    Attributes:
        slot_mapping: [T] int64.
        block_tables: [n, B] int32.
    """

    slot_mapping: Tensor
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Input buffers of a forward pass, which uses their first elements.

    Attributes:
        token_ids, positions: [T] int64.
        query_start: [n + 1] int32; chunk i has tokens query_start[i]:query_start[i + 1].
        seq_lens: [n] int32, tokens in the KV cache after the pass.
        tables: by block table of the cache.
        sample_rows: [s] int64, the tokens that need logits.
        num_tokens: [1] int32, those that are no padding, written before `token_ids` at the latest;
            None if all of a pass are computed.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    tables: tuple[TableInputs, ...]
    sample_rows: Tensor
    num_tokens: Tensor | None = None


class LayerPass(Protocol):
    """One pass over the layers with attention of one kind, whose weights it takes."""

    def layer(
        self,
        qkv: Tensor,
        kv: PagedKV,
        out: Tensor,
        weights: Any,
        following: CudaWeight | None = None,
    ) -> Operand:
        """Launch a layer's attention.

        Args:
            qkv: the entire buffer of the product with the layer's input, of T or more rows.
            kv: of the layer.
            out: [T or more, out_width].
            weights: of the layer's attention.
            following: the linear layer that takes the output, which may then be quantised for it;
                None to leave it in `out`.

        Returns:
            The output: `out`, or T quantised rows.
        """

    def write(self, qkv: Tensor, kv: PagedKV, weights: Any) -> None:
        """Launch only the KV cache write, for a last layer whose output is not needed."""

    def rows(self, qkv: Tensor, kv: PagedKV, tokens: Tensor, out: Tensor, weights: Any) -> bool:
        """Launch the attention of some tokens of a last layer alone, if that is faster.

        Args:
            qkv, kv, weights: as for `layer`.
            tokens: [s] int64, rows of the step.
            out: [s or more, out_width].

        Returns:
            Whether it is; if not, nothing was launched.
        """


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
            if device.type == "meta":
                # To compute them, torch would import a compiler here, which takes seconds.
                cos, sin = torch.empty(2, max_len, layer.rope_dim, device=device).unbind()
                self._tables[layer.rope] = cos, sin
                continue
            frequencies, factor = inverse_frequencies(layer.rope, layer.rope_dim, max_len)
            self._tables[layer.rope] = rotary_tables(
                frequencies, max_len, factor, torch.float32, device
            )

    def of(self, rope: RopeSpec) -> tuple[Tensor, Tensor]:
        """[num_positions, rope_dim] float32 each."""
        return self._tables[rope]


class Attention:
    """The shared part of the layers with one AttentionSpec.

    Args:
        spec: of these layers.
        tables: cos and sin of their rotary embedding.
        limits: of passes.
        batch_invariant: results for a token do not depend on the other tokens of its step.
        dtype: of the activations.
        kv_dtype: of a KV cache of 8 bits; None for one in that type.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        tables: tuple[Tensor, Tensor],
        limits: PassLimits,
        *,
        batch_invariant: bool,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
    ) -> None:
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._params = AttentionParams(
            *heads,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.score_cap,
            batch_invariant=batch_invariant,
            kv_dtype=kv_dtype,
        )
        self._norms_heads = spec.qk_norm == "head"
        self._cos, self._sin = tables
        size = attention.workspace_size(
            limits.max_rows,
            limits.max_tokens,
            *heads,
            batch_invariant=batch_invariant,
            kv_dtype=kv_dtype,
        )
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._cos.device)
        self._dequantized: DequantizedKV | None = None
        if attention.reads_dequantized(self._params):
            most_keys = max_dequantized_keys(limits.max_len, limits.max_tokens)
            self._dequantized = DequantizedKV.empty(
                most_keys, limits.max_rows, self._params, self._cos.device
            )
        self._cascade = Cascade.empty(limits.max_rows, _BLOCK_SIZE, self._params, self._cos.device)
        self._last_rows: LastRows | None = None
        if limits.max_tokens >= _MIN_STEP_TOKENS and not batch_invariant:
            self._last_rows = LastRows.empty(self._params, limits.max_len, dtype, self._cos.device)
        self._codes: Tensor | None = None
        if limits.max_tokens >= _MIN_QUANTIZED_TOKENS and not batch_invariant:
            shape = (limits.max_tokens, spec.num_heads)
            self._codes = torch.zeros(shape, dtype=torch.uint8, device=self._cos.device)

    def begin(
        self,
        rows: ForwardInputs,
        size: StepSize,
        table_index: int = 0,
        block_size: int | None = None,
        history_ready: bool = False,
    ) -> AttentionPass:
        """Launch the planning of a pass, which all its layers use; they share that block table.

        Args:
            rows: of the pass.
            size: of the pass.
            table_index: of the block table.
            block_size: of the cache, to read prefixes that sequences share once for all of them;
                None to read those of each sequence.
            history_ready: another one's planning has been launched for this pass.
        """
        params, table = self._params, rows.tables[table_index]
        num_tokens, num_chunks, max_q_len = size.num_tokens, size.num_chunks, size.max_q_len
        dequantized, keys = self._dequantized, size.prompt_keys
        if dequantized is not None and (keys is None or keys > dequantized.num_keys):
            dequantized = None
        metadata = AttentionMetadata(
            params,
            rows.query_start[: num_chunks + 1],
            rows.seq_lens[:num_chunks],
            table.block_tables[:num_chunks],
            num_tokens,
            self._workspace,
            max_q_len,
            planned=True,
            dequantized=dequantized,
            cascade=self._cascade_for(block_size),
        )
        planning.plan(metadata, history_ready=history_ready, pdl=True)
        # RoPE is fused into attention, and q is not written separately.
        rotates = self._rotates_chunk(size) or (
            num_tokens == num_chunks
            and max_q_len == 1
            and not params.batch_invariant
            and attention.prefers_rope_attend(
                num_tokens,
                params.num_heads,
                params.num_kv_heads,
                params.head_dim,
                params.kv_dtype,
            )
        )
        positions, slot_mapping = rows.positions[:num_tokens], table.slot_mapping[:num_tokens]
        inputs = RopeInputs(positions, slot_mapping, self._cos, self._sin)
        last_rows = self._last_rows if LastRows.are_few(size) else None
        codes = None if rotates else self._codes_for(metadata)
        return AttentionPass(metadata, inputs, rotates, last_rows, codes)

    def _codes_for(self, metadata: AttentionMetadata) -> Tensor | None:
        """The memory with which a step's attention quantises its output; None if that is not
        faster."""
        num_tokens = metadata.num_tokens
        if self._codes is None or num_tokens < _MIN_QUANTIZED_TOKENS:
            return None
        return self._codes[:num_tokens] if attention.quantizes(metadata) else None

    def _rotates_chunk(self, size: StepSize) -> bool:
        """Whether attention rotates q and k of a chunk alone: of one that verifies drafts, or a
        short prompt."""
        return (
            size.num_chunks == 1
            and size.max_q_len > 1
            and not self._norms_heads
            and attention.rotates_chunk(size.max_q_len, self._params)
        )

    def _cascade_for(self, block_size: int | None) -> Cascade | None:
        """The memory for shared prefixes, for a cache with such blocks."""
        if self._cascade is None or block_size is None:
            return None
        if self._cascade.block_size != block_size:
            self._cascade = replace(self._cascade, block_size=block_size)
        return self._cascade


@dataclass(frozen=True, slots=True)
class LastRows:
    """Memory for the attention of a step's sampled rows alone, of which a last layer has no other.
    As chunks of one token they have another kernel.

    Attributes:
        params: of the attention.
        chunks: of _MAX_LAST_ROWS tokens.
        qkv: [_MAX_LAST_ROWS, (H + 2 * G) * D], theirs.
        workspace: of their plan.
    """

    params: AttentionParams
    chunks: TokenChunks
    qkv: Tensor
    workspace: Tensor

    @classmethod
    def empty(
        cls, params: AttentionParams, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> LastRows:
        """For sequences of up to max_len tokens, with activations of this type."""
        count = _MAX_LAST_ROWS
        size = attention.workspace_size(
            count,
            count,
            params.num_heads,
            params.num_kv_heads,
            params.head_dim,
            batch_invariant=False,
            kv_dtype=params.kv_dtype,
        )
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        num_blocks = -(-max_len // min(BLOCK_SIZES))
        width = (params.num_heads + 2 * params.num_kv_heads) * params.head_dim
        qkv = torch.zeros(count, width, dtype=dtype, device=device)
        return cls(params, TokenChunks.empty(count, num_blocks, device), qkv, workspace)

    @staticmethod
    def are_few(size: StepSize) -> bool:
        """Whether the attention of all other rows of a step takes longer than one more plan."""
        return (
            size.num_rows <= _MAX_LAST_ROWS
            and size.num_tokens >= _MIN_STEP_TOKENS
            and size.max_q_len >= _MIN_CHUNK_TOKENS
        )

    def plan(self, tokens: Tensor, step: AttentionMetadata, positions: Tensor) -> AttentionMetadata:
        """Launch the planning of the attention of some tokens [s] of a step alone."""
        chunks, num_rows = self.chunks.first(len(tokens)), len(tokens)
        find_chunks(tokens, positions, step.query_start, step.block_tables, out=chunks, pdl=True)
        metadata = AttentionMetadata(
            self.params,
            chunks.query_start,
            chunks.seq_lens,
            chunks.block_tables,
            num_rows,
            self.workspace,
            max_q_len=1,
            planned=True,
        )
        planning.plan(metadata, pdl=True)
        return metadata


@dataclass(slots=True)
class AttentionPass:
    """One pass over the layers; their shared inputs are checked and prepared once.

    Attributes:
        metadata: of the pass.
        rope: of its tokens.
        rotates: whether attention rotates q and k itself.
        last_rows: for the sampled rows of a last layer, if they are few; else None.
        codes: see `QuantizedOut`; None if it is faster to quantise the output afterwards.
        history_ready: the shared inputs and the KV written by previous steps are complete; true
            once the first layer's attention has been launched.
    """

    metadata: AttentionMetadata
    rope: RopeInputs
    rotates: bool
    last_rows: LastRows | None = None
    codes: Tensor | None = None
    history_ready: bool = False

    def layer(
        self,
        qkv: Tensor,
        kv: PagedKV,
        out: Tensor,
        weights: AttentionWeights,
        following: CudaWeight | None = None,
    ) -> Operand:
        """Launch a layer's attention: qkv [T or more, (H + 2 * G) * D] -> out [T, H * D], or
        quantised rows."""
        ready, num_tokens = self.history_ready, self.metadata.num_tokens
        qkv, attended = qkv[:num_tokens], out[:num_tokens]
        quantized = self._quantized(following)
        if self.rotates:
            attention.rope_attend(
                qkv,
                self.rope,
                kv,
                self.metadata,
                attended,
                weights=weights,
                history_ready=ready,
                pdl=True,
            )
        else:
            q = self._rotate(qkv, kv, weights.qk_norm)
            attention.attend(
                q,
                kv,
                self.metadata,
                attended,
                sinks=weights.sinks,
                quantized=quantized,
                history_ready=ready,
                pdl=True,
            )
        self.history_ready = True
        return out if quantized is None else quantized.rows

    def _quantized(self, following: CudaWeight | None) -> QuantizedOut | None:
        """Where the output goes if it is quantised for this layer."""
        if self.codes is None or following is None:
            return None
        rows = following.coarse_rows(self.metadata.num_tokens)
        return None if rows is None else QuantizedOut(rows, self.codes)

    def write(self, qkv: Tensor, kv: PagedKV, weights: AttentionWeights) -> None:
        """Launch only the KV cache write, for a last layer whose output is not needed."""
        self._rotate(qkv[: self.metadata.num_tokens], kv, weights.qk_norm)

    def rows(
        self, qkv: Tensor, kv: PagedKV, tokens: Tensor, out: Tensor, weights: AttentionWeights
    ) -> bool:
        """Launch the attention of some tokens of a last layer alone, if they are few."""
        if self.last_rows is None:
            return False
        num_rows, qkv = len(tokens), qkv[: self.metadata.num_tokens]
        own = self.last_rows.plan(tokens, self.metadata, self.rope.positions)
        self._rotate(qkv, kv, weights.qk_norm)
        taken = self.last_rows.qkv[:num_rows]
        embedding(tokens, qkv, out=taken, pdl=True)
        q = self._queries(taken)
        attention.attend(q, kv, own, out[:num_rows], sinks=weights.sinks, pdl=True)
        return True

    def _rotate(self, qkv: Tensor, kv: PagedKV, qk_norm: QkNorm | None) -> Tensor:
        """Rotate q and k, write k and v into the cache; returns q [T, H, D], in place."""
        q = self._queries(qkv)
        ready = self.history_ready
        rope_write_kv(qkv, self.rope, kv, q_out=q, qk_norm=qk_norm, history_ready=ready, pdl=True)
        return q

    def _queries(self, qkv: Tensor) -> Tensor:
        """q [T, H, D] of qkv."""
        num_heads, head_dim = self.metadata.spec.num_heads, self.metadata.spec.head_dim
        return qkv[:, : num_heads * head_dim].view(len(qkv), num_heads, head_dim)
