"""Linear layers with codes of 4 or 8 bits and scales of groups, at the shapes of an 8B Llama.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_grouped.py [--json FILE]
        [--tokens M ...] [--kinds int4-128 ...]

`tb_per_s` is of the weight's bytes as they lie in memory; `of_copy` is that as a fraction of what a
large copy reaches. `few_us` is the kernel for few tokens, null beyond its limit, `some_us` the one
for Hopper, and `bf16_us` the kernel for few tokens with a weight in bfloat16; with 65 tokens and
more it is cuBLAS's, for gate_up followed by the kernel `silu_mul`. Rows named `dequantize` write a
weight in bfloat16; their `tb_per_s` is of the bytes read and written. Launches cycle through
several weights. See timing.py for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch
from bench_weight_only import LAYERS, cublas

from inflight_kernels.ops.linear import grouped, grouped_gemm, skinny_gemm
from inflight_kernels.ops.linear.grouped_rows import (
    E2M1,
    INT4,
    INT6,
    INT8,
    TABLE,
    GroupedKind,
    GroupedRows,
    empty,
)
from inflight_kernels.runtime.launch import is_hopper

DTYPE = torch.bfloat16
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
KINDS = {
    "int4-128": GroupedKind(INT4, 128, True),
    "q4_1": GroupedKind(INT4, 32, True),
    "q4_k": GroupedKind(INT4, 32, True, units=True),
    "mxfp4": GroupedKind(E2M1, 32, False),
    "nf4": GroupedKind(TABLE, 32, False),
    "q6_k": GroupedKind(INT6, 16, False, units=True),
    "q4_k with q6_k": GroupedKind(INT6, 16, True, units=True),
    "q8_0": GroupedKind(INT8, 32, False),
}
Call = Callable[[], object]


def _random(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda", dtype=DTYPE) * width**-0.5


def _weight(layer: str, kind: GroupedKind) -> GroupedRows:
    """Of random bytes; products may be large."""
    n, k, _, _ = LAYERS[layer]
    table = torch.zeros(32, dtype=torch.uint8, device="cuda") if kind.codes == TABLE else None
    weight = empty(1, n, k, kind, torch.device("cuda"), table)
    weight.records.random_(0, 256)
    return weight


def _out(m: int, layer: str) -> torch.Tensor:
    n, _, gated, _ = LAYERS[layer]
    return torch.zeros(m, n // 2 if gated else n, dtype=DTYPE, device="cuda")


def ours(
    linear: Callable[..., object], m: int, layer: str, kind: GroupedKind
) -> Callable[[], Call]:
    """A product with what follows it in the layer."""
    _, k, gated, added = LAYERS[layer]

    def make() -> Call:
        x, weight, out = _random(m, k), _weight(layer, kind), _out(m, layer)
        residual = out if added else None
        return lambda: linear(x, weight, residual=residual, out=out, gated=gated, pdl=True)

    return make


def unquantised(m: int, layer: str) -> Callable[[], Call]:
    n, k, gated, added = LAYERS[layer]
    if not skinny_gemm.prefers(m, n, k):
        return cublas(m, layer)

    def make() -> Call:
        x, weight, out = _random(m, k), _random(n, k), _out(m, layer)
        residual = out if added else None
        return lambda: skinny_gemm.linear(
            x, weight, residual=residual, out=out, gated=gated, pdl=True
        )

    return make


def dequantization(layer: str, kind: GroupedKind) -> Callable[[], Call]:
    n, k, _, _ = LAYERS[layer]

    def make() -> Call:
        weight, out = _weight(layer, kind), torch.empty(n, k, dtype=DTYPE, device="cuda")
        return lambda: grouped.dequantize(weight, out=out)

    return make


def _rows(tokens: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    copy = timing.copy_ceiling()
    yield copy
    for layer, (n, k, _, _) in LAYERS.items():
        bf16 = {
            m: round(timing.measure(unquantised(m, layer), 2 * n * k).median, 2) for m in tokens
        }
        for name in kinds:
            kind = KINDS[name]
            num_bytes = n // 16 * (-(-k // 128)) * kind.record_bytes
            moved = num_bytes + 2 * n * k
            measured = timing.measure(dequantization(layer, kind), moved)
            yield {"op": f"dequantize {layer}", "kind": name, **measured.row(moved)}
            for m in tokens:
                found = {"few_us": None, "some_us": None}
                if m <= grouped.MAX_TOKENS:
                    timed = timing.measure(ours(grouped.linear, m, layer, kind), num_bytes)
                    found["few_us"] = round(timed.median, 2)
                if is_hopper() and m > 8:
                    timed = timing.measure(ours(grouped_gemm.linear, m, layer, kind), num_bytes)
                    found["some_us"] = round(timed.median, 2)
                best = min(us for us in found.values() if us is not None)
                rate = num_bytes / best * 1e-6
                yield {
                    "op": layer,
                    "kind": name,
                    "m": m,
                    **found,
                    "tb_per_s": round(rate, 3),
                    "of_copy": round(rate / copy["tb_per_s"], 3),
                    "bf16_us": bf16[m],
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    args = parser.parse_args()
    rows = _rows(tuple(args.tokens), tuple(args.kinds))
    timing.report("linear layers with codes and scales of groups", rows, args.json)


if __name__ == "__main__":
    main()
