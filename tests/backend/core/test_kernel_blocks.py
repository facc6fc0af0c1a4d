"""Blocks of the pool are split into those of the kernels."""

from __future__ import annotations

from inflight.core.kernel_blocks import KernelBlocks


def test_a_block_is_a_kernel_block_if_it_is_not_split() -> None:
    assert KernelBlocks().ids([5, 3]) == [5, 3]
    assert KernelBlocks(1, 10).id_at([5, 3], 1) == 3


def test_ids_are_in_the_order_of_tokens_and_a_pool_apart() -> None:
    split = KernelBlocks(3, 10)
    assert split.ids([5, 3]) == [5, 15, 25, 3, 13, 23]
    assert [split.id_at([5, 3], index) for index in range(6)] == split.ids([5, 3])
