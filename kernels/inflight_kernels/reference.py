"""Every op in torch on the CPU: the definition of what is right, and the path of `device: cpu`.

Shapes are written with T tokens in the step, H query heads, G KV heads (H is a multiple of G),
D head_dim, V vocabulary, n rows. A KV cache of one layer is [num_blocks, block_size, G, D]; slot s
is block s // block_size, offset s % block_size. Nothing here knows a sequence or a request.

The sampling half works on logits [n, V] in float32, and in place where it says so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# ---------------------------------------------------------------- linear layers and norms

# oneDNN lays weights out for the number of rows named when packing. The layout for 16 is within a
# few percent of the best one for any number of rows, and faster than the layout for 1 even there.
_PACKED_FOR_ROWS = 16


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear exists here and is right for this type."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.linspace(-1, 1, 48 * 32).view(48, 32).to(dtype)
    x = torch.linspace(-1, 2, 3 * 32).view(3, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        got = linear(x, packed)
    except (RuntimeError, AttributeError):  # a build or a CPU without this op
        return False
    return bool(torch.allclose(got.float(), F.linear(x, weight).float(), rtol=0.02, atol=0.02))


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in the layout that `linear` multiplies fastest; opaque otherwise.

    Where the CPU or the build of torch has no such layout, the weight itself.
    """
    if not _can_pack(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] @ weight.T + bias -> [n, out]; weight is [out, in], packed or plain."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
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
        weight: [hidden].
        eps: added to the mean of squares.
        residual: [n, hidden]; None for zero.

    Returns:
        (normed, sum), each [n, hidden].
    """
    total = x if residual is None else x + residual
    return F.rms_norm(total, (total.shape[-1],), weight, eps), total


def silu_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate (arXiv:2002.05202): x [n, 2 * width] = gate | up -> silu(gate) * up."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


# ---------------------------------------------------------------- rotary embedding


def rotary_tables(
    inverse_frequencies: npt.NDArray[np.float32],
    num_positions: int,
    attention_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Tables of `rotary`, both [num_positions, D] for D/2 inverse frequencies.

    The angle of column i and of column i + D/2 is position * inverse_frequencies[i]. The first half
    of the sine table is negated: the minus of the rotation lives there.
    """
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32, device=device),
        torch.from_numpy(inverse_frequencies).to(device),
    )
    cos = angles.cos() * attention_factor
    sin = angles.sin() * attention_factor
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


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put k and v [T, G, D] into the slots [T] of one layer's cache, in place."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k)
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v)


