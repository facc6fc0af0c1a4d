"""Persistent batch state on the device, and the kernels that apply the host's updates to it.

Shapes: a step has n chunks with T tokens in total and s rows of logits; N is the maximum of n and
s. `slots` sequences have state, with block tables of B blocks and up to K drafts. A step arrives as
one int32 buffer (`StepLayout`), in one copy; everything else that its kernels need is already on
the device or derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.sampling import ROW_PARAMS, SamplingOutputs
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import Int64, check, kernel

_THREADS = 128
_MAX_THREADS = 256

# Of a launch of begin_step, at most.
_TABLES = 2

FROM_DEVICE = -1
"""In a step, a value that only the device knows: a chunk's first token, which is its sequence's
last one; a later token, which is a draft; a chunk's start, the position of the first token."""

RESULT_ROWS = 6
"""Rows that `end_step` writes: token, logprob (bits of a float32) and status of each accepted row;
the number of accepted rows of each chunk; and, with K > 0, the number of drafts that its sequence
had for the step, or NOT_DRAFTED if nothing has drafted for it, and 1 if the chunk's last token is
the draft after those that it verified, else 0."""

NOT_DRAFTED = -1
"""In `BatchState.drafts`, the value of all drafts of a sequence until a drafter writes them."""

NO_DRAFT = -2
"""The same of a draft that the drafter does not propose; all later ones are missing, too."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Layout of a step's int32 buffer.

        header            n, index into the ring of results, T, s
        slots             [N] slot of each chunk's sequence
        sample_slots      [N] the same; negative if no token is sampled
        starts            [N] position of each chunk's first token, or FROM_DEVICE
        query_start       [N + 1] chunk i has tokens query_start[i]:query_start[i + 1]; T at the end
        row_start         [N + 1] chunk i has logits rows row_start[i]:row_start[i + 1]: its last
                          token, one more before it per draft, or more of a prompt
        given             [N] the prompt token after row i, whose logprob is requested; negative if
                          a token is sampled. A chunk with such rows has no drafts, and besides
                          them at most one row, its last
        bias_starts       [N + 1] biases[bias_starts[i]:bias_starts[i + 1]] are added to row i
        mask_rows         [N] index of the token mask of row i; negative for none
        num_top_logprobs  [N] top tokens to report for row i; negative for nothing
        tokens            [T] ids, or FROM_DEVICE; followed by arbitrary data

    Attributes:
        max_rows: N.
        max_tokens: maximum T.
        extra: number of int32 after the tokens.
    """

    max_rows: int
    max_tokens: int
    extra: int = 0

    @property
    def offsets(self) -> dict[str, tuple[int, int]]:
        """Name -> (first, end) in the buffer."""
        sizes = {
            "header": 4,
            "slots": self.max_rows,
            "sample_slots": self.max_rows,
            "starts": self.max_rows,
            "query_start": self.max_rows + 1,
            "row_start": self.max_rows + 1,
            "given": self.max_rows,
            "bias_starts": self.max_rows + 1,
            "mask_rows": self.max_rows,
            "num_top_logprobs": self.max_rows,
            "tokens": self.max_tokens + self.extra,
        }
        found = {}
        end = 0
        for name, size in sizes.items():
            found[name] = (end, end + size)
            end += size
        return found

    @property
    def size(self) -> int:
        """Size of the buffer, in int32."""
        return self.offsets["tokens"][1]


class Step:
    """A step's buffer on the device, and its sections by the names of `StepLayout`; num_tokens is
    T, of its header."""

    def __init__(self, layout: StepLayout, device: torch.device | str) -> None:
        self.buffer = torch.zeros(layout.size, dtype=torch.int32, device=device)
        parts = {name: self.buffer[a:b] for name, (a, b) in layout.offsets.items()}
        self.header = parts["header"]
        self.num_tokens = self.header[2:3]
        self.slots = parts["slots"]
        self.sample_slots = parts["sample_slots"]
        self.starts = parts["starts"]
        self.query_start = parts["query_start"]
        self.row_start = parts["row_start"]
        self.given = parts["given"]
        self.bias_starts = parts["bias_starts"]
        self.mask_rows = parts["mask_rows"]
        self.num_top_logprobs = parts["num_top_logprobs"]
        self.tokens = parts["tokens"]


