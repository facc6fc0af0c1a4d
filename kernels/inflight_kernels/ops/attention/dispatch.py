"""Selects the attention kernels for the chunks of a step, and computes the memory of their plans:
a pure function of what the host knows about the step.

On Hopper, chunks with many rows have their own kernel (attention_hopper.cu) for heads of 64 or 128
values; on GPUs with enough shared memory, few rows of many sequences have one (attention_heads.cu);
attention.cu handles everything else. The first does not read caches of 8 bits: it is for keys and
values that were dequantised (attention_dequantize.cu).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

HEAD_DIMS = (64, 96, 128, 256)
HOPPER_HEAD_DIMS = (64, 128)
"""Head dims with a Hopper-only kernel."""

MAX_ROPE_CHUNKS = 2
"""With up to so many chunks, of a token each, `attention.rope_attend` is preferred where it is
supported."""

MAX_ROPE_TOKENS = 16
"""Tokens of a chunk alone, without norms of q and k, that `attention.rope_attend` takes at most."""

MIN_CASCADE_CHUNKS = 8
"""With fewer chunks no prefix is shared: their steps are bound by latencies."""
PREFIX_ROWS, PREFIX_KEYS = 64, 64
"""Rows and keys of a tile of a shared prefix (attention_prefixes.cuh)."""
MAX_PREFIXES = 4
"""Shared prefixes of a step."""

NO_LIMIT = 2**31 - 1
"""max_rows, or tokens of a chunk, without a bound."""

# Shared memory that the driver reserves per block.
_RESERVED_SHARED = 1024
_ALIGNMENT = 256
_ARRIVALS = 4  # per share
_SHARE_BYTES = 64
_ITEM_BYTES = 32
_QUEUE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile shape of a block; the fields are documented in attention_tile.cuh."""

    head_dim: int
    warps_m: int
    warps_n: int
    fragments: int
    keys: int
    stages: int
    max_blocks: int  # per multiprocessor, limited by registers
    cached: str = ""  # type of a cache of 8 bits

    stem = "attention"
    heads = 1  # KV heads per unit

    @property
    def rows(self) -> int:
        return self.warps_m * self.fragments * 16

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * 32

    @property
    def shared_bytes(self) -> int:
        row = (self.head_dim + 8) * 2
        states = self.warps_n * self.rows * 8
        in_registers = self.fragments == 1 and self.head_dim <= 128
        queries = 0 if in_registers else self.rows * row
        tiles = self.stages * 2 * self.keys * _row_bytes(self.head_dim, self.cached)
        if self.cached:  # a tile is too small for the sums
            sums = self.warps_n * self.rows * row * 2
            tiles = tiles + sums if in_registers else max(tiles, sums)
        return queries + tiles + states

    @property
    def rotates(self) -> bool:
        """Whether `rope_attend` supports it: one warp holds the queries and the keys it copied."""
        return self.warps_m == self.fragments == 1 and self.head_dim <= 128

    def type(self, storage: str) -> str:
        return (
            f"attention::Shape<{storage}, {self.head_dim}, {self.warps_m}, {self.warps_n}, "
            f"{self.fragments}, {self.keys}, {self.stages}{_last_argument(self.cached)}>"
        )

    def name(self, storage: str) -> str:
        """The kernel's name expression."""
        return f"attend<{self.type(storage)}>"

    @property
    def rotates_chunks(self) -> bool:
        """The same for a chunk of more than one token: lanes share keys of such a width evenly."""
        return self.rotates and not self.cached and 32 % (self.head_dim // 16) == 0

    @property
    def cascades(self) -> bool:
        """Whether its kernel has a variant for shared prefixes: that for few rows."""
        return self.rotates and self.warps_n * self.warps_m * 32 == 128

    def cascade_name(self, storage: str) -> str:
        """The name expression of that variant."""
        return f"attend_cascade<{self.type(storage)}>"

    def rotating_name(self, storage: str, norms: bool) -> str:
        """The name expression of `rope_attend`."""
        return f"rope_attend<{self.type(storage)}, {'true' if norms else 'false'}>"

    def rotating_chunk_name(self, storage: str) -> str:
        """The same for a chunk of more than one token."""
        return f"rope_attend_chunk<{self.type(storage)}>"


Candidates = tuple[Shape, ...]
"""Shapes for the same steps, the preferred one first."""

# Tiles per warp in shared memory: as many as allow two blocks per multiprocessor.
_HEADS_STAGES = {64: 6, 96: 4, 128: 3}
_HEADS_STAGES_OF_BYTES = {64: 10, 96: 7, 128: 6}
HEADS_HEAD_DIMS = tuple(_HEADS_STAGES)
"""Head dims with a kernel for few rows of many sequences."""


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """Tile shape for attention_heads.cu: one warp per KV head of a unit."""

    head_dim: int
    cached: str = ""  # as of a Shape
    paired: bool = False  # in clusters of two blocks

    stem = "attention_heads"
    heads = 4
    rows = 8  # per KV head
    keys = 16
    threads = 32 * heads
    max_blocks = 2
    cascades = True  # as of a Shape

    @property
    def stages(self) -> int:
        return (_HEADS_STAGES_OF_BYTES if self.cached else _HEADS_STAGES)[self.head_dim]

    @property
    def shared_bytes(self) -> int:
        row = _row_bytes(self.head_dim, self.cached)
        return self.heads * self.stages * 2 * self.keys * row

    def type(self, storage: str) -> str:
        paired = "true" if self.paired else "false"
        last = _last_argument(self.cached)
        shape = f"{storage}, {self.head_dim}, {self.heads}, {self.stages}, {paired}{last}"
        return f"attention::HeadsShape<{shape}>"

    def name(self, storage: str) -> str:
        """The kernel's name expression."""
        kernel = "attend_heads_in_pairs" if self.paired else "attend_heads"
        return f"{kernel}<{self.type(storage)}>"

    def cascade_name(self, storage: str) -> str:
        """The name expression of its variant for shared prefixes, which has no clusters."""
        return f"attend_heads_cascade<{replace(self, paired=False).type(storage)}>"


@dataclass(frozen=True, slots=True)
class HopperShape:
    """Tile shape for attention_hopper.cu, where only the head dimension varies."""

    head_dim: int

    stem = "attention_hopper"
    heads = 1
    max_blocks = 1
    rows = 128
    keys = 128
    threads = 384

    @property
    def shared_bytes(self) -> int:
        """Queries of two units, three tiles of keys and two of values; aligned to 1024 bytes."""
        return 7 * 128 * self.head_dim * 2 + 1024

    def name(self, storage: str) -> str:
        """The kernel's name expression."""
        return f"attend<{self._type(storage)}>"

    def quantizing_name(self, storage: str) -> str:
        """The name expression of its variant that writes e4m3."""
        return f"attend_quantizing<{self._type(storage)}>"

    def _type(self, storage: str) -> str:
        return f"attention::HopperShape<{storage}, {self.head_dim}>"


def _row_bytes(head_dim: int, cached: str) -> int:
    """Shared memory of a key, or of a value, of one head; in 8 bits with its scale."""
    return head_dim + 16 + 2 if cached else (head_dim + 8) * 2


def _last_argument(cached: str) -> str:
    """The last template argument of a shape."""
    return f", {cached}" if cached else ""


def candidates(head_dim: int, cached: str = "") -> tuple[Candidates, Candidates, Candidates]:
    """Shapes for few, some and many rows per chunk, the preferred one of each first. The last one
    fits in 100 KiB, the shared memory per multiprocessor of compute capability 8.6, 8.9 and 12.x.

    Args:
        head_dim: D.
        cached: the C++ type of a cache of 8 bits; "" for one of q's type.
    """
    found = _candidates(head_dim)
    if not cached:
        return found
    # Of these, registers allow three blocks only for narrow heads.
    most = 3 if head_dim == 64 else 2
    few, some, many = (
        tuple(
            replace(shape, cached=cached, max_blocks=min(shape.max_blocks, most)) for shape in each
        )
        for each in found
    )
    return few, some, many


def _candidates(head_dim: int) -> tuple[Candidates, Candidates, Candidates]:
    """The same for a cache of q's type.

    With 16 rows the kernel is bound by reading the cache: the warps split the keys of a tile, and
    as many tiles as fit are in flight. With more rows, each warp has its own rows.
    """
    if head_dim == 256:
        # The sums take as much room as the tiles, so that fewer keys need fewer warps.
        some_of_256 = (Shape(head_dim, 4, 1, 1, 32, 2, 2), Shape(head_dim, 2, 1, 1, 32, 2, 2))
        few_of_256 = (Shape(head_dim, 1, 4, 1, 64, 2, 2), Shape(head_dim, 1, 2, 1, 32, 2, 2))
        return few_of_256, some_of_256, some_of_256
    few = Shape(head_dim, 1, 4, 1, 64, 3, 3)
    some = Shape(head_dim, 4, 1, 1, 64, 2, 2)
    many = Shape(head_dim, 4, 1, 2, 64, 2, 2)
    if head_dim == 128:
        return (few, Shape(head_dim, 1, 4, 1, 64, 2, 3)), (some,), (many, some)
    return (few,), (some,), (many,)


@functools.cache
def shapes(head_dim: int, shared_bytes: int, cached: str = "") -> tuple[Shape, Shape, Shape]:
    """Shapes for few, some and many rows per chunk: the first of the candidates that fit.

    Args:
        head_dim: D.
        shared_bytes: shared memory per multiprocessor.
        cached: see `candidates`.
    """
    few, some, many = (
        next(shape for shape in found if fits(shape, shared_bytes))
        for found in candidates(head_dim, cached)
    )
    return few, some, many


class Heads(NamedTuple):
    """The heads of a layer, and their cache.

    Attributes:
        num_kv_heads: G.
        group: H / G.
        head_dim: D.
        cached: see `candidates`.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    cached: str = ""


def heads_shape(heads: Heads, gpu: Gpu) -> HeadsShape | None:
    """Shape for few rows of each of many sequences; None if not supported for such heads, or if
    multiprocessors have too little shared memory."""
    if (
        heads.head_dim not in HEADS_HEAD_DIMS
        or heads.num_kv_heads % HeadsShape.heads
        or heads.group > HeadsShape.rows
    ):
        return None
    shape = HeadsShape(heads.head_dim, heads.cached, bool(heads.cached) and gpu.has_pairs)
    return shape if fits(shape, gpu.shared_bytes) else None


def has_hopper_shape(heads: Heads, gpu: Gpu) -> bool:
    """Whether chunks with many rows have a kernel of their own, for caches of q's type.

    For one of 8 bits, only if a token alone has few rows, as only prompts are dequantised.
    """
    few, _, _ = shapes(heads.head_dim, gpu.shared_bytes, heads.cached)
    is_narrow = not heads.cached or heads.group <= few.rows
    return gpu.is_hopper and heads.head_dim in HOPPER_HEAD_DIMS and is_narrow


def fits(shape: PlannedShape, shared_bytes: int) -> bool:
    """Whether a multiprocessor with so much shared memory has room for a block."""
    return shape.shared_bytes + _RESERVED_SHARED <= shared_bytes


def _prefers_heads_kernel(units: int, num_blocks: int, cached: str) -> bool:
    """Whether a `HeadsShape` is faster, measured on an H200 (benchmarks/notes.md): if each block
    has one unit, or there are so many units that few are split. Of bytes it is so much faster that
    units may be split."""
    if cached:
        return units >= num_blocks / 11
    return 0.9 * num_blocks <= units <= num_blocks or units >= 1.5 * num_blocks


AnyShape = Shape | HeadsShape | HopperShape


class PlannedShape(Protocol):
    """What a plan and a launch need of a shape, one of these or of another kind of attention."""

    @property
    def stem(self) -> str: ...
    @property
    def heads(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    def name(self, storage: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Part:
    """The chunks of a step that one launch handles, and the place of its plan in the workspace.

    Attributes:
        shape: of its blocks.
        min_rows, max_rows: handles chunks with more than min_rows and at most max_rows rows; a
            chunk of q_len tokens has q_len * H / G rows.
        num_shares: blocks.
        arrivals, queue, shares, first_item, items, slots: offsets in bytes.
        end: of the part in the workspace.
    """

    shape: PlannedShape
    min_rows: int
    max_rows: int
    num_shares: int
    arrivals: int
    queue: int
    shares: int
    first_item: int
    items: int
    slots: int
    end: int


class Gpu(NamedTuple):
    """Device properties that determine the split.

    Attributes:
        num_multiprocessors: number of multiprocessors.
        shared_bytes: shared memory per multiprocessor.
        is_hopper: whether it has sm_90a.
    """

    num_multiprocessors: int
    shared_bytes: int
    is_hopper: bool

    @property
    def has_pairs(self) -> bool:
        """Whether blocks can be clusters of two, of which a grid of one block or more for each
        multiprocessor has a whole number."""
        return self.is_hopper and self.num_multiprocessors % 2 == 0


@functools.lru_cache(maxsize=4096)
def parts(
    num_chunks: int,
    num_tokens: int,
    max_q_len: int,
    heads: Heads,
    gpu: Gpu,
    batch_invariant: bool = False,
    dequantizes: bool = False,
) -> tuple[Part, ...]:
    """The launches of a step, a pure function of what the host knows about it.

    Args:
        num_chunks: n.
        num_tokens: T.
        max_q_len: maximum tokens of a chunk.
        heads: of the layers.
        gpu: the device.
        batch_invariant: see `plan`.
        dequantizes: chunks with many rows may read a copy of a cache of 8 bits in q's type.
    """
    for_few: tuple[AnyShape, ...] = (shapes(heads.head_dim, gpu.shared_bytes, heads.cached)[0],)
    of_heads = heads_shape(heads, gpu)
    if of_heads is not None:
        for_few += (of_heads,)
    rows = max_q_len * heads.group
    chosen = _choose_shapes(num_chunks, rows, heads, gpu, batch_invariant, dequantizes)
    found: list[Part] = []
    for shape, min_rows, max_rows in chosen:
        # The kernel for few rows depends on the number of chunks. The workspace fits any of them,
        # so that fewer chunks never need more.
        any_of = for_few if shape in for_few else (shape,)
        room = Room(
            max(num_blocks(one, gpu) for one in any_of),
            num_chunks,
            num_chunks + num_tokens * heads.group // min(one.rows for one in any_of),
            max(2 * num_blocks(one, gpu) * one.heads * one.rows for one in any_of),
            heads.head_dim,
        )
        begin = found[-1].end if found else 0
        found.append(lay_out(shape, (min_rows, max_rows), num_blocks(shape, gpu), room, begin))
    return tuple(found)


class Room(NamedTuple):
    """What the plan of a part has room for.

    Attributes:
        shares, chunks, items: maximum numbers.
        slot_rows: rows of partial sums.
        value_dim: columns of such a row.
    """

    shares: int
    chunks: int
    items: int
    slot_rows: int
    value_dim: int


def lay_out(
    shape: PlannedShape, rows: tuple[int, int], num_shares: int, room: Room, begin: int
) -> Part:
    """A part with its plan at `begin` of the workspace.

    Args:
        shape: of its blocks.
        rows: min_rows and max_rows (see `Part`).
        num_shares: blocks.
        room: at least as much as the part needs.
        begin: offset in bytes.
    """
    sizes = (
        _ARRIVALS * room.shares * 4,
        _QUEUE_BYTES,
        room.shares * _SHARE_BYTES,
        (room.chunks + 1) * 4,
        room.items * _ITEM_BYTES,
        room.slot_rows * (room.value_dim + 2) * 4,
    )
    places = [begin]
    for size in sizes:
        places.append(places[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return Part(shape, *rows, num_shares, *places)


def num_blocks(shape: PlannedShape, gpu: Gpu) -> int:
    """Blocks that run concurrently."""
    fit = gpu.shared_bytes // (shape.shared_bytes + _RESERVED_SHARED)
    return gpu.num_multiprocessors * min(fit, shape.max_blocks)


def _choose_shapes(
    num_chunks: int,
    rows: int,
    heads: Heads,
    gpu: Gpu,
    batch_invariant: bool,
    dequantizes: bool,
) -> list[tuple[AnyShape, int, int]]:
    """Shapes of a step's launches, each with min_rows and max_rows (see `Part`).

    Args:
        rows: maximum rows of a chunk.
        num_chunks, heads, gpu, batch_invariant, dequantizes: see `parts`.
    """
    few_anywhere, some, many_anywhere = shapes(heads.head_dim, gpu.shared_bytes, heads.cached)
    few: AnyShape = few_anywhere
    many: AnyShape = many_anywhere
    # Its operands in shared memory are what TMA has copied, so not bytes.
    if has_hopper_shape(heads, gpu) and (dequantizes or not heads.cached):
        many = HopperShape(heads.head_dim)
    of_heads = heads_shape(heads, gpu)
    may_rotate = num_chunks <= MAX_ROPE_CHUNKS
    if of_heads is not None and not may_rotate and not of_heads.rows < rows <= few.rows:
        units = num_chunks * heads.num_kv_heads // of_heads.heads
        if _prefers_heads_kernel(units, num_blocks(of_heads, gpu), heads.cached):
            few = of_heads
    if batch_invariant:  # one kernel for all
        return [(some, 0, NO_LIMIT)]
    # A chunk alone keeps few blocks busy, so that its rows are more units.
    if rows <= few.rows or (num_chunks == 1 and rows <= some.rows):
        return [(few, 0, NO_LIMIT)]
    if rows <= some.rows:
        return [(some, 0, NO_LIMIT)]
    if num_chunks == 1:
        return [(many, 0, NO_LIMIT)]
    return [(few, 0, few.rows), (many, few.rows, NO_LIMIT)]


def cascades(part: Part, num_chunks: int) -> bool:
    """Whether the kernel of a part of a step, not batch-invariant, may share prefixes.

    Args:
        part: of a step without a window.
        num_chunks: n of the step.
    """
    shape = part.shape
    return (
        num_chunks >= MIN_CASCADE_CHUNKS
        and isinstance(shape, Shape | HeadsShape)
        and shape.cascades
    )


def max_prefix_pieces(num_chunks: int, heads: Heads, gpu: Gpu) -> int:
    """Pieces of shared prefixes that there is memory for, and that suffice for any step with at
    most so many chunks.

    A unit has at least one piece, and each prefix may end with a unit that is not full. Two pieces
    for each block of threads suffice to keep all of them busy.
    """
    units = num_chunks // max(1, PREFIX_ROWS // heads.group) + MAX_PREFIXES
    few, _, _ = shapes(heads.head_dim, gpu.shared_bytes, heads.cached)
    of_heads = heads_shape(heads, gpu)
    blocks = max(num_blocks(shape, gpu) for shape in (few, of_heads) if shape is not None)
    return max(units * heads.num_kv_heads, 2 * blocks)


def max_workspace_bytes(
    num_chunks: int,
    num_tokens: int,
    max_q_len: int | None,
    heads: Heads,
    gpu: Gpu,
    batch_invariant: bool = False,
) -> int:
    """Workspace bytes that suffice for any step with at most so many chunks and tokens, and a
    max_q_len up to this one, or any if None; see `parts`.

    A step of longer chunks may need less, as the kernel for a single chunk depends on its length.
    So this is the maximum over the largest step of each kernel.
    """
    if max_q_len is None:
        max_q_len = NO_LIMIT
    few, some, _ = shapes(heads.head_dim, gpu.shared_bytes, heads.cached)
    lengths = {min(max_q_len, max(1, shape.rows // heads.group)) for shape in (few, some)}
    return max(
        parts(
            num_chunks,
            min(num_tokens, num_chunks * q_len),
            q_len,
            heads,
            gpu,
            batch_invariant,
            dequantizes,
        )[-1].end
        for q_len in (*lengths, max_q_len)
        for dequantizes in ({False, bool(heads.cached)})
    )
