"""Fields of bits are taken from bytes in the order of runs."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.models.stored.bit_fields import fields, shifted, spread, spread_table


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("run", [8, 16, 32, 64])
def test_each_run_yields_its_lowest_fields_first(bits: int, run: int) -> None:
    # Of wider rows, as in blocks.
    packed = np.random.default_rng(0).integers(0, 256, (3, 5 + 2 * run), np.uint8)[:, 5:]
    expected = [
        [
            value >> at & (1 << bits) - 1
            for first in (0, run)
            for at in range(0, 8, bits)
            for value in row[first : first + run].tolist()
        ]
        for row in packed
    ]
    assert fields(packed, run, bits).tolist() == expected


def test_bytes_are_shifted_by_themselves() -> None:
    values = np.array([[1, 0, 3, 2, 1, 3, 0, 3]], np.uint8)
    assert shifted(values, 4).tolist() == [[16, 0, 48, 32, 16, 48, 0, 48]]


def test_bits_are_spread_from_the_lowest_on() -> None:
    packed = np.array([[0b1000_0001, 0b10]], np.uint8)
    expected = [[8, 0, 0, 0, 0, 0, 0, 8, 0, 8, 0, 0, 0, 0, 0, 0]]
    assert spread(packed, spread_table(3)).tolist() == expected
