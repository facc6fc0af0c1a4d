"""Finds the matrices of codes with scales of groups in a folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from inflight.checkpoint.safetensors import StoredTensor
from inflight.models.quantization.layouts import awq, bitsandbytes, gptq, mxfp4, nvfp4, packed
from inflight.models.quantization.layouts.layout import Kind, Layout
from inflight.models.quantization.layouts.parts import Parts, StoredMatrix

_READERS: dict[Kind, Callable[[Parts, list[Layout]], dict[str, StoredMatrix]]] = {
    "awq": awq.matrices,
    "bitsandbytes": bitsandbytes.matrices,
    "gptq": gptq.matrices,
    "mxfp4": mxfp4.matrices,
    "nvfp4": nvfp4.matrices,
    "packed": packed.matrices,
}


def find_matrices(
    stored: Mapping[str, StoredTensor],
    layouts: Sequence[Layout],
    dtypes: Collection[str],
    path: Path,
) -> tuple[dict[str, StoredMatrix], dict[str, StoredTensor]]:
    """The matrices by the names of their weights, and the tensors that belong to none of them.

    Args:
        stored: the folder's tensors.
        layouts: those that its config.json names.
        dtypes: of weights with 8 bits that are not in groups.
        path: of the folder, for errors.

    Raises:
        ConfigError: tensors of a weight are missing, of other types or shapes, or do not fit
            together; or some belong to no weight.
    """
    parts = Parts(stored, path)
    found: dict[str, StoredMatrix] = {}
    for kind in sorted({layout.kind for layout in layouts}):
        found |= _READERS[kind](parts, [layout for layout in layouts if layout.kind == kind])
    return found, parts.rest(dtypes)
