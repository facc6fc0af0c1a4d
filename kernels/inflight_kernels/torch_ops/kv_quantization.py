"""Keys and values in 8 bits: one byte per value, and one float16 scale per head of a token.

A scale is computed from the vector that it belongs to, so that nothing is calibrated, nothing is
clipped, and a token's bytes do not depend on the other tokens of its step. Shapes: T tokens, G KV
heads, D values per head.

A block of keys, or of values, starts with its bytes [block_size, G, D]; the scales
[G, block_size] follow. So the values of a token are where they are without quantisation, and
whatever moves a block moves its scales. Scales have two bytes, for the least memory and because
those of 8 tokens of a head are then one 16-byte load of attention; and tokens are innermost, as
attention reads one head of consecutive tokens.

An INT8 vector has one step for all of its values, which the largest one sets. Keys have a few large
columns, so before they are rounded, keys and queries are spread over all columns by a Hadamard
transform (QuaRot, arXiv:2404.00456), which leaves their products as they are. e4m3 has steps for
each value by itself, and gains nothing by that; its keys choose among several scales instead
(`quantize_keys`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_TYPE = torch.float16

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest magnitude of each type of bytes; -128 is not used."""

KEY_CODES = (*(448.0 - 32.0 * i for i in range(7)), 240.0)
"""Numbers of e4m3 that a key's largest value may become: one of each mantissa."""

_KEY_COLUMNS = 4
"""Adjacent columns, the largest of which stands for them when errors are compared. All of them
would be four times the work, for a KL that is a twelfth lower at best (benchmarks/notes.md)."""

_LARGEST_WITH_ANY_CODE = 2.0**23
"""From this magnitude on, float16 need not hold the scale of the smallest of `KEY_CODES`."""


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """The keys, or the values, of a layer in 8 bits.

    Attributes:
        values: [num_blocks, block_size, G, D] float8_e4m3fn or int8; blocks may be strided, and
            heads if these are a part of their vectors (`first_columns`).
        scales: [num_blocks, G, block_size] float16; multiplied with the values of their head.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """[num_blocks, block_size, G, D]."""
        return self.values.shape


KVMemory = Tensor | QuantizedKV
"""The keys, or the values, of a layer: [num_blocks, block_size, G, D] floats, or 8 bits."""


def holds_spread_keys(keys: KVMemory) -> bool:
    """Whether a layer's keys are spread, so that queries have to be."""
    return isinstance(keys, QuantizedKV) and keys.values.dtype == torch.int8


def spread_queries(q: Tensor) -> Tensor:
    """Queries [..., D] for keys of `spread_keys`."""
    return _spread(q, spread_bits(q.shape[-1])[0]).to(q.dtype)


def spread_keys(k: Tensor) -> Tensor:
    """Keys [..., D] as they are rounded to INT8, in float32 or float64.

    Their products with `spread_queries` are those of before. Unscaled, the transforms would
    multiply them by the number of columns of a block; each side takes about half of that power of
    two off, which loses no bit.
    """
    return _spread(k, spread_bits(k.shape[-1])[1])


def spread_bits(head_dim: int) -> tuple[int, int]:
    """Log 2 of what `spread_queries` and `spread_keys` divide by.

    Together, that of the columns that are spread over each other: a block of either half of a head.
    For a head dim that is a power of two these are all.
    """
    half = head_dim // 2
    bits = (half & -half).bit_length()
    return bits // 2, bits - bits // 2


def _spread(x: Tensor, bits: int) -> Tensor:
    """Hadamard transforms of blocks of columns, times 2^-bits.

    Butterflies in the order of rope.cu: columns that are 1, 2, 4 and so on apart within a half,
    then those across from each other, as RoPE pairs them.
    """
    shape = x.shape
    half = shape[-1] // 2
    x = x if x.dtype == torch.float64 else x.float()
    distance = 1
    while half % (2 * distance) == 0:
        x = butterflies(x.reshape(-1, 2, distance))
        distance *= 2
    return butterflies(x.reshape(-1, 2, half)).view(shape) * 2.0**-bits


