"""The kernels of mixtures of experts as their torch definitions; see `host_kernels`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.models import experts_cuda
from inflight.models.layers import residual
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.operands import NormedRows, Operand, SummedRows
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe import few, few_sizes, products, routing, rows
from inflight_kernels.ops.moe.routing import Routed, Router
from inflight_kernels.ops.moe.sum_norm import ExpertRows
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
    monkeypatch.setattr(residual, "sum_rms_norm", sum_rms_norm)
    for few_op in (score, gate_up, down):
        monkeypatch.setattr(few, few_op.__name__, few_op)
    monkeypatch.setattr(few_sizes, "num_multiprocessors", lambda: 132)
    monkeypatch.setattr(experts_cuda, "quantize_rows", quantize_rows)
    monkeypatch.setattr(experts_cuda, "CudaLinear", linear)


def route(logits: Tensor, router: Router, routed: Routed, *, tile: int, pdl: bool = False) -> None:
    assert logits.shape[1] == router.columns
    sizes = len(logits), router.all_experts, router.all_top_k
    types = torch.bfloat16, torch.int8, grouped_rows.KINDS[0]
    assert tile in {products.tile_of(*sizes, values) for values in types}
    chosen, weights = _choose(logits, router)
    routed.experts[: chosen.numel()] = chosen.flatten().int()
    order = chosen.flatten().sort(stable=True).indices
    routed.positions[order] = torch.arange(len(order), dtype=torch.int32)
    routed.weights[: len(logits)] = weights


def _choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Experts [T, k], with shared ones, and their weights [T, k + 1], the last of shared ones."""
    total = logits.view(len(logits), router.parts, -1).sum(1)
    scores = total[:, : router.num_experts]
    if router.bias is not None:
        scores = scores + router.bias
    chosen, weights = definition.route(scores, router.routing, router.select_bias)
    shared = total[:, -1:].sigmoid() if router.shared_gate else torch.ones(len(logits), 1)
    further = torch.arange(router.num_experts, router.all_experts).expand(len(logits), -1)
    weights = torch.cat([weights, shared.expand(-1, router.num_shared + 1)], 1)
    return torch.cat([chosen, further], 1), weights


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
    weight: products.ExpertsWeight,
    bias: Tensor | None,
    routed: Routed,
    *,
    num_tokens: int,
    out: Tensor,
    gate: int = products.PLAIN,
    pdl: bool = False,
) -> None:
    num_experts = routed.num_experts
    num_rows = num_tokens * routed.top_k
    taken, matrices = _exact(x)[:num_rows], _matrices(weight, num_experts)
    if num_tokens == 1 and len(taken) == 1:
        taken = taken.expand(num_rows, -1)
    chosen = routed.experts[:num_rows].sort().values
    for expert in range(num_experts):
        of_expert = (chosen == expert).nonzero()[:, 0]
        added = None if bias is None else bias[expert].to(matrices.dtype)
        sums = transformer.linear(taken[of_expert], matrices[expert], added)
        out[of_expert] = (sums if gate == products.PLAIN else _gated(sums, gate)).to(out.dtype)


def _gated(sums: Tensor, gate: int) -> Tensor:
    """The gate of columns of gate and up by turns."""
    count = sums.shape[1] // (2 * products.GATE_ROWS)
    halves = sums.view(len(sums), count, 2, products.GATE_ROWS)
    kind = transformer.silu_mul if gate == products.SILU else transformer.clamped_swiglu
    return kind(halves.transpose(1, 2).reshape(sums.shape))


def _matrices(weight: products.ExpertsWeight, num_experts: int) -> Tensor:
    """[E, n, k]."""
    if isinstance(weight, grouped_rows.GroupedRows):
        return grouped_rows.dequantized(weight).view(num_experts, -1, weight.k)
    return _exact(weight)


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
    found = _sums(ExpertRows(rows, routed, shared), len(total))
    total.copy_(total + found if adds else found)


