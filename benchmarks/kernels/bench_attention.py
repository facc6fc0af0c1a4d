"""Paged attention at the shape of an 8B Llama: 32 query heads, 8 KV heads of 128, bfloat16.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_attention.py [--peers] [--json rows.json]

Decode rows count the bytes of keys and values, against a copy; prefill rows the operations of a
causal product, against a large matrix product. The plan is made once per step, so it is timed on
its own. With --peers, the same inputs go to FlashInfer, if it is installed (its plan is outside the
timing too), and, unpaged, to torch's scaled_dot_product_attention. Timing: see timing.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inflight_kernels.attention import attend, plan, workspace_size

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
Call = Callable[[], object]


def ragged(count: int, low: int, high: int) -> list[int]:
    """Lengths spread evenly over the orders of magnitude."""
    generator = random.Random(0)
    return [round(low * (high / low) ** generator.random()) for _ in range(count)]


DECODE = {
    "b64 ctx1024": [1024] * 64,
    "b64 ctx4096": [4096] * 64,
    "b256 ctx1152": [1152] * 256,
    "b64 ragged 128..32k": ragged(64, 128, 32768),
    "b1 ctx16384": [16384],
    "b8 ctx8192": [8192] * 8,
}
PREFILL = {"8 x 1024": [1024] * 8, "4 x 4096": [4096] * 4, "1 x 16384": [16384]}


class Inputs:
    """A step: q_lens new tokens of sequences of kv_lens, blocks in random order."""

    def __init__(self, q_lens: list[int], kv_lens: list[int], block_size: int) -> None:
        self.kv_lens = kv_lens
        self.block_size = block_size
        needed = [-(-kv_len // block_size) for kv_len in kv_lens]
        shape = (sum(needed), block_size, NUM_KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = (torch.randn(shape, device="cuda").to(DTYPE) for _ in "kv")
        self.indices = torch.randperm(sum(needed), device="cuda").int()
        self.block_tables = torch.zeros(len(kv_lens), max(needed), dtype=torch.int32, device="cuda")
        for i, blocks in enumerate(self.indices.split(needed)):
            self.block_tables[i, : len(blocks)] = blocks
        self.table_start = _starts(needed)
        self.last_block = torch.tensor([(n - 1) % block_size + 1 for n in kv_lens]).int().cuda()
        self.q = torch.randn(sum(q_lens), NUM_HEADS, HEAD_DIM, device="cuda").to(DTYPE)
        self.query_start = _starts(q_lens)
        self.seq_lens = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
        self.max_q_len = max(q_lens)
        self.out = torch.empty_like(self.q)


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


# ---------------------------------------------------------------- ours


def ours(inputs: Inputs) -> tuple[Call, Call]:
    """(a layer, the plan)."""
    heads = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    num_tokens = len(inputs.q)
    size = workspace_size(len(inputs.seq_lens), num_tokens, *heads, inputs.max_q_len)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def make_plan() -> None:
        plan(
            inputs.query_start,
            inputs.seq_lens,
            workspace,
            num_tokens,
            *heads,
            max_q_len=inputs.max_q_len,
        )

    def run() -> None:
        attend(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.block_tables,
            inputs.query_start,
            inputs.seq_lens,
            inputs.out,
            workspace,
            SCALE,
            max_q_len=inputs.max_q_len,
            planned=True,
        )

    make_plan()
    return run, make_plan


# ---------------------------------------------------------------- peers


def flashinfer(inputs: Inputs, decode: bool) -> Call:
    module = importlib.import_module("flashinfer")
    scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    pages = (inputs.table_start, inputs.indices, inputs.last_block)
    shape = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, inputs.block_size)
    if decode:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, *shape, q_data_type=DTYPE, kv_data_type=DTYPE)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend="fa3")
        wrapper.plan(inputs.query_start, *pages, *shape, causal=True, q_data_type=DTYPE)
    cache = (inputs.k_cache, inputs.v_cache)
    return lambda: wrapper.run(inputs.q, cache, out=inputs.out)


def sdpa(inputs: Inputs, backend: SDPBackend) -> Call:
    """Unpaged, and only where all sequences are of one length."""
    batch, kv_len = len(inputs.kv_lens), inputs.kv_lens[0]
    q = inputs.q.view(batch, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    k, v = (
        cache.view(-1, NUM_KV_HEADS, HEAD_DIM)[: batch * kv_len]
        .view(batch, kv_len, NUM_KV_HEADS, HEAD_DIM)
        .transpose(1, 2)
        for cache in (inputs.k_cache, inputs.v_cache)
    )

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] > 1, scale=SCALE, enable_gqa=True
            )

    return run


# ---------------------------------------------------------------- rows


def rows(with_peers: bool) -> Iterator[dict[str, Any]]:
    yield timing.copy_ceiling()
    yield timing.gemm_ceiling()
    for block_size in (16, 64):
        for name, kv_lens in DECODE.items():
            q_lens = [1] * len(kv_lens)
            num_bytes = sum(kv_lens) * NUM_KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize
            yield from compare(f"decode {name}", q_lens, kv_lens, block_size, with_peers, num_bytes)
        for name, kv_lens in PREFILL.items():
            pairs = sum(n * (n + 1) // 2 for n in kv_lens)
            flops = 4 * pairs * NUM_HEADS * HEAD_DIM
            num_bytes = sum(kv_lens) * (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM * 2 * DTYPE.itemsize
            yield from compare(
                f"prefill {name}", kv_lens, kv_lens, block_size, with_peers, num_bytes, flops
            )


def compare(
    name: str,
    q_lens: list[int],
    kv_lens: list[int],
    block_size: int,
    with_peers: bool,
    num_bytes: int,
    flops: int = 0,
) -> Iterator[dict[str, Any]]:
    decode = not flops
    makers: dict[str, Callable[[Inputs], Call]] = {"inflight": lambda inputs: ours(inputs)[0]}
    if with_peers:
        makers["flashinfer"] = lambda inputs: flashinfer(inputs, decode)
        if block_size == 16 and len(set(kv_lens)) == 1:
            makers["sdpa flash"] = lambda inputs: sdpa(inputs, SDPBackend.FLASH_ATTENTION)
            makers["sdpa cudnn"] = lambda inputs: sdpa(inputs, SDPBackend.CUDNN_ATTENTION)
    for peer, maker in makers.items():
        row: dict[str, Any] = {"op": name, "block_size": block_size, "by": peer}
        make = functools.partial(_make, maker, q_lens, kv_lens, block_size)
        try:
            found = timing.measure(make, num_bytes)
        except (ImportError, RuntimeError) as error:  # a peer that is not here, or cannot do this
            if peer == "inflight":
                raise
            yield {**row, "failed": str(error).splitlines()[0][:200]}
            continue
        yield {**row, **(found.row(num_bytes) if decode else found.row(flops=flops))}
        torch.cuda.empty_cache()
    make = functools.partial(_make, lambda inputs: ours(inputs)[1], q_lens, kv_lens, block_size)
    found = timing.measure(make, num_bytes)
    yield {"op": f"plan of {name}", "block_size": block_size, "by": "inflight", **found.row()}


def _make(
    maker: Callable[[Inputs], Call], q_lens: list[int], kv_lens: list[int], block_size: int
) -> Call:
    return maker(Inputs(q_lens, kv_lens, block_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="time FlashInfer and torch too")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    timing.report("attention", rows(options.peers), options.json)


if __name__ == "__main__":
    main()
