"""Linear layers with weights of 8 bits, without a GPU: tiles, the kernel's index maps reimplemented
in numpy, and operands that are refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recorded_launches
from inflight_kernels.ops.linear import operands, weight_only
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.linear.weight_only import MAX_TOKENS, Tile, plan
from mma_fragments import LANES, banks, left, right

TILES = [tile for tiles in weight_only._TILES for tile in tiles]
SOURCE = (Path(weight_only.__file__).parents[2] / "csrc/linear/weight_only.cu").read_text()
GROUP, PLACE = LANES // 4, LANES % 4
all_tiles = pytest.mark.parametrize("tile", TILES, ids=str)

# ---------------------------------------------------------------- tiles


@pytest.mark.parametrize("num_multiprocessors", [2, 46, 82, 108, 132, 148])
@pytest.mark.parametrize("n", [16, 576, 1000, 4096, 6144, 28672, 128256])
def test_tiles_hold_all_tokens_and_occupy_most_multiprocessors(
    n: int, num_multiprocessors: int
) -> None:
    for m in range(1, MAX_TOKENS + 1):
        tile = plan(m, n, num_multiprocessors)
        smallest = min(one.rows for one in TILES if one.tokens == tile.tokens)
        assert tile.tokens // 2 < max(m, 5) <= tile.tokens
        assert tile.rows == smallest or -(-n // tile.rows) >= 0.75 * num_multiprocessors


@all_tiles
def test_blocks_fit_on_all_gpus(tile: Tile) -> None:
    assert tile.shared_bytes <= 99 * 1024
    sums = tile.warps * tile.tokens * (tile.rows + 4) * 4
    assert sums <= tile.shared_bytes, "the sums of warps take the memory of the stages"


def test_the_kernel_has_stages_of_as_many_columns() -> None:
    assert re.search(rf"constexpr int DEPTH = {weight_only._DEPTH};", SOURCE)


# ---------------------------------------------------------------- index maps


def copy_weight(tile: Tile, weight: Any) -> Any:
    """A stage of [rows, 64] bytes, as the lanes of a warp copy it."""
    memory = np.full(tile.rows * 64, -1)
    for i in range(tile.rows // 8):
        place = i * 512 + LANES * 16
        assert (np.bincount(banks(place[:8], 16), minlength=32) == 1).all()
        for lane in LANES:
            row, column = 8 * i + lane // 4, lane % 4 * 16
            memory[place[lane] : place[lane] + 16] = weight[row, column : column + 16]
    return memory


def copy_x(tile: Tile, x: Any) -> Any:
    """A stage of [tokens, 64] values."""
    memory = np.full(tile.tokens * 64, -1)
    token, chunk = LANES // 8, LANES % 8
    for i in range(tile.tokens // 4):
        place = i * 512 + token * 128 + (chunk ^ (token & 1)) * 16
        assert (np.bincount(banks(place[:8], 16), minlength=32) == 1).all()
        for lane in LANES:
            first = place[lane] // 2
            columns = slice(chunk[lane] * 8, chunk[lane] * 8 + 8)
            memory[first : first + 8] = x[token[lane] + 4 * i, columns]
    return memory


@all_tiles
def test_operands_meet_in_the_same_order_of_columns(tile: Tile) -> None:
    """Each value is its own number: (row or token) * 64 + column."""
    weight = np.arange(tile.rows * 64).reshape(-1, 64)
    x = np.arange(tile.tokens * 64).reshape(-1, 64)
    bytes_, values = copy_weight(tile, weight), copy_x(tile, x)
    seen = set()
    for half, step in itertools.product(range(2), range(2)):
        orders = []
        for first in range(0, tile.rows, 16):
            fragment = np.empty((32, 4, 2), int)
            for row in range(2):
                place = (first // 8 + row) * 512 + LANES * 16 + (2 * half + step) * 4
                word = bytes_[place[:, None] + np.arange(4)]
                fragment[:, row], fragment[:, row + 2] = word[:, 0::2], word[:, 1::2]
            matrix = left(fragment)
            assert (matrix // 64 == np.arange(first, first + 16)[:, None]).all()
            orders.append(matrix % 64)
        for first in range(0, tile.tokens, 8):
            place = (first + GROUP) * 128 + ((2 * PLACE + half) ^ (GROUP & 1)) * 16
            for phase in range(0, 32, 8):
                assert (np.bincount(banks(place[phase : phase + 8], 16), minlength=32) == 1).all()
            four = values[(place // 2)[:, None] + 4 * step + np.arange(4)]
            matrix = right(np.stack([four[:, [0, 2]], four[:, [1, 3]]], 1))
            assert (matrix // 64 == np.arange(first, first + 8)).all()
            orders.append(matrix.T % 64)
        (order,) = {tuple(row) for matrix in orders for row in matrix}
        seen |= set(order)
    assert seen == set(range(64)), "each column is multiplied once"


@all_tiles
def test_sums_are_written_to_different_banks_and_all_places(tile: Tile) -> None:
    pitch, written = tile.rows + 4, []
    for first, j, i in itertools.product(
        range(0, tile.rows, 16), range(tile.tokens // 8), range(4)
    ):
        place = (8 * j + 2 * PLACE + i % 2) * pitch + first + GROUP + i // 2 * 8
        assert len(set(place % 32)) == 32
        written.extend(place)
    expected = np.arange(tile.tokens)[:, None] * pitch + np.arange(tile.rows)
    assert sorted(written) == sorted(expected.flatten())


def test_bytes_become_float16_exactly() -> None:
    """As weight_only.cu does; bfloat16 is decoded as in KV caches."""
    codes = np.arange(256, dtype=np.uint32)
    upper = codes << np.uint32(8)
    halves = (upper & np.uint32(0x8000)) | (upper >> np.uint32(1) & np.uint32(0x3F80))
    e4m3 = halves.astype(np.uint16).view(np.float16).astype(np.float32) * 256
    expected = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = (codes & 127) != 127
    assert (e4m3 == expected)[finite].all()
    raised = ((codes ^ 0x80) & 0xFF | 0x6400).astype(np.uint16).view(np.float16)
    int8 = raised - np.array(0x6480, np.uint16).view(np.float16)
    assert (int8 == codes.astype(np.uint8).view(np.int8)).all()


# ---------------------------------------------------------------- operands

M, N, K = 5, 48, 64


def matrix(dtype: torch.dtype, rows: int = N, width: int = K) -> ScaledRows:
    return ScaledRows(
        torch.empty(rows, width, dtype=dtype, device="meta"), torch.empty(rows, device="meta")
    )


def run(gated: bool = False, **changes: Any) -> None:
    width = N // 2 if gated else N
    given: dict[str, Any] = {
        "x": torch.empty(M, K, dtype=torch.bfloat16, device="meta"),
        "weight": matrix(torch.int8),
        "out": torch.empty(M, width, dtype=torch.bfloat16, device="meta"),
    }
    weight_only.linear(**(given | changes), gated=gated)


def test_a_launch_names_the_kernel_of_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "num_multiprocessors", lambda: 132)
    with recorded_launches.recording(monkeypatch, hopper=False) as launched:
        for dtype in (torch.int8, torch.float8_e4m3fn):
            run(weight=matrix(dtype))
            run(weight=matrix(dtype), gated=True)
            out = torch.empty(N, K, dtype=torch.bfloat16, device="meta")
            weight_only.dequantize(matrix(dtype), out=out)
        run(x=torch.empty(0, K, dtype=torch.bfloat16, device="meta"), out=_empty(0, N))
    names = [name for _, name in launched]
    assert names == [
        name
        for byte in ("Int8", "Fp8")
        for name in (
            f"weight_only_gemm<{byte}, __nv_bfloat16, 16, 8, 8, 3>",
            f"weight_only_dequantize<{byte}, __nv_bfloat16, 4>",
        )
    ]
    (_, every, _), *_ = weight_only.instantiations()
    assert any("__nv_bfloat16, 16, 8, 8, 3" in name for name in every)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": _empty(65, K)}, "x has 65 rows; allowed: up to 64"),
        ({"x": _empty(M, 32)}, r"x is \[5, 32\] and weight \[48, 64\]"),
        ({"x": _empty(M, K, dtype=torch.float32)}, "x is torch.float32; allowed"),
        ({"x": _empty(M, 2 * K)[:, ::2]}, "x has strides"),
        ({"weight": matrix(torch.bfloat16)}, "weight.values is torch.bfloat16; allowed"),
        ({"weight": matrix(torch.int8)._replace(scales=_empty(N))}, "weight.scales is"),
        (
            {"weight": matrix(torch.int8, width=56), "x": _empty(M, 56)},
            "k must be a multiple of 16",
        ),
        ({"weight": matrix(torch.int8, rows=47), "gated": True}, "n even when gated"),
        ({"out": _empty(M, N, dtype=torch.float32)}, "out is torch.float32; it must be"),
        ({"bias": _empty(N - 1)}, "bias is"),
        ({"residual": _empty(M, N, dtype=torch.float16)}, "residual is"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(operands, "check_memory", lambda *operand, **settings: None)
    with (
        recorded_launches.recording(monkeypatch) as launched,
        pytest.raises(ValueError, match=message),
    ):
        run(**changes)
    assert not launched
