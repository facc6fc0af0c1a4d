"""The size of a step counts what its kernels must have room for."""

from __future__ import annotations

import pytest

import tiny
from inflight.core.batch import Batch, Chunk
from inflight.core.step_size import StepSize


def chunk(length: int, samples: bool = True, num_drafts: int = 0, num_scores: int = 0) -> Chunk:
    sequence = tiny.make_sequence([3] * 600, list(range(40)))
    return Chunk(sequence, 0, length, samples, 0, num_drafts, num_scores)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        pytest.param([chunk(1), chunk(1)], StepSize(2, 2, 2, 1, 0), id="decode"),
        pytest.param([chunk(6, num_drafts=5), chunk(1)], StepSize(7, 2, 7, 6, 64), id="drafts"),
        pytest.param([chunk(100), chunk(1)], StepSize(101, 2, 2, 100, 128), id="prompt"),
        pytest.param([chunk(9, num_scores=8)], StepSize(9, 1, 9, 9, 64), id="scores"),
        pytest.param([chunk(9, False, 0, 9)], StepSize(9, 1, 9, 9, 64), id="scores alone"),
        pytest.param([chunk(9, False)], StepSize(9, 1, 1, 9, 64), id="part of a prompt"),
    ],
)
def test_the_size_of_a_batch(chunks: list[Chunk], expected: StepSize) -> None:
    assert StepSize.of(Batch(chunks)) == expected


def test_keys_of_prompts_are_counted_in_whole_blocks() -> None:
    chunks = [
        Chunk(tiny.make_sequence([3] * 600, list(range(40))), start, 65, True)
        for start in (0, 63, 64)
    ]
    assert StepSize.of(Batch([*chunks, chunk(1)])).prompt_keys == 128 + 128 + 192


@pytest.mark.parametrize(
    ("lengths", "shares"), [([1] * 8, True), ([1] * 7, False), ([1] * 8 + [2], False)]
)
def test_steps_of_many_single_tokens_share_prefixes(lengths: list[int], shares: bool) -> None:
    chunks = [chunk(length) for length in lengths]
    assert StepSize.of(Batch(chunks, shares_prefixes=True)).shares_prefixes == shares
    assert not StepSize.of(Batch(chunks)).shares_prefixes
