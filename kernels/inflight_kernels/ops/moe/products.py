"""Products of rows, sorted by expert, with the weight of their expert.

Shapes: T tokens, E experts, k experts per token, d columns of x, n rows of an expert's weight.

Sums are accumulated in one order, whatever the tile: a row's result does not depend on the others.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    STAGE_DEPTH_BYTES,
    STORAGE_TYPES,
    Operand,
    values_of,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe.routing import MIN_TILE, Routed
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    check,
    is_hopper,
    kernel,
    name_of,
    num_multiprocessors,
    vectors_in,
)
from inflight_kernels.runtime.tensor_map import matrix_map

GATE_ROWS = 8
"""Rows of gate and up alternate in a fused weight."""

PLAIN, SILU, CLAMPED = 0, 1, 2
"""What a product does with its sums, as in experts_hopper.cu: nothing, silu(gate) * up, or the gate
of gpt-oss (`torch_ops.transformer.clamped_swiglu`)."""


_CHUNK = 64
"""Rows of x that are copied at once, as in experts_hopper.cu."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile of a product.

    Attributes:
        tokens: rows of x, of one expert.
        rows: rows of its weight.
        groups: consumer warpgroups.
        pair: whether a cluster of two blocks shares its rows of x.
    """

    tokens: int
    rows: int
    groups: int = 1
    pair: bool = False

    @property
    def box(self) -> int:
        """Rows of x that a block copies at once."""
        return min(self.tokens, _CHUNK) // (2 if self.pair else 1)

    def blocks(self, max_tiles: int, n: int, num_sms: int) -> int:
        """To launch for so many tiles at most of weights with n rows: each fills a multiprocessor,
        and iterates over its share."""
        shares = 2 if self.pair else 1
        return min(max_tiles * -(-n // (self.rows * shares)), num_sms // shares) * shares

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.groups + 1)

    @property
    def stages(self) -> int:
        """Pipeline stages in shared memory: as many as fit."""
        return (MAX_SHARED_BYTES - self._other_bytes) // self._step_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._other_bytes + self.stages * self._step_bytes

    @property
    def _step_bytes(self) -> int:
        return (self.tokens + self.rows) * STAGE_DEPTH_BYTES + 16

    @property
    def _other_bytes(self) -> int:
        # Sums of a chunk on their way out, 64 columns of each group.
        return 1024 + self.groups * min(self.tokens, _CHUNK) * (64 + 8) * 2


_FEW_TOKENS = (MIN_TILE, 16, 32, 64)
_FEW_ROWS = (64, 48)
_SHORT_BYTES = 1024
"""Rows of a weight up to which a consumer takes longer for what follows a product than for the
product, so that two of them share a tile."""
_SOME = Shape(128, 128, 2)
_MANY = Shape(256, 128, 2, pair=True)
# Sums of 8 bits take twice the registers.
_MANY_BYTES = Shape(128, 128, 2, pair=True)


@functools.lru_cache(maxsize=4096)
def tile_of(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype) -> int:
    """Rows of an expert that are multiplied at once: as many as hardly any expert exceeds if tokens
    are spread evenly, since a second tile reads the weight again.

    Args:
        num_tokens, num_experts, top_k: T, E and k.
        dtype: of the weights.
    """
    mean = num_tokens * top_k / num_experts
    likely = min(mean + 3 * math.sqrt(mean) + 1, num_tokens)
    most = _many(dtype.itemsize).tokens
    return next((size for size in (*_FEW_TOKENS, _SOME.tokens) if likely <= size < most), most)


def _many(itemsize: int) -> Shape:
    return _MANY_BYTES if itemsize == 1 else _MANY


@functools.lru_cache(maxsize=4096)
def shape_of(
    tile: int,
    n: int,
    k: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    itemsize: int,
    num_sms: int,
) -> Shape:
    """The shape of a product's tiles.

    Args:
        tile: from `tile_of`.
        n, k: rows and columns of an expert's weight.
        num_tokens, num_experts, top_k: T, E and experts per token.
        itemsize: of the weight.
        num_sms: multiprocessors of the device.
    """
    if tile > _FEW_TOKENS[-1]:
        many = _many(itemsize)
        return many if tile == many.tokens else _SOME
    if k * itemsize <= _SHORT_BYTES and num_tokens > 1:
        return Shape(tile, 128, 2)
    # Distinct experts of so many tokens.
    experts = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)

    def work(rows: int) -> float:
        return math.ceil(round(experts * math.ceil(n / rows), 3) / num_sms) * rows

    return Shape(tile, min(_FEW_ROWS, key=work))


def product(
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    routed: Routed,
    *,
    num_tokens: int,
    out: Tensor,
    gate: int = PLAIN,
    pdl: bool = False,
) -> None:
    """Rows of x, each times the weight of its expert -> out, accumulated in float32.

    Args:
        x: [T * k or more, d] sorted as `gather` does; or [1, d] for a single token's experts.
        weight: [E, n, d]; with a gate, GATE_ROWS rows of gate and as many of up by turns. Quantised
            if x is, with scales [E * n].
        bias: [E, n] in the order of the weight's rows, or None.
        routed: from `route` with `tile_of` these tokens.
        num_tokens: T.
        out: [T * k or more, n], or n / 2 columns with a gate, bfloat16.
        gate: PLAIN, SILU or CLAMPED.
        pdl: see `Kernel`. The first stages of the weights are read during the preceding kernel,
            which must not write them, nor may it be `route`, unless there is one token.

    Raises:
        ValueError: wrong shape or type of an operand.
        RuntimeError: not a Hopper GPU.
    """
    rows, matrix = values_of(x), values_of(weight)
    num_experts, n, k = matrix.shape
    num_rows, is_single = num_tokens * routed.top_k, len(rows) == 1
    value_type = _check_operands(x, weight, bias, routed, num_tokens, out, gate)
    if not num_tokens:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU")
    tile = tile_of(num_tokens, num_experts, routed.top_k, matrix.dtype)
    sms = num_multiprocessors()
    cut = shape_of(tile, n, k, num_tokens, num_experts, routed.top_k, matrix.itemsize, sms)
    depth = STAGE_DEPTH_BYTES // matrix.itemsize
    kernel("experts_hopper", _name(cut, value_type, gate))(
        cut.blocks(min(num_experts, num_rows) + num_rows // cut.tokens, n, sms),
        cut.threads,
        matrix_map(rows, (cut.box, depth), 128),
        matrix_map(matrix.view(num_experts * n, k), (cut.rows, depth), 128),
        x.scales if isinstance(x, ScaledRows) else 0,
        weight.scales if isinstance(weight, ScaledRows) else 0,
        0 if bias is None else bias,
        routed.tiles,
        routed.num_tiles,
        out,
        n,
        k,
        0 if is_single else -1,
        int(not is_single),
        shared=cut.shared_bytes,
        pdl=pdl,
    )


def _name(cut: Shape, value_type: str, gate: int) -> str:
    kind = "experts_product_pairs" if cut.pair else "experts_product"
    out = STORAGE_TYPES[torch.bfloat16]
    return (
        f"{kind}<{value_type}, {out}, {cut.tokens}, {cut.rows}, {cut.groups}, {cut.stages}, {gate}>"
    )


def _check_operands(
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    routed: Routed,
    num_tokens: int,
    out: Tensor,
    gate: int,
) -> str:
    """Check the operands of `product`; returns the C++ type of x and the weight."""
    rows, matrix = values_of(x), values_of(weight)
    num_experts, n, k = matrix.shape
    num_rows, is_single = num_tokens * routed.top_k, len(rows) == 1
    width = n if gate == PLAIN else n // 2
    if rows.shape[1] != k or matrix.dtype != rows.dtype or num_experts != routed.num_experts:
        raise ValueError(
            f"x is {rows.dtype} {list(rows.shape)} and the weight {matrix.dtype} "
            f"{list(matrix.shape)}; expected as many columns, the same type and "
            f"{routed.num_experts} experts"
        )
    if (is_single and num_tokens != 1) or (not is_single and len(rows) < num_rows):
        raise ValueError(f"x has {len(rows)} rows; expected {num_rows}, or 1 of a single token")
    if len(out) < num_rows:
        raise ValueError(f"out has {len(out)} rows; expected {num_rows}")
    check("out", out, (len(out), width), torch.bfloat16)
    check("weight", matrix, (num_experts, n, k), matrix.dtype)
    vectors_in("d", k, matrix.dtype)
    if width % 8:
        raise ValueError(f"the weight has {n} rows; out must have a multiple of 8 columns")
    if bias is not None:
        check("bias", bias, (num_experts, n), torch.bfloat16)
    if isinstance(weight, ScaledRows):
        check("scales", weight.scales, (num_experts * n,), torch.float32)
        return name_of(BYTE_TYPES, "weight", matrix)
    return name_of({torch.bfloat16: STORAGE_TYPES[torch.bfloat16]}, "weight", matrix)


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    values = [STORAGE_TYPES[torch.bfloat16], *BYTE_TYPES.values()]
    few = [Shape(tokens, rows) for tokens in _FEW_TOKENS for rows in _FEW_ROWS]
    few += [Shape(tokens, 128, 2) for tokens in _FEW_TOKENS]
    products = [
        tuple(_name(cut, value, gate) for gate in (PLAIN, SILU, CLAMPED))
        for value in values
        for cut in (*few, *((_SOME, _MANY) if value == values[0] else (_MANY_BYTES,)))
    ]
    return [("experts_hopper", names, ()) for names in products]
