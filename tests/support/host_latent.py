"""The kernels of latent attention as their torch definitions; see `host_kernels`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from inflight.models import decoder_cuda
from inflight.models.layers import latent as layer
from inflight_kernels.ops.latent import attention, products, rows
from inflight_kernels.torch_ops import latent as definition


class HostNorm(NamedTuple):
    """In the place of `LatentNorm`, of a rank that the kernels do not support."""

    weight: Tensor
    eps: float


class HostParams(NamedTuple):
    """In the place of `LatentParams`."""

    num_heads: int
    scale: float
    batch_invariant: bool


class HostMetadata:
    """In the place of `LatentMetadata`, of operands on the CPU."""

    def __init__(
        self,
        spec: HostParams,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        num_tokens: int,
        *settings: object,
        planned: bool,
    ) -> None:
        self.spec, self.num_tokens = spec, num_tokens
        self.query_start, self.seq_lens = query_start, seq_lens
        self.block_tables = block_tables


def install(monkeypatch: pytest.MonkeyPatch, rope_inputs: type, norm_columns: Any) -> None:
    """Put the definitions in the kernels' places.

    Args:
        rope_inputs: in the place of `RopeInputs`.
        norm_columns: in the place of that kernel.
    """
    monkeypatch.setattr(attention, "LatentParams", HostParams)
    monkeypatch.setattr(attention, "LatentMetadata", HostMetadata)
    monkeypatch.setattr(attention, "workspace_size", lambda *shape, batch_invariant: 16)
    monkeypatch.setattr(attention, "plan", lambda metadata, history_ready, pdl: None)
    monkeypatch.setattr(attention, "attend", attend)
    for op in (prepare, project_values):
        monkeypatch.setattr(products, op.__name__, op)
    monkeypatch.setattr(rows, "write_latent", write_latent)
    monkeypatch.setattr(layer, "RopeInputs", rope_inputs)
    monkeypatch.setattr(layer, "Projections", HostProjections)
    monkeypatch.setattr(layer, "norm_columns", norm_columns)
    monkeypatch.setattr(decoder_cuda, "LatentNorm", HostNorm)


class HostProjections(NamedTuple):
    """In the place of `Projections`."""

    q: Tensor
    kv_a: Tensor


def write_latent(
    projections: HostProjections,
    norm: HostNorm,
    rope: Any,
    cache: Tensor,
    *,
    queries: Tensor,
    history_ready: bool,
    pdl: bool = True,
) -> None:
    """The other columns of queries become NaN, as `prepare` writes all of them."""
    (cos, sin), kv_a, slots = rope.rows, projections.kv_a, rope.slot_mapping
    rope_dim = cos.shape[-1]
    q = definition.rotate_queries(projections.q, cos, sin)
    queries[..., : -cos.shape[-1]] = torch.nan
    queries[..., -rope_dim:] = q[..., -rope_dim:]
    if rope.kept is not None:
        kv_a, cos, sin, slots = (
            each.index_select(0, rope.kept) for each in (kv_a, cos, sin, slots)
        )
    definition.write_latent(kv_a, norm.weight, norm.eps, cos, sin, cache, slots)


def prepare(
    projections: HostProjections,
    k_up: Tensor,
    norm: HostNorm,
    rope: Any,
    cache: Tensor,
    *,
    queries: Tensor,
    batch_invariant: bool = False,
    history_ready: bool = False,
) -> None:
    write_latent(projections, norm, rope, cache, queries=queries, history_ready=history_ready)
    q = definition.rotate_queries(projections.q, *rope.rows)
    queries.copy_(definition.absorb(q, k_up))


def attend(
    q: Tensor,
    cache: Tensor,
    metadata: HostMetadata,
    out: Tensor,
    *,
    history_ready: bool,
    pdl: bool,
) -> None:
    out.fill_(torch.nan)  # rows of no chunk stay as they were: whatever that is
    found = definition.paged_attention(
        q,
        cache,
        metadata.block_tables,
        metadata.query_start,
        metadata.seq_lens,
        metadata.spec.scale,
        out.shape[-1],
    )
    last = int(metadata.query_start[-1])
    out[:last] = found[:last]


def project_values(
    attended: Tensor, v_up: Tensor, *, out: Tensor, batch_invariant: bool, pdl: bool
) -> None:
    out.copy_(definition.project_values(attended.flatten(1), v_up).view(out.shape))
