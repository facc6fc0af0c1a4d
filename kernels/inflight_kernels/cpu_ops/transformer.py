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
from inflight_kernels.torch_ops import transformer as definitions
from inflight_kernels.torch_ops.kv_quantization import KVMemory, QuantizedKV
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
        ("scale", ctypes.c_float),
    ]


@functools.cache
def _functions() -> ctypes.CDLL:
    found, pointer, number = library(), ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, Sequence[object]] = {
        "rms_norm": (pointer, pointer, pointer, ctypes.c_float, number, number, pointer, pointer),
        "rotate": (pointer, number, pointer, pointer, number, number, number),
        "write_rows": (pointer, number, pointer, number, number, pointer),
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
    if isinstance(k_cache, QuantizedKV) or isinstance(v_cache, QuantizedKV):
        definitions.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    for rows, cache in ((k, k_cache), (v, v_cache)):
        count, heads, dim = rows.shape
        _functions().write_rows(
            rows.data_ptr(),
            rows.stride(0),
            slot_mapping.data_ptr(),
            count,
            heads * dim,
            cache.data_ptr(),
        )


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

    Caps, sinks, 8-bit caches and heads of other shapes are left to torch; so are chunks of several
    queries, for which its matrix products are faster. With `each` they are not: a query attends on
    its own, and its result does not depend on the chunk that it is in.
    """
    if isinstance(k_cache, QuantizedKV) or isinstance(v_cache, QuantizedKV):
        return definitions.attend(q, k_cache, v_cache, plan, scale, cap, sinks)
    if cap or sinks is not None or not _fits(q, k_cache):
        return definitions.attend(q, k_cache, v_cache, plan, scale, cap, sinks)
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
    alone = plan.every if each else plan.single
    _attend_rows(q, k_cache, v_cache, plan, alone, scale, out)
    for piece in () if each else plan.pieces:
        rows = slice(piece.start, piece.end)
        out[rows] = definitions.attend_chunk(q[rows], k_cache, v_cache, piece, scale)
    return out


def _fits(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the kernel takes these shapes."""
    _, heads, dim = q.shape
    return dim % _LANES == 0 and dim <= _MAX_DIM and heads // k_cache.shape[2] <= _MAX_GROUP


def _attend_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    which: SingleRows,
    scale: float,
    out: Tensor,
) -> None:
    """Attention of these rows of q, written into those of out."""
    if not which.num_keys:
        return
    _, heads, dim = q.shape
    attention = _Attention(
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        *which.pointers,
        which.tables.shape[1],
        k_cache.shape[1],
        heads,
        k_cache.shape[2],
        dim,
        plan.window,
        scale,
    )
    threads = torch.get_num_threads() if which.num_keys * dim > _PARALLEL_WORK else 1
    _functions().attend_rows(ctypes.byref(attention), which.runs.shape[0] - 1, threads)
