"""Tiles of linear layers whose weight has scales of groups, and their kernels, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inflight_kernels.ops.linear import grouped, grouped_gemm, grouped_rows
from inflight_kernels.ops.linear.grouped import MAX_STREAM_BYTES, MAX_STREAMED_TOKENS, MAX_TOKENS
from inflight_kernels.ops.linear.grouped_rows import (
    E2M1,
    INT4,
    KINDS,
    RECORD_COLUMNS,
    RECORD_ROWS,
    TABLE,
    GroupedKind,
    GroupedRows,
)
from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES
from inflight_kernels.runtime.recording import Launched, record_launches

META = torch.device("meta")
WIDTHS = [8, 16, 128, 136, 1000, 2048, 2880, 3584, 4096, 5120, 8192, 14336, 18944, 28672, 53248]
HIDDEN_SIZES = [*(width for width in WIDTHS if width < 1 << 15), 1 << 15]
"""Of a gated weight the columns are those of the residual stream."""
GPUS = [2, 46, 82, 108, 132, 148]
CSRC = Path(grouped.__file__).parents[2] / "csrc/linear"
MXFP4 = GroupedKind(E2M1, 32, False)

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
each_gate = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm, "is_hopper", lambda: True)
    for module in (grouped, grouped_gemm):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: 132)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def weight_of(n: int, k: int, kind: GroupedKind) -> GroupedRows:
    table = empty(32, dtype=torch.uint8) if kind.codes == TABLE else None
    return grouped_rows.empty(1, n, k, kind, META, table)


def compiled(module: Any) -> set[str]:
    return {name for _, every, _ in module.instantiations() for name in every}


# ---------------------------------------------------------------- one token or two


@each_kind
@each_gate
def test_products_of_one_or_two_tokens_are_streamed(kind: GroupedKind, gated: bool) -> None:
    with record_launches() as launched:
        for m in range(1, MAX_STREAMED_TOKENS + 1):
            for n, k in ((64, 128), (6144, 4096), (4096, 14336), (28672, 4096)):
                out = empty(m, n // 2 if gated else n)
                grouped.linear(empty(m, k), weight_of(n, k, kind), out=out, gated=gated)
    found = names(launched, "grouped_stream")
    assert all(name.startswith(f"grouped_stream<{kind.name}, ") for name in found)
    assert set(found) <= compiled(grouped)


@each_kind
def test_a_product_that_needs_more_memory_than_every_gpu_has_is_not_streamed(
    kind: GroupedKind,
) -> None:
    with record_launches() as launched:
        grouped.linear(empty(2, 640), weight_of(262144, 640, kind), out=empty(2, 262144))
    assert set(names(launched, "grouped_gemm")) <= compiled(grouped)


@each_kind
def test_an_output_layer_is_streamed_for_one_token_where_a_block_has_the_memory(
    kind: GroupedKind,
) -> None:
    """61 tiles of a block have sums of up to 156 KB."""
    shape = 128256, 4096, kind, False, 132
    assert (grouped.stream(1, *shape) is None) == kind.is_integer
    found = grouped.stream(1, *shape, MAX_SHARED_BYTES)
    assert found is not None and found.shared_bytes <= MAX_SHARED_BYTES
    assert (grouped.stream(2, *shape, MAX_SHARED_BYTES) is None) == kind.is_integer


@each_gate
@pytest.mark.parametrize("num_multiprocessors", GPUS)
def test_a_stream_leaves_no_block_without_rows(gated: bool, num_multiprocessors: int) -> None:
    for width in (16, 48, 4096, 14336, 128256):  # of out
        n = 2 * width if gated else width
        found = grouped.stream(1, n, 640, MXFP4, gated, num_multiprocessors)
        if found is None:  # no memory for the sums of so many tiles of a block
            assert width // RECORD_ROWS > 50 * num_multiprocessors
            continue
        assert 1 <= found.blocks <= num_multiprocessors
        assert (found.blocks - 1) * RECORD_ROWS < width


@pytest.mark.parametrize(("kind", "parts"), [(GroupedKind(INT4, 128, True), 2), (MXFP4, 1)])
def test_a_stream_has_room_for_x_and_the_sums_of_all_tiles(kind: GroupedKind, parts: int) -> None:
    """Of gate | up of an 8B Llama on a GPU with 132 multiprocessors, 7 tiles for a block."""
    found = grouped.stream(2, 28672, 4096, kind, True, 132)
    x_bytes, sums = 2 * 4096 * 2, 7 * 16 * 2 * parts * 32
    assert found is not None
    assert x_bytes + 4 * sums < found.shared_bytes <= MAX_STREAM_BYTES


@each_kind
@each_gate
def test_few_tokens_are_streamed_where_each_block_has_a_tile(
    kind: GroupedKind, gated: bool
) -> None:
    """By a kernel that gives each token its result alone: in planes there would be fewer."""
    for width in (16, 576, 2112, 2113, 4096):  # of out; 132 tiles and more
        n, is_small = 2 * width if gated else width, width <= 2112
        for m in range(1, MAX_TOKENS + 1):
            found = grouped.stream(m, n, 576, kind, gated, 132)
            assert (found is not None) == (is_small or m <= MAX_STREAMED_TOKENS)
            assert found is None or found.in_planes == (kind.is_integer and not is_small)


# ---------------------------------------------------------------- few tokens


class FewTokens(NamedTuple):
    """A launch for few tokens: what the kernel is compiled for, and some of its operands."""

    name: str
    in_planes: bool
    tiles: int
    warps: int
    depth: int
    threads: int
    phase: int
    shared: int


SEVERAL = range(MAX_STREAMED_TOKENS + 1, MAX_TOKENS + 1)
MANY_ROWS = 8192  # of a weight with more tiles than the GPU has multiprocessors, gated or not
LaunchOf = Callable[[int, int, GroupedKind, bool], FewTokens]


@pytest.fixture
def launch_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchOf]:
    """What is launched for m tokens, k columns, a kind, and gated or not."""
    found: list[FewTokens] = []

    def kernel(stem: str, name: str) -> Callable[..., None]:
        def launch(blocks: int, threads: int, *operands: Any, shared: int, **how: bool) -> None:
            *_, phase, _, _ = operands
            way, *sizes = name.rstrip(">").rsplit(", ", 4)[1:]
            tiles, warps, depth = map(int, sizes)
            planes = way == "true"
            found.append(FewTokens(name, planes, tiles, warps, depth, threads, phase, shared))

        return launch

    monkeypatch.setattr(grouped, "kernel", kernel)

    def made(m: int, k: int, kind: GroupedKind, gated: bool) -> FewTokens:
        out = empty(m, MANY_ROWS // 2 if gated else MANY_ROWS)
        grouped.linear(empty(m, k), weight_of(MANY_ROWS, k, kind), out=out, gated=gated)
        return found.pop()

    with record_launches():
        yield made


@each_kind
@each_gate
def test_products_of_few_tokens_have_kernels_that_fit_on_a_multiprocessor(
    launch_of: LaunchOf, kind: GroupedKind, gated: bool
) -> None:
    available = compiled(grouped)
    for m in SEVERAL:
        for k in WIDTHS if not gated else HIDDEN_SIZES:
            found = launch_of(m, k, kind, gated)
            assert found.name.startswith(f"grouped_gemm<{kind.name}, ")
            assert found.name in available
            assert found.shared <= MAX_SHARED_BYTES, (m, k, found)
            assert found.threads == 32 * found.warps <= 1024


@each_kind
@each_gate
def test_a_tile_has_place_for_all_tokens_and_both_halves_of_a_gated_weight(
    launch_of: LaunchOf, kind: GroupedKind, gated: bool
) -> None:
    """In planes a token has two of the 8 columns of a product."""
    for m in SEVERAL:
        for k in WIDTHS:
            found = launch_of(m, k, kind, gated)
            assert found.in_planes == (kind.is_integer and m <= 4)
            assert not gated or found.tiles % 2 == 0


@each_kind
@each_gate
def test_all_columns_of_x_are_in_some_phase(
    launch_of: LaunchOf, kind: GroupedKind, gated: bool
) -> None:
    for m in SEVERAL:
        for k in WIDTHS:
            found = launch_of(m, k, kind, gated)
            # Of whole planes if there is one; of records that all warps load at a time if not.
            at_once = RECORD_COLUMNS * found.warps * found.depth
            assert found.phase > 0
            assert found.phase % (grouped._PLANE_COLUMNS if found.phase >= k else at_once) == 0


def test_x_that_fits_is_read_once(launch_of: LaunchOf) -> None:
    assert [launch_of(m, 4096, MXFP4, False).phase for m in SEVERAL] == [4096] * 6
    assert launch_of(MAX_TOKENS, 14336, MXFP4, False).phase < 14336


@pytest.mark.parametrize("num_multiprocessors", GPUS)
def test_no_block_of_few_tokens_is_without_rows(num_multiprocessors: int) -> None:
    for tile in grouped.tiles_of(KINDS[0]):
        for n in (8, 16, 40, 4096, 128256):
            blocks = tile.blocks(n, num_multiprocessors)
            assert blocks >= 1
            assert (blocks - 1) * tile.tiles * RECORD_ROWS < n


def test_planes_have_as_many_columns_as_in_the_kernel() -> None:
    source = (CSRC / "grouped_planes.cuh").read_text()
    for name in ("PLANE_COLUMNS", "PLANE_TOKENS"):
        assert re.search(rf"\b{name} = {getattr(grouped, f'_{name}')}\b", source)
    assert f"FEW_TOKENS = {grouped._COLUMNS};" in (CSRC / "grouped_few.cuh").read_text()


# ---------------------------------------------------------------- some tokens


@each_kind
def test_blocks_of_some_tokens_have_stages_to_load_ahead(kind: GroupedKind) -> None:
    for tile in grouped_gemm.TILES:
        stages, shared = tile.stages(kind), tile.shared_bytes(kind)
        assert stages >= 2 * tile.teams
        assert shared <= MAX_SHARED_BYTES
        assert not tile.pairs or 2 * (shared + 1024) <= 228 * 1024
        sums = tile.teams * tile.tokens * (grouped_gemm._ROWS + 4) * 4
        assert sums + 16 * (stages + 1) < shared and tile.threads <= 1024
        records = grouped_gemm._ROWS // RECORD_ROWS * kind.record_bytes
        assert stages * (tile.tokens * 2 * RECORD_COLUMNS + records) < shared


@pytest.mark.parametrize("num_multiprocessors", GPUS)
@pytest.mark.parametrize("n", [16, 576, 2880, 6144, 28672, 128256])
def test_columns_are_shared_by_as_few_blocks_as_keep_multiprocessors_busy(
    n: int, num_multiprocessors: int
) -> None:
    for m in (1, 9, 32, 33, 64, 65, 128, 129, 256, 1000):
        for k in WIDTHS:
            tile = grouped_gemm.plan(m, n, k, num_multiprocessors)
            assert tile in grouped_gemm.TILES
            assert m <= tile.tokens or tile.tokens == 128
            assert tile.tokens == 32 or tile.tokens // 2 < m
            tiles, stages = -(-m // tile.tokens) * -(-n // 128), -(-k // RECORD_COLUMNS)
            # Each block has enough records to load ahead.
            assert tile.split == 1 or stages >= tile.split * 4
            if tile.pairs and tile.split > 1:
                assert tile.split // 2 * tiles < 0.75 * num_multiprocessors
            if tile.teams > 1:  # each block has a multiprocessor of its own, and some are left
                assert tile.split * tiles < num_multiprocessors


def test_tiles_of_an_8b_llama_are_those_that_were_fastest() -> None:
    layers = {"qkv": (6144, 4096), "o": (4096, 4096), "mlp": (28672, 4096), "down": (4096, 14336)}
    found = {
        (m, name): grouped_gemm.plan(m, n, k, 132)
        for m in (64, 128, 256)
        for name, (n, k) in layers.items()
    }
    splits = {
        64: {"qkv": 4, "o": 3, "mlp": 1, "down": 3},
        128: {"qkv": 2, "o": 3, "mlp": 1, "down": 3},
        256: {"qkv": 1, "o": 2, "mlp": 1, "down": 2},
    }
    assert {key: tile.split for key, tile in found.items()} == {
        (m, name): split for m, each in splits.items() for name, split in each.items()
    }
    assert {key for key, tile in found.items() if tile.teams == 2} == {(64, "o"), (64, "down")}


# ---------------------------------------------------------------- launches


def names(launched: Launched, stem: str) -> list[str]:
    assert {found for found, _ in launched} == {stem}
    return [name for _, name in launched]


@each_kind
def test_the_values_of_a_weight_have_a_kernel_of_its_kind(kind: GroupedKind) -> None:
    with record_launches() as launched:
        grouped.dequantize(weight_of(64, 2048, kind), out=empty(64, 2048))
    assert names(launched, "grouped_gemm") == [f"grouped_dequantize<{kind.name}>"]
    assert set(names(launched, "grouped_gemm")) <= compiled(grouped)


@each_kind
@each_gate
def test_all_kernels_of_some_tokens_are_compiled(kind: GroupedKind, gated: bool) -> None:
    with record_launches() as launched:
        for n in (64, 4096, 28672):
            for m in (1, 32, 33, 64, 65, 128, 129, 300):
                weight, width = weight_of(n, 2048, kind), n // 2 if gated else n
                grouped_gemm.linear(empty(m, 2048), weight, out=empty(m, width), gated=gated)
    found = names(launched, "grouped_gemm_hopper")
    assert all(name.startswith(f"grouped_product<{kind.name}, ") for name in found)
    assert set(found) <= compiled(grouped_gemm)


def test_nothing_is_launched_without_tokens() -> None:
    weight = weight_of(64, 128, MXFP4)
    with record_launches() as launched:
        for linear in (grouped.linear, grouped_gemm.linear):
            linear(empty(0, 128), weight, out=empty(0, 64))
    assert not launched


def test_other_gpus_are_referred_to_the_kernel_for_few_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_gemm, "is_hopper", lambda: False)
    with (
        record_launches() as launched,
        pytest.raises(RuntimeError, match=r"requires a Hopper GPU; see `grouped\.linear`"),
    ):
        grouped_gemm.linear(empty(9, 128), weight_of(64, 128, MXFP4), out=empty(9, 64))
    assert not launched


# ---------------------------------------------------------------- operands


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": empty(MAX_TOKENS + 1, 128), "out": empty(MAX_TOKENS + 1, 64)},
            rf"x is \[{MAX_TOKENS + 1}, 128\].* with up to {MAX_TOKENS} rows",
        ),
        ({"x": empty(5, 120)}, r"x is \[5, 120\]; expected \[m, 128\]"),
        ({"x": empty(5, 128, dtype=torch.float16)}, "x is torch.float16; allowed"),
        ({"x": empty(5, 256)[:, ::2]}, "x has strides"),
        ({"weight": weight_of(48, 128, MXFP4), "gated": True, "out": empty(5, 24)}, "48 rows"),
        ({"bias": empty(63)}, "bias is"),
        ({"residual": empty(5, 64, dtype=torch.float32)}, "residual is"),
        ({"out": empty(5, 32)}, "out is"),
        ({"out": empty(5, 32, dtype=torch.float32), "gated": True}, "out is"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    weight = weight_of(64, 128, MXFP4)
    given: dict[str, Any] = {"x": empty(5, 128), "weight": weight, "out": empty(5, 64)}
    with record_launches() as launched, pytest.raises(ValueError, match=message):
        grouped.linear(**(given | changes))
    assert not launched


def test_memory_for_the_values_has_the_shape_of_the_weight() -> None:
    with record_launches(), pytest.raises(ValueError, match=r"weight is \[64, 128\]"):
        grouped.dequantize(weight_of(64, 128, MXFP4), out=empty(64, 256))
