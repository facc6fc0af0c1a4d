"""Mixtures of experts for few tokens, in three kernels: the norm and the router's logits, gate and
up of all experts, and down with the sum of a token's experts.

Shapes: T tokens, at most MAX_TOKENS, E experts, k experts per token, d columns of the residual
stream, w of an expert's inner layer.

What `routing`, `rows` and `products` do in more kernels takes longer than reading the weights if
there are few tokens. Weights have the same layout in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.linear.grouped_rows import KINDS, GroupedRows
from inflight_kernels.ops.linear.operands import (
    NormedRows,
    Operand,
    SummedRows,
    values_of,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe.few_sizes import (
    CHOICE_BYTES,
    MAX_TOKENS,
    PER_LANE,
    THREADS,
    Sizes,
)
from inflight_kernels.ops.moe.products import (
    CLAMPED,
    SILU,
    ExpertsWeight,
    input_type,
    type_of,
)
from inflight_kernels.ops.moe.routing import Router
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    STORAGE_TYPES,
    check,
    is_hopper,
    kernel,
    vectors_in,
)

# As in few_scores_hopper.cu.
_ROUTER_ROWS = 4
_SCORE_THREADS = 256
_VECTORS_PER_THREAD = (1, 2, 4)

_STORAGE = STORAGE_TYPES[torch.bfloat16]


def new_choice(device: torch.device | str) -> Tensor:
    """Memory for what tokens choose, from `gate_up` to `down`."""
    return torch.zeros(CHOICE_BYTES // 4, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class GateUp:
    """The first linear layer of experts, and their gate.

    Attributes:
        weight: [E, 2 * w, d], rows of gate and up by turns of GATE_ROWS; or [E * 2 * w, d] of one
            records.
        bias: [E, 2 * w], or None.
        gate: SILU or CLAMPED.
    """

    weight: ExpertsWeight
    bias: Tensor | None
    gate: int


@dataclass(frozen=True, slots=True, eq=False)
class Down:
    """The last linear layer of experts.

    Attributes:
        weight: [E, d, w]; or [E * d, w] in records.
        bias: [E, d], or None.
    """

    weight: ExpertsWeight
    bias: Tensor | None


def score(
    x: NormedRows | SummedRows,
    router: Tensor,
    *,
    logits: Tensor,
    out: Tensor,
    quantized: ScaledRows | None = None,
    pdl: bool = False,
) -> None:
    """The norm of rows, and the router's logits.

    Args:
        x: T rows of d values.
        router: [n, d] bfloat16, which no kernel writes.
        logits: [T, n] float32.
        out: [T or more, d] bfloat16, the norm.
        quantized: [T or more, d], the norm in 8 bits; None if it is not wanted.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    (num_tokens, hidden), (num_rows, columns) = x.rows.shape, router.shape
    sums = _check_stream(x, out)
    vectors = vectors_in("d", hidden, x.rows.dtype)
    limit = _VECTORS_PER_THREAD[-1] * _SCORE_THREADS
    if vectors > limit or columns != hidden:
        raise ValueError(
            f"x has {hidden} columns and the router {columns}; they must be as many, up to "
            f"{8 * limit}"
        )
    check("router", router, (num_rows, hidden), torch.bfloat16)
    check("logits", logits, (num_tokens, num_rows), torch.float32, vectors=False)
    value_type = _STORAGE
    if quantized is not None:
        value_type = quantized.check("quantized", len(quantized.values), hidden)
    adds = isinstance(x, SummedRows)
    per_thread = next(count for count in _VECTORS_PER_THREAD if vectors <= count * _SCORE_THREADS)
    kernel("few_scores_hopper", _score_name(value_type, per_thread, adds))(
        (-(-num_rows // _ROUTER_ROWS) + 1, num_tokens),
        _SCORE_THREADS,
        x.rows,
        sums[0],
        x.weight,
        sums[1],
        out,
        out if quantized is None else quantized.values,
        0 if quantized is None else quantized.scales,
        router,
        logits,
        hidden,
        x.eps,
        num_rows,
        pdl=pdl,
        max_carveout=True,  # for gate and up, of which not all find a multiprocessor of their own
    )


def gate_up(
    x: Operand,
    logits: Tensor,
    router: Router,
    layer: GateUp,
    *,
    choice: Tensor,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """Gate and up of each token's experts, and the gate.

    Args:
        x: [T, d], quantised as the weight is; bfloat16 if that is GroupedRows.
        logits: [T, router.columns] float32, rows may be strided.
        router: how experts are chosen.
        layer: gate and up.
        choice: from `new_choice`, for `down`.
        out: [T * k or more, w] bfloat16, of each token's experts in turn, the highest score first.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or sizes that do not fit.
    """
    values, weight = values_of(x), layer.weight
    sizes = _check_gate_up(len(values), router, layer, choice, out)
    check("x", values, (len(values), sizes.hidden), input_type(type_of(weight)))
    if logits.shape != (len(values), router.columns) or logits.dtype != torch.float32:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected float32 "
            f"{[len(values), router.columns]}"
        )
    stages, shared = sizes.gate_up_shared(len(values))
    kernel("few_experts_hopper", _gate_up_name(_type_of(weight), sizes.num_experts))(
        sizes.gate_up_blocks,
        THREADS,
        values,
        x.scales if isinstance(x, ScaledRows) else 0,
        logits,
        *router.arguments(logits.stride(0)),
        choice,
        *_arguments(weight, layer.bias),
        out,
        len(values),
        sizes.hidden,
        sizes.width,
        layer.gate,
        stages,
        sizes.gate_up_team,
        _table_of(weight),
        shared=shared,
        pdl=pdl,
        max_carveout=sizes.overlaps,
    )


def down(
    inner: Tensor,
    choice: Tensor,
    router: Router,
    layer: Down,
    shared: Tensor | None = None,
    *,
    total: Tensor,
    adds: bool = False,
    pdl: bool = False,
) -> None:
    """Down of each token's experts, and their sum in the order of their scores.

    Args:
        inner: [T * k or more, w] from `gate_up`; quantised on the way if the weight is.
        choice: from the same. Kernels in between, if any, are launched with `pdl`, too.
        router: of the same.
        layer: down.
        shared: [T, d], of the shared expert, if there is one.
        total: [T, d] bfloat16.
        adds: whether the sum is added to `total`.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or sizes that do not fit.
    """
    (num_tokens, hidden), width = total.shape, inner.shape[1]
    weight, bias = layer.weight, layer.bias
    sizes = _check_sizes(num_tokens, hidden, width, weight, router)
    _check_experts(weight, bias, (router.all_experts, hidden, width))
    check("choice", choice, (CHOICE_BYTES // 4,), torch.int32)
    _check_rows("inner", inner, num_tokens * router.all_top_k, width)
    check("total", total, (num_tokens, hidden), torch.bfloat16)
    if shared is not None:
        check("shared", shared, (num_tokens, hidden), torch.bfloat16)
    stages, shared_bytes = sizes.down_shared(num_tokens)
    kernel("few_experts_hopper", _down_name(_type_of(weight)))(
        sizes.down_blocks,
        THREADS,
        inner,
        choice,
        *_arguments(weight, bias),
        0 if shared is None else shared,
        total,
        int(adds),
        num_tokens,
        router.all_top_k,
        hidden,
        width,
        stages,
        sizes.down_team,
        _table_of(weight),
        shared=shared_bytes,
        pdl=pdl,
        max_carveout=sizes.overlaps,
    )


def _check_gate_up(
    num_tokens: int, router: Router, layer: GateUp, choice: Tensor, out: Tensor
) -> Sizes:
    rows, hidden = _shape_of_expert(layer.weight, router.all_experts)
    if layer.gate not in (SILU, CLAMPED):
        raise ValueError(f"gate is {layer.gate}; allowed: SILU, CLAMPED")
    sizes = _check_sizes(num_tokens, hidden, rows // 2, layer.weight, router)
    _check_experts(layer.weight, layer.bias, (router.all_experts, rows, hidden))
    check("choice", choice, (CHOICE_BYTES // 4,), torch.int32)
    _check_rows("out", out, num_tokens * router.all_top_k, rows // 2)
    return sizes


def _check_sizes(
    num_tokens: int, hidden: int, width: int, weight: ExpertsWeight, router: Router
) -> Sizes:
    if not is_hopper():
        raise ValueError("experts require a Hopper GPU")
    obstacle = router.obstacle()
    if obstacle is not None:
        raise ValueError(f"{obstacle} is not supported")
    sizes = Sizes(
        hidden,
        width,
        router.num_experts,
        router.all_top_k,
        router.routing.num_groups,
        input_type(type_of(weight)).itemsize,
        weight.kind if isinstance(weight, GroupedRows) else None,
    )
    if not sizes.fits(num_tokens):
        raise ValueError(f"{num_tokens} tokens of {sizes} do not fit")
    return sizes


def _check_experts(weight: ExpertsWeight, bias: Tensor | None, shape: tuple[int, int, int]) -> None:
    experts, rows, columns = shape
    if isinstance(weight, GroupedRows):
        weight.check("weight", experts * rows, columns)
    else:
        values = values_of(weight)
        check("weight", values, shape, values.dtype)
    if isinstance(weight, ScaledRows):
        check("scales", weight.scales, (experts * rows,), torch.float32, vectors=False)
    if bias is not None:
        check("bias", bias, shape[:2], torch.bfloat16)


def _check_rows(name: str, matrix: Tensor, wanted: int, width: int) -> None:
    check(name, matrix, (len(matrix), width), torch.bfloat16)
    if len(matrix) < wanted:
        raise ValueError(f"{name} has {len(matrix)} rows; expected {wanted}")


def _check_stream(x: NormedRows | SummedRows, out: Tensor) -> tuple[Tensor | int, Tensor | int]:
    """Check a residual stream and memory for its norm; returns what is added to it, and memory for
    the sum, or 0."""
    num_tokens, hidden = x.rows.shape
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"x has {num_tokens} rows; allowed: 1 to {MAX_TOKENS}")
    check("x", x.rows, (num_tokens, hidden), torch.bfloat16)
    check("weight", x.weight, (hidden,), torch.float32)
    _check_rows("out", out, num_tokens, hidden)
    if not isinstance(x, SummedRows):
        return 0, 0
    check("residual", x.residual, (num_tokens, hidden), torch.float32)
    check("total", x.total, (num_tokens, hidden), torch.float32)
    return x.residual, x.total


def _shape_of_expert(weight: ExpertsWeight, num_experts: int) -> tuple[int, int]:
    """(n, k) of one matrix."""
    if isinstance(weight, GroupedRows):
        return weight.n // num_experts, weight.k
    _, n, k = values_of(weight).shape
    return n, k


def _type_of(weight: ExpertsWeight) -> str:
    """What kernels are compiled for."""
    return (
        weight.kind.name
        if isinstance(weight, GroupedRows)
        else _value_type(input_type(type_of(weight)))
    )


def _arguments(
    weight: ExpertsWeight, bias: Tensor | None
) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """Of both kernels: the weight, the scales of its rows, and the bias."""
    added = 0 if bias is None else bias
    if isinstance(weight, GroupedRows):
        return weight.records, 0, added
    return values_of(weight), weight.scales if isinstance(weight, ScaledRows) else 0, added


def _table_of(weight: ExpertsWeight) -> Tensor | int:
    table = weight.table if isinstance(weight, GroupedRows) else None
    return 0 if table is None else table


def _gate_up_name(weight_type: str, num_experts: int) -> str:
    per_lane = next(count for count in PER_LANE if num_experts <= 32 * count)
    return f"few_gate_up<{weight_type}, {_STORAGE}, {per_lane}>"


def _down_name(weight_type: str) -> str:
    return f"few_down<{weight_type}, {_STORAGE}>"


def _value_type(dtype: torch.dtype) -> str:
    return BYTE_TYPES.get(dtype, _STORAGE)


def _sum_type(adds: bool) -> str:
    return STORAGE_TYPES[torch.float32] if adds else _STORAGE


def _score_name(value_type: str, per_thread: int, adds: bool) -> str:
    added = "true" if adds else "false"
    return f"score_experts<{value_type}, {_STORAGE}, {_sum_type(adds)}, {per_thread}, {added}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    values = [_value_type(dtype) for dtype in (torch.bfloat16, *BYTE_TYPES)]
    scores = tuple(
        _score_name(value_type, per_thread, adds)
        for value_type in values
        for per_thread in _VECTORS_PER_THREAD
        for adds in (False, True)
    )
    experts = [_experts_of(values), *(_experts_of([kind.name]) for kind in KINDS)]
    return [*experts, ("few_scores_hopper", scores, ())]


def _experts_of(weight_types: list[str]) -> Instantiation:
    names = [_gate_up_name(one, 32 * count) for one in weight_types for count in PER_LANE]
    names += [_down_name(one) for one in weight_types]
    return "few_experts_hopper", tuple(names), ()
