"""Multi-head latent attention (MLA, arXiv:2405.04434) in torch.

Keys and values of all heads are products of one vector per token, its latent. It is cached instead
of them, with the part of the key that RoPE rotates, which all heads share.

Shapes: T tokens, H heads, R columns of a latent; a head's query and key have N columns without RoPE
and then P with it, its value has V. A layer's cache is one KV head of keys [R + P]: the latent,
normed, and the shared part of the key, rotated. The first R columns are the value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.torch_ops.kv_quantization import KVMemory
from inflight_kernels.torch_ops.transformer import (
    AttentionPlan,
    ChunkPiece,
    DecodeGroup,
    attend_parts,
    gather,
    rms_norm,
    rotary,
    write_rows,
)


def rotate_queries(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last P columns of q [T, H, N + P], with the rows [T, P] of `rotary_tables`."""
    start = q.shape[-1] - cos.shape[-1]
    return torch.cat((q[..., :start], rotary(q[..., start:], cos, sin)), -1)


def write_latent(
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: KVMemory,
    slot_mapping: Tensor,
) -> None:
    """Write the keys of T tokens into slots [T] of a layer's cache, in place.

    Args:
        kv: [T, R + P]: the latent before its norm, and the shared part of the key before RoPE.
        weight: [R] float32, of the latent's RMSNorm.
        eps: of this norm.
        cos, sin: [T, P], the rows of `rotary_tables` at each token's position.
        cache: of keys.
        slot_mapping: the slots.
    """
    rank = len(weight)
    latent, _ = rms_norm(kv[:, :rank], weight, eps)
    rope = rotary(kv[:, None, rank:], cos, sin)
    write_rows(torch.cat((latent.unsqueeze(1), rope), -1), cache, slot_mapping)


def absorb(q: Tensor, k_up: Tensor) -> Tensor:
    """Queries that score the cached keys as q scores the keys of each head.

    Args:
        q: [T, H, N + P], rotated.
        k_up: [H, N, R], which makes keys of latents.

    Returns:
        [T, H, R + P].
    """
    nope_dim = k_up.shape[1]
    latent = _product("thn,hnr->thr", q[..., :nope_dim], k_up)
    return torch.cat((latent, q[..., nope_dim:]), -1)


def project_values(attended: Tensor, v_up: Tensor) -> Tensor:
    """What attention to values of each head would have returned.

    Args:
        attended: [T, H * R], weighted sums of latents.
        v_up: [H, V, R], which makes values of latents.

    Returns:
        [T, H * V].
    """
    num_heads, _, rank = v_up.shape
    heads = attended.view(-1, num_heads, rank)
    return _product("thr,hvr->thv", heads, v_up).flatten(1)


