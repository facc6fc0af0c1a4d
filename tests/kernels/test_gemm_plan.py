"""How linear layers of few tokens are cut: without a GPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from inflight_kernels import gemm
from inflight_kernels.gemm import MAX_TOKENS, plan

# name: (n, k, gated)
LAYERS = {
    "8B qkv": (6144, 4096, False),
    "8B o": (4096, 4096, False),
    "8B gate_up": (28672, 4096, True),
    "8B down": (4096, 14336, False),
    "8B head": (128256, 4096, False),
    "70B on 8, qkv": (1280, 8192, False),
    "70B on 8, o": (8192, 1024, False),
    "135M qkv": (960, 576, False),
    "odd": (1000, 1288, False),
    "one": (8, 8, False),
}
HOPPER = 132


def shares(cut: gemm.Plan) -> list[tuple[int, int]]:
    """First and last-but-one step of each block, as the kernel has them."""
    total = cut.tiles * cut.steps
    bounds = [block * total // cut.blocks for block in range(cut.blocks + 1)]
    return list(itertools.pairwise(bounds))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("m", [1, 8, 9, 32, MAX_TOKENS])
@pytest.mark.parametrize("num_multiprocessors", [1, 78, HOPPER])
def test_every_step_of_every_tile_belongs_to_one_block(
    layer: str, m: int, num_multiprocessors: int
) -> None:
    n, k, gated = LAYERS[layer]
    cut = plan(m, n, k, gated, num_multiprocessors)
    rows = gemm._BOX_ROWS if gated else gemm._ROWS
    assert cut.tokens >= m
    assert (cut.tiles - 1) * rows < (n // 2 if gated else n) <= cut.tiles * rows
    assert (cut.steps - 1) * gemm._DEPTH < k <= cut.steps * gemm._DEPTH
    total = cut.tiles * cut.steps
    assert cut.blocks <= num_multiprocessors
    for block, (first, end) in enumerate(shares(cut)):
        assert first < end, "a block without work"
        # The kernel's inverse of the bounds.
        for step in (first, end - 1):
            assert ((step + 1) * cut.blocks - 1) // total == block


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("m", [1, 8, 9, 32, MAX_TOKENS])
def test_parts_of_tiles_have_a_place_each_in_the_workspace(layer: str, m: int) -> None:
    n, k, gated = LAYERS[layer]
    cut = plan(m, n, k, gated, HOPPER)
    places = set()
    for block, (first, end) in enumerate(shares(cut)):
        for tile in range(first // cut.steps, (end - 1) // cut.steps + 1):
            begin, last = tile * cut.steps, (tile + 1) * cut.steps
            if begin < first or last > end:
                place = 2 * block + (first // cut.steps != tile)
                assert place not in places
                places.add(place)
    assert 2 * cut.blocks * gemm._ROWS * cut.tokens <= gemm._MAX_PARTIALS
    assert 4 * cut.blocks <= gemm._MAX_COUNTERS


@pytest.mark.parametrize("layer", [name for name in LAYERS if name.startswith("8B")])
@pytest.mark.parametrize("m", [1, MAX_TOKENS])
def test_the_busiest_block_has_little_more_than_its_share(layer: str, m: int) -> None:
    """Of the weights, on a Hopper GPU: the rest wait for it."""
    n, k, gated = LAYERS[layer]
    cut = plan(m, n, k, gated, HOPPER)
    busiest = max(end - first for first, end in shares(cut))
    assert n * k / (gemm._ROWS * gemm._DEPTH) / HOPPER / busiest >= 0.96


@pytest.mark.parametrize("m", [1, 16, 32, MAX_TOKENS])
def test_a_multiprocessor_has_one_block_with_all_its_memory(m: int) -> None:
    """228 KiB on Hopper, of which a block costs 1 KiB more than it asks for, and gets 227."""
    cut = plan(m, 6144, 4096, False, HOPPER)
    assert cut.shared_bytes <= 227 * 1024 < 2 * (cut.shared_bytes + 1024)
    assert cut.stages * gemm._ROWS * gemm._DEPTH * 2 >= 128 * 1024


def test_constants_are_the_same_on_both_sides() -> None:
    source = (Path(gemm.__file__).parent / "csrc" / "gemm.cu").read_text()
    found = dict(re.findall(r"constexpr int (\w+) = (\d+);", source))
    assert (int(found["WARPS"]) + 1) * 32 == gemm._THREADS
    assert 2 * int(found["HALF"]) == 2 * gemm._BOX_ROWS == gemm._ROWS
    assert int(found["DEPTH"]) == gemm._DEPTH


def test_few_tokens_on_hopper_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_hopper", lambda: True)
    assert all(gemm.prefers(m, n, k) for m in (1, 32) for n, k, _ in LAYERS.values())
    assert not any(gemm.prefers(33, n, k) for n, k, _ in LAYERS.values())
    assert not gemm.prefers(1, 4096, 4100)
    monkeypatch.setattr(gemm, "is_hopper", lambda: False)
    assert not gemm.prefers(1, 4096, 4096)
