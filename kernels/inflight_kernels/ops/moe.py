"""Mixtures of experts: routing, and the products of experts.

Shapes: T tokens, E experts, k experts per token, d columns of x, w of an expert's inner layer.

`route` chooses experts and plans the products; `gather` copies each token's row, quantised or not,
to the rows of its experts, sorted by expert; `product` multiplies them; `sum_of_experts` adds up
what each token's experts computed. None of them reads anything back to the host, and nothing
depends on the order in which blocks run, so a token's result does not depend on the other tokens.
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
    Operand,
    values_of,
)
from inflight_kernels.ops.linear.operands import (
    STORAGE_TYPES as LINEAR_TYPES,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    STORAGE_TYPES,
    check,
    check_memory,
    is_hopper,
    kernel,
    name_of,
    num_multiprocessors,
    vectors_in,
)
from inflight_kernels.runtime.tensor_map import matrix_map
from inflight_kernels.torch_ops.moe import Routing

# As in route.cu and rows.cu.
_MAX_BLOCK_TOKENS = 64
MAX_TOP_K = 31
MAX_EXPERTS = 512
MAX_GROUPS = 32
_SIGMOID, _RENORMALIZE = 1, 2
_ROW_THREADS = 256
_MAX_THREADS = 1024

GATE_ROWS = 8
"""Rows of gate and up alternate in a fused weight."""

PLAIN, SILU, CLAMPED = 0, 1, 2
"""What a product does with its sums, as in experts_hopper.cu: nothing, silu(gate) * up, or the gate
of gpt-oss (`torch_ops.transformer.clamped_swiglu`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """How experts are chosen from the router's logits.

    Attributes:
        routing: see there.
        num_experts: E.
        parts: logits are the sums of so many products, each with E columns or, with a shared gate,
            E + 1.
        bias: [E] float32, added to logits.
        select_bias: [E] float32, added to scores when experts are chosen.
        shared_gate: whether the last column is the gate of the shared expert.
    """

    routing: Routing
    num_experts: int
    parts: int = 1
    bias: Tensor | None = None
    select_bias: Tensor | None = None
    shared_gate: bool = False

    @property
    def columns(self) -> int:
        """Of the logits."""
        return self.parts * (self.num_experts + self.shared_gate)

    def obstacle(self) -> str | None:
        """Why the kernels do not support it; None if they do."""
        routing = self.routing
        if self.num_experts > MAX_EXPERTS:
            return f"{self.num_experts} experts (allowed: up to {MAX_EXPERTS})"
        if routing.top_k > MAX_TOP_K:
            return f"{routing.top_k} experts per token (allowed: up to {MAX_TOP_K})"
        if routing.num_groups > MAX_GROUPS:
            return f"{routing.num_groups} groups of experts (allowed: up to {MAX_GROUPS})"
        return None


class Routed:
    """Where the experts of a step's tokens and the plan of their products are kept.

    Args:
        max_tokens: maximum T.
        num_experts: E.
        top_k: k.
        device: the GPU.

    Attributes:
        experts: [max_tokens * k] int32, of each token in turn, the highest score first.
        weights: [max_tokens, k + 1] float32, of each token's experts and of the shared one.
        positions: [max_tokens * k] int32, their rows in products; complete after `gather`.
    """

    def __init__(
        self, max_tokens: int, num_experts: int, top_k: int, device: torch.device | str
    ) -> None:
        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        pairs = max_tokens * top_k
        blocks = max(-(-count // _block_tokens(count)) for count in (max_tokens, _FEW))
        self.max_tokens, self.num_experts, self.top_k = max_tokens, num_experts, top_k
        self.experts, self.positions = ints(pairs), ints(pairs)
        self.weights = torch.zeros(max_tokens, top_k + 1, device=device)
        self.starts = ints(blocks * num_experts)
        self.tiles = ints(4 * (min(num_experts, pairs) + pairs // _FEW_TOKENS[0]))
        self.num_tiles, self.arrived = ints(1), ints(1)


def route(logits: Tensor, router: Router, routed: Routed, *, tile: int, pdl: bool = False) -> None:
    """Choose each token's experts, as `torch_ops.moe.route` does, and plan the products.

    Args:
        logits: [T, router.columns] float32, rows may be strided.
        router: how.
        routed: for at least T tokens; overwritten.
        tile: rows of an expert that are multiplied at once; see `tile_of`.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or a router that is not supported.
    """
    num_tokens, columns = logits.shape
    routing, num_experts = router.routing, router.num_experts
    obstacle = router.obstacle()
    if obstacle is not None:
        raise ValueError(f"{obstacle} is not supported")
    if columns != router.columns or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected {router.columns} columns of "
            "float32, contiguous"
        )
    if num_tokens > routed.max_tokens or (num_experts, routing.top_k) != (
        routed.num_experts,
        routed.top_k,
    ):
        raise ValueError(
            f"{num_tokens} tokens with {routing.top_k} of {num_experts} experts; the memory is for "
            f"{routed.max_tokens} with {routed.top_k} of {routed.num_experts}"
        )
    for name, bias in (("bias", router.bias), ("select_bias", router.select_bias)):
        if bias is not None:
            check(name, bias, (num_experts,), torch.float32, vectors=False)
    if not num_tokens:
        return
    block_tokens = _block_tokens(num_tokens)
    padded = -(-num_experts // 32) * 32
    threads = max(padded, min(32 * min(num_tokens, block_tokens), _MAX_THREADS))
    words = 4 * padded + threads + block_tokens * routing.top_k
    if routing.top_groups < routing.num_groups:
        words += threads // 32 * padded
    kernel("route", f"route<{_per_lane(num_experts)}>")(
        -(-num_tokens // block_tokens),
        threads,
        logits,
        logits.stride(0),
        router.parts,
        num_experts + router.shared_gate,
        0 if router.bias is None else router.bias,
        0 if router.select_bias is None else router.select_bias,
        int(router.shared_gate),
        num_tokens,
        num_experts,
        routing.top_k,
        _SIGMOID * (routing.score == "sigmoid") | _RENORMALIZE * routing.renormalize,
        routing.num_groups,
        routing.top_groups,
        routing.scale,
        routed.experts,
        routed.weights,
        routed.positions,
        routed.starts,
        routed.tiles,
        routed.num_tiles,
        tile,
        block_tokens,
        routed.arrived,
        shared=4 * words,
        pdl=pdl,
    )


_FEW = 512


def _block_tokens(num_tokens: int) -> int:
    """Tokens of a block of `route`: few, one for each of 8 warps, are routed sooner, but many
    blocks take longer to plan."""
    return 8 if num_tokens <= _FEW else _MAX_BLOCK_TOKENS


_PER_LANE = (1, 2, 4, 8, 16)


def _per_lane(num_experts: int) -> int:
    return next(count for count in _PER_LANE if num_experts <= 32 * count)


def gather(x: Tensor, routed: Routed, *, num_tokens: int, out: Operand, pdl: bool = False) -> None:
    """Copy each token's row to the rows of its experts, or quantise it on the way.

    Args:
        x: [T or more, d] of 16 bits.
        routed: from `route` of the same tokens.
        num_tokens: T.
        out: [T * k or more, d] of x's type, or quantised.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    target, (_, width), top_k = values_of(out), x.shape, routed.top_k
    if len(x) < num_tokens or len(target) < num_tokens * top_k or target.shape[1] != width:
        raise ValueError(
            f"x is {list(x.shape)} and out {list(target.shape)}; expected {num_tokens} rows and "
            f"{top_k} times as many, equally wide"
        )
    storage = name_of(LINEAR_TYPES, "x", x)
    check_memory("x", x)
    vectors = vectors_in("d", width, x.dtype)
    stride = vectors_in("the stride of x", x.stride(0), x.dtype)
    targets: tuple[Tensor, ...]
    if isinstance(out, ScaledRows):
        value_type = out.check("out", len(target), width)
        name, targets = _quantize_name(value_type, storage), (target, out.scales)
    else:
        check("out", target, (len(target), width), x.dtype)
        name, targets = "gather_rows", (target,)
    if num_tokens:
        kernel("rows", name)(
            num_tokens,
            min(_ROW_THREADS, -(-vectors // 32) * 32),
            x,
            stride,
            routed.experts,
            routed.starts,
            routed.positions,
            *targets,
            vectors,
            routed.num_experts,
            top_k,
            _block_tokens(num_tokens),
            num_tokens,
            pdl=pdl,
        )


def _quantize_name(value_type: str, storage: str) -> str:
    return f"quantize_gathered_rows<{value_type}, {storage}>"


# ---------------------------------------------------------------- products


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


_FEW_TOKENS = (8, 16, 32, 64)
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
        value_type = name_of(BYTE_TYPES, "weight", matrix)
    else:
        value_type = name_of({torch.bfloat16: STORAGE_TYPES[torch.bfloat16]}, "weight", matrix)
    if not num_tokens:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU")
    tile = tile_of(num_tokens, num_experts, routed.top_k, matrix.dtype)
    sms = num_multiprocessors()
    cut = shape_of(tile, n, k, num_tokens, num_experts, routed.top_k, matrix.itemsize, sms)
    shares = 2 if cut.pair else 1
    units = min(num_experts, num_rows) + num_rows // cut.tokens
    units *= -(-n // (cut.rows * shares))
    depth = STAGE_DEPTH_BYTES // matrix.itemsize
    kernel("experts_hopper", _name(cut, value_type, gate))(
        min(units, sms // shares) * shares,
        cut.threads,
        matrix_map(rows, (min(cut.tokens, _CHUNK) // shares, depth), 128),
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


def sum_of_experts(
    rows: Tensor,
    routed: Routed,
    shared: Tensor | None = None,
    *,
    total: Tensor,
    adds: bool = False,
    pdl: bool = False,
) -> None:
    """What each token's experts computed, times their weights, in the order of their scores.

    Args:
        rows: [T * k or more, d], from a product.
        routed: of the same tokens.
        shared: [T, d], of the shared expert, if there is one.
        total: [T, d], of the same type.
        adds: whether the sum is added to `total`.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    num_tokens, width = total.shape
    if len(rows) < num_tokens * routed.top_k:
        raise ValueError(f"{len(rows)} rows; expected {num_tokens * routed.top_k}")
    storage = name_of(STORAGE_TYPES, "rows", rows)
    check("rows", rows, (len(rows), width), rows.dtype)
    check("total", total, (num_tokens, width), rows.dtype)
    if shared is not None:
        check("shared", shared, (num_tokens, width), rows.dtype)
    vectors = vectors_in("d", width, rows.dtype)
    if num_tokens:
        kernel("rows", f"sum_of_experts<{storage}, {'true' if adds else 'false'}>")(
            num_tokens,
            min(_ROW_THREADS, max(-(-vectors // 32), -(-(routed.top_k + 1) // 32)) * 32),
            rows,
            routed.positions,
            routed.weights,
            0 if shared is None else shared,
            total,
            width,
            routed.top_k,
            pdl=pdl,
        )


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
    sums = tuple(
        f"sum_of_experts<{storage}, {adds}>"
        for storage in STORAGE_TYPES.values()
        for adds in ("false", "true")
    )
    quantized = tuple(
        _quantize_name(value, storage)
        for value in BYTE_TYPES.values()
        for storage in LINEAR_TYPES.values()
    )
    return [
        ("route", tuple(f"route<{count}>" for count in _PER_LANE), ()),
        ("rows", ("gather_rows", *quantized, *sums), ()),
        *(("experts_hopper", names, ()) for names in products),
    ]
