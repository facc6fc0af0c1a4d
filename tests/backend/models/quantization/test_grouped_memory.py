"""Codes take 4 or 8 bits, scales and minimums 16."""

from __future__ import annotations

import pytest

from inflight.models.quantization.grouped_memory import grouped_bits


@pytest.mark.parametrize(
    ("bits", "group", "has_minimums", "expected"),
    [
        (4, 32, False, 4.5),
        (4, 32, True, 5),
        (4, 128, False, 4.125),
        (4, 16, True, 6),
        (5, 32, True, 9),
        (6, 16, False, 9),
        (8, 32, False, 8.5),
    ],
)
def test_a_weight_takes_its_code_and_a_share_of_its_scale(
    bits: int, group: int, has_minimums: bool, expected: float
) -> None:
    assert grouped_bits(bits, group, has_minimums) == expected
