"""Paged attention at the shape of an 8B Llama: 32 query heads, 8 KV heads of 128, bfloat16, of KV
caches in bfloat16 and in 8 bits.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_attention.py [--peers | --in-layers]
        [--json rows.json]

For decode, the rows report the bandwidth over the bytes of keys and values, to compare with a copy;
for prefill, the throughput of the causal product, to compare with a large GEMM. The plan is
computed once per step and therefore timed separately. With --peers, the same inputs go to
FlashInfer, if installed (its plan is not timed either), and, unpaged, to torch's
scaled_dot_product_attention. With --in-layers, decode is timed in context: layers of norm, qkv,
rotation, attention and output projection, with programmatic dependent launch as in a model, minus
the same layers without rotation and attention. See timing.py for the method.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timing
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inflight_kernels.ops.attention.attention import (
    attend,
    reads_dequantized,
    rope_attend,
    workspace_size,
)
from inflight_kernels.ops.attention.operands import (
    DEQUANTIZED_BLOCK,
    AttentionMetadata,
    AttentionParams,
    DequantizedKV,
)
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.ops.linear import skinny_gemm
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.ops.rope import PagedKV, RopeInputs, rope_write_kv
from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops.kv_quantization import KVMemory
from inflight_kernels.torch_ops.transformer import rotary_tables

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
SCALE = HEAD_DIM**-0.5
SPEC = AttentionParams(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, scale=SCALE)
# By name; None for the type of q.
CACHES = {
    "inflight": None,
    "inflight fp8 kv": torch.float8_e4m3fn,
    "inflight int8 kv": torch.int8,
}
Call = Callable[[], object]


def ragged(count: int, low: int, high: int) -> list[int]:
    """Log-uniformly distributed lengths."""
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
# Number of sequences, and their length.
IN_LAYERS = (
    (1, 400),
    (4, 500),
    (8, 400),
    (16, 8300),
    (64, 300),
    (64, 4096),
    (256, 700),
    (1, 16384),
)
NUM_LAYERS = 8
HIDDEN = NUM_HEADS * HEAD_DIM
PREFILL = {"8 x 1024": [1024] * 8, "4 x 4096": [4096] * 4, "1 x 16384": [16384]}


class Inputs:
    """A step: q_lens new tokens of sequences of length kv_lens, with blocks in random order.

    Args:
        q_lens, kv_lens, block_size: of the step.
        kv_dtype: of a cache of 8 bits; None for one of q's type.
    """

    def __init__(
        self,
        q_lens: list[int],
        kv_lens: list[int],
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.kv_lens = kv_lens
        self.block_size = block_size
        needed = [-(-kv_len // block_size) for kv_len in kv_lens]
        shape = (sum(needed), block_size, NUM_KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = (_cache(shape, kv_dtype) for _ in "kv")
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
        params = replace(SPEC, kv_dtype=kv_dtype)
        size = workspace_size(
            len(kv_lens),
            len(self.q),
            NUM_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            self.max_q_len,
            kv_dtype=kv_dtype,
        )
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.kv = PagedKV(self.k_cache, self.v_cache)
        dequantized = None
        if reads_dequantized(params) and self.max_q_len > 1:
            keys = sum(-(-kv_len // DEQUANTIZED_BLOCK) * DEQUANTIZED_BLOCK for kv_len in kv_lens)
            dequantized = DequantizedKV.empty(keys, len(kv_lens), params, self.q.device)
        self.metadata = AttentionMetadata(
            params,
            self.query_start,
            self.seq_lens,
            self.block_tables,
            len(self.q),
            workspace,
            self.max_q_len,
            planned=True,
            dequantized=dequantized,
        )


def _cache(shape: tuple[int, ...], kv_dtype: torch.dtype | None) -> KVMemory:
    """Keys, or values, of a layer."""
    if kv_dtype is None:
        return torch.randn(shape, device="cuda").to(DTYPE)
    num_blocks, block_size, num_heads, head_dim = shape
    data = torch.empty(num_blocks, block_size, num_heads, head_dim + 2, dtype=torch.uint8)
    memory = kv_quantization.of_blocks(data.cuda(), kv_dtype)
    # In parts, as numbers in float32 take four times the memory.
    for slots in torch.arange(num_blocks * block_size, device="cuda").split(1 << 16):
        x = torch.randn(len(slots), num_heads, head_dim, device="cuda")
        kv_quantization.write(x, memory, slots)
    return memory


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


# ---------------------------------------------------------------- ours


def ours(inputs: Inputs) -> tuple[Call, Call]:
    """Returns (attention of one layer, the plan)."""

    def make_plan() -> None:
        plan(inputs.metadata)

    def run() -> None:
        attend(inputs.q, inputs.kv, inputs.metadata, inputs.out)

    make_plan()
    return run, make_plan


# ---------------------------------------------------------------- in layers


class Layers:
    """Decode layers, each with its own weights and cache, and their inputs.

    Args:
        count: number of sequences, each of kv_len tokens.
    """

    def __init__(self, count: int, kv_len: int) -> None:
        self.inputs = [Inputs([1] * count, [kv_len] * count, 16) for _ in range(NUM_LAYERS)]
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        shapes = ((width, HIDDEN), (HIDDEN, HIDDEN))
        self.weights = [
            [torch.randn(shape, device="cuda").to(DTYPE) / HIDDEN**0.5 for shape in shapes]
            for _ in range(NUM_LAYERS)
        ]
        self.norm = torch.ones(HIDDEN, device="cuda")
        self.hidden = torch.randn(count, HIDDEN, device="cuda").to(DTYPE)
        self.normed = torch.empty_like(self.hidden)
        self.attended = torch.zeros_like(self.hidden)
        self.qkv = torch.zeros(count, width, device="cuda", dtype=DTYPE)
        frequencies = (5e5 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)
        cos, sin = (table.cuda() for table in rotary_tables(frequencies, kv_len))
        positions = torch.full((count,), kv_len - 1, device="cuda")
        # All layers share a block table and a plan, as their sequences have the same lengths.
        self.metadata = self.inputs[0].metadata
        slots = self.metadata.block_tables[:, -1].long() * 16 + (kv_len - 1) % 16
        self.rope = RopeInputs(positions, slots, cos, sin)

    def run(self, attention: str) -> None:
        """Run all layers; `attention` names its kernels, "" for none."""
        plan(self.metadata, pdl=True)
        for i, (qkv, out) in enumerate(self.weights):
            rms_norm(self.hidden, self.norm, 1e-5, out=self.normed, pdl=True)
            self._linear(self.normed, qkv, self.qkv)
            if attention:
                self._attend(i, attention)
            self._linear(self.attended, out, self.hidden)

    def _linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if skinny_gemm.prefers(len(x), *weight.shape):
            skinny_gemm.linear(x, weight, out=out, pdl=True)
        else:
            torch.mm(x, weight.t(), out=out)

    def _attend(self, layer: int, attention: str) -> None:
        kv, ready = self.inputs[layer].kv, layer > 0
        if attention == "rope_attend":
            rope_attend(
                self.qkv,
                self.rope,
                kv,
                self.metadata,
                self.attended,
                history_ready=ready,
                pdl=True,
            )
            return
        q = self.qkv[:, :HIDDEN].view(-1, NUM_HEADS, HEAD_DIM)
        rope_write_kv(self.qkv, self.rope, kv, q_out=q, history_ready=ready, pdl=True)
        attend(q, kv, self.metadata, self.attended, history_ready=ready, pdl=True)


def rows_in_layers() -> Iterator[dict[str, Any]]:
    yield timing.copy_ceiling()
    for count, kv_len in IN_LAYERS:
        layers = Layers(count, kv_len)
        num_bytes = count * kv_len * NUM_KV_HEADS * HEAD_DIM * 2 * DTYPE.itemsize
        times = {
            attention: _time(functools.partial(layers.run, attention)) / NUM_LAYERS
            for attention in ("", "rope_write_kv, attend", "rope_attend")
        }
        bare = times.pop("")
        for attention, us in times.items():
            yield {
                "op": f"decode b{count} ctx{kv_len} in a layer",
                "by": attention,
                "us": round(us - bare, 2),
                "rest_of_layer_us": round(bare, 2),
                "tb_per_s": round(num_bytes / (us - bare) * 1e-6, 3),
            }
        del layers
        torch.cuda.empty_cache()


def _time(call: Call) -> float:
    """Microseconds; the weights of all layers together exceed L2."""
    return timing.measure(lambda: call, timing.COLD_BYTES).median


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
    """Unpaged; all sequences must have the same length."""
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


def rows(with_peers: bool, block_sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    yield timing.copy_ceiling()
    yield timing.gemm_ceiling()
    for block_size in block_sizes:
        for name, kv_lens in DECODE.items():
            q_lens = [1] * len(kv_lens)
            num_bytes = 2 * sum(kv_lens) * NUM_KV_HEADS * vector_bytes(None)
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
    makers: dict[str, Callable[[Inputs], Call]] = {
        name: lambda inputs: ours(inputs)[0] for name in CACHES
    }
    if with_peers:
        makers["flashinfer"] = lambda inputs: flashinfer(inputs, decode)
        if block_size == 16 and len(set(kv_lens)) == 1:
            makers["sdpa flash"] = lambda inputs: sdpa(inputs, SDPBackend.FLASH_ATTENTION)
            makers["sdpa cudnn"] = lambda inputs: sdpa(inputs, SDPBackend.CUDNN_ATTENTION)
    for peer, maker in makers.items():
        row: dict[str, Any] = {"op": name, "block_size": block_size, "by": peer}
        kv_dtype = CACHES.get(peer)
        make = functools.partial(_make, maker, q_lens, kv_lens, block_size, kv_dtype)
        if decode:
            num_bytes = 2 * sum(kv_lens) * NUM_KV_HEADS * vector_bytes(kv_dtype)
        try:
            found = timing.measure(make, num_bytes)
        except (ImportError, RuntimeError) as error:  # not installed, or not supported
            if peer in CACHES:
                raise
            yield {**row, "failed": str(error).splitlines()[0][:200]}
            continue
        yield {**row, **(found.row(num_bytes) if decode else found.row(flops=flops))}
        torch.cuda.empty_cache()
    make = functools.partial(_make, lambda inputs: ours(inputs)[1], q_lens, kv_lens, block_size)
    found = timing.measure(make, num_bytes)
    yield {"op": f"plan of {name}", "block_size": block_size, "by": "inflight", **found.row()}


def vector_bytes(kv_dtype: torch.dtype | None) -> int:
    """Of a key, or of a value, of a head, in the cache."""
    if kv_dtype is None:
        return HEAD_DIM * DTYPE.itemsize
    return HEAD_DIM * kv_dtype.itemsize + kv_quantization.SCALE_TYPE.itemsize


def _make(
    maker: Callable[[Inputs], Call],
    q_lens: list[int],
    kv_lens: list[int],
    block_size: int,
    kv_dtype: torch.dtype | None = None,
) -> Call:
    return maker(Inputs(q_lens, kv_lens, block_size, kv_dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also time FlashInfer and torch")
    parser.add_argument("--block-size", type=int, help="KV block size; default: 16 and 64")
    parser.add_argument("--in-layers", action="store_true", help="time decode within layers")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.in_layers:
        timing.report("attention in layers", rows_in_layers(), options.json)
    else:
        sizes = (16, 64) if options.block_size is None else (options.block_size,)
        timing.report("attention", rows(options.peers, sizes), options.json)


if __name__ == "__main__":
    main()
