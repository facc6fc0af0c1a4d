"""Drafts on the device, where the tokens before them are known first: from a sequence's own tokens,
and the passes of a model that drafts.

Shapes: n chunks of a step, `slots` sequences with up to K drafts and a history of W tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.batch_state import BatchState, Step
from inflight_kernels.ops.sampling import ROW_PARAMS, SamplingInputs, SamplingOutputs
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import check, kernel

# As drafting.cu has it.
_THREADS = 256
_PASS_THREADS = 128


def draft_ngram(
    slots: Tensor,
    last_positions: Tensor,
    history: Tensor,
    drafts: Tensor,
    max_match: int,
    min_match: int,
    *,
    pdl: bool = False,
) -> None:
    """drafts[slot] = what followed the latest earlier place of the sequence's last tokens.

    The longest match counts, up to max_match tokens, and of equally long ones the latest. What is
    drafted past the end repeats it. Without a match of min_match tokens all drafts are -1. See
    `torch_ops.drafting.latest_match`.

    Args:
        slots: [n] int32, sequences to draft for; negative ones are passed over.
        last_positions: [slots] int32, of each sequence's last token.
        history: [slots, W] int32, its tokens; a sequence beyond W gets no drafts.
        drafts: [slots, K] int32, written.
        max_match, min_match: tokens that must agree, 1 or more.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types.
    """
    (n,) = slots.shape
    num_slots, width = history.shape
    check("slots", slots, (n,), torch.int32, vectors=False)
    check("last_positions", last_positions, (num_slots,), torch.int32, vectors=False)
    check("history", history, (num_slots, width), torch.int32, vectors=False)
    check("drafts", drafts, (num_slots, drafts.shape[1]), torch.int32, vectors=False)
    if not 1 <= min_match <= max_match:
        raise ValueError(f"min_match {min_match}, max_match {max_match}; 1 <= min <= max is needed")
    if n:
        kernel("drafting", "draft_ngram")(
            n,
            _THREADS,
            slots,
            last_positions,
            history,
            width,
            drafts,
            drafts.shape[1],
            max_match,
            min_match,
            pdl=pdl,
        )


class DraftPass:
    """The rows of a pass of a model that drafts: one token of each chunk of the last step.

    Attributes:
        slots: [n] int32, of the sequences; negative where nothing is drafted (any more).
        rows: [n] int64, of the last step: the token before the last one.
        token_ids, positions, slot_mapping: [n] int64.
        seq_lens: [n] int32, tokens in the KV cache after the pass; 1 where the row is nobody's, for
            attention lets each row see one.
        query_start: [n + 1] int32.
        row_params: [n, ROW_PARAMS words] int32, how to choose: without penalties and rare filters.
        sample_positions: [n] int64, of the tokens to be chosen.
        chosen: [n] int64; logprobs: [n] float32; statuses: [n] int32: what `sample` found.
    """

    def __init__(self, max_chunks: int, device: torch.device | str) -> None:
        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_chunks, *shape, dtype=dtype, device=device)

        self.slots = empty(torch.int32).fill_(-1)
        self.rows = empty(torch.int64)
        self.token_ids = empty(torch.int64)
        self.positions = empty(torch.int64)
        self.slot_mapping = empty(torch.int64)
        self.seq_lens = empty(torch.int32)
        self.query_start = torch.arange(max_chunks + 1, dtype=torch.int32).to(device)
        self.row_params = empty(torch.int32, ROW_PARAMS.itemsize // 4)
        self.sample_positions = empty(torch.int64)
        self.chosen = empty(torch.int64)
        self.logprobs = empty(torch.float32)
        self.statuses = empty(torch.int32)

    def inputs(self, num_rows: int) -> SamplingInputs:
        """How `sample` chooses for the first rows."""
        row_params = self.row_params[:num_rows].view(torch.uint8)
        return SamplingInputs(row_params, self.sample_positions[:num_rows])

    def sampled(self, num_rows: int) -> SamplingOutputs:
        """Where `sample` writes what it finds for them."""
        return SamplingOutputs(
            self.chosen[:num_rows], self.logprobs[:num_rows], self.statuses[:num_rows]
        )


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Where the passes of a drafter begin, and where they may write.

    Attributes:
        block_size: tokens per KV block, a power of two.
        behind: 0 if the first pass begins at the last token, which the model has not computed; 1 if
            at the one before it.
        max_positions: no token stands there or further on.
        first_scratch: scratch block of the first chunk; those of the others follow.
    """

    block_size: int
    behind: int
    max_positions: int
    first_scratch: int

    @property
    def block_shift(self) -> int:
        return self.block_size.bit_length() - 1


