"""Which kernel computes a norm, recorded without a GPU. tests/kernels/gpu has the numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import recorded_launches
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.runtime.recording import Launched

META = torch.device("meta")
BF16, FP16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
MANY = 1024


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    with recorded_launches.recording(monkeypatch, hopper=True) as launched:
        yield launched


def norm(rows: int, hidden: int, dtype: torch.dtype, values: torch.dtype, spread: int = 0) -> None:
    """Of a matrix, to one of another type."""
    x = torch.empty(rows, hidden, dtype=dtype, device=META)
    out: torch.Tensor | ScaledRows = torch.empty_like(x, dtype=values)
    if values in (FP8, INT8):
        scales = torch.empty(rows, device=META)
        out = ScaledRows(torch.empty(rows, hidden, dtype=values, device=META), scales, spread)
    rms_norm(x, torch.empty(hidden, device=META), 1e-5, out=out)


@pytest.mark.parametrize(
    ("hidden", "dtype", "values", "arguments"),
    [
        (8, BF16, BF16, "__nv_bfloat16, __nv_bfloat16, 4"),
        (1024, FP16, FP16, "__half, __half, 4"),
        (1032, BF16, BF16, "__nv_bfloat16, __nv_bfloat16, 8"),
        (4096, BF16, FP8, "__nv_bfloat16, Fp8, 16"),
        (4096, BF16, INT8, "__nv_bfloat16, Int8, 16"),
    ],
)
def test_many_rows_have_a_warp_each_whose_lanes_hold_the_row(
    launched: Launched, hidden: int, dtype: torch.dtype, values: torch.dtype, arguments: str
) -> None:
    norm(MANY, hidden, dtype, values)
    assert list(launched) == [("norm", f"rms_norm_by_warps<{arguments}>")]


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype", "values", "spread"),
    [
        (MANY - 1, 4096, BF16, FP8, 0),
        (MANY, 4112, BF16, BF16, 0),
        (MANY, 2048, FLOAT32, FLOAT32, 0),
        (MANY, 4096, BF16, INT8, 64),
    ],
    ids=["few rows", "long rows", "float32", "spread"],
)
def test_other_rows_have_a_block(
    launched: Launched,
    rows: int,
    hidden: int,
    dtype: torch.dtype,
    values: torch.dtype,
    spread: int,
) -> None:
    norm(rows, hidden, dtype, values, spread)
    ((stem, name),) = launched
    assert stem == "norm" and not name.startswith("rms_norm_by_warps")


def test_sums_have_a_block(launched: Launched) -> None:
    x, residual, out = (torch.empty(MANY, 4096, dtype=BF16, device=META) for _ in range(3))
    weight = torch.empty(4096, device=META)
    rms_norm(x, weight, 1e-5, residual, out=out, total=residual)
    assert list(launched) == [("norm", "rms_norm<__nv_bfloat16, __nv_bfloat16, 1, true>")]
