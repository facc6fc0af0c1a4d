"""Linear layers of many tokens at the shapes of an 8B Llama, in bfloat16, against cuBLAS.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_gemm.py [--json FILE] [--tokens M ...]

`cublas_us` is torch's GEMM on the same operands: for gate_up followed by the kernel `silu_mul`, for
o and down accumulated into the output; the head's output is float32. Launches cycle through several
weights. `pdl`: whether our kernel starts before the preceding one has ended, as it would in a
model; `preferred`: whether a model uses it. GEMMs of this size run at the device's power limit,
which lowers its clock, so cuBLAS is timed both before and after ours. See timing.py for the
method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch

from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.linear.gemm import linear, prefers

DTYPE = torch.bfloat16
TOKENS = (65, 96, 128, 192, 256, 384, 512, 1024, 2048, 8192)
# name: (n, k, gated, accumulates into the output, dtype of the output)
LAYERS = {
    "qkv": (6144, 4096, False, False, DTYPE),
    "o": (4096, 4096, False, True, DTYPE),
    "gate_up": (28672, 4096, True, False, DTYPE),
    "down": (4096, 14336, False, True, DTYPE),
    "head": (128256, 4096, False, False, torch.float32),
}
# The head is never run on more tokens: of a prompt, only the last token has logits.
MOST_TOKENS = {"head": 256}

Call = Callable[[], object]


def _operands(m: int, layer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and out."""
    n, k, gated, _, out_type = LAYERS[layer]
    x, weight = (torch.randn(size, k, device="cuda", dtype=DTYPE) * k**-0.5 for size in (m, n))
    return x, weight, torch.zeros(m, n // 2 if gated else n, dtype=out_type, device="cuda")


def ours(m: int, layer: str, pdl: bool) -> Callable[[], Call]:
    _, _, gated, added, _ = LAYERS[layer]

    def make() -> Call:
        x, weight, out = _operands(m, layer)
        residual = out if added else None
        return lambda: linear(x, weight, residual=residual, out=out, gated=gated, pdl=pdl)

    return make


def cublas(m: int, layer: str) -> Callable[[], Call]:
    n, _, gated, added, out_type = LAYERS[layer]
    gate_up = torch.empty(m, n, dtype=DTYPE, device="cuda") if gated else None

    def make() -> Call:
        x, weight, out = _operands(m, layer)
        if gate_up is not None:

            def both() -> None:
                torch.mm(x, weight.T, out=gate_up)
                silu_mul(gate_up, out=out)

            return both
        if added:
            return lambda: torch.addmm(out, x, weight.T, out=out)
        if out_type != DTYPE:
            return lambda: torch.mm(x, weight.T, out_dtype=out_type)
        return lambda: torch.mm(x, weight.T, out=out)

    return make


def _rows(tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    yield timing.gemm_ceiling()
    for layer, (n, k, gated, _, out_type) in LAYERS.items():
        for m in tokens:
            if m > MOST_TOKENS.get(layer, m):
                continue
            num_bytes, flops = n * k * 2, 2 * m * n * k
            before = timing.measure(cublas(m, layer), num_bytes)
            found = {pdl: timing.measure(ours(m, layer, pdl), num_bytes) for pdl in (False, True)}
            after = timing.measure(cublas(m, layer), num_bytes)
            for pdl, measured in found.items():
                yield {
                    "op": layer,
                    "m": m,
                    "pdl": pdl,
                    "preferred": prefers(m, n, k, gated, out_type == torch.float32),
                    **measured.row(num_bytes, flops),
                    "cublas_us": [round(before.median, 2), round(after.median, 2)],
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    args = parser.parse_args()
    timing.report("linear layers of many tokens", _rows(tuple(args.tokens)), args.json)


if __name__ == "__main__":
    main()
