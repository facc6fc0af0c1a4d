"""Causal attention over a paged cache of latents (MLA, arXiv:2405.04434) in absorbed form, for any
mix of decodes and prefill chunks.

Shapes: T tokens in n chunks, H query heads; a cache [num_blocks, block_size, 1, KEY], see
`ops.latent.operands`. Planned and captured as `ops.attention`; dispatch.py decides which kernel
handles which chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight_kernels.ops.attention.dispatch import Part
from inflight_kernels.ops.attention.operands import (
    BLOCK_SIZES,
    current_gpu,
    parts_of,
)
from inflight_kernels.ops.attention.planning import PlanLaunch, plan_part
from inflight_kernels.ops.latent.dispatch import CANDIDATES, max_workspace_bytes, parts
from inflight_kernels.ops.latent.operands import (
    DTYPE,
    KEY,
    RANK,
    STORAGE,
    check_cache,
    check_heads_of_rows,
)
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import Int64, check, kernel


@dataclass(frozen=True, slots=True)
class LatentParams:
    """Parameters of latent attention, shared by all layers with equal ones.

    Attributes:
        num_heads: H.
        scale: of the scores, > 0.
        batch_invariant: see `AttentionParams`.
        kv_dtype: None; caches of 8 bits are not supported.

    Raises:
        ValueError: a number out of range, or a cache of 8 bits.
    """

    num_heads: int
    scale: float
    batch_invariant: bool = False
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or not self.scale > 0.0:
            raise ValueError(
                f"num_heads {self.num_heads}, scale {self.scale}: both must be positive"
            )
        if self.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype is {self.kv_dtype}; latent attention supports None, a cache of {DTYPE}"
            )


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """The chunks of a step for all layers of one spec, validated.

    Attributes:
        spec: of the layers.
        query_start, seq_lens, block_tables, num_tokens, max_q_len: see `AttentionMetadata`.
        workspace: uint8, at least `workspace_size` bytes; holds the plan. Concurrent steps must not
            share it.
        planned: `plan` is called before the layers; otherwise each plans by itself.
        parts: the launches of a layer, with the places of their plans; empty if there is nothing
            to compute.

    Raises:
        ValueError: wrong shape or type of an operand, or a workspace that is too small.
    """

    spec: LatentParams
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    num_tokens: int
    workspace: Tensor
    max_q_len: int | None = None
    planned: bool = False
    parts: tuple[Part, ...] = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec

        def find(num_chunks: int, num_tokens: int, longest: int) -> tuple[Part, ...]:
            num_heads, gpu = spec.num_heads, current_gpu()
            return parts(num_chunks, num_tokens, longest, num_heads, gpu, spec.batch_invariant)

        object.__setattr__(self, "parts", parts_of(self, find))


def workspace_size(
    num_chunks: int,
    num_tokens: int,
    num_heads: int,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
) -> int:
    """Workspace bytes that suffice for `plan` and `attend` on the current device, for all steps up
    to these sizes.

    Args:
        num_chunks: maximum n.
        num_tokens: maximum T.
        num_heads: H.
        max_q_len: maximum `LatentMetadata.max_q_len`; None if unbounded.
        batch_invariant: see `LatentParams`.
    """
    if not num_chunks:
        return 0
    return max_workspace_bytes(
        num_chunks, num_tokens, max_q_len, num_heads, current_gpu(), batch_invariant
    )


def plan(metadata: LatentMetadata, *, history_ready: bool = False, pdl: bool = False) -> None:
    """Plan a step; its workspace then holds the plan for all layers with this spec.

    Args:
        metadata: of the step.
        history_ready: see `ops.attention.planning.plan`.
        pdl: see `Kernel`.
    """
    spec = metadata.spec
    for part in metadata.parts:
        how = PlanLaunch(spec.batch_invariant, history_ready, pdl)
        plan_part(metadata, part, (spec.num_heads, 1), 0, how)


def attend(
    q: Tensor,
    cache: Tensor,
    metadata: LatentMetadata,
    out: Tensor,
    *,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """Attention of q over a layer's cache -> out.

    The last token of a chunk attends to all seq_lens[i] keys, the one before it to one less, and so
    on. A token without keys gets zeros; padding tokens, past query_start[n], are not written.
    Blocks past a chunk's keys are not read, so their content is arbitrary.

    Args:
        q: [T, H, KEY]; tokens may be strided.
        cache: [num_blocks, block_size, 1, KEY] of the layer; blocks may be strided.
        metadata: of the step.
        out: [T, H, RANK].
        history_ready: as for `ops.attention.attention.attend`.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or `history_ready` for a step that is not
            planned.
    """
    spec = metadata.spec
    _check_layer(q, cache, metadata, out, history_ready)
    if not metadata.planned:
        plan(metadata, pdl=pdl)
    base = metadata.workspace.data_ptr()
    for part in metadata.parts:
        kernel(part.shape.stem, part.shape.name(STORAGE))(
            part.num_shares,
            part.shape.threads,
            q,
            cache,
            out,
            metadata.block_tables,
            Int64(q.stride(0)),
            Int64(cache.stride(0)),
            metadata.block_tables.shape[1],
            cache.shape[1].bit_length() - 1,
            spec.num_heads,
            float(spec.scale),
            Int64(base + part.items),
            Int64(base + part.shares),
            Int64(base + part.arrivals),
            Int64(base + part.slots),
            history_ready,
            shared=part.shape.shared_bytes,
            pdl=pdl,
        )


def _check_layer(
    q: Tensor, cache: Tensor, metadata: LatentMetadata, out: Tensor, history_ready: bool
) -> None:
    num_tokens, num_heads = metadata.num_tokens, metadata.spec.num_heads
    if q.shape != (num_tokens, num_heads, KEY):
        raise ValueError(f"q is {list(q.shape)}; expected [{num_tokens}, {num_heads}, {KEY}]")
    check_heads_of_rows("q", q, KEY)
    check_cache(cache)
    if cache.shape[1] not in BLOCK_SIZES:
        raise ValueError(
            f"block_size is {cache.shape[1]}; allowed: {', '.join(map(str, BLOCK_SIZES))}"
        )
    check("out", out, (num_tokens, num_heads, RANK), DTYPE)
    if history_ready and not metadata.planned:
        raise ValueError(
            "history_ready requires a planned step: without one the plan itself is not ready"
        )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = tuple(shape.name(STORAGE) for shapes in CANDIDATES for shape in shapes)
    return [("latent_attention", names, ())]
