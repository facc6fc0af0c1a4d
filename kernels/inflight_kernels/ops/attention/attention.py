"""Causal attention over a paged KV cache, for any mix of decodes and prefill chunks.

Shapes: T tokens in n chunks, H query heads, G KV heads, D values per head; caches
[num_blocks, block_size, G, D]. A step is planned once, on the device, from the chunks' lengths;
each layer then executes the plan. Both have fixed grids, so they can be captured in a CUDA graph
and replayed with other lengths. `rope_attend` handles a step of one token per chunk, or of one
short chunk, from the qkv projection on; `attend` handles any step, after `rope_write_kv`.

dispatch.py decides which kernel handles which chunks; planning.py launches the plans.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.ops.attention.dispatch import (
    HEAD_DIMS,
    HEADS_HEAD_DIMS,
    HOPPER_HEAD_DIMS,
    MAX_ROPE_CHUNKS,
    MAX_ROPE_TOKENS,
    PREFIX_ROWS,
    AnyShape,
    HeadsShape,
    HopperShape,
    Part,
    Shape,
    candidates,
    has_hopper_shape,
    max_workspace_bytes,
    shapes,
)
from inflight_kernels.ops.attention.operands import (
    BLOCK_SIZES,
    DEQUANTIZED_BLOCK,
    AttentionMetadata,
    AttentionParams,
    AttentionWeights,
    Cascade,
    DequantizedKV,
    QuantizedOut,
    current_gpu,
    heads_of,
)
from inflight_kernels.ops.attention.planning import NO_WINDOW, kernel_names, plan
from inflight_kernels.ops.linear.scaled_rows import settle_parts
from inflight_kernels.ops.rope import PagedKV, RopeInputs, check_rows, norm_arguments
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    VECTOR_BYTES,
    Int64,
    check,
    check_memory,
    kernel,
    name_of,
)
from inflight_kernels.runtime.tensor_map import SWIZZLE_128B, strided_map

_STORAGE_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

_DEQUANTIZE_THREADS = 256
# Of a multiprocessor; with the other dimensions of the grid, two waves.
_DEQUANTIZING_BLOCKS = 2
_KEYS_AT_ONCE = 16


def workspace_size(
    num_chunks: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Workspace bytes that suffice for `plan` and `attend` on the current device, for all steps up
    to these sizes.

    Args:
        num_chunks: maximum n.
        num_tokens: maximum T.
        num_heads, num_kv_heads, head_dim: H, G and D.
        max_q_len: maximum `AttentionMetadata.max_q_len`; None if unbounded.
        batch_invariant, kv_dtype: see `AttentionParams`.
    """
    heads = heads_of(num_heads, num_kv_heads, head_dim, kv_dtype)
    if not num_chunks:
        return 0
    return max_workspace_bytes(
        num_chunks, num_tokens, max_q_len, heads, current_gpu(), batch_invariant
    )


