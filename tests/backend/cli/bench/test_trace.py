"""Kernel times of a step from a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.cli.bench import trace
from inflight.errors import EngineError


def event(name: str, start: float, end: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


# Two steps of 100 us: a GEMM twice, attention, 10 us without a kernel.
TWO_STEPS = [
    event("cudaGraphLaunch", 990, 995, "cuda_runtime"),
    event("void inflight::skinny_gemm<64, __nv_bfloat16>(Arguments)", 1000, 1040),
    event("attend<Shape<128, 16>>(int const*)", 1040, 1070),
    event("void inflight::skinny_gemm<64, __nv_bfloat16>(Arguments)", 1080, 1100),
    event("void inflight::skinny_gemm<64, __nv_bfloat16>(Arguments)", 1100, 1140),
    event("attend<Shape<128, 16>>(int const*)", 1140, 1170),
    event("void inflight::skinny_gemm<64, __nv_bfloat16>(Arguments)", 1180, 1200),
    {"ph": "i", "cat": "kernel", "name": "not complete", "ts": 5},
]


def test_kernels_and_the_gap_add_up_to_the_step():
    step = trace.aggregate(TWO_STEPS, "decode", 2, untraced_us=95.0)
    assert (step.step_us, step.gap_us, step.untraced_us) == (100.0, 10.0, 95.0)
    gemm, attention = step.kernels
    assert (gemm.name, gemm.group, gemm.calls, gemm.us, gemm.share) == (
        "skinny_gemm",
        "linear",
        2.0,
        60.0,
        0.6,
    )
    assert (attention.name, attention.calls, attention.us) == ("attend", 1.0, 30.0)
    assert step.groups() == {"linear": 60.0, "attention": 30.0, "gap": 10.0}


def test_where_kernels_overlap_the_time_counts_once_for_the_earlier_one():
    step = trace.aggregate(
        [event("rms_norm", 0, 60), event("gemm", 50, 100), event("silu_mul", 55, 90)],
        "decode",
        1,
        untraced_us=100.0,
    )
    assert {kernel.name: kernel.us for kernel in step.kernels} == {
        "rms_norm": 60.0,
        "gemm": 40.0,
        "silu_mul": 0.0,
    }
    assert (step.step_us, step.gap_us) == (100.0, 0.0)


def test_copies_count_as_kernels():
    step = trace.aggregate(
        [event("Memcpy HtoD (Pinned -> Device)", 0, 4, "gpu_memcpy"), event("embedding", 4, 10)],
        "prefill",
        1,
        untraced_us=10.0,
    )
    assert step.groups() == {"norm, rope, activation": 6.0, "copies": 4.0}


def test_on_a_cpu_the_outermost_ops_stand_for_kernels():
    step = trace.aggregate(
        [
            event("aten::linear", 0, 50, "cpu_op"),
            event("aten::addmm", 10, 40, "cpu_op"),
            event("aten::silu", 60, 100, "cpu_op"),
        ],
        "decode",
        1,
        untraced_us=100.0,
    )
    assert [kernel.name for kernel in step.kernels] == ["aten::linear", "aten::silu"]
    assert step.gap_us == 10.0


def test_an_empty_trace_is_an_error():
    with pytest.raises(EngineError, match="no kernel"):
        trace.aggregate([event("cudaLaunchKernel", 0, 1, "cuda_runtime")], "decode", 1, 1.0)


@pytest.mark.parametrize(
    ("name", "short", "group"),
    [
        ("void skinny_gemm<64, 8>(Args)", "skinny_gemm", "linear"),
        ("nvjet_sm90_tst_128x64_64x8_TNT", "nvjet_sm90_tst_128x64_64x8_TNT", "linear"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_gemm>(Params)", "Kernel2", "linear"),
        (
            "void grouped_product<grouped::Records<0, 128, true>, 64>(Map)",
            "grouped_product",
            "linear",
        ),
        ("void few_gemm<__nv_bfloat16, float, 24>(int)", "few_gemm", "linear"),
        ("void few_gate_up<Fp8, __nv_bfloat16, 4>(int)", "few_gate_up", "experts"),
        ("void experts_product_pairs<__nv_bfloat16, 128>(Map)", "experts_product_pairs", "experts"),
        ("route", "route", "experts"),
        ("gather_rows", "gather_rows", "experts"),
        ("sum_of_experts", "sum_of_experts", "experts"),
        ("void route_few<4>(float const*)", "route_few", "experts"),
        ("void quantize_gathered_rows<Fp8, float>(int)", "quantize_gathered_rows", "experts"),
        ("void scaled_sum_rms_norm<Fp8, float, 1>(int)", "scaled_sum_rms_norm", "experts"),
        ("void scaled_rms_norm<Fp8, float, 1>(int)", "scaled_rms_norm", "norm, rope, activation"),
        ("plan", "plan", "attention"),
        ("void scan<__nv_bfloat16>(__nv_bfloat16 const*, int)", "scan", "sampling"),
        ("count_output_tokens", "count_output_tokens", "sampling"),
        ("begin_step", "begin_step", "batch state"),
        ("void rope_write_kv<__nv_bfloat16>(int)", "rope_write_kv", "norm, rope, activation"),
        ("void copy_blocks<16>(int)", "copy_blocks", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)",
            "vectorized_elementwise_kernel",
            "other",
        ),
        ("void (anonymous namespace)::softmax_warp<8>(float*)", "softmax_warp", "sampling"),
    ],
)
def test_names_are_shortened_and_sorted(name: str, short: str, group: str):
    assert (trace.short(name), trace.group_of(name)) == (short, group)


def test_a_trace_is_read_from_a_file(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": TWO_STEPS}))
    assert trace.read(path) == TWO_STEPS
