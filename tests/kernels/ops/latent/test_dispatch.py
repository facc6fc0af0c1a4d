"""The kernels that latent attention selects, and the memory of their plans."""

from __future__ import annotations

import pytest

from inflight_kernels.ops.attention.dispatch import Gpu
from inflight_kernels.ops.latent.attention import instantiations
from inflight_kernels.ops.latent.dispatch import CANDIDATES, max_workspace_bytes, parts, shapes

H200 = Gpu(132, 228 * 1024, is_hopper=True)
A100 = Gpu(108, 164 * 1024, is_hopper=False)
L40S = Gpu(142, 100 * 1024, is_hopper=False)
GPUS = pytest.mark.parametrize("gpu", [H200, A100, L40S], ids=["H200", "A100", "L40S"])


@GPUS
def test_a_block_fits_in_shared_memory(gpu: Gpu) -> None:
    """1 KiB of what a multiprocessor has is the driver's."""
    found = shapes(gpu)
    assert [shape.rows for shape in found] == sorted({shape.rows for shape in found})
    assert all(shape.shared_bytes + 1024 <= gpu.shared_bytes for shape in found)
    assert found[0].rows == 16


def test_more_shared_memory_means_more_stages_and_rows() -> None:
    assert [(shape.rows, shape.stages) for shape in shapes(H200)] == [
        (16, 4),
        (32, 4),
        (64, 3),
    ]
    assert [(shape.rows, shape.stages) for shape in shapes(A100)] == [(16, 4), (32, 3)]
    assert [(shape.rows, shape.stages) for shape in shapes(L40S)] == [(16, 2), (32, 2)]


def test_blocks_are_in_pairs_on_hopper_with_an_even_number_of_them() -> None:
    assert [shape.paired for shape in shapes(H200)] == [True, False, False]
    for gpu in (A100, H200._replace(num_multiprocessors=131)):
        assert not any(shape.paired for shape in shapes(gpu))


def test_every_shape_is_compiled() -> None:
    ((stem, names, _),) = instantiations()
    assert stem == "latent_attention"
    assert len(names) == len(set(names)) == sum(map(len, CANDIDATES))
    for gpu in (H200, A100, L40S):
        assert {shape.name("__nv_bfloat16") for shape in shapes(gpu)} <= set(names)


@pytest.mark.parametrize(
    ("num_chunks", "max_q_len", "num_heads", "rows"),
    [
        (64, 1, 16, [16]),
        (1, 1, 16, [16]),
        (64, 1, 20, [32]),
        (64, 1, 32, [32]),
        (64, 1, 128, [64]),
        (64, 2, 16, [32]),  # with a draft
        (64, 4, 16, [64]),
        (64, 5, 16, [16, 64]),
        (1, 300, 16, [64]),
        (64, 300, 16, [16, 64]),
        (64, 300, 20, [32, 64]),
        (64, 300, 128, [64]),
    ],
)
def test_the_rows_of_a_step_decide(
    num_chunks: int, max_q_len: int, num_heads: int, rows: list[int]
) -> None:
    found = parts(num_chunks, num_chunks + max_q_len - 1, max_q_len, num_heads, H200)
    assert [part.shape.rows for part in found] == rows
    assert [part.min_rows for part in found] == [0, *rows[:-1]]
    assert [part.max_rows for part in found[:-1]] == rows[:-1]
    assert found[-1].max_rows > 1 << 30


@GPUS
@pytest.mark.parametrize("num_heads", [1, 16, 20, 32, 128])
def test_batch_invariant_steps_have_one_kernel(num_heads: int, gpu: Gpu) -> None:
    found = {
        part.shape
        for num_chunks, max_q_len in ((1, 1), (64, 1), (64, 5), (1, 300), (64, 300))
        for part in parts(num_chunks, 400, max_q_len, num_heads, gpu, batch_invariant=True)
    }
    assert len(found) == 1


@GPUS
@pytest.mark.parametrize("num_heads", [1, 5, 16, 20, 32, 128])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("most", [1, 2, 8, 100, 256])
def test_a_workspace_for_the_largest_step_serves_all_smaller_ones(
    most: int, batch_invariant: bool, num_heads: int, gpu: Gpu
) -> None:
    counts = sorted({*range(1, min(most, 12)), *range(12, most, 37), most})
    for max_tokens in (most, most + 1, most + 300, 1024):
        for bound in (None, 1, 2, 5):
            room = max_workspace_bytes(most, max_tokens, bound, num_heads, gpu, batch_invariant)
            for num_chunks in (count for count in counts if count <= max_tokens):
                for q_len in (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 64, max_tokens):
                    if bound is not None and q_len > bound:
                        continue
                    num_tokens = min(max_tokens, num_chunks * q_len)
                    found = parts(num_chunks, num_tokens, q_len, num_heads, gpu, batch_invariant)
                    assert found[-1].end <= room


def test_parts_are_consecutive_and_have_room_for_what_the_kernel_writes() -> None:
    found = parts(64, 364, 300, 16, H200)
    assert len(found) == 2 and found[0].arrivals == 0 and found[0].end == found[1].arrivals
    for part in found:
        assert part.num_shares == H200.num_multiprocessors, "all blocks run at once"
        # Counters of units, and marks of two slots of each block.
        assert part.queue - part.arrivals >= 3 * part.num_shares * 4
        num_items = 64 + 364 * 16 // part.shape.rows
        assert part.slots - part.items >= num_items * 32
        assert part.end - part.slots >= 2 * part.num_shares * part.shape.rows * (512 + 2) * 4
