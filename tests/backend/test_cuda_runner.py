"""What of the GPU's runner can be said without one; the rest is tests/backend/gpu."""

from __future__ import annotations

import pytest
import torch

from inflight.checkpoint import Checkpoint
from inflight.config import EngineConfig
from inflight.cuda_runner import CudaRunner, graph_sizes
from inflight.errors import ConfigError
from inflight.model.config import read_config


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 24, 100, 256, 300, 1024])
def test_each_decode_step_has_a_graph_that_is_little_larger(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < (8 if size <= 256 else 64)


def test_without_a_gpu_the_error_says_so(
    tiny_llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(model=".", device="cuda")
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaRunner(config, tiny_llama, read_config(tiny_llama), lambda what, fraction: None)
