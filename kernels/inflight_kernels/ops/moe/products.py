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

from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import (
    RECORD_COLUMNS,
    RECORD_ROWS,
    GroupedKind,
    GroupedRows,
)
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
from inflight_kernels.runtime.tensor_map import matrix_map, record_map

GATE_ROWS = 8
"""Rows of gate and up alternate in a fused weight."""

PLAIN, SILU, CLAMPED = 0, 1, 2
"""What a product does with its sums, as in experts_hopper.cu: nothing, silu(gate) * up, or the gate
of gpt-oss (`torch_ops.transformer.clamped_swiglu`)."""


ExpertsWeight = Operand | GroupedRows
"""Of all experts: [E, n, d], of quantised rows with scales [E * n]; or in records, the matrices
[n, d] one below the other, n a multiple of RECORD_ROWS."""

WeightType = torch.dtype | GroupedKind
"""Of the values of a weight, or the kind of its records."""


def type_of(weight: ExpertsWeight) -> WeightType:
    """What tiles depend on."""
    return weight.kind if isinstance(weight, GroupedRows) else values_of(weight).dtype


def input_type(values: WeightType) -> torch.dtype:
    """Of the rows that weights of this type are multiplied with."""
    return torch.bfloat16 if isinstance(values, GroupedKind) else values


ROWS, _GROUPS = 128, 2
"""Rows of a weight in a tile, and consumer warpgroups that share them, as in experts_hopper.cu. Two
of them, so that one's products hide what the other does after its own."""

_THREADS = 128 * (_GROUPS + 1)

_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 228 * 1024, 1024
"""Shared memory of a multiprocessor, and what the driver takes of it for each block."""

_CHUNK = 64
"""Rows of x that are copied at once, as in experts_hopper.cu."""

