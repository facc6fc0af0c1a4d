"""Steps of paged attention on the GPU, from the qkv projection on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention_steps import Step, make_step
from inflight_kernels.ops.attention.attention import rope_attend
from inflight_kernels.ops.attention.operands import AttentionMetadata, AttentionWeights
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.torch_ops import transformer


@dataclass
class Projection:
    """qkv of a step's tokens, and where they go. Their slots in the step's cache are NaN before."""

    step: Step
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    qk_norm: QkNorm | None

    @property
    def rope(self) -> RopeInputs:
        return RopeInputs(self.positions, self.slots, self.cos, self.sin)

    def rotate(self, q_out: Tensor, kv: PagedKV | None = None, **options) -> None:
        """Without attention; `kv` is the step's by default."""
        kv = self.step.kv if kv is None else kv
        rope_write_kv(self.qkv, self.rope, kv, q_out=q_out, qk_norm=self.qk_norm, **options)

    def attend(self, kv: PagedKV, metadata: AttentionMetadata, out: Tensor, **options) -> None:
        weights = AttentionWeights(self.qk_norm, self.step.sinks)
        rope_attend(self.qkv, self.rope, kv, metadata, out, weights=weights, **options)

    def run(
        self,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
        *,
        history_ready: bool = False,
        pdl: bool = False,
        **options,
    ) -> Tensor:
        """`options` are those of `Step.metadata`."""
        step = self.step
        out = step.out() if out is None else out
        longest = len(self.qkv) if len(step.seq_lens) == 1 else 1
        metadata = step.metadata(workspace, longest, **options)
        self.attend(step.kv, metadata, out, history_ready=history_ready, pdl=pdl)
        return out


def make_projection(q_lens, kv_lens, *, normed=False, num_layer=0, **options) -> Projection:
    step = make_step(q_lens, kv_lens, **options)
    num_heads, num_kv_heads, head_dim = step.heads
    num_tokens, block_size = len(step.q), step.k_cache.shape[1]
    positions = torch.cat(
        [
            torch.arange(kv_len - q_len, kv_len)
            for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
        ]
    ).cuda()
    chunk = torch.arange(len(q_lens)).repeat_interleave(torch.tensor(q_lens)).cuda()
    blocks = step.block_tables[chunk, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    for cache in (step.k_cache, step.v_cache):
        cache.flatten(0, 1)[slots] = float("nan")
    frequencies = (1e4 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    cos, sin = transformer.rotary_tables(frequencies, max(kv_lens))
    generator = torch.Generator("cuda").manual_seed(1000 + num_layer)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, generator=generator, device="cuda").to(step.q.dtype)
    qk_norm = None
    if normed:
        qk_norm = QkNorm(*(torch.randn(head_dim, device="cuda") for _ in "qk"), eps=1e-6)
    return Projection(step, qkv, positions, slots, cos.cuda(), sin.cuda(), qk_norm)
