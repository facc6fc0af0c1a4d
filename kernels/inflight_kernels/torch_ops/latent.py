"""Multi-head latent attention (MLA, arXiv:2405.04434) in torch, in absorbed form: every head
attends to one key per token, and its value is the latent part of that key.

Shapes: T tokens in the step, H query heads of n columns without position and r rotated ones, heads
of v columns after attention, a latent rank of c. A key has c + r values, and a layer's cache is
[num_blocks, block_size, 1, c + r]; slot s is block s // block_size, offset s % block_size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.torch_ops import transformer


def absorb(q_nope: Tensor, k_up: Tensor) -> Tensor:
    """Queries for latents: q_nope [T, H, n] by head times k_up [H, n, c] -> [T, H, c].

    A key without position is k_up^T times the latent, so that its product with q_nope is that of
    the latent with this.
    """
    return torch.einsum("thn,hnc->thc", q_nope, k_up)


def project_values(attended: Tensor, v_up: Tensor) -> Tensor:
    """Sums of latents to those of values: attended [T, H, c] by head times v_up [H, v, c]^T ->
    [T, H, v]."""
    return torch.einsum("thc,hvc->thv", attended, v_up)


def write_latent(
    kv_a: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Norm the latents of kv_a [T, c + r], rotate the rest, and write both into slots [T].

    Args:
        kv_a: a latent, then a key part to rotate, of each token.
        norm_weight, eps: [c] float32, of the RMSNorm of latents.
        cos, sin: [T, r], the rows of `transformer.rotary_tables` at each token's position.
        cache: of a layer, in place.
        slot_mapping: [T] int64; tokens with a negative one are not written.
    """
    rank = len(norm_weight)
    latent, _ = transformer.rms_norm(kv_a[:, :rank], norm_weight, eps)
    rotated = transformer.rotary(kv_a[:, None, rank:], cos, sin)[:, 0]
    keys = torch.cat((latent, rotated.to(latent.dtype)), 1)
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    cache.view(-1, cache.shape[-1])[slot_mapping[kept]] = keys[kept]


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
        q: [T, H, c + r].
        cache: [num_blocks, block_size, 1, c + r], already with the chunks' own keys.
        block_tables: [n, B].
        query_start: [n + 1]; chunk i has rows query_start[i]:query_start[i + 1].
        seq_lens: [n], keys of chunk i, its own rows included.
        scale: of the scores, before softmax.
        rank: c.

    Returns:
        [T, H, c]; zeros for a row without keys, and for rows of no chunk.
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
