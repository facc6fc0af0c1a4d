"""Operands of attention: the spec of a layer, and the metadata that a step's layers share.

Operands that all layers share are checked once, when their struct is created, so that a launch
checks only the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inflight_kernels.ops.attention.dispatch import (
    HEAD_DIMS,
    MAX_PREFIXES,
    PREFIX_KEYS,
    PREFIX_ROWS,
    Gpu,
    Heads,
    Part,
    cascades,
    max_prefix_pieces,
    parts,
    shapes,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows, check_parts
from inflight_kernels.ops.rope import QkNorm
from inflight_kernels.runtime.launch import BYTE_TYPES, check, is_hopper, num_multiprocessors

BLOCK_SIZES = (16, 32, 64)

DEQUANTIZED_BLOCK = 64
"""Block size of a `DequantizedKV`."""


@functools.cache
def _shared_bytes() -> int:
    """Shared memory of a multiprocessor of the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.shared_memory_per_multiprocessor)


def current_gpu() -> Gpu:
    """The properties of the current device for the dispatch."""
    return Gpu(num_multiprocessors(), _shared_bytes(), is_hopper())


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Parameters of attention, shared by all layers with equal ones.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, G and D.
        scale: of the scores, > 0.
        window: a token attends to the last `window` keys, its own included; 0 for all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 for no cap.
        batch_invariant: results are bitwise independent of how a sequence is split into chunks and
            of the rest of the step. Slower: no row's keys are split across blocks.
        kv_dtype: of a cache of 8 bits, float8_e4m3fn or int8; None for one of q's type.

    Raises:
        ValueError: heads not supported, or a number out of range.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    batch_invariant: bool = False
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _ = self.heads  # of a type that there is
        if not self.scale > 0.0 or self.window < 0 or self.soft_cap < 0.0:
            raise ValueError(
                f"scale {self.scale}, window {self.window}, soft_cap {self.soft_cap}: the first "
                "must be positive, the others positive or 0"
            )

    @property
    def group(self) -> int:
        """Query heads of a KV head: H / G."""
        return self.num_heads // self.num_kv_heads

    @property
    def heads(self) -> Heads:
        """What the dispatch knows of them."""
        return heads_of(self.num_heads, self.num_kv_heads, self.head_dim, self.kv_dtype)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What a layer's attention has learned, apart from its linear layers.

    Attributes:
        qk_norm: of each head of q and k; None for no norm.
        sinks: [H] float32, for each head the score of a further key whose value is 0; None for no
            such keys.
    """

    qk_norm: QkNorm | None = None
    sinks: Tensor | None = None

    def check_fits(self, spec: AttentionParams) -> None:
        """Check the weights for such heads.

        Raises:
            ValueError: one of them has the wrong shape or type.
        """
        if self.qk_norm is not None:
            self.qk_norm.check_fits(spec.head_dim)
        if self.sinks is not None:
            check("sinks", self.sinks, (spec.num_heads,), torch.float32, vectors=False)


class QuantizedOut(NamedTuple):
    """Memory for the output of attention in e4m3, as a linear layer takes it.

    A row's scale is the least of the coarse ones (eight_bit.cuh) with which no value is above 448.
    Kernels for many rows give each head of a token such a scale, and `attend` settles a token's
    heads to the largest (`settle_parts`). What other kernels write to `out` in 16 bits is then
    quantised as well.

    Attributes:
        rows: [T, H * D] of e4m3.
        codes: [T, H] uint8, zeros before and after a layer.
    """

    rows: ScaledRows
    codes: Tensor

    def check_fits(self, spec: AttentionParams, num_tokens: int, dtype: torch.dtype) -> None:
        """Check the memory for a step of so many tokens, with queries of this type.

        Raises:
            ValueError: it has the wrong shape, type or layout, or there is no kernel for the type.
        """
        num_heads, head_dim = spec.num_heads, spec.head_dim
        if dtype != torch.bfloat16:
            raise ValueError(f"q is {dtype}; attention is quantised if it is {torch.bfloat16}")
        shape = check_parts(self.rows, head_dim)
        if shape != (num_tokens, num_heads * head_dim):
            raise ValueError(
                f"quantized.rows is {list(shape)}; expected [{num_tokens}, {num_heads * head_dim}]"
            )
        codes = (num_tokens, num_heads)
        check("quantized.codes", self.codes, codes, torch.uint8, vectors=False)


@dataclass(frozen=True, slots=True)
class DequantizedKV:
    """Memory for the keys and values of prompts in bfloat16: before the attention of a layer, those
    of a step are copied there from its cache of 8 bits.

    Attributes:
        blocks: [2, num_blocks, DEQUANTIZED_BLOCK, G, D], keys and values.
        tables: [n or more, num_blocks] int32, the block tables of a step.
        sources: [num_blocks + 1, 2] int32; the sequence and the first key of each block of a step,
            and in the last row the number of its blocks.
    """

    blocks: Tensor
    tables: Tensor
    sources: Tensor

    @classmethod
    def empty(
        cls,
        num_keys: int,
        max_chunks: int,
        spec: AttentionParams,
        device: torch.device,
    ) -> DequantizedKV:
        """For steps of up to so many chunks and keys, in whole blocks of each chunk."""
        num_blocks = -(-num_keys // DEQUANTIZED_BLOCK)
        block = (DEQUANTIZED_BLOCK, spec.num_kv_heads, spec.head_dim)
        return cls(
            torch.empty(2, num_blocks, *block, dtype=torch.bfloat16, device=device),
            torch.empty(max_chunks, num_blocks, dtype=torch.int32, device=device),
            torch.empty(num_blocks + 1, 2, dtype=torch.int32, device=device),
        )

    @property
    def num_keys(self) -> int:
        """For which there is memory."""
        return self.blocks.shape[1] * DEQUANTIZED_BLOCK

    def check_fits(self, spec: AttentionParams, num_chunks: int) -> None:
        """Check the memory for a step of so many chunks.

        Raises:
            ValueError: it has the wrong shape, type or layout.
        """
        num_blocks = self.blocks.shape[1]
        heads = (spec.num_kv_heads, spec.head_dim)
        shape = (2, num_blocks, DEQUANTIZED_BLOCK, *heads)
        check("dequantized.blocks", self.blocks, shape, torch.bfloat16)
        check("dequantized.sources", self.sources, (num_blocks + 1, 2), torch.int32)
        tables = self.tables[:num_chunks]
        check("dequantized.tables", tables, (num_chunks, num_blocks), torch.int32, False)


@dataclass(frozen=True, slots=True)
class Cascade:
    """Memory for the prefixes that chunks of one token share: keys and values of the same blocks at
    the start of their block tables are read once for many of them (attention_prefixes.cuh).

    `plan` finds them on the device. Where too few keys are shared, results are bitwise those
    without.

    Attributes:
        block_size: of the caches.
        prefixes: [MAX_PREFIXES, 8] int32.
        members: [n or more, 4] int32.
        tokens: [n or more] int32.
        arrived: [n or more, G] int32.
        sums: [rows, D] float32, partial sums: PREFIX_ROWS for each piece of a prefix, then H for
            each chunk.
        states: [rows, 2] float32, their maxima and totals.
        max_pieces: for which there are rows.
        min_keys: of a prefix, a multiple of PREFIX_KEYS.
        min_saved: keys of a prefix, times the chunks that share it but one.

    Raises:
        ValueError: min_keys or the block size is out of range.
    """

    block_size: int
    prefixes: Tensor
    members: Tensor
    tokens: Tensor
    arrived: Tensor
    sums: Tensor
    states: Tensor
    max_pieces: int
    min_keys: int = 2 * PREFIX_KEYS
    min_saved: int = 1 << 14

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"block_size is {self.block_size}; allowed: {', '.join(map(str, BLOCK_SIZES))}"
            )
        if self.min_keys < PREFIX_KEYS or self.min_keys % PREFIX_KEYS:
            raise ValueError(f"min_keys is {self.min_keys}; must be a multiple of {PREFIX_KEYS}")

    @classmethod
    def empty(
        cls, max_chunks: int, block_size: int, spec: AttentionParams, device: torch.device
    ) -> Cascade | None:
        """For steps of up to so many chunks; None if no kernel shares prefixes."""
        heads, gpu = spec.heads, current_gpu()
        few, _, _ = shapes(spec.head_dim, gpu.shared_bytes, heads.cached)
        if spec.window or spec.batch_invariant or not few.cascades or spec.group > few.rows:
            return None
        max_pieces = max_prefix_pieces(max_chunks, heads, gpu)
        num_rows = max_pieces * PREFIX_ROWS + max_chunks * spec.num_heads

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return cls(
            block_size,
            ints(MAX_PREFIXES, 8),
            ints(max_chunks, 4),
            ints(max_chunks),
            ints(max_chunks, spec.num_kv_heads),
            torch.empty(num_rows, spec.head_dim, dtype=torch.float32, device=device),
            torch.empty(num_rows, 2, dtype=torch.float32, device=device),
            max_pieces,
        )

    def check_fits(self, spec: AttentionParams, num_chunks: int) -> None:
        """Check the memory for a step of so many chunks.

        Raises:
            ValueError: it has the wrong shape or type.
        """
        most, pieces = len(self.members), self.max_pieces
        if num_chunks > most or pieces < max_prefix_pieces(num_chunks, spec.heads, current_gpu()):
            raise ValueError(f"cascade is for {most} chunks and {pieces} pieces; too few")
        num_rows = pieces * PREFIX_ROWS + most * spec.num_heads
        check("cascade.prefixes", self.prefixes, (MAX_PREFIXES, 8), torch.int32)
        check("cascade.members", self.members, (most, 4), torch.int32)
        check("cascade.tokens", self.tokens, (most,), torch.int32, False)
        check("cascade.arrived", self.arrived, (most, spec.num_kv_heads), torch.int32, False)
        check("cascade.sums", self.sums, (num_rows, spec.head_dim), torch.float32)
        check("cascade.states", self.states, (num_rows, 2), torch.float32, False)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The chunks of a step for all layers of one spec, validated.

    Attributes:
        spec: of the layers.
        query_start: [n + 1] int32; chunk i has rows query_start[i]:query_start[i + 1] of q.
        seq_lens: [n] int32, keys of chunk i, its own tokens included.
        block_tables: [n, B] int32; entries past a chunk's keys are not read.
        num_tokens: T, rows of q.
        workspace: uint8, at least `attention.workspace_size` bytes; holds the plan. Concurrent
            steps must not share it.
        max_q_len: maximum tokens of a chunk; None if unknown and each has at least one.
        planned: `planning.plan` is called before the layers; otherwise each plans by itself.
        dequantized: memory for the keys of all chunks of more than one token, rounded up to
            DEQUANTIZED_BLOCK for each. With it, chunks with many rows have a faster kernel if
            `attention.reads_dequantized`. It is overwritten by each layer.
        cascade: memory for shared prefixes, which is overwritten by each layer; None to share none.
        parts: the launches of a layer, with the places of their plans; empty if there is nothing
            to compute.

    Raises:
        ValueError: wrong shape or type of an operand, or a workspace that is too small.
    """

    spec: AttentionParams
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    num_tokens: int
    workspace: Tensor
    max_q_len: int | None = None
    planned: bool = False
    dequantized: DequantizedKV | None = None
    cascade: Cascade | None = None
    parts: tuple[Part, ...] = field(init=False)

    def __post_init__(self) -> None:
        spec, dequantizes = self.spec, self.dequantized is not None

        def find(num_chunks: int, num_tokens: int, longest: int) -> tuple[Part, ...]:
            heads, invariant = spec.heads, spec.batch_invariant
            gpu = current_gpu()
            return parts(num_chunks, num_tokens, longest, heads, gpu, invariant, dequantizes)

        if self.dequantized is not None:
            self.dequantized.check_fits(spec, len(self.seq_lens))
        if self.cascade is not None:
            self.cascade.check_fits(spec, len(self.seq_lens))
        object.__setattr__(self, "parts", parts_of(self, find))

    @property
    def longest(self) -> int:
        """Upper bound of the tokens of a chunk."""
        return longest_of(self)

    def cascade_of(self, part: Part) -> Cascade | None:
        """The memory for shared prefixes of a part of the step; None if its kernel shares none."""
        cascade, spec = self.cascade, self.spec
        if cascade is None or spec.window or spec.batch_invariant:
            return None
        return cascade if cascades(part, len(self.seq_lens)) else None


