"""Transformer ops for the CPU in C, in float32; definitions and shapes are those of
`torch_ops.transformer`, of which each takes the place.

In the steps of few tokens, calls of torch take longer than the work; these do several at once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight_kernels.runtime.host_compile import library
from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops import transformer as definitions
from inflight_kernels.torch_ops.kv_quantization import (
    KVMemory,
    QuantizedKV,
    holds_spread_keys,
    spread_bits,
)
from inflight_kernels.torch_ops.transformer import AttentionPlan, SingleRows

_MAX_GROUP, _MAX_DIM, _LANES = 16, 256, 8
"""Of `attend_rows`: query heads of a key head, and dimensions of a head, a multiple of lanes."""
_PARALLEL_WORK = 1 << 14
"""Keys times dimensions of an attention step that pay for waking other threads."""


class _Attention(ctypes.Structure):
    """`Attention` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "out")),
        ("q_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rows", "owners", "tables", "seq_lens", "runs")),
        *(
            (name, ctypes.c_int64)
            for name in ("table_width", "block_size", "heads", "kv_heads", "dim", "window")
        ),
        ("cached", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


class _Bytes(ctypes.Structure):
    """`Bytes` of the C source."""

    _fields_ = [
        ("blocks", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("block_stride", "block_size", "heads", "dim", "cached")
        ),
    ]


_FLOATS = 0
_CACHED = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""`Cached` of the C source."""


@functools.cache
def _functions() -> ctypes.CDLL:
    found, pointer, number = library(), ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, Sequence[object]] = {
        "rms_norm": (pointer, pointer, pointer, ctypes.c_float, number, number, pointer, pointer),
        "rotate": (pointer, number, pointer, pointer, number, number, number),
        "write_rows": (pointer, number, pointer, number, number, pointer),
        "write_bytes": (pointer, number, pointer, number, pointer, number, number),
        "spread_rows": (pointer, number, number, number, number, number, pointer),
        "silu_mul": (pointer, number, number, pointer),
        "attend_rows": (pointer, number, number),
    }
    for name, arguments in signatures.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def prepare() -> None:
    """Compile and load the library.

    Raises:
        HostCompileError: see `library`.
    """
    _functions()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `torch_ops.transformer.rms_norm`."""
    x = x.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    _functions().rms_norm(
        x.data_ptr(),
        None if residual is None else residual.contiguous().data_ptr(),
        weight.data_ptr(),
        eps,
        x.numel() // width,
        width,
        normed.data_ptr(),
        total.data_ptr(),
    )
    return normed, total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `torch_ops.transformer.rotary`; in place, the heads of a row beside each other."""
    num_rows, heads, dim = x.shape
    _functions().rotate(
        x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), num_rows, heads, dim
    )
    return x


def write_kv(
    k: Tensor, v: Tensor, k_cache: KVMemory, v_cache: KVMemory, slot_mapping: Tensor
) -> None:
    """See `torch_ops.transformer.write_kv`."""
    for rows, cache in ((k, k_cache), (v, v_cache)):
        if isinstance(cache, QuantizedKV):
            _write_bytes(rows, cache, slot_mapping, are_keys=rows is k)
            continue
        count, heads, dim = rows.shape
        _functions().write_rows(
            rows.data_ptr(),
            rows.stride(0),
            slot_mapping.data_ptr(),
            count,
            heads * dim,
            cache.data_ptr(),
        )


def _write_bytes(rows: Tensor, cache: QuantizedKV, slots: Tensor, *, are_keys: bool) -> None:
    """Quantise rows [T, G, D], contiguous in heads, into slots [T] of a layer's memory."""
    if not _is_whole(cache):
        write = kv_quantization.write_keys if are_keys else kv_quantization.write
        write(rows, cache, slots)
        return
    values, (count, heads, dim) = cache.values, rows.shape
    to = _Bytes(
        values.data_ptr(),
        values.stride(0),
        values.shape[1],
        heads,
        dim,
        _CACHED[values.dtype],
    )
    bits = spread_bits(dim)[1] if are_keys and holds_spread_keys(cache) else 0
    _functions().write_bytes(
        rows.data_ptr(),
        rows.stride(0),
        slots.data_ptr(),
        count,
        ctypes.byref(to),
        are_keys,
        bits,
    )


def _is_whole(memory: QuantizedKV) -> bool:
    """Whether it is no part of each vector (`kv_quantization.first_columns`), but blocks as C knows
    them."""
    _, _, heads, dim = memory.shape
    return memory.values.stride()[1:] == (heads * dim, dim, 1)


def spread_queries(q: Tensor) -> Tensor:
    """See `torch_ops.kv_quantization.spread_queries`; heads of a row beside each other."""
    num_rows, heads, dim = q.shape
    out = torch.empty(q.shape)
    bits, _ = spread_bits(dim)
    _functions().spread_rows(q.data_ptr(), q.stride(0), num_rows, heads, dim, bits, out.data_ptr())
    return out


def silu_mul(x: Tensor) -> Tensor:
    """See `torch_ops.transformer.silu_mul`."""
    width = x.shape[-1] // 2
    num_rows = x.shape[0]
    out = torch.empty(num_rows, width)
    _functions().silu_mul(x.contiguous().data_ptr(), num_rows, width, out.data_ptr())
    return out


def attend(
    q: Tensor,
    k_cache: KVMemory,
    v_cache: KVMemory,
    plan: AttentionPlan,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    each: bool = False,
) -> Tensor:
    """See `torch_ops.transformer.attend`.

    Caps, sinks and heads of other shapes are left to torch; so are chunks of several queries, for
    which its matrix products are faster. With `each` they are not: a query attends on its own, and
    its result does not depend on the chunk that it is in.
    """
    if cap or sinks is not None or not _fits(q, k_cache, v_cache):
        return definitions.attend(q, k_cache, v_cache, plan, scale, cap, sinks)
    if holds_spread_keys(k_cache):
        q = spread_queries(q)
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
    if not each:
        _attend_rows(q, k_cache, v_cache, plan, plan.single, scale, out)
        for piece in plan.pieces:
            rows = slice(piece.start, piece.end)
            out[rows] = definitions.attend_chunk(q[rows], k_cache, v_cache, piece, scale)
    elif isinstance(k_cache, QuantizedKV) and isinstance(v_cache, QuantizedKV):
        # Rows of a chunk would each convert the same keys.
        _attend_rows(q, k_cache, v_cache, plan, plan.single, scale, out)
        _attend_gathered(q, k_cache, v_cache, plan, scale, out)
    else:
        _attend_rows(q, k_cache, v_cache, plan, plan.every, scale, out)
    return out


def _attend_gathered(
    q: Tensor,
    k_cache: QuantizedKV,
    v_cache: QuantizedKV,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of chunks of several tokens over their blocks as floats."""
    if len(plan.single.rows) == len(q):
        return
    blocks, rows = plan.gathered
    k, v = (
        kv_quantization.read_blocks(cache, blocks, torch.float32) for cache in (k_cache, v_cache)
    )
    _attend_rows(q, k, v, plan, rows, scale, out)


def _fits(q: Tensor, k_cache: KVMemory, v_cache: KVMemory) -> bool:
    """Whether the kernel takes these shapes and types."""
    _, heads, dim = q.shape
    quantized = [cache for cache in (k_cache, v_cache) if isinstance(cache, QuantizedKV)]
    if len(quantized) == 1 or not all(map(_is_whole, quantized)):
        return False
    return dim % _LANES == 0 and dim <= _MAX_DIM and heads // k_cache.shape[2] <= _MAX_GROUP


def _attend_rows(
    q: Tensor,
    k_cache: KVMemory,
    v_cache: KVMemory,
    plan: AttentionPlan,
    which: SingleRows,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of these rows of q, written into those of out."""
    if not which.num_keys:
        return
    _, heads, dim = q.shape
    keys, values = (
        cache.values if isinstance(cache, QuantizedKV) else cache for cache in (k_cache, v_cache)
    )
    attention = _Attention(
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        *which.pointers,
        which.tables.shape[1],
        keys.shape[1],
        heads,
        keys.shape[2],
        dim,
        plan.window,
        _CACHED.get(keys.dtype, _FLOATS),
        keys.stride(0),
        scale,
    )
    threads = torch.get_num_threads() if which.num_keys * dim > _PARALLEL_WORK else 1
    _functions().attend_rows(ctypes.byref(attention), which.runs.shape[0] - 1, threads)
