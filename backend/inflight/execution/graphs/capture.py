"""Capture of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture_graph(pool: Any, launch: Callable[..., None], *args: Any) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call's launches.

    Args:
        pool: memory pool, of `torch.cuda.graph_pool_handle`: graphs of one pool run one at a time.
        launch: the call; called once before, so that its kernels are compiled and loaded.
        args: its arguments.
    """
    # Not `torch.cuda.graph`, which runs the garbage collector each time: seconds in total.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        launch(*args)
    finally:
        graph.capture_end()
    return graph
