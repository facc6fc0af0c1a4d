"""The batch as it stays on the device between steps, and how the host's diffs get into it.

Shapes: a step has n chunks of T tokens in all and s rows of logits; N is the most of n and of s.
`slots` sequences have state, with tables of B blocks and up to K drafts. A step comes as one buffer
of int32 (`StepLayout`), in one copy; everything else that its kernels need is already there or is
worked out from it.
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

FROM_DEVICE = -1
"""Of a step, what the host does not know: the first token of a chunk, which is the last one of its
sequence; a later one, which is drafted; where a chunk starts, which is at that token."""

RESULT_ROWS = 4
"""What `end_step` writes: token, log probability (bits of a float32) and status of each row that
counts; and how many count, of each chunk."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where things are in the int32 buffer of a step.

        header        n, index into the ring of results, T, s
        slots         [N] of each chunk's sequence
        sample_slots  [N] the same; negative where no token is to be chosen
        starts        [N] position of each chunk's first token, or FROM_DEVICE
        query_start   [N + 1] chunk i owns tokens query_start[i]:query_start[i + 1]; T after all
        row_start     [N + 1] the logits of chunk i are rows row_start[i]:row_start[i + 1]: of its
                      last token, and of one more before it for each draft, or of more of a prompt
        given         [N] token that follows row i in a prompt, whose log probability is wanted;
                      negative where one is to be chosen. A chunk that has such rows has no drafts,
                      and but for these one row at most, its last
        bias_starts   [N + 1] biases[bias_starts[i]:bias_starts[i + 1]] are added in row i mask_rows
        [N] which mask tells what row i may choose; negative for none num_top_logprobs [N] tokens to
        tell of row i, with their log probabilities; negative for none tokens        [T] ids, or
        FROM_DEVICE; after those of the step, anything else

    Attributes:
        max_rows: N.
        max_tokens: T at most.
        extra: int32 after the tokens.
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
        """Of the buffer, in int32."""
        return self.offsets["tokens"][1]


class Step:
    """A step's buffer, on the device, and its parts by the names of `StepLayout`."""

    def __init__(self, layout: StepLayout, device: torch.device | str) -> None:
        self.buffer = torch.zeros(layout.size, dtype=torch.int32, device=device)
        parts = {name: self.buffer[a:b] for name, (a, b) in layout.offsets.items()}
        self.header = parts["header"]
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


