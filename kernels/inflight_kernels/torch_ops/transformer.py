"""Transformer ops in torch: the reference implementation, and the one for `device: cpu`.

Shapes: T tokens in the step, H query heads, G KV heads (H is a multiple of G), D head_dim, V
vocabulary, n rows. A layer's KV cache is [num_blocks, block_size, G, D], in floats or in 8 bits
(`torch_ops.kv_quantization`); slot s is block s // block_size, offset s % block_size. Independent
of sequences and requests.

The ops of sampling are in `torch_ops.sampling`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops.kv_quantization import KVMemory, QuantizedKV

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# ---------------------------------------------------------------- linear layers and norms

# oneDNN packs weights for a given number of rows. The layout for 16 is within a few percent of the
# best for any number of rows, and even for one row faster than the layout for 1.
_PACKED_FOR_ROWS = 16
# Packing and the product with a packed weight are operators of torch.compile without public names.
# F.linear supports weights of the public Tensor.to_mkldnn only with converted activations.


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear is available and correct for this dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 48 * 32).view(48, 32).to(dtype)
    x = torch.linspace(-1, 2, 3 * 32).view(3, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        got = linear(x, packed)
    except (RuntimeError, AttributeError):  # not in this build, or not on this CPU
        return False
    return bool(torch.allclose(got.float(), F.linear(x, weight).float(), rtol=0.02, atol=0.02))


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] packed for `linear`; opaque otherwise.

    The weight itself if the CPU or the build of torch does not support packing.
    """
    if not _can_pack(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    return packed


def padded_rows(num_rows: int) -> int:
    """The number of rows with which a packed product is computed: at most an eighth more.

    oneDNN generates code for each number of rows of each weight shape, half a megabyte, and keeps
    half of it for ever. With 8 sizes per octave it stays at some tens of megabytes; with all of
    them, a long prompt's every length would add to it.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] @ weight.T + bias -> [n, out]; weight is [out, in], packed or plain."""
    if weight.is_mkldnn:
        num_rows = len(x)
        missing = padded_rows(num_rows) - num_rows
        padded = F.pad(x, (0, 0, 0, missing)) if missing else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
        return product[:num_rows]
    return F.linear(x, weight, bias)


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, hidden] for token_ids [T] -> [T, hidden]."""
    return table.index_select(0, token_ids)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm (arXiv:1910.07467) of x + residual, and that sum.

    Args:
        x: [n, hidden].
        weight: [hidden] float32.
        eps: added to the mean square.
        residual: [n, hidden], of x's type or a wider one; None for zero.

    Returns:
        (normed, sum), each [n, hidden]: of x's type, and of the residual's.
    """
    total = x if residual is None else x + residual
    wide = torch.promote_types(total.dtype, torch.float32)
    normed = F.rms_norm(total.to(wide), (total.shape[-1],), weight.to(wide), eps)
    return normed.to(x.dtype), total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Layer norm (arXiv:1607.06450) of x + residual, and that sum.

    Args:
        x: [..., hidden].
        weight: [hidden] float32, or of more dimensions of x.
        bias: as weight; None for zero.
        eps: added to the variance.
        residual: as x, of its type or a wider one; None for zero.

    Returns:
        (normed, sum), each [..., hidden]: of x's type, and of the residual's.
    """
    total = x if residual is None else x + residual
    wide = torch.promote_types(total.dtype, torch.float32)
    normed = F.layer_norm(total.to(wide), (total.shape[-1],), eps=eps) * weight.to(wide)
    if bias is not None:
        normed = normed + bias.to(wide)
    return normed.to(x.dtype), total


def silu_mul(x: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202): x [n, 2 * width] = gate | up -> silu(gate) * up."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """GeGLU's gate (arXiv:2002.05202) with the tanh approximation of GELU (arXiv:1606.08415), which
    the Gemma families use: x [n, 2 * width] = gate | up -> gelu_tanh(gate) * up."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(x: Tensor) -> Tensor:
    """The gate of gpt-oss (arXiv:2508.10925): x [n, 2 * width] = gate | up -> (up + 1) * gate *
    sigmoid(1.702 * gate), with gate at most 7 and up in -7 to 7."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(gate * 1.702)).mul_(up + 1)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU (arXiv:1606.08415) in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (arXiv:2109.08668)."""
    return F.relu(x).square_()


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    return torch.tanh(x / cap).mul_(cap)


