"""Launches that are recorded once, to be replayed for next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture_graph(pool: Any, launch: Callable[..., None], *args: Any) -> torch.cuda.CUDAGraph:
    """What a call launches, recorded.

    Args:
        pool: of memory, of `torch.cuda.graph_pool_handle`: graphs of one pool run one at a time.
        launch: what to call; it has been called before, so that all is compiled and loaded.
        args: its arguments.
    """
    # Not `torch.cuda.graph`, which collects garbage each time: seconds in all.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        launch(*args)
    finally:
        graph.capture_end()
    return graph
