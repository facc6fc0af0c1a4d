"""Residual streams of GPUs, with the kernels' definitions in the kernels' place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import host_kernels
from inflight.models.layers.norm import NormWeights
from inflight.models.layers.residual import Residual, WideResidual
from inflight_kernels.ops.linear.operands import Input
from inflight_kernels.ops.moe.routing import Routed
from inflight_kernels.ops.moe.sum_norm import ExpertRows
from inflight_kernels.torch_ops import transformer

TOKENS, WIDTH, TOP_K, EPS = 5, 16, 2, 1e-5
CPU = torch.device("cpu")


class Mixture:
    """Two experts a token, whose sums are left to a norm if it `leaves` them."""

    def __init__(self, *, leaves: bool) -> None:
        self.leaves = leaves
        self.routed = Routed(TOKENS, 8, TOP_K, CPU)
        self.routed.positions.copy_(torch.randperm(TOKENS * TOP_K))
        self.routed.weights.copy_(torch.rand(TOKENS, TOP_K + 1))
        self.rows = torch.randn(TOKENS * TOP_K, WIDTH)

    def sums(self) -> Tensor:
        each = self.rows[self.routed.positions.long()].view(TOKENS, TOP_K, WIDTH)
        return (each * self.routed.weights[:, :TOP_K, None]).sum(1)

    def unsummed(self, x: Input, num_tokens: int) -> ExpertRows | None:
        return ExpertRows(self.rows, self.routed, None) if self.leaves else None

    def product(self, x: Input, out: Tensor, num_tokens: int) -> None:
        out[:num_tokens] = self.sums()

    def add(self, x: Input, total: Tensor, num_tokens: int) -> None:
        total[:num_tokens] += self.sums()


@pytest.fixture(params=[Residual, WideResidual], ids=lambda kind: kind.__name__)
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    host_kernels.install(monkeypatch)
    spec: Any = SimpleNamespace(norm_eps=EPS, hidden_size=WIDTH)
    return request.param(spec, TOKENS, torch.float32, CPU)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_norm_adds_what_experts_leave_to_it_once(stream: Residual, leaves: bool) -> None:
    table, norm = torch.randn(9, WIDTH), NormWeights(torch.rand(WIDTH) + 0.5, None)
    out, ids = torch.zeros(TOKENS, WIDTH), torch.tensor([3, 1, 4, 1, 5])
    stream.begin(ids, table)
    stream.norm(norm, out)
    expected = table[ids]
    for _ in range(2):
        mixture: Any = Mixture(leaves=leaves)
        stream.add_mixture(out, mixture, TOKENS)
        if leaves:  # neither is complete before that norm
            assert stream.normed(norm, TOKENS) is None
            assert stream.summed(norm, TOKENS) is None
        expected = expected + mixture.sums()
        stream.norm(norm, out)
        torch.testing.assert_close(stream.hidden, expected)
        torch.testing.assert_close(out, transformer.rms_norm(expected, norm.weight, EPS)[0])