def butterflies(pairs: Tensor) -> Tensor:
    """Sums and differences of vectors [n, 2, width] that are beside each other."""
    first, second = pairs.unbind(1)
    return torch.stack((first + second, first - second), 1)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise vectors [..., D] of floats to float8_e4m3fn or int8.

    The scale is the largest magnitude divided by the type's largest number, rounded up to float16:
    rounded to nearest, it could clip. A vector that is not finite, or too large for float16, gets a
    scale that is not finite either, and zero bytes, so that it is NaN again when dequantised.

    Returns:
        The bytes [..., D] and the scales [...] float16. A zero vector has the scale 0.
    """
    wide = x.float()
    amax = wide.abs().amax(-1)
    return _quantize(wide, amax, torch.full_like(amax, LARGEST[dtype]), dtype)


def quantize_keys(k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise keys [..., D] of floats; for INT8, `spread_keys` of them.

    In e4m3, a key's largest value becomes one of `KEY_CODES` instead of 448: that with the least
    squared error of the key's large values. All of them are numbers of e4m3, so that the largest
    value, which scores depend on most, stays as exact as its scale. Values of tokens gain little by
    this, as their errors average out.

    Returns:
        Those of `quantize`.
    """
    if dtype != torch.float8_e4m3fn:
        return quantize(spread_keys(k), dtype)
    wide = k.float()
    amax = wide.abs().amax(-1)
    return _quantize(wide, amax, _key_codes(wide, amax), dtype)


def _key_codes(k: Tensor, amax: Tensor) -> Tensor:
    """The number that each key's largest value becomes, [...], for keys [..., D] float32.

    Errors are those of `KeyScales` in kv_quantization.cuh: of four significant bits, and rounded
    down to multiples of 2^-11, so that their sums do not depend on their order. They are relative
    to the square of the largest value.
    """
    codes, weights, indices = _key_tables(k.device)
    rest = -k.shape[-1] % _KEY_COLUMNS
    k = (torch.nn.functional.pad(k, (0, rest)) if rest else k).abs()
    k = k.reshape(*amax.shape, 1, k.shape[-1] // _KEY_COLUMNS, _KEY_COLUMNS).amax(-1)
    scaled = k * (amax.reciprocal().unsqueeze(-1) * codes).unsqueeze(-1)  # [..., 8, D / 4]
    rounded = (scaled.view(torch.int32) + 0x80000).bitwise_and_(-0x100000)
    squares = scaled.sub_(rounded.view(torch.float32)).double().square_()
    errors = squares.mul_(2.0**11).floor_().sum(-1).float().mul_(weights)
    # Of errors that differ in their last three bits alone, the first one.
    last = len(KEY_CODES) - 1
    least = errors.view(torch.int32).bitwise_and_(~last).bitwise_or_(indices).amin(-1)
    return codes[least.bitwise_and_(last).masked_fill_(amax >= _LARGEST_WITH_ANY_CODE, 0)]


@functools.cache
def _key_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of `KEY_CODES`, [8] each: the numbers, the inverses of their squares, and their indices."""
    codes = torch.tensor(KEY_CODES, device=device)
    indices = torch.arange(len(KEY_CODES), dtype=torch.int32, device=device)
    return codes, codes.square().reciprocal_(), indices


def _quantize(x: Tensor, amax: Tensor, codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise x [..., D] float32 so that its largest magnitude [...] becomes a number [...]."""
    # By a tensor: torch multiplies by the inverse of a number on GPUs, which rounds twice.
    scales = _rounded_up(amax / codes)
    scaled = x * (1.0 / scales.float()).unsqueeze(-1)
    largest = LARGEST[dtype]
    scaled = scaled.nan_to_num_(0.0).clamp_(-largest, largest)
    return (scaled if dtype.is_floating_point else scaled.round_()).to(dtype), scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., D] of bytes [..., D] with scales [...], in this dtype of floats."""
    return _floats(values).mul_(scales.unsqueeze(-1)).to(dtype)


def _floats(values: Tensor) -> Tensor:
    """The numbers of bytes, in float32."""
    if values.dtype != torch.float8_e4m3fn or values.device.type != "cpu":
        return values.float()
    # On CPUs torch converts e4m3 one number after the other, which takes five times longer.
    numbers = values.view(torch.uint8).reshape(-1).int()
    return _e4m3_numbers().index_select(0, numbers).view(values.shape)


@functools.cache
def _e4m3_numbers() -> Tensor:
    """[256] float32, by byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def write(x: Tensor, memory: QuantizedKV, slots: Tensor) -> None:
    """Quantise values x [T, G, D] into slots [T] of a layer's memory, in place."""
    _write(quantize(x, memory.values.dtype), memory, slots)


