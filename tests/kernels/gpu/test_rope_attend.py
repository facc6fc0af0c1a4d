"""Attention from the projection on: queries and keys are rotated and written by the same kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_projections import Projection, make_projection
from attention_steps import BOUND, DTYPES, STEPS, error, head_error, with_sinks
from inflight_kernels.ops.attention import operands
from inflight_kernels.ops.attention.attention import rotates, rotates_chunk
from inflight_kernels.ops.attention.operands import AttentionParams
from inflight_kernels.ops.attention.planning import plan
from inflight_kernels.ops.linear import skinny_gemm

pytestmark = pytest.mark.gpu


# But for so many sequences that they have a kernel of their own.
DECODES = [step for step in STEPS if step.startswith("decode") and step != "decode, many"]
ROTATED_HEADS = [(32, 8, 128), (8, 8, 64), (28, 4, 128), (15, 1, 96), (8, 1, 64)]


def run_and_rotate(made: Projection, **options: int) -> torch.Tensor:
    """The result of a projection, whose keys and values are those of the kernel that only writes
    them; q of its step is rotated then."""
    qkv = made.qkv.clone()
    out = made.run(**options)
    k_cache, v_cache = made.step.k_cache.clone(), made.step.v_cache.clone()
    assert torch.equal(made.qkv, qkv)
    made.rotate(made.step.q)
    assert torch.equal(v_cache.nan_to_num(7.0), made.step.v_cache.nan_to_num(7.0))
    assert torch.equal(k_cache.isnan(), made.step.k_cache.isnan())
    # Rounded once more where the compiler joins other products and sums.
    assert error(k_cache.nan_to_num(0.0), made.step.k_cache.nan_to_num(0.0).double()) < 1e-4
    return out


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
    out = run_and_rotate(made)
    assert error(out, made.step.definition()) < BOUND[dtype]


CHUNK_HEADS = [(9, 3, 64), (32, 8, 128), (8, 8, 64), (32, 4, 128), (8, 8, 128), (64, 8, 64)]


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", CHUNK_HEADS, ids=str)
@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(2, 2), (5, 5), (4, 64), (8, 68), (8, 300), (7, 131), (9, 1000), (16, 4100), (3, 30_000)],
)
def test_a_chunk_is_rotated_written_and_attended_in_one(q_len, kv_len, heads, dtype, window, sinks):
    spec = AttentionParams(*heads, scale=1.0, window=window)
    if not rotates_chunk(q_len, spec):
        assert q_len * spec.group > 64
        return
    options = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    made = make_projection([q_len], [kv_len], dtype=dtype, **options)
    if sinks:
        made.step = with_sinks(made.step)
    out = run_and_rotate(made, window=window)
    assert head_error(out, made.step.definition(window=window)) < BOUND[dtype]


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_chunk_goes_into_any_block_size(block_size):
    made = make_projection([8], [130], block_size=block_size)
    out = made.run(soft_cap=30.0)
    made.rotate(made.step.q)
    assert error(out, made.step.definition(soft_cap=30.0)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_a_chunk_may_have_fewer_tokens_than_its_graph(num_tokens):
    """Padding is not attended to, nor written."""
    made = make_projection([8], [200])
    made.step.query_start.copy_(torch.tensor([0, num_tokens]))
    made.step.seq_lens.fill_(192 + num_tokens)
    slots = made.slots.clone()
    made.slots[num_tokens:] = -1
    out = made.run()
    assert out[num_tokens:].isnan().all()
    assert made.step.k_cache.flatten(0, 1)[slots[num_tokens:]].isnan().all()
    made.rotate(made.step.q)
    expected = made.step.definition()
    assert error(out[:num_tokens], expected[:num_tokens]) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("heads", CHUNK_HEADS[:3], ids=str)
@pytest.mark.parametrize("kv_len", [40, 200, 319, 700])
def test_a_token_has_the_same_result_in_a_chunk_as_alone(heads, kv_len):
    """Greedy text with drafts is that without, where units are cut at the same keys."""
    options = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    whole = make_projection([6], [kv_len], **options)
    out = whole.run()
    k_cache = whole.step.k_cache.clone()
    for token in range(6):
        length = kv_len - 5 + token
        alone = replace(
            whole,
            step=replace(
                whole.step,
                q=whole.step.q[:1],
                query_start=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
                seq_lens=torch.tensor([length], dtype=torch.int32, device="cuda"),
            ),
            qkv=whole.qkv[token : token + 1],
            positions=whole.positions[token : token + 1],
            slots=whole.slots[token : token + 1],
        )
        assert torch.equal(alone.run(), out[token : token + 1])
    assert torch.equal(whole.step.k_cache.nan_to_num(7.0), k_cache.nan_to_num(7.0))


def test_a_chunk_with_norms_is_refused():
    with pytest.raises(ValueError, match="without norms"):
        make_projection([4], [20], normed=True).run()


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("step", DECODES)
def test_a_projection_is_attended_in_100_kib_of_shared_memory(step, normed, monkeypatch):
    """With the kernel of GPUs that have no more, which runs on all others too."""
    monkeypatch.setattr(operands, "_shared_bytes", lambda: 100 << 10)
    monkeypatch.setattr(operands, "is_hopper", lambda: False)
    made = make_projection(*STEPS[step], normed=normed)
    out = made.run()
    made.rotate(made.step.q)
    assert error(out, made.step.definition()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_a_projection_goes_into_any_block_size_with_a_window_and_a_cap(block_size):
    made = make_projection(*STEPS["decode"], block_size=block_size)
    out = made.run(window=63, soft_cap=30.0)
    made.rotate(made.step.q)
    expected = made.step.definition(window=63, soft_cap=30.0)
    assert error(out, expected) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(64, 8, 64), *ROTATED_HEADS])
@pytest.mark.parametrize("step", DECODES)
def test_a_projection_is_attended_with_sinks(
    step, num_heads, num_kv_heads, head_dim, dtype, window
):
    options = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    made = make_projection(*STEPS[step], normed=window > 0, dtype=dtype, **options)
    made.step = with_sinks(made.step)
    out = made.run(window=window)
    made.rotate(made.step.q)
    assert head_error(out, made.step.definition(window=window)) < BOUND[dtype]


def test_a_sink_of_a_projection_may_be_minus_infinity_or_huge():
    made = make_projection(*STEPS["decode, ragged"])
    plain = made.run()
    made.step.sinks = torch.full((8,), float("-inf"), device="cuda")
    made.step.sinks[5] = 1e4
    out = made.run()
    assert (out[:, 5] == 0).all()
    others = [head for head in range(8) if head != 5]
    assert torch.equal(out[:, others], plain[:, others])


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


@pytest.mark.parametrize(
    "kind",
    ["first", "short", "tiles", "decode", "rope and decode", "chunk", "many", "verify", "chunks"],
)
def test_layers_with_ready_history_read_early_and_are_right(kind):
    """Layers of one plan behind each other, as in a model: what they read early is there, and what
    their own step writes is not read early."""
    q_lens, kv_lens = {
        "first": ([1], [1]),
        "short": ([1], [150]),
        "tiles": ([1], [256]),
        "decode": ([1] * 7, [1, 17, 64, 300, 2000, 65, 129]),
        "rope and decode": ([1] * 7, [1, 17, 64, 300, 2000, 65, 129]),
        "chunk": ([8], [333]),
        "many": ([1] * 150, [1, 17, 64, 300, 129] * 30),
        "verify": ([5] * 6, [5, 70, 64, 1000, 333, 4000]),
        "chunks": ([1, 513, 1, 3, 200], [900, 513, 4000, 77, 3000]),
    }[kind]
    heads = {"num_heads": 32, "num_kv_heads": 8}
    layers = [make_projection(q_lens, kv_lens, num_layer=i, seed=i, **heads) for i in range(12)]
    first = layers[0].step
    for layer in layers:  # one table and one plan; each layer has caches of its own
        assert torch.equal(layer.step.query_start, first.query_start)
    fused = kind in ("first", "short", "tiles", "decode", "chunk")
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
    with pytest.raises(ValueError, match="a chunk of up to 17 tokens"):
        make_projection([17], [20]).run()
    with pytest.raises(ValueError, match="4 tokens in 2 chunks"):
        make_projection([3, 1], [20, 9]).run()
    with pytest.raises(ValueError, match="batch_invariant True"):
        make_projection([1], [20]).run(batch_invariant=True)
