"""Linear layers of few tokens at the shapes of an 8B Llama, in bfloat16, against cuBLAS.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_gemm.py [--json FILE]

`tb_per_s` counts the weights alone, which is what such layers have to read, and `of_ceiling` is
its share of what a pass over 1 GiB moves. `cublas_us` is torch's linear on the same operands, for
gate_up with torch's silu and product behind it. Each launch has weights of its own out of several,
and `pdl` says whether ours starts while the one before ends, as it would inside a model; `prefetch`
is of `linear`. A `layer` is qkv, o, gate_up and down, each on what the one before wrote. See
timing.py for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F

from inflight_kernels.gemm import Workspace, linear, prefers

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
PDL = ((False, 0), (True, 0), (True, 2), (True, 4), (True, 8))

Call = Callable[[], object]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE) * shape[-1] ** -0.5


def _out(m: int, name: str, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    n, _, gated = LAYERS[name]
    return torch.empty(m, n // 2 if gated else n, dtype=dtype, device="cuda")


def _gate(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate).mul_(up)


def ours(
    m: int, name: str, workspace: Workspace, pdl: bool, prefetch: int, dtype: torch.dtype
) -> Callable[[], Call]:
    n, k, gated = LAYERS[name]

    def make() -> Call:
        x, weight, out = _random(m, k), _random(n, k), _out(m, name, dtype)
        return lambda: linear(
            x, weight, workspace, out=out, gated=gated, pdl=pdl, prefetch=prefetch
        )

    return make


def cublas(m: int, name: str) -> Callable[[], Call]:
    n, k, gated = LAYERS[name]

    def make() -> Call:
        x, weight = _random(m, k), _random(n, k)
        if gated:
            return lambda: _gate(F.linear(x, weight))
        return lambda: F.linear(x, weight)

    return make


def our_layer(m: int, workspace: Workspace, pdl: bool, prefetch: int) -> Callable[[], Call]:
    def make() -> Call:
        x = _random(m, LAYERS["qkv"][1])
        weights = [_random(*LAYERS[name][:2]) for name in LAYER]
        outs = [_out(m, name) for name in LAYER]

        def call() -> None:
            y = x
            for name, weight, out in zip(LAYER, weights, outs, strict=True):
                _, k, gated = LAYERS[name]
                linear(
                    y[:, :k], weight, workspace, out=out, gated=gated, pdl=pdl, prefetch=prefetch
                )
                y = out

        return call

    return make


def cublas_layer(m: int) -> Callable[[], Call]:
    def make() -> Call:
        x = _random(m, LAYERS["qkv"][1])
        weights = [_random(*LAYERS[name][:2]) for name in LAYER]

        def call() -> None:
            y = x
            for name, weight in zip(LAYER, weights, strict=True):
                _, k, gated = LAYERS[name]
                y = F.linear(y[:, :k], weight)
                if gated:
                    y = _gate(y)

        return call

    return make


def _rows() -> Iterator[dict[str, Any]]:
    ceiling = timing.copy_ceiling()
    yield ceiling
    workspace = Workspace("cuda")

    def row(op: str, num_bytes: int, found: timing.Timing, **facts: Any) -> dict[str, Any]:
        fields = found.row(num_bytes)
        share = round(fields["tb_per_s"] / ceiling["tb_per_s"], 3)
        return {"op": op, **facts, **fields, "of_ceiling": share}

    total = sum(LAYERS[name][0] * LAYERS[name][1] * 2 for name in LAYER)
    for m in TOKENS:
        peer = timing.measure(cublas_layer(m), total).median
        for pdl, prefetch in PDL:
            found = timing.measure(our_layer(m, workspace, pdl, prefetch), total)
            facts = {"m": m, "pdl": pdl, "prefetch": prefetch, "cublas_us": round(peer, 2)}
            yield row("layer", total, found, **facts)
    for name, (n, k, _) in LAYERS.items():
        for m in TOKENS:
            num_bytes = n * k * 2
            peer = timing.measure(cublas(m, name), num_bytes).median
            for pdl, prefetch in ((False, 0), (True, 2)):
                found = timing.measure(ours(m, name, workspace, pdl, prefetch, DTYPE), num_bytes)
                facts = {"m": m, "pdl": pdl, "prefetch": prefetch, "cublas_us": round(peer, 2)}
                yield row(name, num_bytes, found, **facts, prefers=prefers(m, n, k))
            if name == "head":
                found = timing.measure(ours(m, name, workspace, True, 2, torch.float32), num_bytes)
                yield row("head, float32 out", num_bytes, found, m=m, pdl=True, prefetch=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    timing.report("linear layers", _rows(), parser.parse_args().json)


if __name__ == "__main__":
    main()
