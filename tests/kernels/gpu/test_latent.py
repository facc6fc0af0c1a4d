"""Latent attention against the float64 reference, on fresh random inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention_steps import BOUND, STEPS, error
from inflight_kernels.ops.attention import operands
from inflight_kernels.ops.latent.attention import attend, plan
from inflight_kernels.ops.latent.operands import DTYPE, KEY, RANK
from latent_steps import LatentStep, make_latent_step

pytestmark = pytest.mark.gpu

WITHIN = BOUND[DTYPE]


def ragged(count: int, longest: int = 5000) -> list[int]:
    """Lengths from 1 on, in an order of their own."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.linspace(1, longest, count).int()
    return lengths[torch.randperm(count, generator=generator)].tolist()


def check(made: LatentStep, **options: object) -> Tensor:
    """Run a step twice; the results are right, and bitwise equal."""
    out = made.run(**options)
    assert error(out, made.definition()) < WITHIN
    assert torch.equal(made.run(**options), out)
    return out


@pytest.mark.parametrize("num_heads", [16, 20, 32, 128])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_decodes_of_ragged_lengths(count: int, num_heads: int) -> None:
    check(make_latent_step([1] * count, ragged(count), num_heads=num_heads), max_q_len=1)


@pytest.mark.parametrize("num_heads", [3, 8, 16])
@pytest.mark.parametrize("count", [33, 50, 64, 66])
@pytest.mark.parametrize("difference", [0, 1, 9, 40])
def test_pairs_of_blocks_merge_the_pieces_of_a_unit(
    difference: int, count: int, num_heads: int
) -> None:
    """For so many sequences units have two pieces, or of ragged ones, some have one or three."""
    lengths = [900 + i * difference for i in range(count)]
    made = make_latent_step([1] * count, lengths, num_heads=num_heads)
    workspace = made.workspace(max_q_len=1)
    plan(made.metadata(workspace, max_q_len=1, planned=True))
    out = check(made, max_q_len=1)
    for history_ready in (False, True):
        for _ in range(3):
            again = made.run(
                workspace, max_q_len=1, planned=True, history_ready=history_ready, pdl=True
            )
            assert torch.equal(again, out)


@pytest.mark.parametrize("num_heads", [16, 20, 32, 128])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_any_chunks(step: str, num_heads: int) -> None:
    q_lens, kv_lens = STEPS[step]
    if num_heads == 128:  # the reference has all scores of a chunk at once
        q_lens = [min(q_len, 300) for q_len in q_lens]
    check(make_latent_step(q_lens, kv_lens, num_heads=num_heads))


@pytest.mark.parametrize("shared_kib", [100, 164])
@pytest.mark.parametrize("num_heads", [16, 20, 128])
@pytest.mark.parametrize("step", ["decode", "decode, one long", "verify", "one chunk", "mixed"])
def test_the_kernels_of_gpus_with_less_shared_memory(
    step: str, num_heads: int, shared_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "_shared_bytes", lambda: shared_kib << 10)
    made = make_latent_step(*STEPS[step], num_heads=num_heads)
    check(made)
    assert error(made.run(batch_invariant=True), made.definition()) < WITHIN


@pytest.mark.parametrize("num_heads", [1, 5, 17, 33, 65, 200])
@pytest.mark.parametrize("step", ["decode", "verify", "mixed"])
def test_any_number_of_heads(step: str, num_heads: int) -> None:
    check(make_latent_step(*STEPS[step], num_heads=num_heads))


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("step", STEPS)
def test_any_block_size(step: str, block_size: int) -> None:
    check(make_latent_step(*STEPS[step], block_size=block_size))


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_heads", [16, 20])
def test_tokens_with_drafts(num_heads: int, drafts: int) -> None:
    q_len = 1 + drafts
    kv_lens = [q_len + length for length in ragged(9, 3000)]
    made = make_latent_step([q_len] * 9, kv_lens, num_heads=num_heads)
    check(made, max_q_len=q_len)


def test_a_row_without_keys_gets_zeros_and_rows_of_no_chunk_stay() -> None:
    made = make_latent_step([1, 0, 1, 2], [10, 0, 0, 300])
    made.q = torch.cat((made.q, made.q[:2]))
    out = made.run(max_q_len=2)
    assert (out[1] == 0).all()
    assert out[4:].isnan().all()
    assert error(out[:4], made.definition()[:4]) < WITHIN


def test_a_step_of_no_tokens_writes_nothing() -> None:
    made = make_latent_step([1, 1], [10, 20])
    made.query_start.zero_()
    assert made.run(max_q_len=1).isnan().all()


def test_queries_and_cache_blocks_may_be_strided() -> None:
    made = make_latent_step(*STEPS["mixed"])
    expected = made.run()
    num_tokens, num_heads, _ = made.q.shape
    wide = torch.full((num_tokens, num_heads + 4, KEY), float("nan")).to(made.q)
    wide[:, :num_heads] = made.q
    made.q = wide[:, :num_heads]
    made.cache = torch.stack((made.cache, torch.full_like(made.cache, float("nan"))), 1)[:, 0]
    assert torch.equal(made.run(), expected)


@pytest.mark.parametrize("step", ["decode, ragged", "decode, one long", "one chunk", "mixed"])
def test_a_plan_serves_all_layers(step: str) -> None:
    """Blocks of split units count how often they have arrived."""
    made = make_latent_step(*STEPS[step])
    workspace = made.workspace()
    plan(made.metadata(workspace, planned=True))
    expected = made.definition()
    first = made.run(workspace, planned=True)
    assert error(first, expected) < WITHIN
    for _ in range(40):
        assert torch.equal(made.run(workspace, planned=True), first)


