"""NF4 and FP4 of bitsandbytes: a table of 16 values, and a scale for each block of a flat weight.

A weight is uint8 [n * k / 2, 1], two codes in a byte, the first in the HIGHER bits; the bytes may
be stored as another type. Beside x.weight are x.weight.quant_map [16], the table;
x.weight.quant_state.bitsandbytes__nf4 or __fp4, JSON in bytes; and x.weight.absmax, the scales of
blocks. Scales may be quantised in turn (`nested`): absmax are then codes of the table
x.weight.nested_quant_map [256], times x.weight.nested_absmax for each block of scales, plus an
offset.

Blocks go on from one row to the next: where they are not a part of a row, the groups of the matrix
are the largest runs of columns of which each lies within one block.
"""

from __future__ import annotations

import math
from functools import partial

import msgspec
import torch

from inflight.checkpoint.safetensors import WEIGHTS, StoredTensor
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.layout import Layout
from inflight.models.quantization.layouts.parts import MIN_GROUP, Parts, StoredMatrix
from inflight.models.quantization.matrix import Matrix

_BITS = 4
_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_MAX_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 16
_ITEM_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}


class _State(msgspec.Struct):
    """The part of a quant_state that says what a weight is."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def matrices(parts: Parts, layouts: list[Layout]) -> dict[str, StoredMatrix]:
    """By the name of the weight.

    Args:
        parts: of the folder.
        layouts: one of this kind.

    Raises:
        ConfigError: tensors of a weight do not fit together.
    """
    return {
        weight: _matrix(parts, weight, f"{weight}{suffix}")
        for suffix in _STATES
        for weight in list(parts.modules(suffix, ("U8",)))
    }


def _matrix(parts: Parts, weight: str, state_name: str) -> StoredMatrix:
    state = _state(parts, state_name)
    (n, k), block = state.shape, state.blocksize
    num_blocks = -(-n * k // block)
    packed = parts.take(weight, tuple(_ITEM_BYTES))
    num_bytes = math.prod(packed.shape) * _ITEM_BYTES[packed.dtype]
    if num_bytes != -(-n * k // 2):
        raise parts.error(weight, f"has {num_bytes} bytes", f"{-(-n * k // 2)}, for {[n, k]}")
    levels = parts.take(f"{weight}.quant_map", WEIGHTS, [(16,)])
    nested: tuple[StoredTensor, ...] = ()
    is_nested = parts.has(f"{weight}.nested_absmax")
    if is_nested:
        if not 0 < state.nested_blocksize <= _MAX_BLOCK:
            found = f"has nested_blocksize {state.nested_blocksize}"
            raise parts.error(state_name, found, f"1 to {_MAX_BLOCK}")
        count = -(-num_blocks // state.nested_blocksize)
        nested = (
            parts.take(f"{weight}.nested_absmax", ("F32",), [(count,)]),
            parts.take(f"{weight}.nested_quant_map", ("F32",), [(256,)]),
        )
    absmax = parts.take(f"{weight}.absmax", ("U8",) if is_nested else ("F32",), [(num_blocks,)])
    read = partial(_read, parts, weight, state, (packed, levels, absmax), nested)
    group, any_levels = math.gcd(k, block), torch.arange(1 << _BITS).float()
    return StoredMatrix((n, k), _BITS, group, has_minimums=False, read=read, levels=any_levels)


def _state(parts: Parts, name: str) -> _State:
    stored = parts.take(name, ("U8",))
    if math.prod(stored.shape) > _MAX_STATE_BYTES:
        raise parts.error(name, f"has the shape {list(stored.shape)}", "a few hundred bytes")
    try:
        state = msgspec.json.decode(bytes(stored.read().flatten().tolist()), type=_State)
    except msgspec.DecodeError as error:
        raise parts.error(name, f"cannot be read ({error})", "JSON") from None
    if min(state.shape) < 1 or not 0 < state.blocksize <= _MAX_BLOCK:
        found = f"has shape {list(state.shape)} and blocksize {state.blocksize}"
        raise parts.error(name, found, f"rows and columns, and blocks of 1 to {_MAX_BLOCK}")
    if not math.isfinite(state.nested_offset):
        raise parts.error(name, f"has nested_offset {state.nested_offset}", "a number")
    return state


def _read(
    parts: Parts,
    weight: str,
    state: _State,
    tensors: tuple[StoredTensor, StoredTensor, StoredTensor],
    nested: tuple[StoredTensor, ...],
) -> Matrix:
    packed, levels, absmax = tensors
    (n, k), block = state.shape, state.blocksize
    octets = packed.read().contiguous().view(torch.uint8).flatten()
    codes = torch.stack([octets >> 4, octets & 15], -1).flatten()[: n * k].view(n, k)
    scales = absmax.read()
    if nested:
        factors, table = (tensor.read() for tensor in nested)
        by_scale = factors.repeat_interleave(state.nested_blocksize)[: len(scales)]
        scales = table[scales.to(torch.int64)] * by_scale + state.nested_offset
    scales = parts.finite(scales, f"{weight}.absmax")
    table = parts.finite(levels.read(), f"{weight}.quant_map")
    group = math.gcd(k, block)
    if group < MIN_GROUP:
        by_value = scales.repeat_interleave(block)[: n * k].view(n, k)
        return table[codes.to(torch.int64)] * by_value
    by_group = scales.repeat_interleave(block // group)[: n * k // group].view(n, k // group)
    return GroupedMatrix(codes, _BITS, by_group, levels=table)
