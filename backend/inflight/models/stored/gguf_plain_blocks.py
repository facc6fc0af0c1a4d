"""GGUF's blocks with one scale of their own: of 32 values, and MXFP4's and NVFP4's.

B blocks are unpacked at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from inflight.models.stored.bit_fields import Bytes, fields, spread, spread_table

Floats: TypeAlias = npt.NDArray[np.float32]
Decoded: TypeAlias = tuple[Bytes, Floats, Floats | None]
"""Codes [B, L], and scales and minimums of each block's groups."""

Decoder: TypeAlias = Callable[[Bytes], Decoded]
"""Of blocks [B, bytes]."""

_FIFTH_BITS = spread_table(4)


def halves(blocks: Bytes, first: int, count: int = 1) -> Floats:
    """So many float16 from a byte on, [B, count]."""
    found: Floats = blocks[:, first : first + 2 * count].view(np.float16).astype(np.float32)
    return found


def _q4_0(blocks: Bytes) -> Decoded:
    return fields(blocks[:, 2:], 16, 4), halves(blocks, 0), None


def _q4_1(blocks: Bytes) -> Decoded:
    return fields(blocks[:, 4:], 16, 4), halves(blocks, 0), halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Decoded:
    return _with_fifth_bits(blocks[:, 2:6], blocks[:, 6:]), halves(blocks, 0), None


def _q5_1(blocks: Bytes) -> Decoded:
    codes = _with_fifth_bits(blocks[:, 4:8], blocks[:, 8:])
    return codes, halves(blocks, 0), halves(blocks, 2)


def _with_fifth_bits(high: Bytes, low: Bytes) -> Bytes:
    codes = fields(low, 16, 4)
    codes |= spread(high, _FIFTH_BITS)
    return codes


def _q8_0(blocks: Bytes) -> Decoded:
    # int8 plus 128.
    return blocks[:, 2:] ^ np.uint8(0x80), halves(blocks, 0), None


def _mxfp4(blocks: Bytes) -> Decoded:
    return fields(blocks[:, 1:], 16, 4), _halved_e8m0()[blocks[:, 0]], None


def _nvfp4(blocks: Bytes) -> Decoded:
    return fields(blocks[:, 4:], 8, 4), _halved_e4m3()[blocks[:, :4]], None


def _halved_e8m0() -> Floats:
    """[256]: 2 ** (e - 128), for levels are doubled."""
    found: Floats = np.exp2(np.arange(256) - 128.0).astype(np.float32)
    return found


def _halved_e4m3() -> Floats:
    """[256]: half of a number without sign; its bit 7 is not read, and NaN is 0."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = (8 + mantissa) * np.exp2(exponent - 11.0)
    found = np.where(exponent == 0, mantissa * 2.0**-10, normal)
    return np.where(code == 0x7F, 0, found).astype(np.float32)


DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _q4_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
