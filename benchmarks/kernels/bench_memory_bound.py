"""Bandwidth of norm, rotation, gate, embedding and copies, against a plain copy.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_memory_bound.py [--json FILE]

Shapes are those of an 8B model (hidden 4096, 32 query and 8 KV heads of 128, width 14336) in
bfloat16, for steps of 1 to 16384 tokens. `tb_per_s` counts each operand once, read or written;
`torch_us` is the time of torch's own operations for the same result, captured in the same way,
where torch has a short equivalent. See timing.py for the method.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timing
import torch
import torch.nn.functional as F

from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.cache import copy_blocks
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.torch_ops import transformer

DTYPE = torch.bfloat16
TOKENS = (1, 16, 64, 256, 2048, 16384)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 4096, 32, 8, 128, 14336, 128256
BLOCK_SIZE = 16

Call = Callable[[], object]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(DTYPE)


def norms(tokens: int, ours: bool) -> tuple[Callable[[], Call], int]:
    weight = _random(HIDDEN).float()

    def make() -> Call:
        x, residual = _random(tokens, HIDDEN), _random(tokens, HIDDEN)
        out, total = torch.empty_like(x), torch.empty_like(x)
        if ours:
            return lambda: rms_norm(x, weight, 1e-5, residual, out=out, total=total, pdl=True)
        narrow = weight.to(DTYPE)
        return lambda: F.rms_norm(torch.add(x, residual, out=total), (HIDDEN,), narrow, 1e-5)

    return make, 4 * tokens * HIDDEN * 2


def gates(tokens: int, ours: bool) -> tuple[Callable[[], Call], int]:
    def make() -> Call:
        x = _random(tokens, 2 * WIDTH)
        out = torch.empty(tokens, WIDTH, dtype=DTYPE, device="cuda")
        if ours:
            return lambda: silu_mul(x, out=out, pdl=True)
        gate, up = x.chunk(2, -1)
        return lambda: torch.mul(F.silu(gate), up, out=out)

    return make, 3 * tokens * WIDTH * 2


def rotations(tokens: int, normed: bool) -> tuple[Callable[[], Call], int]:
    frequencies = (5e5 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)
    cos, sin = (table.cuda() for table in transformer.rotary_tables(frequencies, 16384))
    qk_norm = QkNorm(_random(HEAD_DIM).float(), _random(HEAD_DIM).float()) if normed else None
    num_blocks = tokens // BLOCK_SIZE + 1
    all_heads = HEADS + 2 * KV_HEADS

    def make() -> Call:
        qkv = _random(tokens, all_heads * HEAD_DIM)
        q_out = torch.empty(tokens, HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
        k_cache, v_cache = torch.empty(
            2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda"
        )
        positions = torch.randint(0, 16384, (tokens,), device="cuda")
        # A prefill fills blocks in order; a decode step writes scattered slots.
        slots = torch.arange(num_blocks * BLOCK_SIZE, device="cuda")[:tokens]
        if tokens <= 256:
            slots = slots[torch.randperm(tokens, device="cuda")]
        rope, kv = RopeInputs(positions, slots, cos, sin), PagedKV(k_cache, v_cache)
        return lambda: rope_write_kv(qkv, rope, kv, q_out=q_out, qk_norm=qk_norm, pdl=True)

    return make, 2 * tokens * all_heads * HEAD_DIM * 2


def embeddings(tokens: int, ours: bool) -> tuple[Callable[[], Call], int]:
    table = _random(VOCAB, HIDDEN)

    def make() -> Call:
        ids = torch.randint(0, VOCAB, (tokens,), device="cuda")
        out = torch.empty(tokens, HIDDEN, dtype=DTYPE, device="cuda")
        if ours:
            return lambda: embedding(ids, table, out=out, pdl=True)
        return lambda: torch.index_select(table, 0, ids, out=out)

    return make, 2 * tokens * HIDDEN * 2


def copies(pairs: int, ours: bool) -> tuple[Callable[[], Call], int]:
    """Copies of blocks in all 32 layers of a model, keys and values."""
    num_blocks = 1024
    shape = (64, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    caches = torch.zeros(shape, dtype=DTYPE, device="cuda")

    def make() -> Call:
        blocks = torch.randperm(num_blocks, device="cuda")
        sources, targets = blocks[:pairs], blocks[pairs : 2 * pairs]
        if ours:
            return lambda: copy_blocks(caches, sources, targets, pdl=True)
        return lambda: transformer.copy_blocks(caches, sources, targets)

    return make, 2 * pairs * caches[:, 0].numel() * 2


def _rows() -> Iterator[dict[str, Any]]:
    yield timing.copy_ceiling()
    for name, op, sizes in (
        ("rms_norm + residual", norms, TOKENS),
        ("silu_mul", gates, TOKENS),
        ("embedding", embeddings, TOKENS),
        ("copy_blocks", copies, (1, 16, 128)),
    ):
        for size in sizes:
            make, num_bytes = op(size, True)
            found = timing.measure(make, num_bytes).row(num_bytes)
            make, num_bytes = op(size, False)
            found["torch_us"] = round(timing.measure(make, num_bytes).median, 2)
            yield {"op": name, "n": size, **found}
    for name, normed in (("rope_write_kv", False), ("rope_write_kv with norms", True)):
        for size in TOKENS:
            make, num_bytes = rotations(size, normed)
            yield {"op": name, "n": size, **timing.measure(make, num_bytes).row(num_bytes)}
    yield _launch()


def _launch() -> dict[str, Any]:
    """Host time of a launch, checks included, while the device lags far behind."""
    x, out = _random(1, 2 * WIDTH), _random(1, WIDTH)
    silu_mul(x, out=out)
    torch.cuda.synchronize()
    count = 500
    started = time.perf_counter()
    for _ in range(count):
        silu_mul(x, out=out)
    host = (time.perf_counter() - started) / count * 1e6
    torch.cuda.synchronize()
    return {"op": "silu_mul, host side of an eager launch", "n": 1, "us": round(host, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    timing.report("memory-bound", _rows(), parser.parse_args().json)


if __name__ == "__main__":
    main()
