"""A step's batch: chunks for the scheduler, flat arrays for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.core.kernel_blocks import KernelBlocks
from inflight.core.request import Candidate
from inflight.core.sequence import Sequence

# Texts of `StepOutput.errors`.
NOT_FINITE = "numerical: the model's output is not finite for this sequence"
NO_ALLOWED_TOKENS = "numerical: the request's bans and allowed tokens leave no token to sample"


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + length) of a sequence.

    Prefill, chunked prefill, decode (length 1) and the verification of k draft tokens (length
    1 + k) are the same thing. The last two may be scheduled before the host knows their first
    token: then start >= len(sequence.token_ids), and the runner takes the token sampled by an
    earlier step from the device. If that step verified drafts, start assumes that all were
    accepted; each rejected draft moves the chunk back by one.

    Attributes:
        samples: whether the chunk reaches the sequence's last token, so that a token is sampled.
        generation: the sequence's generation when the chunk was scheduled. Once they differ, the
            sequence has lost the blocks that the chunk writes to, and its sampled tokens are
            dropped.
        num_drafts: maximum number of draft tokens at its end; the runner's drafter may find fewer.
        num_scores: number of its last tokens, not counting the one that samples, for which the
            logprob of the next prompt token is requested. A chunk has drafts or scores, never both.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    generation: int = 0
    num_drafts: int = 0
    num_scores: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_stale(self) -> bool:
        return self.generation != self.sequence.generation

    @property
    def scored_ids(self) -> list[int]:
        """The num_scores prompt tokens whose logprobs are requested."""
        end = self.end + 1 - self.samples
        return self.sequence.request.prompt_ids[end - self.num_scores : end]


@dataclass(frozen=True, slots=True)
class TableArrays:
    """The block tables of a batch's sequences, in kernel blocks. T tokens, n chunks, B blocks in
    the longest table.

    Attributes:
        slot_mapping: [T] int64, block * block_size + offset where each token's KV goes.
        block_tables: [n, B] int64, padded with 0.
    """

    slot_mapping: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """A batch as flat arrays. T tokens, n chunks.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        tables: by KV table (see `kv.layout`).
        query_start: [n + 1] int64; chunk i has rows query_start[i]:query_start[i + 1].
        seq_lens: [n] int64, tokens in the KV cache after this step (chunk.end).
        sample_rows: [s] int64, rows that need logits, in chunk order: the last ones of each chunk.
            One for each score; then, with `samples`, one for each draft and the last one.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tables: tuple[TableArrays, ...]
    query_start: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]


class Store(NamedTuple):
    """A block to copy to host memory.

    Attributes:
        ticket: number of the copy; the runner returns it once the copy has ended.
        block: of the pool, full and in the prefix cache.
        slot: in host memory.
    """

    ticket: int
    block: int
    slot: int