class BatchState:
    """What the device knows of the running sequences, and what a step's kernels read.

    Attributes:
        tables: [slots, B] int32, block tables.
        last_tokens: [slots] int64, the token chosen last.
        last_positions: [slots] int32, where it stands in its sequence.
        drafts: [slots, K] int32, the tokens that may follow it; negative for none.
        row_params: [slots, ROW_PARAMS words] int32, how to choose.
        history: [slots, length] int32, tokens of the sequences up to the last one; None where
            nobody looks back.
        token_ids, positions, slot_mapping: [T] int64, of the step.
        seq_lens: [N] int32, tokens in the KV cache after the step; 0 past the chunks.
        step_tables: [N, B] int32, of the step's chunks.
        sample_rows: [N] int64, the tokens after which one is to be chosen, or is given.
        step_row_params: [N, ROW_PARAMS words] int32, of these rows; none, where one is given.
        sample_positions: [N] int64, of the tokens to be chosen, or given.
        tail_starts, tail_lengths: [N] int32, where the drafts that a row counts on stand among the
            step's tokens.
        chosen: [N] int64; logprobs: [N] float32; statuses: [N] int32: what `sample` found.
        count_slots: [N] int32, where to count what was chosen; negative for nowhere.
        results: [ring, RESULT_ROWS, N] int32 in pinned host memory.
    """

    def __init__(
        self,
        layout: StepLayout,
        num_slots: int,
        table_width: int,
        ring: int,
        device: torch.device | str,
        num_drafts: int = 0,
        history_length: int = 0,
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows, tokens, words = layout.max_rows, layout.max_tokens, ROW_PARAMS.itemsize // 4
        self.tables = empty(num_slots, table_width, dtype=torch.int32)
        self.last_tokens = empty(num_slots)
        self.last_positions = empty(num_slots, dtype=torch.int32)
        self.drafts = empty(num_slots, num_drafts, dtype=torch.int32).fill_(-1)
        self.row_params = empty(num_slots, words, dtype=torch.int32)
        self.history: Tensor | None = None
        if history_length:
            self.history = empty(num_slots, history_length, dtype=torch.int32)
        self.token_ids = empty(tokens)
        self.positions = empty(tokens)
        self.slot_mapping = empty(tokens)
        self.seq_lens = empty(rows, dtype=torch.int32)
        self.step_tables = empty(rows, table_width, dtype=torch.int32)
        self.sample_rows = empty(rows)
        self.step_row_params = empty(rows, words, dtype=torch.int32)
        self.sample_positions = empty(rows)
        self.tail_starts = empty(rows, dtype=torch.int32)
        self.tail_lengths = empty(rows, dtype=torch.int32)
        self.chosen = empty(rows)
        self.logprobs = empty(rows, dtype=torch.float32)
        self.statuses = empty(rows, dtype=torch.int32)
        self.count_slots = empty(rows, dtype=torch.int32)
        # The device writes into the host's memory: a copy of a few kilobytes would cost more.
        self.results = torch.zeros(
            ring, RESULT_ROWS, rows, dtype=torch.int32, pin_memory=torch.cuda.is_available()
        )

    def sampled(self, num_rows: int) -> SamplingOutputs:
        """Where `sample` writes what it finds for the first rows."""
        return SamplingOutputs(
            self.chosen[:num_rows], self.logprobs[:num_rows], self.statuses[:num_rows]
        )


def write_tables(places: Tensor, blocks: Tensor, tables: Tensor, *, pdl: bool = False) -> None:
    """tables.view(-1)[places] = blocks.

    Args:
        places: [m] int32, slot * B + index.
        blocks: [m] int32.
        tables: [slots, B] int32.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types.
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
        ValueError: for operands of other shapes or types.
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
    """Spread a step out: ids, positions and slots of its tokens, tables of its chunks, its rows.

    Args:
        step: what the host sent.
        state: read: what is kept of the sequences; written: the attributes of the step.
        num_chunks: n, or more where a CUDA graph is filled up; the others have no sequence.
        block_size: tokens per KV block, a power of two.
        num_tokens, num_rows: up to here tokens and rows that are not the step's become nobody's, at
            least as many tokens as rows; 0 where nothing is filled up.
        pdl: see `Kernel`.

    Raises:
        ValueError: for a block size that is no power of two.
    """
    if block_size & (block_size - 1) or block_size < 1:
        raise ValueError(f"block_size is {block_size}; a power of two is needed")
    if not num_chunks:
        return
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
        state.tables,
        state.tables.shape[1],
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
        state.slot_mapping,
        state.seq_lens,
        state.step_tables,
        state.sample_rows,
        state.step_row_params,
        state.sample_positions,
        state.tail_starts,
        state.tail_lengths,
        pdl=pdl,
    )


def end_step(step: Step, state: BatchState, num_chunks: int, *, pdl: bool = False) -> None:
    """Verify the drafts, keep what was chosen for the next step, and write it to the host's memory.

    A draft counts where the model chose the same token after the drafts before it. What a model
    draws depends on its logits and on the number that belongs to a position, so whether something
    was drafted leaves no trace in an output, and its distribution is the model's.

    Args:
        step: what the host sent.
        state: read: chosen, logprobs, statuses; written: last_tokens, last_positions, drafts (used
            up), history, count_slots and the step's part of the ring of results, for the rows that
            count.
        num_chunks: n at least.
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


_NAMES = ("begin_step", "end_step", "write_tables", "write_row_params")


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    return [("batch_state", _NAMES, ())]