@dataclass(frozen=True, slots=True)
class TableState:
    """Block tables on the device.

    Attributes:
        tables: [slots, B] int32, of the sequences.
        step_tables: [N, B] int32, of the step's chunks.
        slot_mapping: [T] int64, of the step.
    """

    tables: Tensor
    step_tables: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of the buffers of a `BatchState`.

    Attributes:
        num_slots: sequences.
        table_width: B.
        ring: steps whose results are kept.
        num_drafts: K.
        history_length: tokens kept of each sequence; 0 for none.
        num_tables: block tables of a sequence.
    """

    num_slots: int
    table_width: int
    ring: int
    num_drafts: int = 0
    history_length: int = 0
    num_tables: int = 1


class BatchState:
    """State of the running sequences on the device, and the inputs of a step's kernels.

    Attributes:
        by_table: one TableState or more: layers may differ in the tokens that they keep.
        tables, step_tables, slot_mapping: those of the first.
        all_tables: [num_tables * slots, B] int32, of all sequences and tables.
        last_tokens: [slots] int64, the last sampled token.
        last_positions: [slots] int32, its position.
        drafts: [slots, K] int32, the draft tokens after it; NOT_DRAFTED or NO_DRAFT for none.
        row_params: [slots, ROW_PARAMS words] int32, sampling parameters.
        history: [slots, length] int32, tokens of the sequences up to the last one; None if no
            drafter needs it.
        copies: [slots, 2] int32, where drafts from the history came from (`draft_ngram`); negative
            for a new sequence. None without a history.
        token_ids, positions: [T] int64, of the step.
        seq_lens: [N] int32, tokens in the KV cache after the step; 0 past the chunks.
        sample_rows: [N] int64, the tokens whose next token is sampled or given.
        step_row_params: [N, ROW_PARAMS words] int32, of these rows; defaults if given.
        sample_positions: [N] int64, positions of the tokens sampled or given.
        tail_starts, tail_lengths: [N] int32, the drafts before a row, within the step's tokens.
        chosen: [N] int64; logprobs: [N] float32; statuses: [N] int32: outputs of `sample`.
        count_slots: [N] int32, slot in which to count the sampled token; negative for none.
        results: [ring, RESULT_ROWS, N] int32 in pinned host memory.
    """

    def __init__(self, layout: StepLayout, sizes: StateSizes, device: torch.device | str) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_slots, num_tables = sizes.num_slots, sizes.num_tables
        rows, tokens, words = layout.max_rows, layout.max_tokens, ROW_PARAMS.itemsize // 4
        self.all_tables = empty(num_tables * num_slots, sizes.table_width, dtype=torch.int32)
        self.by_table = [
            TableState(tables, empty(rows, sizes.table_width, dtype=torch.int32), empty(tokens))
            for tables in self.all_tables.view(num_tables, num_slots, sizes.table_width)
        ]
        self.tables = self.by_table[0].tables
        self.step_tables = self.by_table[0].step_tables
        self.slot_mapping = self.by_table[0].slot_mapping
        self.last_tokens = empty(num_slots)
        self.last_positions = empty(num_slots, dtype=torch.int32)
        self.drafts = empty(num_slots, sizes.num_drafts, dtype=torch.int32).fill_(NOT_DRAFTED)
        self.row_params = empty(num_slots, words, dtype=torch.int32)
        self.history: Tensor | None = None
        self.copies: Tensor | None = None
        if sizes.history_length:
            self.history = empty(num_slots, sizes.history_length, dtype=torch.int32)
            self.copies = empty(num_slots, 2, dtype=torch.int32).fill_(-1)
        self.token_ids = empty(tokens)
        self.positions = empty(tokens)
        self.seq_lens = empty(rows, dtype=torch.int32)
        self.sample_rows = empty(rows)
        self.step_row_params = empty(rows, words, dtype=torch.int32)
        self.sample_positions = empty(rows)
        self.tail_starts = empty(rows, dtype=torch.int32)
        self.tail_lengths = empty(rows, dtype=torch.int32)
        self.chosen = empty(rows)
        self.logprobs = empty(rows, dtype=torch.float32)
        self.statuses = empty(rows, dtype=torch.int32)
        self.count_slots = empty(rows, dtype=torch.int32)
        # Written by the device directly: a separate copy of a few kilobytes would cost more.
        self.results = torch.zeros(
            sizes.ring, RESULT_ROWS, rows, dtype=torch.int32, pin_memory=torch.cuda.is_available()
        )

    def sampled(self, num_rows: int) -> SamplingOutputs:
        """Output buffers of `sample` for the first rows."""
        return SamplingOutputs(
            self.chosen[:num_rows], self.logprobs[:num_rows], self.statuses[:num_rows]
        )


def upload(source: Tensor, step: Tensor, *, pdl: bool = False) -> None:
    """source -> step, read from host memory by a kernel: a copy of so little by the copy engine
    takes longer, as the kernels before and after it wait for that engine.

    Args:
        source: [m] int32 in pinned host memory. The host must not write it before the kernel ends.
        step: [m] int32.
        pdl: see `Kernel`; the source is read during the preceding kernel.

    Raises:
        ValueError: wrong shape or type of an operand, or `source` is not in host memory.
    """
    (count,) = source.shape
    if source.dtype != torch.int32 or not source.is_contiguous() or not source.is_cpu:
        raise ValueError("source must be int32, contiguous and in host memory")
    check("step", step, (count,), torch.int32, vectors=False)
    if count:
        kernel("batch_state", "upload")(
            -(-count // _MAX_THREADS),
            _MAX_THREADS,
            Int64(source.data_ptr()),
            count,
            step,
            pdl=pdl,
        )


def write_tables(places: Tensor, blocks: Tensor, tables: Tensor, *, pdl: bool = False) -> None:
    """tables.view(-1)[places] = blocks.

    Args:
        places: [m] int32, slot * B + index.
        blocks: [m] int32.
        tables: [slots, B] int32.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    (count,) = places.shape
    check("places", places, (count,), torch.int32, vectors=False)
    check("blocks", blocks, (count,), torch.int32, vectors=False)
    check("tables", tables, tuple(tables.shape), torch.int32)
    if count:
        grid = -(-count // _MAX_THREADS)
        kernel("batch_state", "write_tables")(
            grid, _MAX_THREADS, places, blocks, count, tables, pdl=pdl
        )


def write_row_params(slots: Tensor, news: Tensor, row_params: Tensor, *, pdl: bool = False) -> None:
    """row_params[slots] = news.

    Args:
        slots: [m] int32.
        news: [m, ROW_PARAMS words] int32.
        row_params: [slots, ROW_PARAMS words] int32.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    count, words = news.shape[0], ROW_PARAMS.itemsize // 4
    check("slots", slots, (count,), torch.int32, vectors=False)
    check("news", news, (count, words), torch.int32, vectors=False)
    check("row_params", row_params, (row_params.shape[0], words), torch.int32)
    if count:
        grid = -(-count * words // _MAX_THREADS)
        kernel("batch_state", "write_row_params")(
            grid, _MAX_THREADS, slots, news, count, row_params, pdl=pdl
        )


def begin_step(
    step: Step,
    state: BatchState,
    num_chunks: int,
    block_size: int,
    num_tokens: int = 0,
    num_rows: int = 0,
    *,
    pdl: bool = False,
) -> None:
    """Expand a step: ids, positions and slots of its tokens, block tables of its chunks, its rows.

    Missing drafts are replaced by token 0. In a launch for one chunk with num_rows > 1 they become
    padding instead: the step then has fewer tokens and rows, which costs less and changes nothing.

    Args:
        step: as sent by the host; its header, query_start and row_start are updated.
        state: read: the sequences' state; written: the attributes of the step, and count_slots of
            padding rows.
        num_chunks: n, or more with a padded CUDA graph; the others have no sequence.
        block_size: tokens per KV block, a power of two.
        num_tokens, num_rows: tokens and rows up to these numbers that are not the step's become
            padding; at least as many tokens as rows; 0 for no padding.
        pdl: see `Kernel`.

    Raises:
        ValueError: the block size is not a power of two.
    """
    if block_size & (block_size - 1) or block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be a power of two")
    if not num_chunks:
        return
    # A further launch for each two further tables repeats what does not depend on them.
    for first in range(0, len(state.by_table), _TABLES):
        tables = state.by_table[first : first + _TABLES]
        _begin_step(step, state, tables, num_chunks, block_size, num_tokens, num_rows, pdl)


def _begin_step(
    step: Step,
    state: BatchState,
    tables: list[TableState],
    num_chunks: int,
    block_size: int,
    num_tokens: int,
    num_rows: int,
    pdl: bool,
) -> None:
    kernel("batch_state", "begin_step")(
        num_chunks,
        _THREADS,
        step.header,
        step.slots,
        step.starts,
        step.query_start,
        step.row_start,
        step.given,
        step.tokens,
        *_table_arguments(tables),
        block_size.bit_length() - 1,
        state.last_tokens,
        state.last_positions,
        state.drafts,
        state.drafts.shape[1],
        state.row_params,
        num_tokens,
        num_rows,
        state.token_ids,
        state.positions,
        state.seq_lens,
        state.sample_rows,
        state.step_row_params,
        state.sample_positions,
        state.tail_starts,
        state.tail_lengths,
        state.count_slots,
        pdl=pdl,
    )


def _table_arguments(tables: list[TableState]) -> list[object]:
    """Of begin_step, for one table or more, up to _TABLES; the others are null."""
    arguments: list[object] = []
    for table in tables:
        arguments += table.tables, table.tables.shape[1], table.slot_mapping, table.step_tables
    return arguments + [0] * (4 * (_TABLES - len(tables)))


def end_step(step: Step, state: BatchState, num_chunks: int, *, pdl: bool = False) -> None:
    """Verify the drafts, keep the sampled tokens for the next step, and write them to host memory.

    A draft is accepted if the model sampled the same token after the drafts before it. Sampling
    depends only on the logits and on the random number of a position, so drafting does not change
    an output or its distribution.

    Args:
        step: as sent by the host.
        state: read: chosen, logprobs, statuses; written: last_tokens, last_positions, drafts
            (NOT_DRAFTED), history, count_slots and the step's entry of the ring of results, for the
            accepted rows.
        num_chunks: at least n.
        pdl: see `Kernel`.
    """
    if not num_chunks:
        return
    history = state.history
    kernel("batch_state", "end_step")(
        -(-num_chunks // _THREADS),
        _THREADS,
        step.header,
        step.sample_slots,
        step.row_start,
        step.given,
        state.sample_rows,
        state.sample_positions,
        state.token_ids,
        state.chosen,
        state.logprobs,
        state.statuses,
        state.row_params,
        num_chunks,
        state.results.shape[-1],
        state.last_tokens,
        state.last_positions,
        state.drafts,
        state.drafts.shape[1],
        state.count_slots,
        0 if history is None else history,
        0 if history is None else history.shape[1],
        Int64(state.results.data_ptr()),
        pdl=pdl,
    )


_NAMES = ("upload", "begin_step", "end_step", "write_tables", "write_row_params")


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [("batch_state", _NAMES, ())]
