"""Linear layers of 8-bit values (e4m3) at the shapes of an 8B Llama, against torch._scaled_mm.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_scaled_gemm.py [--json FILE]
        [--tokens M ...]

`scaled_mm_us` is torch's product with scales by rows on the same operands, with and without its
fast accumulation; for gate_up it is followed by the kernel `silu_mul`, for o and down by an
addition. `floor_us` is the time to read the weight and x and write the output at the bandwidth of a
large copy, or to multiply at the rate of a large _scaled_mm, whichever is longer. `quantize_us` is
the time of quantising x. Launches cycle through several weights. See timing.py for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch

from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.ops.linear.scaled_rows import ScaledRows, quantize_rows

DTYPE = torch.bfloat16
TOKENS = (1, 16, 64, 128, 256, 512, 2048, 8192)
# name: (n, k, gated, accumulates into the output)
LAYERS = {
    "qkv": (6144, 4096, False, False),
    "o": (4096, 4096, False, True),
    "gate_up": (28672, 4096, True, False),
    "down": (4096, 14336, False, True),
}
_LARGE = 8192

Call = Callable[[], object]


def _quantized(rows: int, width: int) -> ScaledRows:
    out = ScaledRows.empty(rows, width, "cuda")
    quantize_rows(torch.randn(rows, width, device="cuda", dtype=DTYPE) * width**-0.5, out=out)
    return out


def ours(m: int, layer: str, pdl: bool) -> Callable[[], Call]:
    n, k, gated, added = LAYERS[layer]
    linear = skinny_gemm.linear if m <= skinny_gemm.MAX_TOKENS else gemm.linear

    def make() -> Call:
        x, weight = _quantized(m, k), _quantized(n, k)
        out = torch.zeros(m, n // 2 if gated else n, dtype=DTYPE, device="cuda")
        residual = out if added else None
        return lambda: linear(x, weight, residual=residual, out=out, gated=gated, pdl=pdl)

    return make


def scaled_mm(m: int, layer: str, fast: bool) -> Callable[[], Call]:
    n, k, gated, added = LAYERS[layer]

    def make() -> Call:
        x, weight = _quantized(m, k), _quantized(n, k)
        out = torch.zeros(m, n // 2 if gated else n, dtype=DTYPE, device="cuda")
        scales = x.scales.view(-1, 1), weight.scales.view(1, -1)

        def product() -> torch.Tensor:
            return torch._scaled_mm(
                x.values, weight.values.t(), *scales, out_dtype=DTYPE, use_fast_accum=fast
            )

        if gated:
            return lambda: silu_mul(product(), out=out)
        return (lambda: out.add_(product())) if added else product

    return make


def quantization(m: int, width: int) -> Callable[[], Call]:
    def make() -> Call:
        x = torch.randn(m, width, device="cuda", dtype=DTYPE)
        out = ScaledRows.empty(m, width, "cuda")
        return lambda: quantize_rows(x, out=out)

    return make


def _peak_flops() -> float:
    """Per second, of a large _scaled_mm."""
    x, weight = _quantized(_LARGE, _LARGE), _quantized(_LARGE, _LARGE)

    def make() -> Call:
        scales = x.scales.view(-1, 1), weight.scales.view(1, -1)
        return lambda: torch._scaled_mm(
            x.values, weight.values.t(), *scales, out_dtype=DTYPE, use_fast_accum=True
        )

    return 2 * _LARGE**3 / timing.measure(make, 3 * _LARGE**2).median * 1e6


def _rows(tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    copy, peak = timing.copy_ceiling(), _peak_flops()
    yield copy
    yield {"op": f"_scaled_mm {_LARGE}^3", "tflop_per_s": round(peak * 1e-12)}
    for layer, (n, k, gated, added) in LAYERS.items():
        for m in tokens:
            width = n // 2 if gated else n
            num_bytes, flops = n * k + m * k + 2 * m * width * (1 + added), 2 * m * n * k
            floor = max(num_bytes / copy["tb_per_s"] * 1e-6, flops / peak * 1e6)
            peers = {}
            for fast in (True, False):
                measured = timing.measure(scaled_mm(m, layer, fast), n * k)
                peers["fast" if fast else "exact"] = round(measured.median, 2)
            yield {
                "op": layer,
                "m": m,
                **timing.measure(ours(m, layer, True), n * k).row(num_bytes, flops),
                "floor_us": round(floor, 2),
                "scaled_mm_us": peers,
                "quantize_us": round(timing.measure(quantization(m, k), 3 * m * k).median, 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    timing.report("linear layers of 8-bit values", _rows(tuple(args.tokens)), args.json)


if __name__ == "__main__":
    main()
