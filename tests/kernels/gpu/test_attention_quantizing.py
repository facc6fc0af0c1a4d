"""Attention that writes e4m3 with coarse scales: against the same in 16 bits, and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention_steps import Step, error, make_step, with_sinks
from graph_replay import check_replays
from inflight_kernels.ops.attention.attention import attend, quantizes
from inflight_kernels.ops.attention.operands import QuantizedOut
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.ops.linear import gemm
from inflight_kernels.ops.linear.scaled_rows import ScaledRows, quantize_rows, settle_parts
from inflight_kernels.runtime.launch import is_hopper

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
NAN = 0x7F  # of e4m3
SUBNORMAL = 2.0**-9  # of e4m3, the step of its smallest numbers
HEADS = (32, 8)

# Chunks; and whether their units are whole, so that blocks write e4m3, or cut, or of decodes, which
# have another kernel, so that some or all rows are left in 16 bits.
WHOLE, SOME, NONE = "whole", "some whole", "none whole"
STEPS = {
    "one long chunk": ([4096], [4096], WHOLE),
    "a chunk with history": ([2000], [4100], WHOLE),
    "one short chunk": ([300], [4096], NONE),
    "some chunks": ([2048, 1500, 700], [2048, 3001, 4000], WHOLE),
    "with decodes": ([1, 4096, 1, 3, 1], [900, 4096, 4000, 77, 1], SOME),
    "more decodes": ([1] * 60 + [2100], [17 * i + 1 for i in range(60)] + [2100], SOME),
}


def memory(num_tokens: int, num_heads: int, head_dim: int) -> QuantizedOut:
    """Memory for so many rows, without a value in it."""
    shape = num_tokens, num_heads * head_dim
    values = torch.full(shape, NAN, dtype=torch.uint8, device="cuda").view(FP8)
    scales = torch.full((num_tokens,), torch.nan, device="cuda")
    codes = torch.zeros(num_tokens, num_heads, dtype=torch.uint8, device="cuda")
    return QuantizedOut(ScaledRows(values, scales), codes)


def quantized(step: Step, left: Tensor | None = None, **spec: Any) -> ScaledRows:
    """The step's attention; `left` is what kernels may leave in 16 bits."""
    out, metadata = memory(*step.q.shape), step.metadata(**spec)
    assert quantizes(metadata) == is_hopper()
    left = step.out() if left is None else left
    attend(step.q, step.kv, metadata, left, sinks=step.sinks, quantized=out)
    assert (out.codes == 0).all(), "codes were left for the next layer"
    return out.rows


def wide(rows: ScaledRows) -> Tensor:
    return rows.values.double() * rows.scales.double()[:, None]


def exponents(largest: Tensor) -> Tensor:
    """i of the least scale 2^(8 i - 4) that takes these magnitudes to 448 at most."""
    return ((largest.double().clamp(min=1e-12) / 448).log2() + 4).div(8).ceil().int()


def check(found: ScaledRows, plain: Tensor) -> None:
    """Each value is the nearest number of e4m3, or of those that it has with the scale of its head,
    but for the rounding of the same sums to bfloat16 in `plain`."""
    plain = plain.view(len(plain), -1).double()
    largest = plain.abs().amax(1)
    mantissas, own = found.scales.frexp()
    assert (mantissas == 0.5).all() and ((own + 3) % 8 == 0).all(), "no coarse scales"
    own = (own + 3) // 8
    # A maximum that is close to the border of a scale may have been rounded to lie beyond it.
    assert (own >= exponents(0.99 * largest)).all()
    assert (own <= exponents(1.01 * largest)).all()
    step = found.scales.double()[:, None] * SUBNORMAL
    allowed = torch.where(plain.abs() < 8 * step, step, plain.abs() / 16) + plain.abs() / 256
    errors = (wide(found) - plain).abs() / allowed
    assert errors.max() <= 1.05, errors.max()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", STEPS)
