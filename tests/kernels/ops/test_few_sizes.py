"""Which mixtures the kernels for few tokens take, and their shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inflight_kernels.ops.linear.grouped_rows import E2M1, KINDS, GroupedKind
from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES
from inflight_kernels.ops.moe import few_sizes
from inflight_kernels.ops.moe.few_sizes import Sizes

QWEN3 = Sizes(hidden=2048, width=768, num_experts=128, top_k=8, num_groups=1, item_bytes=2)
MIXTRAL = Sizes(hidden=4096, width=14336, num_experts=8, top_k=2, num_groups=1, item_bytes=2)


@pytest.fixture(autouse=True)
def _h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_sizes, "num_multiprocessors", lambda: 132)


GPT_OSS = Sizes(hidden=2880, width=2880, num_experts=32, top_k=4, num_groups=1, item_bytes=2)
MXFP4 = GroupedKind(E2M1, 32, False)


def _in_codes(sizes: Sizes, kind: GroupedKind = MXFP4) -> Sizes:
    return dataclasses.replace(sizes, grouped=kind)


@pytest.mark.parametrize(
    "sizes",
    [
        dataclasses.replace(QWEN3, item_bytes=1),
        *(_in_codes(sizes, kind) for sizes in (QWEN3, GPT_OSS) for kind in KINDS),
    ],
)
def test_a_token_fits_and_blocks_of_both_kernels_share_a_multiprocessor(sizes: Sizes) -> None:
    """One block of the second next to all of the first, 1 KiB reserved for each."""
    assert sizes.fits(1)
    blocks = 1 if sizes.grouped is None else 2
    _, first = sizes.gate_up_shared(1)
    _, last = sizes.down_shared(1)
    assert blocks * first + last <= (228 - blocks - 1) * 1024


def test_shared_memory_of_what_fits_is_within_the_limit() -> None:
    of_values = [dataclasses.replace(QWEN3, item_bytes=item_bytes) for item_bytes in (1, 2)]
    for sizes in (*of_values, *(_in_codes(QWEN3, kind) for kind in KINDS)):
        for num_tokens in range(1, 9):
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
def test_what_does_not_fit_is_known(changes: dict[str, Any], num_tokens: int) -> None:
    assert not dataclasses.replace(QWEN3, **changes).fits(num_tokens)


def test_large_experts_of_several_tokens_are_read_faster_by_the_other_kernels() -> None:
    assert MIXTRAL.fits(1) and not MIXTRAL.fits(2)
    assert dataclasses.replace(MIXTRAL, width=1024).fits(2)


def test_more_tokens_fit_with_codes_of_fewer_bytes() -> None:
    assert GPT_OSS.fits(1) and not GPT_OSS.fits(2)
    assert _in_codes(GPT_OSS).fits(3) and not _in_codes(GPT_OSS).fits(4)


def test_rows_of_down_are_whole_records() -> None:
    sizes = dataclasses.replace(GPT_OSS, hidden=2888)
    assert sizes.fits(1)
    assert not _in_codes(sizes).fits(1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_two_blocks_of_records_have_four_fifths_of_the_bytes_in_flight_of_one_of_values(
    kind: GroupedKind,
) -> None:
    """At least: records of 6 bits are so large that blocks with as many would not fit in pairs."""
    per_unit = -(-1638 // kind.record_bytes)
    for num_tokens in (1, 2):
        for stages in _in_codes(GPT_OSS, kind).stages(num_tokens):
            assert stages in (2 * per_unit, 3 * per_unit, 4 * per_unit)
            assert 2 * stages * kind.record_bytes >= 0.8 * 2 * 4096


@pytest.mark.parametrize(
    ("sizes", "gate_up", "down"),
    [
        (QWEN3, 132, 132),
        (_in_codes(MIXTRAL), 264, 256),  # as many as there are 16 rows of down
        (_in_codes(dataclasses.replace(MIXTRAL, hidden=8192)), 264, 264),
    ],
)
def test_codes_have_two_blocks_of_a_kernel_on_a_multiprocessor(
    sizes: Sizes, gate_up: int, down: int
) -> None:
    assert (sizes.gate_up_blocks, sizes.down_blocks) == (gate_up, down)


@pytest.mark.parametrize(
    ("sizes", "gate_up", "down"),
    [
        (QWEN3, 8, 1),  # 6 jobs of 16 stages, 16 of 3
        (GPT_OSS, 8, 2),  # 11 of 23, 12 of 12
        (dataclasses.replace(QWEN3, hidden=128, width=1056), 1, 1),  # 8 of one, 8 of 5
        (_in_codes(QWEN3), 8, 1),  # 3 of 16, 8 of 6
        (_in_codes(GPT_OSS), 8, 2),  # 6 of 23, 4 of 23
        (_in_codes(dataclasses.replace(GPT_OSS, hidden=5760)), 8, 1),  # 6 of 45, 8 of 23
    ],
)
def test_warps_share_jobs_so_that_none_has_more_than_others(
    sizes: Sizes, gate_up: int, down: int
) -> None:
    assert sizes.gate_up_team == gate_up
    assert sizes.down_team == down


@pytest.mark.parametrize(
    "sizes",
    [dataclasses.replace(QWEN3, item_bytes=1), dataclasses.replace(GPT_OSS, item_bytes=1)]
    + [_in_codes(sizes, kind) for sizes in (QWEN3, GPT_OSS) for kind in KINDS],
)
def test_blocks_that_overlap_with_the_next_kernels_are_spread_evenly(sizes: Sizes) -> None:
    """No multiprocessor has room for one more than each has."""
    blocks = 1 if sizes.grouped is None else 2
    _, first = sizes.gate_up_shared(1)
    assert sizes.overlaps
    assert (blocks + 1) * (first + 1024) > 228 * 1024


@pytest.mark.parametrize("sizes", [QWEN3, GPT_OSS, MIXTRAL])
def test_blocks_of_weights_of_16_bits_have_a_multiprocessor_and_the_most_stages(
    sizes: Sizes,
) -> None:
    assert sizes.fits(1)
    assert not sizes.overlaps
    assert sizes.stages(1) == (4, 4)
    (_, first), (_, last) = sizes.gate_up_shared(1), sizes.down_shared(1)
    assert min(2 * first, 2 * last, first + last) > 226 * 1024
