"""The kernels of mixtures of experts as their torch definitions; see `host_kernels`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.models import experts_cuda
from inflight_kernels.ops.linear.operands import Operand, values_of
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe import products, routing, rows
from inflight_kernels.ops.moe.routing import Routed, Router
from inflight_kernels.torch_ops import moe as definition
from inflight_kernels.torch_ops import quantization, transformer


def install(monkeypatch: pytest.MonkeyPatch, linear: type) -> None:
    """Put the definitions in the kernels' places.

    Args:
        linear: in the place of `CudaLinear`.
    """
    monkeypatch.setattr(routing, "route", route)
    monkeypatch.setattr(products, "product", product)
    for op in (gather, sum_of_experts):
        monkeypatch.setattr(rows, op.__name__, op)
    monkeypatch.setattr(experts_cuda, "quantize_rows", quantize_rows)
    monkeypatch.setattr(experts_cuda, "CudaLinear", linear)


def route(logits: Tensor, router: Router, routed: Routed, *, tile: int, pdl: bool = False) -> None:
    assert logits.shape[1] == router.columns
    assert tile == products.tile_of(
        len(logits), router.num_experts, router.routing.top_k, torch.bfloat16
    ) or tile == products.tile_of(len(logits), router.num_experts, router.routing.top_k, torch.int8)
    total = logits.view(len(logits), router.parts, -1).sum(1)
    scores = total[:, : router.num_experts]
    if router.bias is not None:
        scores = scores + router.bias
    chosen, weights = definition.route(scores, router.routing, router.select_bias)
    routed.experts[: chosen.numel()] = chosen.flatten().int()
    order = chosen.flatten().sort(stable=True).indices
    routed.positions[order] = torch.arange(len(order), dtype=torch.int32)
    routed.weights[: len(logits), :-1] = weights
    routed.weights[: len(logits), -1] = total[:, -1].sigmoid() if router.shared_gate else 1.0


def gather(x: Tensor, routed: Routed, *, num_tokens: int, out: Operand, pdl: bool = False) -> None:
    places = routed.positions[: num_tokens * routed.top_k].long()
    repeated = x[:num_tokens].repeat_interleave(routed.top_k, 0)
    if isinstance(out, ScaledRows):
        values, scales = quantization.quantize_rows(repeated, out.values.dtype)
        out.values.view(torch.uint8)[places] = values.view(torch.uint8)
        out.scales[places] = scales
    else:
        out[places] = repeated


def product(
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    routed: Routed,
    *,
    num_tokens: int,
    out: Tensor,
    gate: int = products.PLAIN,
    pdl: bool = False,
) -> None:
    num_experts, n, _ = values_of(weight).shape
    num_rows = num_tokens * routed.top_k
    taken, matrices = _exact(x)[:num_rows], _exact(weight)
    if num_tokens == 1 and len(taken) == 1:
        taken = taken.expand(num_rows, -1)
    chosen = routed.experts[:num_rows].sort().values
    for expert in range(num_experts):
        of_expert = (chosen == expert).nonzero()[:, 0]
        added = None if bias is None else bias[expert].to(matrices.dtype)
        sums = transformer.linear(taken[of_expert], matrices[expert], added)
        if gate != products.PLAIN:
            halves = sums.view(len(sums), n // (2 * products.GATE_ROWS), 2, products.GATE_ROWS)
            sums = halves.transpose(1, 2).reshape(len(sums), n)
            kind = transformer.silu_mul if gate == products.SILU else transformer.clamped_swiglu
            sums = kind(sums)
        out[of_expert] = sums.to(out.dtype)


def _exact(matrix: Operand) -> Tensor:
    if not isinstance(matrix, ScaledRows):
        return matrix
    values = matrix.values
    flat = quantization.dequantize_rows(values.view(-1, values.shape[-1]), matrix.scales)
    return flat.view(values.shape)


def sum_of_experts(
    rows: Tensor,
    routed: Routed,
    shared: Tensor | None = None,
    *,
    total: Tensor,
    adds: bool = False,
    pdl: bool = False,
) -> None:
    num_tokens, top_k = len(total), routed.top_k
    each = rows[routed.positions[: num_tokens * top_k].long()].view(num_tokens, top_k, -1)
    weights = routed.weights[:num_tokens]
    found = (each * weights[:, :top_k, None]).sum(1)
    if shared is not None:
        found = found + weights[:, top_k:] * shared
    total.copy_(total + found if adds else found)


def quantize_rows(x: Tensor, *, out: ScaledRows, pdl: bool = False) -> None:
    values, scales = quantization.quantize_rows(x, out.values.dtype)
    out.values.view(torch.uint8).copy_(values.view(torch.uint8))
    out.scales.copy_(scales)
