"""Drafting on the device, where the previous tokens are known first: prompt lookup in a sequence's
tokens, and the passes of a draft model.

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

# As in drafting.cu.
_THREADS = 256
_PASS_THREADS = 128


@dataclass(frozen=True, slots=True)
class MatchLimits:
    """Limits of `draft_ngram`.

    Attributes:
        max_match, min_match: tokens that must match, at least 1.
        per_match: drafts at most for each token that matches; the others are NO_DRAFT. 0 for no
            such limit.

    Raises:
        ValueError: one of the first two is out of range.
    """

    max_match: int
    min_match: int
    per_match: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                f"min_match {self.min_match}, max_match {self.max_match}; "
                "required: 1 <= min_match <= max_match"
            )


def draft_ngram(
    slots: Tensor,
    last_positions: Tensor,
    history: Tensor,
    drafts: Tensor,
    limits: MatchLimits,
    *,
    copies: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """drafts[slot] = the tokens after an earlier occurrence of the sequence's last tokens.

    The longest match wins, up to limits.max_match tokens, and among equally long ones the latest,
    or the first that resumes a copy. Drafts beyond the end repeat the continuation. Without a match
    all drafts are NO_DRAFT. See `torch_ops.drafting.find_match`.

    Args:
        slots: [n] int32, sequences to draft for; negative ones are skipped.
        last_positions: [slots] int32, of each sequence's last token.
        history: [slots, W] int32, its tokens; a sequence beyond W gets no drafts.
        drafts: [slots, K] int32, written.
        limits: of the match.
        copies: [slots, 2] int32, the source of each sequence's last drafts after a match: where it
            begins, and the position of the last token at that time. Negative for none; updated.
            None to resume no copy.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    (n,) = slots.shape
    num_slots, width = history.shape
    if copies is not None:
        check("copies", copies, (num_slots, 2), torch.int32, vectors=False)
    check("slots", slots, (n,), torch.int32, vectors=False)
    check("last_positions", last_positions, (num_slots,), torch.int32, vectors=False)
    check("history", history, (num_slots, width), torch.int32, vectors=False)
    check("drafts", drafts, (num_slots, drafts.shape[1]), torch.int32, vectors=False)
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
            limits.max_match,
            limits.min_match,
            limits.per_match,
            0 if copies is None else copies,
            pdl=pdl,
        )


class DraftPass:
    """The rows of a draft model's pass: one token for each chunk of the last step.

    Attributes:
        slots: [n] int32, of the sequences; negative if nothing (more) is drafted.
        rows: [n] int64, row of the last step with the token before the last one.
        token_ids, positions, slot_mapping: [n] int64.
        seq_lens: [n] int32, tokens in the KV cache after the pass; 1 for padding rows, as attention
            needs at least one key.
        query_start: [n + 1] int32.
        row_params: [n, ROW_PARAMS words] int32, without penalties and rare filters.
        sample_positions: [n] int64, of the tokens to sample.
        chosen: [n] int64; logprobs: [n] float32; statuses: [n] int32: outputs of `sample`.
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
        """Inputs of `sample` for the first rows."""
        row_params = self.row_params[:num_rows].view(torch.uint8)
        return SamplingInputs(row_params, self.sample_positions[:num_rows])

    def sampled(self, num_rows: int) -> SamplingOutputs:
        """Output buffers of `sample` for the first rows."""
        return SamplingOutputs(
            self.chosen[:num_rows], self.logprobs[:num_rows], self.statuses[:num_rows]
        )


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Where the passes of a drafter start, and where they may write.

    Attributes:
        block_size: tokens per KV block, a power of two.
        behind: 0 if the first pass starts at the last token, which the model has not computed yet;
            1 if at the one before it.
        max_positions: upper bound (exclusive) of positions.
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
    """Prepare the first pass over the tokens that a step has sampled.

    If a sequence has no block yet for its drafts, marked by a negative entry at the end of its
    block table (see `write_tables`), its chunk uses one scratch block, so K is at most block_size.

    Args:
        step: the completed step.
        state: after `end_step`; step_tables are extended.
        rows: written.
        num_rows: n, or more with a padded CUDA graph.
        limits: of the drafter.
        pdl: see `Kernel`.

    Raises:
        ValueError: the block size is not a power of two, or smaller than K.
    """
    num_drafts, block_size = state.drafts.shape[1], limits.block_size
    if block_size & (block_size - 1) or block_size < num_drafts:
        raise ValueError(
            f"block_size is {block_size}; it must be a power of two and at least {num_drafts}"
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
    """Store the sampled tokens of a pass as the next drafts and as the tokens of the next pass.

    If no token could be sampled, or none may follow, the row becomes padding.

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
    """The token after each token of a step if it is known, otherwise an arbitrary one.

    Args:
        step: the completed step.
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
    """All kernels of this module."""
    return [("drafting", ("draft_ngram", *_PASS_NAMES), ())]