_ALIGNMENT = 1024
"""Of x in a stage."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile of a product: rows of x, of one expert, by ROWS rows of its weight.

    Attributes:
        tokens: rows of x.
        pair: whether a cluster of two blocks shares its rows of x.
        blocks: of a multiprocessor.
        record_bytes: of a record of the weight; 0 if it has values of x's type.
    """

    tokens: int
    pair: bool = False
    blocks: int = 1
    record_bytes: int = 0

    @property
    def box(self) -> int:
        """Rows of x that a block copies at once."""
        return min(self.tokens, _CHUNK) // (2 if self.pair else 1)

    def grid(self, max_tiles: int, n: int, num_sms: int) -> int:
        """Blocks to launch for so many tiles at most of weights with n rows: as many as the device
        has at once, each of which iterates over its share."""
        shares = 2 if self.pair else 1
        return min(max_tiles * -(-n // (ROWS * shares)), num_sms * self.blocks // shares) * shares

    @property
    def stages(self) -> int:
        """Pipeline stages in shared memory: as many as fit."""
        room = MAX_SHARED_BYTES
        if self.blocks > 1:
            room = _MULTIPROCESSOR_BYTES // self.blocks - _RESERVED_BYTES
        return (room - self._other_bytes) // self._step_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self._other_bytes + self.stages * self._step_bytes

    @property
    def _step_bytes(self) -> int:
        if not self.record_bytes:
            return (self.tokens + ROWS) * STAGE_DEPTH_BYTES + 16
        records = ROWS // RECORD_ROWS * self.record_bytes
        x_bytes = self.tokens * RECORD_COLUMNS * torch.bfloat16.itemsize
        return -(-records // _ALIGNMENT) * _ALIGNMENT + x_bytes + 16

    @property
    def _other_bytes(self) -> int:
        # Sums of a chunk on their way out, 64 columns of each group.
        return _GROUPS * min(self.tokens, _CHUNK) * (64 + 8) * 2


_FEW_TOKENS = (MIN_TILE, 16, 32, 64)
_TWO_BLOCKS_TOKENS = 32
"""Up to which two blocks have registers enough. Tiles of 8-bit values are so short that the start
and end of a block are a notable part of them, which those of the other block hide."""

_SOME = Shape(128)
_MANY = Shape(256, pair=True)
# Sums of 8 bits take twice the registers.
_MANY_BYTES = Shape(128, pair=True)


@functools.lru_cache(maxsize=4096)
def tile_of(num_tokens: int, num_experts: int, top_k: int, values: WeightType) -> int:
    """Rows of an expert that are multiplied at once: as many as few experts exceed if tokens are
    spread evenly. A second tile reads the weight again, from the L2 cache, but rows that a tile has
    and an expert has not take their share of what a multiprocessor can load.

    Args:
        num_tokens, num_experts, top_k: T, E and k.
        values: of the weights.
    """
    mean = num_tokens * top_k / num_experts
    likely = min(mean + 2 * math.sqrt(mean), num_tokens)
    most = _many(values).tokens
    return next((size for size in (*_FEW_TOKENS, _SOME.tokens) if likely <= size < most), most)


def _many(values: WeightType) -> Shape:
    if isinstance(values, GroupedKind):
        return Shape(_SOME.tokens, record_bytes=values.record_bytes)
    return _MANY_BYTES if values.itemsize == 1 else _MANY


def shape_of(tile: int, values: WeightType) -> Shape:
    """The shape of a product's tiles.

    Args:
        tile: from `tile_of`.
        values: of the weight.
    """
    if isinstance(values, GroupedKind):
        return Shape(tile, record_bytes=values.record_bytes)
    if tile > _FEW_TOKENS[-1]:
        many = _many(values)
        return many if tile == many.tokens else _SOME
    is_short = values.itemsize == 1 and tile <= _TWO_BLOCKS_TOKENS
    return Shape(tile, blocks=2 if is_short else 1)


def product(
    x: Operand,
    weight: ExpertsWeight,
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
            if x is, and of the same type; or in records with x in bfloat16.
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
    n, k = _check_operands(x, weight, bias, routed, num_tokens, out, gate)
    if not num_tokens:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU")
    rows, values = values_of(x), type_of(weight)
    num_experts, top_k = routed.num_experts, routed.top_k
    num_rows, is_single = num_tokens * top_k, len(rows) == 1
    tile = tile_of(num_tokens, num_experts, top_k, values)
    cut = shape_of(tile, values)
    max_tiles = min(num_experts, num_rows) + num_rows // cut.tokens
    kernel("experts_hopper", _name(cut, values, gate))(
        cut.grid(max_tiles, n, num_multiprocessors()),
        _THREADS,
        matrix_map(rows, (cut.box, STAGE_DEPTH_BYTES // rows.itemsize), 128),
        *_weight_arguments(x, weight, cut),
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


def _weight_arguments(x: Operand, weight: ExpertsWeight, cut: Shape) -> tuple[object, ...]:
    """Of the kernel: the weight, and all scales."""
    if isinstance(weight, GroupedRows):
        records = record_map(weight.records, grouped_rows.BOX_TILES)
        return records, 0 if weight.table is None else weight.table
    matrix = values_of(weight)
    box = ROWS, STAGE_DEPTH_BYTES // matrix.itemsize
    return (
        matrix_map(matrix.view(-1, matrix.shape[2]), box, 128),
        x.scales if isinstance(x, ScaledRows) else 0,
        weight.scales if isinstance(weight, ScaledRows) else 0,
    )


def _name(cut: Shape, values: WeightType, gate: int) -> str:
    storage = STORAGE_TYPES[torch.bfloat16]
    kind, sizes = "experts_product", f"{cut.tokens}, {cut.stages}"
    if isinstance(values, GroupedKind):
        return f"{kind}_codes<{values.name}, {storage}, {sizes}, {gate}>"
    if cut.pair:
        return f"{kind}_pairs<{_VALUE_TYPES[values]}, {storage}, {sizes}, {gate}>"
    return f"{kind}<{_VALUE_TYPES[values]}, {storage}, {sizes}, {cut.blocks}, {gate}>"


_VALUE_TYPES = {torch.bfloat16: STORAGE_TYPES[torch.bfloat16], **BYTE_TYPES}
"""Of weights, unless they are in records: torch dtype -> C++ type."""


def _check_operands(
    x: Operand,
    weight: ExpertsWeight,
    bias: Tensor | None,
    routed: Routed,
    num_tokens: int,
    out: Tensor,
    gate: int,
) -> tuple[int, int]:
    """Check the operands of `product`; returns n and k, of an expert's weight."""
    rows = values_of(x)
    num_experts, n, k = _check_weight(weight, routed.num_experts)
    num_rows, is_single = num_tokens * routed.top_k, len(rows) == 1
    width, values = n if gate == PLAIN else n // 2, type_of(weight)
    if rows.shape[1] != k or rows.dtype != input_type(values) or num_experts != routed.num_experts:
        raise ValueError(
            f"x is {rows.dtype} {list(rows.shape)} and the weight {values} {[num_experts, n, k]}; "
            f"expected as many columns, {input_type(values)} and {routed.num_experts} experts"
        )
    if (is_single and num_tokens != 1) or (not is_single and len(rows) < num_rows):
        raise ValueError(f"x has {len(rows)} rows; expected {num_rows}, or 1 of a single token")
    if len(out) < num_rows:
        raise ValueError(f"out has {len(out)} rows; expected {num_rows}")
    check("out", out, (len(out), width), torch.bfloat16)
    vectors_in("d", k, rows.dtype)
    if width % 8:
        raise ValueError(f"the weight has {n} rows; out must have a multiple of 8 columns")
    if bias is not None:
        check("bias", bias, (num_experts, n), torch.bfloat16)
    return n, k


def _check_weight(weight: ExpertsWeight, num_experts: int) -> tuple[int, int, int]:
    """Its shape; with records, those of so many experts."""
    if isinstance(weight, GroupedRows):
        n = weight.n // num_experts
        if weight.n % num_experts or n % RECORD_ROWS:
            raise ValueError(
                f"the weight has {weight.n} rows of {num_experts} experts; expected a multiple of "
                f"{RECORD_ROWS} for each"
            )
        weight.check("weight", weight.n, weight.k)
        return num_experts, n, weight.k
    matrix = values_of(weight)
    name_of(_VALUE_TYPES, "weight", matrix)
    num_matrices, n, k = matrix.shape
    check("weight", matrix, (num_matrices, n, k), matrix.dtype)
    if isinstance(weight, ScaledRows):
        check("scales", weight.scales, (num_matrices * n,), torch.float32)
    return num_matrices, n, k


_GPT_OSS = GroupedKind(grouped_rows.E2M1, 32, minimums=False)


def instantiations() -> list[Instantiation]:
    """All kernels of this module; of records, those of gpt-oss, and with the most registers those
    of each other kind."""
    cuts: list[tuple[Shape, WeightType]] = [
        (cut, values)
        for values in _VALUE_TYPES
        for cut in (
            *(shape_of(tokens, values) for tokens in _FEW_TOKENS),
            *((_SOME, _MANY) if values == torch.bfloat16 else (_MANY_BYTES,)),
        )
    ]
    cuts += [(shape_of(tokens, _GPT_OSS), _GPT_OSS) for tokens in _FEW_TOKENS]
    cuts += [(_many(kind), kind) for kind in grouped_rows.KINDS]
    products = [
        tuple(_name(cut, values, gate) for gate in (PLAIN, SILU, CLAMPED)) for cut, values in cuts
    ]
    return [("experts_hopper", names, ()) for names in products]
