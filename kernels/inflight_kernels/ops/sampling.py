"""Sampling. Shapes: n rows of logits, V vocabulary, `slots` sequences with state.

The steps and their order are those of `torch_ops.sampling`: penalties, biases and token mask,
temperature, the filters in order (see `Filters`), and one draw by inversion of the CDF with the
random number of `torch_ops.sampling.uniform`. The CDF has the reference's order: by descending
probability if top_k or a rare filter applies or top_p keeps at most 256 tokens, otherwise by token
id. All filters but top_k, top_p and min_p are rare: they cost an additional launch. Equal logits
are ordered by id. Beyond the logits everything is computed in integers or in a fixed order, so a
row's token depends only on the row; it equals the reference's up to the rounding of exp.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    STORAGE_TYPES,
    Int64,
    check,
    check_memory,
    kernel,
    name_of,
)
from inflight_kernels.torch_ops.sampling import NO_ALLOWED_TOKENS as NO_ALLOWED_TOKENS
from inflight_kernels.torch_ops.sampling import NOT_FINITE as NOT_FINITE
from inflight_kernels.torch_ops.sampling import OK as OK
from inflight_kernels.torch_ops.sampling import Filters, Penalties


def _row_params() -> np.dtype[np.void]:
    fields = [("seed", "<u8"), ("temperature", "<f4"), ("slot", "<i4")]
    for field in (*dataclasses.fields(Penalties), *dataclasses.fields(Filters)):
        fields.append((field.name, "<i4" if isinstance(field.default, int) else "<f4"))
    if len(fields) % 2 == 0:  # a multiple of 8 bytes, like the kernels' struct
        fields.append(("unused", "<i4"))
    return np.dtype(fields)


ROW_PARAMS = _row_params()
"""Sampling parameters of a row: `torch_ops.sampling.Penalties` and `Filters`, a seed, a temperature
(0 is greedy), and a slot: the row of counts and prompt bits; negative for none, without penalties.

