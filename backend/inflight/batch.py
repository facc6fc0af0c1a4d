"""One step's work as data: chunks for the scheduler, flat arrays for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inflight.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, start + length) of a sequence.

    A prompt, a part of one, and a decode step (length 1) are the same thing.
    """

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last known token, so that the next one follows."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """A batch as a device wants it. T tokens, n chunks, B blocks in the longest table.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        slot_mapping: [T] int64, block * block_size + offset where each token's KV goes.
        query_start: [n + 1] int64, chunk i owns rows query_start[i]:query_start[i + 1].
        seq_lens: [n] int64, tokens in the KV cache after this step (chunk.end).
        block_tables: [n, B] int64, padded with 0.
        sample_rows: [s] int64, rows whose logits choose a token: the last row of each chunk
            with `samples`, in chunk order.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of one step, and the KV blocks to copy before it (source, target)."""

    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def arrays(self, block_size: int) -> BatchArrays:
        lengths = np.array([chunk.length for chunk in self.chunks], np.int64)
        query_start = np.zeros(len(self.chunks) + 1, np.int64)
        np.cumsum(lengths, out=query_start[1:])
        num_tokens = int(query_start[-1])
        token_ids = np.empty(num_tokens, np.int64)
        positions = np.empty(num_tokens, np.int64)
        slot_mapping = np.empty(num_tokens, np.int64)
        width = max((len(chunk.sequence.blocks) for chunk in self.chunks), default=0)
        block_tables = np.zeros((len(self.chunks), width), np.int64)
        for i, chunk in enumerate(self.chunks):
            rows = slice(query_start[i], query_start[i + 1])
            table = chunk.sequence.blocks
            block_tables[i, : len(table)] = table
            token_ids[rows] = chunk.sequence.token_ids[chunk.start : chunk.end]
            positions[rows] = np.arange(chunk.start, chunk.end)
            slot_mapping[rows] = (
                block_tables[i, positions[rows] // block_size] * block_size
                + positions[rows] % block_size
            )
        samples = np.array([chunk.samples for chunk in self.chunks], bool)
        return BatchArrays(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=np.array([chunk.end for chunk in self.chunks], np.int64),
            block_tables=block_tables,
            sample_rows=query_start[1:][samples] - 1,
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner returns: per chunk, the tokens chosen (none if the chunk does not sample).

    Attributes:
        token_ids: one list per chunk.
        logprobs: of those tokens, under the model's own distribution (before penalties and
            temperature).
        errors: chunk index -> what failed for that sequence alone.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    errors: dict[int, str] = field(default_factory=dict)
