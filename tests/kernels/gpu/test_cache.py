"""Copying and clearing in the paged cache, exact, without touching anything else."""

from __future__ import annotations

import pytest
import torch

from inflight_kernels.ops.cache import MAX_PAIRS, clear_slots, copy_blocks
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu


def _caches(num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[layers, keys and values, num_blocks, block_size, G, D]."""
    return torch.randn(3, 2, num_blocks, 16, 2, 72, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("pairs", [1, 2, 9, 60, 100, MAX_PAIRS])
def test_copies_are_those_of_the_reference(
    dtype: torch.dtype, id_type: torch.dtype, pairs: int
) -> None:
    """The most pairs need more shared memory than a kernel gets without asking."""
    caches = _caches(2 * pairs, dtype)
    blocks = torch.randperm(2 * pairs, device="cuda")
    sources, targets = blocks[:pairs].clone(), blocks[pairs:].clone()
    expected = caches.clone()
    transformer.copy_blocks(expected, sources, targets)
    copy_blocks(caches, sources.to(id_type), targets.to(id_type))
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("pairs", [2, 50, MAX_PAIRS])
def test_a_block_may_be_source_and_target(pairs: int) -> None:
    """A rotation of blocks: each target is read before it is overwritten."""
    caches = _caches(pairs)
    blocks = torch.randperm(pairs, device="cuda")
    expected = caches.clone()
    transformer.copy_blocks(expected, blocks, blocks.roll(1))
    copy_blocks(caches, blocks, blocks.roll(1))
    assert torch.equal(caches, expected)


def test_one_block_may_be_copied_to_many() -> None:
    caches = _caches(40)
    expected = caches.clone()
    sources = torch.full((20,), 7, device="cuda")
    targets = torch.arange(20, 40, device="cuda")
    transformer.copy_blocks(expected, sources, targets)
    copy_blocks(caches, sources, targets)
    assert torch.equal(caches, expected)


def test_a_broken_value_is_copied_as_it_is() -> None:
    caches = _caches(2)
    caches[0, 0, 0, 3] = torch.nan
    copy_blocks(caches, torch.tensor([0], device="cuda"), torch.tensor([1], device="cuda"))
    assert torch.equal(caches[:, :, 0].isnan(), caches[:, :, 1].isnan())


def test_too_many_copies_are_refused() -> None:
    caches = _caches(2)
    blocks = torch.zeros(MAX_PAIRS + 1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match=str(MAX_PAIRS)):
        copy_blocks(caches, blocks, blocks)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 5, 200])
def test_clearing_is_that_of_the_reference(id_type: torch.dtype, count: int) -> None:
    caches = _caches(20)
    caches[:, :, 5] = torch.nan
    slots = torch.randperm(20 * 16, device="cuda")[:count]
    expected = caches.clone()
    transformer.clear_slots(expected, slots)
    clear_slots(caches, slots.to(id_type))
    assert torch.equal(caches.view(torch.int16), expected.view(torch.int16))


def test_a_negative_slot_is_passed_over() -> None:
    caches = _caches(2)
    expected = caches.clone()
    clear_slots(caches, torch.tensor([-1, -1], device="cuda"))
    assert torch.equal(caches, expected)