The kernels read it as the struct of csrc/sampling/row_params.cuh, which `make generate` writes.
"""

MAX_VOCAB_SIZE = 2**21

MAX_TOP = 20
"""Maximum number of tokens that `top_logprobs` reports."""

# As in sampling_job.cuh.
_THREADS = 256
_SLICE = 8192
_CAPACITY = 2048
_BOUND_BYTES = 48
_PARTIAL_BYTES = 32


def greedy_row_params(n: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """[n] of ROW_PARAMS with defaults: greedy, without filters, penalties and slot."""
    rows = np.zeros(n, ROW_PARAMS)
    for field in (*dataclasses.fields(Penalties), *dataclasses.fields(Filters)):
        rows[field.name] = field.default
    rows["slot"] = -1
    return rows


def num_slices(vocab_size: int) -> int:
    """Number of blocks per row."""
    return -(-vocab_size // _SLICE)


def scratch_bytes(vocab_size: int) -> int:
    """Workspace bytes per row."""
    slices = num_slices(vocab_size)
    return _BOUND_BYTES + _CAPACITY * 8 + slices * (_PARTIAL_BYTES + _THREADS * 4)


def prompt_words(vocab_size: int) -> int:
    """int32 words of a token bitmask: token t is bit t % 32 of word t // 32."""
    return -(-vocab_size // 32)


class Workspace:
    """Scratch memory through which a row's blocks communicate; for launches in one stream.

    Attributes:
        max_rows, vocab_size: of the logits.
        scratch: uint8 [max_rows, bytes].
        arrivals: int32 [max_rows], all 0 between launches.
        found: int32 [max_rows].
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        shape = (max_rows, scratch_bytes(vocab_size))
        self.scratch = torch.empty(shape, dtype=torch.uint8, device=device)
        self.arrivals = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.found = torch.zeros(max_rows, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class DraftTails:
    """The drafts before a row, which count as output for its penalties.

    Attributes:
        tokens: [T] int64.
        starts, lengths: [n] int32; row i has drafts tokens[starts[i]:][:lengths[i]].
    """

    tokens: Tensor
    starts: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Token statistics for the penalties.

    Attributes:
        counts: [slots, V] int16, occurrences of a token in the output.
        prompt: [slots, prompt_words(V)] int32, bitmask of the tokens in the prompt.
        tails: drafts before the rows; None if no row has any.
    """

    counts: Tensor
    prompt: Tensor
    tails: DraftTails | None = None


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Logit biases, added after the penalties.

    Attributes:
        starts: [n + 1] int32; row i has biases starts[i]:starts[i + 1], with strictly ascending
            ids.
        token_ids: [m] int32; those outside the vocabulary are skipped.
        biases: [m] float32; -inf bans.
    """

    starts: Tensor
    token_ids: Tensor
    biases: Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of allowed tokens.

    Attributes:
        masks: [k, prompt_words(V)] int32, bitmasks of the allowed tokens.
        rows: [n] int32, index of a row's mask; negative for none.
    """

    masks: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Inputs of `sample` for n rows.

    Attributes:
        row_params: [n, ROW_PARAMS.itemsize] uint8.
        positions: [n] int64, of the tokens to sample.
        penalties, logit_bias, masks: None if no row has any.
    """

    row_params: Tensor
    positions: Tensor
    penalties: PenaltyState | None = None
    logit_bias: LogitBias | None = None
    masks: TokenMasks | None = None


@dataclass(frozen=True, slots=True)
class SamplingOutputs:
    """Outputs of `sample`.

    Attributes:
        token_ids: [n] int64.
        logprobs: [n] float32, log softmax of the raw logits at the token.
        statuses: [n] int32.
    """

    token_ids: Tensor
    logprobs: Tensor
    statuses: Tensor


@dataclass(frozen=True, slots=True)
class TopLogprobsOutputs:
    """Outputs of `top_logprobs`.

    Attributes:
        ids: [n, MAX_TOP] int32, the most probable tokens in order, then -1.
        logprobs: [n, MAX_TOP] float32, log softmax of the raw logits, then -inf.
        own_logprobs: [n] float32, that of the row's own token; 0 if the status is not OK.
        ranks: [n] int32, rank of that token, from 1; 0 if the status is not OK.
    """

    ids: Tensor
    logprobs: Tensor
    own_logprobs: Tensor
    ranks: Tensor

    def check_fits(self, n: int) -> None:
        """Check the number of rows and the types.

        Raises:
            ValueError: with the name of the operand.
        """
        check("ids", self.ids, (n, MAX_TOP), torch.int32, vectors=False)
        check("logprobs", self.logprobs, (n, MAX_TOP), torch.float32, vectors=False)
        check("own_logprobs", self.own_logprobs, (n,), torch.float32, vectors=False)
        check("ranks", self.ranks, (n,), torch.int32, vectors=False)


def sample(
    logits: Tensor,
    inputs: SamplingInputs,
    workspace: Workspace,
    out: SamplingOutputs,
    *,
    filters: bool = True,
    rare: bool = True,
    pdl: bool = False,
) -> None:
    """Sample a token for each row of logits, which are not modified.

    A row whose status is not OK gets token 0 and logprob 0.

    Args:
        logits: [n, V] float32, bfloat16 or float16; rows may be strided.
        inputs: of the rows.
        workspace: for at least n rows of V.
        out: written.
        filters: False if no random-sampled row has a filter: saves a launch.
        rare: False if no random-sampled row has a rare filter: saves another one.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    storage, n, vocab_size = _check_logits(logits, workspace)
    check("row_params", inputs.row_params, (n, ROW_PARAMS.itemsize), torch.uint8)
    check("positions", inputs.positions, (n,), torch.int64, vectors=False)
    check("token_ids", out.token_ids, (n,), torch.int64, vectors=False)
    check("logprobs", out.logprobs, (n,), torch.float32, vectors=False)
    check("statuses", out.statuses, (n,), torch.int32, vectors=False)
    arguments = (
        logits,
        Int64(logits.stride(0)),
        vocab_size,
        inputs.row_params,
        inputs.positions,
        *_penalty_arguments(inputs.penalties, n, vocab_size),
        *_bias_arguments(inputs.logit_bias, n),
        *_mask_arguments(inputs.masks, n, vocab_size),
        workspace.scratch,
        workspace.arrivals,
        workspace.found,
        out.token_ids,
        out.logprobs,
        out.statuses,
    )
    if not n:
        return
    grid = (num_slices(vocab_size), n)
    kernel("sampling_scan", f"scan<{storage}>")(grid, _THREADS, *arguments, pdl=pdl)
    if filters and rare:
        kernel("sampling_spread", f"spread<{storage}>")(grid, _THREADS, *arguments, pdl=pdl)
    if filters:
        kernel("sampling_gather", f"gather<{storage}>")(grid, _THREADS, *arguments, pdl=pdl)


def _penalty_arguments(
    penalties: PenaltyState | None, n: int, vocab_size: int
) -> tuple[Tensor | int, ...]:
    """counts, prompt, tokens, starts and lengths of tails; 0 for what is missing."""
    if penalties is None:
        return 0, 0, 0, 0, 0
    counts, prompt, tails = penalties.counts, penalties.prompt, penalties.tails
    check("counts", counts, (counts.shape[0], vocab_size), torch.int16)
    check("prompt", prompt, (counts.shape[0], prompt_words(vocab_size)), torch.int32)
    if tails is None:
        return counts, prompt, 0, 0, 0
    check("tokens", tails.tokens, (tails.tokens.numel(),), torch.int64, vectors=False)
    check("tail_starts", tails.starts, (n,), torch.int32, vectors=False)
    check("tail_lengths", tails.lengths, (n,), torch.int32, vectors=False)
    return counts, prompt, tails.tokens, tails.starts, tails.lengths


def _bias_arguments(bias: LogitBias | None, n: int) -> tuple[Tensor | int, ...]:
    if bias is None:
        return 0, 0, 0
    count = bias.token_ids.numel()
    check("bias_starts", bias.starts, (n + 1,), torch.int32, vectors=False)
    check("bias_ids", bias.token_ids, (count,), torch.int32, vectors=False)
    check("biases", bias.biases, (count,), torch.float32, vectors=False)
    return bias.starts, bias.token_ids, bias.biases


def _mask_arguments(masks: TokenMasks | None, n: int, vocab_size: int) -> tuple[Tensor | int, ...]:
    if masks is None:
        return 0, 0
    shape = (masks.masks.shape[0], prompt_words(vocab_size))
    check("masks", masks.masks, shape, torch.int32, vectors=False)
    check("mask_rows", masks.rows, (n,), torch.int32, vectors=False)
    return masks.masks, masks.rows


def top_logprobs(
    logits: Tensor,
    wanted: Tensor,
    workspace: Workspace,
    sampled: SamplingOutputs,
    out: TopLogprobsOutputs,
    *,
    given: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Find the most probable tokens of rows; called after `sample`, with its inputs and outputs.

    Each row's own token is looked up as well: the sampled one or, within a prompt, a given one.
    What `sample` sampled there does not matter, but its status must be OK.

    Rows without a request cost nothing, and nothing is written for them. Equal logits are ordered
    by id.

    Args:
        logits, workspace: of `sample`, unmodified since.
        wanted: [n] int32, number of tokens for a row, at most MAX_TOP; negative if the row needs
            nothing.
        sampled: of `sample`; its logprobs are not read.
        out: written.
        given: [n] int32, tokens to look up instead of the sampled ones, below V; negative for none.
            None if no row has one.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    storage, n, vocab_size = _check_logits(logits, workspace)
    check("wanted", wanted, (n,), torch.int32, vectors=False)
    check("token_ids", sampled.token_ids, (n,), torch.int64, vectors=False)
    check("statuses", sampled.statuses, (n,), torch.int32, vectors=False)
    out.check_fits(n)
    if given is not None:
        check("given", given, (n,), torch.int32, vectors=False)
    if not n:
        return
    kernel("top_logprobs", f"top_logprobs<{storage}>")(
        (num_slices(vocab_size), n),
        _THREADS,
        logits,
        Int64(logits.stride(0)),
        vocab_size,
        sampled.token_ids,
        sampled.statuses,
        0 if given is None else given,
        wanted,
        workspace.scratch,
        workspace.arrivals,
        out.ids,
        out.logprobs,
        out.own_logprobs,
        out.ranks,
        pdl=pdl,
    )


def _check_logits(logits: Tensor, workspace: Workspace) -> tuple[str, int, int]:
    """Check logits; returns the C++ name of their type, the rows and the vocabulary size."""
    storage = name_of(STORAGE_TYPES, "logits", logits)
    if logits.dim() != 2 or (logits.numel() and logits.stride(1) != 1):
        raise ValueError(f"logits are {list(logits.shape)}; they must be [n, V], a row contiguous")
    check_memory("logits", logits, vectors=False)
    n, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {vocab_size} tokens; allowed: 1 to {MAX_VOCAB_SIZE}")
    if n > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"logits are {list(logits.shape)}; the workspace is for up to {workspace.max_rows} "
            f"rows of {workspace.vocab_size}"
        )
    return storage, n, vocab_size


def count_output_tokens(
    slots: Tensor, token_ids: Tensor, counts: Tensor, *, pdl: bool = False
) -> None:
    """Count tokens in their slots' output; counts saturate at 32767.

    Args:
        slots: [n] int32; negative ones are skipped.
        token_ids: [n] int64; those outside the vocabulary are skipped.
        counts: [slots, V] int16.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    check("counts", counts, tuple(counts.shape), torch.int16)
    _update_counts("count_output_tokens", slots, token_ids, counts, counts.shape[1], pdl)


def mark_prompt_tokens(
    slots: Tensor, token_ids: Tensor, prompt: Tensor, vocab_size: int, *, pdl: bool = False
) -> None:
    """Mark tokens as part of their slots' prompt.

    Args:
        slots: [n] int32; negative ones are skipped.
        token_ids: [n] int64; those outside the vocabulary are skipped.
        prompt: [slots, prompt_words(vocab_size)] int32.
        vocab_size: V.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    check("prompt", prompt, (prompt.shape[0], prompt_words(vocab_size)), torch.int32)
    _update_counts("mark_prompt_tokens", slots, token_ids, prompt, vocab_size, pdl)


def _update_counts(
    name: str, slots: Tensor, token_ids: Tensor, state: Tensor, vocab_size: int, pdl: bool
) -> None:
    (n,) = slots.shape
    check("slots", slots, (n,), torch.int32, vectors=False)
    check("token_ids", token_ids, (n,), torch.int64, vectors=False)
    if n:
        grid = -(-n // _THREADS)
        kernel("sampling_counts", name)(
            grid, _THREADS, slots, token_ids, state, n, vocab_size, pdl=pdl
        )


# Longest to compile first.
_PASSES = (
    ("sampling_gather", "gather"),
    ("sampling_scan", "scan"),
    ("sampling_spread", "spread"),
    ("top_logprobs", "top_logprobs"),
)
_COUNT_KERNELS = ("count_output_tokens", "mark_prompt_tokens")


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [
        *(
            (stem, tuple(f"{name}<{storage}>" for storage in STORAGE_TYPES.values()), ())
            for stem, name in _PASSES
        ),
        ("sampling_counts", _COUNT_KERNELS, ()),
    ]
