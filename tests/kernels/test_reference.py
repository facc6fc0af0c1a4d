"""The reference ops against slow, obviously right loops and against exact probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight_kernels import reference as ops

VOCAB = 700  # more than the prefix that `draw` looks at first


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


def test_silu_mul_gates_the_second_half() -> None:
    x = torch.randn(3, 20)
    gate, up = x[:, :10], x[:, 10:]
    torch.testing.assert_close(ops.silu_mul(x), gate / (1 + (-gate).exp()) * up)


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


def test_write_kv_fills_the_slots_and_nothing_else() -> None:
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
                weights = torch.softmax(k @ q[row, head].double() * scale, 0)
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
            # The tail of the last block is cleared by whoever starts a block.
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
    """64 short rows beside one of 4096 keys gather little more than their own keys."""
    lens = np.array([4096] + [20] * 64)
    tables = np.zeros((65, 256), np.int64)
    plan = ops.plan_attention(tables, np.arange(66), lens, 16)
    gathered = sum(len(group.blocks) for group in plan.groups)
    assert gathered <= 256 + 64 * 2 * 2


# ---------------------------------------------------------------- random numbers


def test_philox_gives_the_published_vectors() -> None:
    """Known answers of the Random123 distribution for philox4x32-10."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        assert ops.philox(counter, key) == expected


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    values = [ops.uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(values)) == len(values)
    counts, _ = np.histogram(values, 20, (0.0, 1.0))
    assert counts.sum() == len(values)
    chi_square = ((counts - 100.0) ** 2 / 100.0).sum()
    assert chi_square < 45  # 19 degrees of freedom: p < 0.001
    top = 2**64 - 1
    assert ops.uniform(top, 5) != ops.uniform(top - (1 << 32), 5)
    assert ops.uniform(3, 5) == ops.uniform(3, 5)


# ---------------------------------------------------------------- shaping the logits


def test_finite_rows_tells_nan_and_infinity_from_large_numbers() -> None:
    logits = torch.randn(6, 50)
    logits[1, 7] = float("nan")
    logits[2, 7] = float("inf")
    logits[3, 7] = float("-inf")
    logits[4] = 3e38  # finite, though the sum is not
    assert ops.finite_rows(logits).tolist() == [True, False, False, False, True, True]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    row = torch.randn(VOCAB)
    tokens = [3, 3, 50, 699, 0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), row[None].clone())[
        0
    ]
    none = np.array([], np.int64)
    ops.apply_penalties(row, np.unique(tokens), none, none, penalty, 0.0, 0.0)
    torch.testing.assert_close(row, expected)


def test_presence_and_frequency_penalties_subtract() -> None:
    row = torch.randn(VOCAB)
    before = row.clone()
    ids, counts = np.array([4, 9]), np.array([1, 3])
    ops.apply_penalties(row, ids, ids, counts, 1.0, 0.5, 0.25)
    assert row[4] == pytest.approx(before[4] - 0.75)
    assert row[9] == pytest.approx(before[9] - 1.25)
    others = [i for i in range(VOCAB) if i not in (4, 9)]
    assert torch.equal(row[others], before[others])


# ---------------------------------------------------------------- the draw


def draw(logits: torch.Tensor, uniforms: np.ndarray, **filters: float) -> torch.Tensor:
    """Draw from one row [V] once per uniform."""
    n = len(uniforms)
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | filters
    return ops.draw(
        logits.expand(n, -1),
        np.full(n, values["temperature"]),
        np.full(n, int(values.get("top_k", 0))),
        np.full(n, values["top_p"]),
        np.full(n, values["min_p"]),
        uniforms,
    )