def test_results_are_those_in_16_bits_rounded_to_e4m3(name: str, head_dim: int) -> None:
    q_lens, kv_lens, units = STEPS[name]
    heads = {"num_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": head_dim}
    step = make_step(q_lens, kv_lens, **heads)
    left = step.out()
    found = quantized(step, left, max_q_len=max(q_lens))
    check(found, step.run(max_q_len=max(q_lens)))
    assert error(wide(found).view(step.q.shape), step.definition()) < 0.04
    if is_hopper():
        is_left = ~left.isnan().view(len(left), -1).all(1)
        assert is_left.any() == (units != WHOLE)
        assert is_left.all() == (units == NONE)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (28, 4), (16, 2), (8, 1), (71, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_number_of_query_heads_may_share_a_kv_head(
    heads: tuple[int, int], head_dim: int
) -> None:
    num_heads, num_kv_heads = heads
    step = make_step(
        [1, 1100, 1, 600],
        [400, 1100, 33, 900],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    found = quantized(step)
    check(found, step.run())
    assert error(wide(found).view(step.q.shape), step.definition()) < 0.04


@pytest.mark.parametrize("name", ["one long chunk", "one short chunk", "with decodes"])
def test_windows_caps_and_sinks_are_those_of_attention(name: str) -> None:
    q_lens, kv_lens, _ = STEPS[name]
    step = make_step(q_lens, kv_lens, num_heads=32, num_kv_heads=8)
    for made, spec in (
        (step, {"window": 130}),
        (step, {"soft_cap": 5.0}),
        (with_sinks(step), {}),
    ):
        check(quantized(made, **spec), made.run(**spec))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", STEPS)
def test_heads_of_a_row_may_be_of_any_magnitude(name: str, head_dim: int) -> None:
    q_lens, kv_lens, _ = STEPS[name]
    step = make_step(q_lens, kv_lens, num_heads=32, num_kv_heads=8, head_dim=head_dim)
    magnitudes = torch.logspace(-3, 3, 8, device="cuda")
    step.v_cache *= magnitudes[torch.randperm(8, device="cuda")][:, None]
    check(quantized(step), step.run())


@pytest.mark.parametrize("name", STEPS)
def test_results_are_bitwise_reproducible(name: str) -> None:
    q_lens, kv_lens, _ = STEPS[name]
    step = make_step(q_lens, kv_lens, num_heads=32, num_kv_heads=8)
    first, second = quantized(step), quantized(step)
    assert torch.equal(first.values.view(torch.uint8), second.values.view(torch.uint8))
    assert torch.equal(first.scales, second.scales)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["one long chunk", "one short chunk", "with decodes"])
def test_a_broken_value_breaks_the_rows_that_see_it(name: str, broken: float) -> None:
    """Of whatever head it is; those of other tiles stay as they are."""
    q_lens, kv_lens, _ = STEPS[name]
    step = make_step(q_lens, kv_lens, num_heads=32, num_kv_heads=8)
    whole = quantized(step)
    chunk = q_lens.index(max(q_lens))
    place = kv_lens[chunk] - q_lens[chunk] // 2
    block = int(step.block_tables[chunk, place // 16])
    step.v_cache[block, place % 16, 5, 7] = broken
    found = quantized(step)
    plain = step.run().view(len(step.q), -1)
    is_broken = ~plain.isfinite().all(1)
    assert 0 < is_broken.sum() < len(plain)
    assert torch.equal(found.scales.isnan(), is_broken)
    assert torch.equal(wide(found)[~is_broken], wide(whole)[~is_broken])


@pytest.mark.parametrize("name", ["one long chunk", "one short chunk", "with decodes"])
def test_rows_of_zeros_are_zeros(name: str) -> None:
    q_lens, kv_lens, _ = STEPS[name]
    step = make_step(q_lens, kv_lens, num_heads=32, num_kv_heads=8)
    step.v_cache *= 0
    found = quantized(step)
    assert (found.values.float() == 0).all()
    assert (found.scales > 0).all() and (found.scales < 1e-9).all()


def test_rows_of_no_chunk_are_quantised_as_they_are_left() -> None:
    step = make_step([2100, 1], [2100, 90], num_heads=32, num_kv_heads=8)
    used = len(step.q)
    whole = quantized(step)
    step.q = torch.cat((step.q, step.q[:100]))
    left = step.out()
    left[used:] = 3.0
    found = quantized(step, left, max_q_len=2100)
    assert torch.equal(wide(found)[:used], wide(whole))
    assert (wide(found)[used:] == 3.0).all()


def test_layers_with_dependent_launches_replay_from_a_graph() -> None:
    """Attention and the product after it of four layers, in the same memory: a launch that reads or
    writes too early shows, as does a code that is left."""
    heads, head_dim = (16, 4), 128
    width, num_tokens = heads[0] * head_dim, 2103
    step = make_step(
        [1, 2100, 1, 1],
        [900, 2100, 300, 17],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
    )
    weights = []
    for _ in range(4):
        weight = ScaledRows.empty(width, width, "cuda")
        quantize_rows(
            (torch.randn(width, width, device="cuda") * width**-0.5).bfloat16(), out=weight
        )
        weights.append(weight)
    states = [step.q, *(torch.empty_like(step.q) for _ in weights)]
    metadata = step.metadata(max_q_len=2100, planned=True)
    out, left = memory(num_tokens, heads[0], head_dim), step.out()

    def chain(pdl: bool) -> None:
        plan(metadata, pdl=pdl)
        for i, weight in enumerate(weights):
            attend(states[i], step.kv, metadata, left, quantized=out, pdl=pdl)
            product = states[i + 1].view(num_tokens, width)
            gemm.linear(out.rows, weight, out=product, pdl=pdl)

    check_replays(chain, states)
    assert (out.codes == 0).all()


# ---------------------------------------------------------------- settling


@pytest.mark.parametrize("part", [32, 64, 128, 256])
@pytest.mark.parametrize("parts", [1, 8, 32, 71])
@pytest.mark.parametrize("num_rows", [1, 8, 300])
def test_settled_rows_have_the_scale_of_their_largest_part(
    num_rows: int, parts: int, part: int
) -> None:
    """Bit by bit as float32 divides and rounds; row 0 has one scale, row 1 no part of 8 bits."""
    width = parts * part
    values = (torch.randn(num_rows, width, device="cuda") * 100).clamp_(-448, 448).to(FP8)
    codes = torch.randint(15, 20, (num_rows, parts), device="cuda", dtype=torch.uint8)
    codes[torch.rand(num_rows, parts, device="cuda") < 0.3] = 0
    codes[0], codes[1:2] = 16, 0
    magnitudes = 10.0 ** torch.randint(-4, 6, (num_rows, parts), device="cuda")
    left = torch.randn(num_rows, parts, part, device="cuda") * magnitudes[:, :, None]
    left = left.bfloat16().view(num_rows, width)

    own = codes.repeat_interleave(part, 1)
    is_left = own == 0
    largest_left = left.float().masked_fill(~is_left, 0.0).abs().amax(1)
    of_left = torch.where(is_left.any(1), 16 + exponents(largest_left), 0)
    largest = torch.maximum(codes.amax(1).int(), of_left)
    scales = torch.exp2(8.0 * (largest - 16) - 4)
    factors = torch.exp2(8.0 * (own.int() - largest[:, None]))
    expected = torch.where(is_left, left.float() / scales[:, None], values.float() * factors)

    rows = ScaledRows(values.clone(), torch.full((num_rows,), torch.nan, device="cuda"))
    settle_parts(left, out=rows, codes=codes, part=part)
    assert torch.equal(rows.scales, scales)
    assert torch.equal(rows.values.view(torch.uint8), expected.to(FP8).view(torch.uint8))
    assert torch.equal(rows.values[0].view(torch.uint8), values[0].view(torch.uint8))
    assert (codes == 0).all()


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_part_that_is_broken_breaks_its_row(broken: float) -> None:
    left = torch.randn(20, 256, device="cuda").bfloat16()
    left[3, 200], left[5, 10] = broken, broken
    codes = torch.zeros(20, 4, dtype=torch.uint8, device="cuda")
    codes[:, 0] = 16  # so that what is left of row 5 is not read there
    codes[7, 0] = 255
    rows = ScaledRows.empty(20, 256, "cuda")
    settle_parts(left, out=rows, codes=codes, part=64)
    assert rows.scales.isnan().nonzero().flatten().tolist() == [3, 7]


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    left = torch.zeros(20, 256, device="cuda", dtype=torch.bfloat16)
    rows = ScaledRows.empty(20, 256, "cuda")
    codes = torch.zeros(20, 4, dtype=torch.uint8, device="cuda")
    settle_parts(left, out=rows, codes=codes, part=64)
    integers = ScaledRows.empty(20, 256, "cuda", torch.int8)
    with pytest.raises(ValueError, match=r"rows\.values is torch\.int8"):
        settle_parts(left, out=integers, codes=codes, part=64)
    with pytest.raises(ValueError, match=r"left is torch\.float16"):
        settle_parts(left.half(), out=rows, codes=codes, part=64)
    with pytest.raises(ValueError, match=r"left is .*\[19, 256\]; expected .*\[20, 256\]"):
        settle_parts(left[:19], out=rows, codes=codes, part=64)
    with pytest.raises(ValueError, match=r"codes is .*\[20, 4\]; expected .*\[20, 2\]"):
        settle_parts(left, out=rows, codes=codes, part=128)
    with pytest.raises(ValueError, match="expected a multiple of 96"):
        settle_parts(left, out=rows, codes=codes, part=96)
    with pytest.raises(ValueError, match="part is 16"):
        settle_parts(left, out=rows, codes=codes, part=16)
