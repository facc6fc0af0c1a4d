"""The kernels of attention as their torch definitions; see `host_kernels`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from inflight.kv.layout import KVTable
from inflight.models.layers import attention
from inflight_kernels.ops.attention.operands import AttentionParams, QuantizedOut
from inflight_kernels.ops.attention.rows import TokenChunks
from inflight_kernels.ops.rope import PagedKV, QkNorm
from inflight_kernels.torch_ops import kv_quantization, transformer
from inflight_kernels.torch_ops.kv_quantization import KVMemory, QuantizedKV


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the definitions in the kernels' places."""
    monkeypatch.setattr(attention, "rope_write_kv", rope_write_kv)
    monkeypatch.setattr(attention, "AttentionMetadata", HostAttentionMetadata)
    monkeypatch.setattr(attention, "RopeInputs", HostRopeInputs)
    monkeypatch.setattr(attention, "Cascade", HostCascade)
    kernels = SimpleNamespace(
        workspace_size=workspace_size,
        attend=attend,
        prefers_rope_attend=lambda *shape: False,
        rotates_chunk=lambda *step: False,
        reads_dequantized=lambda params: False,
        quantizes=lambda metadata: True,
    )
    monkeypatch.setattr(attention, "attention", kernels)
    monkeypatch.setattr(attention, "planning", SimpleNamespace(plan=plan))
    monkeypatch.setattr(attention, "find_chunks", find_chunks)


def workspace_size(*shape: int, batch_invariant: bool, kv_dtype: torch.dtype | None) -> int:
    return 16


def plan(*operands: object, **settings: object) -> None:
    pass


def find_chunks(
    tokens: Tensor,
    positions: Tensor,
    query_start: Tensor,
    block_tables: Tensor,
    *,
    out: TokenChunks,
    pdl: bool,
) -> None:
    chunks = torch.searchsorted(query_start[1:-1].contiguous(), tokens, right=True)
    width = min(block_tables.shape[1], out.block_tables.shape[1])
    out.block_tables[:, :width] = block_tables[chunks, :width]
    out.seq_lens.copy_(positions[tokens] + 1)


class HostCascade:
    """In the place of `Cascade`: no prefix is shared."""

    @classmethod
    def empty(cls, *sizes: object) -> None:
        return None


