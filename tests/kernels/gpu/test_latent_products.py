"""Norm, RoPE, cache write and products of latent attention against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_replay import check_replays
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.latent.attention import (
    LatentMetadata,
    LatentParams,
    attend,
    plan,
    workspace_size,
)
from inflight_kernels.ops.latent.operands import (
    DTYPE,
    KEY,
    RANK,
    ROTATED,
    LatentNorm,
    Projections,
)
from inflight_kernels.ops.latent.products import (
    MAX_TOKENS,
    absorb,
    absorb_and_write,
    prepare,
    project_values,
)
from inflight_kernels.ops.latent.rows import write_latent
from inflight_kernels.ops.rope import RopeInputs
from inflight_kernels.torch_ops import latent, transformer

pytestmark = pytest.mark.gpu

EPS = 1e-6
NUM_POSITIONS = 5000
TOKENS = [1, 2, 15, 16, 17, 37, 64, 65, 300]
WITHIN = ROUNDING[DTYPE]

# H, n, v: DeepSeek V2 Lite, GLM 4.7 Flash, DeepSeek V3.
HEADS = [(16, 128, 128), (20, 192, 256), (128, 128, 128), (3, 128, 64)]


def _random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(DTYPE)


@dataclass
class Layer:
    """Random operands of a layer and a step, and where its tokens go."""

    projections: Projections
    norm: LatentNorm
    rope: RopeInputs
    cache: Tensor
    k_up: Tensor
    v_up: Tensor

    @property
    def rows(self) -> tuple[Projections, LatentNorm, RopeInputs, Tensor]:
        return self.projections, self.norm, self.rope, self.cache

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, in float64."""
        rope = self.rope
        return rope.cos[rope.positions].double(), rope.sin[rope.positions].double()

    def expected_cache(self) -> Tensor:
        cache = torch.full_like(self.cache, torch.nan, dtype=torch.float64)
        written = (self.rope.slot_mapping >= 0).nonzero()[:, 0]
        latent.write_latent(
            self.projections.kv_a[written].double(),
            self.norm.weight.double(),
            EPS,
            *(angles[written] for angles in self.angles),
            cache,
            self.rope.slot_mapping[written],
        )
        return cache

    def expected_queries(self) -> Tensor:
        q = self.projections.q.double()
        return latent.absorb(latent.rotate_queries(q, *self.angles), self.k_up.double())


def _layer(
    tokens: int, heads: int, nope: int, width: int, *, block_size: int = 16, fused: bool = True
) -> Layer:
    """Of a fused projection of q and kv_a, or of separate ones, with other columns between."""
    frequencies = (1e4 ** -(np.arange(0, ROTATED, 2) / ROTATED)).astype(np.float32)
    cos, sin = transformer.rotary_tables(frequencies, NUM_POSITIONS)
    num_blocks = tokens // block_size + 9
    columns = heads * (nope + ROTATED)
    both = _random(tokens, columns + KEY + 8)
    kv_a = both[:, columns : columns + KEY] if fused else _random(tokens, KEY)
    return Layer(
        Projections(both[:, :columns].view(tokens, heads, nope + ROTATED), kv_a),
        LatentNorm(torch.randn(RANK, device="cuda"), EPS),
        RopeInputs(
            torch.randint(0, NUM_POSITIONS, (tokens,), device="cuda"),
            torch.randperm(num_blocks * block_size, device="cuda")[:tokens],
            cos.cuda(),
            sin.cuda(),
        ),
        torch.full((num_blocks, block_size, 1, KEY), torch.nan, dtype=DTYPE, device="cuda"),
        _random(heads, nope, RANK, scale=nope**-0.5),
        _random(heads, width, RANK, scale=RANK**-0.5),
    )


def _check_cache(layer: Layer) -> None:
    """The slots' keys are right, and no other slot is written."""
    expected = layer.expected_cache()
    assert torch.equal(layer.cache.isnan(), expected.isnan())
    for columns in (slice(0, RANK), slice(RANK, KEY)):
        got, wanted = (cache[..., columns].nan_to_num() for cache in (layer.cache, expected))
        assert relative_error(got, wanted) < WITHIN


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("heads", "nope", "width"), HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rows_are_those_of_the_reference(
    tokens: int, heads: int, nope: int, width: int, fused: bool
) -> None:
    layer = _layer(tokens, heads, nope, width, fused=fused)
    queries = Guarded(tokens, heads, KEY, dtype=DTYPE)
    write_latent(*layer.rows, queries=queries.tensor)
    assert queries.tensor[:, :, :RANK].isnan().all(), "columns of the product"
    absorb(layer.projections.q, layer.k_up, queries=queries.tensor)
    expected = layer.expected_queries()
    for columns in (slice(0, RANK), slice(RANK, KEY)):
        got = queries.check()[..., columns]
        assert relative_error(got, expected[..., columns]) < WITHIN
    _check_cache(layer)


