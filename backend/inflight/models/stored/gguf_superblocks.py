"""GGUF's blocks of 256 values: those whose groups have scales of 4 to 8 bits, and ternary ones.

B blocks are unpacked at a time.
"""

from __future__ import annotations

import numpy as np

from inflight.models.stored.bit_fields import Bytes, fields, shifted
from inflight.models.stored.gguf_plain_blocks import Decoded, Decoder, Floats, halves


def _q2_k(blocks: Bytes) -> Decoded:
    factors = blocks[:, :16]
    scales = halves(blocks, 80) * (factors & 15).astype(np.float32)
    minimums = halves(blocks, 82) * (factors >> 4).astype(np.float32)
    return fields(blocks[:, 16:80], 32, 2), scales, -minimums


def _q3_k(blocks: Bytes) -> Decoded:
    codes = fields(blocks[:, 32:96], 32, 2)
    codes |= shifted(fields(blocks[:, :32], 32, 1), 2)
    # 16 scales: the low 4 bits of all in 8 bytes, then the high 2 of all in 4 bytes.
    factors = fields(blocks[:, 96:104], 8, 4)
    high = blocks[:, 104:108, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
    factors |= high.swapaxes(1, 2).reshape(-1, 16) << np.uint8(4)
    return codes, halves(blocks, 108) * _signed(factors, 32), None


def _q4_k(blocks: Bytes) -> Decoded:
    return fields(blocks[:, 16:], 32, 4), *_scales_and_minimums(blocks)


def _q5_k(blocks: Bytes) -> Decoded:
    codes = fields(blocks[:, 48:], 32, 4)
    codes |= shifted(fields(blocks[:, 16:48], 32, 1), 4)
    return codes, *_scales_and_minimums(blocks)


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """[B, 8] each, of 6 bits: the last four of both have their high 2 bits above the first four."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, both = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 63, both & 15 | first >> 2 & 48], 1)
    minimums = np.concatenate([second & 63, both >> 4 | second >> 2 & 48], 1)
    found: Floats = halves(blocks, 0) * scales.astype(np.float32)
    return found, -(halves(blocks, 2) * minimums.astype(np.float32))


def _q6_k(blocks: Bytes) -> Decoded:
    codes = fields(blocks[:, :128], 64, 4)
    codes |= shifted(fields(blocks[:, 128:192], 32, 2), 4)
    factors = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes, halves(blocks, 208) * factors, None


def _iq4_xs(blocks: Bytes) -> Decoded:
    # 8 scales: the low 4 bits in 4 bytes, neighbours together, the high 2 in 16 bits.
    high = blocks[:, 2:4].view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    factors = low.reshape(-1, 8) | high.astype(np.uint8) << np.uint8(4)
    return fields(blocks[:, 8:], 16, 4), halves(blocks, 0) * _signed(factors, 32), None


def _signed(factors: Bytes, zero: int) -> Floats:
    return factors.astype(np.float32) - np.float32(zero)


def _tq1_0(blocks: Bytes) -> Decoded:
    """A byte is a fraction of 256; each of its digits of base 3 is a value plus 1."""
    digits = [
        _ternary_digits(blocks[:, :32], 5),
        _ternary_digits(blocks[:, 32:48], 5),
        _ternary_digits(blocks[:, 48:52], 4),
    ]
    return np.concatenate(digits, 1), halves(blocks, 52), None


def _ternary_digits(packed: Bytes, count: int) -> Bytes:
    """The first digits of all bytes, then their second ones, and so on."""
    fractions = packed[:, None, :] * np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
    digits = fractions.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return digits.astype(np.uint8).reshape(len(packed), -1)


def _tq2_0(blocks: Bytes) -> Decoded:
    return fields(blocks[:, :64], 32, 2), halves(blocks, 64), None


DECODERS: dict[str, Decoder] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
