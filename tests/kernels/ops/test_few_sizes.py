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
    assert sizes.scores(1, sizes.num_experts)
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


def test_large_experts_are_read_faster_by_the_other_kernels() -> None:
    assert not MIXTRAL.fits(1)
    assert dataclasses.replace(MIXTRAL, width=2048).fits(1)


def test_only_one_token_of_up_to_128_experts_is_scored_on_the_way() -> None:
    assert QWEN3.fits(2) and not QWEN3.scores(2, 128)
    assert not dataclasses.replace(QWEN3, num_experts=256).scores(1, 256)
    assert not QWEN3.scores(1, 129)
    assert not dataclasses.replace(QWEN3, hidden=5120).scores(1, 128)