def write_keys(k: Tensor, memory: QuantizedKV, slots: Tensor) -> None:
    """Quantise keys [T, G, D] into slots [T] of a layer's memory, in place."""
    _write(quantize_keys(k, memory.values.dtype), memory, slots)


def _write(quantized: tuple[Tensor, Tensor], memory: QuantizedKV, slots: Tensor) -> None:
    values, scales = quantized
    block_size = memory.values.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    memory.values.view(torch.uint8)[blocks, offsets] = values.view(torch.uint8)
    memory.scales[blocks, :, offsets] = scales


def read_blocks(memory: QuantizedKV, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise blocks [n] -> [n, block_size, G, D]."""
    values = memory.values.view(torch.uint8).index_select(0, blocks).view(memory.values.dtype)
    scales = memory.scales.index_select(0, blocks).transpose(1, 2)
    return dequantize(values, scales, dtype)


def of_blocks(data: Tensor, dtype: torch.dtype) -> QuantizedKV:
    """Views of a layer's blocks.

    Args:
        data: [num_blocks, block_size, G, D + 2] uint8, with contiguous blocks. Only the size of a
            block is meant by the last three dimensions: it has the layout of this module.
        dtype: of the values.
    """
    values, scales = _bytes_of(data).view(dtype), _scales_of(data)
    # Of a single block a view need not keep the stride, which kernels ask for.
    stride = data.stride(0)
    return QuantizedKV(
        values.as_strided(values.shape, (stride, *values.stride()[1:])),
        scales.as_strided(scales.shape, (stride // SCALE_TYPE.itemsize, *scales.stride()[1:])),
    )


def first_columns(memory: KVMemory, dim: int) -> KVMemory:
    """A view of the first elements of each vector; in 8 bits with the scales of the whole ones."""
    if isinstance(memory, QuantizedKV):
        return QuantizedKV(memory.values[..., :dim], memory.scales)
    return memory[..., :dim]


def clear_slots(data: Tensor, slots: Tensor) -> None:
    """Zero slots [n] in blocks [..., num_blocks, block_size, G, D + 2], in place: bytes and scales
    (see `transformer.clear_slots`).
    """
    block_size = data.shape[-3]
    blocks, offsets = slots // block_size, slots % block_size
    _bytes_of(data)[..., blocks, offsets, :, :] = 0
    _scales_of(data)[..., blocks, :, offsets] = 0.0


def _bytes_of(data: Tensor) -> Tensor:
    """The bytes of the values [..., num_blocks, block_size, G, D] of blocks."""
    *shape, width = data.shape
    head_dim = width - SCALE_TYPE.itemsize
    return data.flatten(-3)[..., : math.prod(shape[-2:]) * head_dim].view(*shape, head_dim)


def _scales_of(data: Tensor) -> Tensor:
    """The scales [..., num_blocks, G, block_size] of blocks."""
    block_size, num_heads, width = data.shape[-3:]
    num_values = block_size * num_heads * (width - SCALE_TYPE.itemsize)
    scales = data.flatten(-3)[..., num_values:].view(SCALE_TYPE)
    return scales.view(*data.shape[:-3], num_heads, block_size)


def _rounded_up(x: Tensor) -> Tensor:
    """Numbers >= 0 in float16, none of them smaller; infinite past its range."""
    nearest = x.to(SCALE_TYPE)
    # The bits of the next number, subnormal ones and infinity included.
    following = (nearest.view(torch.int16) + 1).view(SCALE_TYPE)
    return torch.where(nearest.float() < x, following, nearest)
