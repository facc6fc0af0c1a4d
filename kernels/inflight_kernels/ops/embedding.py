"""Embedding lookup. Shapes: T tokens, V rows of `hidden` values."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import ID_TYPES, Int64, check, kernel, name_of, vectors_in

_THREADS = 256


def embedding(
    token_ids: Tensor, table: Tensor, *, out: Tensor, first: int = 0, pdl: bool = False
) -> None:
    """Rows of table for token_ids -> out.

    Args:
        token_ids: [T] int32 or int64. An id outside [first, first + V) yields a row of zeros, for
            the all-reduce of a vocabulary-parallel embedding.
        table: [V, hidden], of any type.
        out: [T, hidden], of the same type.
        first: token id of the table's first row.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    id_type = name_of(ID_TYPES, "token_ids", token_ids)
    num_rows, hidden = table.shape
    (num_tokens,) = token_ids.shape
    check("token_ids", token_ids, (num_tokens,), token_ids.dtype, vectors=False)
    check("table", table, (num_rows, hidden), table.dtype)
    check("out", out, (num_tokens, hidden), table.dtype)
    vectors = vectors_in("hidden", hidden, table.dtype)
    total = num_tokens * vectors
    if total >= 2**31:
        raise ValueError(f"out has {total} vectors of 16 bytes; at most 2**31 - 1 in a launch")
    if not total:
        return
    kernel("embedding", _name(id_type))(
        -(-total // _THREADS),
        _THREADS,
        token_ids,
        table,
        out,
        total,
        vectors,
        Int64(first),
        Int64(num_rows),
        pdl=pdl,
    )


def _name(id_type: str) -> str:
    return f"embedding<{id_type}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [("embedding", tuple(_name(id_type) for id_type in ID_TYPES.values()), ())]
