"""Routing and the sum of experts, against definitions token by token in float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from inflight_kernels.torch_ops.moe import Routing, Score, route, sum_of_experts

NUM_EXPERTS, WIDTH = 16, 24


def _logits(routing: str, num_tokens: int = 40) -> Tensor:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=random)
    if routing == "all to one":
        logits[:, 5] += 20
    if routing == "Zipf":
        logits += 4 * torch.arange(1, NUM_EXPERTS + 1).log().neg()
    return logits


@pytest.mark.parametrize("routing", ["spread", "Zipf", "all to one"])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_and_weights_are_those_of_the_definition(
    routing: str, top_k: int, renormalize: bool
) -> None:
    logits = _logits(routing)
    experts, weights = route(logits, Routing(top_k, renormalize))
    for row, own, own_weights in zip(logits.double(), experts.tolist(), weights, strict=True):
        ranked = sorted(range(NUM_EXPERTS), key=lambda index: (-row[index].item(), index))
        assert own == ranked[:top_k]
        expected = row.softmax(-1)[own]
        if renormalize:
            expected = expected / expected.sum()
        torch.testing.assert_close(own_weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    logits = torch.zeros(3, 64)
    logits[1, 40] = 1
    experts, weights = route(logits, Routing(4, renormalize=True))
    assert experts.tolist() == [[0, 1, 2, 3], [40, 0, 1, 2], [0, 1, 2, 3]]
    torch.testing.assert_close(weights[0], torch.full((4,), 0.25))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("best", [1, 2])
def test_experts_come_from_the_groups_with_the_best_one_or_two(
    score: Score, num_groups: int, top_groups: int, best: Literal[1, 2]
) -> None:
    logits = _logits("spread")
    bias = torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(5))
    routing = Routing(3, True, score, num_groups, top_groups, 2.5, best)
    experts, weights = route(logits, routing, bias)
    size = NUM_EXPERTS // num_groups
    for row, own, own_weights in zip(logits.double(), experts.tolist(), weights, strict=True):
        scores = row.softmax(-1) if score == "softmax" else row.sigmoid()
        ranks = (scores + bias.double()).tolist()
        groups = [ranks[start : start + size] for start in range(0, NUM_EXPERTS, size)]
        totals = [sum(sorted(group)[-best:]) for group in groups]
        chosen = sorted(range(num_groups), key=lambda at: -totals[at])[:top_groups]
        allowed = [index for index in range(NUM_EXPERTS) if index // size in chosen]
        assert own == sorted(allowed, key=lambda index: -ranks[index])[:3]
        expected = 2.5 * scores[own] / scores[own].sum()
        torch.testing.assert_close(own_weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_sigmoids_that_are_all_zero_weigh_nothing() -> None:
    logits = torch.full((1, NUM_EXPERTS), -200.0)
    _, weights = route(logits, Routing(2, True, "sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("routing", ["spread", "Zipf", "all to one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_that_of_the_definition(routing: str, dtype: torch.dtype) -> None:
    x, matrices = _operands(dtype)
    experts, weights = route(_logits(routing), Routing(3, renormalize=True))
    found = sum_of_experts(x, experts, weights, lambda index, rows: rows @ matrices[index])
    outputs = torch.einsum("tn,tknm->tkm", x.double(), matrices.double()[experts])
    expected = (outputs * weights.double()[..., None]).sum(1)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_result_does_not_depend_on_the_other_tokens() -> None:
    x, matrices = _operands(torch.float32)
    experts, weights = route(_logits("spread"), Routing(3, renormalize=False))

    def run(index: int, rows: Tensor) -> Tensor:
        # Row by row: what is tested is the order of sums, not the product.
        return torch.stack([row @ matrices[index] for row in rows])

    together = sum_of_experts(x, experts, weights, run)
    for token in range(len(x)):
        one = slice(token, token + 1)
        alone = sum_of_experts(x[one], experts[one], weights[one], run)
        assert torch.equal(together[one], alone)


def test_an_expert_runs_once_with_all_of_its_tokens() -> None:
    x, matrices = _operands(torch.float32)
    experts, weights = route(_logits("all to one"), Routing(2, renormalize=True))
    calls: dict[int, int] = {}

    def run(index: int, rows: Tensor) -> Tensor:
        assert index not in calls
        calls[index] = len(rows)
        return rows @ matrices[index]

    sum_of_experts(x, experts, weights, run)
    assert calls[5] == len(x)
    assert calls == {index: (experts == index).sum().item() for index in calls}
    assert sum(calls.values()) == experts.numel()


def _operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    x = torch.randn(40, WIDTH, generator=random).to(dtype)
    matrices = torch.randn(NUM_EXPERTS, WIDTH, WIDTH, generator=random) / WIDTH**0.5
    return x, matrices.to(dtype)
