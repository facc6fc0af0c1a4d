"""Decode attention whose sequences share prefixes, against the float64 reference and the kernels
that share none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_steps import BOUND, DTYPES, Step, error, head_error, make_step, with_sinks
from inflight_kernels.ops.attention.attention import attend
from inflight_kernels.ops.attention.operands import AttentionMetadata, AttentionParams, Cascade
from inflight_kernels.ops.attention.planning import plan
from prefix_plan import SharedPrefix, cut_prefixes, find_prefixes
from quantized_steps import QuantizedStep, each_type, quantized

pytestmark = pytest.mark.gpu

LLAMA = {"num_heads": 32, "num_kv_heads": 8}


def share(step: Step, members: Sequence[int], keys: int) -> None:
    """Let chunks begin with the same blocks, of so many keys."""
    blocks = keys // step.k_cache.shape[1]
    step.block_tables[list(members), :blocks] = step.block_tables[members[0], :blocks].clone()


def memory(step: Step, min_keys: int = 64, min_saved: int = 0, **spec: Any) -> Cascade:
    """For the step; what the plan does not write must not be read."""
    params = AttentionParams(*step.heads, scale=step.scale, **spec)
    device, block_size = torch.device("cuda"), step.k_cache.shape[1]
    made = Cascade.empty(len(step.seq_lens), block_size, params, device)
    assert made is not None
    for kept in (made.prefixes, made.members, made.tokens, made.arrived):
        kept.fill_(-1)
    for kept in (made.sums, made.states):
        kept.fill_(torch.nan)
    return replace(made, min_keys=min_keys, min_saved=min_saved)


def prefixes_of(step: Step, cascade: Cascade) -> list[SharedPrefix]:
    """As the reimplementation of the plan finds them."""
    return find_prefixes(
        step.query_start.diff().tolist(),
        step.seq_lens.tolist(),
        step.block_tables.tolist(),
        cascade.block_size,
        cascade.min_keys,
        cascade.min_saved,
    )


def check_plan(step: Step, cascade: Cascade, metadata: AttentionMetadata) -> None:
    """Compare a plan of prefixes with its reimplementation."""
    found = prefixes_of(step, cascade)
    assert found, "there are some"
    group, num_kv_heads = step.heads[0] // step.heads[1], step.heads[1]
    num_blocks = metadata.parts[0].num_shares
    cuts = cut_prefixes(found, group, num_kv_heads, cascade.max_pieces, num_blocks)
    per_unit, first = 64 // group, 0
    members = torch.zeros(len(step.seq_lens), 4, dtype=torch.int32)
    tokens = []
    starts = step.query_start.tolist()
    for index, (prefix, cut) in enumerate(zip(found, cuts, strict=True)):
        row = [prefix.leader, first, len(prefix.members), prefix.tiles, cut.pieces]
        row += [cut.piece_tiles, cut.first_piece, cut.end_piece]
        assert cascade.prefixes[index].tolist() == row
        for inside, member in enumerate(prefix.members):
            unit = inside // per_unit * num_kv_heads
            piece = cut.first_piece + unit * cut.pieces
            place = [first + inside, inside % per_unit * group, piece, cut.pieces]
            members[member] = torch.tensor(place, dtype=torch.int32)
            tokens.append(starts[member])
        first += len(prefix.members)
    pieces = cascade.members[:, 3].cpu()
    assert torch.equal(pieces, members[:, 3])
    assert torch.equal(cascade.members.cpu()[pieces > 0], members[pieces > 0])
    assert cascade.tokens[:first].tolist() == tokens
    assert (cascade.arrived.flatten()[: first * num_kv_heads] == 0).all()


def check(step: Step, *, bound: float = BOUND[torch.bfloat16], **options: Any) -> torch.Tensor:
    """Run a step with shared prefixes, twice, and compare plan and results."""
    cascade = memory(step)
    longest = int(step.query_start.diff().max())
    workspace = step.workspace(longest)
    run = {"max_q_len": longest, "planned": True, "cascade": cascade, **options}
    metadata = step.metadata(workspace, **run)
    plan(metadata)
    check_plan(step, cascade, metadata)
    expected = step.definition(soft_cap=options.get("soft_cap", 0.0))
    out = step.run(workspace, **run)
    compare = error if step.sinks is None else head_error
    assert compare(out, expected) < bound
    for ready in (False, True):
        again = step.run(workspace, history_ready=ready, **run)
        assert torch.equal(again, out), "sums have one order"
    counts = cascade.arrived.flatten()
    assert (counts[counts >= 0] == 0).all()
    return out


def shared_step(count: int, keys: int, own: Sequence[int], **shape: Any) -> Step:
    """Of sequences that all share so many keys, and have `own` more in turn."""
    lens = [keys + own[i % len(own)] for i in range(count)]
    step = make_step([1] * count, lens, **{**LLAMA, **shape})
    share(step, range(count), keys)
    return step


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("count", [8, 16, 17, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("keys", [64, 128, 1024])
def test_any_number_of_sequences_share_a_prefix(count, keys):
    check(shared_step(count, keys, [1, 17, 64, 130, 33]))


@pytest.mark.parametrize("keys", [64, 192, 2048, 4096])
@pytest.mark.parametrize("count", [24, 128])
def test_prefixes_of_any_length(count, keys):
    check(shared_step(count, keys, [1 + 13 * i for i in range(11)]))


@pytest.mark.parametrize("count", [12, 250])
def test_sequences_may_have_a_single_key_of_their_own(count):
    check(shared_step(count, 512, [1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("count", [40, 220])
def test_every_head_dim(count, head_dim, dtype):
    step = shared_step(count, 320, [1, 50, 200], head_dim=head_dim, dtype=dtype)
    check(step, bound=BOUND[dtype])


@pytest.mark.parametrize(
    "heads", [(8, 8), (8, 2), (28, 4), (64, 8), (9, 3), (16, 1), (12, 1), (36, 12), (40, 8)]
)
@pytest.mark.parametrize("count", [20, 256])
def test_any_number_of_query_heads_may_share_a_kv_head(count, heads):
    check(shared_step(count, 256, [1, 90, 40], num_heads=heads[0], num_kv_heads=heads[1]))


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("count", [30, 230])
def test_any_block_size(count, block_size):
    check(shared_step(count, 448, [1, 70, 5], block_size=block_size))


@pytest.mark.parametrize("count", [30, 230])
def test_a_prefix_that_ends_within_a_tile(count):
    """Its last blocks, less than a tile, are read by each sequence."""
    step = shared_step(count, 48 + 256, [1, 16, 100])
    check(step)
    assert {prefix.tiles for prefix in prefixes_of(step, memory(step))} == {4}


@pytest.mark.parametrize("count", [60, 240])
def test_members_between_others_and_several_prefixes(count):
    lens = [700 + 3 * i for i in range(count)]
    step = make_step([1] * count, lens, **LLAMA)
    share(step, range(0, count, 3), 512)
    share(step, range(1, count, 6), 640)
    check(step)
    assert len(prefixes_of(step, memory(step))) == 2


def test_more_prefixes_than_are_shared_at_once():
    step = make_step([1] * 120, [400 + i for i in range(120)], **LLAMA)
    for first in range(6):
        share(step, range(first, 120, 6), 320)
    check(step)
    assert len(prefixes_of(step, memory(step))) == 4


def test_more_sequences_than_the_plan_has_threads():
    check(shared_step(1100, 128, [1, 20], num_heads=8, num_kv_heads=4, head_dim=64))


@pytest.mark.parametrize("count", [30, 230])
def test_chunks_without_tokens_and_with_several(count):
    q_lens = [(1, 1, 0, 1, 2)[i % 5] for i in range(count)]
    lens = [(400 + i) * (q_len > 0) for i, q_len in enumerate(q_lens)]
    step = make_step(q_lens, lens, **LLAMA)
    decodes = [i for i, q_len in enumerate(q_lens) if q_len]
    share(step, decodes, 256)
    check(step)


@pytest.mark.parametrize("count", [40, 230])
def test_decodes_of_a_step_with_prompts(count):
    step = make_step([1] * count + [300, 70], [500 + i for i in range(count)] + [300, 900], **LLAMA)
    share(step, range(count), 384)
    share(step, [0, count + 1], 384)  # a prompt's prefix is read by itself
    check(step)


@pytest.mark.parametrize("count", [40, 230])
def test_sinks_and_caps(count):
    step = shared_step(count, 256, [1, 100, 30])
    check(with_sinks(step))
    step.scale = 1.0
    check(step, bound=2 * BOUND[torch.bfloat16], soft_cap=30.0)


def test_a_maximum_anywhere():
    """Scores of the prefix far above those of the own keys, or far below."""
    step = shared_step(64, 256, [40, 3])
    blocks = step.block_tables[0, :16].long()
    for factor in (20.0, 0.01):
        scaled = replace(step, k_cache=step.k_cache.clone())
        scaled.k_cache[blocks] *= factor
        check(scaled)


@each_type
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("count", [40, 220])
def test_caches_of_8_bits(count, head_dim, dtype):
    made: QuantizedStep = quantized(shared_step(count, 320, [1, 50, 90], head_dim=head_dim), dtype)
    plain = made.plain
    cascade = memory(plain, kv_dtype=dtype)
    workspace = made.workspace()
    metadata = replace(made.metadata(workspace), cascade=cascade, max_q_len=1)
    plan(metadata)
    check_plan(plain, cascade, metadata)
    outs = [plain.out() for _ in range(2)]
    for out in outs:
        attend(plain.q, made.kv, metadata, out)
    assert error(outs[0], plain.definition()) < BOUND[torch.bfloat16]
    assert torch.equal(*outs)


# ---------------------------------------------------------------- without a prefix


@pytest.mark.parametrize("count", [9, 64, 140, 256])
@pytest.mark.parametrize("keys", [0, 16])
def test_results_are_bitwise_the_same_where_nothing_is_shared(count, keys):
    step = make_step([1] * count, [100 + 9 * i for i in range(count)], **LLAMA)
    share(step, range(count), keys)
    workspace = step.workspace(1)
    expected = step.run(workspace, max_q_len=1)
    out = step.run(workspace, max_q_len=1, cascade=memory(step))
    assert torch.equal(out, expected)


def test_a_prefix_that_saves_too_little_is_not_shared():
    step = shared_step(64, 256, [30, 60])
    workspace = step.workspace(1)
    expected = step.run(workspace, max_q_len=1)
    cascade = memory(step, min_saved=64 * 256)
    assert torch.equal(step.run(workspace, max_q_len=1, cascade=cascade), expected)
    out = step.run(workspace, max_q_len=1, cascade=replace(cascade, min_saved=63 * 256))
    assert not torch.equal(out, expected) and error(out, expected.double()) < 6e-3


@pytest.mark.parametrize("spec", [{"window": 300}, {"batch_invariant": True}], ids=str)
def test_windows_and_invariant_steps_share_nothing(spec):
    step = shared_step(64, 512, [30, 60])
    params = AttentionParams(*step.heads, scale=step.scale, **spec)
    assert Cascade.empty(64, 16, params, torch.device("cuda")) is None
    workspace = step.workspace(1, spec.get("batch_invariant", False))
    expected = step.run(workspace, max_q_len=1, **spec)
    out = step.run(workspace, max_q_len=1, cascade=memory(step), **spec)
    assert torch.equal(out, expected)


# ---------------------------------------------------------------- graphs


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("count", [64, 256])
def test_a_graph_replays_with_other_prefixes_and_lengths(count, pdl):
    step = make_step([1] * count, [900] * count, **LLAMA)
    own_tables = step.block_tables.clone()
    cascade, workspace = memory(step), step.workspace(1)
    run = {"max_q_len": 1, "pdl": pdl, "cascade": cascade}
    step.run(workspace, **run)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metadata = step.metadata(workspace, max_q_len=1, planned=True, cascade=cascade)
        plan(metadata, pdl=pdl)
        layers = [
            step.run(workspace, planned=True, history_ready=layer > 0, **run) for layer in range(3)
        ]
    generator = torch.Generator().manual_seed(0)
    for keys in (0, 512, 64, 0, 768, 256):
        step.block_tables.copy_(own_tables)
        if keys:
            share(step, range(0, count, 1 + keys // 512), keys)
        lens = torch.randint(keys + 1, 901, (count,), generator=generator)
        step.seq_lens.copy_(lens)
        graph.replay()
        assert error(layers[0], step.definition()) < BOUND[torch.bfloat16]
        assert all(torch.equal(layer, layers[0]) for layer in layers)


def test_a_large_step_many_times():
    """All blocks of threads are busy, and end in another order each time."""
    step = shared_step(256, 2048, [128 + i for i in range(100)])
    cascade, workspace = memory(step), step.workspace(1)
    run = {"max_q_len": 1, "planned": True, "cascade": cascade}
    plan(step.metadata(workspace, **run))
    out = step.run(workspace, **run)
    assert error(out, step.definition()) < BOUND[torch.bfloat16]
    for _ in range(200):
        assert torch.equal(step.run(workspace, **run), out)
