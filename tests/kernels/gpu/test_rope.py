"""QK norm, RoPE and the paged KV write against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, rope_write_kv
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6
NUM_POSITIONS = 5000


@dataclass
class Step:
    """Random operands of a step, and where its tokens go."""

    qkv: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    caches: Tensor
    heads: int
    kv_heads: int
    head_dim: int

    def run(self, q_out: Tensor, qk_norm: QkNorm | None = None, **options: bool) -> None:
        rope = RopeInputs(self.positions, self.slots, self.cos, self.sin)
        kv = PagedKV(self.caches[0], self.caches[1])
        rope_write_kv(self.qkv, rope, kv, q_out=q_out, qk_norm=qk_norm, **options)

    def expected(self, qk_norm: QkNorm | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, G, D] in float64."""
        widths = [self.heads, self.kv_heads, self.kv_heads]
        heads = self.qkv.double().view(len(self.qkv), -1, self.head_dim)
        q, k, v = heads.split(widths, 1)
        if qk_norm is not None:
            q, _ = transformer.rms_norm(q, qk_norm.q_weight.double(), EPS)
            k, _ = transformer.rms_norm(k, qk_norm.k_weight.double(), EPS)
        cos, sin = self.cos[self.positions].double(), self.sin[self.positions].double()
        return transformer.rotary(q, cos, sin), transformer.rotary(k, cos, sin), v


def _step(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 16
) -> Step:
    frequencies = (1e4 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    cos, sin = transformer.rotary_tables(frequencies, NUM_POSITIONS)
    num_blocks = tokens // block_size + 9
    width = (heads + 2 * kv_heads) * head_dim
    shape = (2, num_blocks, block_size, kv_heads, head_dim)
    return Step(
        torch.randn(tokens, width, device="cuda").to(dtype),
        torch.randint(0, NUM_POSITIONS, (tokens,), device="cuda"),
        cos.cuda(),
        sin.cuda(),
        torch.randperm(num_blocks * block_size, device="cuda")[:tokens],
        torch.full(shape, torch.nan, dtype=dtype, device="cuda"),
        heads,
        kv_heads,
        head_dim,
    )


def _written(cache: Tensor, slots: Tensor) -> Tensor:
    """The slots' rows, once the cache holds them and nothing else."""
    flat = cache.flatten(0, 1)
    others = torch.ones(len(flat), dtype=torch.bool, device="cuda")
    others[slots] = False
    assert flat[others].isnan().all(), "other slots were written"
    return flat[slots]


SHAPES = [  # H, G, D
    (32, 8, 128),
    (64, 8, 128),
    (9, 3, 64),
    (16, 16, 32),
    (4, 1, 256),
    (6, 2, 80),
    (5, 5, 96),
    (7, 1, 112),
    (128, 8, 64),
    (3, 1, 48),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 37, 700])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_a_step_is_that_of_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, tokens: int, normed: bool
) -> None:
    step = _step(tokens, heads, kv_heads, head_dim, dtype)
    qk_norm = None
    if normed:
        weights = [torch.randn(head_dim, device="cuda") for _ in range(2)]
        qk_norm = QkNorm(weights[0], weights[1], EPS)
    q_out = Guarded(tokens, heads, head_dim, dtype=dtype)
    step.run(q_out.tensor, qk_norm)
    q, k, v = step.expected(qk_norm)
    bound = ROUNDING[dtype]
    assert relative_error(q_out.check(), q) < bound
    assert relative_error(_written(step.caches[0], step.slots), k) < bound
    assert torch.equal(_written(step.caches[1], step.slots).double(), v)


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_slots_find_their_block_whatever_its_size(block_size: int) -> None:
    step = _step(100, 4, 2, 64, torch.float16, block_size)
    step.run(torch.empty(100, 4, 64, dtype=torch.float16, device="cuda"))
    _, k, v = step.expected()
    k_cache, v_cache = torch.zeros(2, *step.caches.shape[1:], dtype=torch.float64, device="cuda")
    transformer.write_kv(k, v, k_cache, v_cache, step.slots)
    assert relative_error(step.caches[0].nan_to_num(0.0), k_cache) < ROUNDING[torch.float16]
    assert torch.equal(step.caches[1].nan_to_num(0.0).double(), v_cache)


def test_a_cache_may_be_laid_out_by_heads() -> None:
    """Any strides will do: here a head's slots lie together, and other layers between blocks."""
    step = _step(50, 8, 4, 128, torch.bfloat16)
    plain = torch.empty(50, 8, 128, dtype=torch.bfloat16, device="cuda")
    step.run(plain)
    expected = step.caches.clone()
    num_blocks, block_size = step.caches.shape[1:3]
    memory = torch.full(
        (num_blocks, 3, 2, 4, block_size, 128), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    step.caches = memory[:, 1].permute(1, 0, 3, 2, 4)
    step.run(plain)
    assert torch.equal(step.caches.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert memory[:, [0, 2]].isnan().all()


def test_a_negative_slot_leaves_the_cache_alone() -> None:
    step = _step(20, 4, 2, 64, torch.float32)
    kept = step.slots[::2].clone()
    step.slots[1::2] = -1
    q_out = Guarded(20, 4, 64, dtype=torch.float32)
    step.run(q_out.tensor)
    q, k, _ = step.expected()
    assert relative_error(q_out.check(), q) < ROUNDING[torch.float32]
    assert relative_error(_written(step.caches[0], kept), k[::2]) < ROUNDING[torch.float32]


@pytest.mark.parametrize("tokens", [3, 600])
def test_q_may_be_rotated_in_place(tokens: int) -> None:
    step = _step(tokens, 32, 8, 128, torch.bfloat16)
    apart = torch.empty(tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
    step.run(apart)
    caches = step.caches.clone()
    inside = step.qkv[:, : 32 * 128].view(tokens, 32, 128)
    step.run(inside)
    assert torch.equal(inside, apart)
    assert torch.equal(step.caches.nan_to_num(0.0), caches.nan_to_num(0.0))


def test_a_step_with_ready_history_still_waits_for_its_projection() -> None:
    """Positions and slots are read while the kernel before runs, qkv is not."""
    step = _step(5, 32, 8, 128, torch.bfloat16)
    expected = torch.empty(5, 32, 128, dtype=torch.bfloat16, device="cuda")
    step.run(expected)
    caches, source = step.caches.clone(), -step.qkv
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        q_out = torch.full_like(expected, torch.nan)
        step.qkv.fill_(torch.nan)
        step.caches.fill_(torch.nan)
        torch.mm(weight, weight)
        torch.neg(source, out=step.qkv)
        step.run(q_out, history_ready=True, pdl=True)
        assert torch.equal(q_out, expected)
        assert torch.equal(step.caches.nan_to_num(0.0), caches.nan_to_num(0.0))


def test_a_token_does_not_depend_on_the_size_of_its_step() -> None:
    step = _step(600, 32, 8, 128, torch.bfloat16)
    together = torch.empty(600, 32, 128, dtype=torch.bfloat16, device="cuda")
    step.run(together)
    alone = torch.empty(1, 32, 128, dtype=torch.bfloat16, device="cuda")
    step.qkv, step.positions, step.slots = step.qkv[7:8], step.positions[7:8], step.slots[7:8]
    step.run(alone)
    assert torch.equal(together[7:8], alone)
