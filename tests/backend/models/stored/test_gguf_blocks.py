"""Codes and scales of GGUF's types are the values of the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

import tiny_gguf
from inflight.checkpoint.gguf import GgufTensor
from inflight.models.quantization.gguf.kinds import KINDS
from inflight.models.stored.gguf_blocks import grouped, shaped

WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
"""Types that the package can write."""
PLAIN = {"F32", "F16", "BF16"}

names = pytest.mark.parametrize("name", [name for name in KINDS if hasattr(Kind, name)])


def stored_as(name: str, blocks: np.ndarray, rows: int) -> GgufTensor:
    length, _ = gguf.GGML_QUANT_SIZES[Kind[name]]
    return GgufTensor((rows, len(blocks) // rows * length), Kind[name], blocks.reshape(-1))


def test_every_type_that_the_package_reads_is_kept() -> None:
    readable = {kind.name for kind in gguf.quants._type_traits}
    assert readable - PLAIN <= KINDS.keys()


@names
def test_random_blocks_have_the_values_of_the_package(name: str) -> None:
    """More of them than are unpacked at a time, and not a multiple of that."""
    length, _ = gguf.GGML_QUANT_SIZES[Kind[name]]
    blocks = tiny_gguf.drawn_blocks(Kind[name], 3 * (50_000 // length))
    found = grouped(stored_as(name, blocks, 3))
    assert found is not None
    got = found.dequantized().numpy()
    assert got.dtype == np.float32
    expected = gguf.dequantize(blocks, Kind[name]).reshape(3, -1)
    assert np.array_equal(got.view(np.int32), expected.view(np.int32))
    assert int(found.codes.max()) < 1 << found.bits


@pytest.mark.parametrize("name", WRITTEN)
def test_written_values_are_those_of_the_package(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((8, 512), np.float32)
    data = gguf.quantize(values, Kind[name])
    found = grouped(GgufTensor((8, 512), Kind[name], data.reshape(-1)))
    assert found is not None
    assert np.array_equal(found.dequantized().numpy(), gguf.dequantize(data, Kind[name]))


@names
@given(data=st.data())
def test_any_bytes_are_exact_or_not_finite(name: str, data: st.DataObject) -> None:
    _, size = gguf.GGML_QUANT_SIZES[Kind[name]]
    drawn = data.draw(st.binary(min_size=4 * size, max_size=4 * size))
    blocks = np.frombuffer(drawn, np.uint8).reshape(4, size)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, Kind[name]).reshape(2, -1)
        found = grouped(stored_as(name, blocks, 2))
    if found is None:
        assert not np.isfinite(expected).all()
    else:
        assert np.array_equal(found.dequantized().numpy(), expected)


@names
def test_the_header_has_the_form_of_the_data(name: str) -> None:
    length, _ = gguf.GGML_QUANT_SIZES[Kind[name]]
    blocks = tiny_gguf.drawn_blocks(Kind[name], 6)
    read, known = grouped(stored_as(name, blocks, 3)), shaped((3, 2 * length), KINDS[name])
    assert read is not None
    assert known.codes.is_meta
    assert known.kind == read.kind
    assert known.shape == read.shape
    for one, other in ((known.scales, read.scales), (known.minimums, read.minimums)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.is_meta
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert (known.units is None) == (read.units is None)
    if known.units is not None and read.units is not None:
        assert known.units.scales.is_meta
        assert known.units.scales.shape == read.units.scales.shape
        assert (known.units.minimums is None) == (read.units.minimums is None)
    assert known.dequantized().is_meta
    assert known.dequantized().shape == read.shape
    if read.levels is not None:
        assert read.levels.dtype == torch.float32
        assert len(read.levels) == 1 << read.bits


@pytest.mark.parametrize("half", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_have_no_codes(half: float) -> None:
    blocks = tiny_gguf.drawn_blocks(Kind.Q4_1, 4)
    assert grouped(stored_as("Q4_1", blocks, 2)) is not None
    for first in (0, 2):  # a scale, a minimum
        damaged = blocks.copy()
        damaged[1, first : first + 2] = np.array([half], np.float16).view(np.uint8)
        assert grouped(stored_as("Q4_1", damaged, 2)) is None


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.units is not None])
def test_scales_and_minimums_are_integers_times_units(name: str) -> None:
    length, _ = gguf.GGML_QUANT_SIZES[Kind[name]]
    found = grouped(stored_as(name, tiny_gguf.drawn_blocks(Kind[name], 12), 3))
    assert found is not None and found.units is not None
    pairs = [(found.scales, found.units.scales), (found.minimums, found.units.minimums)]
    for numbers, units in pairs[: 1 + KINDS[name].has_minimums]:
        assert numbers is not None and units is not None
        assert units.shape == (3, 4)
        wide = units.repeat_interleave(length // found.group, 1)
        integers = (numbers / wide).round()
        assert integers.abs().max() <= 128 and integers.count_nonzero() > 0
        assert torch.equal(integers * wide, numbers)
