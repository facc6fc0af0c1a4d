"""Copying and clearing in the paged KV cache; `rope` writes the KV of a step.

Shapes: caches [..., num_blocks, block_size, G, D]; the leading dimensions (layers, keys and values)
are all treated the same. Slot s is block s // block_size, offset s % block_size.
"""

from __future__ import annotations

import math

from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    ID_TYPES,
    VECTOR_BYTES,
    Int64,
    check,
    kernel,
    name_of,
    vectors_in,
)

MAX_PAIRS = 192
"""Maximum copies per launch: 96 KiB of staging memory, available on all GPUs since Ampere."""

_MAX_THREADS = 128
_MIN_THREADS = 32
# More per block would allow too few blocks to saturate the memory bandwidth.
_SHARED_AIM = 48 * 1024


def copy_blocks(caches: Tensor, sources: Tensor, targets: Tensor, *, pdl: bool = False) -> None:
    """Copy blocks `sources` to blocks `targets` in each layer, in place.

    All sources are read before any target is written, so a block may be among both.

    Args:
        caches: [..., num_blocks, block_size, G, D], of any type.
        sources, targets: [n] int32 or int64, n <= MAX_PAIRS; no block twice among the targets.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or too many pairs.
    """
    id_type = name_of(ID_TYPES, "sources", sources)
    num_blocks, *block_shape = caches.shape[-4:]
    num_layers = math.prod(caches.shape[:-4])
    (num_pairs,) = sources.shape
    check("caches", caches, tuple(caches.shape), caches.dtype)
    check("sources", sources, (num_pairs,), sources.dtype, vectors=False)
    check("targets", targets, (num_pairs,), sources.dtype, vectors=False)
    if num_pairs > MAX_PAIRS:
        raise ValueError(
            f"{num_pairs} copies; at most {MAX_PAIRS} per launch. Split them into several calls, "
            "none of which may overwrite a block that a later one reads"
        )
    vectors = vectors_in("a block", math.prod(block_shape), caches.dtype)
    if not num_pairs or not vectors or not num_layers:
        return
    threads = _MAX_THREADS
    while threads > _MIN_THREADS and threads * num_pairs * VECTOR_BYTES > _SHARED_AIM:
        threads //= 2
    kernel("cache", f"copy_blocks<{id_type}>")(
        (-(-vectors // threads), num_layers),
        threads,
        caches,
        sources,
        targets,
        num_pairs,
        vectors,
        Int64(num_blocks * vectors),
        shared=threads * num_pairs * VECTOR_BYTES,
        pdl=pdl,
    )


def clear_slots(caches: Tensor, slots: Tensor, *, pdl: bool = False) -> None:
    """Zero `slots` in each layer, in place.

    Args:
        caches: [..., num_blocks, block_size, G, D], of any type.
        slots: [n] int32 or int64; negative ones are skipped.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    id_type = name_of(ID_TYPES, "slots", slots)
    num_blocks, block_size, num_kv_heads, head_dim = caches.shape[-4:]
    num_layers = math.prod(caches.shape[:-4])
    (num_slots,) = slots.shape
    check("caches", caches, tuple(caches.shape), caches.dtype)
    check("slots", slots, (num_slots,), slots.dtype, vectors=False)
    vectors = vectors_in("a slot", num_kv_heads * head_dim, caches.dtype)
    if not num_slots or not vectors or not num_layers:
        return
    kernel("cache", f"clear_slots<{id_type}>")(
        (num_slots, -(-vectors // _MAX_THREADS), num_layers),
        _MAX_THREADS,
        caches,
        slots,
        vectors,
        Int64(num_blocks * block_size * vectors),
        pdl=pdl,
    )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = tuple(
        f"{op}<{id_type}>" for op in ("copy_blocks", "clear_slots") for id_type in ID_TYPES.values()
    )
    return [("cache", names, ())]
