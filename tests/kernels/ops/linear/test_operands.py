"""Mismatched operands of a linear layer are rejected by name, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inflight_kernels.ops.linear import operands
from inflight_kernels.ops.linear.operands import LinearOperands, check_linear_operands
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.runtime import launch

M, N, K = 5, 48, 64


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands may be on the CPU, too."""
    for module in (launch, operands):
        monkeypatch.setattr(module, "check_memory", lambda *operand, **settings: None)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def examine(gated: bool = False, **changes: Any) -> LinearOperands:
    width = N // 2 if gated else N
    operands: dict[str, Any] = {
        "x": zeros(M, K),
        "weight": zeros(N, K),
        "bias": zeros(N),
        "residual": zeros(M, width),
        "out": zeros(M, width),
        "whole_vectors": True,
    }
    return check_linear_operands(**(operands | changes), gated=gated)


@pytest.mark.parametrize("gated", [False, True])
def test_operands_that_fit_are_described(gated: bool) -> None:
    bf16 = "__nv_bfloat16"
    expected = LinearOperands(M, N, K, bf16, bf16, value_type="", scales=(), depth=64)
    assert examine(gated) == expected
    assert examine(gated, bias=None, residual=None) == examine(gated)


def test_types_are_those_of_the_operands() -> None:
    half = torch.float16
    shapes = {"x": (M, K), "weight": (N, K), "bias": (N,), "residual": (M, N), "out": (M, N)}
    operands = {name: zeros(*shape, dtype=half) for name, shape in shapes.items()}
    assert examine(**operands)[3:5] == ("__half", "__half")
    assert examine(out=zeros(M, N, dtype=torch.float32)).out_type == "float"


def test_quantised_operands_have_values_of_one_type() -> None:
    def rows(count: int, dtype: torch.dtype) -> ScaledRows:
        return ScaledRows.empty(count, K, "cpu", dtype)

    fp8, int8 = torch.float8_e4m3fn, torch.int8
    assert examine(x=rows(M, fp8), weight=rows(N, fp8)).value_type == "Fp8"
    assert examine(x=rows(M, int8), weight=rows(N, int8)).value_type == "Int8"
    with pytest.raises(ValueError, match="must have the same type"):
        examine(x=rows(M, int8), weight=rows(N, fp8))


def test_quantised_operands_are_spread_alike() -> None:
    def rows(count: int, spread: int, dtype: torch.dtype = torch.int8) -> ScaledRows:
        return ScaledRows.empty(count, K, "cpu", dtype, spread)

    for spread in (0, 16, 32, 64):
        assert examine(x=rows(M, spread), weight=rows(N, spread)).value_type == "Int8"
    with pytest.raises(ValueError, match="x is spread in blocks of 0 columns and weight of 64"):
        examine(x=rows(M, 0), weight=rows(N, 64))
    for spread in (8, 48, 128):
        with pytest.raises(ValueError, match=f"blocks of {spread} of 64 columns; .*16, 32, 64"):
            examine(x=rows(M, spread), weight=rows(N, spread))
    fp8 = torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"its values are torch\.float8_e4m3fn, allowed: int8"):
        examine(x=rows(M, 64, fp8), weight=rows(N, 64, fp8))


def test_kernels_that_do_not_spread_refuse_spread_rows() -> None:
    weight = ScaledRows.empty(N, K, "cpu", torch.int8, 64)
    with pytest.raises(ValueError, match="weight is spread; this kernel takes rows as they are"):
        operands.check_weight_only_operands(
            zeros(M, K), weight, None, None, zeros(M, N), gated=False, max_tokens=M
        )


def test_kernels_take_the_log_2_of_blocks() -> None:
    found = [ScaledRows.empty(1, 64, "cpu", torch.int8, block) for block in (0, 16, 32, 64)]
    assert [rows.spread_bits for rows in found] == [0, 4, 5, 6]
    assert [rows.first(0).spread for rows in found] == [0, 16, 32, 64]


def test_rows_of_x_may_be_strided() -> None:
    assert examine(x=zeros(M, 2 * K)[:, :K]) == examine()


def test_rows_that_are_no_vectors_fit_where_none_are_needed() -> None:
    odd = {"weight": zeros(7, K), "bias": zeros(7), "residual": zeros(M, 7), "out": zeros(M, 7)}
    assert examine(**odd, whole_vectors=False).n == 7
    with pytest.raises(ValueError, match=r"weight is \[7, 64\]; n, or half of it"):
        examine(**odd)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": zeros(M, K, dtype=torch.float32)}, r"x is torch.float32; allowed: torch.bfloat16"),
        ({"x": zeros(M)}, r"x is \[5\] and weight \[48, 64\]; they must be \[m, k\] and \[n, k\]"),
        ({"weight": zeros(N, K + 8)}, r"x is \[5, 64\] and weight \[48, 72\]"),
        ({"x": zeros(M, 60), "weight": zeros(N, 60)}, r"\[48, 60\]; k must be a multiple of 8"),
        ({"x": zeros(M, 0), "weight": zeros(N, 0)}, r"\[48, 0\]; k must be a multiple of 8"),
        ({"weight": zeros(N, K, dtype=torch.float16)}, "weight is torch.float16"),
        ({"weight": zeros(K, N).T}, "weight is .*not contiguous"),
        ({"out": zeros(M, N + 8)}, r"out is torch.bfloat16 \[5, 56\]; expected .* \[5, 48\]"),
        ({"out": zeros(M, N, dtype=torch.float64)}, r"out is torch.float64"),
        ({"bias": zeros(N + 1)}, r"bias is torch.bfloat16 \[49\]"),
        ({"residual": zeros(M + 1, N)}, r"residual is torch.bfloat16 \[6, 48\]"),
        ({"x": zeros(K, M).T}, r"x has strides \(1, 5\); rows must be contiguous"),
        ({"x": zeros(M, K + 4)[:, :K]}, r"x has strides \(68, 1\); .* a multiple of 8"),
        ({"max_tokens": M - 1}, "x has 5 rows; allowed: up to 4"),
    ],
)
def test_mismatched_operands_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examine(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": zeros(N + 1, K)}, "n even when gated"),
        ({"weight": zeros(8, K)}, "half of it when gated, must be a multiple of 8"),
        ({"out": zeros(M, N)}, r"out is torch.bfloat16 \[5, 48\]; expected .* \[5, 24\]"),
        (
            {"out": zeros(M, N // 2, dtype=torch.float32)},
            "if gated, it must be torch.bfloat16 like x",
        ),
    ],
)
def test_invalid_gated_operands_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examine(gated=True, **changes)
