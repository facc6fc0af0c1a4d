"""Steps of paged attention on the GPU whose KV cache has 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_steps import Step
from inflight_kernels.ops.attention.attention import attend, workspace_size
from inflight_kernels.ops.attention.operands import (
    AttentionMetadata,
    AttentionParams,
    DequantizedKV,
)
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.ops.rope import PagedKV
from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops.kv_quantization import QuantizedKV

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def blocks(num_blocks: int, block_size: int, heads: int, head_dim: int) -> Tensor:
    """Memory whose scales are NaN, and whose bytes are NaN in e4m3."""
    shape = (num_blocks, block_size, heads, head_dim + 2)
    return torch.full(shape, 255, dtype=torch.uint8, device="cuda")


def read(memory: QuantizedKV, dtype: torch.dtype = torch.float64) -> Tensor:
    """All blocks, dequantised."""
    every = torch.arange(len(memory.values), device="cuda")
    return kv_quantization.read_blocks(memory, every, dtype)


@dataclass
class QuantizedStep:
    """A step whose cache is quantised.

    Attributes:
        plain: the same, with a cache of the dequantised values.
        memories: keys and values.
    """

    plain: Step
    memories: tuple[QuantizedKV, QuantizedKV]

    def run(
        self,
        workspace: Tensor | None = None,
        history_ready: bool = False,
        dequantized: DequantizedKV | None = None,
        pdl: bool = False,
        **spec: Any,
    ) -> Tensor:
        plain, out = self.plain, self.plain.out()
        metadata = self.metadata(workspace, dequantized, **spec)
        if workspace is not None and not history_ready:
            plan(metadata, pdl=pdl)
        ready = history_ready
        attend(plain.q, self.kv, metadata, out, sinks=plain.sinks, history_ready=ready, pdl=pdl)
        return out

    @property
    def kv(self) -> PagedKV:
        return PagedKV(*self.memories)

    def metadata(
        self,
        workspace: Tensor | None = None,
        dequantized: DequantizedKV | None = None,
        **spec: Any,
    ) -> AttentionMetadata:
        """Planned if there is a workspace."""
        plain = self.plain
        params = AttentionParams(
            *plain.heads,
            scale=plain.scale,
            kv_dtype=self.memories[0].values.dtype,
            **spec,
        )
        return AttentionMetadata(
            params,
            plain.query_start,
            plain.seq_lens,
            plain.block_tables,
            len(plain.q),
            self.workspace(**spec) if workspace is None else workspace,
            planned=workspace is not None,
            dequantized=dequantized,
        )

    def rounded(self) -> Step:
        """The step with a cache of the dequantised values in q's type, as prompts read it."""
        k_cache, v_cache = (read(memory, self.plain.q.dtype) for memory in self.memories)
        return replace(self.plain, k_cache=k_cache, v_cache=v_cache)

    def dequantized(self, spare_keys: int = 0) -> DequantizedKV:
        """Memory for the prompts of the step, with NaN and blocks that do not exist in it."""
        q_lens = self.plain.query_start.diff().tolist()
        kv_lens = self.plain.seq_lens.tolist()
        num_keys = sum(
            -(-keys // 64) * 64 for rows, keys in zip(q_lens, kv_lens, strict=True) if rows > 1
        )
        params = AttentionParams(*self.plain.heads, scale=self.plain.scale)
        memory = DequantizedKV.empty(
            num_keys + spare_keys, len(kv_lens), params, torch.device("cuda")
        )
        memory.blocks.fill_(torch.nan)
        memory.tables.fill_(10**8)
        memory.sources.fill_(-1)
        return memory

    def workspace(self, batch_invariant: bool = False, **_: Any) -> Tensor:
        size = workspace_size(
            len(self.plain.seq_lens),
            len(self.plain.q),
            *self.plain.heads,
            batch_invariant=batch_invariant,
            kv_dtype=self.memories[0].values.dtype,
        )
        return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


def quantized(plain: Step, dtype: torch.dtype) -> QuantizedStep:
    """The step with its cache quantised; NaN stays where nothing is to be read."""
    memories, floats = [], []
    for kept in (plain.k_cache, plain.v_cache):
        num_blocks, block_size, heads, head_dim = kept.shape
        memory = kv_quantization.of_blocks(blocks(num_blocks, block_size, heads, head_dim), dtype)
        rows = kept.flatten(0, 1)
        slots = (~rows.isnan().any(-1).any(-1)).nonzero()[:, 0]
        # Of different sizes, so that each needs its own scale.
        sizes = torch.rand(len(slots), heads, 1, device="cuda") * 3 + 0.1
        kv_quantization.write(rows[slots] * sizes, memory, slots)
        memories.append(memory)
        floats.append(read(memory))
    return QuantizedStep(
        replace(plain, k_cache=floats[0], v_cache=floats[1]), (memories[0], memories[1])
    )
