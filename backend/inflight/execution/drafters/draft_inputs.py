"""Inputs of a drafter's forward pass: one token per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.core.batch import Chunk
from inflight.kv.cache import KVCache
from inflight_kernels.torch_ops import transformer as ops

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of a forward pass over T tokens.

    Attributes:
        token_ids, positions, slot_mapping: [T] int64.
        plan: of attention.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    plan: ops.AttentionPlan

    @classmethod
    def of(
        cls,
        token_ids: Ints,
        positions: Ints,
        query_start: Ints,
        block_tables: Ints,
        block_size: int,
        dtype: torch.dtype,
    ) -> DraftInputs:
        """Inputs for n chunks, each attending to its sequence up to itself.

        Args:
            token_ids, positions: [T].
            query_start: [n + 1]; chunk i has rows query_start[i]:query_start[i + 1], at least one.
            block_tables: [n, B].
            block_size: tokens per block.
            dtype: of activations.
        """
        chunks = np.repeat(np.arange(len(block_tables)), np.diff(query_start))
        slots = block_tables[chunks, positions // block_size] * block_size
        seq_lens = positions[query_start[1:] - 1] + 1
        return cls(
            torch.from_numpy(token_ids),
            torch.from_numpy(positions),
            torch.from_numpy(slots + positions % block_size),
            ops.AttentionPlan(block_tables, query_start, seq_lens, block_size, dtype),
        )

    @classmethod
    def one_each(
        cls,
        chunks: list[Chunk],
        tokens: list[int],
        offset: int,
        cache: KVCache,
        dtype: torch.dtype,
    ) -> DraftInputs:
        """One token of each chunk's sequence, `offset` positions after the chunk's first.

        Args:
            chunks: n of them.
            tokens: n.
            offset: in tokens.
            cache: to which the rows are written.
            dtype: of activations.
        """
        tables = [chunk.sequence.tables[0] for chunk in chunks]
        block_tables = np.zeros((len(chunks), max(map(len, tables))), np.int64)
        for row, table in zip(block_tables, tables, strict=True):
            row[: len(table)] = table
        positions = np.array([chunk.start + offset for chunk in chunks], np.int64)
        token_ids = np.array(tokens, np.int64)
        query_start = np.arange(len(chunks) + 1)
        block_size = cache.block_size
        return cls.of(token_ids, positions, query_start, block_tables, block_size, dtype)