class Load(NamedTuple):
    """A block to copy from host memory.

    Attributes:
        slot: in host memory.
        block: of the pool.
    """

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of one step, and the KV blocks to copy before it.

    Attributes:
        chunks: of the step.
        copies: (source, target) of blocks in the pool, copied after the loads of this and earlier
            steps that this one reads.
        loads: blocks to copy from host memory. Later steps read them; this one too with
            `reads_loads`.
        stores: blocks to copy to host memory. Nothing writes to them until their tickets have been
            returned.
        reads_loads: whether this step reads blocks that it loads.
        shares_prefixes: whether so many sequences have found their prefixes in the cache that a
            step may gain from reading common ones once.
    """

    chunks: list[Chunk]
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    reads_loads: bool = False
    shares_prefixes: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def arrays(
        self,
        block_size: int,
        drafts: list[list[int]] | None = None,
        kernel_blocks: tuple[KernelBlocks, ...] = (KernelBlocks(),),
    ) -> BatchArrays:
        """The batch as flat arrays; all its tokens must be committed.

        Args:
            block_size: tokens per kernel block.
            drafts: for each chunk at most num_drafts tokens at its end; None for no drafts.
            kernel_blocks: by KV table, how its blocks are split.

        Raises:
            ValueError: a chunk's token is not committed yet.
        """
        num_chunks = len(self.chunks)
        if drafts is None:
            drafts = [[]] * num_chunks
        starts = _int64([chunk.start for chunk in self.chunks])
        known_lengths = [chunk.length - chunk.num_drafts for chunk in self.chunks]
        num_drafts = _int64([len(tokens) for tokens in drafts])
        lengths = _int64(known_lengths) + num_drafts
        query_start = np.zeros(num_chunks + 1, np.int64)
        np.cumsum(lengths, out=query_start[1:])
        num_tokens = int(query_start[-1])
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lengths)
        known = (
            chunk.sequence.token_ids[chunk.start : chunk.start + length] + guessed
            for chunk, length, guessed in zip(self.chunks, known_lengths, drafts, strict=True)
        )
        token_ids = np.fromiter(chain.from_iterable(known), np.int64, num_tokens)

        rows = np.repeat(np.arange(num_chunks), lengths)
        tables = []
        for index, split in enumerate(kernel_blocks):
            block_tables = _padded([split.ids(one.sequence.tables[index]) for one in self.chunks])
            slot_mapping = block_tables[rows, positions // block_size] * block_size
            tables.append(TableArrays(slot_mapping + positions % block_size, block_tables))
        samples = _int64([chunk.samples for chunk in self.chunks])
        num_wanted = samples * (1 + num_drafts)
        num_wanted += _int64([chunk.num_scores for chunk in self.chunks])
        before = np.cumsum(num_wanted) - num_wanted
        sample_rows = np.arange(int(num_wanted.sum())) + np.repeat(
            query_start[1:] - num_wanted - before, num_wanted
        )
        return BatchArrays(
            token_ids=token_ids,
            positions=positions,
            tables=tuple(tables),
            query_start=query_start,
            seq_lens=starts + lengths,
            sample_rows=sample_rows,
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A runner's result: per chunk, the sampled tokens (none if the chunk does not sample).

    Attributes:
        token_ids: one list per chunk: the accepted drafts, and the token after them.
        logprobs: of those tokens, under the model's own distribution (before penalties and
            temperature).
        errors: chunk index -> an error of that sequence alone.
        num_drafted: chunk index -> verified drafts, accepted or not.
        from_outputs: chunks whose verified drafts are from the outputs of earlier requests.
        num_proposed: chunk index -> drafts that the drafter had for the sequence, scheduled or not.
            Only from runners that schedule drafts before they know that number.
        would_accept: of these, the chunks whose last token is the first draft that had no row.
        candidates: chunk index -> for each of its tokens, the num_candidates top logprobs.
        prompt_candidates: chunk index -> for each of its scores, num_prompt_logprobs top logprobs.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    errors: dict[int, str] = field(default_factory=dict)
    num_drafted: dict[int, int] = field(default_factory=dict)
    from_outputs: set[int] = field(default_factory=set)
    num_proposed: dict[int, int] = field(default_factory=dict)
    would_accept: set[int] = field(default_factory=set)
    candidates: dict[int, list[list[Candidate]]] = field(default_factory=dict)
    prompt_candidates: dict[int, list[list[Candidate]]] = field(default_factory=dict)


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The result of a committed step for one sequence.

    Attributes:
        sequence: the sequence; the tokens have been appended.
        token_ids: the appended tokens; none if the step computed only a part of its prompt, or for
            a beam, whose group selects its next token.
        logprobs: of those tokens, under the model's own distribution.
        candidates: num_candidates top logprobs for each of those tokens; for a beam, for its next
            token. Empty if not requested.
        prompt_candidates: num_prompt_logprobs top logprobs for each scored token of its prompt.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[float]
    candidates: list[list[Candidate]] = []
    prompt_candidates: list[list[Candidate]] = []


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that has run by the time `launch` returns (see `runner.PendingStep`)."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


def _int64(values: list[int] | list[bool]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def _padded(tables: list[list[int]]) -> npt.NDArray[np.int64]:
    """[n, B] of n block tables of different lengths, padded with 0."""
    widths = _int64([len(table) for table in tables])
    padded = np.zeros((len(tables), max(widths, default=0)), np.int64)
    filled = np.arange(padded.shape[1]) < widths[:, np.newaxis]
    padded[filled] = np.fromiter(chain.from_iterable(tables), np.int64, int(widths.sum()))
    return padded
