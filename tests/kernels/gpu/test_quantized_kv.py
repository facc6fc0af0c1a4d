"""Keys and values of 8 bits: written as by the definition, and attended to as if dequantised."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_steps import BOUND, STEPS, Step, error, head_error, make_step, with_sinks
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops import cache
from inflight_kernels.ops.attention import operands
from inflight_kernels.ops.attention.dispatch import HEAD_DIMS, HeadsShape
from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.runtime.launch import is_hopper, num_multiprocessors
from inflight_kernels.torch_ops import kv_quantization, transformer
from inflight_kernels.torch_ops.kv_quantization import (
    QuantizedKV,
    dequantize,
    quantize,
    quantize_keys,
)
from quantized_steps import QuantizedStep, blocks, each_type, quantized, read

pytestmark = pytest.mark.gpu

EPS = 1e-6
NUM_POSITIONS = 5000


# ---------------------------------------------------------------- attention


@each_type
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_that_of_the_dequantised_values(
    step: str, head_dim: int, dtype: torch.dtype
) -> None:
    made = quantized(make_step(*STEPS[step], head_dim=head_dim), dtype)
    expected = made.plain.definition()
    assert error(made.run(), expected) < BOUND[torch.bfloat16]
    assert error(made.run(batch_invariant=True), expected) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_right_in_100_kib_of_shared_memory(
    step: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(operands, "is_hopper", lambda: False)
    made = quantized(make_step(*STEPS[step], head_dim=head_dim), dtype)
    assert error(made.run(), made.plain.definition()) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (32, 8), (28, 4), (9, 3), (16, 1), (71, 1)])
@pytest.mark.parametrize("step", ["decode", "decode, many", "verify", "mixed"])
def test_any_number_of_query_heads_may_share_a_kv_head(
    step: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    made = quantized(make_step(*STEPS[step], num_heads=heads[0], num_kv_heads=heads[1]), dtype)
    assert error(made.run(), made.plain.definition()) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("step", STEPS)
def test_any_block_size(step: str, block_size: int, dtype: torch.dtype) -> None:
    """With heads that have a kernel for many sequences, too."""
    made = quantized(
        make_step(*STEPS[step], block_size=block_size, num_heads=32, num_kv_heads=8), dtype
    )
    assert error(made.run(), made.plain.definition()) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("step", STEPS)
def test_windows_and_soft_caps(step: str, dtype: torch.dtype) -> None:
    made = quantized(make_step(*STEPS[step]), dtype)
    for window in (1, 63, 1000):
        out = made.run(window=window)
        assert error(out, made.plain.definition(window=window)) < BOUND[torch.bfloat16]
    made.plain.scale = 1.0
    expected = made.plain.definition(soft_cap=30.0)
    assert error(made.run(soft_cap=30.0), expected) < 2 * BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("heads", [(64, 8, 64), (8, 2, 96), (8, 2, 128), (8, 2, 256)], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_sinks_take_part_once(
    step: str, heads: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    shape = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    made = quantized(with_sinks(make_step(*STEPS[step], **shape)), dtype)
    expected = made.plain.definition(window=window)
    for batch_invariant in (False, True):
        out = made.run(window=window, batch_invariant=batch_invariant)
        assert head_error(out, expected) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("step", ["decode", "decode, hundred", "verify", "mixed", "decode, many"])
def test_values_may_differ_by_orders_of_magnitude(step: str, dtype: torch.dtype) -> None:
    """Between layers, within a sequence, and with vectors of zeros; so may queries."""
    plain = make_step(*STEPS[step], num_heads=32, num_kv_heads=8)
    values, queries = plain.v_cache, plain.q
    for low, high in ((-6, -6), (4, 4), (-6, 4)):
        exponents = torch.empty(*values.shape[:3], 1, device="cuda").uniform_(low, high)
        plain.v_cache = (values.float() * 10**exponents).bfloat16()
        plain.v_cache[::3, 1] = 0.0
        for factor in (1e-2, 1.0, 1e4):
            plain.q = (queries.float() * factor).bfloat16()
            plain.scale = plain.q.shape[-1] ** -0.5 / factor
            made = quantized(plain, dtype)
            assert error(made.run(), made.plain.definition()) < BOUND[torch.bfloat16]


@each_type
def test_queries_beyond_float16_stay_visible_and_hurt_no_other_chunk(dtype: torch.dtype) -> None:
    plain = make_step(*STEPS["decode"], num_heads=32, num_kv_heads=8)
    plain.scale = 1e-5
    plain.q[:, :, 5] = 6e4
    made = quantized(plain, dtype)
    healthy = made.run()
    assert error(healthy, made.plain.definition()) < BOUND[torch.bfloat16]
    for damage in (1e5, torch.inf, torch.nan):
        plain.q[-1, :, 7] = damage
        out = made.run()
        assert out[-1].isnan().all()
        assert torch.equal(out[:-1], healthy[:-1])


@each_type
@pytest.mark.parametrize("step", ["decode", "decode, hundred", "mixed", "decode, many"])
def test_a_plan_is_valid_for_all_layers_with_ready_history(step: str, dtype: torch.dtype) -> None:
    made = quantized(make_step(*STEPS[step], num_heads=32, num_kv_heads=8), dtype)
    workspace = made.workspace()
    first = made.run(workspace)
    assert error(first, made.plain.definition()) < BOUND[torch.bfloat16]
    for _ in range(5):
        assert torch.equal(made.run(workspace, history_ready=True), first)


@each_type
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 8, 64), (24, 4, 96), (36, 12, 64)], ids=str)
@pytest.mark.parametrize("difference", [0, 1, 30])
@pytest.mark.parametrize("fewer", [0, 3])
def test_pairs_of_blocks_merge_the_pieces_of_a_unit(
    fewer: int, difference: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """For so many sequences units have two pieces; of ragged ones, some have one or three."""
    names = ("num_heads", "num_kv_heads", "head_dim")
    count = num_multiprocessors() * 4 // heads[1] - fewer
    lengths = [300 + i * difference for i in range(count)]
    plain = with_sinks(make_step([1] * count, lengths, **dict(zip(names, heads, strict=True))))
    made = quantized(plain, dtype)
    (part,) = made.metadata(made.workspace()).parts
    assert isinstance(part.shape, HeadsShape) and part.shape.paired == is_hopper()
    workspace = made.workspace()
    first = made.run(workspace)
    assert head_error(first, made.plain.definition()) < BOUND[torch.bfloat16]
    for _ in range(5):
        assert torch.equal(made.run(workspace, history_ready=True, pdl=True), first)


# ---------------------------------------------------------------- prompts, dequantised

PROMPTS = [step for step in STEPS if not step.startswith(("decode", "verify"))]


@each_type
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("step", STEPS)
def test_prompts_may_be_dequantised_first(
    step: str, block_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "block_size": block_size}
    made = quantized(make_step(*STEPS[step], **shape), dtype)
    memory = made.dequantized()
    out = made.run(dequantized=memory)
    plain = made.plain if step.startswith("decode") else made.rounded()
    assert error(out, plain.definition()) < BOUND[torch.bfloat16]
    was_used = int(memory.sources[-1, 0]) >= 0
    assert was_used == (is_hopper() and not step.startswith("decode"))


@each_type
@pytest.mark.parametrize("heads", [(4, 4), (28, 4), (9, 3), (16, 1), (71, 1)])
@pytest.mark.parametrize("step", ["mixed", "prefill"])
def test_dequantised_prompts_of_any_heads(
    step: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    made = quantized(make_step(*STEPS[step], num_heads=heads[0], num_kv_heads=heads[1]), dtype)
    out = made.run(dequantized=made.dequantized(spare_keys=1000))
    assert error(out, made.rounded().definition()) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("step", PROMPTS)
def test_dequantised_prompts_with_windows_and_soft_caps(step: str, dtype: torch.dtype) -> None:
    made = quantized(make_step(*STEPS[step]), dtype)
    for window in (1, 63, 1000):
        out = made.run(window=window, dequantized=made.dequantized())
        assert error(out, made.rounded().definition(window=window)) < BOUND[torch.bfloat16]
    made.plain.scale = 1.0
    expected = made.rounded().definition(soft_cap=30.0)
    out = made.run(soft_cap=30.0, dequantized=made.dequantized())
    assert error(out, expected) < 2 * BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("step", PROMPTS)
def test_dequantised_prompts_with_sinks(step: str, window: int, dtype: torch.dtype) -> None:
    plain = with_sinks(make_step(*STEPS[step], num_heads=64, num_kv_heads=8, head_dim=64))
    made = quantized(plain, dtype)
    out = made.run(window=window, dequantized=made.dequantized())
    assert head_error(out, made.rounded().definition(window=window)) < BOUND[torch.bfloat16]


@each_type
def test_prompts_are_dequantised_as_by_the_definition(dtype: torch.dtype) -> None:
    made = quantized(make_step(*STEPS["mixed"], num_heads=32, num_kv_heads=8), dtype)
    memory = made.dequantized()
    made.run(dequantized=memory)
    if not is_hopper():
        assert memory.sources.eq(-1).all(), "other GPUs attend to bytes"
        return
    starts = made.plain.query_start.tolist()
    for i, kv_len in enumerate(made.plain.seq_lens.tolist()):
        if (starts[i + 1] - starts[i]) * 4 <= 16:
            continue
        blocks = made.plain.block_tables[i, : -(-kv_len // 16)].long()
        places = memory.tables[i, : -(-kv_len // 64)].long()
        for memory_of, copies in zip(made.memories, memory.blocks, strict=True):
            expected = kv_quantization.read_blocks(memory_of, blocks, torch.bfloat16)
            found = copies[places].flatten(0, 1)[:kv_len]
            assert torch.equal(found, expected.flatten(0, 1)[:kv_len])


@each_type
def test_layers_share_the_memory_of_prompts(dtype: torch.dtype) -> None:
    """A launch may begin before the preceding one has ended, which reads what it overwrites."""
    plain = make_step(*STEPS["prefill"], num_heads=32, num_kv_heads=8)
    layers = [quantized(plain, dtype), quantized(plain, dtype)]
    memory, workspace = layers[0].dequantized(), layers[0].workspace()
    expected = [layer.run(dequantized=layer.dequantized()) for layer in layers]
    layers[0].run(workspace, dequantized=memory, pdl=True)
    for _ in range(20):
        for one, wanted in zip(layers, expected, strict=True):
            out = one.run(workspace, history_ready=True, dequantized=memory, pdl=True)
            assert torch.equal(out, wanted)


@each_type
@pytest.mark.parametrize("step", ["decode", "decode, many", "prefill"])
def test_a_value_that_is_not_finite_stays_visible_and_hurts_no_other_chunk(
    step: str, dtype: torch.dtype
) -> None:
    made = quantized(make_step(*STEPS[step], num_heads=32, num_kv_heads=8), dtype)
    healthy = made.run()
    for memory in made.memories:
        damaged = memory.scales.clone()
        block = int(made.plain.block_tables[1, 0])
        memory.scales[block, :, 0] = torch.nan
        out = made.run()
        rows = slice(*made.plain.query_start[1:3].tolist())
        assert out[rows].isnan().all()
        assert torch.equal(out[: rows.start], healthy[: rows.start])
        assert torch.equal(out[rows.stop :], healthy[rows.stop :])
        memory.scales.copy_(damaged)


# ---------------------------------------------------------------- writing

SHAPES = [(32, 8, 128), (9, 3, 64), (4, 1, 256), (6, 2, 80), (5, 5, 96), (7, 1, 112), (3, 1, 48)]


@dataclass
class Written:
    """Operands of a step of RoPE, and memory for its keys and values."""

    qkv: Tensor
    rope: RopeInputs
    data: Tensor
    kv: PagedKV
    heads: tuple[int, int, int]

    def run(self, q_out: Tensor, qk_norm: QkNorm | None = None, *, overlaps: bool = False) -> None:
        rope_write_kv(
            *(self.qkv, self.rope, self.kv),
            q_out=q_out,
            qk_norm=qk_norm,
            history_ready=overlaps,
            pdl=overlaps,
        )

    def expected(self, qk_norm: QkNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = self.heads
        rows = self.qkv.double().view(len(self.qkv), -1, head_dim)
        q, k, v = rows.split([num_heads, num_kv_heads, num_kv_heads], 1)
        if qk_norm is not None:
            q, _ = transformer.rms_norm(q, qk_norm.q_weight.double(), EPS)
            k, _ = transformer.rms_norm(k, qk_norm.k_weight.double(), EPS)
        cos, sin = (table[self.rope.positions].double() for table in (self.rope.cos, self.rope.sin))
        q, k = transformer.rotary(q, cos, sin), transformer.rotary(k, cos, sin)
        if kv_quantization.holds_spread_keys(self.kv.k_cache):
            q = kv_quantization.spread_queries(q)
        return q, k, v


def make_written(
    tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, block_size: int = 16
) -> Written:
    num_heads, num_kv_heads, head_dim = heads
    frequencies = (1e4 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    cos, sin = transformer.rotary_tables(frequencies, NUM_POSITIONS)
    num_blocks = tokens // block_size + 9
    memory = blocks(2 * num_blocks, block_size, num_kv_heads, head_dim)
    data = memory.view(2, num_blocks, *memory.shape[1:])
    rope = RopeInputs(
        torch.randint(0, NUM_POSITIONS, (tokens,), device="cuda"),
        torch.randperm(num_blocks * block_size, device="cuda")[:tokens],
        cos.cuda(),
        sin.cuda(),
    )
    kv = PagedKV(*(kv_quantization.of_blocks(one, dtype) for one in data))
    qkv = torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, device="cuda")
    return Written(qkv.bfloat16(), rope, data, kv, heads)


def rows_of(memory: Any, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes [n, G, D] and scales [n, G] of slots, once nothing else was written."""
    assert isinstance(memory, QuantizedKV)
    values = memory.values.view(torch.uint8).flatten(0, 1)
    scales = memory.scales.transpose(1, 2).flatten(0, 1)
    others = torch.ones(len(values), dtype=torch.bool, device="cuda")
    others[slots] = False
    assert (values[others] == 255).all() and scales[others].isnan().all()
    return values[slots].view(memory.values.dtype), scales[slots]