def begin_drafting(
    step: Step,
    state: BatchState,
    rows: DraftPass,
    num_rows: int,
    limits: DraftLimits,
    *,
    pdl: bool = False,
) -> None:
    """Prepare the first pass over what a step has chosen.

    Where a sequence has no block yet for its drafts, which a negative entry at the end of its table
    says (see `write_tables`), its chunk has one scratch block, so K is at most block_size.

    Args:
        step: that has ended.
        state: after `end_step`; step_tables are continued.
        rows: written.
        num_rows: n, or more where a CUDA graph is filled up.
        limits: of the drafter.
        pdl: see `Kernel`.

    Raises:
        ValueError: for a block size that is no power of two, or smaller than K.
    """
    num_drafts, block_size = state.drafts.shape[1], limits.block_size
    if block_size & (block_size - 1) or block_size < num_drafts:
        raise ValueError(
            f"block_size is {block_size}; a power of two is needed, and {num_drafts} or more"
        )
    if not num_rows:
        return
    kernel("drafting", "begin_drafting")(
        num_rows,
        32,
        step.header,
        step.sample_slots,
        step.query_start,
        state.positions,
        state.last_tokens,
        state.last_positions,
        state.tables,
        state.tables.shape[1],
        limits.block_shift,
        state.row_params,
        limits.behind,
        num_drafts,
        limits.max_positions,
        limits.first_scratch,
        rows.slots,
        rows.rows,
        rows.token_ids,
        rows.positions,
        rows.slot_mapping,
        rows.seq_lens,
        state.step_tables,
        rows.row_params,
        rows.sample_positions,
        pdl=pdl,
    )


def advance_drafting(
    state: BatchState,
    rows: DraftPass,
    num_rows: int,
    limits: DraftLimits,
    *,
    pdl: bool = False,
) -> None:
    """Keep what a pass has chosen as the next draft, and make it the token of the next pass.

    Where nothing could be chosen, or nothing may follow, the row becomes nobody's.

    Args:
        state: drafts are written.
        rows: of the pass; of the next one afterwards.
        num_rows: n.
        limits, pdl: as in `begin_drafting`.
    """
    if not num_rows:
        return
    kernel("drafting", "advance_drafting")(
        -(-num_rows // _PASS_THREADS),
        _PASS_THREADS,
        rows.slots,
        rows.chosen,
        rows.statuses,
        state.last_positions,
        state.step_tables,
        state.step_tables.shape[1],
        limits.block_shift,
        limits.behind,
        limits.max_positions,
        num_rows,
        state.drafts,
        state.drafts.shape[1],
        rows.token_ids,
        rows.positions,
        rows.slot_mapping,
        rows.seq_lens,
        rows.sample_positions,
        pdl=pdl,
    )


def next_tokens(
    step: Step,
    state: BatchState,
    token_ids: Tensor,
    num_chunks: int,
    num_tokens: int = 0,
    *,
    pdl: bool = False,
) -> None:
    """The token after each token of a step, as far as it is known; any other where it is not.

    Args:
        step: that has ended.
        state: after `end_step`, with a history.
        token_ids: [T] int64, written.
        num_chunks, num_tokens: as in `begin_step`.
        pdl: see `Kernel`.
    """
    history = state.history
    assert history is not None
    check("token_ids", token_ids, tuple(token_ids.shape), torch.int64, vectors=False)
    if num_chunks:
        kernel("drafting", "next_tokens")(
            num_chunks,
            _PASS_THREADS,
            step.header,
            step.slots,
            step.query_start,
            state.positions,
            history,
            history.shape[1],
            num_tokens,
            token_ids,
            pdl=pdl,
        )


_PASS_NAMES = ("begin_drafting", "advance_drafting", "next_tokens")


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    return [("drafting", ("draft_ngram", *_PASS_NAMES), ())]
