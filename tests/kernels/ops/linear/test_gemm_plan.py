"""Tiling of the linear layers for many tokens, and when they are preferred, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from inflight_kernels.ops.linear import gemm, operands, scaled_rows
from inflight_kernels.ops.linear.gemm import Plan, Shape, plan, prefers, utilization
from inflight_kernels.ops.linear.scaled_rows import MAX_SETTLED_WIDTH, num_codes

# name: (n, gated)
LAYERS = {
    "8B qkv": (6144, False),
    "8B o": (4096, False),
    "8B gate_up": (28672, True),
    "8B head": (128256, False),
    "70B on 4, gate_up": (14336, True),
    "135M gate_up": (3072, True),
    "odd": (1000, False),
    "odd, gated": (1008, True),
    "one": (8, False),
    "one, gated": (16, True),
}
TOKENS = [1, 65, 128, 129, 192, 256, 257, 1000, 8192, 16384]
HOPPER = 132

CSRC = Path(gemm.__file__).parents[2] / "csrc/linear"
SOURCE = (CSRC / "gemm_hopper.cu").read_text()
HEADER = (CSRC / "hopper_linear.cuh").read_text()
CONSTANTS = {name: int(value) for name, value in re.findall(r"int (\w+) = (\d+);", SOURCE)}


def boxes(cut: Plan, m: int, width: int, gated: bool, scaled: bool) -> list[tuple[int, int]]:
    """First token and first column of the tile of each block, as the kernel finds them."""
    columns = cut.shape.rows // 2 if gated else cut.shape.rows
    share = cut.shape.share_weight
    token_tiles = -(-m // (gemm._TOKENS * (2 if share else 1)))
    row_tiles = -(-width // (columns * (1 if share else 2)))
    at_once = CONSTANTS["GATE_TILES_AT_ONCE" if gated and scaled else "TILES_AT_ONCE"]
    found = []
    for cluster in range(cut.clusters):
        for tile in range(cluster, token_tiles * row_tiles, cut.clusters):
            first = tile // (at_once * row_tiles) * at_once
            size = min(at_once, token_tiles - first)
            rest = tile % (at_once * row_tiles)
            tokens, rows = first + rest % size, rest // size
            for rank in range(2):
                found.append(
                    ((2 * tokens + rank) * gemm._TOKENS, rows * columns)
                    if share
                    else (tokens * gemm._TOKENS, (2 * rows + rank) * columns)
                )
    return found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("num_multiprocessors", [2, 78, HOPPER])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_place_of_the_output_is_in_one_tile(
    layer: str, m: int, num_multiprocessors: int, scaled: bool
) -> None:
    n, gated = LAYERS[layer]
    width = n // 2 if gated else n
    cut = plan(m, n, gated, num_multiprocessors, scaled)
    columns = cut.shape.rows // 2 if gated else cut.shape.rows
    assert 2 * cut.clusters <= num_multiprocessors
    found = boxes(cut, m, width, gated, scaled)
    assert len(found) == len(set(found)) == 2 * cut.tiles
    wanted = {
        (token, column)
        for token in range(0, m, gemm._TOKENS)
        for column in range(0, width, columns)
    }
    assert wanted <= set(found)


@pytest.mark.parametrize("m", [128, 256, 384, 512, 640, 1024, 8192])
def test_multiprocessors_are_seldom_idle_in_an_8b_models_mlp(m: int) -> None:
    assert utilization(m, 28672, True, HOPPER) > 0.96


@pytest.mark.parametrize("m", TOKENS)
def test_utilization_is_a_fraction(m: int) -> None:
    for n, gated in LAYERS.values():
        assert 0 < utilization(m, n, gated, HOPPER) <= 1


# Shape, gated, scaled, and whether results are quantised.
KERNELS = [
    *((shape, True, False, False) for shape in gemm._GATED),
    *((shape, False, False, False) for shape in gemm._PLAIN),
    *((shape, gated, True, False) for shape in gemm._SCALED for gated in (False, True)),
    *((shape, True, True, True) for shape in gemm._SCALED),
]
each_kernel = pytest.mark.parametrize(("shape", "gated", "scaled", "quantizes"), KERNELS, ids=str)


@each_kernel
def test_a_shape_suits_the_hardware(
    shape: gemm.Shape, gated: bool, scaled: bool, quantizes: bool
) -> None:
    layout = gemm.layout(shape, gated, scaled, quantizes)
    assert layout.num_bytes <= operands.MAX_SHARED_BYTES
    assert layout.stages >= 4, "too few steps to hide the latency of memory"
    assert shape.rows % 16 == 0, "half of the rows, a box, is whole units of 8 rows, swizzled"
    assert re.search(rf"PRODUCT_MULTIPLY\({shape.rows},", HEADER), "no such instruction"


@each_kernel
def test_results_have_room_beside_the_stages(
    shape: Shape, gated: bool, scaled: bool, quantizes: bool
) -> None:
    """Those of a tile, in 8 or 16 bits, and copied as whole boxes, unless they go to memory
    directly."""
    layout = gemm.layout(shape, gated, scaled, quantizes)
    stages = layout.stages * shape.step_bytes
    if not scaled:
        assert layout.box is None and layout.num_bytes == stages + 1024
        return
    columns = shape.rows // 2 if gated else shape.rows
    assert layout.box is not None
    tokens, width = layout.box
    assert gemm._TOKENS % tokens == columns % width == 0
    if quantizes:
        assert width % 16 == 0 and width <= 256, "bytes of a row that is not swizzled"
        assert tokens * width % 128 == 0, "a box is aligned"
    else:
        assert width * 2 in (32, 64), "bytes of a swizzled row"
    size = 1 if quantizes else 2
    assert layout.num_bytes >= stages + 1024 + gemm._TOKENS * columns * size


@pytest.mark.parametrize("m", TOKENS)
def test_a_quantised_gate_has_a_kernel_and_room_for_its_codes(m: int) -> None:
    for n in (16 * 2, 3072, 28672, 2 * MAX_SETTLED_WIDTH):
        shape = plan(m, n, True, HOPPER, True).shape
        compiled = {name for _, names, _ in gemm.instantiations() for name in names}
        assert all(
            gemm._quantizing_name(shape, storage) in compiled
            for storage in operands.SCALED_OUT_TYPES.values()
        )
        parts = -(-n // 2 // (shape.rows // 2))
        assert m * parts <= num_codes(m, n // 2)
        assert gemm.can_quantize_gate(n)
    assert not gemm.can_quantize_gate(2 * MAX_SETTLED_WIDTH + 32)
    assert not gemm.can_quantize_gate(16)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("m", TOKENS)
def test_every_kernel_of_a_plan_is_compiled(layer: str, m: int) -> None:
    n, gated = LAYERS[layer]
    shape = plan(m, n, gated, HOPPER).shape
    compiled = {name for _, names, _ in gemm.instantiations() for name in names}
    for storage in operands.STORAGE_TYPES.values():
        for out_type in (storage,) if gated else (storage, "float"):
            assert gemm._name(shape, storage, out_type, gated) in compiled


def test_constants_are_the_same_on_both_sides() -> None:
    assert f"STAGE_DEPTH = {operands.STAGE_DEPTH_BYTES} / " in HEADER
    assert CONSTANTS["GROUPS"] * 64 == gemm._TOKENS
    assert (CONSTANTS["GROUPS"] + 1) * 128 == gemm._THREADS
    settling = (CSRC.parent / "layer/quantization.cu").read_text()
    found = {name: int(value) for name, value in re.findall(r"int (\w+) = (\d+);", settling)}
    assert found["ROWS_AT_ONCE"] == scaled_rows._ROWS_AT_ONCE
    assert found["MAX_PARTS"] == scaled_rows._MAX_PARTS


# ---------------------------------------------------------------- when it is preferred


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_hopper", lambda: True)
    monkeypatch.setattr(gemm, "num_multiprocessors", lambda: HOPPER)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("n", "k", "faster", "slower"),
    [
        (
            28672,
            4096,
            [65, 96, 128, 240, 256, 384, 512, 576, 640, 704, 1024, 8192],
            [200, 272, 320],
        ),
        (14336, 8192, [256, 1024], [96, 128, 192]),
        (16384, 2048, [256, 1024], [96, 128]),
        (37888, 3584, [1024], [96, 128, 192, 256]),
    ],
)
def test_gated_products_are_preferred_where_they_were_faster(
    n: int, k: int, faster: list[int], slower: list[int]
) -> None:
    assert [m for m in faster + slower if prefers(m, n, k, True, False)] == faster


@pytest.mark.usefixtures("hopper")
def test_plain_products_are_preferred_for_few_tokens_into_float32() -> None:
    tokens = [1, 64, 65, 80, 128, 129, 160, 256, 8192]
    assert [m for m in tokens if prefers(m, 128256, 4096, False, True)] == [65, 80, 128]
    assert not any(prefers(m, n, 4096, False, False) for m in tokens for n in (4096, 128256))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("max_tokens", [64, 100, 256, 1000, 4100])
@pytest.mark.parametrize("layer", LAYERS)
def test_whatever_is_preferred_is_preferred_where_tiles_are_full(
    layer: str, max_tokens: int
) -> None:
    """So a recording of such steps has the kernels of all."""
    (n, gated), k = LAYERS[layer], 4096
    full = {*range(gemm._TOKENS, max_tokens, gemm._TOKENS), max_tokens}

    def shapes(tokens: Iterable[int], widens: bool) -> set[Shape]:
        return {plan(m, n, gated, HOPPER).shape for m in tokens if prefers(m, n, k, gated, widens)}

    for widens in (False,) if gated else (False, True):
        assert shapes(full, widens) == shapes(range(1, max_tokens + 1), widens)


@pytest.mark.usefixtures("hopper")
def test_unsupported_shapes_are_not_preferred() -> None:
    assert prefers(256, 28672, 4096, True, False)
    assert not prefers(256, 28672, 4100, True, False)
    assert not prefers(256, 28672 + 8, 4096, True, False)


def test_nothing_is_preferred_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_hopper", lambda: False)
    assert not prefers(256, 28672, 4096, True, False)
