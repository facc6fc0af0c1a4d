"""Norm, RoPE and cache write of latent attention, between the projections and attention.

Shapes: T tokens, H query heads; see `ops.latent.operands`.
"""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.ops.latent.operands import (
    DTYPE,
    KEY,
    ROTATED,
    STORAGE,
    LatentNorm,
    Projections,
    check_cache,
)
from inflight_kernels.ops.rope import RopeInputs
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import Int64, check, kernel

_MAX_THREADS = 512
_LANES = 4  # of a head

_NAME = f"write_latent<{STORAGE}>"


def write_latent(
    projections: Projections,
    norm: LatentNorm,
    rope: RopeInputs,
    cache: Tensor,
    *,
    queries: Tensor,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """Norm latents and rotate keys -> their slots; rotate q -> the last columns of queries.

    Equivalent to `torch_ops.latent.write_latent`, and `torch_ops.transformer.rotary` of q. The
    other columns of queries are those of `products.absorb`, which for few tokens does all this in
    one launch (`products.absorb_and_write`).

    Args:
        projections: of the step's tokens.
        norm: of the layer's latents.
        rope: of the step, tables of ROTATED columns.
        cache: [num_blocks, block_size, 1, KEY] of the layer; blocks may be strided.
        queries: [T, H, KEY].
        history_ready: positions and slot_mapping may be read before the preceding kernel has ended:
            they were written before an `attend` that was launched since (see there).
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    num_tokens, num_heads, _ = projections.q.shape
    arguments = row_arguments(projections, norm, rope, cache, queries)
    if not num_tokens:
        return
    q, q_stride, *others = arguments
    warps = 1 + -(-(num_heads + 1) * _LANES // 32)
    kernel("latent_rows", _NAME)(
        num_tokens,
        min(32 * warps, _MAX_THREADS),
        q,
        q_stride,
        projections.q.shape[2] - ROTATED,
        *others,
        history_ready,
        pdl=pdl,
    )


def row_arguments(
    projections: Projections, norm: LatentNorm, rope: RopeInputs, cache: Tensor, queries: Tensor
) -> tuple[object, ...]:
    """Arguments of a kernel that writes rows, from q to the norm's eps, checked.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    q, kv_a = projections
    num_tokens, num_heads, _ = q.shape
    projections.check_fits()
    rope.check_fits(num_tokens, ROTATED)
    check_cache(cache)
    check("queries", queries, (num_tokens, num_heads, KEY), DTYPE)
    return (
        q,
        Int64(q.stride(0)),
        kv_a,
        Int64(kv_a.stride(0)),
        queries,
        num_heads,
        cache,
        Int64(cache.stride(0)),
        cache.shape[1],
        rope.slot_mapping,
        rope.positions,
        rope.cos,
        rope.sin,
        norm.weight,
        float(norm.eps),
    )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [("latent_rows", (_NAME,), ())]
