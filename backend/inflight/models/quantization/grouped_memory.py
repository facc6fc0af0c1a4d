"""What matrices of codes with scales of groups take in memory."""

from __future__ import annotations


def grouped_bits(bits: int, group: int, has_minimums: bool) -> float:
    """Bits per weight in memory.

    Kernels read codes of 4 bits packed, wider ones from a byte each. A scale has 16 bits, and so
    has a minimum.

    Args:
        bits: of a code: 4, 5, 6 or 8.
        group: columns with a scale in common.
        has_minimums: whether a group has a minimum.
    """
    return (4 if bits == 4 else 8) + 16 * (1 + has_minimums) / group