def probabilities(logits: torch.Tensor, **filters: float) -> torch.Tensor:
    """The distribution that transformers' warpers leave, in the documented order."""
    scores = logits[None].double()
    ids = torch.zeros(1, 1, dtype=torch.int64)
    warpers: list[Any] = [TemperatureLogitsWarper(float(filters.get("temperature", 1.0)))]
    if filters.get("top_k"):
        warpers.append(TopKLogitsWarper(int(filters["top_k"])))
    if filters.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(filters["top_p"]))
    if filters.get("min_p"):
        warpers.append(MinPLogitsWarper(filters["min_p"]))
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)[0]


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0, "min_p": 0.02},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": VOCAB},
    {"top_k": -1, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.97, "temperature": 4.0},
    {"top_k": 300, "top_p": 0.95, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    {"top_p": 0.98, "min_p": 0.01, "temperature": 5.0},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_exact_distribution(filters: dict[str, float]) -> None:
    """Evenly spread uniforms hit each token as often as its probability says, to one part in n."""
    logits = torch.randn(VOCAB) * 2
    n = 4000
    uniforms = (np.arange(n) + 0.5) / n
    shown = filters | ({"top_k": 0} if filters.get("top_k") == -1 else {})
    expected = probabilities(logits, **shown)
    counts = torch.bincount(draw(logits, uniforms, **filters), minlength=VOCAB)
    assert (counts - expected * n).abs().max() < 1.01
    assert not counts[expected == 0].any()


def test_random_draws_pass_a_chi_square_test() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, float("-inf")])
    n = 5000
    uniforms = np.array([ops.uniform(seed, 17) for seed in range(n)])
    counts = torch.bincount(draw(logits, uniforms), minlength=6).double()
    expected = logits.double().softmax(-1) * n
    chi_square = ((counts - expected)[:5] ** 2 / expected[:5]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: p < 0.001
    assert counts[5] == 0


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_draw_does_not_depend_on_the_other_rows(filters: dict[str, float]) -> None:
    random = np.random.default_rng(0)
    rows = []
    for other in FILTERS:
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | other
        rows.append((torch.randn(VOCAB) * 2, values, random.random()))
    together = ops.draw(
        torch.stack([logits for logits, _, _ in rows]),
        *(
            np.array([values[name] for _, values, _ in rows], dtype)
            for name, dtype in (
                ("temperature", np.float64),
                ("top_k", np.int64),
                ("top_p", np.float64),
                ("min_p", np.float64),
            )
        ),
        np.array([u for _, _, u in rows]),
    )
    index = FILTERS.index(filters)
    logits, _, u = rows[index]
    assert int(together[index]) == int(draw(logits, np.array([u]), **filters)[0])


def test_extreme_uniforms_stay_inside_what_is_kept() -> None:
    logits = torch.tensor([float("-inf"), 1.0, 0.0, float("-inf")])
    ends = np.array([0.0, 1.0 - 2.0**-52])
    assert draw(logits, ends).tolist() == [1, 2]
    assert draw(logits, ends, top_k=2).tolist() == [1, 2]
    wide = torch.zeros(VOCAB)
    wide[0] = wide[-1] = float("-inf")
    assert set(draw(wide, ends, top_p=0.99).tolist()) <= set(range(1, VOCAB - 1))


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures_and_logits_give_a_token(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 1.0, 2e38])
    for filters in ({}, {"top_k": 2.0}, {"top_p": 0.5}):
        (token,) = draw(logits, np.array([0.3]), temperature=temperature, **filters).tolist()
        assert token == 0


@given(st.integers(0, 10_000), st.floats(0.05, 0.9999), st.floats(0.2, 8.0))
@settings(max_examples=60, deadline=None)
def test_the_wide_nucleus_is_the_sorted_one(seed: int, top_p: float, spread: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    weights = (logits - logits.max()).exp()
    inside = ops._nucleus(weights, top_p)
    ordered, ids = weights.double().sort(descending=True)
    count = int((ordered.cumsum(0) - ordered < top_p * ordered.sum()).sum())
    assert set(torch.nonzero(inside).squeeze(1).tolist()) == set(ids[:count].tolist())


def test_a_nucleus_of_equal_weights_keeps_no_more_than_it_needs() -> None:
    spread = np.linspace(0.0, 0.999, 50)
    assert len(set(draw(torch.zeros(4), spread, top_p=0.5).tolist())) == 2
    weights = torch.ones(VOCAB)
    assert int(ops._nucleus(weights, 0.5).sum()) == math.ceil(VOCAB * 0.5)


def test_log_probs_and_greedy_are_those_of_the_logits() -> None:
    logits = torch.randn(3, VOCAB)
    expected = (logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)).log()
    torch.testing.assert_close(ops.log_probs(logits).double(), expected, atol=1e-5, rtol=1e-5)
    assert ops.greedy(logits).tolist() == [int(row.argmax()) for row in logits]
