"""The reference ops against slow, obviously correct loops."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight_kernels.torch_ops import transformer as ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------- linear layers and norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 77])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_weight_multiplies_as_a_plain_one(
    dtype: torch.dtype, rows: int, biased: bool
) -> None:
    weight = torch.randn(48, 40).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    x = torch.randn(rows, 40).to(dtype)
    expected = torch.nn.functional.linear(x, weight, bias)
    for form in (weight, ops.pack(weight)):
        torch.testing.assert_close(ops.linear(x, form, bias), expected)


def test_a_row_is_multiplied_alike_alone_and_among_others() -> None:
    """Rows of a packed product do not mix."""
    packed = ops.pack(torch.randn(64, 96))
    x = torch.randn(16, 96)
    x[3] = float("nan")
    together = ops.linear(x, packed)
    assert together[3].isnan().all()
    for row in (0, 2, 4, 15):
        torch.testing.assert_close(together[row : row + 1], ops.linear(x[row : row + 1], packed))


def test_a_packed_product_is_computed_with_few_numbers_of_rows() -> None:
    sizes = [ops.padded_rows(num_rows) for num_rows in range(1, 8193)]
    assert sizes[:16] == list(range(1, 17)), "decode steps of few sequences are not padded"
    for num_rows, size in enumerate(sizes, 1):
        assert num_rows <= size <= num_rows * 1.125
    assert len(set(sizes)) == 16 + 9 * 8
    assert sizes == sorted(sizes)


_MEMORY = """
import psutil, torch
from inflight_kernels.torch_ops import transformer as ops
torch.set_num_threads(1)
packed = ops.pack(torch.randn(1536, 144))
x = torch.randn(600, 144)
ops.linear(x, packed)
before = psutil.Process().memory_info().rss
for num_rows in range(1, 601):
    ops.linear(x[:num_rows], packed)
print((psutil.Process().memory_info().rss - before) >> 20)
"""


def test_products_of_all_lengths_take_bounded_memory() -> None:
    """One size of memory for each number of rows would be 300 MiB for this weight alone."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 120