def _sums(x: ExpertRows, num_tokens: int) -> Tensor:
    """[T, d] of all experts."""
    top_k = x.routed.top_k
    each = x.rows[x.routed.positions[: num_tokens * top_k].long()].view(num_tokens, top_k, -1)
    weights = x.routed.weights[:num_tokens]
    found = (each * weights[:, :top_k, None]).sum(1)
    return found if x.shared is None else found + weights[:, top_k:] * x.shared


def sum_rms_norm(
    x: ExpertRows, weight: Tensor, eps: float, *, total: Tensor, out: Operand, pdl: bool = False
) -> None:
    total += _sums(x, len(total))
    normed, _ = transformer.rms_norm(total, weight, eps)
    if isinstance(out, ScaledRows):
        quantize_rows(normed, out=out)
    else:
        out.copy_(normed)


def quantize_rows(x: Tensor, *, out: ScaledRows, pdl: bool = False) -> None:
    spread = quantization.spread_inputs(x, out.spread)
    values, scales = quantization.quantize_rows(spread, out.values.dtype)
    out.values.view(torch.uint8).copy_(values.view(torch.uint8))
    out.scales.copy_(scales)


def score(
    x: NormedRows | SummedRows,
    router: Tensor,
    *,
    logits: Tensor,
    out: Tensor,
    quantized: ScaledRows | None = None,
    pdl: bool = False,
) -> None:
    num_tokens = len(x.rows)
    if isinstance(x, SummedRows):
        normed, total = transformer.rms_norm(x.rows, x.weight, x.eps, x.residual)
        x.total.copy_(total)
    else:
        normed, _ = transformer.rms_norm(x.rows, x.weight, x.eps)
    out[:num_tokens] = normed
    logits.copy_(out[:num_tokens].float() @ router.float().t())
    if quantized is not None:
        quantize_rows(out[:num_tokens], out=quantized.first(num_tokens))


def gate_up(
    x: Operand,
    logits: Tensor,
    router: Router,
    layer: few.GateUp,
    *,
    choice: Tensor,
    out: Tensor,
    pdl: bool = False,
) -> None:
    chosen, weights = _choose(logits, router)
    taken, top_k = _exact(x), chosen.shape[1]
    matrices = _matrices(layer.weight, router.all_experts)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        added = None if layer.bias is None else layer.bias[expert].to(matrices.dtype)
        row = taken[pair // top_k][None]
        out[pair] = _gated(transformer.linear(row, matrices[expert], added), layer.gate)[0]
    # Experts, then the bits of their weights.
    choice[: chosen.numel()] = chosen.flatten()
    bits = weights.float().contiguous().view(torch.int32).flatten()
    choice[chosen.numel() :][: len(bits)] = bits


def down(
    inner: Tensor,
    choice: Tensor,
    router: Router,
    layer: few.Down,
    shared: Tensor | None = None,
    *,
    total: Tensor,
    adds: bool = False,
    pdl: bool = False,
) -> None:
    num_tokens, top_k = len(total), router.all_top_k
    num_pairs = num_tokens * top_k
    chosen = choice[:num_pairs].tolist()
    weights = choice[num_pairs:][: num_pairs + num_tokens].view(torch.float32).view(-1, top_k + 1)
    rows_of, matrices = inner[:num_pairs], _matrices(layer.weight, router.all_experts)
    if isinstance(layer.weight, ScaledRows):
        values = quantization.quantize_rows(rows_of, layer.weight.values.dtype)
        rows_of = quantization.dequantize_rows(*values)
    found = total.float() if adds else torch.zeros(total.shape)
    for pair, expert in enumerate(chosen):
        added = None if layer.bias is None else layer.bias[expert].to(matrices.dtype)
        output = transformer.linear(rows_of[pair][None], matrices[expert], added)[0]
        found[pair // top_k] += weights[pair // top_k, pair % top_k] * output
    if shared is not None:
        found += weights[:, top_k:] * shared
    total.copy_(found)
