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


_CHUNK = 64
"""Rows of x that are copied at once, as in experts_hopper.cu."""

_ALIGNMENT = 1024
"""Of x in a stage."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tile of a product.

    Attributes:
        tokens: rows of x, of one expert.
        rows: rows of its weight.
        groups: consumer warpgroups.
        pair: whether a cluster of two blocks shares its rows of x.
        record_bytes: of a record of the weight; 0 if it has values of x's type.
    """

    tokens: int
    rows: int
    groups: int = 1
    pair: bool = False
    record_bytes: int = 0

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
        if not self.record_bytes:
            return (self.tokens + self.rows) * STAGE_DEPTH_BYTES + 16
        records = self.rows // RECORD_ROWS * self.record_bytes
        x_bytes = self.tokens * RECORD_COLUMNS * torch.bfloat16.itemsize
        return -(-records // _ALIGNMENT) * _ALIGNMENT + x_bytes + 16

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


# Two consumers decode, so that one's products hide the other's arithmetic.
_CODES_ROWS, _CODES_GROUPS = 128, 2


@functools.lru_cache(maxsize=4096)
def tile_of(num_tokens: int, num_experts: int, top_k: int, values: WeightType) -> int:
    """Rows of an expert that are multiplied at once: as many as hardly any expert exceeds if tokens
    are spread evenly, since a second tile reads the weight again.

    Args:
        num_tokens, num_experts, top_k: T, E and k.
        values: of the weights.
    """
    mean = num_tokens * top_k / num_experts
    likely = min(mean + 3 * math.sqrt(mean) + 1, num_tokens)
    most = _many(values).tokens
    return next((size for size in (*_FEW_TOKENS, _SOME.tokens) if likely <= size < most), most)


def _many(values: WeightType) -> Shape:
    if isinstance(values, GroupedKind):
        return _shape_for_codes(_SOME.tokens, values)
    return _MANY_BYTES if values.itemsize == 1 else _MANY


def _shape_for_codes(tokens: int, kind: GroupedKind) -> Shape:
    return Shape(tokens, _CODES_ROWS, _CODES_GROUPS, record_bytes=kind.record_bytes)


@functools.lru_cache(maxsize=4096)
def shape_of(
    tile: int,
    n: int,
    k: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    values: WeightType,
    num_sms: int,
) -> Shape:
    """The shape of a product's tiles.

    Args:
        tile: from `tile_of`.
        n, k: rows and columns of an expert's weight.
        num_tokens, num_experts, top_k: T, E and experts per token.
        values: of the weight.
        num_sms: multiprocessors of the device.
    """
    if isinstance(values, GroupedKind):
        return _shape_for_codes(tile, values)
    if tile > _FEW_TOKENS[-1]:
        many = _many(values)
        return many if tile == many.tokens else _SOME
    if k * values.itemsize <= _SHORT_BYTES and num_tokens > 1:
        return Shape(tile, 128, 2)
    # Distinct experts of so many tokens.
    experts = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)

    def work(rows: int) -> float:
        return math.ceil(round(experts * math.ceil(n / rows), 3) / num_sms) * rows

    return Shape(tile, min(_FEW_ROWS, key=work))


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
    rows, values, sms = values_of(x), type_of(weight), num_multiprocessors()
    num_experts, top_k = routed.num_experts, routed.top_k
    num_rows, is_single = num_tokens * top_k, len(rows) == 1
    tile = tile_of(num_tokens, num_experts, top_k, values)
    cut = shape_of(tile, n, k, num_tokens, num_experts, top_k, values, sms)
    kernel("experts_hopper", _name(cut, values, gate))(
        cut.blocks(min(num_experts, num_rows) + num_rows // cut.tokens, n, sms),
        cut.threads,
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
    box = cut.rows, STAGE_DEPTH_BYTES // matrix.itemsize
    return (
        matrix_map(matrix.view(-1, matrix.shape[2]), box, 128),
        x.scales if isinstance(x, ScaledRows) else 0,
        weight.scales if isinstance(weight, ScaledRows) else 0,
    )


def _name(cut: Shape, values: WeightType, gate: int) -> str:
    storage = STORAGE_TYPES[torch.bfloat16]
    if isinstance(values, GroupedKind):
        kind, value_type = "experts_product_codes", values.name
    else:
        kind = "experts_product_pairs" if cut.pair else "experts_product"
        value_type = _VALUE_TYPES[values]
    sizes = f"{cut.tokens}, {cut.rows}, {cut.groups}, {cut.stages}"
    return f"{kind}<{value_type}, {storage}, {sizes}, {gate}>"


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
    few = [Shape(tokens, rows) for tokens in _FEW_TOKENS for rows in _FEW_ROWS]
    few += [Shape(tokens, 128, 2) for tokens in _FEW_TOKENS]
    cuts: list[tuple[Shape, WeightType]] = [
        (cut, values)
        for values in _VALUE_TYPES
        for cut in (*few, *((_SOME, _MANY) if values == torch.bfloat16 else (_MANY_BYTES,)))
    ]
    cuts += [(_shape_for_codes(tokens, _GPT_OSS), _GPT_OSS) for tokens in _FEW_TOKENS]
    cuts += [(_many(kind), kind) for kind in grouped_rows.KINDS]
    products = [
        tuple(_name(cut, values, gate) for gate in (PLAIN, SILU, CLAMPED)) for cut, values in cuts
    ]
    return [("experts_hopper", names, ()) for names in products]