class PlannedStep(Protocol):
    """The chunks of a step, and the memory of their plan; see `AttentionMetadata`."""

    @property
    def query_start(self) -> Tensor: ...
    @property
    def seq_lens(self) -> Tensor: ...
    @property
    def block_tables(self) -> Tensor: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def workspace(self) -> Tensor: ...
    @property
    def max_q_len(self) -> int | None: ...


def longest_of(step: PlannedStep) -> int:
    """Upper bound of the tokens of a chunk."""
    if step.max_q_len is not None:
        return step.max_q_len
    return step.num_tokens - len(step.seq_lens) + 1


def parts_of(
    step: PlannedStep, find: Callable[[int, int, int], tuple[Part, ...]]
) -> tuple[Part, ...]:
    """The launches of a layer, once the step's operands are checked.

    Args:
        step: the step.
        find: the launches for n chunks, T tokens and a maximum of tokens per chunk.

    Raises:
        ValueError: wrong shape or type of an operand, or a workspace that is too small.
    """
    num_chunks, workspace = len(step.seq_lens), step.workspace
    check("query_start", step.query_start, (num_chunks + 1,), torch.int32, False)
    check("seq_lens", step.seq_lens, (num_chunks,), torch.int32, False)
    tables = (num_chunks, step.block_tables.shape[-1])
    check("block_tables", step.block_tables, tables, torch.int32, False)
    check("workspace", workspace, (workspace.numel(),), torch.uint8)
    if not num_chunks or not step.num_tokens:
        return ()
    found = find(num_chunks, step.num_tokens, longest_of(step))
    if workspace.numel() < found[-1].end:
        raise ValueError(
            f"workspace has {workspace.numel()} bytes; this step needs {found[-1].end} "
            "(workspace_size)"
        )
    return found


def heads_of(
    num_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype | None
) -> Heads:
    """Heads for the dispatch.

    Raises:
        ValueError: there is no kernel for such heads, or for a cache of this type.
    """
    check_heads(num_heads, num_kv_heads, head_dim)
    if kv_dtype is not None and kv_dtype not in BYTE_TYPES:
        raise ValueError(
            f"kv_dtype is {kv_dtype}; allowed: {', '.join(map(str, BYTE_TYPES))}, None"
        )
    cached = "" if kv_dtype is None else BYTE_TYPES[kv_dtype]
    return Heads(num_kv_heads, num_heads // num_kv_heads, head_dim, cached)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Check that there is a kernel for such heads.

    Raises:
        ValueError: there is none.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    if num_kv_heads < 1 or num_heads % num_kv_heads or not num_heads:
        raise ValueError(f"{num_heads} query heads for {num_kv_heads} KV heads; must be a multiple")
