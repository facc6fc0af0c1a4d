"""Which mixtures the kernels for few tokens take, and their shared memory."""

from __future__ import annotations

import dataclasses

import pytest

from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES
from inflight_kernels.ops.moe import few_sizes
from inflight_kernels.ops.moe.few_sizes import Sizes

QWEN3 = Sizes(hidden=2048, width=768, num_experts=128, top_k=8, num_groups=1, item_bytes=2)
MIXTRAL = Sizes(hidden=4096, width=14336, num_experts=8, top_k=2, num_groups=1, item_bytes=2)


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_sizes, "num_multiprocessors", lambda: 132)


GPT_OSS = Sizes(hidden=2880, width=2880, num_experts=32, top_k=4, num_groups=1, item_bytes=2)


@pytest.mark.parametrize("sizes", [QWEN3, GPT_OSS, dataclasses.replace(QWEN3, item_bytes=1)])
def test_a_token_fits_and_blocks_of_both_kernels_share_a_multiprocessor(sizes: Sizes) -> None:
    assert sizes.fits(1)
    _, first = sizes.gate_up_shared(1)
    _, last = sizes.down_shared(1)
    assert first + last <= 226 * 1024


def test_shared_memory_of_what_fits_is_within_the_limit() -> None:
    for item_bytes in (1, 2):
        for num_tokens in range(1, 9):
            sizes = dataclasses.replace(QWEN3, item_bytes=item_bytes)
            if sizes.fits(num_tokens):
                assert max(sizes.gate_up_shared(num_tokens)) <= MAX_SHARED_BYTES
                assert max(sizes.down_shared(num_tokens)) <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({}, 0),
        ({}, 9),
        ({}, 4),  # as many weights are read faster by the other kernels
        ({"width": 770}, 1),
        ({"hidden": 2052}, 1),
        ({"top_k": 31, "item_bytes": 1}, 3),
    ],
)
def test_what_does_not_fit_is_known(changes: dict[str, int], num_tokens: int) -> None:
    assert not dataclasses.replace(QWEN3, **changes).fits(num_tokens)


def test_large_experts_of_several_tokens_are_read_faster_by_the_other_kernels() -> None:
    assert MIXTRAL.fits(1) and not MIXTRAL.fits(2)
    assert dataclasses.replace(MIXTRAL, width=1024).fits(2)


@pytest.mark.parametrize(
    ("sizes", "gate_up", "down"),
    [
        (QWEN3, 8, 1),  # 6 jobs of 16 stages, 16 of 3
        (GPT_OSS, 8, 2),  # 11 of 23, 12 of 12
        (dataclasses.replace(QWEN3, hidden=128, width=1056), 1, 1),  # 8 of one, 8 of 5
    ],
)
def test_warps_share_jobs_so_that_none_has_more_than_others(
    sizes: Sizes, gate_up: int, down: int
) -> None:
    assert sizes.gate_up_team == gate_up
    assert sizes.down_team == down
