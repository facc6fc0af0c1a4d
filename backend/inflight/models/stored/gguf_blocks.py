"""Tensors of GGUF files as codes with scales of groups, without loss.

The bytes of a tensor are blocks of 32 to 256 values in rows. What a type's bits mean: ggml-quants.c
of ggml; values are those of the `gguf` package, bit for bit, for products and sums are the same.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from inflight.checkpoint.gguf import GgufTensor
from inflight.models.quantization.gguf.kinds import KINDS, UNIT_COLUMNS, BlockKind
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.stored import gguf_codebooks, gguf_plain_blocks, gguf_superblocks
from inflight_kernels.ops.linear.record_scales import Units

# Values that are unpacked at a time: temporaries then stay in the CPU cache.
_VALUES_AT_ONCE = 1 << 17

_DECODERS = gguf_plain_blocks.DECODERS | gguf_superblocks.DECODERS | gguf_codebooks.DECODERS


def grouped(stored: GgufTensor) -> GroupedMatrix | None:
    """A matrix [n, k] of one of the types in KINDS.

    Returns:
        None if a scale or a minimum is not finite.
    """
    kind, (rows, columns) = KINDS[stored.type.name], stored.shape
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows, columns // kind.group), np.float32)
    minimums = np.empty_like(scales) if kind.has_minimums else None
    _fill(stored, codes, scales, minimums)
    for found in (scales, minimums):
        if found is not None and not np.isfinite(found).all():
            return None
    return GroupedMatrix(
        torch.from_numpy(codes),
        kind.bits,
        torch.from_numpy(scales),
        None if minimums is None else torch.from_numpy(minimums),
        kind.zero,
        _levels(kind),
        units=_units(stored, kind),
    )


def shaped(shape: tuple[int, ...], kind: BlockKind) -> GroupedMatrix:
    """A matrix [n, k] of this kind on the meta device."""
    rows, columns = shape

    def factors(width: int = kind.group) -> torch.Tensor:
        return torch.empty(rows, columns // width, device="meta")

    units = None
    if kind.units is not None:
        of_minimums = factors(UNIT_COLUMNS) if kind.has_minimums else None
        units = Units(factors(UNIT_COLUMNS), of_minimums)

    return GroupedMatrix(
        torch.empty(rows, columns, dtype=torch.uint8, device="meta"),
        kind.bits,
        factors(),
        factors() if kind.has_minimums else None,
        kind.zero,
        _levels(kind),
        units=units,
    )


def _units(stored: GgufTensor, kind: BlockKind) -> Units | None:
    """What scales and minimums are multiples of; for the latter by integers below 0."""
    if kind.units is None:
        return None
    rows, columns = stored.shape
    blocks = stored.data.reshape(rows * columns // UNIT_COLUMNS, -1)

    def found(first: int) -> torch.Tensor:
        numbers = gguf_plain_blocks.halves(blocks, first)
        return torch.from_numpy(numbers).view(rows, -1)

    of_scales, of_minimums = kind.units
    return Units(found(of_scales), None if of_minimums is None else found(of_minimums))


def _levels(kind: BlockKind) -> torch.Tensor | None:
    return None if kind.levels is None else torch.tensor(kind.levels, dtype=torch.float32)


def _fill(
    stored: GgufTensor,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    minimums: npt.NDArray[np.float32] | None,
) -> None:
    """Unpack all blocks, a few at a time."""
    import gguf

    block_len, block_bytes = gguf.GGML_QUANT_SIZES[stored.type]
    blocks = stored.data.reshape(-1, block_bytes)
    groups = block_len // KINDS[stored.type.name].group
    decode = _DECODERS[stored.type.name]
    by_block = codes.reshape(-1, block_len)
    step = math.ceil(_VALUES_AT_ONCE / block_len)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        decoded, factors, offsets = decode(blocks[part])
        by_block[part] = decoded
        scales.reshape(-1, groups)[part] = factors.reshape(-1, groups)
        if minimums is not None and offsets is not None:
            minimums.reshape(-1, groups)[part] = offsets.reshape(-1, groups)
