"""The sizes of steps for which CUDA graphs are captured."""

from __future__ import annotations

import torch

from inflight.core.step_size import StepSize

# A step is padded to the next size. Padding is costliest with few rows; many rows cost by the tile
# of 64.
_FEW_ROWS = (1, 2, 4)
_ROW_STEP = 8
_MANY_ROWS = 256
_MANY_ROW_STEP = 64

# Sequences in captured steps that read common prefixes once. Padding costs little beside what they
# save.
_SHARING = (16, 32, 64, 96, 128, 192)

# Tokens of captured steps with prompts, and the limit of tokens times weights per layer: beyond it,
# a layer takes an H200 longer than its launches take the host. These take 0.35 ms, and 0.6 ms while
# other threads of the engine's process read requests and write events; as many products of e4m3 as
# the limit says take 0.75 ms.
_PROMPT_TOKENS = (16, *range(32, 257, 32), 320, 384, 448, 512, *range(640, 2049, 128))
_LAUNCH_BOUND = 4.5e11

# Captured steps of up to so many tokens attend to the bytes of an 8-bit KV cache: dequantising the
# keys of prompts is expected to cost such steps more than it saves. Not measured at other limits.
_FEW_PROMPT_TOKENS = 512


def capture_sizes(
    max_num_seqs: int,
    max_rows: int,
    max_drafts: int,
    max_tokens: int,
    layer_weights: int,
    max_prompt_keys: int | None = None,
) -> list[StepSize]:
    """Sizes of the graphs to capture: a step runs in the first one that it fits.

    A step that shares prefixes fits those that do not as well, so they come after those that do.

    Args:
        max_num_seqs: n at most.
        max_rows: rows of logits.
        max_drafts: drafts of a chunk; 0 without a drafter.
        max_tokens: T at most.
        layer_weights: weights of a layer of the model.
        max_prompt_keys: of steps whose prompts are dequantised; None if they never are.
    """
    most_tokens = min(max_tokens, int(_LAUNCH_BOUND / layer_weights))
    sizes = [
        StepSize(rows, rows, rows, 1, shares_prefixes=True) for rows in sharing_counts(max_num_seqs)
    ]
    sizes += [StepSize(rows, rows, rows, 1) for rows in row_counts(max_num_seqs)]
    sizes += verification_sizes(max_rows, max_drafts)
    for tokens in _PROMPT_TOKENS:
        if tokens <= most_tokens:
            # One prompt alone, and prompts mixed with decoding sequences.
            keys = None if tokens <= _FEW_PROMPT_TOKENS else max_prompt_keys
            sizes.append(StepSize(tokens, 1, 1, tokens, keys))
            if max_num_seqs > 1:
                num_chunks, num_rows = min(tokens, max_num_seqs), min(tokens - 1, max_rows)
                sizes.append(StepSize(tokens, num_chunks, num_rows, tokens, keys))
    return sizes


def verification_sizes(max_rows: int, max_drafts: int) -> list[StepSize]:
    """Sizes of the verification steps to capture, those of one sequence first: every token has a
    row."""
    if not max_drafts:
        return []
    longest = min(1 + max_drafts, max_rows)
    of_one = [StepSize(count, 1, count, count) for count in row_counts(longest) if count > 1]
    counts = [count for count in row_counts(max_rows) if count > 1]
    return of_one + [StepSize(count, count, count, min(count, longest)) for count in counts]


def row_counts(most: int) -> list[int]:
    """Buckets for up to `most` rows, ascending."""
    counts = [count for count in _FEW_ROWS if count < most]
    counts += range(_ROW_STEP, min(most, _MANY_ROWS), _ROW_STEP)
    counts += range(_MANY_ROWS, most, _MANY_ROW_STEP)
    return [*counts, most]


def sharing_counts(most: int) -> list[int]:
    """Buckets for up to `most` sequences that may share prefixes, ascending."""
    if most < _SHARING[0]:
        return []
    counts = [count for count in _SHARING if count < most]
    counts += range(_MANY_ROWS, most, _MANY_ROWS)
    return [*counts, most]


def prompt_key_counts(quantized_kv: torch.dtype | None) -> tuple[int | None, ...]:
    """Values of `StepSize.prompt_keys` with which steps of equal size launch different kernels.

    Args:
        quantized_kv: of a KV cache of 8 bits.
    """
    return (0,) if quantized_kv is None else (0, None)
