"""MXFP4 of gpt-oss: experts of FP4 with a power of 2 for each 32 columns.

Of a layer's E experts NAME_blocks [E, n, k / 32, 16] uint8 has two codes in a byte, the column
before in the lower bits, and NAME_scales [E, n, k / 32] uint8 exponents plus 127. Rows of gate and
up, which take turns, become gate | up. The format: Open Compute Project, Microscaling Formats 1.0.
"""

from __future__ import annotations

import re
from functools import partial

import torch

from inflight.checkpoint.safetensors import StoredTensor
from inflight.models.family import MAX_EXPERTS
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.codes import unpacked
from inflight.models.quantization.layouts.floats import E2M1, E8M0
from inflight.models.quantization.layouts.layout import Layout
from inflight.models.quantization.layouts.parts import Parts, StoredMatrix

_BITS, _GROUP = 4, 32
_STACK = re.compile(r".+\.experts\.(gate_up|down)_proj")


def matrices(parts: Parts, layouts: list[Layout]) -> dict[str, StoredMatrix]:
    """By the name of the weight, NAME.N.weight of expert N.

    Args:
        parts: of the folder.
        layouts: one of this kind.

    Raises:
        ConfigError: tensors of a layer do not fit together.
    """
    found = {}
    for stem in list(parts.modules("_blocks", ("U8",))):
        match, name = _STACK.fullmatch(stem), f"{stem}_blocks"
        blocks = parts.take(name, ("U8",))
        shape = blocks.shape
        is_stack = len(shape) == 4 and 0 not in shape and shape[0] <= MAX_EXPERTS
        if match is None or not is_stack or shape[3] != _GROUP // 2:
            raise parts.error(name, f"has the shape {list(shape)}", "experts' [E, n, k / 32, 16]")
        scales = parts.take(f"{stem}_scales", ("U8",), [shape[:3]])
        for expert in range(shape[0]):
            in_turn = match[1] == "gate_up"
            read = partial(_read, parts, stem, (blocks, scales), expert, in_turn)
            size = (shape[1], shape[2] * _GROUP)
            matrix = StoredMatrix(size, _BITS, _GROUP, has_minimums=False, read=read, levels=E2M1)
            found[f"{stem}.{expert}.weight"] = matrix
    return found


def _read(
    parts: Parts,
    stem: str,
    tensors: tuple[StoredTensor, StoredTensor],
    expert: int,
    in_turn: bool,
) -> GroupedMatrix:
    blocks, scales = tensors
    exponents = scales.read_part(expert).to(torch.int64)
    factors = parts.finite(E8M0[exponents], f"{stem}_scales")
    matrix = GroupedMatrix(
        unpacked(blocks.read_part(expert).flatten(1), _BITS), _BITS, factors, levels=E2M1
    )
    if not in_turn:
        return matrix
    rows = torch.arange(matrix.shape[0])
    return matrix.rows(torch.cat([rows[::2], rows[1::2]]))