@each_type
@pytest.mark.parametrize("tokens", [1, 64, 65])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_step_is_written_after_the_projection_that_it_overlaps(
    dtype: torch.dtype, tokens: int, normed: bool
) -> None:
    """Up to 64 tokens are rehearsed while it still runs: what is computed then must not show."""
    step = make_written(tokens, (32, 8, 128), dtype)
    weights = [torch.randn(128, device="cuda") for _ in range(2)]
    qk_norm = QkNorm(weights[0], weights[1], EPS) if normed else None
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(step.qkv.shape[1], 4096, device="cuda", dtype=torch.bfloat16) / 64
    project = skinny_gemm.linear if tokens <= skinny_gemm.MAX_TOKENS else gemm.linear
    expected = torch.empty(tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
    project(x, weight, out=step.qkv)
    step.run(expected, qk_norm)
    data = step.data.clone()
    for _ in range(5):
        q_out = torch.full_like(expected, torch.nan)
        step.qkv.fill_(torch.nan)
        step.data.fill_(255)
        project(x, weight, out=step.qkv, pdl=True)
        step.run(q_out, qk_norm, overlaps=True)
        assert torch.equal(q_out, expected)
        assert torch.equal(step.data, data)


@each_type
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 37, 700])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_step_is_written_as_by_the_definition(
    dtype: torch.dtype, heads: tuple[int, int, int], tokens: int, normed: bool
) -> None:
    step = make_written(tokens, heads, dtype)
    qk_norm = None
    if normed:
        weights = [torch.randn(heads[2], device="cuda") for _ in range(2)]
        qk_norm = QkNorm(weights[0], weights[1], EPS)
    q_out = Guarded(tokens, heads[0], heads[2], dtype=torch.bfloat16)
    step.run(q_out.tensor, qk_norm)
    q, k, v = step.expected(qk_norm)
    assert relative_error(q_out.check(), q) < ROUNDING[torch.bfloat16]
    slots = step.rope.slot_mapping
    # Values are only copied: the same bits. Keys are rotated, and spread for INT8, in float32: now
    # and then one rounds to the other neighbour, or a scale does.
    values, scales = rows_of(step.kv.v_cache, slots)
    expected, expected_scales = quantize(v, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    # Of e4m3's scales, two may have errors so close that the other one is chosen.
    keys, scales = rows_of(step.kv.k_cache, slots)
    expected, expected_scales = quantize_keys(k, dtype)
    alike = ((scales / expected_scales).double() - 1).abs() < 1.5e-3
    assert float(alike.float().mean()) >= (1.0 if dtype == torch.int8 else 0.995)
    assert relative_error(scales[alike], expected_scales[alike].double()) < 1e-4
    same = keys.view(torch.uint8) == expected.view(torch.uint8)
    assert float(same[alike].float().mean()) > 0.99
    found = dequantize(keys, scales, torch.float64)
    if dtype == torch.int8:
        k = kv_quantization.spread_keys(k)
    steps = scales.double().unsqueeze(-1) * (1 if dtype == torch.int8 else 32)
    assert ((found - k).abs() <= 0.51 * steps).all()


@each_type
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_keys_that_are_not_rotated_have_the_bytes_of_the_definition(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Those of position 0, of any size, and with a few large columns."""
    step = make_written(300, heads, dtype)
    step.rope.positions.zero_()
    keys = step.qkv.view(300, -1, heads[2])[:, heads[0] : heads[0] + heads[1]]
    keys[100:200, :, 3] *= 20
    keys *= 10 ** torch.empty(300, heads[1], 1, device="cuda").uniform_(-4, 5)
    step.run(torch.empty(300, heads[0], heads[2], dtype=torch.bfloat16, device="cuda"))
    found, scales = rows_of(step.kv.k_cache, step.rope.slot_mapping)
    expected, expected_scales = quantize_keys(keys, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@each_type
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_scales_are_in_their_block_whatever_its_size(dtype: torch.dtype, block_size: int) -> None:
    step = make_written(100, (4, 2, 64), dtype, block_size)
    step.run(torch.empty(100, 4, 64, dtype=torch.bfloat16, device="cuda"))
    _, _, v = step.expected(None)
    values, scales = rows_of(step.kv.v_cache, step.rope.slot_mapping)
    expected, expected_scales = quantize(v, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@each_type
def test_zeros_numbers_out_of_range_and_negative_slots(dtype: torch.dtype) -> None:
    step = make_written(6, (4, 2, 64), dtype)
    rows = step.qkv.view(6, 8, 64)
    rows[0, 4:] = 0.0
    rows[1, 4:, 3] = torch.nan
    rows[2, 6:, 5] = -torch.inf
    rows[3, 6:, 63] = 3e9  # its scale exceeds float16
    rows[4] *= 1e-6
    step.rope.slot_mapping[5] = -1
    step.run(torch.empty(6, 4, 64, dtype=torch.bfloat16, device="cuda"))
    slots = step.rope.slot_mapping[:5]
    for memory in (step.kv.k_cache, step.kv.v_cache):
        values, scales = rows_of(memory, slots)
        found = dequantize(values, scales, torch.float32)
        assert not found[0].any() and not scales[0].any()
        assert found[1].isnan().all()
        assert found[4].isfinite().all()
        assert not values.float().isnan().any()
    assert found[2].isnan().all() and found[3].isnan().all()
    expected, _ = quantize(rows[4, 6:], dtype)
    assert torch.equal(values[4].view(torch.uint8), expected.view(torch.uint8))


@each_type
def test_blocks_are_copied_with_their_scales(dtype: torch.dtype) -> None:
    step = make_written(64, (4, 2, 64), dtype)
    step.run(torch.empty(64, 4, 64, dtype=torch.bfloat16, device="cuda"))
    before = step.data.clone()
    sources = torch.tensor([0, 3, 1], device="cuda")
    targets = torch.tensor([5, 1, 3], device="cuda")
    cache.copy_blocks(step.data, sources, targets)
    assert torch.equal(step.data[:, targets], before[:, sources])
    others = [0, 2, 4, 6, 7]
    assert torch.equal(step.data[:, others], before[:, others])


@each_type
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_step_attends_to_what_it_has_written(dtype: torch.dtype, head_dim: int) -> None:
    """RoPE, the write and attention of a prompt in two chunks, and of the prompt as a whole."""
    tokens, heads = 150, (8, 2, head_dim)
    step = make_written(tokens, heads, dtype)
    num_blocks = -(-tokens // 16)
    table = torch.randperm(num_blocks, device="cuda").int()[None]
    places = torch.arange(tokens, device="cuda")
    step.rope.slot_mapping.copy_(table[0].long()[places // 16] * 16 + places % 16)
    step.rope.positions.copy_(places)
    q = torch.empty(tokens, 8, head_dim, dtype=torch.bfloat16, device="cuda")
    step.run(q)
    outs = []
    for cuts in ((0, tokens), (0, 70, tokens)):
        parts = []
        for begin, end in itertools.pairwise(cuts):
            made = Step(
                q[begin:end],
                read(step.kv.k_cache),  # type: ignore[arg-type]
                read(step.kv.v_cache),  # type: ignore[arg-type]
                table,
                torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
                torch.tensor([end], dtype=torch.int32, device="cuda"),
                head_dim**-0.5,
            )
            both = QuantizedStep(made, (step.kv.k_cache, step.kv.v_cache))  # type: ignore[arg-type]
            parts.append(both.run(batch_invariant=True))
            assert error(parts[-1], made.definition()) < BOUND[torch.bfloat16]
        outs.append(torch.cat(parts))
    assert torch.equal(*outs)