# ---------------------------------------------------------------- rotary embedding


def rotary_tables(
    inverse_frequencies: npt.NDArray[np.float32],
    num_positions: int,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Tables of `rotary`, both [num_positions, D] for D/2 inverse frequencies.

    The angle of columns i and i + D/2 is position * inverse_frequencies[i]. The first half of the
    sine table is negated, for the minus sign of the rotation. Columns of frequency 0 are neither
    rotated nor multiplied by the attention factor.
    """
    frequencies = torch.from_numpy(inverse_frequencies).to(device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    factors = torch.where(frequencies > 0, attention_factor, 1.0)
    cos, sin = angles.cos() * factors, angles.sin() * factors
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of a head by its position's angle (arXiv:2104.09864).

    Args:
        x: [T, heads, D].
        cos, sin: [T, D], the rows of `rotary_tables` at each token's position.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos.unsqueeze(1), swapped, sin.unsqueeze(1))


# ---------------------------------------------------------------- paged KV cache


def write_kv(
    k: Tensor, v: Tensor, k_cache: KVMemory, v_cache: KVMemory, slot_mapping: Tensor
) -> None:
    """Write k and v [T, G, D] into slots [T] of a layer's cache, in place."""
    if isinstance(k_cache, QuantizedKV):
        kv_quantization.write_keys(k, k_cache, slot_mapping)
    else:
        write_rows(k, k_cache, slot_mapping)
    write_rows(v, v_cache, slot_mapping)


def write_rows(rows: Tensor, cache: KVMemory, slot_mapping: Tensor) -> None:
    """Write values, latents, or keys of floats, [T, G, D] into slots [T] of a layer's cache, in
    place."""
    if isinstance(cache, QuantizedKV):
        kv_quantization.write(rows, cache, slot_mapping)
    else:
        cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)


