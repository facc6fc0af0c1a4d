"""Steps of latent attention on the GPU, and what they should give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_steps import make_step
from inflight_kernels.ops.latent.attention import (
    LatentMetadata,
    LatentParams,
    attend,
    workspace_size,
)
from inflight_kernels.ops.latent.operands import DTYPE, KEY, RANK
from inflight_kernels.torch_ops import latent


@dataclass
class LatentStep:
    """Inputs on the GPU; what attention must not read is NaN, or a block that does not exist."""

    q: Tensor
    cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    scale: float

    def workspace(self, max_q_len: int | None = None, batch_invariant: bool = False) -> Tensor:
        num_tokens, num_heads, _ = self.q.shape
        size = workspace_size(len(self.seq_lens), num_tokens, num_heads, max_q_len, batch_invariant)
        return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def out(self) -> Tensor:
        shape = (*self.q.shape[:2], RANK)
        return torch.full(shape, float("nan"), dtype=DTYPE, device="cuda")

    def metadata(
        self,
        workspace: Tensor | None = None,
        max_q_len: int | None = None,
        planned: bool = False,
        batch_invariant: bool = False,
    ) -> LatentMetadata:
        if workspace is None:
            workspace = self.workspace(max_q_len, batch_invariant)
        return LatentMetadata(
            LatentParams(self.q.shape[1], self.scale, batch_invariant),
            self.query_start,
            self.seq_lens,
            self.block_tables,
            len(self.q),
            workspace,
            max_q_len,
            planned,
        )

    def run(
        self,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
        *,
        history_ready: bool = False,
        pdl: bool = False,
        **options: Any,
    ) -> Tensor:
        """`options` are those of `metadata`."""
        out = self.out() if out is None else out
        metadata = self.metadata(workspace, **options)
        attend(self.q, self.cache, metadata, out, history_ready=history_ready, pdl=pdl)
        return out

    def definition(self) -> Tensor:
        return latent.paged_attention(
            self.q.double(),
            self.cache.double(),
            self.block_tables,
            self.query_start,
            self.seq_lens,
            self.scale,
            RANK,
        )


def make_latent_step(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_heads: int = 16,
    block_size: int = 16,
    seed: int = 0,
) -> LatentStep:
    made = make_step(
        q_lens,
        kv_lens,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=KEY,
        block_size=block_size,
        seed=seed,
    )
    return LatentStep(
        made.q,
        made.k_cache,
        made.block_tables,
        made.query_start,
        made.seq_lens,
        # Scores with a standard deviation of 2: weights are spread, but not evenly.
        2 * KEY**-0.5,
    )
