"""Invalid operands that attention rejects before any launch, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import recorded_launches
from inflight_kernels.ops.attention import operands
from inflight_kernels.ops.attention.attention import attend, rope_attend, workspace_size
from inflight_kernels.ops.attention.operands import (
    AttentionMetadata,
    AttentionParams,
    QuantizedOut,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.rope import PagedKV, RopeInputs
from inflight_kernels.runtime.recording import Launched, record_launches
from inflight_kernels.torch_ops.kv_quantization import QuantizedKV, of_blocks

HEADS = (8, 2, 128)


@pytest.fixture(params=[True, False], ids=["hopper", "ampere"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    with recorded_launches.recording(monkeypatch, hopper=request.param) as launched:
        yield launched


@dataclass
class Step:
    """Chunks of so many tokens each; no values matter."""

    q_lens: list[int]
    scale: float = 1.0
    cache_dtype: torch.dtype = torch.bfloat16
    sinks: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    quantized: QuantizedOut | None = None

    def size(self, max_q_len: int | None = None, batch_invariant: bool = False) -> int:
        return workspace_size(
            len(self.q_lens), sum(self.q_lens), *HEADS, max_q_len, batch_invariant
        )

    def run(
        self,
        num_bytes: int,
        *,
        max_q_len: int | None = None,
        batch_invariant: bool = False,
        history_ready: bool = False,
    ) -> None:
        num_heads, num_kv_heads, head_dim = HEADS
        count = len(self.q_lens)

        def lengths(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device="meta")

        q = torch.zeros(sum(self.q_lens), num_heads, head_dim, dtype=self.dtype, device="meta")
        k_cache, v_cache = (
            torch.zeros(4, 16, num_kv_heads, head_dim, dtype=dtype, device="meta")
            for dtype in (self.cache_dtype, self.dtype)
        )
        metadata = AttentionMetadata(
            AttentionParams(*HEADS, scale=self.scale, batch_invariant=batch_invariant),
            lengths(count + 1),
            lengths(count),
            lengths(count * 4).view(count, 4),
            len(q),
            torch.empty(num_bytes, dtype=torch.uint8, device="meta"),
            max_q_len,
        )
        kv = PagedKV(k_cache, v_cache)
        out = torch.empty_like(q)
        attend(
            q,
            kv,
            metadata,
            out,
            sinks=self.sinks,
            quantized=self.quantized,
            history_ready=history_ready,
        )


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("q_lens", [[1], [1] * 9, [5] * 3, [700], [1, 300]], ids=str)
def test_a_workspace_is_refused_if_it_is_a_byte_too_small_for_the_step(
    q_lens: list[int], batch_invariant: bool
) -> None:
    step = Step(q_lens)
    options = {"max_q_len": max(q_lens), "batch_invariant": batch_invariant}
    needed = smallest(step, **options)
    assert needed <= step.size(**options) <= step.size(None, batch_invariant)
    message = f"workspace has {needed - 1} bytes; this step needs {needed}"
    with record_launches() as found:
        with pytest.raises(ValueError, match=message):
            step.run(needed - 1, **options)
        assert not found
        step.run(needed, **options)
    assert found


def smallest(step: Step, **options: Any) -> int:
    """Bytes that a step takes, found by trying."""
    low, high = 0, step.size(**options)
    while low < high:
        middle = (low + high) // 2
        try:
            step.run(middle, **options)
            high = middle
        except ValueError:
            low = middle + 1
    return high


def test_the_workspace_for_any_chunk_serves_a_token_twice_over(launched: Launched) -> None:
    step = Step([1])
    assert step.size(max_q_len=1) == smallest(step) < step.size() // 2
    step.run(step.size() // 2)
    assert launched


def test_scales_and_caches_that_kernels_cannot_take_are_refused(launched: Launched) -> None:
    size = Step([1]).size()
    with pytest.raises(ValueError, match=r"scale 0\.0"):
        Step([1], scale=0.0).run(size)
    with pytest.raises(ValueError, match=r"k_cache is .* of torch\.float16"):
        Step([1], cache_dtype=torch.float16).run(size)
    with pytest.raises(ValueError, match="history_ready"):
        Step([1]).run(size, history_ready=True)
    assert not launched


def test_sinks_are_a_float32_number_for_each_query_head(launched: Launched) -> None:
    size = Step([1]).size()
    for count, dtype in ((7, torch.float32), (2, torch.float32), (8, torch.bfloat16)):
        sinks = torch.zeros(count, dtype=dtype, device="meta")
        with pytest.raises(ValueError, match=r"sinks is .*; expected torch.float32 \[8\]"):
            Step([1], sinks=sinks).run(size)
    assert not launched
    Step([1], sinks=torch.zeros(8, device="meta")).run(size)
    assert launched


def quantized_out(
    num_tokens: int, dtype: torch.dtype = torch.float8_e4m3fn, **changes: Tensor
) -> QuantizedOut:
    rows = ScaledRows.empty(num_tokens, HEADS[0] * HEADS[2], "meta", dtype)
    codes = torch.zeros(num_tokens, HEADS[0], dtype=torch.uint8, device="meta")
    return QuantizedOut(rows, codes)._replace(**changes)


def test_memory_that_attention_cannot_quantise_to_is_refused(launched: Launched) -> None:
    size = Step([700]).size()
    codes = torch.zeros(HEADS[0], 700, dtype=torch.uint8, device="meta")
    for quantized, message in (
        (quantized_out(699), r"rows is \[699, 1024\]; expected \[700, 1024\]"),
        (quantized_out(700, torch.int8), r"values is torch.int8; expected torch.float8_e4m3fn"),
        (
            quantized_out(700, codes=codes),
            r"codes is torch.uint8 \[8, 700\]; expected .*\[700, 8\]",
        ),
        (quantized_out(700, codes=codes.view(700, 8).float()), "codes is torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            Step([700], quantized=quantized).run(size)
    half = {"dtype": torch.float16, "cache_dtype": torch.float16}
    with pytest.raises(ValueError, match=r"q is torch.float16; .* torch.bfloat16"):
        Step([700], quantized=quantized_out(700), **half).run(size)  # type: ignore[arg-type]
    assert not launched


@pytest.mark.parametrize("q_lens", [[700], [1, 300]], ids=str)
def test_what_no_kernel_of_hopper_attends_is_quantised_by_the_last_one(
    launched: Launched, q_lens: list[int]
) -> None:
    step = Step(q_lens, quantized=quantized_out(sum(q_lens)))
    step.run(step.size())
    names = [name.partition("<")[0] for _, name in launched]
    many = "attend_quantizing" if operands.is_hopper() else "attend"
    few = ["attend"] if len(q_lens) > 1 else []
    assert [name for name in names if not name.startswith("plan")] == [*few, many, "settle_parts"]


def test_caches_of_8_bits_that_kernels_cannot_take_are_refused(launched: Launched) -> None:
    def run(kv: PagedKV, q_type: torch.dtype = torch.bfloat16, **spec: Any) -> None:
        params = AttentionParams(*HEADS, scale=1.0, **spec)
        size = workspace_size(1, 1, *HEADS, kv_dtype=params.kv_dtype)
        lengths = torch.zeros(4, dtype=torch.int32, device="meta")
        workspace = torch.empty(size, dtype=torch.uint8, device="meta")
        metadata = AttentionMetadata(
            params, lengths[:2], lengths[:1], lengths[None], 1, workspace, max_q_len=1
        )
        q = torch.zeros(1, HEADS[0], HEADS[2], dtype=q_type, device="meta")
        attend(q, kv, metadata, torch.empty_like(q))

    def memory(block_size: int = 16) -> QuantizedKV:
        shape = (4, block_size, HEADS[1], HEADS[2] + 2)
        data = torch.zeros(shape, dtype=torch.uint8, device="meta")
        return of_blocks(data, torch.float8_e4m3fn)

    right, dtype = PagedKV(memory(), memory()), torch.float8_e4m3fn
    apart = replace(memory(), scales=torch.zeros(4, 2, 16, dtype=torch.float16, device="meta"))
    for kv, options, message in (
        (right, {}, "k_cache is .* of torch.float8_e4m3fn"),
        (right, {"kv_dtype": torch.int8}, "both caches must have the same layout, torch.int8"),
        (right, {"kv_dtype": torch.uint8}, "kv_dtype is torch.uint8; allowed: torch.float8_e4m3fn"),
        (right, {"kv_dtype": dtype, "q_type": torch.float16}, "expected bfloat16"),
        (PagedKV(memory(), memory(32)), {"kv_dtype": dtype}, "v_cache is"),
        (PagedKV(memory(), memory().values), {"kv_dtype": dtype}, "v_cache .*: scales belong"),
        (PagedKV(apart, memory()), {"kv_dtype": dtype}, "at the end of each block"),
    ):
        with pytest.raises(ValueError, match=message):
            run(kv, **options)  # type: ignore[arg-type]
    assert not launched
    run(right, kv_dtype=dtype)
    assert launched


@pytest.mark.parametrize(("dtype", "cached"), [(torch.float8_e4m3fn, "Fp8"), (torch.int8, "Int8")])
def test_a_projection_goes_into_a_cache_of_8_bits_unless_it_is_in_float16(
    launched: Launched, dtype: torch.dtype, cached: str
) -> None:
    num_heads, num_kv_heads, head_dim = HEADS
    params = AttentionParams(*HEADS, scale=1.0, kv_dtype=dtype)
    lengths = torch.zeros(4, dtype=torch.int32, device="meta")
    places = torch.zeros(1, dtype=torch.int64, device="meta")
    tables = torch.zeros(2, 16, head_dim, device="meta")
    data = torch.zeros(2, 4, 16, num_kv_heads, head_dim + 2, dtype=torch.uint8, device="meta")

    def run(q_type: torch.dtype) -> None:
        size = workspace_size(1, 1, *HEADS, kv_dtype=dtype)
        workspace = torch.empty(size, dtype=torch.uint8, device="meta")
        metadata = AttentionMetadata(
            params, lengths[:2], lengths[:1], lengths[None], 1, workspace, max_q_len=1
        )
        width = (num_heads + 2 * num_kv_heads) * head_dim
        rope_attend(
            torch.zeros(1, width, dtype=q_type, device="meta"),
            RopeInputs(places, places, tables[0], tables[1]),
            PagedKV(*(of_blocks(one, dtype) for one in data)),
            metadata,
            torch.zeros(1, num_heads, head_dim, dtype=q_type, device="meta"),
        )

    with pytest.raises(ValueError, match="float16; expected bfloat16"):
        run(torch.float16)
    assert not launched
    run(torch.bfloat16)
    assert [name for _, name in launched] == [
        "plan_single<1>",
        f"rope_attend<attention::Shape<__nv_bfloat16, 128, 1, 4, 1, 64, 3, {cached}>, false>",
    ]
