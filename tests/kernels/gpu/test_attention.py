"""Paged attention against the float64 reference, on fresh random inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight_kernels.ops.attention import attend, plan, rope_attend, rotates, workspace_size
from inflight_kernels.ops.attention_dispatch import HEAD_DIMS
from inflight_kernels.ops.attention_operands import AttentionMetadata, AttentionParams
from inflight_kernels.ops.linear import skinny_gemm
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
# Weights and results are rounded to the storage type: a few units in its last place.
BOUND = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


@dataclass
class Step:
    """Inputs on the GPU; what attention must not read is NaN, or a block that does not exist."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    scale: float

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.q.shape[1], self.k_cache.shape[2], self.q.shape[2]

    def workspace(self, max_q_len: int | None = None, batch_invariant: bool = False) -> Tensor:
        count, num_tokens = len(self.seq_lens), len(self.q)
        size = workspace_size(count, num_tokens, *self.heads, max_q_len, batch_invariant)
        return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def out(self) -> Tensor:
        return torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device="cuda")

    @property
    def kv(self) -> PagedKV:
        return PagedKV(self.k_cache, self.v_cache)

    def metadata(
        self,
        workspace: Tensor | None = None,
        max_q_len: int | None = None,
        planned: bool = False,
        **spec: Any,
    ) -> AttentionMetadata:
        """Of the step; `spec` are fields of `AttentionParams`."""
        made = AttentionParams(*self.heads, scale=self.scale, **spec)
        if workspace is None:
            workspace = self.workspace(max_q_len, made.batch_invariant)
        return AttentionMetadata(
            made,
            self.query_start,
            self.seq_lens,
            self.block_tables,
            len(self.q),
            workspace,
            max_q_len,
            planned,
        )

    def run(
        self,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
        *,
        history_ready: bool = False,
        pdl: bool = False,
        **options,
    ) -> Tensor:
        """`options` are those of `metadata`."""
        out = self.out() if out is None else out
        metadata = self.metadata(workspace, **options)
        attend(self.q, self.kv, metadata, out, history_ready=history_ready, pdl=pdl)
        return out

    def definition(self, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        """One chunk after the other, every score, in float64."""
        num_heads, num_kv_heads, _ = self.heads
        block_size = self.k_cache.shape[1]
        out = torch.zeros(self.q.shape, dtype=torch.float64, device="cuda")
        starts = self.query_start.tolist()
        for i, kv_len in enumerate(self.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            q_len = starts[i + 1] - starts[i]
            if not q_len or not kv_len:
                continue
            blocks = self.block_tables[i, : -(-kv_len // block_size)].long()
            k, v = (
                cache[blocks]
                .flatten(0, 1)[:kv_len]
                .double()
                .repeat_interleave(num_heads // num_kv_heads, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            scores = torch.einsum("qhd,khd->hqk", self.q[rows].double(), k) * self.scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            last = torch.arange(kv_len - q_len, kv_len, device="cuda")[:, None]
            keys = torch.arange(kv_len, device="cuda")
            seen = keys <= last
            if window:
                seen &= keys > last - window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
        return out


def make_step(
    q_lens,
    kv_lens,
    *,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    block_size=16,
    dtype=torch.bfloat16,
    seed=0,
) -> Step:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    needed = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator, device="cuda").int()
    tables = torch.full((len(kv_lens), max(needed) + 2), 10**8, dtype=torch.int32, device="cuda")
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (
        torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2)
    )
    used = 0
    for i, kv_len in enumerate(kv_lens):
        tables[i, : needed[i]] = order[used : used + needed[i]]
        slots = torch.arange(kv_len, device="cuda")
        slots = tables[i].long()[slots // block_size] * block_size + slots % block_size
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[slots] = normal(kv_len, num_kv_heads, head_dim)
        used += needed[i]
    starts = torch.tensor([0, *q_lens], device="cuda").cumsum(0).int()
    return Step(
        normal(sum(q_lens), num_heads, head_dim),
        k_cache,
        v_cache,
        tables,
        starts,
        torch.tensor(kv_lens, dtype=torch.int32, device="cuda"),
        head_dim**-0.5,
    )


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


STEPS = {
    "decode": ([1] * 5, [1, 17, 64, 300, 2000]),
    "decode, many": ([1] * 300, list(range(1, 301))),
    "decode, hundred": ([1] * 100, list(range(1, 901, 9))),
    "decode, one long": ([1], [20_000]),
    "decode, ragged": ([1] * 4, [128, 30_000, 16, 5000]),
    "verify": ([5] * 6, [5, 70, 64, 1000, 333, 4000]),
    "prefill": ([300, 64, 1000], [300, 64, 1000]),
    "long prefill": ([2048, 1500], [2048, 3001]),
    "one chunk": ([700], [4096]),
    "short chunk of a long prompt": ([40], [9000]),
    "mixed": ([1, 513, 1, 3, 200], [900, 513, 4000, 77, 3000]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_right_for_every_head_dim(step, head_dim, dtype):
    made = make_step(*STEPS[step], head_dim=head_dim, dtype=dtype)
    assert error(made.run(), made.definition()) < BOUND[dtype]


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


# ---------------------------------------------------------------- from the projection on


@dataclass
class Projection:
    """qkv of a step's tokens, and where they go. Their slots in the step's cache are NaN before."""

    step: Step
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    qk_norm: QkNorm | None

    @property
    def rope(self) -> RopeInputs:
        return RopeInputs(self.positions, self.slots, self.cos, self.sin)

    def rotate(self, q_out: Tensor, **options) -> None:
        rope_write_kv(
            self.qkv, self.rope, self.step.kv, q_out=q_out, qk_norm=self.qk_norm, **options
        )

    def run(
        self,
        workspace: Tensor | None = None,
        out: Tensor | None = None,
        *,
        history_ready: bool = False,
        pdl: bool = False,
        **options,
    ) -> Tensor:
        """`options` are those of `Step.metadata`."""
        step = self.step
        out = step.out() if out is None else out
        metadata = step.metadata(workspace, 1, **options)
        rope_attend(
            self.qkv,
            self.rope,
            step.kv,
            metadata,
            out,
            qk_norm=self.qk_norm,
            history_ready=history_ready,
            pdl=pdl,
        )
        return out


def make_projection(q_lens, kv_lens, *, normed=False, num_layer=0, **options) -> Projection:
    step = make_step(q_lens, kv_lens, **options)
    num_heads, num_kv_heads, head_dim = step.heads
    num_tokens, block_size = len(step.q), step.k_cache.shape[1]
    positions = torch.cat(
        [
            torch.arange(kv_len - q_len, kv_len)
            for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
        ]
    ).cuda()
    chunk = torch.arange(len(q_lens)).repeat_interleave(torch.tensor(q_lens)).cuda()
    blocks = step.block_tables[chunk, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    for cache in (step.k_cache, step.v_cache):
        cache.flatten(0, 1)[slots] = float("nan")
    frequencies = (1e4 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    cos, sin = transformer.rotary_tables(frequencies, max(kv_lens))
    generator = torch.Generator("cuda").manual_seed(1000 + num_layer)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, generator=generator, device="cuda").to(step.q.dtype)
    qk_norm = None
    if normed:
        qk_norm = QkNorm(*(torch.randn(head_dim, device="cuda") for _ in "qk"), eps=1e-6)
    return Projection(step, qkv, positions, slots, cos.cuda(), sin.cuda(), qk_norm)


# But for so many sequences that they have a kernel of their own.
DECODES = [step for step in STEPS if step.startswith("decode") and step != "decode, many"]
ROTATED_HEADS = [(32, 8, 128), (8, 8, 64), (28, 4, 128), (15, 1, 96), (8, 1, 64)]


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), ROTATED_HEADS)
@pytest.mark.parametrize("step", DECODES)
def test_a_projection_is_rotated_written_and_attended_in_one(
    step, num_heads, num_kv_heads, head_dim, dtype, normed
):
    assert rotates(num_heads, num_kv_heads, head_dim)
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    made = make_projection(*STEPS[step], normed=normed, dtype=dtype, **options)
    qkv = made.qkv.clone()
    out = made.run()
    k_cache, v_cache = made.step.k_cache.clone(), made.step.v_cache.clone()
    assert torch.equal(made.qkv, qkv)
    made.rotate(made.step.q)
    assert torch.equal(v_cache.nan_to_num(7.0), made.step.v_cache.nan_to_num(7.0))
    assert torch.equal(k_cache.isnan(), made.step.k_cache.isnan())
    # Rounded once more where the compiler joins other products and sums.
    assert error(k_cache.nan_to_num(0.0), made.step.k_cache.nan_to_num(0.0).double()) < 1e-4
    assert error(out, made.step.definition()) < BOUND[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_projection_goes_into_any_block_size_with_a_window_and_a_cap(block_size):
    made = make_projection(*STEPS["decode"], block_size=block_size)
    out = made.run(window=63, soft_cap=30.0)
    made.rotate(made.step.q)
    expected = made.step.definition(window=63, soft_cap=30.0)
    assert error(out, expected) < BOUND[torch.bfloat16]


def test_a_token_without_a_slot_is_seen_but_not_written():
    made = make_projection([1] * 3, [70, 1, 4000])
    expected = made.run()
    slots = made.slots.clone()
    for cache in (made.step.k_cache, made.step.v_cache):
        cache.flatten(0, 1)[slots] = float("nan")
    made.slots.fill_(-1)
    assert torch.equal(made.run(), expected)
    assert made.step.k_cache.flatten(0, 1)[slots].isnan().all()
    assert made.step.v_cache.flatten(0, 1)[slots].isnan().all()


def test_padding_chunks_of_a_graph_do_nothing():
    made = make_projection([1] * 4, [70, 300, 64, 65])
    expected = made.run()
    made.step.query_start.copy_(torch.tensor([0, 1, 2, 2, 2]))
    made.step.seq_lens[2:] = 0
    made.slots[2:] = -1
    out = made.run()
    assert torch.equal(out[:2], expected[:2])
    assert out[2:].isnan().all()


@pytest.mark.parametrize("kind", ["decode", "rope and decode", "many", "verify", "chunks"])
def test_layers_with_ready_history_read_early_and_are_right(kind):
    """Layers of one plan behind each other, as in a model: what they read early is there, and what
    their own step writes is not read early."""
    q_lens, kv_lens = {
        "decode": ([1] * 7, [1, 17, 64, 300, 2000, 65, 129]),
        "rope and decode": ([1] * 7, [1, 17, 64, 300, 2000, 65, 129]),
        "many": ([1] * 150, [1, 17, 64, 300, 129] * 30),
        "verify": ([5] * 6, [5, 70, 64, 1000, 333, 4000]),
        "chunks": ([1, 513, 1, 3, 200], [900, 513, 4000, 77, 3000]),
    }[kind]
    heads = {"num_heads": 32, "num_kv_heads": 8}
    layers = [make_projection(q_lens, kv_lens, num_layer=i, seed=i, **heads) for i in range(12)]
    first = layers[0].step
    for layer in layers:  # one table and one plan; each layer has caches of its own
        assert torch.equal(layer.step.query_start, first.query_start)
    fused = kind == "decode"
    workspace = first.workspace(max(q_lens))
    hidden, width = 4096, layers[0].qkv.shape[1]
    weight = torch.randn(width, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
    x = torch.randn(len(layers), len(first.q), hidden, device="cuda", dtype=torch.bfloat16)

    def project(i: int) -> None:
        """As in a model: a kernel that takes a while and lets its successors in at once."""
        if skinny_gemm.prefers(len(first.q), width, hidden):
            skinny_gemm.linear(x[i], weight, out=layers[i].qkv, pdl=True)
        else:
            torch.mm(x[i], weight.t(), out=layers[i].qkv)

    outs = [layer.step.out() for layer in layers]

    def run() -> None:
        plan(first.metadata(workspace, max(q_lens), planned=True), pdl=True)
        for i, layer in enumerate(layers):
            options = {"planned": True, "history_ready": i > 0, "pdl": True}
            project(i)
            if fused:
                layer.run(workspace, outs[i], **options)
            else:
                layer.rotate(layer.step.q, history_ready=i > 0, pdl=True)
                layer.step.run(workspace, outs[i], max_q_len=max(q_lens), **options)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        for layer in layers:
            for cache in (layer.step.k_cache, layer.step.v_cache):
                cache.flatten(0, 1)[layer.slots] = float("nan")
            layer.qkv.fill_(float("nan"))
        for out in outs:
            out.fill_(float("nan"))
        workspace.fill_(0xFF)
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            if fused:
                layer.rotate(layer.step.q)
            assert error(out, layer.step.definition()) < BOUND[torch.bfloat16]


def test_history_ready_without_a_plan_is_refused():
    made = make_projection([1], [20])
    with pytest.raises(ValueError, match="history_ready requires a planned step"):
        made.run(history_ready=True)
    with pytest.raises(ValueError, match="history_ready requires a planned step"):
        made.step.run(history_ready=True)


def test_projections_that_rope_attend_cannot_take_are_refused():
    assert not rotates(16, 1, 64)
    assert not rotates(4, 1, 256)
    with pytest.raises(ValueError, match="4 query heads for 1 KV heads of 256 values"):
        make_projection([1], [20], num_heads=4, num_kv_heads=1, head_dim=256).run()
    with pytest.raises(ValueError, match="3 tokens in 1 chunks"):
        make_projection([3], [20]).run()
    with pytest.raises(ValueError, match="batch_invariant True"):
        make_projection([1], [20]).run(batch_invariant=True)


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
    """Without a GPU: tests/kernels/test_attention_checks.py."""
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