class HostAttentionMetadata:
    """Satisfies `AttentionMetadata`, of operands on the CPU."""

    def __init__(
        self,
        spec: AttentionParams,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        num_tokens: int,
        *settings: object,
        planned: bool,
        max_q_len: int | None = None,
        dequantized: None = None,
        cascade: None = None,
    ) -> None:
        self.spec = spec
        self.num_tokens = num_tokens
        self.query_start = query_start
        self.seq_lens = seq_lens
        self.block_tables = block_tables
        self._chunks: list[tuple[int, int, int, Tensor, Tensor | None]] = []

    def chunks(self, block_size: int) -> list[tuple[int, int, int, Tensor, Tensor | None]]:
        """(first row, last row + 1, number of keys, blocks, mask if any) of each chunk with rows:
        the same for all layers of a pass."""
        if not self._chunks:
            bounds = itertools.pairwise(self.query_start.tolist())
            lengths = self.seq_lens.tolist()
            for table, length, (first, end) in zip(self.block_tables, lengths, bounds, strict=True):
                assert 0 <= end - first <= length, "tokens without keys"
                if first == end:
                    assert length == 0, "keys of no sequence"
                    continue
                # As the kernels do, whole tiles before the window of the first row are not read.
                own = KVTable(window=self.spec.window)
                skipped = own.first_kept(length - (end - first))
                blocks = table[skipped // block_size : -(-length // block_size)].long()
                mask = self._mask(end - first, length)
                if mask is not None:
                    mask = mask[:, skipped:]
                self._chunks.append((first, end, length - skipped, blocks, mask))
        return self._chunks

    def _mask(self, q_len: int, length: int) -> Tensor | None:
        window = self.spec.window
        if q_len == 1 and not window:
            return None
        mask = torch.ones(q_len, length, dtype=torch.bool).tril_(length - q_len)
        return mask.triu_(length - q_len + 1 - window) if window else mask


@dataclass
class HostRopeInputs:
    """Satisfies `RopeInputs`, of operands on the CPU. A pass has one for all its layers."""

    positions: Tensor
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """cos and sin at each token's position."""
        return self.cos.index_select(0, self.positions), self.sin.index_select(0, self.positions)

    @cached_property
    def kept(self) -> Tensor | None:
        """The tokens with a slot; None if all have one."""
        if int(self.slot_mapping.min()) >= 0:
            return None
        return (self.slot_mapping >= 0).nonzero()[:, 0]


def rope_write_kv(
    qkv: Tensor,
    rope: HostRopeInputs,
    kv: PagedKV,
    *,
    q_out: Tensor,
    qk_norm: QkNorm | None,
    history_ready: bool,
    pdl: bool,
) -> None:
    num_heads, head_dim = q_out.shape[1:]
    groups = kv.k_cache.shape[2]
    heads = qkv.view(len(qkv), -1, head_dim)
    cos, sin = rope.rows
    qk = heads[:, : num_heads + groups]
    if qk_norm is not None:
        q, _ = transformer.rms_norm(qk[:, :num_heads], qk_norm.q_weight, qk_norm.eps)
        k, _ = transformer.rms_norm(qk[:, num_heads:], qk_norm.k_weight, qk_norm.eps)
        qk = torch.cat((q, k), 1)
    qk = transformer.rotary(qk, cos, sin)
    qk = qk.to(qkv.dtype)
    k, v, slots = qk[:, num_heads:], heads[:, num_heads + groups :], rope.slot_mapping
    if rope.kept is not None:
        k, v, slots = (values.index_select(0, rope.kept) for values in (k, v, slots))
    transformer.write_kv(k, v, kv.k_cache, kv.v_cache, slots)
    q = qk[:, :num_heads]
    if kv_quantization.holds_spread_keys(kv.k_cache):
        q = kv_quantization.spread_queries(q)
    q_out.copy_(q)


def _read(cache: KVMemory, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(cache, QuantizedKV):
        return kv_quantization.read_blocks(cache, blocks, dtype)
    return cache.index_select(0, blocks)


def attend(
    q: Tensor,
    kv: PagedKV,
    metadata: HostAttentionMetadata,
    out: Tensor,
    *,
    sinks: Tensor | None,
    quantized: QuantizedOut | None = None,
    **settings: object,
) -> None:
    _attend(q, kv, metadata, out, sinks)
    if quantized is not None:
        _quantize(out, quantized)
        out.fill_(float("nan"))  # nothing is left


def _quantize(out: Tensor, quantized: QuantizedOut) -> None:
    """Rows with the least of the coarse scales (eight_bit.cuh) that take them to 448 at most."""
    rows, codes = quantized
    assert not codes.any(), "codes are zeros between layers"
    largest = out.abs().amax(1).clamp_(min=1e-12)
    scales = torch.exp2(((largest / 448).log2() + 4).div(8).ceil() * 8 - 4)
    rows.scales.copy_(scales)
    rows.values.copy_(out / scales[:, None])


def _attend(
    q: Tensor, kv: PagedKV, metadata: HostAttentionMetadata, out: Tensor, sinks: Tensor | None
) -> None:
    out.fill_(float("nan"))  # rows of no chunk stay as they were: whatever that is
    for first, end, length, blocks, mask in metadata.chunks(kv.k_cache.shape[1]):
        keys, values = (
            _read(cache, blocks, q.dtype).flatten(0, 1)[:length].transpose(0, 1)
            for cache in (kv.k_cache, kv.v_cache)
        )
        if metadata.spec.soft_cap or sinks is not None:
            found = transformer.unfused_attention(
                q[first:end].transpose(0, 1)[None],
                keys[None],
                values[None],
                mask,
                metadata.spec.scale,
                metadata.spec.soft_cap,
                None if sinks is None else sinks[:, None, None],
                is_causal=False,
            )
            out[first:end] = found[0].transpose(0, 1).reshape(end - first, -1)
            continue
        # As a batch of one: torch has no fused attention for less than four dimensions.
        found = torch.nn.functional.scaled_dot_product_attention(
            q[first:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=metadata.spec.scale,
            enable_gqa=True,
        )
        out[first:end] = found[0].transpose(0, 1).reshape(end - first, -1)
