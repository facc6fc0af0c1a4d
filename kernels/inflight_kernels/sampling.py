"""The choice of tokens. Shapes: n rows of logits, V vocabulary, `slots` sequences with state.

The steps and their order are those of `reference`: penalties, bans, temperature, top_k, top_p,
min_p, and one draw by the inverse of the CDF with the number that `reference.uniform` gives. The
CDF runs where the reference's does: over the likeliest tokens first where top_k cuts or top_p
keeps at most 256, over the vocabulary in order elsewhere. Equal logits stand in order of their
ids. Beyond the logits everything is computed in integers, so a row's token depends on nothing
but the row; it is the reference's up to the rounding of exp.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight_kernels.compile import Instantiation
from inflight_kernels.launch import STORAGE_TYPES, Int64, check, check_place, kernel, name_of

WISH = np.dtype(
    [
        ("seed", "<u8"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("slot", "<i4"),
    ]
)
"""How to choose in a row; ranges as in `reference.draw` and `reference.apply_penalties`.

temperature 0 is greedy. slot: the row of counts and prompt bits; negative for none, and then there
are no penalties.
"""

FINE, NOT_FINITE, NOTHING_LEFT = 0, 1, 2
"""Statuses: a token was chosen; the logits have NaN or infinity; all tokens are banned."""

MAX_VOCAB_SIZE = 2**21

# As sampling.cu has them.
_THREADS = 256
_SLICE = 8192
_CAPACITY = 2048
_BOUND_BYTES = 32
_PARTIAL_BYTES = 32


def greedy_wishes(n: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """n greedy wishes without filters, penalties and slot: [n] of WISH, to be filled in."""
    rows = np.zeros(n, WISH)
    rows["top_p"] = rows["repetition"] = 1.0
    rows["slot"] = -1
    return rows


def num_slices(vocab_size: int) -> int:
    """Blocks that share a row."""
    return -(-vocab_size // _SLICE)


def scratch_bytes(vocab_size: int) -> int:
    """Of the workspace, per row."""
    slices = num_slices(vocab_size)
    return _BOUND_BYTES + _CAPACITY * 8 + slices * (_PARTIAL_BYTES + _THREADS * 4)


def prompt_words(vocab_size: int) -> int:
    """int32 words of a slot's prompt bits: token t is bit t % 32 of word t // 32."""
    return -(-vocab_size // 32)


class Workspace:
    """What a row's blocks tell each other; for launches in one stream, one after the other.

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


def sample(
    logits: Tensor,
    wishes: Tensor,
    positions: Tensor,
    workspace: Workspace,
    *,
    token_ids: Tensor,
    logprobs: Tensor,
    statuses: Tensor,
    counts: Tensor | None = None,
    prompt: Tensor | None = None,
    ban_starts: Tensor | None = None,
    bans: Tensor | None = None,
    filters: bool = True,
    pdl: bool = False,
) -> None:
    """Choose a token for each row of logits, which stay as they are.

    A row whose status is not FINE gets token 0 and log probability 0.

    Args:
        logits: [n, V] float32, bfloat16 or float16; rows may be apart.
        wishes: [n, WISH.itemsize] uint8.
        positions: [n] int64, of the tokens to be chosen.
        workspace: for at least n rows of V.
        token_ids: [n] int64, written.
        logprobs: [n] float32, written: log softmax of the logits as they came, at the token.
        statuses: [n] int32, written.
        counts: [slots, V] int16, how often a token is in the output; None for no penalties.
        prompt: [slots, prompt_words(V)] int32, bits of the tokens in the prompt; with counts.
        ban_starts: [n + 1] int32; row i may not choose bans[ban_starts[i]:ban_starts[i + 1]].
        bans: int32, token ids; those out of the vocabulary are passed over.
        filters: False if no drawn row has top_k, top_p or min_p: saves a launch.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types.
    """
    storage = name_of(STORAGE_TYPES, "logits", logits)
    if logits.dim() != 2 or (logits.numel() and logits.stride(1) != 1):
        raise ValueError(f"logits are {list(logits.shape)}; they must be [n, V], a row contiguous")
    check_place("logits", logits, vectors=False)
    n, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {vocab_size} tokens; allowed: 1 to {MAX_VOCAB_SIZE}")
    if n > workspace.max_rows or vocab_size != workspace.vocab_size:
        raise ValueError(
            f"logits are {list(logits.shape)}; the workspace is for up to {workspace.max_rows} "
            f"rows of {workspace.vocab_size}"
        )
    check("wishes", wishes, (n, WISH.itemsize), torch.uint8)
    check("positions", positions, (n,), torch.int64, vectors=False)
    check("token_ids", token_ids, (n,), torch.int64, vectors=False)
    check("logprobs", logprobs, (n,), torch.float32, vectors=False)
    check("statuses", statuses, (n,), torch.int32, vectors=False)
    if (counts is None) != (prompt is None):
        raise ValueError("counts and prompt come together: repetition looks at both")
    if counts is not None and prompt is not None:
        check("counts", counts, (counts.shape[0], vocab_size), torch.int16)
        shape = (counts.shape[0], prompt_words(vocab_size))
        check("prompt", prompt, shape, torch.int32)
    if (ban_starts is None) != (bans is None):
        raise ValueError("ban_starts and bans come together")
    if ban_starts is not None and bans is not None:
        check("ban_starts", ban_starts, (n + 1,), torch.int32, vectors=False)
        check("bans", bans, (bans.numel(),), torch.int32, vectors=False)
    if not n:
        return
    grid = (num_slices(vocab_size), n)
    arguments = (
        logits,
        Int64(logits.stride(0)),
        vocab_size,
        wishes,
        positions,
        0 if counts is None else counts,
        0 if prompt is None else prompt,
        0 if ban_starts is None else ban_starts,
        0 if bans is None else bans,
        workspace.scratch,
        workspace.arrivals,
        workspace.found,
        token_ids,
        logprobs,
        statuses,
    )
    kernel("sampling", f"scan<{storage}>")(grid, _THREADS, *arguments, pdl=pdl)
    if filters:
        kernel("sampling", f"gather<{storage}>")(grid, _THREADS, *arguments, pdl=pdl)


def note_output(slots: Tensor, token_ids: Tensor, counts: Tensor, *, pdl: bool = False) -> None:
    """Count tokens in their slots' output; a count stays at 32767.

    Args:
        slots: [n] int32; negative ones are passed over.
        token_ids: [n] int64; those out of the vocabulary are passed over.
        counts: [slots, V] int16.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types.
    """
    check("counts", counts, tuple(counts.shape), torch.int16)
    _note("note_output", slots, token_ids, counts, counts.shape[1], pdl)


def note_prompt(
    slots: Tensor, token_ids: Tensor, prompt: Tensor, vocab_size: int, *, pdl: bool = False
) -> None:
    """Mark tokens as standing in their slots' prompt.

    Args:
        slots: [n] int32; negative ones are passed over.
        token_ids: [n] int64; those out of the vocabulary are passed over.
        prompt: [slots, prompt_words(vocab_size)] int32.
        vocab_size: V.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types.
    """
    check("prompt", prompt, (prompt.shape[0], prompt_words(vocab_size)), torch.int32)
    _note("note_prompt", slots, token_ids, prompt, vocab_size, pdl)


def _note(
    name: str, slots: Tensor, token_ids: Tensor, state: Tensor, vocab_size: int, pdl: bool
) -> None:
    (n,) = slots.shape
    check("slots", slots, (n,), torch.int32, vectors=False)
    check("token_ids", token_ids, (n,), torch.int64, vectors=False)
    if n:
        grid = -(-n // _THREADS)
        kernel("sampling", name)(grid, _THREADS, slots, token_ids, state, n, vocab_size, pdl=pdl)


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    names = tuple(
        f"{name}<{storage}>" for name in ("scan", "gather") for storage in STORAGE_TYPES.values()
    )
    return [("sampling", (*names, "note_output", "note_prompt"), ())]
