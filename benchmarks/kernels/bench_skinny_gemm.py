"""Linear layers of few tokens at the shapes of an 8B Llama, in bfloat16, against cuBLAS.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_skinny_gemm.py [--json FILE]
        [--tokens 1 64] [--rows layer head]

`tb_per_s` counts only the weights, which bound such layers, and `of_ceiling` is its fraction of the
bandwidth of a pass over 1 GiB. `cublas_us` is torch's linear on the same operands, for gate_up
followed by torch's silu and multiplication. Launches cycle through several weights; `pdl`: whether
our kernel starts before the preceding one has ended, as it would in a model. A `layer` is a chain
of qkv, o, gate_up and down, each on the output of the one before; where it `adds`, o and down are
accumulated into a residual, as in a model. See timing.py for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F

from inflight_kernels.ops.linear.skinny_gemm import linear, prefers

DTYPE = torch.bfloat16
TOKENS = (1, 8, 16, 32, 64)
# name: (n, k, gated)
LAYERS = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
LAYER = ("qkv", "o", "gate_up", "down")
ADDS = ("o", "down")
ROWS = ("layer", *LAYERS)

Call = Callable[[], object]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE) * shape[-1] ** -0.5


def _out(m: int, name: str, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    n, _, gated = LAYERS[name]
    return torch.empty(m, n // 2 if gated else n, dtype=dtype, device="cuda")


def _gate(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate).mul_(up)


def ours(m: int, name: str, pdl: bool, dtype: torch.dtype = DTYPE) -> Callable[[], Call]:
    n, k, gated = LAYERS[name]

    def make() -> Call:
        x, weight, out = _random(m, k), _random(n, k), _out(m, name, dtype)
        return lambda: linear(x, weight, out=out, gated=gated, pdl=pdl)

    return make


def cublas(m: int, name: str) -> Callable[[], Call]:
    n, k, gated = LAYERS[name]

    def make() -> Call:
        x, weight = _random(m, k), _random(n, k)
        if gated:
            return lambda: _gate(F.linear(x, weight))
        return lambda: F.linear(x, weight)

    return make


def our_layer(m: int, pdl: bool, adds: bool) -> Callable[[], Call]:
    def make() -> Call:
        x = _random(m, LAYERS["qkv"][1])
        weights = [_random(*LAYERS[name][:2]) for name in LAYER]
        outs = [_out(m, name).zero_() for name in LAYER]

        def call() -> None:
            y = x
            for name, weight, out in zip(LAYER, weights, outs, strict=True):
                _, k, gated = LAYERS[name]
                residual = out if adds and name in ADDS else None
                linear(y[:, :k], weight, residual=residual, out=out, gated=gated, pdl=pdl)
                y = out

        return call

    return make


def cublas_layer(m: int, adds: bool) -> Callable[[], Call]:
    def make() -> Call:
        x = _random(m, LAYERS["qkv"][1])
        weights = [_random(*LAYERS[name][:2]) for name in LAYER]
        outs = [_out(m, name).zero_() for name in LAYER]

        def call() -> None:
            y = x
            for name, weight, out in zip(LAYER, weights, outs, strict=True):
                _, k, gated = LAYERS[name]
                if adds and name in ADDS:
                    y = out.addmm_(y[:, :k], weight.t())
                else:
                    y = F.linear(y[:, :k], weight)
                if gated:
                    y = _gate(y)

        return call

    return make


def _rows(tokens: Sequence[int], rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    ceiling = timing.copy_ceiling()
    yield ceiling

    def row(op: str, num_bytes: int, found: timing.Timing, **facts: Any) -> dict[str, Any]:
        fields = found.row(num_bytes)
        share = round(fields["tb_per_s"] / ceiling["tb_per_s"], 3)
        return {"op": op, **facts, **fields, "of_ceiling": share}

    total = sum(LAYERS[name][0] * LAYERS[name][1] * 2 for name in LAYER)
    for m in tokens if "layer" in rows else ():
        for adds in (False, True):
            peer = timing.measure(cublas_layer(m, adds), total).median
            for pdl in (False, True):
                found = timing.measure(our_layer(m, pdl, adds), total)
                facts = {"m": m, "adds": adds, "pdl": pdl, "cublas_us": round(peer, 2)}
                yield row("layer", total, found, **facts)
    for name, (n, k, _) in LAYERS.items():
        for m in tokens if name in rows else ():
            num_bytes = n * k * 2
            peer = timing.measure(cublas(m, name), num_bytes).median
            for pdl in (False, True):
                found = timing.measure(ours(m, name, pdl), num_bytes)
                facts = {"m": m, "pdl": pdl, "cublas_us": round(peer, 2)}
                yield row(name, num_bytes, found, **facts, prefers=prefers(m, n, k))
            if name == "head":
                found = timing.measure(ours(m, name, True, torch.float32), num_bytes)
                yield row("head, float32 out", num_bytes, found, m=m, pdl=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="per batch")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="rows to measure")
    args = parser.parse_args()
    timing.report("linear layers", _rows(args.tokens, args.rows), args.json)


if __name__ == "__main__":
    main()