def _product(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """In float32 or wider, rounded to the type of x: where CPUs have no instructions for 16 bits,
    torch takes several times as long for products of these."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum(equation, x.to(wide), weight.to(wide)).to(x.dtype)


def attend(
    q: Tensor, k_up: Tensor, v_up: Tensor, cache: KVMemory, plan: AttentionPlan, scale: float
) -> Tensor:
    """Causal attention over a layer's cache as planned.

    Decode rows and short chunks attend to the cached keys; for long chunks it takes fewer products
    to make the keys and values of all heads.

    Args:
        q: [T, H, N + P], rotated.
        k_up: [H, N, R].
        v_up: [H, V, R].
        cache: of keys.
        plan: of the step.
        scale: of the scores, before softmax.

    Returns:
        [T, H * V].
    """

    def decode(rows: Tensor, group: DecodeGroup) -> Tensor:
        keys = gather(cache, group.blocks, len(rows), group.kv_len, q.dtype)
        return _attend_absorbed(rows.unsqueeze(1), k_up, v_up, keys, group.mask, scale)

    def chunk(rows: Tensor, piece: ChunkPiece) -> Tensor:
        keys = gather(cache, piece.blocks, 1, piece.kv_len, q.dtype)
        if expands(len(rows), piece.kv_len, k_up, v_up):
            return _attend_expanded(rows, k_up, v_up, keys[0, 0], piece.mask, scale)
        mask = piece.mask
        if mask is None:
            mask = torch.ones(len(rows), len(rows), dtype=torch.bool).tril_()
        return _attend_absorbed(rows.unsqueeze(0), k_up, v_up, keys, mask[None, None], scale)

    return attend_parts(q, plan, v_up.shape[0] * v_up.shape[1], decode, chunk)


def expands(num_rows: int, num_keys: int, k_up: Tensor, v_up: Tensor) -> bool:
    """Whether a chunk takes fewer products if keys and values of all heads are made, of which
    scores and sums have fewer columns, than if queries are absorbed and values are projected."""
    (_, nope_dim, rank), v_dim = k_up.shape, v_up.shape[1]
    made = rank * (nope_dim + v_dim)  # for each key, or for each row
    saved = 2 * rank - nope_dim - v_dim  # for each pair of a row and a key
    return made * num_keys < made * num_rows + saved * num_rows * num_keys


def _attend_absorbed(
    q: Tensor, k_up: Tensor, v_up: Tensor, keys: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of n chunks q [n, t, H, N + P] to their cached keys [n, 1, K, R + P], with a mask
    [n, 1, t, K] if they do not attend to all -> [n * t, H * V]."""
    num_chunks, length, num_heads, _ = q.shape
    absorbed = absorb(q.flatten(0, 1), k_up)
    # All heads have the same keys, and so take the place of further rows.
    queries = absorbed.view(num_chunks, 1, length * num_heads, -1)
    if mask is not None and length > 1:
        mask = mask.repeat_interleave(num_heads, 2)
    values = keys[..., : k_up.shape[2]]
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return project_values(attended.reshape(num_chunks * length, -1), v_up)


def _attend_expanded(
    q: Tensor, k_up: Tensor, v_up: Tensor, keys: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of a chunk q [t, H, N + P] to cached keys [K, R + P], of which keys and values of
    all heads are made, with a mask [t, K] or else causal -> [t, H * V]."""
    rank, v_dim = k_up.shape[2], v_up.shape[1]
    latents, rope = keys[:, :rank], keys[:, rank:]
    k = _product("kr,hnr->hkn", latents, k_up)
    k = torch.cat((k, rope.expand(len(k), -1, -1)), -1)
    v = _product("kr,hvr->hkv", latents, v_up)
    # torch has a fused attention on CPUs for values as wide as keys.
    v = F.pad(v, (0, max(0, k.shape[-1] - v_dim)))
    values = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return values[0, ..., :v_dim].transpose(0, 1).flatten(1)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    rank: int,
) -> Tensor:
    """Causal attention of any mix of decode rows and prefill chunks over a latent cache.

    Args:
        q: [T, H, R + P], absorbed.
        cache: [num_blocks, block_size, 1, R + P], already with the chunks' own keys.
        block_tables: [n, B].
        query_start: [n + 1]; chunk i has rows query_start[i]:query_start[i + 1].
        seq_lens: [n], keys of chunk i, its own rows included.
        scale: of the scores, before softmax.
        rank: R.

    Returns:
        [T, H, R]; zeros for a row without keys, and for rows of no chunk.
    """
    out = q.new_zeros(*q.shape[:2], rank)
    block_size = cache.shape[1]
    starts = query_start.tolist()
    for i, kv_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        q_len = rows.stop - rows.start
        if not q_len or not kv_len:
            continue
        blocks = block_tables[i, : -(-kv_len // block_size)].long()
        keys = cache[blocks].flatten(0, 2)[:kv_len]
        scores = torch.einsum("qhk,sk->hqs", q[rows], keys) * scale
        last = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
        hidden = torch.arange(kv_len, device=q.device) > last
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num()
        out[rows] = torch.einsum("hqs,sc->qhc", weights, keys[:, :rank])
    return out