def copy_blocks(caches: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks [n] to blocks [n] in caches [..., num_blocks, block_size, G, D] of any type, in
    place.

    All sources are read before any target is written.
    """
    caches.index_copy_(-4, targets, caches.index_select(-4, sources))


def clear_slots(caches: Tensor, slots: Tensor) -> None:
    """Zero slots [n] in caches [..., num_blocks, block_size, G, D], in place.

    Attention gives slots past a row's length the weight 0, but 0 * NaN is NaN: a NaN that an
    earlier sequence left in a reused block must not reach the next one.
    """
    caches.flatten(-4, -3).index_fill_(-3, slots, 0.0)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length.

    Attributes:
        rows: [n] their rows in q; None for all rows in order.
        blocks: [n * B] their block tables, each padded with one of its own blocks.
        kv_len: the maximum number of keys.
        mask: [n, 1, 1, kv_len] added to the scores; None if all have kv_len keys.
    """

    rows: Tensor | None
    blocks: Tensor
    kv_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """Several queries of one sequence: rows [start, end) of q.

    Attributes:
        mask: [end - start, kv_len], True if a query attends to a key; None for plain causal
            attention of all keys.
    """

    start: int
    end: int
    blocks: Tensor
    kv_len: int
    mask: Tensor | None


MAX_RUN = 4
"""Rows of a chunk that may be computed together."""


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Rows of q that attend on their own, in the order of the batch.

    Attributes:
        rows: [n] int64, in q.
        owners: [n] int64, the chunk of each.
        tables: [chunks, B] int64, contiguous; entries past a sequence's length are not read.
        seq_lens: [n] int64, keys of each row, its own included.
        runs: [runs + 1] int64, the first row of each run, and n. A run is up to MAX_RUN rows of a
            chunk, one after the other, that may share their reads of keys; one with a window.
        num_keys: of all rows.
        pointers: of rows, owners, tables, seq_lens and runs; numpy takes a microsecond for each.
    """

    rows: Ints
    owners: Ints
    tables: Ints
    seq_lens: Ints
    runs: Ints
    num_keys: int
    pointers: tuple[int, ...]


def _single_rows(rows: Ints, owners: Ints, tables: Ints, seq_lens: Ints, runs: Ints) -> SingleRows:
    """As the fields of `SingleRows`, whose last run ends with the rows."""
    parts = (rows, owners, tables, seq_lens, np.append(runs, len(rows)))
    rows, owners, tables, lens, runs = (np.ascontiguousarray(part, np.int64) for part in parts)
    pointers = tuple(part.ctypes.data for part in (rows, owners, tables, lens, runs))
    return SingleRows(rows, owners, tables, lens, runs, int(lens.sum()), pointers)


class AttentionPlan:
    """How `attend` splits a step's chunks into batched decode rows and single longer chunks.

    The same for all layers with the same window, so it is created once per step.

    Args:
        block_tables: [n, B]; entries past a sequence's length are not read.
        query_start: [n + 1]; chunk i has rows query_start[i]:query_start[i + 1] of q.
        seq_lens: [n]; keys of chunk i, its own rows included. Its last row attends to all of them,
            the row before to one less, and so on.
        block_size: tokens per block.
        dtype: of q.
        window: a row attends to the last `window` keys up to its own; 0 for all.

    Attributes:
        window: as given.
    """

    def __init__(
        self,
        block_tables: Ints,
        query_start: Ints,
        seq_lens: Ints,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
    ) -> None:
        self._step = (block_tables, query_start, seq_lens, block_size, dtype)
        self._windows = {window: self}
        self.window = window
        q_lens = np.diff(query_start)
        # Blocks that end before the window of a chunk's first row are skipped.
        first_visible = seq_lens - q_lens + 1 - window if window else np.zeros_like(seq_lens)
        first_block = np.maximum(first_visible, 0) // block_size
        skipped = first_block * block_size
        columns = np.arange(block_tables.shape[1]) + first_block[:, None]
        columns = np.minimum(columns, block_tables.shape[1] - 1)
        tables = np.take_along_axis(block_tables, columns, 1) if window else block_tables
        kv_lens = seq_lens - skipped
        num_blocks = -(-kv_lens // block_size)
        self._single = np.flatnonzero(q_lens == 1)
        self._reads = (tables, num_blocks, kv_lens)

    @functools.cached_property
    def pieces(self) -> list[ChunkPiece]:
        """The chunks of several tokens. Not every kernel needs their masks."""
        _, query_start, *_ = self._step
        tables, num_blocks, kv_lens = self._reads
        q_lens, window = np.diff(query_start), self.window
        found: list[ChunkPiece] = []
        for i in np.flatnonzero(q_lens > 1):
            q_len, kv_len = int(q_lens[i]), int(kv_lens[i])
            mask = None
            if q_len < kv_len or 0 < window < kv_len:
                mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril_(kv_len - q_len)
                if window:
                    mask = mask.triu_(kv_len - q_len + 1 - window)
            blocks = torch.from_numpy(tables[i, : num_blocks[i]])
            start = int(query_start[i])
            found.append(ChunkPiece(start, start + q_len, blocks, kv_len, mask))
        return found

    @functools.cached_property
    def single(self) -> SingleRows:
        """The chunks of one token."""
        tables, query_start, seq_lens, *_ = self._step
        starts, alone = query_start[self._single], np.arange(len(self._single))
        return _single_rows(starts, self._single, tables, seq_lens[self._single], alone)

    @functools.cached_property
    def every(self) -> SingleRows:
        """All rows."""
        tables, _, seq_lens, *_ = self._step
        return self._rows_of(np.arange(len(seq_lens)), tables, seq_lens)

    @functools.cached_property
    def gathered(self) -> tuple[Tensor, SingleRows]:
        """The blocks of all chunks of several tokens, at least one, and all rows of these, whose
        tables have numbers among these blocks."""
        _, query_start, *_ = self._step
        tables, num_blocks, kv_lens = self._reads
        chunks = np.flatnonzero(np.diff(query_start) > 1)
        counts = num_blocks[chunks]
        # A table's entries past a sequence's length are not read.
        places = (np.cumsum(counts) - counts)[:, None] + np.arange(counts.max())
        blocks = tables[chunks, : counts.max()][np.arange(counts.max()) < counts[:, None]]
        return torch.from_numpy(blocks), self._rows_of(chunks, places, kv_lens[chunks])

    def _rows_of(self, chunks: Ints, tables: Ints, seq_lens: Ints) -> SingleRows:
        """All rows of chunks that have these tables and keys."""
        _, query_start, *_ = self._step
        starts, q_lens = query_start[chunks], np.diff(query_start)[chunks]
        owners = np.repeat(np.arange(len(chunks)), q_lens)
        places = np.arange(len(owners)) - (np.cumsum(q_lens) - q_lens)[owners]
        keys = (seq_lens - q_lens)[owners] + places + 1
        runs = np.flatnonzero(places % (1 if self.window else MAX_RUN) == 0)
        return _single_rows(starts[owners] + places, owners, tables, keys, runs)

    @functools.cached_property
    def groups(self) -> list[DecodeGroup]:
        """The chunks of one token, those of similar length together."""
        _, query_start, seq_lens, _, dtype = self._step
        tables, num_blocks, kv_lens = self._reads
        window, single = self.window, self._single
        single = single[np.argsort(num_blocks[single], kind="stable")]
        groups: list[DecodeGroup] = []
        begin = 0
        while begin < len(single):
            # Padding to the longest wastes at most half of a group's gathers, or a few blocks.
            shortest = num_blocks[single[begin]]
            limit = max(2 * shortest, shortest + 8)
            end = begin + int(np.searchsorted(num_blocks[single[begin:]], limit, side="right"))
            members = np.sort(single[begin:end])
            everything = len(members) == len(seq_lens)
            groups.append(
                _decode_group(
                    None if everything else query_start[members],
                    tables[members],
                    num_blocks[members],
                    kv_lens[members],
                    np.maximum(kv_lens[members] - window, 0) if window else None,
                    dtype,
                )
            )
            begin = end
        return groups

    def within(self, window: int) -> AttentionPlan:
        """The plan of the same step for layers with this window; 0 for none."""
        found = self._windows.get(window)
        if found is None:
            found = self._windows[window] = AttentionPlan(*self._step, window)
        return found


def _decode_group(
    rows: Ints | None,
    tables: Ints,
    num_blocks: Ints,
    kv_lens: Ints,
    first_keys: Ints | None,
    dtype: torch.dtype,
) -> DecodeGroup:
    """A group whose rows attend to keys [first_keys, kv_lens) of the blocks in their tables."""
    width = int(num_blocks.max())
    kv_len = int(kv_lens.max())
    # A row's table is padded with its own first block, so that another sequence's values, which may
    # be NaN, are never read.
    inside = np.arange(width) < num_blocks[:, None]
    blocks = np.where(inside, tables[:, :width], tables[:, :1])
    hidden = np.arange(kv_len) >= kv_lens[:, None]
    if first_keys is not None:
        hidden |= np.arange(kv_len) < first_keys[:, None]
    mask = None
    if hidden.any():
        mask = torch.zeros(hidden.shape, dtype=dtype)
        mask = mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))[:, None, None, :]
    return DecodeGroup(
        None if rows is None else torch.from_numpy(rows),
        torch.from_numpy(blocks.reshape(-1)),
        kv_len,
        mask,
    )


def attend(
    q: Tensor,
    k_cache: KVMemory,
    v_cache: KVMemory,
    plan: AttentionPlan,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, H, D] over a layer's cache as planned -> [T, H * D], or as wide as
    the cache's values are.

    Scores become cap * tanh(score / cap) if there is a cap. Sinks [H] float32 are the scores of a
    further key of each head, whose value is 0 (arXiv:2309.17453).
    """
    if kv_quantization.holds_spread_keys(k_cache):
        q = kv_quantization.spread_queries(q)
    return attend_parts(
        q,
        plan,
        q.shape[1] * v_cache.shape[-1],
        lambda rows, group: _attend_decode(rows, k_cache, v_cache, group, scale, cap, sinks),
        lambda rows, piece: attend_chunk(rows, k_cache, v_cache, piece, scale, cap, sinks),
    )


def attend_parts(
    q: Tensor,
    plan: AttentionPlan,
    width: int,
    decode: Callable[[Tensor, DecodeGroup], Tensor],
    chunk: Callable[[Tensor, ChunkPiece], Tensor],
) -> Tensor:
    """Attention of q [T, H, D] -> [T, width] by functions of the rows of each part of a plan."""
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return decode(q, plan.groups[0])
    out = q.new_empty(len(q), width)
    for group in plan.groups:
        assert group.rows is not None
        out.index_copy_(0, group.rows, decode(q.index_select(0, group.rows), group))
    for piece in plan.pieces:
        out[piece.start : piece.end] = chunk(q[piece.start : piece.end], piece)
    return out


def attend_chunk(
    q: Tensor,
    k_cache: KVMemory,
    v_cache: KVMemory,
    piece: ChunkPiece,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` for the rows of one chunk."""
    k = gather(k_cache, piece.blocks, 1, piece.kv_len, q.dtype)
    v = gather(v_cache, piece.blocks, 1, piece.kv_len, q.dtype)
    rows = q.transpose(0, 1).unsqueeze(0)
    if cap or sinks is not None:
        rows_sinks = None if sinks is None else sinks[:, None, None]
        values = unfused_attention(rows, k, v, piece.mask, scale, cap, rows_sinks)
    else:
        values = F.scaled_dot_product_attention(
            rows,
            k,
            v,
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
            scale=scale,
            enable_gqa=True,
        )
    return values[0].transpose(0, 1).flatten(1)


def _attend_decode(
    q: Tensor,
    k_cache: KVMemory,
    v_cache: KVMemory,
    group: DecodeGroup,
    scale: float,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[-2]
    k = gather(k_cache, group.blocks, num_rows, group.kv_len, q.dtype)
    v = gather(v_cache, group.blocks, num_rows, group.kv_len, q.dtype)
    # The query heads of one KV head take the place of a longer chunk's queries.
    queries = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if cap or sinks is not None:
        visible = None if group.mask is None else group.mask == 0
        own_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
        values = unfused_attention(queries, k, v, visible, scale, cap, own_sinks, is_causal=False)
    else:
        values = F.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask, scale=scale)
    return values.reshape(num_rows, -1)


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    cap: float,
    sinks: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Attention with capped scores or sinks, for which torch has no fused one.

    Args:
        q: [n, H, T, D].
        k, v: [n, G, K, D].
        visible: [..., T, K], the keys that a query attends to; None for all of them, or with
            is_causal for those up to its own.
        scale, cap: of the scores; no cap if it is 0.
        sinks: scores of a further key whose value is 0, broadcast to [n, H, T, 1].
        is_causal: see visible.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (kv.repeat_interleave(q.shape[1] // kv.shape[1], 1) for kv in (k, v))
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if cap:
        scores = soft_cap(scores, cap)
    if visible is None and is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril_()
    if visible is not None:
        scores = scores.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


def gather(
    cache: KVMemory, blocks: Tensor, num_rows: int, kv_len: int, dtype: torch.dtype
) -> Tensor:
    """Gather the blocks of num_rows sequences -> [num_rows, G, kv_len, D]; from 8 bits in dtype."""
    if isinstance(cache, QuantizedKV):
        pages = kv_quantization.read_blocks(cache, blocks, dtype)
    else:
        pages = cache.index_select(0, blocks)
    pages = pages.view(num_rows, -1, cache.shape[-2], cache.shape[-1])
    return pages[:, :kv_len].transpose(1, 2)


def paged_attention(
    q: Tensor,
    k_cache: KVMemory,
    v_cache: KVMemory,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of any mix of decode rows and prefill chunks over a paged cache.

    Args:
        q: [T, H, D].
        k_cache, v_cache: [num_blocks, block_size, G, D], floats or 8 bits; already with the chunks'
            own keys.
        block_tables: [n, B] int64.
        query_start: [n + 1] int64; chunk i has rows query_start[i]:query_start[i + 1].
        seq_lens: [n] int64, keys of chunk i, its own rows included.
        scale: of the scores, before softmax.
        window: a row attends to the last `window` keys up to its own; 0 for all.

    Returns:
        [T, H * D].
    """
    plan = AttentionPlan(
        block_tables.numpy(),
        query_start.numpy(),
        seq_lens.numpy(),
        k_cache.shape[1],
        q.dtype,
        window,
    )
    return attend(q, k_cache, v_cache, plan, scale)