@pytest.mark.parametrize("num_heads", [16, 20, 128])
def test_batch_invariant_results_depend_on_nothing_else_in_the_step(num_heads: int) -> None:
    q_lens, kv_lens = [1, 90, 1, 300, 1, 7], [700, 90, 33, 4000, 1, 1500]
    step = make_latent_step(q_lens, kv_lens, num_heads=num_heads)
    whole = check(step, batch_invariant=True)
    starts = step.query_start.tolist()
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for first in range(0, q_len, 40):  # as if its prompt came in chunks of 40
            rows = slice(starts[i] + first, min(starts[i] + first + 40, starts[i + 1]))
            taken = rows.stop - rows.start
            alone = LatentStep(
                step.q[rows],
                step.cache,
                step.block_tables[i : i + 1],
                torch.tensor([0, taken], dtype=torch.int32, device="cuda"),
                torch.tensor([kv_len - q_len + first + taken], dtype=torch.int32, device="cuda"),
                step.scale,
            )
            assert torch.equal(alone.run(batch_invariant=True), whole[rows])


@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_replays_with_other_lengths(pdl: bool) -> None:
    lengths = ([4000, 33, 900, 64, 1, 2500], [7, 1, 900, 64, 1, 77], [1, 33, 64, 10, 1, 20])
    made = make_latent_step([1] * 6, lengths[0])
    made.seq_lens.copy_(torch.tensor(lengths[2], dtype=torch.int32))
    workspace = made.workspace(max_q_len=1)
    made.run(workspace, max_q_len=1)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.run(workspace, max_q_len=1, pdl=pdl)
    for seq_lens in (*lengths, lengths[0]):
        made.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        assert error(out, made.definition()) < WITHIN


def test_a_graph_replays_with_other_chunks() -> None:
    q_lens, kv_lens = ([700, 1, 40], [1, 300, 1], [0, 33, 640]), [3000, 4200, 2000]
    made = make_latent_step(q_lens[0], kv_lens)
    workspace = made.workspace()
    made.run(workspace)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.run(workspace)
    for lens in (*q_lens, q_lens[0]):
        out.fill_(torch.nan)
        made.query_start.copy_(torch.tensor([0, *lens]).cumsum(0))
        graph.replay()
        used = sum(lens)
        assert error(out[:used], made.definition()[:used]) < WITHIN
        assert out[used:].isnan().all()


@pytest.mark.parametrize("step", ["decode, ragged", "decode, one long", "verify", "mixed"])
def test_a_step_with_ready_history_still_waits_for_its_own_tokens(step: str) -> None:
    """What was written before is read while the kernel before runs, q and new keys are not."""
    q_lens, kv_lens = STEPS[step]
    made = make_latent_step(q_lens, kv_lens)
    workspace = made.workspace()
    plan(made.metadata(workspace, planned=True))
    expected = made.run(workspace, planned=True)
    keys = made.cache.view(-1, KEY)
    block_size = made.cache.shape[1]
    new = torch.cat(
        [
            table.long()[positions // block_size] * block_size + positions % block_size
            for table, q_len, kv_len in zip(made.block_tables, q_lens, kv_lens, strict=True)
            for positions in [torch.arange(kv_len - q_len, kv_len, device="cuda")]
        ]
    )
    q, own_keys = made.q.clone(), keys[new].clone()
    weight = torch.randn(4096, 4096, device="cuda", dtype=DTYPE)
    for _ in range(5):
        made.q.fill_(torch.nan)
        keys[new] = torch.nan
        torch.mm(weight, weight)
        keys[new] = own_keys
        torch.mm(weight, weight)
        made.q.copy_(q)
        out = made.run(workspace, planned=True, history_ready=True, pdl=True)
        assert torch.equal(out, expected)


def test_blocks_that_start_late_change_nothing() -> None:
    """Other streams take multiprocessors: blocks that wait for the rest of their unit give up."""
    steps = [make_latent_step([1], [20_000], seed=seed) for seed in range(3)]
    workspaces = [made.workspace(max_q_len=1) for made in steps]
    expected = [made.run(max_q_len=1) for made in steps]
    weight = torch.randn(8192, 8192, device="cuda", dtype=DTYPE)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], [], []]
    for _ in range(20):
        with torch.cuda.stream(streams[3]):
            torch.mm(weight, weight)
        for made, workspace, stream, found in zip(steps, workspaces, streams, outs, strict=False):
            with torch.cuda.stream(stream):
                found.append(made.run(workspace, max_q_len=1))
    torch.cuda.synchronize()
    for found, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in found)


def test_operands_not_supported_by_the_kernels_are_rejected() -> None:
    """Without a GPU: tests/kernels/ops/latent."""
    made = make_latent_step([1], [20])
    workspace = made.workspace()
    needed = made.metadata(workspace).parts[-1].end  # less than what serves any step of its tokens
    with pytest.raises(ValueError, match="workspace has"):
        made.run(workspace[: needed - 1])
    with pytest.raises(ValueError, match=r"q is .*; expected \[1, 16, 576\]"):
        attend(made.q[:, :4], made.cache, made.metadata(), made.out())
    with pytest.raises(ValueError, match="out is"):
        attend(made.q, made.cache, made.metadata(), made.out()[:, :, : RANK // 2])
