"""Some tokens of a step as chunks of one token each, for attention of these alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import check, kernel

_THREADS = 256


@dataclass(frozen=True, slots=True)
class TokenChunks:
    """Chunks of one token each.

    Attributes:
        query_start: [n + 1] int32: 0, 1 .. n.
        seq_lens: [n] int32, keys of each, its own included.
        block_tables: [n, B] int32.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor

    @classmethod
    def empty(cls, num_tokens: int, num_blocks: int, device: torch.device) -> TokenChunks:
        """Memory for so many tokens with up to so many blocks of keys."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        # On the meta device torch.arange would import a compiler, which takes seconds.
        query_start = torch.tensor(range(num_tokens + 1), dtype=torch.int32, device=device)
        return cls(query_start, ints(num_tokens), ints(num_tokens, num_blocks))

    def first(self, num_tokens: int) -> TokenChunks:
        """The first ones."""
        return TokenChunks(
            self.query_start[: num_tokens + 1],
            self.seq_lens[:num_tokens],
            self.block_tables[:num_tokens],
        )


def find_chunks(
    tokens: Tensor,
    positions: Tensor,
    query_start: Tensor,
    block_tables: Tensor,
    *,
    out: TokenChunks,
    pdl: bool = False,
) -> None:
    """Find the keys of some tokens of a step.

    Args:
        tokens: [s] int64, rows of the step. One that does not exist has no keys.
        positions: [T] int64, of all tokens in their sequences.
        query_start: [n + 1] int32; chunk i has tokens query_start[i]:query_start[i + 1].
        block_tables: [n, B] int32, of the chunks.
        out: of s chunks, with at least as many blocks as a token has keys in.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    (num_rows,), (num_tokens,), (num_chunks, num_blocks) = (
        tokens.shape,
        positions.shape,
        block_tables.shape,
    )
    check("tokens", tokens, (num_rows,), torch.int64, vectors=False)
    check("positions", positions, (num_tokens,), torch.int64, vectors=False)
    check("query_start", query_start, (num_chunks + 1,), torch.int32, vectors=False)
    check("block_tables", block_tables, (num_chunks, num_blocks), torch.int32, vectors=False)
    own_blocks = out.block_tables.shape[1]
    check("out.seq_lens", out.seq_lens, (num_rows,), torch.int32, vectors=False)
    check("out.block_tables", out.block_tables, (num_rows, own_blocks), torch.int32, vectors=False)
    if not num_rows:
        return
    kernel("attention_rows", _NAME)(
        num_rows,
        _THREADS,
        tokens,
        positions,
        query_start,
        block_tables,
        out.seq_lens,
        out.block_tables,
        num_tokens,
        num_chunks,
        num_blocks,
        own_blocks,
        pdl=pdl,
    )


_NAME = "find_chunks"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [("attention_rows", (_NAME,), ())]
