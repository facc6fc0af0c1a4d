"""Linear layers with weights of 8 bits and activations of 16 at the shapes of an 8B Llama.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_weight_only.py [--json FILE]
        [--tokens M ...] [--bytes fp8 int8]

`tb_per_s` is of the weight's values, one byte each; `of_copy` is that as a fraction of what a large
copy reaches. `cublas_us` is torch's product with a weight in bfloat16, for gate_up followed by
the kernel `silu_mul`, for o and down added to the residual; `w8a8_us` is Hopper's kernel for e4m3
with x quantised before, and null on other GPUs. Rows named `dequantize` write a weight in bfloat16;
their `tb_per_s` is of the bytes read and written. Launches cycle through several weights. See
timing.py for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch

from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.linear import skinny_gemm, weight_only
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.runtime.launch import is_hopper
from inflight_kernels.torch_ops.quantization import quantize_rows

DTYPE = torch.bfloat16
BYTES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
TOKENS = (1, 4, 8, 16, 32, 64)
# name: (n, k, gated, accumulates into the output)
LAYERS = {
    "qkv": (6144, 4096, False, False),
    "o": (4096, 4096, False, True),
    "gate_up": (28672, 4096, True, False),
    "down": (4096, 14336, False, True),
}

Call = Callable[..., object]


def _random(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda", dtype=DTYPE) * width**-0.5


def _quantized(rows: int, width: int, byte: torch.dtype) -> ScaledRows:
    return ScaledRows(*quantize_rows(_random(rows, width), byte))


def _out(m: int, layer: str) -> torch.Tensor:
    n, _, gated, _ = LAYERS[layer]
    return torch.zeros(m, n // 2 if gated else n, dtype=DTYPE, device="cuda")


def _fused(linear: Call, x: torch.Tensor | ScaledRows, weight: ScaledRows, layer: str) -> Call:
    """A product with what follows it in the layer."""
    _, _, gated, added = LAYERS[layer]
    out = _out(len(x.values if isinstance(x, ScaledRows) else x), layer)
    residual = out if added else None
    return lambda: linear(x, weight, residual=residual, out=out, gated=gated, pdl=True)


def ours(m: int, layer: str, byte: torch.dtype) -> Callable[[], Call]:
    n, k, _, _ = LAYERS[layer]
    return lambda: _fused(weight_only.linear, _random(m, k), _quantized(n, k, byte), layer)


def w8a8(m: int, layer: str) -> Callable[[], Call]:
    n, k, _, _ = LAYERS[layer]
    byte = torch.float8_e4m3fn
    return lambda: _fused(skinny_gemm.linear, _quantized(m, k, byte), _quantized(n, k, byte), layer)


def cublas(m: int, layer: str) -> Callable[[], Call]:
    n, k, gated, added = LAYERS[layer]

    def make() -> Call:
        x, weight, out = _random(m, k), _random(n, k), _out(m, layer)
        product = torch.empty(m, n, dtype=DTYPE, device="cuda")

        def with_gate() -> None:
            torch.mm(x, weight.t(), out=product)
            silu_mul(product, out=out)

        if gated:
            return with_gate
        if added:
            return lambda: out.addmm_(x, weight.t())
        return lambda: torch.mm(x, weight.t(), out=out)

    return make


def dequantization(layer: str, byte: torch.dtype) -> Callable[[], Call]:
    n, k, _, _ = LAYERS[layer]

    def make() -> Call:
        weight = _quantized(n, k, byte)
        out = torch.empty(n, k, dtype=DTYPE, device="cuda")
        return lambda: weight_only.dequantize(weight, out=out)

    return make


def _rows(tokens: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    copy = timing.copy_ceiling()
    yield copy
    for layer, (n, k, _, _) in LAYERS.items():
        for kind in kinds:
            moved = 3 * n * k
            measured = timing.measure(dequantization(layer, BYTES[kind]), moved)
            yield {"op": f"dequantize {layer}", "bytes": kind, **measured.row(moved)}
        for m in tokens:
            peers: dict[str, Any] = {
                "cublas_us": round(timing.measure(cublas(m, layer), 2 * n * k).median, 2),
                "w8a8_us": None,
            }
            if is_hopper():
                peers["w8a8_us"] = round(timing.measure(w8a8(m, layer), n * k).median, 2)
            for kind in kinds:
                row = timing.measure(ours(m, layer, BYTES[kind]), n * k).row(n * k)
                of_copy = round(row["tb_per_s"] / copy["tb_per_s"], 3)
                yield {"op": layer, "bytes": kind, "m": m, **row, "of_copy": of_copy, **peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--bytes", nargs="+", choices=BYTES, default=tuple(BYTES))
    args = parser.parse_args()
    rows = _rows(tuple(args.tokens), tuple(args.bytes))
    timing.report("linear layers with weights of 8 bits", rows, args.json)


if __name__ == "__main__":
    main()
