"""Causal attention over a paged KV cache, for any mix of decode rows and chunks of prompts.

Shapes: T tokens in n chunks, H query heads, G KV heads, D values per head; caches
[num_blocks, block_size, G, D]. A step is planned once, on the device, from the chunks' lengths;
each layer then works the plan off. Both have fixed grids, so a CUDA graph may hold them and be
replayed with other lengths. `rope_attend` takes a step of one token per chunk from the qkv
projection on, `attend` any other, after `rope_write_kv`.

Which kernel takes which chunks of a step is said in attention_dispatch.py.
"""

from __future__ import annotations

import functools

import torch
from cuda.core import TensorMapDescriptor
from cuda.core.utils import StridedMemoryView
from torch import Tensor

from inflight_kernels.ops.attention_dispatch import (
    HEAD_DIMS,
    HOPPER_HEAD_DIMS,
    Gpu,
    HeadsShape,
    HopperShape,
    Part,
    Shape,
    heads_shape,
    max_workspace_bytes,
    parts,
    shapes,
)
from inflight_kernels.ops.rope import check_rotation, check_rows
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    Int64,
    check,
    check_memory,
    is_hopper,
    kernel,
    name_of,
    num_multiprocessors,
)
from inflight_kernels.runtime.tensor_map import L2_PROMOTIONS, SWIZZLE_128B

BLOCK_SIZES = (16, 32, 64)

_STORAGE_TYPES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}

_PLAN_THREADS = 1024
_NO_WINDOW = 1 << 30
# See `prefers_rope_attend`.
_MAX_ROPE_TOKENS = 2