def attend(
    q: Tensor,
    kv: PagedKV,
    metadata: AttentionMetadata,
    out: Tensor,
    *,
    sinks: Tensor | None = None,
    quantized: QuantizedOut | None = None,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """Attention of q over a layer's cache -> out.

    The last token of a chunk attends to all seq_lens[i] keys, the one before it to one less, and so
    on. A token without keys gets zeros; padding tokens, past query_start[n], are not written.
    Blocks past a chunk's keys are not read, so their content is arbitrary.

    Args:
        q: [T, H, D]; tokens may be strided, as in a slice of [T, (H + 2 * G) * D]. For a cache in
            INT8 as `rope_write_kv` leaves it: spread.
        kv: of the layer.
        metadata: of the step.
        out: [T, H, D] or [T, H * D].
        sinks: see `AttentionWeights`.
        quantized: where the output goes instead, padding included, and `out` is scratch, for q in
            bfloat16; worth it if the step `quantizes`. None for `out`.
        history_ready: an earlier `attend` or `rope_attend` of this plan is on the stream, and
            everything that this one reads was written before that launch, except q and the keys
            and values of the tokens of q, which no other chunk may attend to. It is then read
            before the preceding kernel has ended. The condition holds for every layer but a step's
            first, if no chunk's history contains tokens of another chunk of the step. If violated,
            results are wrong intermittently, so False is the default.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or `history_ready` for a step that is not
            planned.
    """
    _check_queries(q, metadata)
    AttentionWeights(sinks=sinks).check_fits(metadata.spec)
    _check_layer(q, kv, metadata, out, history_ready)
    if quantized is not None:
        quantized.check_fits(metadata.spec, metadata.num_tokens, q.dtype)
    if not metadata.planned:
        plan(metadata, pdl=pdl)
    layer = _Layer(q, kv, metadata.block_tables, metadata, out, sinks)
    for part in metadata.parts:
        if isinstance(part.shape, HopperShape):
            _attend_on_hopper(part, layer, quantized, pdl)
        else:
            _attend_anywhere(part, layer, history_ready, pdl)
    if quantized is not None:
        rows, codes = quantized
        left = out.view(rows.values.shape)
        settle_parts(left, out=rows, codes=codes, part=metadata.spec.head_dim, pdl=pdl)


def quantizes(metadata: AttentionMetadata) -> bool:
    """Whether `attend` has a kernel that writes e4m3 for some chunks of a step: those with many
    rows. What the others write is read again to be quantised."""
    return any(isinstance(part.shape, HopperShape) for part in metadata.parts)


def rope_attend(
    qkv: Tensor,
    rope: RopeInputs,
    kv: PagedKV,
    metadata: AttentionMetadata,
    out: Tensor,
    *,
    weights: AttentionWeights | None = None,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """`rope_write_kv` and `attend` in one, for a step of one token per chunk, or of one chunk that
    `rotates_chunk`.

    qkv is not modified. Saves a launch: with few sequences, a step is bound by latencies. A token
    with a negative slot is not written to the cache, but attended to.

    Args:
        qkv, rope: see `rope_write_kv`; with more than one chunk T = n, though the last ones may
            have no token.
        kv, metadata, out: see `attend`.
        weights: of the layer; None for none.
        history_ready: see `attend`; covers positions and slot_mapping too.
        pdl: see `Kernel`.

    Raises:
        ValueError: as `attend`; heads not supported according to `rotates`; or so many chunks that
            `attend` uses another kernel.
    """
    spec, num_tokens = metadata.spec, len(qkv)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    check_rows("qkv", qkv, (num_tokens, width), qkv.dtype)
    rope.check_fits(num_tokens, spec.head_dim)
    weights = weights or AttentionWeights()
    weights.check_fits(spec)
    storage = _check_layer(qkv, kv, metadata, out, history_ready)
    is_chunk = len(metadata.seq_lens) == 1 and metadata.longest > 1
    found = _only_part(metadata, weights, is_chunk)
    if found is None:
        return
    part, shape = found
    if not metadata.planned:
        plan(metadata, pdl=pdl)
    name = shape.rotating_chunk_name(storage)
    angles: tuple[object, ...] = (rope.slot_mapping, rope.positions, rope.cos, rope.sin)
    if not is_chunk:
        name = shape.rotating_name(storage, weights.qk_norm is not None)
        angles += norm_arguments(weights.qk_norm, qkv)
    kernel("attention", name)(
        part.num_shares,
        shape.threads,
        qkv,
        *kv.values,
        *_Layer(qkv, kv, metadata.block_tables, metadata, out, weights.sinks).arguments(part),
        history_ready,
        *angles,
        shared=shape.shared_bytes,
        pdl=pdl,
    )


def reads_dequantized(spec: AttentionParams) -> bool:
    """Whether chunks with many rows have a kernel on the current device for which a cache of 8
    bits must be dequantised (see `AttentionMetadata`)."""
    dequantizes = spec.kv_dtype is not None and not spec.batch_invariant
    return dequantizes and has_hopper_shape(spec.heads, current_gpu())


def prefers_rope_attend(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
) -> bool:
    """Whether `rope_attend` supports such heads and is faster than `rope_write_kv` and `attend`.

    For a step with so many chunks of one token; measured on an H200 (benchmarks/notes.md).
    """
    few = num_tokens <= MAX_ROPE_CHUNKS
    return few and rotates(num_heads, num_kv_heads, head_dim, kv_dtype)


def rotates(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype | None = None
) -> bool:
    """Whether `rope_attend` supports such heads, with a cache of this type (`AttentionParams`)."""
    heads = heads_of(num_heads, num_kv_heads, head_dim, kv_dtype)
    few, _, _ = shapes(head_dim, current_gpu().shared_bytes, heads.cached)
    return few.rotates and heads.group < few.rows


def rotates_chunk(num_tokens: int, spec: AttentionParams) -> bool:
    """Whether `rope_attend` supports a step of one chunk of so many tokens, without norms of q and
    k. It is then faster than `rope_write_kv` and `attend`."""
    if num_tokens > MAX_ROPE_TOKENS or spec.batch_invariant:
        return False
    few, some, _ = shapes(spec.head_dim, current_gpu().shared_bytes, spec.heads.cached)
    return few.rotates_chunks and num_tokens * spec.group <= some.rows


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    found: dict[str, dict[str, None]] = {}
    for dtype in _STORAGE_TYPES:
        for head_dim in HEAD_DIMS:
            for stem, name in _kernels_for(head_dim, dtype):
                found.setdefault(stem, {})[name] = None
    return [(stem, tuple(names), ()) for stem, names in found.items()]


def _kernels_for(head_dim: int, dtype: torch.dtype) -> list[tuple[str, str]]:
    """Stem and name of the kernels for heads of such a width, whatever their number and the GPU."""
    few, some, many = candidates(head_dim)
    shapes_of_any: list[AnyShape] = [*few, *some, *many]
    cached_types = ("", *BYTE_TYPES.values()) if dtype == torch.bfloat16 else ("",)
    for cached in cached_types[1:]:
        shapes_of_any += itertools.chain(*candidates(head_dim, cached))
    if head_dim in HEADS_HEAD_DIMS:
        shapes_of_any += [HeadsShape(head_dim, cached) for cached in cached_types]
        shapes_of_any += [HeadsShape(head_dim, cached, paired=True) for cached in cached_types[1:]]
    storage = _STORAGE_TYPES[dtype]
    found = [("attention_plan", name) for name in kernel_names()]
    if head_dim in HOPPER_HEAD_DIMS:
        hopper = HopperShape(head_dim)
        shapes_of_any.append(hopper)
        if dtype == torch.bfloat16:
            found.append((hopper.stem, hopper.quantizing_name(storage)))
            found += [
                ("attention_dequantize", _dequantize_name(head_dim, one)) for one in BYTE_TYPES
            ]
    found += [(shape.stem, shape.name(storage)) for shape in shapes_of_any]
    found += [
        (shape.stem, shape.cascade_name(storage))
        for shape in shapes_of_any
        if isinstance(shape, Shape | HeadsShape) and shape.cascades
    ]
    found += [
        ("attention", shape.rotating_name(storage, norms))
        for shape in shapes_of_any
        if isinstance(shape, Shape) and shape.rotates
        for norms in (False, True)
    ]
    found += [
        ("attention", shape.rotating_chunk_name(storage))
        for shape in shapes_of_any
        if isinstance(shape, Shape) and shape.rotates_chunks
    ]
    return found


# ---------------------------------------------------------------- any GPU


def _attend_anywhere(part: Part, layer: _Layer, history_ready: bool, pdl: bool) -> None:
    """Launch a kernel that reads a cache as it is."""
    storage = _STORAGE_TYPES[layer.q.dtype]
    name, cascade = part.shape.name(storage), layer.metadata.cascade_of(part)
    prefixes: tuple[object, ...] = ()
    if cascade is not None and isinstance(part.shape, Shape | HeadsShape):
        name, prefixes = part.shape.cascade_name(storage), _prefix_arguments(cascade)
    kernel(part.shape.stem, name)(
        part.num_shares,
        part.shape.threads,
        layer.q,
        *layer.kv.values,
        *layer.arguments(part),
        history_ready,
        *prefixes,
        shared=part.shape.shared_bytes,
        pdl=pdl,
    )


def _prefix_arguments(cascade: Cascade) -> tuple[object, ...]:
    """The last arguments of a kernel that shares prefixes."""
    return (
        cascade.prefixes,
        cascade.members,
        cascade.tokens,
        cascade.arrived,
        cascade.sums,
        cascade.states,
        cascade.max_pieces * PREFIX_ROWS,
    )


# ---------------------------------------------------------------- Hopper


def _attend_on_hopper(part: Part, layer: _Layer, quantized: QuantizedOut | None, pdl: bool) -> None:
    """Launch the kernel for chunks with many rows, of a cache in q's type or a copy of it."""
    metadata = layer.metadata
    storage, shape = _STORAGE_TYPES[layer.q.dtype], HopperShape(metadata.spec.head_dim)
    name = shape.name(storage)
    e4m3: tuple[Tensor, ...] = ()
    if quantized is not None:
        name, e4m3 = shape.quantizing_name(storage), (quantized.rows.values, quantized.codes)
    dequantized = metadata.dequantized if metadata.spec.kv_dtype is not None else None
    if dequantized is not None:
        _dequantize(layer.kv, metadata, dequantized, pdl)
        copied = PagedKV(*dequantized.blocks)
        layer = layer._replace(kv=copied, block_tables=dequantized.tables)
    k_cache, v_cache = layer.kv.values
    kernel(shape.stem, name)(
        part.num_shares,
        shape.threads,
        layer.q,
        _tensor_map(k_cache),
        _tensor_map(v_cache),
        v_cache,
        *layer.arguments(part),
        Int64(metadata.workspace.data_ptr() + part.queue),
        *e4m3,
        shared=shape.shared_bytes,
        pdl=pdl,
    )


def _dequantize(kv: PagedKV, metadata: AttentionMetadata, memory: DequantizedKV, pdl: bool) -> None:
    """Copy the keys and values of the chunks that `plan` has listed."""
    k_cache, v_cache = kv.values
    num_blocks = memory.blocks.shape[1]
    blocks = min(num_blocks, _DEQUANTIZING_BLOCKS * current_gpu().num_multiprocessors)
    kernel("attention_dequantize", _dequantize_name(metadata.spec.head_dim, k_cache.dtype))(
        (blocks, DEQUANTIZED_BLOCK // _KEYS_AT_ONCE, 2),
        _DEQUANTIZE_THREADS,
        k_cache,
        v_cache,
        *memory.blocks,
        metadata.block_tables,
        metadata.seq_lens,
        Int64(k_cache.stride(0)),
        metadata.block_tables.shape[1],
        k_cache.shape[1].bit_length() - 1,
        metadata.spec.num_kv_heads,
        memory.sources,
        memory.sources[num_blocks],
        pdl=pdl,
    )


def _dequantize_name(head_dim: int, dtype: torch.dtype) -> str:
    return f"dequantize_prompts<{BYTE_TYPES[dtype]}, {head_dim}>"


def _tensor_map(cache: Tensor) -> object:
    """Of a cache in 16 bits, in pieces of 64 columns; a copy is one KV head's rows of a block."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    row = 2 * num_kv_heads * head_dim
    shape = num_blocks, block_size // 8, row // 128, 8, 64
    strides = 2 * cache.stride(0), 8 * row, 128, row, 2
    box = 1, block_size // 8, head_dim // 64, 8, 64
    return strided_map(cache.data_ptr(), shape, strides, box, 256, SWIZZLE_128B)


# ---------------------------------------------------------------- operands


class _Layer(NamedTuple):
    """What the kernels for the parts of a step share; see `attend`.

    Attributes:
        q: rows of queries, or of a projection that starts with them.
        kv: of the layer, or a copy.
        block_tables: of the step, or those of the copy.
        metadata, out, sinks: as of `attend`.
    """

    q: Tensor
    kv: PagedKV
    block_tables: Tensor
    metadata: AttentionMetadata
    out: Tensor
    sinks: Tensor | None

    def arguments(self, part: Part) -> tuple[object, ...]:
        """A kernel's arguments from `out` to `slots`."""
        spec, base = self.metadata.spec, self.metadata.workspace.data_ptr()
        k_cache, _ = self.kv.values
        return (
            self.out,
            self.block_tables,
            Int64(self.q.stride(0)),
            Int64(k_cache.stride(0)),
            self.block_tables.shape[1],
            k_cache.shape[1].bit_length() - 1,
            spec.num_heads,
            spec.num_kv_heads,
            float(spec.scale),
            float(spec.soft_cap),
            spec.window or NO_WINDOW,
            Int64(0) if self.sinks is None else self.sinks,
            Int64(base + part.items),
            Int64(base + part.shares),
            Int64(base + part.arrivals),
            Int64(base + part.slots),
        )


def _only_part(
    metadata: AttentionMetadata, weights: AttentionWeights, is_chunk: bool
) -> tuple[Part, Shape] | None:
    """The single launch of a step with `rope_attend`; None if there is nothing to compute.

    Args:
        metadata: of the step.
        weights: of the layer.
        is_chunk: the step is one chunk, of more than one token.

    Raises:
        ValueError: `rope_attend` does not support the step.
    """
    spec, num_chunks = metadata.spec, len(metadata.seq_lens)
    if is_chunk:
        if not rotates_chunk(metadata.longest, spec) or weights.qk_norm is not None:
            raise ValueError(
                f"a chunk of up to {metadata.longest} tokens: rope_attend supports up to "
                f"{MAX_ROPE_TOKENS}, without norms of q and k, of heads that rotates_chunk names"
            )
    elif not rotates(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.kv_dtype):
        raise ValueError(
            f"{spec.num_heads} query heads for {spec.num_kv_heads} KV heads of {spec.head_dim} "
            "values: rope_attend supports up to 15 per KV head, of up to 128 values"
        )
    elif num_chunks != metadata.num_tokens:
        raise ValueError(
            f"{metadata.num_tokens} tokens in {num_chunks} chunks: rope_attend needs one per chunk"
        )
    elif metadata.longest != 1 or spec.batch_invariant:
        raise ValueError(
            f"max_q_len {metadata.max_q_len}, batch_invariant {spec.batch_invariant}: rope_attend "
            "requires max_q_len 1 and not batch_invariant"
        )
    if not metadata.parts:
        return None
    (part,) = metadata.parts
    shape = part.shape
    if metadata.cascade_of(part) is not None:
        raise ValueError("rope_attend does not share prefixes: leave cascade out")
    if not isinstance(shape, Shape):
        raise ValueError(
            f"{num_chunks} chunks of such heads: not supported by rope_attend, which lacks the "
            "kernel that `attend` uses for so many"
        )
    return part, shape


def _check_layer(
    q: Tensor, kv: PagedKV, metadata: AttentionMetadata, out: Tensor, history_ready: bool
) -> str:
    """Check the operands of `attend` and `rope_attend`; returns the C++ name of their type.

    Args:
        q: rows of queries, or of a projection that starts with them.
    """
    spec = metadata.spec
    storage = name_of(_STORAGE_TYPES, "q", q)
    if len(q) != metadata.num_tokens:
        raise ValueError(f"q has {len(q)} rows; the step has {metadata.num_tokens} tokens")
    if history_ready and not metadata.planned:
        raise ValueError(
            "history_ready requires a planned step: without one the plan itself is not ready"
        )
    _check_caches(kv, spec, q.dtype)
    kv.check_scales(q.dtype)
    cascade = metadata.cascade
    if cascade is not None and cascade.block_size != kv.values[0].shape[1]:
        raise ValueError(
            f"block_size is {kv.values[0].shape[1]}; that of the cascade is {cascade.block_size}"
        )
    rows = (metadata.num_tokens, spec.num_heads, spec.head_dim)
    check("out", out.view(rows), rows, q.dtype)
    return storage


def _check_queries(q: Tensor, metadata: AttentionMetadata) -> None:
    spec = metadata.spec
    _, num_heads, head_dim = q.shape
    if num_heads != spec.num_heads or head_dim != spec.head_dim:
        raise ValueError(
            f"q is {list(q.shape)}; expected [{metadata.num_tokens}, {spec.num_heads}, "
            f"{spec.head_dim}]"
        )
    if q.stride()[1:] != (head_dim, 1) or q.stride(0) % 8:
        raise ValueError(
            f"q has strides {q.stride()}; heads must be contiguous, and the stride of tokens a "
            "multiple of 8 values"
        )
    check_memory("q", q)


def _check_caches(kv: PagedKV, spec: AttentionParams, dtype: torch.dtype) -> None:
    num_kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    k_cache, v_cache = kv.values
    if spec.kv_dtype is not None:
        dtype = spec.kv_dtype
    shape, block_stride = k_cache.shape, k_cache.stride(0)
    if shape[1] not in BLOCK_SIZES:
        raise ValueError(f"block_size is {shape[1]}; allowed: {', '.join(map(str, BLOCK_SIZES))}")
    strides = (block_stride, num_kv_heads * head_dim, head_dim, 1)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if (
            cache.dtype != dtype
            or cache.shape != shape
            or shape[2:] != (num_kv_heads, head_dim)
            or cache.stride() != strides
            or block_stride * dtype.itemsize % VECTOR_BYTES
        ):
            raise ValueError(
                f"{name} is {tuple(cache.shape)} of {cache.dtype} with strides {cache.stride()}; "
                f"both caches must have the same layout, {dtype}, {num_kv_heads} heads of "
                f"{head_dim} values, and contiguous blocks"
            )
        check_memory(name, cache)