@pytest.mark.parametrize(("heads", "nope", "width"), HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_one_launch_gives_what_two_give(tokens: int, heads: int, nope: int, width: int) -> None:
    layer = _layer(tokens, heads, nope, width)
    apart = torch.empty(tokens, heads, KEY, dtype=DTYPE, device="cuda")
    write_latent(*layer.rows, queries=apart)
    absorb(layer.projections.q, layer.k_up, queries=apart, batch_invariant=True)
    cache = layer.cache.nan_to_num(7.0)
    layer.cache.fill_(torch.nan)
    together = Guarded(tokens, heads, KEY, dtype=DTYPE)
    projections, *others = layer.rows
    absorb_and_write(projections, layer.k_up, *others, queries=together.tensor)
    assert torch.equal(together.check(), apart)
    assert torch.equal(layer.cache.nan_to_num(7.0), cache)


@pytest.mark.parametrize(("heads", "nope", "width"), HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_values_are_those_of_the_reference(tokens: int, heads: int, nope: int, width: int) -> None:
    v_up = _random(heads, width, RANK, scale=RANK**-0.5)
    attended = _random(tokens, heads, RANK)
    expected = latent.project_values(attended.double().flatten(1), v_up.double())
    expected = expected.view(tokens, heads, width)
    for batch_invariant in (False, True):
        out = Guarded(tokens, heads, width, dtype=DTYPE)
        project_values(attended, v_up, out=out.tensor, batch_invariant=batch_invariant)
        assert relative_error(out.check(), expected) < WITHIN


@pytest.mark.parametrize("tokens", [20, 33, 300, 3000])
def test_a_token_does_not_depend_on_the_others(tokens: int) -> None:
    layer = _layer(tokens, 16, 128, 128)
    queries = torch.empty(tokens, 16, KEY, dtype=DTYPE, device="cuda")
    attended = _random(tokens, 16, RANK)
    out = torch.empty(tokens, 16, 128, dtype=DTYPE, device="cuda")
    absorb(layer.projections.q, layer.k_up, queries=queries, batch_invariant=True)
    project_values(attended, layer.v_up, out=out, batch_invariant=True)
    for first in (0, 7, tokens - 1):
        rows = slice(first, first + 1)
        alone = torch.empty(1, 16, KEY, dtype=DTYPE, device="cuda")
        absorb(layer.projections.q[rows], layer.k_up, queries=alone)
        assert torch.equal(alone[..., :RANK], queries[rows, :, :RANK])
        values = torch.empty(1, 16, 128, dtype=DTYPE, device="cuda")
        project_values(attended[rows], layer.v_up, out=values)
        assert torch.equal(values, out[rows])


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_slots_find_their_block_whatever_its_size(block_size: int) -> None:
    layer = _layer(100, 4, 128, 128, block_size=block_size)
    memory = torch.full(
        (len(layer.cache), 3, block_size, 1, KEY), torch.nan, dtype=DTYPE, device="cuda"
    )
    layer.cache = memory[:, 1]
    queries = torch.empty(100, 4, KEY, dtype=DTYPE, device="cuda")
    write_latent(*layer.rows, queries=queries)
    _check_cache(layer)
    assert memory[:, [0, 2]].isnan().all()


def test_a_negative_slot_leaves_the_cache_alone() -> None:
    layer = _layer(20, 16, 128, 128)
    layer.rope.slot_mapping[1::2] = -1
    queries = torch.empty(20, 16, KEY, dtype=DTYPE, device="cuda")
    projections, *others = layer.rows
    absorb_and_write(projections, layer.k_up, *others, queries=queries)
    _check_cache(layer)
    assert relative_error(queries, layer.expected_queries()) < WITHIN


def test_a_step_with_ready_history_still_waits_for_its_projections() -> None:
    """Positions and slots are read while the kernel before runs, q and kv_a are not."""
    layer = _layer(5, 16, 128, 128, fused=False)
    projections, *others = layer.rows
    expected = torch.empty(5, 16, KEY, dtype=DTYPE, device="cuda")
    absorb_and_write(projections, layer.k_up, *others, queries=expected)
    cache = layer.cache.clone()
    sources = [-one for one in projections]
    weight = torch.randn(4096, 4096, device="cuda", dtype=DTYPE)
    for _ in range(5):
        queries = torch.full_like(expected, torch.nan)
        layer.cache.fill_(torch.nan)
        for one in projections:
            one.fill_(torch.nan)
        torch.mm(weight, weight)
        for one, source in zip(projections, sources, strict=True):
            torch.neg(source, out=one)
        absorb_and_write(
            projections, layer.k_up, *others, queries=queries, history_ready=True, pdl=True
        )
        assert torch.equal(queries, expected)
        assert torch.equal(layer.cache.nan_to_num(), cache.nan_to_num())


def _decodes(tables: Tensor, kv_len: int, heads: int, scale: float) -> LatentMetadata:
    """Of sequences of equal lengths, to be planned."""
    count = len(tables)
    size = workspace_size(count, count, heads, max_q_len=1)
    return LatentMetadata(
        LatentParams(heads, scale),
        torch.arange(count + 1, dtype=torch.int32, device="cuda"),
        torch.full((count,), kv_len, dtype=torch.int32, device="cuda"),
        tables,
        count,
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        max_q_len=1,
        planned=True,
    )


@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_a_layer_is_that_of_expanded_keys_and_values(tokens: int) -> None:
    """Decodes, from the projections to values, with keys and values of every head."""
    heads, nope, width, history, block_size = 16, 128, 128, 200, 16
    layer = _layer(tokens, heads, nope, width)
    blocks = -(-(history + 1) // block_size)
    tables = torch.randperm(tokens * blocks, device="cuda").int().view(tokens, blocks)
    cache = _random(tokens * blocks, block_size, 1, KEY)
    layer.cache = cache
    layer.rope.slot_mapping.copy_(
        tables[:, history // block_size].long() * block_size + history % block_size
    )
    scale = (nope + ROTATED) ** -0.5
    queries = torch.empty(tokens, heads, KEY, dtype=DTYPE, device="cuda")
    attended = torch.empty(tokens, heads, RANK, dtype=DTYPE, device="cuda")
    out = torch.empty(tokens, heads, width, dtype=DTYPE, device="cuda")
    metadata = _decodes(tables, history + 1, heads, scale)
    projections, *others = layer.rows
    plan(metadata, pdl=True)
    prepare(projections, layer.k_up, *others, queries=queries)
    attend(queries, cache, metadata, attended, pdl=True)
    project_values(attended, layer.v_up, out=out, pdl=True)

    q = projections.q.double()
    q = torch.cat((q[:, :, :nope], transformer.rotary(q[:, :, nope:], *layer.angles)), -1)
    for i in range(tokens):
        cached = cache[tables[i].long()].flatten(0, 2)[: history + 1].double()
        k = torch.einsum("hnc,sc->shn", layer.k_up.double(), cached[:, :RANK])
        rotated = cached[:, None, RANK:].expand(-1, heads, -1)
        v = torch.einsum("hvc,sc->shv", layer.v_up.double(), cached[:, :RANK])
        scores = torch.einsum("hd,shd->hs", q[i], torch.cat((k, rotated), -1)) * scale
        expected = torch.einsum("hs,shv->hv", scores.softmax(-1), v)
        assert relative_error(out[i], expected) < 3e-2


@pytest.mark.parametrize("tokens", [1, 64])
def test_dependent_launches_in_a_graph_give_the_same(tokens: int) -> None:
    heads, block_size = 16, 16
    layer = _layer(tokens, heads, 128, 128)
    # Each token is the first one of its sequence, in a block of its own.
    layer.cache = torch.full((tokens, block_size, 1, KEY), torch.nan, dtype=DTYPE, device="cuda")
    tables = torch.randperm(tokens, device="cuda").int()[:, None]
    layer.rope.slot_mapping.copy_(tables[:, 0].long() * block_size)
    projections, *others = layer.rows
    queries = torch.empty(tokens, heads, KEY, dtype=DTYPE, device="cuda")
    attended = torch.empty(tokens, heads, RANK, dtype=DTYPE, device="cuda")
    out = torch.empty(tokens, heads, 128, dtype=DTYPE, device="cuda")
    metadata = _decodes(tables, 1, heads, 0.05)

    def chain(pdl: bool) -> None:
        plan(metadata, pdl=pdl)
        absorb_and_write(projections, layer.k_up, *others, queries=queries, pdl=pdl)
        attend(queries, layer.cache, metadata, attended, pdl=pdl)
        project_values(attended, layer.v_up, out=out, pdl=pdl)

    check_replays(chain, (projections.q, queries, layer.cache, attended, out))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [MAX_TOKENS, MAX_TOKENS + 1])
def test_everything_before_attention_for_any_number_of_tokens(
    tokens: int, batch_invariant: bool
) -> None:
    layer = _layer(tokens, 16, 128, 128)
    projections, *others = layer.rows
    queries = Guarded(tokens, 16, KEY, dtype=DTYPE)
    prepare(
        projections,
        layer.k_up,
        *others,
        queries=queries.tensor,
        batch_invariant=batch_invariant,
    )
    assert relative_error(queries.check(), layer.expected_queries()) < WITHIN
    _check_cache(layer)
