"""Products with the matrices of each head, before and after latent attention.

Shapes: T tokens, H query heads of n columns without position, values of v columns; see
`ops.latent.operands`. With few tokens the products are bound by reading the matrices, so the
kernels read them before the preceding kernel has ended. The order of sums is fixed: a token's
result does not depend on the other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.ops.latent.operands import (
    DTYPE,
    KEY,
    RANK,
    ROTATED,
    STORAGE,
    LatentNorm,
    Projections,
    check_heads_of_rows,
)
from inflight_kernels.ops.latent.rows import row_arguments, write_latent
from inflight_kernels.ops.rope import RopeInputs
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import Int64, check, kernel, num_multiprocessors

NOPE_DIMS = (128, 192)
"""n of supported heads."""

MAX_TOKENS = 256
"""With more tokens, cuBLAS multiplies, unless results must not depend on their number."""

# As in latent_products.cu.
_THREADS = 256
_ABSORB_SLAB, _ABSORB_TOKENS = 64, 32
_PROJECT_TOKENS = 16

# Slabs of v_up: with few tokens many blocks read it, with more each block reads fewer of the tokens
# again.
_FEW_SLAB, _MANY_SLAB = 16, 64
_FEW_TOKENS = 32

# Of a multiprocessor. Blocks with more tokens than one tile loop over them.
_BLOCKS = 8


def absorb(
    q: Tensor, k_up: Tensor, *, queries: Tensor, batch_invariant: bool = False, pdl: bool = False
) -> None:
    """q without positions, by head @ k_up -> the first RANK columns of queries.

    Args:
        q: [T, H, n + ROTATED]; tokens may be strided.
        k_up: [H, n, RANK], constant.
        queries: [T, H, KEY].
        batch_invariant: a token's result does not depend on the number of tokens either.
        pdl: see `Kernel`. k_up is read during the preceding kernel, which must not write it.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    num_tokens, num_heads, width = q.shape
    _check_absorbed(q, k_up)
    check("queries", queries, (num_tokens, num_heads, KEY), DTYPE)
    if not num_tokens:
        return
    if num_tokens > MAX_TOKENS and not batch_invariant:
        by_head = queries[:, :, :RANK].transpose(0, 1)
        _multiply(q[:, :, : width - ROTATED].transpose(0, 1), k_up, by_head)
        return
    _launch_absorb(
        (q, Int64(q.stride(0)), 0, Int64(0), queries, num_heads, 0, Int64(0), 0, *[0] * 5, 0.0),
        k_up,
        num_tokens,
        num_rows=0,
        history_ready=False,
        pdl=pdl,
    )


