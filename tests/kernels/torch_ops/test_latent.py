"""Latent attention, against attention to the keys and values of all heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight_kernels.torch_ops import kv_quantization, latent
from inflight_kernels.torch_ops import transformer as ops

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 8, 4, 6, 16, 4
SCALE = 0.3


class Case:
    """Scattered blocks of keys, and what all heads would have in their place.

    Args:
        chunks: (rows, keys) of each.
        dtype: of queries, keys and weights.
    """

    def __init__(self, chunks: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
        random = torch.Generator().manual_seed(len(chunks))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        rows, keys = (np.array(one) for one in zip(*chunks, strict=True))
        counts = -(-keys // BLOCK)
        order = np.random.default_rng(0).permutation(counts.sum() + 1)
        tables = np.zeros((len(chunks), counts.max()), np.int64)
        for table, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
            table[:count] = order[end - count : end]
        self.q = normal(rows.sum(), HEADS, NOPE + ROPE)
        self.k_up, self.v_up = normal(HEADS, NOPE, RANK), normal(HEADS, VALUE, RANK)
        self.cache = normal(len(order), BLOCK, 1, RANK + ROPE)
        self.step = (tables, np.cumsum([0, *rows]), keys)

    @property
    def plan(self) -> ops.AttentionPlan:
        return ops.AttentionPlan(*self.step, BLOCK, self.q.dtype)

    def expected(self) -> Tensor:
        latents, rope = self.cache[:, :, 0, :RANK].double(), self.cache[..., RANK:].double()
        k = torch.einsum("bor,hnr->bohn", latents, self.k_up.double())
        k = torch.cat((k, rope.expand(*k.shape[:3], -1)), -1)
        v = torch.einsum("bor,hvr->bohv", latents, self.v_up.double())
        step = map(torch.from_numpy, self.step)
        return ops.paged_attention(self.q.double(), k, v, *step, SCALE)

    def check(self, found: Tensor, tolerance: float = 1e-4) -> None:
        torch.testing.assert_close(
            found.double(), self.expected(), rtol=tolerance, atol=tolerance * 10
        )


CHUNKS = {
    "one": [(1, 13)],
    "decode": [(1, 2), (1, 90), (1, 7), (1, 41)],
    "prompt": [(60, 60)],
    "short": [(4, 50)],
    "long": [(50, 90)],
    "mixed": [(4, 4), (1, 9), (40, 44), (1, 1), (2, 70), (1, 50)],
}
chunks = pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))


@chunks
def test_attention_is_that_to_the_keys_and_values_of_all_heads(
    chunks: list[tuple[int, int]],
) -> None:
    case = Case(chunks)
    case.check(latent.attend(case.q, case.k_up, case.v_up, case.cache, case.plan, SCALE))


@chunks
def test_absorbed_queries_attend_to_the_cache_alone(chunks: list[tuple[int, int]]) -> None:
    """In four steps, as kernels do it: values are the first columns of the keys."""
    case = Case(chunks)
    queries = latent.absorb(case.q, case.k_up)
    values = kv_quantization.first_columns(case.cache, RANK)
    attended = ops.attend(queries, case.cache, values, case.plan, SCALE)
    assert attended.shape == (len(case.q), HEADS * RANK)
    case.check(latent.project_values(attended, case.v_up))


@chunks
def test_attention_to_the_cache_alone_needs_no_plan(chunks: list[tuple[int, int]]) -> None:
    case = Case(chunks)
    tables, query_start, seq_lens = map(torch.from_numpy, case.step)
    queries = latent.absorb(case.q, case.k_up)
    operands = case.cache, tables, query_start, seq_lens, SCALE, RANK
    attended = latent.paged_attention(queries, *operands)
    case.check(latent.project_values(attended.flatten(1), case.v_up))


def test_a_row_without_keys_and_a_row_of_no_chunk_get_zeros() -> None:
    cache = torch.randn(2, BLOCK, 1, RANK + ROPE)
    found = latent.paged_attention(
        torch.randn(4, HEADS, RANK + ROPE),
        cache,
        torch.tensor([[0], [1]]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 1]),
        SCALE,
        RANK,
    )
    assert (found[[0, 1, 3]] == 0).all()
    torch.testing.assert_close(found[2], cache[1, 0, :, :RANK].expand(HEADS, -1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_attention_reads_keys_of_8_bits(dtype: torch.dtype) -> None:
    case = Case(CHUNKS["mixed"])
    whole = torch.zeros(*case.cache.shape[:3], RANK + ROPE + 2, dtype=torch.uint8)
    memory = kv_quantization.of_blocks(whole, dtype)
    slots = torch.arange(len(case.cache) * BLOCK)
    ops.write_rows(case.cache.flatten(0, 1), memory, slots)
    found = latent.attend(case.q, case.k_up, case.v_up, memory, case.plan, SCALE)
    blocks = torch.arange(len(case.cache))
    case.cache = kv_quantization.read_blocks(memory, blocks, torch.float32)
    case.check(found)


def test_bfloat16_rounds_alike() -> None:
    case = Case(CHUNKS["mixed"], torch.bfloat16)
    found = latent.attend(case.q, case.k_up, case.v_up, case.cache, case.plan, SCALE)
    assert found.dtype == torch.bfloat16
    case.check(found, tolerance=0.03)


@pytest.mark.parametrize(
    ("num_rows", "num_keys", "expected"),
    [(4, 4, True), (4, 100, False), (160, 8192, False), (180, 8192, True), (64, 128, False)],
)
def test_long_chunks_make_keys_and_values_where_that_takes_fewer_products(
    num_rows: int, num_keys: int, expected: bool
) -> None:
    """With the shape of DeepSeek V2 and V3."""
    rank, nope, rope, value = 512, 128, 64, 128
    up = rank * (nope + value)
    absorbed = num_rows * (up + num_keys * (2 * rank + rope))
    expanded = num_keys * (up + num_rows * (nope + rope + value))
    assert (expanded < absorbed) == expected
    shapes = (torch.empty(2, width, rank, device="meta") for width in (nope, value))
    assert latent.expands(num_rows, num_keys, *shapes) == expected


def test_the_key_is_the_normed_latent_and_the_rotated_rest() -> None:
    kv, weight = torch.randn(3, RANK + ROPE), 1 + torch.rand(RANK)
    cos, sin = (
        table[4:7] for table in ops.rotary_tables(np.array([1.0, 0.1], np.float32), num_positions=9)
    )
    cache = torch.zeros(2, BLOCK, 1, RANK + ROPE)
    latent.write_latent(kv, weight, 1e-6, cos, sin, cache, torch.tensor([6, 1, 3]))
    for row, position, slot in zip(kv.double(), (4, 5, 6), (6, 1, 3), strict=True):
        norm = (row[:RANK].square().mean() + 1e-6).sqrt()
        a, b, c, d = row[RANK:].tolist()
        fast, slow = np.exp(1j * position), np.exp(0.1j * position)
        turned = [(a + 1j * c) * fast, (b + 1j * d) * slow]
        parts = [one.real for one in turned] + [one.imag for one in turned]
        expected = torch.cat((row[:RANK] / norm * weight, torch.tensor(parts)))
        torch.testing.assert_close(
            cache.flatten(0, 1)[slot, 0].double(), expected, rtol=1e-5, atol=1e-5
        )
    assert not cache.flatten(0, 1)[[0, 2, 4, 5, 7]].any()


def test_queries_are_rotated_in_their_last_columns() -> None:
    q = torch.randn(2, HEADS, NOPE + ROPE)
    cos, sin = ops.rotary_tables(np.array([1.0, 0.1], np.float32), num_positions=2)
    found = latent.rotate_queries(q, cos, sin)
    assert torch.equal(found[..., :NOPE], q[..., :NOPE])
    assert torch.equal(found[..., NOPE:], ops.rotary(q[..., NOPE:], cos, sin))
