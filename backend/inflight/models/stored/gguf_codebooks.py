"""GGUF's blocks of 256 values that are vectors of a codebook: IQ1, IQ2 and IQ3.

A vector of 8 values, of 4 with IQ3, has few distinct magnitudes; a code is the index of one of them
and, as bit 3, its sign (with IQ1: that of what is added to all values of a vector). The codebooks
are those of the `gguf` package. B blocks are unpacked at a time.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import gguf.quants
import numpy as np
import numpy.typing as npt

from inflight.models.stored.bit_fields import Bytes, spread, spread_table
from inflight.models.stored.gguf_plain_blocks import Decoded, Decoder, Floats, halves

Codebook: TypeAlias = npt.NDArray[np.uint32 | np.uint64]
Indices: TypeAlias = npt.NDArray[np.uint16]

_SIGNS = spread_table(3)


@functools.cache
def _codebook(name: str) -> Codebook:
    """Each vector's codes without sign as one integer."""
    source = getattr(gguf.quants, name)
    source.init_grid()
    values = source.grid.reshape(source.grid_shape)
    codes = np.searchsorted(np.array(source.grid_map, np.float32), values).astype(np.uint8)
    found: Codebook = codes.view(f"u{codes.shape[1]}").reshape(-1)
    return found


@functools.cache
def _seven_signs() -> npt.NDArray[np.uint64]:
    """[128]: as `_SIGNS`, of 7 bits and their parity, for the number of signs is even."""
    return _SIGNS[np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8)]


def _vectors(name: str, indices: Bytes | Indices) -> Bytes:
    """[B, 256] codes without sign of a codebook's vectors."""
    return _codebook(name).take(indices).view(np.uint8)


def _shifts(count: int, bits: int) -> Indices:
    return np.arange(0, count * bits, bits, dtype=np.uint16)


def _nibbles(packed: Bytes) -> Floats:
    """[B, 2 m] of [B, m], the low one of each byte first."""
    both = packed[:, :, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return both.reshape(len(packed), -1).astype(np.float32)


def _half_steps(factors: Floats, blocks: Bytes, unit: float) -> Floats:
    """Scales: the block's times its groups' factors plus a half, times a unit."""
    return halves(blocks, 0) * (np.float32(0.5) + factors) * np.float32(unit)


def _four_signs(words: npt.NDArray[np.uint32]) -> tuple[Bytes, Floats]:
    """Of words [B, 8], each of a group: signs of its four vectors, [B, 256]; its factor."""
    indices = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    signs = _seven_signs().take(indices.reshape(len(words), -1)).view(np.uint8)
    return signs, (words >> np.uint32(28)).astype(np.float32)


def _iq2_xxs(blocks: Bytes) -> Decoded:
    words = np.ascontiguousarray(blocks[:, 2:]).view(np.uint32).reshape(-1, 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs, factors = _four_signs(words[:, :, 1])
    return _vectors("IQ2_XXS", indices) | signs, _half_steps(factors, blocks, 0.25), None


def _iq2_xs(blocks: Bytes) -> Decoded:
    words = blocks[:, 2:66].view(np.uint16)
    signs = _seven_signs().take(words >> np.uint16(9)).view(np.uint8)
    scales = _half_steps(_nibbles(blocks[:, 66:]), blocks, 0.25)
    return _vectors("IQ2_XS", words & np.uint16(511)) | signs, scales, None


def _iq2_s(blocks: Bytes) -> Decoded:
    indices = _with_high_bits(blocks[:, 2:34], blocks[:, 66:74], 2)
    scales = _half_steps(_nibbles(blocks[:, 74:]), blocks, 0.25)
    return _vectors("IQ2_S", indices) | spread(blocks[:, 34:66], _SIGNS), scales, None


def _iq3_xxs(blocks: Bytes) -> Decoded:
    words = np.ascontiguousarray(blocks[:, 66:]).view(np.uint32)
    signs, factors = _four_signs(words)
    return _vectors("IQ3_XXS", blocks[:, 2:66]) | signs, _half_steps(factors, blocks, 0.5), None


def _iq3_s(blocks: Bytes) -> Decoded:
    indices = _with_high_bits(blocks[:, 2:66], blocks[:, 66:74], 1)
    scales = halves(blocks, 0) * (2 * _nibbles(blocks[:, 106:]) + 1)
    return _vectors("IQ3_S", indices) | spread(blocks[:, 74:106], _SIGNS), scales, None


def _with_high_bits(low: Bytes, high: Bytes, bits: int) -> Indices:
    """Indices [B, m] of their low bytes [B, m] and of further bits, lowest first."""
    above = high[:, :, None] >> _shifts(8 // bits, bits).astype(np.uint8) & np.uint8(2**bits - 1)
    return low | above.reshape(len(low), -1).astype(np.uint16) << np.uint16(8)


def _iq1_s(blocks: Bytes) -> Decoded:
    words = blocks[:, 34:].view(np.uint16)  # of each group
    above = (words[:, :, None] >> _shifts(4, 3) & np.uint16(7)).reshape(-1, 32)
    codes = _vectors("IQ1_S", blocks[:, 2:34] | above << np.uint16(8)).reshape(-1, 8, 32)
    codes |= (words >> np.uint16(15) << np.uint16(3)).astype(np.uint8)[:, :, None]
    factors = (2 * (words >> np.uint16(12) & np.uint16(7)) + 1).astype(np.float32)
    return codes.reshape(-1, 256), halves(blocks, 0) * factors, None


def _iq1_m(blocks: Bytes) -> Decoded:
    packed = blocks[:, 48:].view(np.uint16)
    # The high 4 bits of four words are those of one float16.
    nibbles = (packed & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16)
    scale = np.bitwise_or.reduce(nibbles, 1).view(np.float16).astype(np.float32)
    factors = (packed[:, :, None] >> _shifts(4, 3) & np.uint16(7)).reshape(-1, 16)
    above = (blocks[:, 32:48, None] >> np.array([0, 4], np.uint8)).reshape(-1, 32)
    indices = blocks[:, :32] | (above & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    codes = _vectors("IQ1_M", indices).reshape(-1, 32, 8)
    codes |= (above & np.uint8(8))[:, :, None]
    return codes.reshape(-1, 256), scale[:, None] * (2 * factors + 1).astype(np.float32), None


DECODERS: dict[str, Decoder] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
