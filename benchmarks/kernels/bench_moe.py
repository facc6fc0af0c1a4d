"""Kernels of mixtures of experts at the shapes of public models, in bfloat16, FP8 and MXFP4.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_moe.py [--json FILE] [--tokens T ...]
        [--models NAME ...] [--zipf]

`layer` is a layer's chain of routing, gathering, both products and the sum, with the router's
logits given. `few_us` is the same by the kernels for few tokens, where they fit, of which
`few_up_us` is the first, and `scored_us` has the norm and the logits as well.
Logits are random, so experts are spread evenly, or follow Zipf's law with --zipf.
`floor_us` is the time to read the weights of the chosen experts once at the bandwidth of a large
copy, or to multiply at the rate of a large GEMM, whichever is longer. `grouped_mm_us` is
torch._grouped_mm of the same rows, without gate. Launches cycle through several sets of operands.
See timing.py for the method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor

from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedKind, GroupedRows
from inflight_kernels.ops.linear.operands import Operand, SummedRows, values_of
from inflight_kernels.ops.linear.scaled_rows import ScaledRows, quantize_rows
from inflight_kernels.ops.moe import few, few_sizes, products, routing, rows
from inflight_kernels.torch_ops.moe import Routing

TOKENS = (1, 8, 64, 256, 1024, 8192)
# name: (experts, per token, width, hidden size, gate)
MODELS = {
    "qwen3-30b-a3b": (128, 8, 768, 2048, products.SILU),
    "mixtral-8x7b": (8, 2, 14336, 4096, products.SILU),
    "gpt-oss-20b": (32, 4, 2880, 2880, products.CLAMPED),
}

MXFP4 = GroupedKind(grouped_rows.E2M1, 32, minimums=False)
NAMES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", MXFP4: "mxfp4"}

Call = Callable[[], object]


def _weight(
    experts: int, rows: int, width: int, values: products.WeightType
) -> products.ExpertsWeight:
    if isinstance(values, GroupedKind):
        found = grouped_rows.empty(experts, rows, width, values, torch.device("cuda"))
        found.records.random_(0, 63)  # scales are small numbers
        return found
    return _of_type(experts, rows, width, values)


def _of_type(experts: int, rows: int, width: int, dtype: torch.dtype) -> Operand:
    weight = torch.empty(experts, rows, width, device="cuda", dtype=torch.bfloat16)
    weight.normal_(std=width**-0.5)
    if dtype == torch.bfloat16:
        return weight
    out = ScaledRows.empty(experts * rows, width, "cuda", dtype)
    quantize_rows(weight.view(-1, width), out=out)
    return ScaledRows(out.values.view(experts, rows, width), out.scales)


def _rows(count: int, width: int, dtype: torch.dtype) -> Operand:
    if dtype != torch.bfloat16:
        return ScaledRows.empty(count, width, "cuda", dtype)
    return torch.zeros(count, width, dtype=dtype, device="cuda")


@dataclass
class Layer:
    """Operands of one layer, and its kernels as calls."""

    model: str
    tokens: int
    values: products.WeightType
    zipf: bool

    def __post_init__(self) -> None:
        experts, top_k, width, hidden, self.gate = MODELS[self.model]
        tokens, dtype = self.tokens, products.input_type(self.values)
        self.logits = torch.randn(tokens, experts, device="cuda")
        if self.zipf:
            self.logits -= torch.arange(1, experts + 1, device="cuda").log()
        self.router = routing.Router(Routing(top_k, renormalize=True), experts)
        self.routed = routing.Routed(tokens, experts, top_k, "cuda")
        self.tile = products.tile_of(tokens, experts, top_k, self.values)
        self.x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        self.gathered = _rows(tokens * top_k, hidden, dtype)
        self.inner = torch.zeros(tokens * top_k, width, device="cuda", dtype=torch.bfloat16)
        self.inner_quantized = _rows(tokens * top_k, width, dtype)
        self.outer = torch.zeros(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
        self.total = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.gate_up = _weight(experts, 2 * width, hidden, self.values)
        self.down = _weight(experts, hidden, width, self.values)
        sizes = few_sizes.Sizes(hidden, width, experts, top_k, 1, dtype.itemsize)
        self.has_few = sizes.fits(tokens) and not isinstance(self.values, GroupedKind)
        self.residual = torch.randn(2, tokens, hidden, device="cuda")
        self.norm = torch.ones(hidden, device="cuda")
        self.choice = few.new_choice("cuda")
        self.router_weight = torch.randn(experts, hidden, device="cuda").bfloat16()
        self.normed = _rows(tokens, hidden, dtype)
        self.layer()

    def route(self) -> None:
        routing.route(self.logits, self.router, self.routed, tile=self.tile, pdl=True)

    def plan(self) -> None:
        """Routing and gathering, which begins with what `route` leaves."""
        self.route()
        if self._gathers():
            rows.gather(self.x, self.routed, num_tokens=self.tokens, out=self.gathered, pdl=True)

    def _gathers(self) -> bool:
        return self.tokens > 1 or isinstance(self.gathered, ScaledRows)

    def up(self) -> None:
        x = self.gathered if self._gathers() else self.x
        self._product(x, self.gate_up, self.inner, self.gate)

    def finish(self) -> None:
        x: Operand = self.inner
        if isinstance(self.inner_quantized, ScaledRows):
            quantize_rows(self.inner, out=self.inner_quantized, pdl=True)
            x = self.inner_quantized
        self._product(x, self.down, self.outer, products.PLAIN)

    def sum(self) -> None:
        rows.sum_of_experts(self.outer, self.routed, total=self.total, pdl=True)

    def layer(self) -> None:
        self.plan()
        self.up()
        self.finish()
        self.sum()

    def _product(self, x: Operand, weight: products.ExpertsWeight, out: Tensor, gate: int) -> None:
        products.product(
            x, weight, None, self.routed, num_tokens=self.tokens, out=out, gate=gate, pdl=True
        )

    def few_up(self) -> None:
        assert not isinstance(self.gate_up, GroupedRows), "as `has_few` says"
        few.gate_up(
            self.normed,
            self.logits,
            self.router,
            few.GateUp(self.gate_up, None, self.gate),
            choice=self.choice,
            out=self.inner,
            pdl=True,
        )

    def few(self) -> None:
        self.few_up()
        assert not isinstance(self.down, GroupedRows), "as `has_few` says"
        layer = few.Down(self.down, None)
        few.down(self.inner, self.choice, self.router, layer, total=self.total, pdl=True)

    def scored(self) -> None:
        x = SummedRows(self.x, *self.residual, self.norm, 1e-6)
        quantized = self.normed if isinstance(self.normed, ScaledRows) else None
        out = self.total if quantized is not None else values_of(self.normed)
        few.score(x, self.router_weight, logits=self.logits, out=out, quantized=quantized, pdl=True)
        self.few()

    def distinct(self) -> int:
        """Experts that are chosen."""
        return len(self.routed.experts[: self.tokens * self.router.routing.top_k].unique())


PARTS = ("route", "plan", "up", "finish", "sum")
FEW_PARTS = ("few", "few_up", "scored")


def _measure(tokens: tuple[int, ...], models: list[str], zipf: bool) -> Iterator[dict[str, Any]]:
    copy, gemm = timing.copy_ceiling(), timing.gemm_ceiling()
    yield copy
    yield gemm
    for model in models:
        experts, top_k, width, hidden, _ = MODELS[model]
        for values, name in NAMES.items():
            sets = [Layer(model, 1, values, zipf)]
            for m in tokens:
                sets.clear()
                one = Layer(model, m, values, zipf)
                read = round(one.distinct() * 3 * width * hidden * _bytes_of(values))
                flops = 6 * m * top_k * width * hidden
                rate = gemm["tflop_per_s"] * (2 if values == torch.float8_e4m3fn else 1)
                floor = max(read / copy["tb_per_s"] * 1e-6, flops / rate * 1e-6)
                whole = (experts + 1) * 3 * width * hidden * 2
                many = max(1, min(4, timing.COLD_BYTES // read, int(2e10 // whole)))
                layers = [one, *(Layer(model, m, values, zipf) for _ in range(many))]

                def timed(part: str, layers: list[Layer] = layers) -> timing.Timing:
                    calls = iter([getattr(layer, part) for layer in layers * 300])
                    return timing.measure(lambda: next(calls), timing.COLD_BYTES // len(layers))

                row = {
                    "op": "layer",
                    "model": model,
                    "type": name,
                    "tokens": m,
                    "experts": one.distinct(),
                    **timed("layer").row(read, flops),
                    "floor_us": round(floor, 1),
                }
                for part in PARTS + (FEW_PARTS if one.has_few else ()):
                    row[f"{part}_us"] = round(timed(part).median, 1)
                if values == torch.bfloat16 and m > 1:
                    row["grouped_mm_us"] = _grouped_mm(one)
                yield row


def _bytes_of(values: products.WeightType) -> float:
    """Of a weight, with its share of scales."""
    if not isinstance(values, GroupedKind):
        return values.itemsize
    return values.record_bytes / (grouped_rows.RECORD_ROWS * grouped_rows.RECORD_COLUMNS)


def _grouped_mm(layer: Layer) -> list[float]:
    """Times of torch's products of the same rows, gate_up and down."""
    counts = layer.routed.experts.bincount(minlength=layer.router.num_experts)
    ends = counts.cumsum(0).int()
    found = []
    for x, weight in ((layer.gathered, layer.gate_up), (layer.inner, layer.down)):
        assert isinstance(x, Tensor) and isinstance(weight, Tensor)
        columns = weight.transpose(1, 2)

        def make(x: Tensor = x, columns: Tensor = columns) -> Call:
            return lambda: torch._grouped_mm(x, columns, offs=ends)

        found.append(round(timing.measure(make, timing.COLD_BYTES // 2).median, 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--zipf", action="store_true", help="skewed routing")
    args = parser.parse_args()
    found = _measure(tuple(args.tokens), args.models, args.zipf)
    timing.report("mixtures of experts", found, args.json)


if __name__ == "__main__":
    main()
