"""RoPE and attention in one kernel, with a KV cache of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_projections import Projection, make_projection
from attention_steps import BOUND, error, head_error, with_sinks
from inflight_kernels.ops.attention import operands
from inflight_kernels.ops.attention.attention import rotates
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.ops.linear import skinny_gemm
from quantized_steps import QuantizedStep, each_type, quantized, read

pytestmark = pytest.mark.gpu


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
        step = self.step
        out = step.plain.out() if out is None else out
        metadata = step.metadata(workspace, **spec)
        self.projection.attend(step.kv, metadata, out, history_ready=history_ready, pdl=pdl)
        return out

    def write(self) -> None:
        """With the kernel that only rotates and writes."""
        self.projection.rotate(self.step.plain.q, kv=self.step.kv)

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
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("heads", [(64, 8, 64), (28, 4, 96), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_fused_step_has_sinks(
    lengths: str, heads: tuple[int, int, int], window: int, dtype: torch.dtype
) -> None:
    options = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    made = make_fused(LENGTHS[lengths], dtype, **options)
    made.projection.step = made.step.plain = with_sinks(made.step.plain)
    out = made.run(window=window)
    made.forget()
    made.write()
    assert head_error(out, made.definition(window=window)) < BOUND[torch.bfloat16]
    assert torch.equal(out, made.step.run(window=window))


@each_type
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_fused_step_runs_in_100_kib_of_shared_memory(
    dtype: torch.dtype, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(operands, "is_hopper", lambda: False)
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
@pytest.mark.parametrize("lengths", [[1], [64], [65], [191], [300], [2000, 65], [150, 1]], ids=str)
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
