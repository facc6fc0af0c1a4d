"""Paged attention against the float64 reference, on fresh random inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_steps import (
    BOUND,
    DTYPES,
    STEPS,
    Step,
    error,
    head_error,
    make_step,
    with_sinks,
)
from inflight_kernels.ops.attention import attention, operands, planning
from inflight_kernels.ops.attention.attention import attend
from inflight_kernels.ops.attention.dispatch import HEAD_DIMS
from inflight_kernels.ops.attention.operands import AttentionMetadata, AttentionParams
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_right_for_every_head_dim(step, head_dim, dtype):
    made = make_step(*STEPS[step], head_dim=head_dim, dtype=dtype)
    assert error(made.run(), made.definition()) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_right_in_100_kib_of_shared_memory(step, head_dim, dtype, monkeypatch):
    """With the kernels of GPUs that have no more, which run on all others too."""
    monkeypatch.setattr(operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(operands, "is_hopper", lambda: False)
    made = make_step(*STEPS[step], head_dim=head_dim, dtype=dtype)
    assert error(made.run(), made.definition()) < BOUND[dtype]
    invariant = made.run(batch_invariant=True)
    assert error(invariant, made.definition()) < BOUND[dtype]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (32, 8), (28, 4), (9, 3), (16, 1), (71, 1)])
@pytest.mark.parametrize("step", ["decode", "verify", "mixed"])
def test_any_number_of_query_heads_may_share_a_kv_head(step, heads):
    made = make_step(*STEPS[step], num_heads=heads[0], num_kv_heads=heads[1])
    assert error(made.run(), made.definition()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("step", STEPS)
def test_any_block_size(step, block_size):
    made = make_step(*STEPS[step], block_size=block_size, num_heads=32, num_kv_heads=8)
    assert error(made.run(), made.definition()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("window", [1, 63, 64, 1000])
@pytest.mark.parametrize("step", STEPS)
def test_a_window_hides_older_keys(step, window):
    made = make_step(*STEPS[step])
    out = made.run(window=window)
    assert error(out, made.definition(window=window)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("step", STEPS)
def test_scores_are_capped_softly(step, head_dim, soft_cap):
    made = make_step(*STEPS[step], head_dim=head_dim)
    made.scale = 1.0
    out = made.run(soft_cap=soft_cap)
    assert error(out, made.definition(soft_cap=soft_cap)) < 2 * BOUND[torch.bfloat16]


def test_the_definition_here_is_that_of_the_reference():
    made = make_step(*STEPS["mixed"])
    made.k_cache.nan_to_num_()
    made.v_cache.nan_to_num_()
    host = transformer.paged_attention(
        made.q.double().cpu(),
        made.k_cache.double().cpu(),
        made.v_cache.double().cpu(),
        made.block_tables.long().cpu(),
        made.query_start.long().cpu(),
        made.seq_lens.long().cpu(),
        made.scale,
    )
    assert error(host.view(made.q.shape).cuda(), made.definition()) < 1e-12


def test_a_row_without_keys_gets_zeros_and_rows_of_no_chunk_stay():
    made = make_step([1, 0, 1, 2], [10, 0, 0, 300])
    made.q = torch.cat((made.q, made.q[:2]))
    out = made.run(max_q_len=2)
    assert (out[1] == 0).all()
    assert out[4:].isnan().all()
    assert error(out[:4], made.definition()[:4]) < BOUND[torch.bfloat16]


def test_queries_may_be_a_slice_of_a_projection():
    made = make_step(*STEPS["mixed"])
    num_tokens, num_heads, head_dim = made.q.shape
    wide = torch.full((num_tokens, num_heads + 4, head_dim), float("nan")).to(made.q)
    wide[:, :num_heads] = made.q
    expected = made.run()
    made.q = wide[:, :num_heads]
    assert torch.equal(made.run(), expected)


def test_cache_blocks_may_be_strided():
    """Keys and values of a layer in one tensor [num_blocks, 2, block_size, G, D]."""
    made = make_step(*STEPS["mixed"])
    expected = made.run()
    both = torch.stack((made.k_cache, made.v_cache), 1)
    made.k_cache, made.v_cache = both[:, 0], both[:, 1]
    assert torch.equal(made.run(), expected)


@pytest.mark.parametrize("step", ["decode, ragged", "one chunk", "long prefill", "mixed"])
def test_a_plan_is_valid_for_all_layers_and_resets_the_workspace(step):
    made = make_step(*STEPS[step])
    workspace = made.workspace()
    plan(made.metadata(workspace, planned=True))
    expected = made.definition()
    for _ in range(5):
        assert error(made.run(workspace, planned=True), expected) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("kv_len", [1, 130, 700, 4096, 100_000])
@pytest.mark.parametrize(
    ("q_len", "heads"),
    [
        (1, (32, 8)),
        (1, (9, 3)),
        (1, (64, 8)),
        (4, (32, 8)),
        (8, (9, 3)),
        (7, (12, 4)),
        (8, (32, 4)),
    ],
)
def test_a_single_chunk_is_planned_as_one_of_many(monkeypatch, q_len, heads, kv_len, window):
    """By a smaller kernel, with the same items, shares and arrivals."""
    starts, lens = (
        torch.tensor(values, dtype=torch.int32, device="cuda")
        for values in ([0, q_len], [max(kv_len, q_len)])
    )
    tables = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    spec = AttentionParams(*heads, 128, scale=1.0, window=window)

    def planned() -> list[list[int]]:
        size = attention.workspace_size(1, q_len, *heads, 128, q_len)
        workspace = torch.full((size,), 0x55, dtype=torch.uint8, device="cuda")
        metadata = AttentionMetadata(spec, starts, lens, tables, q_len, workspace, q_len)
        plan(metadata)
        (part,) = metadata.parts
        places = [(part.arrivals, 16 * part.num_shares), (part.shares, 64 * part.num_shares)]
        num_items = -(-q_len * heads[0] // heads[1] // part.shape.rows)
        places += [(part.first_item, 8), (part.items, 32 * num_items)]
        return [workspace[first : first + size].tolist() for first, size in places]

    used, max_items = [], planning._max_items
    monkeypatch.setattr(
        planning, "_max_items", lambda *step: used.append(max_items(*step)) or used[-1]
    )
    found = planned()
    monkeypatch.setattr(planning, "_max_items", lambda *step: 0)
    assert found == planned()
    assert used == [1 if q_len * heads[0] <= 16 * heads[1] else 4]


@pytest.mark.parametrize("max_q_len", [1, 500])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_plans_of_a_step_may_run_at_the_same_time(num_chunks, max_q_len):
    """Of layers with and without a window. The second one starts when the lengths are there."""
    heads, most = (32, 8, 128), 4096
    starts = torch.arange(num_chunks + 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(num_chunks, dtype=torch.int32, device="cuda")
    tables = torch.zeros(num_chunks, 1, dtype=torch.int32, device="cuda")
    size = attention.workspace_size(num_chunks, num_chunks, *heads, max_q_len)
    steps = []
    for window in (0, 128):
        spec = AttentionParams(*heads, scale=1.0, window=window)
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        steps.append(
            AttentionMetadata(spec, starts, lens, tables, num_chunks, workspace, max_q_len)
        )

    def shares() -> list[list[int]]:
        return [
            step.workspace[part.shares : part.shares + 64 * part.num_shares].tolist()
            for step in steps
            for part in step.parts
        ]

    for kv_len in (1, 130, 700, most):
        lens.fill_(kv_len)
        for step in steps:
            plan(step)
        expected = shares()
        for step in steps:
            step.workspace.zero_()
        lens.fill_(most)
        torch.cuda.synchronize()
        lens.fill_(kv_len)
        for number, step in enumerate(steps):
            plan(step, history_ready=number > 0, pdl=True)
        assert shares() == expected


def test_blocks_without_tiles_know_whether_others_have_some():
    """Only if none has do they wait for the preceding kernels."""
    made = make_step([1, 1], [150, 70])
    metadata = made.metadata(made.workspace(500), 500)
    plan(metadata)
    assert len(metadata.parts) == 2
    for part, has_tiles in zip(metadata.parts, (True, False), strict=True):
        fields = metadata.workspace[part.shares : part.shares + 64 * part.num_shares]
        begin, end, _, total = fields.view(torch.int32).view(-1, 16)[:, :4].unbind(1)
        assert (begin == end).any()
        assert ((total > 0) == has_tiles).all()


@pytest.mark.parametrize("step", ["decode, ragged", "one chunk", "long prefill", "mixed"])
def test_the_same_plan_gives_bitwise_equal_results(step):
    """Partial sums are merged in the order of their keys, whichever block comes last."""
    made = make_step(*STEPS[step])
    first = made.run()
    assert all(torch.equal(made.run(), first) for _ in range(10))


@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_replays_with_other_lengths(pdl):
    long = make_step([1] * 6, [4000, 33, 900, 64, 1, 2500])
    made = make_step([1] * 6, [4000, 33, 900, 64, 1, 2500])
    made.seq_lens.copy_(torch.tensor([1, 33, 64, 10, 1, 20], dtype=torch.int32))
    workspace = made.workspace()
    made.run(workspace)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.run(workspace, pdl=pdl)
    for seq_lens in (long.seq_lens, torch.tensor([7, 1, 900, 64, 1, 77]).int().cuda()):
        made.seq_lens.copy_(seq_lens)
        graph.replay()
        assert error(out, made.definition()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_batch_invariant_results_depend_on_nothing_else_in_the_step(head_dim):
    q_lens, kv_lens = [1, 90, 1, 300, 1, 7], [700, 90, 33, 4000, 1, 1500]
    step = make_step(q_lens, kv_lens, head_dim=head_dim)
    whole = step.run(batch_invariant=True)
    assert error(whole, step.definition()) < BOUND[torch.bfloat16]
    starts = step.query_start.tolist()
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for first in range(0, q_len, 40):  # as if its prompt came in chunks of 40
            rows = slice(starts[i] + first, min(starts[i] + first + 40, starts[i + 1]))
            taken = rows.stop - rows.start
            alone = Step(
                step.q[rows],
                step.k_cache,
                step.v_cache,
                step.block_tables[i : i + 1],
                torch.tensor([0, taken], dtype=torch.int32, device="cuda"),
                torch.tensor([kv_len - q_len + first + taken], dtype=torch.int32, device="cuda"),
                step.scale,
            )
            assert torch.equal(alone.run(batch_invariant=True), whole[rows])


def test_a_graph_replays_with_other_chunks():
    """Long ones, whose units are taken whole, and short ones, which are cut into shares."""
    q_lens = ([2000, 1500, 700], [40, 4000, 160], [0, 33, 4000])
    kv_lens = [4000, 4200, 5000]
    made = make_step(q_lens[0], kv_lens)
    made.q = torch.cat((made.q, made.q[:100]))
    workspace = made.workspace()
    made.run(workspace)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.run(workspace)
    for lens in (*q_lens, q_lens[0]):
        made.query_start.copy_(torch.tensor([0, *lens]).cumsum(0))
        graph.replay()
        used = sum(lens)
        assert error(out[:used], made.definition()[:used]) < BOUND[torch.bfloat16]
        assert out[used:].isnan().all()


# ---------------------------------------------------------------- many sequences

# Units of attention_heads.cu: more than there are blocks, cut and uncut, and pieces of them.
MANY = {
    "short": ([1] * 140, [1 + i % 40 for i in range(140)]),
    "even": ([1] * 256, [150] * 256),
    "ragged": ([1] * 200, [1 + 17 * i for i in range(200)]),
    "one long": ([1] * 140, [9000] + [40] * 139),
    "pairs": ([2] * 150, [2 + 5 * i for i in range(150)]),
    "ones and twos": ([1, 2] * 80, [3 + 7 * i for i in range(160)]),
    "with empty chunks": ([1, 0] * 150, [300, 0] * 150),
    "a piece each": ([1] * 120, [500 + i for i in range(120)]),
    "with prompts": ([1] * 200 + [300, 70], [100 + i for i in range(200)] + [300, 900]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("step", MANY)
def test_many_sequences(step, head_dim, dtype):
    q_lens, kv_lens = MANY[step]
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim}
    made = make_step(q_lens, kv_lens, dtype=dtype, **heads)
    out = made.run(max_q_len=max(q_lens))
    assert error(out, made.definition()) < BOUND[dtype]
    assert torch.equal(made.run(max_q_len=max(q_lens)), out)


@pytest.mark.parametrize("heads", [(4, 4), (8, 8), (28, 4), (64, 8), (36, 12)])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (1, 0.0), (40, 0.0), (0, 30.0)])
@pytest.mark.parametrize("step", ["ragged", "with empty chunks", "with prompts"])
def test_many_sequences_of_any_heads_with_a_window_or_a_cap(step, window, soft_cap, heads):
    q_lens, kv_lens = MANY[step]
    made = make_step(q_lens, kv_lens, num_heads=heads[0], num_kv_heads=heads[1])
    options = {"window": window, "soft_cap": soft_cap}
    out = made.run(max_q_len=max(q_lens), **options)
    assert error(out, made.definition(**options)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_of_many_sequences_replays_with_other_lengths(pdl):
    lens = torch.stack(
        [torch.full((256,), 400), torch.arange(256) % 40 + 1, torch.arange(256) * 3 + 1]
    )
    made = make_step([1] * 256, lens.amax(0).tolist(), num_heads=32, num_kv_heads=8)
    workspace = made.workspace(max_q_len=1)
    made.run(workspace, max_q_len=1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.run(workspace, max_q_len=1, pdl=pdl)
    for seq_lens in (*lens, lens[0]):
        made.seq_lens.copy_(seq_lens)
        graph.replay()
        assert error(out, made.definition()) < BOUND[torch.bfloat16]


# ---------------------------------------------------------------- sinks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_a_sink_takes_its_part_of_each_row_once(step, head_dim, dtype):
    """In one block or, for long rows, in several."""
    made = with_sinks(make_step(*STEPS[step], head_dim=head_dim, dtype=dtype))
    expected = made.definition()
    out = made.run()
    assert head_error(out, expected) < BOUND[dtype]
    assert head_error(made.run(batch_invariant=True), expected) < BOUND[dtype]
    assert torch.equal(made.run(), out)
    assert error(replace(made, sinks=None).run(), expected) > 0.1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_sinks_are_right_in_100_kib_of_shared_memory(step, head_dim, monkeypatch):
    monkeypatch.setattr(operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(operands, "is_hopper", lambda: False)
    made = with_sinks(make_step(*STEPS[step], head_dim=head_dim))
    assert head_error(made.run(), made.definition()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("heads", [(64, 8), (4, 4), (28, 4), (9, 3), (71, 1)])
@pytest.mark.parametrize("step", ["decode", "decode, many", "verify", "mixed"])
def test_each_query_head_has_a_sink_of_its_own(step, heads):
    made = make_step(*STEPS[step], num_heads=heads[0], num_kv_heads=heads[1], head_dim=64)
    made = with_sinks(made)
    assert head_error(made.run(), made.definition()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("window", [1, 63, 128])
@pytest.mark.parametrize("step", STEPS)
def test_sinks_are_seen_whatever_the_window_hides(step, window):
    made = make_step(*STEPS[step], num_heads=64, num_kv_heads=8, head_dim=64)
    made = with_sinks(made)
    out = made.run(window=window)
    assert head_error(out, made.definition(window=window)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("step", STEPS)
def test_sinks_are_not_capped(step):
    made = with_sinks(make_step(*STEPS[step]))
    made.scale = 1.0
    out = made.run(soft_cap=5.0)
    assert head_error(out, made.definition(soft_cap=5.0)) < 2 * BOUND[torch.bfloat16]


@pytest.mark.parametrize("step", STEPS)
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_leaves_nothing(step):
    made = make_step(*STEPS[step], num_heads=64, num_kv_heads=8, head_dim=64)
    plain = made.run()
    made.sinks = torch.full((64,), float("-inf"), device="cuda")
    made.sinks[5:8] = torch.tensor([100.0, 1e4, 1e30])
    out = made.run()
    others = [head for head in range(64) if head not in (5, 6, 7)]
    assert torch.equal(out[:, others], plain[:, others])
    assert out[:, 5].abs().max() < 1e-30
    assert (out[:, 6:8] == 0).all()


@pytest.mark.parametrize("sink", [float("-inf"), -3.0, 0.0, 200.0])
def test_a_row_without_keys_gets_zeros_with_sinks(sink):
    made = make_step([1, 0, 1, 2], [10, 0, 0, 300])
    made.sinks = torch.full((8,), sink, device="cuda")
    out = made.run(max_q_len=2)
    assert (out[1] == 0).all()
    rows = [0, 2, 3]
    assert (out[rows].double() - made.definition()[rows]).abs().max() < 0.02


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_the_definition_of_sinks_here_is_that_of_the_reference(step):
    made = with_sinks(make_step(*STEPS[step]))
    made.k_cache.nan_to_num_()
    made.v_cache.nan_to_num_()
    places = (made.block_tables, made.query_start, made.seq_lens)
    table, starts, lens = (tensor.long().cpu().numpy() for tensor in places)
    plan = transformer.AttentionPlan(table, starts, lens, made.k_cache.shape[1])
    tensors = (tensor.float().cpu() for tensor in (made.q, made.k_cache, made.v_cache))
    host = transformer.attend(*tensors, plan, made.scale, sinks=made.sinks.cpu())
    assert head_error(host.view(made.q.shape).cuda(), made.definition()) < 1e-5


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("heads", [(64, 8), (8, 8), (28, 4)])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("step", MANY)
def test_many_sequences_with_sinks(step, head_dim, heads, window):
    q_lens, kv_lens = MANY[step]
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    made = with_sinks(make_step(q_lens, kv_lens, **shape))
    out = made.run(max_q_len=max(q_lens), window=window)
    assert head_error(out, made.definition(window=window)) < BOUND[torch.bfloat16]


def test_batch_invariant_rows_with_sinks_depend_on_nothing_else_in_the_step():
    made = with_sinks(make_step([90], [900], head_dim=64, num_heads=64, num_kv_heads=8))
    whole = made.run(batch_invariant=True)
    for first in (0, 40, 80):
        rows = slice(first, min(first + 40, 90))
        starts = torch.tensor([0, rows.stop - first], dtype=torch.int32, device="cuda")
        seq_lens = torch.tensor([810 + rows.stop], dtype=torch.int32, device="cuda")
        alone = replace(made, q=made.q[rows], query_start=starts, seq_lens=seq_lens)
        assert torch.equal(alone.run(batch_invariant=True), whole[rows])


# ---------------------------------------------------------------- operands


def test_a_step_takes_the_heads_and_tokens_of_its_metadata():
    made = make_step([1, 1], [20, 20])
    metadata = made.metadata()
    with pytest.raises(ValueError, match="q has 1 rows; the step has 2 tokens"):
        attend(made.q[:1], made.kv, metadata, made.out())
    with pytest.raises(ValueError, match=r"q is .*; expected \[2, 8, 128\]"):
        attend(made.q[:, :4], made.kv, metadata, made.out())
    fewer = AttentionParams(8, 4, 128, scale=1.0)
    with pytest.raises(ValueError, match="4 heads of 128 values"):
        attend(made.q, made.kv, replace(metadata, spec=fewer), made.out())


def test_caches_at_other_places_are_told_apart():
    """The copy engine's description of a cache is kept; it must be that of this very cache."""
    made = make_step(*STEPS["prefill"])
    expected = made.run()
    k_cache, v_cache = made.k_cache, made.v_cache
    made.k_cache, made.v_cache = k_cache.clone(), v_cache.clone()
    k_cache.fill_(float("nan"))
    v_cache.fill_(float("nan"))
    assert torch.equal(made.run(), expected)


def test_operands_not_supported_by_the_kernels_are_rejected():
    """Without a GPU: tests/kernels/ops/attention/test_attention_checks.py."""
    made = make_step([1], [20])
    workspace = made.workspace()
    needed = made.metadata(workspace).parts[-1].end  # less than what serves any step of its tokens
    with pytest.raises(ValueError, match="workspace has"):
        made.run(workspace[: needed - 1])
    with pytest.raises(ValueError, match="scale 0"):
        made.scale = 0.0
        made.run(workspace)
    made.scale = 1.0
    made.k_cache = made.k_cache.half()
    with pytest.raises(ValueError, match="k_cache is"):
        made.run(workspace)
