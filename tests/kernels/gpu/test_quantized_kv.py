"""Keys and values of 8 bits: written as by the definition, and attended to as if dequantised."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_projections import Projection, make_projection
from attention_steps import BOUND, STEPS, Step, error, make_step
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops import attention_operands, cache
from inflight_kernels.ops.attention import attend, plan, rope_attend, rotates, workspace_size
from inflight_kernels.ops.attention_dispatch import HEAD_DIMS
from inflight_kernels.ops.attention_operands import (
    AttentionMetadata,
    AttentionParams,
    DequantizedKV,
)
from inflight_kernels.ops.linear import skinny_gemm
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.runtime.launch import is_hopper
from inflight_kernels.torch_ops import kv_quantization, transformer
from inflight_kernels.torch_ops.kv_quantization import QuantizedKV, dequantize, quantize

pytestmark = pytest.mark.gpu

DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
each_type = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
EPS = 1e-6
NUM_POSITIONS = 5000


def blocks(num_blocks: int, block_size: int, heads: int, head_dim: int) -> Tensor:
    """Memory whose scales are NaN, and whose bytes are NaN in e4m3."""
    shape = (num_blocks, block_size, heads, head_dim + 2)
    return torch.full(shape, 255, dtype=torch.uint8, device="cuda")


def read(memory: QuantizedKV, dtype: torch.dtype = torch.float64) -> Tensor:
    """All blocks, dequantised."""
    every = torch.arange(len(memory.values), device="cuda")
    return kv_quantization.read_blocks(memory, every, dtype)


# ---------------------------------------------------------------- attention


@dataclass
class QuantizedStep:
    """A step whose cache is quantised.

    Attributes:
        plain: the same, with a cache of the dequantised values.
        memories: keys and values.
    """

    plain: Step
    memories: tuple[QuantizedKV, QuantizedKV]

    def run(
        self,
        workspace: Tensor | None = None,
        history_ready: bool = False,
        dequantized: DequantizedKV | None = None,
        pdl: bool = False,
        **spec: Any,
    ) -> Tensor:
        plain, out = self.plain, self.plain.out()
        metadata = self.metadata(workspace, dequantized, **spec)
        if workspace is not None and not history_ready:
            plan(metadata, pdl=pdl)
        attend(plain.q, self.kv, metadata, out, history_ready=history_ready, pdl=pdl)
        return out

    @property
    def kv(self) -> PagedKV:
        return PagedKV(*self.memories)

    def metadata(
        self,
        workspace: Tensor | None = None,
        dequantized: DequantizedKV | None = None,
        **spec: Any,
    ) -> AttentionMetadata:
        """Planned if there is a workspace."""
        plain = self.plain
        params = AttentionParams(
            *plain.heads,
            scale=plain.scale,
            kv_dtype=self.memories[0].values.dtype,
            **spec,
        )
        return AttentionMetadata(
            params,
            plain.query_start,
            plain.seq_lens,
            plain.block_tables,
            len(plain.q),
            self.workspace(**spec) if workspace is None else workspace,
            planned=workspace is not None,
            dequantized=dequantized,
        )

    def rounded(self) -> Step:
        """The step with a cache of the dequantised values in q's type, as prompts read it."""
        k_cache, v_cache = (read(memory, self.plain.q.dtype) for memory in self.memories)
        return replace(self.plain, k_cache=k_cache, v_cache=v_cache)

    def dequantized(self, spare_keys: int = 0) -> DequantizedKV:
        """Memory for the prompts of the step, with NaN and blocks that do not exist in it."""
        q_lens = self.plain.query_start.diff().tolist()
        kv_lens = self.plain.seq_lens.tolist()
        num_keys = sum(
            -(-keys // 64) * 64 for rows, keys in zip(q_lens, kv_lens, strict=True) if rows > 1
        )
        params = AttentionParams(*self.plain.heads, scale=self.plain.scale)
        memory = DequantizedKV.empty(
            num_keys + spare_keys, len(kv_lens), params, torch.device("cuda")
        )
        memory.blocks.fill_(torch.nan)
        memory.tables.fill_(10**8)
        memory.sources.fill_(-1)
        return memory

    def workspace(self, batch_invariant: bool = False, **_: Any) -> Tensor:
        size = workspace_size(
            len(self.plain.seq_lens),
            len(self.plain.q),
            *self.plain.heads,
            batch_invariant=batch_invariant,
            kv_dtype=self.memories[0].values.dtype,
        )
        return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


def quantized(plain: Step, dtype: torch.dtype) -> QuantizedStep:
    """The step with its cache quantised; NaN stays where nothing is to be read."""
    memories, floats = [], []
    for kept in (plain.k_cache, plain.v_cache):
        num_blocks, block_size, heads, head_dim = kept.shape
        memory = kv_quantization.of_blocks(blocks(num_blocks, block_size, heads, head_dim), dtype)
        rows = kept.flatten(0, 1)
        slots = (~rows.isnan().any(-1).any(-1)).nonzero()[:, 0]
        # Of different sizes, so that each needs its own scale.
        sizes = torch.rand(len(slots), heads, 1, device="cuda") * 3 + 0.1
        kv_quantization.write(rows[slots] * sizes, memory, slots)
        memories.append(memory)
        floats.append(read(memory))
    return QuantizedStep(
        replace(plain, k_cache=floats[0], v_cache=floats[1]), (memories[0], memories[1])
    )


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
    monkeypatch.setattr(attention_operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(attention_operands, "is_hopper", lambda: False)
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
@pytest.mark.parametrize("step", ["decode", "decode, hundred", "mixed", "decode, many"])
def test_a_plan_is_valid_for_all_layers_with_ready_history(step: str, dtype: torch.dtype) -> None:
    made = quantized(make_step(*STEPS[step], num_heads=32, num_kv_heads=8), dtype)
    workspace = made.workspace()
    first = made.run(workspace)
    assert error(first, made.plain.definition()) < BOUND[torch.bfloat16]
    for _ in range(5):
        assert torch.equal(made.run(workspace, history_ready=True), first)


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

    def run(self, q_out: Tensor, qk_norm: QkNorm | None = None) -> None:
        rope_write_kv(self.qkv, self.rope, self.kv, q_out=q_out, qk_norm=qk_norm)

    def expected(self, qk_norm: QkNorm | None) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = self.heads
        rows = self.qkv.double().view(len(self.qkv), -1, head_dim)
        q, k, v = rows.split([num_heads, num_kv_heads, num_kv_heads], 1)
        if qk_norm is not None:
            q, _ = transformer.rms_norm(q, qk_norm.q_weight.double(), EPS)
            k, _ = transformer.rms_norm(k, qk_norm.k_weight.double(), EPS)
        cos, sin = (table[self.rope.positions].double() for table in (self.rope.cos, self.rope.sin))
        return transformer.rotary(q, cos, sin), transformer.rotary(k, cos, sin), v


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
    # Values are only copied: the same bits. Keys are rotated in float32: now and then one rounds
    # to the other neighbour, or a scale does.
    values, scales = rows_of(step.kv.v_cache, slots)
    expected, expected_scales = quantize(v, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    keys, scales = rows_of(step.kv.k_cache, slots)
    expected, expected_scales = quantize(k, dtype)
    assert relative_error(scales, expected_scales.double()) < 1e-4
    same = keys.view(torch.uint8) == expected.view(torch.uint8)
    assert float(same.float().mean()) > 0.99
    found = dequantize(keys, scales, torch.float64)
    steps = scales.double().unsqueeze(-1) * (1 if dtype == torch.int8 else 32)
    assert ((found - k).abs() <= 0.51 * steps).all()


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


# ---------------------------------------------------------------- RoPE and attention in one


@dataclass
class Fused:
    """A step of one token per chunk, whose keys and values are not in the cache yet."""

    projection: Projection
    step: QuantizedStep

    def run(
        self,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
        *,
        history_ready: bool = False,
        pdl: bool = False,
        **spec: Any,
    ) -> Tensor:
        made, step = self.projection, self.step
        out = step.plain.out() if out is None else out
        rope_attend(
            made.qkv,
            made.rope,
            step.kv,
            step.metadata(workspace, **spec),
            out,
            qk_norm=made.qk_norm,
            history_ready=history_ready,
            pdl=pdl,
        )
        return out

    def write(self) -> None:
        """With the kernel that only rotates and writes."""
        made, step = self.projection, self.step
        rope_write_kv(made.qkv, made.rope, step.kv, q_out=step.plain.q, qk_norm=made.qk_norm)

    def forget(self) -> None:
        """Make the tokens' slots as they were before."""
        for memory in self.step.memories:
            block_size, slots = memory.shape[1], self.projection.slots
            block, offset = slots // block_size, slots % block_size
            memory.values.view(torch.uint8)[block, offset] = 255
            memory.scales.view(torch.int16)[block, :, offset] = -1

    def contents(self) -> list[Tensor]:
        """Bytes, and bits of scales, of the whole cache."""
        return [
            tensor.clone()
            for memory in self.step.memories
            for tensor in (memory.values.view(torch.uint8), memory.scales.view(torch.int16))
        ]

    def definition(self, **spec: Any) -> Tensor:
        """Of what is in the cache."""
        k_cache, v_cache = (read(memory) for memory in self.step.memories)
        return replace(self.step.plain, k_cache=k_cache, v_cache=v_cache).definition(**spec)


def make_fused(kv_lens: list[int], dtype: torch.dtype, **options: Any) -> Fused:
    projection = make_projection([1] * len(kv_lens), kv_lens, **options)
    return Fused(projection, quantized(projection.step, dtype))


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# Tokens of each sequence, the new one included: scales are copied 8 at a time, a warp has 16 keys,
# and a tile 64.
LENGTHS = {
    "one": [1],
    "two": [10, 64],
    "eights": [8, 9, 10, 16, 17, 18, 25],
    "tiles": [2, 48, 49, 63, 65, 66, 193],
    "split": [20_000],
    "two, split": [7_000, 2_001],
}
GROUPS = [(8, 8), (8, 2), (28, 4)]
FUSED_HEADS = [(*heads, head_dim) for head_dim in (64, 96, 128) for heads in GROUPS]


@each_type
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("heads", [*FUSED_HEADS, (8, 1, 64), (15, 1, 96), (15, 1, 128)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_fused_step_writes_the_bytes_of_separate_kernels_and_attends_as_they_do(
    lengths: str, heads: tuple[int, int, int], normed: bool, dtype: torch.dtype
) -> None:
    assert rotates(*heads, dtype)
    names = ("num_heads", "num_kv_heads", "head_dim")
    options = dict(zip(names, heads, strict=True))
    made = make_fused(LENGTHS[lengths], dtype, normed=normed, **options)
    qkv, before = made.projection.qkv.clone(), made.contents()
    out, written = made.run(), made.contents()
    assert torch.equal(made.projection.qkv, qkv)
    made.forget()
    assert same(made.contents(), before) and not same(written, before)
    made.write()
    assert same(written, made.contents())
    assert error(out, made.definition()) < BOUND[torch.bfloat16]
    assert torch.equal(out, made.step.run())


@each_type
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_fused_step_writes_into_any_block_size_with_a_window_and_a_cap(
    dtype: torch.dtype, block_size: int
) -> None:
    made = make_fused([1, 17, 64, 300, 2000], dtype, block_size=block_size)
    out, written = made.run(window=63, soft_cap=30.0), made.contents()
    made.forget()
    made.write()
    assert same(written, made.contents())
    assert error(out, made.definition(window=63, soft_cap=30.0)) < BOUND[torch.bfloat16]


@each_type
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_fused_step_runs_in_100_kib_of_shared_memory(
    dtype: torch.dtype, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(attention_operands, "is_hopper", lambda: False)
    made = make_fused([1, 17, 64, 300, 2000], dtype, normed=normed)
    out, written = made.run(), made.contents()
    made.forget()
    made.write()
    assert same(written, made.contents())
    assert error(out, made.definition()) < BOUND[torch.bfloat16]


@each_type
def test_a_fused_token_without_a_slot_is_seen_but_not_written(dtype: torch.dtype) -> None:
    made = make_fused([70, 1, 4000], dtype)
    expected = made.run()
    made.forget()
    made.projection.slots.fill_(-1)
    before = made.contents()
    assert torch.equal(made.run(), expected)
    assert same(made.contents(), before)


@each_type
def test_padding_chunks_of_a_fused_step_do_nothing(dtype: torch.dtype) -> None:
    made = make_fused([70, 300, 64, 65], dtype)
    expected = made.run()
    made.forget()
    plain = made.step.plain
    plain.query_start.copy_(torch.tensor([0, 1, 2, 2, 2]))
    plain.seq_lens[2:] = 0
    slots = made.projection.slots.clone()
    made.projection.slots[2:] = -1
    out, written = made.run(), made.contents()
    assert torch.equal(out[:2], expected[:2])
    assert out[2:].isnan().all()
    made.projection.slots.copy_(slots)
    made.forget()
    made.projection.slots[2:] = -1
    made.write()
    assert same(written, made.contents())


@each_type
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_zeros_and_numbers_out_of_range_are_as_visible_in_a_fused_step(
    dtype: torch.dtype, normed: bool
) -> None:
    made = make_fused([1, 20, 65, 66, 67, 130], dtype, normed=normed)
    rows = made.projection.qkv.view(6, -1, 128)  # 8 heads of q, then 2 of k and of v
    rows[0, 8:] = 0.0
    rows[1, 8, 3] = torch.nan
    rows[2, 11, 127] = -torch.inf
    rows[3, 10, 64] = 3e9  # its scale exceeds float16
    rows[4, 8:] *= 1e-6
    out, written = made.run(), made.contents()
    made.forget()
    made.write()
    assert same(written, made.contents())
    expected = made.step.run()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(0.0), expected.nan_to_num(0.0))
    spoilt = out.isnan().any(-1)
    assert spoilt[1, :4].all() and spoilt[2, 4:].all() and spoilt[3, :4].all()
    assert int(spoilt.sum()) == 12


@each_type
@pytest.mark.parametrize("lengths", [[300], [2000, 65]], ids=str)
def test_fused_layers_with_ready_history_read_early_and_are_right(
    lengths: list[int], dtype: torch.dtype
) -> None:
    """Layers of one plan behind each other, as in a model, in a graph."""
    heads = {"num_heads": 32, "num_kv_heads": 8}
    layers = [
        make_fused(lengths, dtype, num_layer=i, seed=i, normed=i % 2 == 1, **heads)
        for i in range(8)
    ]
    hidden, width = 4096, layers[0].projection.qkv.shape[1]
    weight = torch.randn(width, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    x = torch.randn(len(layers), len(lengths), hidden, device="cuda", dtype=torch.bfloat16)
    outs = [layer.step.plain.out() for layer in layers]
    workspace = layers[0].step.workspace()

    def run() -> None:
        plan(layers[0].step.metadata(workspace), pdl=True)
        for i, layer in enumerate(layers):
            skinny_gemm.linear(x[i], weight, out=layer.projection.qkv, pdl=True)
            layer.run(workspace, outs[i], history_ready=i > 0, pdl=True)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        for layer, out in zip(layers, outs, strict=True):
            layer.forget()
            layer.projection.qkv.fill_(float("nan"))
            out.fill_(float("nan"))
        workspace.fill_(0xFF)
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            written = layer.contents()
            layer.forget()
            layer.write()
            assert same(written, layer.contents())
            assert error(out, layer.definition()) < BOUND[torch.bfloat16]
