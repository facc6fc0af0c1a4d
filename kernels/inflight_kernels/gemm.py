"""Linear layers of few tokens. Shapes: m tokens, k inputs, n rows of the weight.

A linear layer of at most 64 tokens costs what its weights cost to read, so this one streams them
once and does the rest meanwhile. It needs a Hopper GPU. How a shape is cut up is fixed by `plan`,
and sums are added in an order that the plan fixes: the same operands give the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.compile import Instantiation
from inflight_kernels.launch import (
    check,
    check_place,
    is_hopper,
    kernel,
    name_of,
    num_multiprocessors,
)
from inflight_kernels.tensor_map import matrix_map

STORAGE_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
_OUT_TYPES = {**STORAGE_TYPES, torch.float32: "float"}

MAX_TOKENS = 64

# As gemm.cu has them.
_THREADS = 160
_ROWS = 128
_BOX_ROWS = 64
_DEPTH = 64

# By the tokens that the kernel multiplies: steps in shared memory, as many as there is room for. So
# a multiprocessor has one block, also of a kernel that is launched before the one before it has
# ended: with room for two, some got both and others none.
_STAGES = {8: 12, 16: 12, 32: 11, 64: 9}

# See `prefers`.
_MAX_PREFERRED = 32

# A block with fewer steps than this costs more in sums of parts than it reads.
_MIN_STEPS = 4

# Of the workspace: two parts of a tile for each block, and a counter for each of its warps.
_MAX_PARTIALS = 4 * 2**20
_MAX_COUNTERS = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """How a linear layer is cut into work.

    Attributes:
        tokens: that the kernel multiplies, m or more.
        stages: steps in shared memory.
        tiles: of rows, that cover the weight.
        steps: of each tile, along k.
        blocks: launched; block b has steps [b * t // blocks, (b + 1) * t // blocks) of the
            t = tiles * steps, counted tile by tile.
    """

    tokens: int
    stages: int
    tiles: int
    steps: int
    blocks: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 1024 + self.stages * ((_ROWS + self.tokens) * _DEPTH * 2 + 16)


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, gated: bool, num_multiprocessors: int) -> Plan:
    """Equal shares for as many blocks as there are multiprocessors.

    Args:
        m: tokens, at most MAX_TOKENS.
        n, k: of the weight.
        gated: whether the weight is gate | up.
        num_multiprocessors: of the device.
    """
    tokens = next(tokens for tokens in _STAGES if m <= tokens)
    width, rows = (n // 2, _ROWS // 2) if gated else (n, _ROWS)
    tiles = -(-width // rows)
    steps = -(-k // _DEPTH)
    blocks = min(num_multiprocessors, max(tiles, tiles * steps // _MIN_STEPS))
    return Plan(tokens, _STAGES[tokens], tiles, steps, blocks)


def prefers(m: int, n: int, k: int) -> bool:
    """Whether `linear` is faster than cuBLAS for a product of this shape, on this device.

    Measured on an H200 in decode steps of 8 layers of an 8B Llama in bfloat16, with norms and
    attention between the products (benchmarks/notes.md): with 1 token a step took 0.5 to 4 % less
    time, with 16 from 0.5 % more to 1 % less, and with 64 3 % more, likely because the parts of
    tiles that must be added up are large. Between 16 and 64 only the products themselves were
    timed: with 32, qkv, o, gate | up and down together take 7 % less.
    """
    return 1 <= m <= _MAX_PREFERRED and k % 8 == 0 and is_hopper()


class Workspace:
    """Where the parts of a tile meet: 16 MiB; for launches in one stream, one after the other.

    Attributes:
        partials: float32.
        counters: int32, all 0 between launches.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.partials = torch.empty(_MAX_PARTIALS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(_MAX_COUNTERS, dtype=torch.int32, device=device)


def linear(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    gated: bool = False,
    pdl: bool = False,
    prefetch: int = 2,
) -> None:
    """x @ weight.T + bias, gated or not, + residual -> out, accumulated in float32.

    Args:
        x: [m, k], m <= MAX_TOKENS; rows may be apart, by a multiple of 8 values.
        weight: [n, k], k a multiple of 8.
        workspace: see there.
        bias: [n].
        residual: [m, n], or [m, n / 2] when gated; may be out.
        out: of the residual's shape; of x's type or float32, float32 only when not gated.
        gated: the weight is gate | up, and out is silu(gate) * up (arXiv:2002.05202).
        pdl: see `Kernel`. The first steps of the weights are read while the kernel before runs,
            which must not write them.
        prefetch: steps of each block, after those that shared memory holds, whose weights are
            brought to the L2 cache meanwhile; only with pdl.

    Raises:
        ValueError: for operands of other shapes, types or alignment.
        RuntimeError: on a GPU of another architecture.
    """
    storage = name_of(STORAGE_TYPES, "x", x)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; they must be [m, k] and [n, k]"
        )
    (m, k), n = x.shape, weight.shape[0]
    if m > MAX_TOKENS:
        raise ValueError(f"x has {m} rows; at most {MAX_TOKENS} are read in one pass")
    if k % 8 or k == 0 or (gated and n % 2):
        raise ValueError(f"weight is [{n}, {k}]; k must be a multiple of 8, and n even when gated")
    if gated and out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype}; a gated product is stored as x is, {x.dtype}")
    out_type = _OUT_TYPES[x.dtype if out.dtype == x.dtype else torch.float32]
    shape = (m, n // 2 if gated else n)
    check("weight", weight, (n, k), x.dtype)
    check("out", out, shape, x.dtype if out.dtype == x.dtype else torch.float32, vectors=False)
    if bias is not None:
        check("bias", bias, (n,), x.dtype, vectors=False)
    if residual is not None:
        check("residual", residual, shape, x.dtype, vectors=False)
    check_place("x", x)
    if x.stride(1) != 1 or x.stride(0) % 8:
        raise ValueError(
            f"x has strides {x.stride()}; a row must be contiguous, and rows a multiple of 8 apart"
        )
    if not m or not n:
        return
    if not is_hopper():
        raise RuntimeError("this product needs a Hopper GPU; see `prefers`")
    cut = plan(m, n, k, gated, num_multiprocessors())
    kernel("gemm", _name(cut.tokens, storage, out_type, gated))(
        cut.blocks,
        _THREADS,
        matrix_map(x, (cut.tokens, _DEPTH), 128),
        matrix_map(weight, (_BOX_ROWS, _DEPTH), 128),
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        workspace.partials,
        workspace.counters,
        m,
        n,
        k,
        prefetch if pdl else 0,
        shared=cut.shared_bytes,
        pdl=pdl,
    )


def _name(tokens: int, storage: str, out_type: str, gated: bool) -> str:
    flag = "true" if gated else "false"
    return f"skinny_gemm<{storage}, {out_type}, {tokens}, {_STAGES[tokens]}, {flag}>"


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    names = tuple(
        _name(tokens, storage, out_type, gated)
        for storage in STORAGE_TYPES.values()
        for tokens in _STAGES
        for out_type, gated in ((storage, False), (storage, True), ("float", False))
    )
    return [("gemm", names, ())]