@functools.cache
def _shared_bytes() -> int:
    """Shared memory of a multiprocessor of the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.shared_memory_per_multiprocessor)


def _gpu() -> Gpu:
    """The current one."""
    return Gpu(num_multiprocessors(), _shared_bytes(), is_hopper())


def _parts(
    num_chunks: int,
    num_tokens: int,
    max_q_len: int | None,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    batch_invariant: bool,
) -> tuple[Part, ...]:
    if max_q_len is None:
        max_q_len = num_tokens - num_chunks + 1
    return parts(
        num_chunks,
        num_tokens,
        max_q_len,
        num_kv_heads,
        group,
        head_dim,
        _gpu(),
        batch_invariant,
    )


def workspace_size(
    num_chunks: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
) -> int:
    """Bytes that `plan` and `attend` need on the current device for a step, or for any smaller one;
    more is fine.

    Args:
        num_chunks: n at most.
        num_tokens: T at most.
        num_heads, num_kv_heads, head_dim: H, G and D.
        max_q_len: what `plan` is told at most; None if that may be anything.
        batch_invariant: see `plan`.
    """
    _check_heads(num_heads, num_kv_heads, head_dim)
    if not num_chunks:
        return 0
    return max_workspace_bytes(
        num_chunks,
        num_tokens,
        max_q_len,
        num_kv_heads,
        num_heads // num_kv_heads,
        head_dim,
        _gpu(),
        batch_invariant,
    )


def plan(
    query_start: Tensor,
    seq_lens: Tensor,
    workspace: Tensor,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 0,
    *,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Plan a step; `attend` with planned=True then serves each layer that has this window.

    Args:
        query_start: [n + 1] int32, chunk i owns rows query_start[i]:query_start[i + 1] of q.
        seq_lens: [n] int32, keys of chunk i, its own tokens included.
        workspace: uint8, at least `workspace_size` of it; holds the plan afterwards.
        num_tokens: T, rows of q.
        num_heads, num_kv_heads, head_dim: H, G and D.
        window: a token sees the last `window` keys, its own included; 0 for all.
        max_q_len: no chunk has more tokens; None if each has at least one and nothing else is
            known.
        batch_invariant: a token's result does not depend, to the bit, on how its sequence is cut
            into chunks and on what else is in the step. Slower: no block helps another one.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types, or a workspace that is too small.
    """
    _check_heads(num_heads, num_kv_heads, head_dim)
    num_chunks = _check_lengths(query_start, seq_lens)
    if not num_chunks or not num_tokens:
        return
    group = num_heads // num_kv_heads
    heads = num_kv_heads, group, head_dim
    found = _parts(num_chunks, num_tokens, max_q_len, *heads, batch_invariant)
    _check_workspace(workspace, found[-1].end)
    base = workspace.data_ptr()
    for part in found:
        kernel("attention_plan", "plan")(
            1,
            _PLAN_THREADS,
            query_start,
            seq_lens,
            num_chunks,
            group,
            num_kv_heads // part.shape.heads,
            part.shape.rows,
            part.shape.keys,
            window or _NO_WINDOW,
            part.min_rows,
            part.max_rows,
            part.num_shares,
            Int64(base + part.first_item),
            Int64(base + part.items),
            Int64(base + part.shares),
            Int64(base + part.arrivals),
            Int64(base + part.queue if isinstance(part.shape, HopperShape) else 0),
            batch_invariant,
            pdl=pdl,
        )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    workspace: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
    planned: bool = False,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """Attention of q over a layer's cache -> out.

    The last token of a chunk sees all seq_lens[i] keys, the one before it one less, and so on. A
    token that sees none gets zeros; tokens of no chunk, past query_start[n], are left alone.
    Storage of blocks past a chunk's keys is not read, so it may hold anything.

    Args:
        q: [T, H, D]; its tokens may be apart, as in a slice of [T, (H + 2 * G) * D].
        k_cache, v_cache: [num_blocks, block_size, G, D], laid out alike; their blocks may be apart.
        block_tables: [n, B] int32; entries past a chunk's keys are not read.
        query_start, seq_lens: see `plan`.
        out: [T, H, D] or [T, H * D].
        workspace: see `plan`; not shared by steps that run at the same time.
        scale: of the scores, > 0.
        window: see `plan`.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 leaves them.
        max_q_len, batch_invariant: see `plan`.
        planned: the workspace holds the plan of this step, made with the same shapes, window,
            max_q_len and batch_invariant. Otherwise it is made here.
        history_ready: an earlier `attend` or `rope_attend` of this plan is on the stream, and what
            this one reads was written before that one was launched: all but q, and the keys and
            values of the tokens of q, which no other chunk may see. It is then read before the
            kernel in front has ended. A model can say so of every layer but a step's first, if no
            chunk's history has tokens of another chunk of the step. Where nothing guarantees it,
            results are wrong now and then, so False is the default.
        pdl: see `Kernel`.

    Raises:
        ValueError: for operands of other shapes or types, a workspace that is too small, or
            `history_ready` without `planned`.
    """
    num_tokens, num_heads, head_dim = q.shape
    if q.stride()[1:] != (head_dim, 1) or q.stride(0) % 8:
        raise ValueError(
            f"q has strides {q.stride()}; its heads must lie one after the other, and its tokens "
            "a multiple of 8 values apart"
        )
    check_memory("q", q)
    step = _Step(
        q, num_heads, k_cache, v_cache, block_tables, query_start, seq_lens, out, workspace
    )
    step.check_scores(scale, window, soft_cap)
    step.check_history_ready(history_ready, planned)
    if not step.num_chunks or not num_tokens:
        return
    if not planned:
        step.plan(window, max_q_len, batch_invariant, pdl)
    base = workspace.data_ptr()
    for part in step.parts(max_q_len, batch_invariant):
        caches: tuple[object, ...] = (k_cache, v_cache)
        last: object = history_ready
        if isinstance(part.shape, HopperShape):
            caches = (_tensor_map(k_cache), _tensor_map(v_cache), v_cache)
            last = Int64(base + part.queue)
        kernel(part.shape.stem, part.shape.name(step.storage))(
            part.num_shares,
            part.shape.threads,
            q,
            *caches,
            *step.arguments(part, scale, window, soft_cap),
            last,
            shared=part.shape.shared_bytes,
            pdl=pdl,
        )


def rope_attend(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    workspace: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    planned: bool = False,
    history_ready: bool = False,
    pdl: bool = False,
) -> None:
    """`rope_write_kv` and `attend` in one, for a step of one token per chunk.

    qkv itself is left as it is. One launch less: at few sequences, a step is made of latencies. A
    token with a negative slot is not written to the cache, but seen.

    Args:
        qkv, positions, cos, sin, slot_mapping, q_weight, k_weight, eps: see `rope_write_kv`; T = n,
            though the last chunks may have no token.
        k_cache, v_cache, block_tables, query_start, seq_lens, out, workspace, scale, window,
            soft_cap: see `attend`; a plan was made with max_q_len = 1.
        planned, history_ready: see `attend`; positions and slot_mapping are among what is
            history_ready.
        pdl: see `Kernel`.

    Raises:
        ValueError: as `attend`, for heads that `rotates` says no to, and for so many chunks that
            `attend` would take another kernel.
    """
    _, _, num_kv_heads, head_dim = k_cache.shape
    num_tokens = len(qkv)
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    check_rows("qkv", qkv, (num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), qkv.dtype)
    check_rotation(num_tokens, head_dim, qkv, positions, cos, sin, slot_mapping, q_weight, k_weight)
    step = _Step(
        qkv, num_heads, k_cache, v_cache, block_tables, query_start, seq_lens, out, workspace
    )
    step.check_scores(scale, window, soft_cap)
    step.check_history_ready(history_ready, planned)
    if not rotates(num_heads, num_kv_heads, head_dim):
        raise ValueError(
            f"{num_heads} query heads for {num_kv_heads} KV heads of {head_dim} values: "
            "rope_attend takes up to 15 for one, of up to 128 values"
        )
    if step.num_chunks != num_tokens:
        raise ValueError(f"{num_tokens} tokens in {step.num_chunks} chunks: it takes one in each")
    if not num_tokens:
        return
    (part,) = step.parts(1, False)
    if not isinstance(part.shape, Shape):
        raise ValueError(
            f"{num_tokens} chunks of such heads: `attend` has a kernel for so many that "
            "rope_attend has not"
        )
    if not planned:
        step.plan(window, 1, False, pdl)
    kernel("attention", part.shape.rotating_name(step.storage, q_weight is not None))(
        part.num_shares,
        part.shape.threads,
        qkv,
        k_cache,
        v_cache,
        *step.arguments(part, scale, window, soft_cap),
        history_ready,
        slot_mapping,
        positions,
        cos,
        sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        eps,
        shared=part.shape.shared_bytes,
        pdl=pdl,
    )


