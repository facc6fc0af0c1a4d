"""One step's work as data: chunks for the scheduler, flat arrays for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.core.request import Candidate
from inflight.core.sequence import Sequence

# What a runner says in `StepOutput.errors`.
NOT_FINITE = "numerical: the model's output is not finite for this sequence"
NO_ALLOWED_TOKENS = "numerical: the request's bans and allowed tokens leave no token to sample"


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [start, start + length) of a sequence.

    A prompt, a part of one, a decode step (length 1) and the verification of k drafted tokens
    (length 1 + k) are the same thing. The last two may be scheduled before the host knows their
    first token: then start >= len(sequence.token_ids), and the runner takes the token that an
    earlier step chose from the device. Where that step verified drafts, start is where the chunk
    begins if all of them were right, and it begins earlier by as many as were not.

    Attributes:
        samples: whether the chunk reaches the last token of its sequence, so that the next follows.
        generation: of the sequence when the chunk was scheduled. Once they differ, the sequence has
            lost the blocks that the chunk writes to, and what it chooses is nobody's.
        num_drafts: tokens at its end that the runner's drafter guesses, or fewer if it has no more.
        num_scores: its last tokens, but for the one after which a token is chosen, of which the
            next token's log-probability is wanted: that of the prompt. A chunk has drafts or
            scores, if any, never both.
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
        """The prompt's tokens whose log-probabilities are wanted: num_scores of them."""
        end = self.end + 1 - self.samples
        return self.sequence.request.prompt_ids[end - self.num_scores : end]


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
        sample_rows: [s] int64, rows whose logits are wanted, in chunk order: the last ones of each
            chunk. One for each score; then, with `samples`, one for each draft and the last one.
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

    def arrays(self, block_size: int, drafts: list[list[int]] | None = None) -> BatchArrays:
        """The batch as flat arrays; the host must know all its tokens.

        Args:
            block_size: tokens per block.
            drafts: for each chunk at most num_drafts tokens that it ends with; None for no drafts.

        Raises:
            ValueError: a chunk's token is not known yet.
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

        tables = [chunk.sequence.blocks for chunk in self.chunks]
        widths = _int64([len(table) for table in tables])
        block_tables = np.zeros((num_chunks, max(widths, default=0)), np.int64)
        filled = np.arange(block_tables.shape[1]) < widths[:, np.newaxis]
        block_tables[filled] = np.fromiter(chain.from_iterable(tables), np.int64, int(widths.sum()))
        rows = np.repeat(np.arange(num_chunks), lengths)
        slot_mapping = block_tables[rows, positions // block_size] * block_size
        slot_mapping += positions % block_size
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
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=starts + lengths,
            block_tables=block_tables,
            sample_rows=sample_rows,
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner returns: per chunk, the tokens chosen (none if the chunk does not sample).

    Attributes:
        token_ids: one list per chunk: the drafts that were right, and the token that follows them.
        logprobs: of those tokens, under the model's own distribution (before penalties and
            temperature).
        errors: chunk index -> what failed for that sequence alone.
        num_drafted: chunk index -> drafts that were looked at, right or not.
        candidates: chunk index -> for each of its tokens, what num_candidates asks for.
        prompt_candidates: chunk index -> for each of its scores, what num_prompt_logprobs asks for.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    errors: dict[int, str] = field(default_factory=dict)
    num_drafted: dict[int, int] = field(default_factory=dict)
    candidates: dict[int, list[list[Candidate]]] = field(default_factory=dict)
    prompt_candidates: dict[int, list[list[Candidate]]] = field(default_factory=dict)


class Committed(msgspec.Struct, frozen=True, gc=False):
    """What a committed step did for one sequence.

    Attributes:
        sequence: which one; it has the tokens by now.
        token_ids: tokens appended to it; none if the step computed a part of its prompt only, or if
            it is a beam, whose group chooses its next token.
        logprobs: of those tokens, under the model's own distribution.
        candidates: for each of those tokens, what num_candidates asks for; of a beam, for the token
            to be chosen next. Empty if it asks for nothing.
        prompt_candidates: for each token of its prompt that the step scored, what
            num_prompt_logprobs asks for.
    """

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[float]
    candidates: list[list[Candidate]] = []
    prompt_candidates: list[list[Candidate]] = []


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that was computed while it was launched (see `runner.PendingStep`)."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


def _int64(values: list[int] | list[bool]) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)
