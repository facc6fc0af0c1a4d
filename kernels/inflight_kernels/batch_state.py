"""The batch as it stays on the device between steps, and how the host's diffs get into it.

Shapes: N chunks at most in a step, n in this one, T tokens; `slots` sequences with state, tables
of B blocks. A step comes as one buffer of int32 (`StepLayout`), in one copy; everything else that
its kernels need is already there or is worked out from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.compile import Instantiation
from inflight_kernels.launch import Int64, check, kernel
from inflight_kernels.sampling import WISH

_THREADS = 128
_MAX_THREADS = 256

FROM_DEVICE = -1
"""A token of a step that is not known to the host: the last one chosen for its sequence."""

RESULT_ROWS = 3
"""What `end_step` writes per chunk: token, log probability (bits of a float32), status."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where things are in the int32 buffer of a step.

        header        n, index into the ring of results
        slots         [N] of each chunk's sequence
        sample_slots  [N] the same; negative where no token is to be chosen
        seq_lens      [N] tokens in the KV cache after the step; 0 past the chunks
        query_start   [N + 1] chunk i owns rows query_start[i]:query_start[i + 1]; T past the chunks
        ban_starts    [N + 1] chunk i may not choose bans[ban_starts[i]:ban_starts[i + 1]]
        tokens        [T] ids, or FROM_DEVICE; after those of the step, anything else

    Attributes:
        max_chunks: N.
        max_tokens: T at most.
        extra: int32 after the tokens.
    """

    max_chunks: int
    max_tokens: int
    extra: int = 0

    @property
    def offsets(self) -> dict[str, tuple[int, int]]:
        """Name -> (first, end) in the buffer."""
        sizes = {
            "header": 4,
            "slots": self.max_chunks,
            "sample_slots": self.max_chunks,
            "seq_lens": self.max_chunks,
            "query_start": self.max_chunks + 1,
            "ban_starts": self.max_chunks + 1,
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
        self.seq_lens = parts["seq_lens"]
        self.query_start = parts["query_start"]
        self.ban_starts = parts["ban_starts"]
        self.tokens = parts["tokens"]


class BatchState:
    """What the device knows of the running sequences, and what a step's kernels read.

    Attributes:
        tables: [slots, B] int32, block tables.
        last_tokens: [slots] int64, the token chosen last.
        wishes: [slots, WISH words] int32, how to choose.
        token_ids, positions, slot_mapping: [T] int64, of the step.
        last_rows: [N] int64, each chunk's last row.
        step_tables: [N, B] int32, of the step's chunks.
        step_wishes: [N, WISH words] int32.
        sample_positions: [N] int64, of the tokens to be chosen.
        count_slots: [N] int32, where to count them; negative for nowhere.
        chosen: [N] int64; logprobs: [N] float32; statuses: [N] int32: what `sample` found.
        results: [ring, RESULT_ROWS, N] int32 in pinned host memory.
    """

    def __init__(
        self,
        layout: StepLayout,
        num_slots: int,
        table_width: int,
        ring: int,
        device: torch.device | str,
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        chunks, tokens, words = layout.max_chunks, layout.max_tokens, WISH.itemsize // 4
        self.tables = empty(num_slots, table_width, dtype=torch.int32)
        self.last_tokens = empty(num_slots)
        self.wishes = empty(num_slots, words, dtype=torch.int32)
        self.token_ids = empty(tokens)
        self.positions = empty(tokens)
        self.slot_mapping = empty(tokens)
        self.last_rows = empty(chunks)
        self.step_tables = empty(chunks, table_width, dtype=torch.int32)
        self.step_wishes = empty(chunks, words, dtype=torch.int32)
        self.sample_positions = empty(chunks)
        self.count_slots = empty(chunks, dtype=torch.int32)
        self.chosen = empty(chunks)
        self.logprobs = empty(chunks, dtype=torch.float32)
        self.statuses = empty(chunks, dtype=torch.int32)
        # The device writes into the host's memory: a copy of a few kilobytes would cost more.
        self.results = torch.zeros(
            ring, RESULT_ROWS, chunks, dtype=torch.int32, pin_memory=torch.cuda.is_available()
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


def write_wishes(slots: Tensor, news: Tensor, wishes: Tensor, *, pdl: bool = False) -> None:
    """wishes[slots] = news.

    Args:
        slots: [m] int32.
        news: [m, WISH words] int32.
        wishes: [slots, WISH words] int32.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types.
    """
    count, words = news.shape[0], WISH.itemsize // 4
    check("slots", slots, (count,), torch.int32, vectors=False)
    check("news", news, (count, words), torch.int32, vectors=False)
    check("wishes", wishes, (wishes.shape[0], words), torch.int32)
    if count:
        grid = -(-count * words // _MAX_THREADS)
        kernel("batch_state", "write_wishes")(
            grid, _MAX_THREADS, slots, news, count, wishes, pdl=pdl
        )


def begin_step(
    step: Step, state: BatchState, num_rows: int, block_size: int, *, pdl: bool = False
) -> None:
    """Spread a step out: ids, positions and slots of its tokens, tables and wishes of its chunks.

    Args:
        step: what the host sent.
        state: read: tables, last_tokens, wishes; written: the attributes of the step.
        num_rows: chunks; more than the step has where a CUDA graph is filled up, and then each
            chunk has one token, as have the rows that fill it up.
        block_size: tokens per block, a power of two.
        pdl: see `Kernel`.

    Raises:
        ValueError: for a block size that is no power of two.
    """
    if block_size & (block_size - 1) or block_size < 1:
        raise ValueError(f"block_size is {block_size}; a power of two is needed")
    if not num_rows:
        return
    kernel("batch_state", "begin_step")(
        num_rows,
        _THREADS,
        step.header,
        step.slots,
        step.sample_slots,
        step.seq_lens,
        step.query_start,
        step.tokens,
        state.tables,
        state.tables.shape[1],
        block_size.bit_length() - 1,
        state.last_tokens,
        state.wishes,
        state.token_ids,
        state.positions,
        state.slot_mapping,
        state.last_rows,
        state.step_tables,
        state.step_wishes,
        state.sample_positions,
        state.count_slots,
        pdl=pdl,
    )


def end_step(step: Step, state: BatchState, num_rows: int, *, pdl: bool = False) -> None:
    """Keep what was chosen for the next step, and write it into the host's memory.

    Args:
        step: what the host sent.
        state: read: chosen, logprobs, statuses; written: last_tokens and the step's part of the
            ring of results, where a token was to be chosen.
        num_rows: as of `begin_step`.
        pdl: see `Kernel`.
    """
    if not num_rows:
        return
    kernel("batch_state", "end_step")(
        -(-num_rows // _THREADS),
        _THREADS,
        step.header,
        step.sample_slots,
        state.chosen,
        state.logprobs,
        state.statuses,
        num_rows,
        state.results.shape[-1],
        state.last_tokens,
        Int64(state.results.data_ptr()),
        pdl=pdl,
    )


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    return [("batch_state", ("write_tables", "write_wishes", "begin_step", "end_step"), ())]
