"""Chains of dependent launches, from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def check_replays(chain: Callable[[bool], None], states: Sequence[Tensor]) -> None:
    """A chain of kernels gives the same with dependent launches, replayed from a graph.

    Args:
        chain: launches the kernels, with programmatic dependent launch or without.
        states: what each of them reads and writes, in order; the first one is only read.
    """
    chain(False)
    expected = states[-1].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(True)
    for _ in range(20):
        for state in states[1:]:
            state.fill_(torch.nan)
        graph.replay()
        assert torch.equal(states[-1], expected)
