"""Steps of paged attention on the GPU, and what they should give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight_kernels.ops.attention.attention import attend, workspace_size
from inflight_kernels.ops.attention.operands import AttentionMetadata, AttentionParams, Cascade
from inflight_kernels.ops.rope import PagedKV

DTYPES = (torch.bfloat16, torch.float16)
# Weights and results are rounded to the storage type: a few units in its last place.
BOUND = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


@dataclass
class Step:
    """Inputs on the GPU; what attention must not read is NaN, or a block that does not exist.

    Sinks are [H], or None.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    scale: float
    sinks: Tensor | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.q.shape[1], self.k_cache.shape[2], self.q.shape[2]

    def workspace(self, max_q_len: int | None = None, batch_invariant: bool = False) -> Tensor:
        count, num_tokens = len(self.seq_lens), len(self.q)
        size = workspace_size(count, num_tokens, *self.heads, max_q_len, batch_invariant)
        return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def out(self) -> Tensor:
        return torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device="cuda")

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.k_cache, self.v_cache)

    def metadata(
        self,
        workspace: Tensor | None = None,
        max_q_len: int | None = None,
        planned: bool = False,
        cascade: Cascade | None = None,
        **spec: Any,
    ) -> AttentionMetadata:
        """Of the step; `spec` are fields of `AttentionParams`."""
        made = AttentionParams(*self.heads, scale=self.scale, **spec)
        if workspace is None:
            workspace = self.workspace(max_q_len, made.batch_invariant)
        return AttentionMetadata(
            made,
            self.query_start,
            self.seq_lens,
            self.block_tables,
            len(self.q),
            workspace,
            max_q_len,
            planned,
            cascade=cascade,
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
        ready = history_ready
        attend(self.q, self.kv, metadata, out, sinks=self.sinks, history_ready=ready, pdl=pdl)
        return out

    def definition(self, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        """One chunk after the other, every score, in float64."""
        num_heads, num_kv_heads, _ = self.heads
        block_size = self.k_cache.shape[1]
        out = torch.zeros(self.q.shape, dtype=torch.float64, device="cuda")
        starts = self.query_start.tolist()
        for i, kv_len in enumerate(self.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            q_len = starts[i + 1] - starts[i]
            if not q_len or not kv_len:
                continue
            blocks = self.block_tables[i, : -(-kv_len // block_size)].long()
            k, v = (
                cache[blocks]
                .flatten(0, 1)[:kv_len]
                .double()
                .repeat_interleave(num_heads // num_kv_heads, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", self.q[rows].double(), k) * self.scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            last = torch.arange(kv_len - q_len, kv_len, device="cuda")[:, None]
            keys = torch.arange(kv_len, device="cuda")
            seen = keys <= last
            if window:
                seen &= keys > last - window
            scores = scores.masked_fill(~seen, float("-inf"))
            if self.sinks is not None:  # of a key more, whose value is 0
                sinks = self.sinks.double()[:, None, None].expand(-1, q_len, 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., :kv_len]
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        return out


def make_step(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Step:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    needed = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator, device="cuda").int()
    tables = torch.full((len(kv_lens), max(needed) + 2), 10**8, dtype=torch.int32, device="cuda")
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (
        torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2)
    )
    used = 0
    for i, kv_len in enumerate(kv_lens):
        tables[i, : needed[i]] = order[used : used + needed[i]]
        slots = torch.arange(kv_len, device="cuda")
        slots = tables[i].long()[slots // block_size] * block_size + slots % block_size
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[slots] = normal(kv_len, num_kv_heads, head_dim)
        used += needed[i]
    starts = torch.tensor([0, *q_lens], device="cuda").cumsum(0).int()
    return Step(
        normal(sum(q_lens), num_heads, head_dim),
        k_cache,
        v_cache,
        tables,
        starts,
        torch.tensor(kv_lens, dtype=torch.int32, device="cuda"),
        head_dim**-0.5,
    )


def with_sinks(step: Step, seed: int = 0) -> Step:
    """The step with a sink for each head, which takes from hardly any to most of the weight."""
    num_heads = step.heads[0]
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(num_heads, generator=generator, device="cuda")
    return replace(step, sinks=torch.linspace(-4.0, 10.0, num_heads, device="cuda")[order])


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def head_error(out: Tensor, expected: Tensor) -> float:
    """The largest `error` of a head, as sinks make the values of some of them small."""
    pairs = zip(out.unbind(1), expected.unbind(1), strict=True)
    return max(error(ours, theirs) for ours, theirs in pairs)


STEPS = {
    "decode": ([1] * 5, [1, 17, 64, 300, 2000]),
    "decode, many": ([1] * 300, list(range(1, 301))),
    "decode, hundred": ([1] * 100, list(range(1, 901, 9))),
    "decode, one long": ([1], [20_000]),
    "decode, ragged": ([1] * 4, [128, 30_000, 16, 5000]),
    "verify": ([5] * 6, [5, 70, 64, 1000, 333, 4000]),
    "prefill": ([300, 64, 1000], [300, 64, 1000]),
    "long prefill": ([2048, 1500], [2048, 3001]),
    "one chunk": ([700], [4096]),
    "short chunk of a long prompt": ([40], [9000]),
    "mixed": ([1, 513, 1, 3, 200], [900, 513, 4000, 77, 3000]),
}