def test_rms_norm_divides_the_sum_by_its_root_mean_square() -> None:
    x, residual, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)
    normed, total = ops.rms_norm(x, weight, 1e-3, residual)
    expected = x + residual
    torch.testing.assert_close(total, expected)
    root = (expected.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(normed.double(), expected.double() / root * weight)
    plain, same = ops.rms_norm(x, weight, 1e-3)
    assert torch.equal(same, x)
    torch.testing.assert_close(plain, ops.rms_norm(x, weight, 1e-3, torch.zeros(5, 32))[0])


def test_a_wide_residual_stays_wide_and_the_norm_does_not() -> None:
    """Nothing is rounded before the sum is normed."""
    x, weight = torch.randn(5, 32).bfloat16(), torch.rand(32).bfloat16()
    residual = 100 * torch.randn(5, 32)
    normed, total = ops.rms_norm(x, weight, 1e-3, residual)
    assert total.dtype == torch.float32 and torch.equal(total, x.float() + residual)
    expected, _ = ops.rms_norm(total, weight.float(), 1e-3)
    assert normed.dtype == torch.bfloat16 and torch.equal(normed, expected.bfloat16())


def test_silu_mul_gates_the_second_half() -> None:
    x = torch.randn(3, 20)
    gate, up = x[:, :10], x[:, 10:]
    torch.testing.assert_close(ops.silu_mul(x), gate / (1 + (-gate).exp()) * up)


def test_gelu_tanh_mul_gates_the_second_half() -> None:
    x = 3 * torch.randn(3, 20, dtype=torch.float64)
    gate, up = x[:, :10], x[:, 10:]
    cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(ops.gelu_tanh_mul(x), 0.5 * gate * (1 + cubic.tanh()) * up)
    torch.testing.assert_close(
        ops.gelu_tanh_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up
    )


def test_rotary_turns_each_pair_by_its_angle() -> None:
    """As complex numbers: (x[i] + j x[i + D/2]) * factor * exp(j * position * frequency[i])."""
    frequencies = np.array([1.0, 0.3, 0.01, 0.002], np.float32)
    cos, sin = ops.rotary_tables(frequencies, 50, attention_factor=1.3)
    x = torch.randn(4, 3, 8)
    positions = torch.tensor([0, 7, 49, 7])
    got = ops.rotary(x, cos[positions], sin[positions])
    turned = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.polar(
        torch.full((4, 1, 4), 1.3, dtype=torch.float64),
        (positions[:, None] * torch.from_numpy(frequencies).double()).unsqueeze(1),
    )
    torch.testing.assert_close(
        got.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=1e-5
    )


# ---------------------------------------------------------------- paged KV cache


def test_write_kv_writes_only_the_slots() -> None:
    k_cache, v_cache = torch.zeros(6, 4, 2, 3), torch.zeros(6, 4, 2, 3)
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    ops.write_kv(k, v, k_cache, v_cache, torch.tensor([5, 23, 0]))
    for row, (block, offset) in enumerate([(1, 1), (5, 3), (0, 0)]):
        assert torch.equal(k_cache[block, offset], k[row])
        assert torch.equal(v_cache[block, offset], v[row])
    assert int((k_cache != 0).any(-1).any(-1).sum()) == 3


def test_copies_read_before_they_write_in_all_layers() -> None:
    caches = torch.randn(2, 2, 5, 4, 1, 3)
    before = caches.clone()
    ops.copy_blocks(caches, torch.tensor([0, 1, 3]), torch.tensor([1, 0, 4]))
    for target, source in [(1, 0), (0, 1), (4, 3), (2, 2), (3, 3)]:
        assert torch.equal(caches[:, :, target], before[:, :, source])


def test_cleared_slots_are_zero_in_all_layers() -> None:
    caches = torch.full((2, 2, 3, 4, 1, 2), float("nan"))
    ops.clear_slots(caches, torch.tensor([1, 11]))
    zero = (caches == 0).all(-1).all(-1)
    assert zero[:, :, 0].int().tolist() == [[[0, 1, 0, 0]] * 2] * 2
    assert zero[:, :, 2].int().tolist() == [[[0, 0, 0, 1]] * 2] * 2
    assert not zero[:, :, 1].any()


# ---------------------------------------------------------------- attention


def slow_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query head of one token at a time."""
    block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(len(seq_lens)):
        begin, end, kv_len = int(query_start[i]), int(query_start[i + 1]), int(seq_lens[i])
        places = [(int(block_tables[i, p // block_size]), p % block_size) for p in range(kv_len)]
        for row in range(begin, end):
            seen = places[: kv_len - (end - 1 - row)]
            for head in range(q.shape[1]):
                k = torch.stack([k_cache[b, o, head // group] for b, o in seen]).double()
                v = torch.stack([v_cache[b, o, head // group] for b, o in seen]).double()
                scores = k @ q[row, head].double() * scale
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores, 0)[: len(v)]
                out[row, head] = weights @ v
    return out.flatten(1)


def attention_case(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, block_size: int, seed: int
) -> dict[str, Any]:
    """chunks: (queries, keys) of each. Blocks are scattered; unused slots are NaN."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    tables = [-(-keys // block_size) for _, keys in chunks]
    num_blocks = sum(tables) + 2
    order = random.permutation(num_blocks).tolist()
    block_tables = torch.zeros(len(chunks), max(tables), dtype=torch.int64)
    k_cache = torch.full((num_blocks, block_size, kv_heads, 8), float("nan"))
    v_cache = k_cache.clone()
    for i, (count, (_, keys)) in enumerate(zip(tables, chunks, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        block_tables[i, :count] = torch.tensor(blocks)
        for block in blocks:
            # The tail of the last block is cleared when a block is started.
            k_cache[block], v_cache[block] = torch.randn(2, block_size, kv_heads, 8)
        assert count * block_size >= keys
    starts = np.cumsum([0, *(queries for queries, _ in chunks)])
    return {
        "q": torch.randn(int(starts[-1]), heads, 8),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": block_tables,
        "query_start": torch.from_numpy(starts),
        "seq_lens": torch.tensor([keys for _, keys in chunks]),
        "scale": 0.37,
    }


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "chunks",
    [
        [(1, 1)],
        [(1, 13)],
        [(5, 5)],
        [(3, 9)],
        [(1, 4), (1, 4), (1, 8)],
        [(1, 2), (1, 90), (1, 7), (1, 41)],
        [(4, 4), (1, 9), (2, 17), (1, 1), (6, 30), (1, 50)],
    ],
)
def test_attention_equals_the_slow_one(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int
) -> None:
    case = attention_case(chunks, heads, kv_heads, 4, seed=1)
    got = ops.paged_attention(**case)
    torch.testing.assert_close(got.double(), slow_attention(**case), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "chunks", [[(1, 1)], [(5, 5)], [(1, 2), (1, 90)], [(4, 4), (1, 9), (2, 17), (1, 50)]]
)
def test_a_sink_is_a_further_key_whose_value_is_0(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int
) -> None:
    case = attention_case(chunks, heads, kv_heads, 4, seed=2)
    sinks = 3 * torch.randn(heads)
    places = (case["block_tables"], case["query_start"], case["seq_lens"])
    plan = ops.AttentionPlan(*(tensor.numpy() for tensor in places), 4)
    operands = (case["q"], case["k_cache"], case["v_cache"])
    got = ops.attend(*operands, plan, case["scale"], sinks=sinks)
    expected = slow_attention(**case, sinks=sinks)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@given(
    chunks=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 40)).map(lambda c: (c[0], c[0] + c[1])),
        min_size=1,
        max_size=6,
    ),
    block_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_any_mix_of_chunks_equals_the_slow_one(
    chunks: list[tuple[int, int]], block_size: int, seed: int
) -> None:
    case = attention_case(chunks, 4, 2, block_size, seed)
    got = ops.paged_attention(**case)
    torch.testing.assert_close(got.double(), slow_attention(**case), atol=1e-5, rtol=1e-5)


def test_a_broken_row_breaks_no_other_row() -> None:
    """NaN in one sequence's blocks, also in block 0, which pads tables."""
    case = attention_case([(1, 3), (1, 30), (1, 9), (4, 11)], 4, 2, 4, seed=3)
    clean = ops.paged_attention(**case)
    table = case["block_tables"]
    # Swap the broken row's first block with block 0.
    first, zero = int(table[2, 0]), 0
    swap = {first: zero, zero: first}
    used = [-(-int(n) // 4) for n in case["seq_lens"]]
    for i, count in enumerate(used):
        table[i, :count] = torch.tensor([swap.get(int(b), int(b)) for b in table[i, :count]])
    for cache in (case["k_cache"], case["v_cache"]):
        cache[[first, zero]] = cache[[zero, first]]
        cache[zero] = float("nan")
    broken = ops.paged_attention(**case)
    assert broken[2].isnan().all()
    rows = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(broken[rows], clean[rows])


def test_a_long_row_does_not_pad_the_short_ones() -> None:
    """64 short rows next to one of 4096 keys gather little more than their own keys."""
    lens = np.array([4096] + [20] * 64)
    tables = np.zeros((65, 256), np.int64)
    plan = ops.AttentionPlan(tables, np.arange(66), lens, 16)
    gathered = sum(len(group.blocks) for group in plan.groups)
    assert gathered <= 256 + 64 * 2 * 2
