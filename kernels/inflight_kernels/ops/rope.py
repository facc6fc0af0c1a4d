"""Fused RoPE and KV cache write, between the qkv projection and attention.

Shapes: T tokens, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    STORAGE_TYPES,
    VECTOR_BYTES,
    Int64,
    check,
    check_memory,
    kernel,
    name_of,
)
from inflight_kernels.torch_ops.kv_quantization import SCALE_TYPE, KVMemory, QuantizedKV

HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
"""Head dims that tests compile; others work too if half a head is a multiple of a vector."""

# In a small step a block has one thread per vector pair, for the lowest latency; in a large one,
# with many blocks, a thread handles four heads with the cosines it has loaded.
_MANY_TOKENS = 512
_HEADS_PER_THREAD = 4
_MAX_THREADS = 512

_UNUSED_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The KV cache of one layer, in blocks.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, G, D], of equal layout; blocks may be strided. In
            8 bits, keys are quantised before they are rounded to the type of activations.
    """

    k_cache: KVMemory
    v_cache: KVMemory

    @property
    def values(self) -> tuple[Tensor, Tensor]:
        """The caches without scales."""
        k_cache, v_cache = self.k_cache, self.v_cache
        return (
            k_cache.values if isinstance(k_cache, QuantizedKV) else k_cache,
            v_cache.values if isinstance(v_cache, QuantizedKV) else v_cache,
        )

    def check_scales(self, dtype: torch.dtype) -> None:
        """Check that caches of 8 bits have scales where the kernels expect them: at the end of
        each block (see `torch_ops.kv_quantization`).

        Args:
            dtype: of activations.

        Raises:
            ValueError: they do not, only one of the caches has 8 bits, or the activations are not
                in bfloat16, the only type with kernels for them.
        """
        for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            values = cache.values if isinstance(cache, QuantizedKV) else cache
            if isinstance(cache, QuantizedKV) != (values.dtype in BYTE_TYPES):
                raise ValueError(f"{name} is of {values.dtype}: scales belong to caches of 8 bits")
            if not isinstance(cache, QuantizedKV):
                continue
            if dtype != torch.bfloat16:
                raise ValueError(
                    f"{name} is of {values.dtype}, activations of {dtype}; expected bfloat16"
                )
            _, block_size, num_heads, head_dim = values.shape
            begin = values.data_ptr() + block_size * num_heads * head_dim
            expected = (values.stride(0) // SCALE_TYPE.itemsize, block_size, 1)
            scales = cache.scales
            if (
                scales.dtype != SCALE_TYPE
                or scales.stride() != expected
                or (scales.data_ptr() != begin and values.device.type != "meta")
                or values.stride(1) != num_heads * head_dim
            ):
                raise ValueError(
                    f"the scales of {name} are {scales.dtype} {list(scales.shape)}, strides "
                    f"{scales.stride()}; expected {SCALE_TYPE} at the end of each block "
                    "(kv_quantization.of_blocks)"
                )


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """Positions and cache slots of a step's tokens, with the rotary tables.

    Attributes:
        positions: [T] int64, rows of cos and sin.
        slot_mapping: [T] int64; a token with a negative slot is not written to the cache.
        cos, sin: [num_positions, D] float32, from `torch_ops.transformer.rotary_tables`.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """

    positions: Tensor
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor

    def __post_init__(self) -> None:
        (num_tokens,) = self.positions.shape
        num_positions, head_dim = self.cos.shape
        check("positions", self.positions, (num_tokens,), torch.int64, vectors=False)
        check("slot_mapping", self.slot_mapping, (num_tokens,), torch.int64, vectors=False)
        check("cos", self.cos, (num_positions, head_dim), torch.float32)
        check("sin", self.sin, (num_positions, head_dim), torch.float32)

    def check_fits(self, num_tokens: int, head_dim: int) -> None:
        """Check the number of tokens and the head dim.

        Raises:
            ValueError: they do not match.
        """
        if len(self.positions) != num_tokens or self.cos.shape[1] != head_dim:
            raise ValueError(
                f"positions of {len(self.positions)} tokens and tables of {self.cos.shape[1]} "
                f"values; qkv has {num_tokens} tokens and heads of {head_dim} values"
            )


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm of each head of q and k before RoPE.

    Attributes:
        q_weight, k_weight: [D] float32.
        eps: of the norm.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float = 1e-6

    def check_fits(self, head_dim: int) -> None:
        """Check the head dim and type of the weights.

        Raises:
            ValueError: with the name of the operand.
        """
        check("q_weight", self.q_weight, (head_dim,), torch.float32)
        check("k_weight", self.k_weight, (head_dim,), torch.float32)


def rope_write_kv(
    qkv: Tensor,
    rope: RopeInputs,
    kv: PagedKV,
    *,
    q_out: Tensor,
    qk_norm: QkNorm | None = None,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """Rotate q -> q_out and k -> its slots (arXiv:2104.09864, halves as pairs); v -> its slots.

    Equivalent to `torch_ops.transformer.rms_norm` of each head of q and k if there is a qk_norm,
    then `torch_ops.transformer.rotary` of both, then `torch_ops.transformer.write_kv`. For a cache
    in INT8, q_out is `torch_ops.kv_quantization.spread_queries` of q.

    Args:
        qkv: [T, (H + 2 * G) * D], each row q, then k, then v; rows may be strided.
        rope: of the step.
        kv: of the layer; both caches have the same strides, contiguous in D.
        q_out: [T, H, D]; tokens may be strided; may alias the q of qkv.
        qk_norm: of the layer; None for no norm.
        history_ready: positions and slot_mapping may be read before the preceding kernel has ended:
            they were written before an `attend` that was launched since (see there).
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape, type or layout of an operand.
    """
    storage = name_of(STORAGE_TYPES, "qkv", qkv)
    num_tokens, num_heads, head_dim = q_out.shape
    k_cache, v_cache = kv.values
    num_kv_heads = k_cache.shape[2]
    all_heads = num_heads + 2 * num_kv_heads
    _check_operands(qkv, rope, kv, q_out, qk_norm)
    group = _group(head_dim, qkv.dtype)
    if not num_tokens:
        return
    cached = BYTE_TYPES.get(k_cache.dtype, storage)
    kernel("rope", _name(storage, cached, head_dim, qk_norm is not None))(
        num_tokens,
        _threads(num_tokens, all_heads, group),
        qkv,
        Int64(qkv.stride(0)),
        q_out,
        Int64(q_out.stride(0)),
        k_cache,
        v_cache,
        *map(Int64, k_cache.stride()[:3]),
        k_cache.shape[1],
        rope.slot_mapping,
        rope.positions,
        rope.cos,
        rope.sin,
        *norm_arguments(qk_norm, qkv),
        num_heads,
        num_kv_heads,
        history_ready,
        pdl=pdl,
    )


def norm_arguments(qk_norm: QkNorm | None, unused: Tensor) -> tuple[Tensor, Tensor, float]:
    """The norm arguments of a kernel; without a norm, placeholders."""
    if qk_norm is None:
        return unused, unused, _UNUSED_EPS
    return qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps


def _check_operands(
    qkv: Tensor, rope: RopeInputs, kv: PagedKV, q_out: Tensor, qk_norm: QkNorm | None
) -> None:
    num_tokens, num_heads, head_dim = q_out.shape
    width = (num_heads + 2 * kv.k_cache.shape[2]) * head_dim
    check_rows("qkv", qkv, (num_tokens, width), qkv.dtype)
    check_rows("q_out", q_out, (num_tokens, num_heads, head_dim), qkv.dtype)
    if q_out.stride(1) != head_dim:
        raise ValueError(f"heads of q_out have stride {q_out.stride(1)}; expected {head_dim}")
    _check_caches(kv, head_dim, qkv.dtype)
    kv.check_scales(qkv.dtype)
    rope.check_fits(num_tokens, head_dim)
    if qk_norm is not None:
        qk_norm.check_fits(head_dim)


def _check_caches(kv: PagedKV, head_dim: int, dtype: torch.dtype) -> None:
    k_cache, v_cache = kv.values
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    if k_cache.dtype in BYTE_TYPES:
        dtype = k_cache.dtype
    check_rows("k_cache", k_cache, shape, dtype)
    check_rows("v_cache", v_cache, shape, dtype)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache has strides {k_cache.stride()}, v_cache {v_cache.stride()}")
    if num_blocks * block_size >= 2**31:
        raise ValueError(f"a cache of {num_blocks} * {block_size} slots; allowed: up to 2**31 - 1")


def _group(head_dim: int, dtype: torch.dtype) -> int:
    """Lanes per head: a power of two, each with one vector of both halves."""
    values = VECTOR_BYTES // dtype.itemsize
    lanes, rest = divmod(head_dim, 2 * values)
    if rest or not 1 <= lanes <= 32:
        raise ValueError(
            f"a head dim of {head_dim} in {dtype}; allowed: multiples of {2 * values} up to "
            f"{64 * values}"
        )
    return 1 << (lanes - 1).bit_length()


def _threads(num_tokens: int, all_heads: int, group: int) -> int:
    turns = 1 if num_tokens < _MANY_TOKENS else _HEADS_PER_THREAD
    warps = -(-all_heads * group // (32 * turns))
    return min(32 * warps, _MAX_THREADS)


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Like `check`, but contiguous only in the last dimension; other strides in whole vectors."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}; "
            f"expected {dtype} {list(shape)}, contiguous in the last dimension"
        )
    if any(stride * dtype.itemsize % VECTOR_BYTES for stride in tensor.stride()[:-1]):
        raise ValueError(
            f"{name} has strides {tensor.stride()} of {dtype}; all but the last must be multiples "
            f"of {VECTOR_BYTES} bytes"
        )
    check_memory(name, tensor)


def _name(storage: str, cached: str, head_dim: int, norms: bool) -> str:
    return f"rope_write_kv<{storage}, {cached}, {head_dim}, {'true' if norms else 'false'}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module, for HEAD_DIMS."""
    found: list[Instantiation] = []
    for dtype, storage in STORAGE_TYPES.items():
        byte_types = tuple(BYTE_TYPES.values()) if dtype == torch.bfloat16 else ()
        names = tuple(
            _name(storage, cached, head_dim, norms)
            for cached in (storage, *byte_types)
            for head_dim in HEAD_DIMS
            if head_dim % (2 * VECTOR_BYTES // dtype.itemsize) == 0
            for norms in (True, False)
        )
        found.append(("rope", names, ()))
    return found