def prefers_rope_attend(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether `rope_attend` takes such heads and is faster than `rope_write_kv` and `attend`.

    For a step of so many chunks of one token each; measured on an H200 (benchmarks/notes.md).
    """
    return num_tokens <= _MAX_ROPE_TOKENS and rotates(num_heads, num_kv_heads, head_dim)


def rotates(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether `rope_attend` takes such heads."""
    _check_heads(num_heads, num_kv_heads, head_dim)
    few, _, _ = shapes(head_dim)
    return few.rotates and num_heads // num_kv_heads < few.rows


class _Step:
    """The operands that `attend` and `rope_attend` have in common, checked.

    Args:
        q: rows of queries, or of a projection that begins with them.
        num_heads: H.
    """

    def __init__(
        self,
        q: Tensor,
        num_heads: int,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        workspace: Tensor,
    ) -> None:
        _, block_size, num_kv_heads, head_dim = k_cache.shape
        self.storage = name_of(_STORAGE_TYPES, "q", q)
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.num_tokens = len(q)
        _check_heads(*self.heads)
        self.num_chunks = _check_lengths(query_start, seq_lens)
        _check_caches(k_cache, v_cache, q.dtype, q.shape[-1] if q.dim() == 3 else head_dim)
        tables = (self.num_chunks, block_tables.shape[-1])
        check("block_tables", block_tables, tables, torch.int32, False)
        rows = (self.num_tokens, num_heads, head_dim)
        check("out", out.view(rows), rows, q.dtype)
        self._lengths = query_start, seq_lens
        self._out, self._block_tables, self._workspace = out, block_tables, workspace
        self._q_stride, self._block_stride = q.stride(0), k_cache.stride(0)
        self._block_shift = block_size.bit_length() - 1

    def check_scores(self, scale: float, window: int, soft_cap: float) -> None:
        if not scale > 0.0 or window < 0 or soft_cap < 0.0:
            raise ValueError(
                f"scale {scale}, window {window}, soft_cap {soft_cap}: the first must be positive, "
                "the others positive or 0"
            )

    def check_history_ready(self, history_ready: bool, planned: bool) -> None:
        if history_ready and not planned:
            raise ValueError(
                "history_ready without planned: a plan that is made now is not history_ready"
            )

    def plan(self, window: int, max_q_len: int | None, batch_invariant: bool, pdl: bool) -> None:
        plan(
            *self._lengths,
            self._workspace,
            self.num_tokens,
            *self.heads,
            window,
            max_q_len=max_q_len,
            batch_invariant=batch_invariant,
            pdl=pdl,
        )

    def parts(self, max_q_len: int | None, batch_invariant: bool) -> tuple[Part, ...]:
        num_heads, num_kv_heads, head_dim = self.heads
        heads = num_kv_heads, num_heads // num_kv_heads, head_dim
        found = _parts(self.num_chunks, self.num_tokens, max_q_len, *heads, batch_invariant)
        _check_workspace(self._workspace, found[-1].end)
        return found

    def arguments(
        self, part: Part, scale: float, window: int, soft_cap: float
    ) -> tuple[object, ...]:
        """From `out` to `slots`."""
        num_heads, num_kv_heads, _ = self.heads
        base = self._workspace.data_ptr()
        return (
            self._out,
            self._block_tables,
            Int64(self._q_stride),
            Int64(self._block_stride),
            self._block_tables.shape[1],
            self._block_shift,
            num_heads,
            num_kv_heads,
            float(scale),
            float(soft_cap),
            window or _NO_WINDOW,
            Int64(base + part.items),
            Int64(base + part.shares),
            Int64(base + part.arrivals),
            Int64(base + part.slots),
        )


# H and G that every kernel takes.
_ANY_HEADS = (HeadsShape.heads, HeadsShape.heads)


def instantiations() -> list[Instantiation]:
    """What this module may launch."""
    found: dict[str, dict[str, None]] = {}
    for dtype in _STORAGE_TYPES:
        for head_dim in HEAD_DIMS:
            for hopper in (False, True):
                for stem, name in kernels_of(*_ANY_HEADS, head_dim, dtype, hopper):
                    found.setdefault(stem, {})[name] = None
    return [(stem, tuple(names), ()) for stem, names in found.items()]


def kernels_of(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, hopper: bool
) -> list[tuple[str, str]]:
    """Stem and name of the kernels that a model with such heads needs.

    Args:
        num_heads, num_kv_heads, head_dim: H, G and D.
        dtype: of queries and caches.
        hopper: whether the device has sm_90a.
    """
    storage = _STORAGE_TYPES[dtype]
    few, some, many = shapes(head_dim)
    found = [("attention_plan", "plan"), *(("attention", one.name(storage)) for one in (few, some))]
    heads = heads_shape(num_kv_heads, num_heads // num_kv_heads, head_dim)
    if heads is not None:
        found.append((heads.stem, heads.name(storage)))
    if few.rotates:
        found += [("attention", few.rotating_name(storage, norms)) for norms in (False, True)]
    if hopper and head_dim in HOPPER_HEAD_DIMS:
        found.append(("attention_hopper", HopperShape(head_dim).name(storage)))
    else:
        found.append(("attention", many.name(storage)))
    return found


# ---------------------------------------------------------------- what the copy engine sees


class _Memory:
    """Elements of 16 bits somewhere on the device."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<f2",
            "data": (pointer, False),
            "shape": shape,
            "strides": tuple(2 * stride for stride in strides),
        }


def _tensor_map(cache: Tensor) -> TensorMapDescriptor:
    """[num_blocks, block_size / 8, G * D / 64, 8, 64], in boxes of a KV head's rows of a block."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    return _encode(
        cache.data_ptr(), num_blocks, block_size, num_kv_heads, head_dim, cache.stride(0)
    )


@functools.lru_cache(maxsize=4096)
def _encode(
    pointer: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    block_stride: int,
) -> TensorMapDescriptor:
    row = num_kv_heads * head_dim
    shape = (num_blocks, block_size // 8, row // 64, 8, 64)
    memory = _Memory(pointer, shape, (block_stride, 8 * row, 64, row, 1))
    view = StridedMemoryView.from_cuda_array_interface(memory, -1)
    return view.as_tensor_map(
        (1, block_size // 8, head_dim // 64, 8, 64),
        swizzle=SWIZZLE_128B,
        l2_promotion=L2_PROMOTIONS[256],
    )


# ---------------------------------------------------------------- checks


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; it may be {', '.join(map(str, HEAD_DIMS))}")
    if num_kv_heads < 1 or num_heads % num_kv_heads or not num_heads:
        raise ValueError(
            f"{num_heads} query heads for {num_kv_heads} KV heads; each KV head needs as many"
        )


def _check_lengths(query_start: Tensor, seq_lens: Tensor) -> int:
    """The number of chunks."""
    num_chunks = len(seq_lens)
    check("query_start", query_start, (num_chunks + 1,), torch.int32, False)
    check("seq_lens", seq_lens, (num_chunks,), torch.int32, False)
    return num_chunks


def _check_workspace(workspace: Tensor, needed: int) -> None:
    check("workspace", workspace, (workspace.numel(),), torch.uint8)
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace has {workspace.numel()} bytes; this step needs {needed} (workspace_size)"
        )


def _check_caches(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype, q_dim: int) -> None:
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size is {block_size}; it may be {', '.join(map(str, BLOCK_SIZES))}"
        )
    inner = (num_kv_heads * head_dim, head_dim, 1)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if (
            cache.dtype != dtype
            or cache.shape != k_cache.shape
            or head_dim != q_dim
            or cache.stride() != (k_cache.stride(0), *inner)
            or cache.stride(0) % 8
        ):
            raise ValueError(
                f"{name} is {tuple(cache.shape)} of {cache.dtype} with strides {cache.stride()}; "
                f"both caches must be alike, of {dtype}, with {q_dim} values per head, "
                "each block without gaps"
            )
        check_memory(name, cache)