def copy_blocks(caches: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks [n] to blocks [n] in caches [..., num_blocks, block_size, G, D], in place.

    All sources are read before any target is written.
    """
    caches.index_copy_(-4, targets, caches.index_select(-4, sources))


def clear_slots(caches: Tensor, slots: Tensor) -> None:
    """Zero slots [n] in caches [..., num_blocks, block_size, G, D], in place.

    Attention gives a slot past a row's length the weight 0, but 0 * NaN is NaN: what an earlier,
    broken sequence left in a reused block must not reach the next one.
    """
    caches.flatten(-4, -3).index_fill_(-3, slots, 0.0)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each, of similar length.

    Attributes:
        rows: [n] their rows in q; None for all rows in order.
        blocks: [n * B] their block tables, padded with blocks of their own.
        kv_len: keys to look at: the longest of them.
        mask: [n, 1, 1, kv_len] added to the scores; None when all have kv_len keys.
    """

    rows: Tensor | None
    blocks: Tensor
    kv_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _ChunkPiece:
    """Several queries of one sequence: rows [start, end) of q.

    Attributes:
        mask: [end - start, kv_len] True where a query sees a key; None when the queries are all
            the keys, in order.
    """

    start: int
    end: int
    blocks: Tensor
    kv_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How `attend` splits a step. The same for each layer, so it is made once per step."""

    groups: list[_DecodeGroup]
    pieces: list[_ChunkPiece]


def plan_attention(
    block_tables: Ints,
    query_start: Ints,
    seq_lens: Ints,
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionPlan:
    """Sort a step's chunks into batched decode rows and single longer chunks.

    Args:
        block_tables: [n, B]; entries past a sequence's length are not read.
        query_start: [n + 1]; chunk i owns rows query_start[i]:query_start[i + 1] of q.
        seq_lens: [n]; keys of chunk i, its own rows included. Its last row sees all of them, the
            row before one less, and so on.
        block_size: tokens per block.
        dtype: of q.
    """
    q_lens = np.diff(query_start)
    num_blocks = -(-seq_lens // block_size)
    single = np.flatnonzero(q_lens == 1)
    single = single[np.argsort(num_blocks[single], kind="stable")]
    groups = []
    begin = 0
    while begin < len(single):
        # Padding to the longest wastes at most half of what a group gathers, or a few blocks.
        shortest = num_blocks[single[begin]]
        limit = max(2 * shortest, shortest + 8)
        end = begin + int(np.searchsorted(num_blocks[single[begin:]], limit, side="right"))
        members = np.sort(single[begin:end])
        everything = len(members) == len(seq_lens)
        groups.append(
            _decode_group(
                None if everything else query_start[members],
                block_tables[members],
                num_blocks[members],
                seq_lens[members],
                dtype,
            )
        )
        begin = end
    pieces = []
    for i in np.flatnonzero(q_lens > 1):
        q_len, kv_len = int(q_lens[i]), int(seq_lens[i])
        mask = None
        if q_len < kv_len:
            mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril_(kv_len - q_len)
        blocks = torch.from_numpy(block_tables[i, : num_blocks[i]])
        start = int(query_start[i])
        pieces.append(_ChunkPiece(start, start + q_len, blocks, kv_len, mask))
    return AttentionPlan(groups, pieces)


def _decode_group(
    rows: Ints | None, tables: Ints, num_blocks: Ints, seq_lens: Ints, dtype: torch.dtype
) -> _DecodeGroup:
    width = int(num_blocks.max())
    kv_len = int(seq_lens.max())
    # A row pads its table with its own first block, so that no other sequence's values, which may
    # be NaN, come near it.
    inside = np.arange(width) < num_blocks[:, None]
    blocks = np.where(inside, tables[:, :width], tables[:, :1])
    mask = None
    if (seq_lens != kv_len).any():
        outside = torch.from_numpy(np.arange(kv_len) >= seq_lens[:, None])
        mask = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, float("-inf"))
        mask = mask[:, None, None, :]
    return _DecodeGroup(
        None if rows is None else torch.from_numpy(rows),
        torch.from_numpy(blocks.reshape(-1)),
        kv_len,
        mask,
    )


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """Causal attention of q [T, H, D] over a layer's cache as planned -> [T, H * D]."""
    num_tokens, num_heads, head_dim = q.shape
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend_decode(q, k_cache, v_cache, plan.groups[0], scale)
    out = q.new_empty(num_tokens, num_heads * head_dim)
    for group in plan.groups:
        assert group.rows is not None
        values = _attend_decode(q.index_select(0, group.rows), k_cache, v_cache, group, scale)
        out.index_copy_(0, group.rows, values)
    for piece in plan.pieces:
        k = _gather(k_cache, piece.blocks, 1, piece.kv_len)
        v = _gather(v_cache, piece.blocks, 1, piece.kv_len)
        values = F.scaled_dot_product_attention(
            q[piece.start : piece.end].transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=piece.mask,
            is_causal=piece.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[piece.start : piece.end] = values[0].transpose(0, 1).flatten(1)
    return out


def _attend_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _DecodeGroup, scale: float
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[-2]
    k = _gather(k_cache, group.blocks, num_rows, group.kv_len)
    v = _gather(v_cache, group.blocks, num_rows, group.kv_len)
    # The query heads of one KV head stand where a longer chunk's queries would.
    values = F.scaled_dot_product_attention(
        q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim),
        k,
        v,
        attn_mask=group.mask,
        scale=scale,
    )
    return values.reshape(num_rows, num_heads * head_dim)


def _gather(cache: Tensor, blocks: Tensor, num_rows: int, kv_len: int) -> Tensor:
    """Pages of num_rows sequences -> [num_rows, G, kv_len, D]."""
    pages = cache.index_select(0, blocks)
    pages = pages.view(num_rows, -1, cache.shape[-2], cache.shape[-1])
    return pages[:, :kv_len].transpose(1, 2)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention of any mix of decode rows and prefill chunks over a paged cache.

    Args:
        q: [T, H, D].
        k_cache, v_cache: [num_blocks, block_size, G, D]; the chunks' own keys are in it already.
        block_tables: [n, B] int64.
        query_start: [n + 1] int64, chunk i owns rows query_start[i]:query_start[i + 1].
        seq_lens: [n] int64, keys of chunk i, its own rows included.
        scale: of the scores, before softmax.

    Returns:
        [T, H * D].
    """
    plan = plan_attention(
        block_tables.numpy(), query_start.numpy(), seq_lens.numpy(), k_cache.shape[1], q.dtype
    )
    return attend(q, k_cache, v_cache, plan, scale)


# ---------------------------------------------------------------- sampling: shaping the logits


def finite_rows(logits: Tensor) -> Tensor:
    """[n] bool: rows of logits [n, V] without NaN and infinity."""
    # One sum finds either at a fraction of the cost of a look at each; a sum that overflows by
    # itself is looked at again.
    finite = torch.isfinite(logits.sum(-1))
    if not bool(finite.all()):
        finite = torch.isfinite(logits).all(-1)
    return finite


def log_probs(logits: Tensor) -> Tensor:
    """log softmax over the vocabulary: [n, V] -> [n, V]."""
    return torch.log_softmax(logits, -1)


def apply_penalties(
    row: Tensor,
    seen_ids: Ints,
    output_ids: Ints,
    output_counts: Ints,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    """Make tokens that were there before less likely, in place.

    Args:
        row: [V] logits.
        seen_ids: distinct tokens of prompt and output.
        output_ids, output_counts: distinct tokens of the output and how often each stands there.
        repetition: divides positive and multiplies negative logits of seen tokens
            (arXiv:1909.05858).
        presence: subtracted once from each token of the output.
        frequency: subtracted for each occurrence in the output.
    """
    if repetition != 1.0 and len(seen_ids):
        ids = torch.from_numpy(seen_ids)
        logits = row[ids]
        row[ids] = torch.where(logits > 0, logits / repetition, logits * repetition)
    if (presence or frequency) and len(output_ids):
        penalty = presence + frequency * torch.from_numpy(output_counts)
        row[torch.from_numpy(output_ids)] -= penalty.to(row.dtype)


def ban_tokens(row: Tensor, token_ids: list[int]) -> None:
    """Take tokens out of the choice: their logits in row [V] become -inf, in place."""
    row[torch.tensor(token_ids)] = float("-inf")


# ---------------------------------------------------------------- sampling: the draw

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words of a counter and a key (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low = c0 * _PHILOX_MULTIPLIERS[0]
        high = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _WORD, (low >> 32) ^ c3 ^ k1, low & _WORD
        k0 = (k0 + _PHILOX_WEYL[0]) & _WORD
        k1 = (k1 + _PHILOX_WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The one random number in [0, 1) of a seed (64 bit) at a token position.

    It depends on nothing else, so a sequence draws the same in any batch and after a restart.
    52 bits: u * total is then always below total, whatever the rounding.
    """
    words = philox((position & _WORD, position >> 32, 0, 0), (seed & _WORD, seed >> 32))
    return float(((words[0] << 32 | words[1]) >> 12) * 2.0**-52)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row: [n, V] -> [n]."""
    return logits.argmax(-1)


# Most nuclei and nearly all top_k lie within this many likeliest tokens; finding those costs a
# fraction of a sort.
_PREFIX = 256


def draw(
    logits: Tensor,
    temperature: Floats,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
    uniforms: Floats,
) -> Tensor:
    """Draw one token per row: temperature, top_k, top_p, min_p, then the inverse of the CDF.

    Rows do not influence each other. The CDF runs over the likeliest tokens first where top_k or
    top_p cut, over the vocabulary in order elsewhere.

    Args:
        logits: [n, V]; -inf is never drawn; each row has at least one finite logit.
        temperature: [n], > 0.
        top_k: [n]; keep the k likeliest; 0 or less keeps all.
        top_p: [n], in (0, 1]; keep the fewest likeliest tokens that have this probability together,
            among what top_k kept.
        min_p: [n], in [0, 1); keep tokens at least this likely, relative to the likeliest
            (arXiv:2407.01082).
        uniforms: [n], in [0, 1).

    Returns:
        [n] int64.
    """
    n, vocab_size = logits.shape
    divisor = torch.from_numpy(temperature).to(logits.dtype).unsqueeze(1)
    scores = (logits - logits.amax(-1, keepdim=True)) / divisor  # the likeliest is 0
    weights = scores.exp()
    keep_k = np.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    cuts = (keep_k < vocab_size) | (top_p < 1.0)
    chosen = torch.empty(n, dtype=torch.int64)
    whole = np.flatnonzero(~cuts)
    if len(whole):
        rows = torch.from_numpy(whole)
        kept = weights.index_select(0, rows)
        if min_p[whole].any():
            kept = kept * (kept >= torch.from_numpy(min_p[whole]).unsqueeze(1))
        chosen[rows] = _invert_cdf(kept, uniforms[whole])
    cut = np.flatnonzero(cuts)
    if len(cut):
        rows = torch.from_numpy(cut)
        some = weights.index_select(0, rows)
        top, ids = some.topk(min(_PREFIX, vocab_size), -1)
        ranks = torch.arange(top.shape[1])
        masses = top.double()
        total = torch.where(
            torch.from_numpy(keep_k[cut]) < vocab_size,
            (masses * (ranks < torch.from_numpy(keep_k[cut]).unsqueeze(1))).sum(-1),
            some.sum(-1, dtype=torch.float64),
        )
        # top_k is covered by a long enough prefix, top_p by a heavy enough one.
        wanted = torch.from_numpy(top_p[cut]) * total
        covered = np.where(
            keep_k[cut] < vocab_size,
            keep_k[cut] <= top.shape[1],
            (masses.sum(-1) >= wanted).numpy(),
        )
        inside = np.flatnonzero(covered)
        if len(inside):
            part = torch.from_numpy(inside)
            where = cut[inside]
            kept = _keep(top[part], total[part], keep_k[where], top_p[where], min_p[where])
            picks = _invert_cdf(kept, uniforms[where])
            chosen[rows[part]] = ids[part].gather(1, picks.unsqueeze(1)).squeeze(1)
        for i in np.flatnonzero(~covered):
            row = slice(cut[i], cut[i] + 1)
            chosen[row] = _draw_wide(some[i], keep_k[row], top_p[row], min_p[row], uniforms[row])
    return chosen


def _keep(top: Tensor, total: Tensor, keep_k: Ints, top_p: Floats, min_p: Floats) -> Tensor:
    """Zero what the filters cut from weights [n, m], sorted, of mass total [n] after top_k."""
    masses = top.double()
    before = masses.cumsum(-1) - masses
    kept = torch.arange(top.shape[1]) < torch.from_numpy(keep_k).unsqueeze(1)
    bounded = torch.from_numpy(top_p).unsqueeze(1)
    kept &= (before < bounded * total.unsqueeze(1)) | (bounded >= 1.0)
    kept &= masses >= torch.from_numpy(min_p).unsqueeze(1)
    return masses * kept


def _draw_wide(
    weights: Tensor, keep_k: Ints, top_p: Floats, min_p: Floats, uniforms: Floats
) -> Tensor:
    """One row [V] whose filters keep more than the prefix."""
    k = int(keep_k[0])
    if k < len(weights):
        top, ids = weights.topk(k)
        total = top.sum(dtype=torch.float64).unsqueeze(0)
        kept = _keep(top.unsqueeze(0), total, keep_k, top_p, min_p)
        return ids[_invert_cdf(kept, uniforms)]
    kept = weights * (_nucleus(weights, float(top_p[0])) & (weights >= float(min_p[0])))
    return _invert_cdf(kept.unsqueeze(0), uniforms)


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """[V] bool: the fewest largest of weights [V] that have top_p of the mass together.

    Bits of floats that are not negative sort as integers do, so their upper half is a histogram's
    bin. All bins above the one in which the mass is reached are in, and only that one is sorted.
    """
    values = weights.numpy()
    bins = values.view(np.int32) >> 16
    masses = np.bincount(bins, weights=values)[::-1]
    reached = masses.cumsum()
    wanted = top_p * reached[-1]
    rank = int(np.searchsorted(reached, wanted))
    boundary = len(masses) - 1 - rank
    inside = bins > boundary
    members = np.flatnonzero(bins == boundary)
    members = members[np.argsort(-values[members], kind="stable")]
    sizes = values[members].astype(np.float64)
    before = reached[rank] - masses[rank] + sizes.cumsum() - sizes
    inside[members[before < wanted]] = True
    return torch.from_numpy(inside)


def _invert_cdf(weights: Tensor, uniforms: Floats) -> Tensor:
    """First index of each row [n, m] at which the running sum exceeds uniform * total."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(uniforms).unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True).squeeze(1)
