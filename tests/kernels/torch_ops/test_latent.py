"""The definitions of latent attention against attention of expanded keys and values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight_kernels.torch_ops import latent, transformer

HEADS, NOPE, ROTATED, RANK, VALUE = 3, 8, 4, 16, 10


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_absorbed_attention_is_that_of_expanded_keys_and_values() -> None:
    k_up, v_up = _normal(HEADS, NOPE, RANK), _normal(HEADS, VALUE, RANK)
    q_nope, q_rotated = _normal(5, HEADS, NOPE), _normal(5, HEADS, ROTATED)
    num_blocks, block_size = 7, 4
    cache = _normal(num_blocks, block_size, 1, RANK + ROTATED)
    tables = torch.randperm(num_blocks)[:6].view(2, 3)
    query_start, seq_lens = torch.tensor([0, 2, 5]), torch.tensor([7, 12])
    scale = 0.3

    queries = torch.cat((latent.absorb(q_nope, k_up), q_rotated), -1)
    attended = latent.paged_attention(queries, cache, tables, query_start, seq_lens, scale, RANK)
    got = latent.project_values(attended, v_up)

    latents, rotated = cache.split((RANK, ROTATED), -1)
    keys = torch.einsum("hnc,bsgc->bshn", k_up, latents)
    keys = torch.cat((keys, rotated.expand(-1, -1, HEADS, -1)), -1)
    values = torch.einsum("hvc,bsgc->bshv", v_up, latents)
    for i in range(2):
        rows = slice(int(query_start[i]), int(query_start[i + 1]))
        length, q_len = int(seq_lens[i]), rows.stop - rows.start
        k, v = (kv[tables[i]].flatten(0, 1)[:length].transpose(0, 1) for kv in (keys, values))
        q = torch.cat((q_nope, q_rotated), -1)[rows].transpose(0, 1)
        visible = torch.ones(q_len, length, dtype=torch.bool).tril(length - q_len)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scale
        )
        torch.testing.assert_close(got[rows], wanted.transpose(0, 1))


def test_a_row_without_keys_and_a_row_of_no_chunk_get_zeros() -> None:
    cache = _normal(2, 4, 1, RANK + ROTATED)
    out = latent.paged_attention(
        _normal(4, HEADS, RANK + ROTATED),
        cache,
        torch.tensor([[0], [1]]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 1]),
        1.0,
        RANK,
    )
    assert (out[[0, 1, 3]] == 0).all()
    torch.testing.assert_close(out[2], cache[1, 0, :, :RANK].expand(HEADS, -1))


def test_latents_are_normed_and_the_rest_of_a_key_rotated() -> None:
    kv_a, weight, eps = _normal(3, RANK + ROTATED), _normal(RANK), 1e-3
    cos, sin = transformer.rotary_tables(np.ones(ROTATED // 2, np.float32), 10, dtype=torch.float64)
    cache = torch.full((2, 4, 1, RANK + ROTATED), torch.nan, dtype=torch.float64)
    positions, slots = torch.tensor([1, 9, 0]), torch.tensor([5, -1, 2])
    latent.write_latent(kv_a, weight, eps, cos[positions], sin[positions], cache, slots)
    rows = cache.view(8, -1)
    assert rows.isnan().all(-1).tolist() == [slot not in (5, 2) for slot in range(8)]
    for slot, token in ((5, 0), (2, 2)):
        x, pair = kv_a[token, :RANK], kv_a[token, RANK:].view(2, -1)
        normed = x / (x.square().mean() + eps).sqrt() * weight
        torch.testing.assert_close(rows[slot, :RANK], normed)
        turned = torch.complex(pair[0], pair[1]) * torch.exp(1j * positions[token].double())
        wanted = torch.cat((turned.real, turned.imag))
        torch.testing.assert_close(rows[slot, RANK:], wanted, rtol=1e-6, atol=1e-6)