def absorb_and_write(
    projections: Projections,
    k_up: Tensor,
    norm: LatentNorm,
    rope: RopeInputs,
    cache: Tensor,
    *,
    queries: Tensor,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """`absorb` and `rows.write_latent` in one launch, for any number of tokens.

    Saves a launch: with few sequences, a step is bound by latencies.

    Args:
        projections, norm, rope, cache, queries, history_ready: see `rows.write_latent`.
        k_up, pdl: see `absorb`.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    num_tokens = len(projections.q)
    _check_absorbed(projections.q, k_up)
    arguments = row_arguments(projections, norm, rope, cache, queries)
    if num_tokens:
        _launch_absorb(arguments, k_up, num_tokens, num_tokens, history_ready, pdl)


def prepare(
    projections: Projections,
    k_up: Tensor,
    norm: LatentNorm,
    rope: RopeInputs,
    cache: Tensor,
    *,
    queries: Tensor,
    batch_invariant: bool = False,
    history_ready: bool = False,
) -> None:
    """Everything between the projections and attention, in dependent launches: one for up to
    MAX_TOKENS tokens, or if results must not depend on their number, else two.

    Args:
        projections, norm, rope, cache, queries, history_ready: see `rows.write_latent`.
        k_up, batch_invariant: see `absorb`.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    if batch_invariant or len(projections.q) <= MAX_TOKENS:
        absorb_and_write(
            projections,
            k_up,
            norm,
            rope,
            cache,
            queries=queries,
            history_ready=history_ready,
            pdl=True,
        )
        return
    absorb(projections.q, k_up, queries=queries, pdl=True)
    write_latent(
        projections, norm, rope, cache, queries=queries, history_ready=history_ready, pdl=True
    )


def project_values(
    attended: Tensor,
    v_up: Tensor,
    *,
    out: Tensor,
    batch_invariant: bool = False,
    pdl: bool = False,
) -> None:
    """attended by head @ v_up^T -> out.

    Args:
        attended: [T, H, RANK].
        v_up: [H, v, RANK], constant; v is a multiple of 64.
        out: [T, H, v].
        batch_invariant: as for `absorb`.
        pdl: see `Kernel`. v_up is read during the preceding kernel, which must not write it.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    num_tokens, num_heads, _ = attended.shape
    width = v_up.shape[1]
    check("attended", attended, (num_tokens, num_heads, RANK), DTYPE)
    check("v_up", v_up, (num_heads, width, RANK), DTYPE)
    check("out", out, (num_tokens, num_heads, width), DTYPE)
    if width % _MANY_SLAB:
        raise ValueError(f"v_up is {list(v_up.shape)}; v must be a multiple of {_MANY_SLAB}")
    if not num_tokens:
        return
    if num_tokens > MAX_TOKENS and not batch_invariant:
        _multiply(attended.transpose(0, 1), v_up.transpose(1, 2), out.transpose(0, 1))
        return
    slab = _FEW_SLAB if num_tokens <= _FEW_TOKENS else _MANY_SLAB
    kernel("latent_products", _project_name(slab))(
        _blocks(num_heads * width // slab, num_tokens, _PROJECT_TOKENS),
        _THREADS,
        attended,
        v_up,
        out,
        num_heads,
        width,
        num_tokens,
        pdl=pdl,
    )


def _multiply(rows: Tensor, matrices: Tensor, out: Tensor) -> None:
    """By cuBLAS, [H, T, k] @ [H, k, n] -> out; nothing while launches are recorded."""
    if not rows.is_meta:
        torch.bmm(rows, matrices, out=out)


def _check_absorbed(q: Tensor, k_up: Tensor) -> None:
    _, num_heads, width = q.shape
    check_heads_of_rows("q", q, width)
    check("k_up", k_up, (num_heads, width - ROTATED, RANK), DTYPE)
    if width - ROTATED not in NOPE_DIMS:
        raise ValueError(
            f"heads have {width - ROTATED} columns without position; allowed: "
            f"{', '.join(map(str, NOPE_DIMS))}"
        )


def _launch_absorb(
    arguments: tuple[object, ...],
    k_up: Tensor,
    num_tokens: int,
    num_rows: int,
    history_ready: bool,
    pdl: bool,
) -> None:
    """Launch the kernel with its arguments from q to eps."""
    num_heads, nope, _ = k_up.shape
    blocks = _blocks(num_heads * RANK // _ABSORB_SLAB, num_tokens, _ABSORB_TOKENS)
    kernel("latent_products", _absorb_name(nope))(
        blocks + num_rows,
        _THREADS,
        *arguments,
        history_ready,
        k_up,
        num_tokens,
        num_rows,
        pdl=pdl,
    )


def _blocks(slabs: int, num_tokens: int, tile: int) -> int:
    """Blocks for so many slabs of matrices: one for each tile of tokens, or fewer that loop."""
    most = max(1, _BLOCKS * num_multiprocessors() // slabs)
    return slabs * min(-(-num_tokens // tile), most)


def _absorb_name(nope: int) -> str:
    return f"absorb<{STORAGE}, {nope}>"


def _project_name(slab: int) -> str:
    return f"project_values<{STORAGE}, {slab}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = (
        *map(_absorb_name, NOPE_DIMS),
        *map(_project_name, (_FEW_SLAB, _MANY_SLAB)),
    )
    return [("latent_products", names, ())]
