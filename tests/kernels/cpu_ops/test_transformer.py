"""Ops in C compute what their definitions in torch do."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight_kernels.cpu_ops import transformer as kernels
from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops import transformer as definitions
from inflight_kernels.torch_ops.kv_quantization import QuantizedKV
from inflight_kernels.torch_ops.transformer import AttentionPlan


@pytest.mark.parametrize("width", [1, 7, 16, 100, 576, 2048])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(width: int, has_residual: bool) -> None:
    x, weight = torch.randn(5, width) * 3, torch.rand(width) + 0.5
    residual = torch.randn(5, width) if has_residual else None
    for found, expected in zip(
        kernels.rms_norm(x, weight, 1e-5, residual),
        definitions.rms_norm(x, weight, 1e-5, residual),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_rms_norm_of_heads_inside_of_rows() -> None:
    rows = torch.randn(3, 8, 32)
    weight = torch.rand(32)
    found, _ = kernels.rms_norm(rows[:, 2:5], weight, 1e-6)
    expected, _ = definitions.rms_norm(rows[:, 2:5], weight, 1e-6)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dim", [2, 20, 64, 128])
def test_rotary_of_the_first_heads_of_rows(dim: int) -> None:
    rows = torch.randn(7, 6 * dim)
    angles = torch.randn(7, dim // 2)
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)
    expected = definitions.rotary(rows.view(7, 6, dim)[:, :4], cos, sin)
    rest = rows[:, 4 * dim :].clone()
    found = kernels.rotary(rows.view(7, 6, dim)[:, :4], cos, sin)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(rows[:, 4 * dim :], rest), "heads of values are not rotated"


@pytest.mark.parametrize("width", [1, 8, 13, 1536])
def test_silu_mul(width: int) -> None:
    x = torch.randn(4, 2 * width) * 5
    torch.testing.assert_close(kernels.silu_mul(x), definitions.silu_mul(x), atol=1e-6, rtol=3e-6)


def test_silu_mul_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-math.inf, -1e30, -200.0, -88.0, -87.2, 0.0, 88.8, 1e30, math.nan])
    x = torch.cat([gate, torch.ones(len(gate))])[None]
    found = kernels.silu_mul(x)[0]
    assert found[-1].isnan()
    # The definition's -inf * 0 is NaN; so is this one's -inf / inf.
    assert found[0].isnan()
    torch.testing.assert_close(
        found[1:-1], torch.nn.functional.silu(gate[1:-1]), atol=1e-36, rtol=3e-6
    )


def test_exponentials_are_within_two_units_in_the_last_place() -> None:
    """Read off silu: x / (1 + e^-x) with x = -t is -t / (1 + e^t)."""
    t = torch.linspace(-80, 80, 100_001)
    found = kernels.silu_mul(torch.stack([-t, torch.ones_like(t)], 1).T.reshape(1, -1))[0]
    expected = -t.double() / (1 + t.double().exp())
    ulps = (found.double() - expected).abs() / (expected.abs() * 2**-23).clamp(min=2**-149)
    assert ulps.max() < 4


class Step:
    """Random chunks over a shuffled cache."""

    def __init__(
        self,
        q_lens: list[int],
        kv_lens: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int = 16,
        window: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        width = -(-max(kv_lens) // block_size)
        total = len(kv_lens) * width + 3
        order = torch.randperm(total, generator=generator).numpy()
        self.tables = order[: len(kv_lens) * width].reshape(len(kv_lens), width).astype(np.int64)
        shape = (total, block_size, kv_heads, dim)
        # What no sequence has written is never read.
        self.k, self.v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for table, length in zip(self.tables, kv_lens, strict=True):
            for position in range(length):
                place = int(table[position // block_size]), position % block_size
                self.k[place] = torch.randn(kv_heads, dim, generator=generator)
                self.v[place] = torch.randn(kv_heads, dim, generator=generator)
        starts = np.cumsum([0, *q_lens], dtype=np.int64)
        self.plan = AttentionPlan(
            self.tables, starts, np.array(kv_lens, np.int64), block_size, window=window
        )
        rows = torch.randn(int(starts[-1]), (heads + 2) * dim, generator=generator)
        self.q = rows.view(len(rows), heads + 2, dim)[:, :heads]
        self.scale = dim**-0.5

    def compare(self) -> None:
        # The definition pads rows with other tokens of a block, whose values must be finite.
        k, v = self.k.nan_to_num(0.0), self.v.nan_to_num(0.0)
        expected = definitions.attend(self.q, k, v, self.plan, self.scale)
        found = kernels.attend(self.q, self.k, self.v, self.plan, self.scale)
        torch.testing.assert_close(found, expected, atol=3e-6, rtol=3e-5)
        each = kernels.attend(self.q, self.k, self.v, self.plan, self.scale, each=True)
        torch.testing.assert_close(each, expected, atol=3e-6, rtol=3e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 8), (4, 2, 24), (5, 1, 72), (16, 1, 256)],
)
@pytest.mark.parametrize("q_len", [1, 2, 4, 11])
def test_single_rows(heads: int, kv_heads: int, dim: int, q_len: int) -> None:
    """Alone, or in runs of rows of one chunk."""
    Step([q_len] * 5, [11, 16, 17, 100, 333], heads, kv_heads, dim).compare()


def test_a_run_is_as_long_as_the_kernels() -> None:
    source = Path(kernels.__file__).parents[1] / "csrc/cpu/attention.c"
    assert f"MAX_ROWS = {definitions.MAX_RUN}," in source.read_text()


@pytest.mark.parametrize("window", [1, 7, 16, 40])
@pytest.mark.parametrize("block_size", [8, 16, 20])
def test_windows(window: int, block_size: int) -> None:
    Step([1] * 4, [1, 30, 41, 100], 4, 2, 16, block_size, window).compare()


def test_rows_beside_chunks() -> None:
    step = Step([1, 6, 1, 3], [50, 6, 70, 33], 4, 2, 16)
    step.k.nan_to_num_(0.0), step.v.nan_to_num_(0.0)
    step.compare()


def test_many_rows_are_shared_by_threads() -> None:
    Step([1] * 40, [200] * 40, 9, 3, 64).compare()


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    step = Step([1] * 3, [30, 90, 65], 4, 2, 32)
    together = kernels.attend(step.q, step.k, step.v, step.plan, step.scale)
    for row, length in enumerate([30, 90, 65]):
        plan = AttentionPlan(step.tables[row : row + 1], np.array([0, 1]), np.array([length]), 16)
        alone = kernels.attend(step.q[row : row + 1], step.k, step.v, plan, step.scale)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("window", [0, 10])
def test_a_query_has_the_same_bits_in_any_chunk(window: int) -> None:
    step = Step([30], [50], 4, 2, 16, window=window)
    whole = kernels.attend(step.q, step.k, step.v, step.plan, step.scale, each=True)
    for first, last in ((0, 1), (1, 8), (8, 30)):
        plan = AttentionPlan(
            step.tables, np.array([0, last - first]), np.array([20 + last]), 16, window=window
        )
        part = kernels.attend(step.q[first:last], step.k, step.v, plan, step.scale, each=True)
        assert torch.equal(part, whole[first:last])


def test_scores_far_apart_do_not_overflow() -> None:
    step = Step([1], [40], 2, 1, 8)
    step.q.mul_(1e4)
    step.compare()


def test_a_nan_of_a_sequence_stays_with_it() -> None:
    step = Step([1, 1], [20, 20], 2, 1, 8)
    step.v[int(step.tables[0, 0]), 3] = torch.nan
    found = kernels.attend(step.q, step.k, step.v, step.plan, step.scale)
    assert found[0].isnan().any() and found[1].isfinite().all()


def test_keys_and_values_are_written_to_their_slots() -> None:
    qkv = torch.randn(3, 6, 8)
    k_cache, v_cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    slots = torch.tensor([9, 2, 15])
    kernels.write_kv(qkv[:, 2:4], qkv[:, 4:], k_cache, v_cache, slots)
    assert torch.equal(k_cache.flatten(0, 1)[slots], qkv[:, 2:4])
    assert torch.equal(v_cache.flatten(0, 1)[slots], qkv[:, 4:])
    assert torch.count_nonzero(k_cache) == torch.count_nonzero(qkv[:, 2:4])


# ---------------------------------------------------------------- caches of 8 bits

each_type = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)


def quantized(
    step: Step, dtype: torch.dtype, unwritten: int = 255
) -> tuple[QuantizedKV, QuantizedKV]:
    """The caches of a step in 8 bits. What no sequence has written has this byte; scales of 255 are
    NaN."""
    found = []
    for rows, write in (
        (step.k, kv_quantization.write_keys),
        (step.v, kv_quantization.write),
    ):
        num_blocks, block_size, heads, dim = rows.shape
        data = torch.full((num_blocks, block_size, heads, dim + 2), unwritten).byte()
        memory = kv_quantization.of_blocks(data, dtype)
        slots = (~rows.flatten(0, 1).isnan().flatten(1).any(1)).nonzero()[:, 0]
        write(rows.flatten(0, 1)[slots], memory, slots)
        found.append(memory)
    return found[0], found[1]


@each_type
@pytest.mark.parametrize("dim", [2, 6, 8, 48, 64, 80, 128, 256])
def test_bytes_and_scales_are_those_of_the_definition(dim: int, dtype: torch.dtype) -> None:
    """Bit by bit, of vectors of all sizes, with large columns, zero, NaN and infinite ones."""
    generator = torch.Generator().manual_seed(dim)
    k = torch.randn(300, 3, dim, generator=generator)
    k *= 10 ** torch.empty(300, 3, 1).uniform_(-6, 7, generator=generator)
    k[:100, :, dim // 2] *= 20
    k[5], k[8], k[9] = 0.0, 3e8, 1e-41
    k[6, 1, 0], k[7, 0, 1] = math.nan, -math.inf
    v = k.flip(0)
    slots = torch.randperm(640, generator=generator)[:300]
    data = torch.zeros(2, 2, 40, 16, 3, dim + 2, dtype=torch.uint8)
    found, expected = ([kv_quantization.of_blocks(one, dtype) for one in kv] for kv in data)
    kernels.write_kv(k, v.contiguous(), found[0], found[1], slots)
    definitions.write_kv(k, v, expected[0], expected[1], slots)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.values.view(torch.uint8), theirs.values.view(torch.uint8))
        same = ours.scales == theirs.scales
        assert (same | (ours.scales.isnan() & theirs.scales.isnan())).all()
    assert found[0].scales.isnan().any() and found[0].scales.isinf().any()


@each_type
def test_heads_inside_of_rows_are_written(dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 8, 16)
    data = torch.zeros(2, 2, 4, 4, 2, 18, dtype=torch.uint8)
    found, expected = ([kv_quantization.of_blocks(one, dtype) for one in kv] for kv in data)
    slots = torch.tensor([9, 2, 15, 0, 7])
    kernels.write_kv(qkv[:, 4:6], qkv[:, 6:], found[0], found[1], slots)
    definitions.write_kv(qkv[:, 4:6], qkv[:, 6:], expected[0], expected[1], slots)
    assert torch.equal(data[0], data[1]) and data[0].any()


@each_type
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 8), (5, 1, 72), (16, 1, 256), (4, 2, 12)],
)
@pytest.mark.parametrize("window", [0, 7, 40])
def test_attention_of_bytes(
    heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype
) -> None:
    """Single rows and chunks; heads of 12 are left to torch."""
    lengths = [1, 16, 17, 100, 333, 50]
    step = Step([1, 1, 2, 1, 30, 11], lengths, heads, kv_heads, dim, 16, window)
    zeroed = quantized(step, dtype, unwritten=0)  # torch reads whole blocks
    blocks = torch.arange(len(step.k))
    floats = [kv_quantization.read_blocks(memory, blocks, torch.float32) for memory in zeroed]
    q = kv_quantization.spread_queries(step.q) if dtype == torch.int8 else step.q
    expected = definitions.attend(q, *floats, step.plan, step.scale)
    found = kernels.attend(step.q, *zeroed, step.plan, step.scale)
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=3e-5)
    memories = quantized(step, dtype) if dim % 8 == 0 else zeroed
    found = kernels.attend(step.q, *memories, step.plan, step.scale, each=True)
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=3e-5)


@each_type
@pytest.mark.parametrize("window", [0, 10])
def test_a_query_of_bytes_has_the_same_bits_in_any_chunk(window: int, dtype: torch.dtype) -> None:
    step = Step([30, 3], [50, 40], 4, 2, 16, window=window)
    k, v = quantized(step, dtype)
    whole = kernels.attend(step.q, k, v, step.plan, step.scale, each=True)
    for first, last in ((0, 1), (1, 8), (8, 29), (29, 30)):
        plan = AttentionPlan(
            step.tables[:1], np.array([0, last - first]), np.array([20 + last]), 16, window=window
        )
        part = kernels.attend(step.q[first:last], k, v, plan, step.scale, each=True)
        assert torch.equal(part, whole[first:last])


@each_type
def test_a_vector_that_is_not_finite_is_nan_to_its_sequence_alone(dtype: torch.dtype) -> None:
    step = Step([1, 1, 3], [20, 20, 9], 2, 1, 8)
    step.v[int(step.tables[0, 0]), 3, 0, 1] = math.inf
    data = torch.zeros(2, *step.k.shape[:3], 10, dtype=torch.uint8)
    k, v = (kv_quantization.of_blocks(one, dtype) for one in data)
    slots = torch.arange(step.k.shape[0] * 16)
    rows = [one.nan_to_num(0.0, posinf=math.inf).flatten(0, 1) for one in (step.k, step.v)]
    kernels.write_kv(rows[0], rows[1], k, v, slots)
    for each in (False, True):
        found = kernels.attend(step.q, k, v, step.plan, step.scale, each=each)
        assert found[0].isnan().all() and found[1:].isfinite().all()


@each_type
def test_a_part_of_each_vector_is_left_to_torch(dtype: torch.dtype) -> None:
    """As latents share their memory with keys: they are the first columns of it."""
    data = torch.zeros(3, 16, 1, 34, dtype=torch.uint8)
    memory = kv_quantization.of_blocks(data, dtype)
    part = kv_quantization.first_columns(memory, 16)
    assert isinstance(part, QuantizedKV)
    rows = torch.randn(40, 1, 32)
    kv_quantization.write(rows, memory, torch.arange(40))
    plan = AttentionPlan(np.arange(3)[None], np.array([0, 1]), np.array([40]), 16)
    q = torch.randn(1, 4, 32)
    found = kernels.attend(q, memory, part, plan, 0.2)
    assert torch.equal(found, definitions.attend(q, memory, part, plan, 0.2))
