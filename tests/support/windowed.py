"""Engines of tiny models with sliding windows, whose texts outgrow the windows by far."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, MistralConfig, Qwen2Config

import family
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.engine.engine import Engine
from inflight.execution import cpu_runner, cuda_runner, device_steps, factory
from inflight.execution.cuda_runner import CudaRunner
from inflight.models.registry import read_spec
from inflight.sampling.params import SamplingParams

MAX_LEN = 256
MODELS: dict[str, Any] = {
    "5 of 6 layers": (
        Gemma3TextConfig,
        {"num_hidden_layers": 6, "sliding_window": family.WINDOW, "pad_token_id": 0},
    ),
    "1 of 4 layers": (
        Qwen2Config,
        {"sliding_window": family.WINDOW, "use_sliding_window": True, "max_window_layers": 3},
    ),
    "3 of 4 layers, with sinks": (
        GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": family.WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "pad_token_id": 0,
        },
    ),
    "all layers": (MistralConfig, {"sliding_window": family.WINDOW}),
}


def write_model(folder: Path, name: str, **shape: Any) -> Checkpoint:
    """One of MODELS with random weights.

    Args:
        shape: changes of `family.SHAPE`.
    """
    config, settings = MODELS[name]
    norm_mean = 0.0 if config is Gemma3TextConfig else 1.0
    model = family.make(config(**family.SHAPE | settings | shape), norm_mean=norm_mean)
    return family.write_folder(model, folder)


def make_engine(checkpoint: Checkpoint, device: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_threads": 1,
        "block_size": 16 if device == "gpu" else 4,
        "num_blocks": 400,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "max_model_len": MAX_LEN,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(
        model=str(checkpoint.path),
        device="cuda" if device == "gpu" else "cpu",
        **settings | changes,
    )
    spec = read_spec(checkpoint)
    if device == "gpu":
        runner: Any = CudaRunner(config, checkpoint, spec, lambda what, done: None)
    else:
        runner, _ = factory.build(config, checkpoint, lambda what, done: None)
    return Engine(config, runner, MAX_LEN, eos_token_ids=())


def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on free no blocks."""
    for module in (cpu_runner, cuda_runner, device_steps):
        monkeypatch.setattr(module, "kv_layout", lambda spec, drafter, dtype: spec.kv_layout(dtype))


def requests(lengths: tuple[int, ...], first_id: int = 0, **params: Any) -> list[Request]:
    generator = random.Random(1)
    text = [generator.randrange(3, 160) for _ in range(MAX_LEN)]
    # Every other prompt has the same beginning.
    prompts = [text[:length] if i % 2 else text[-length:] for i, length in enumerate(lengths)]
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}
    return [
        Request(first_id + i, prompt, SamplingParams(**greedy | params))
        for i, prompt in enumerate(prompts)
    ]


LENGTHS = (220, 200, 140, 150, 30, 1)


@torch.inference_mode()
def poison_free_blocks(engine: Engine) -> None:
    """NaN in all blocks without an owner: a request that reads one fails."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    runner: Any = engine.runner
    pool = engine.scheduler._pool
    free = [block for block in range(pool.num_blocks) if not pool.ref_count(block)]
    caches = runner._caches if hasattr(runner, "_caches") else [runner._steps._cache]
    for cache in caches:
        for data in cache.data:
            # In 8 bits, the scales are NaN then.
            poison = torch.nan if data.is_floating_point() else 255
            data[..., torch.tensor(free, device=data.device), :, :, :] = poison
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def running(engine: Engine) -> list[Sequence]:
    """The sequences that run."""
    return [one for group in engine.scheduler.running for one in group.members]


def run_poisoned(engine: Engine) -> tuple[dict[int, list[int]], int]:
    """Run requests of LENGTHS, with NaN in all free blocks after each step.

    Returns:
        The outputs by request, and the most blocks that were freed of running sequences.
    """
    for request in requests(LENGTHS):
        engine.submit(request)
    texts: dict[int, list[int]] = {request.request_id: [] for request in requests(LENGTHS)}
    num_freed = 0
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            texts[event.request_id] += event.token_ids
        num_freed = max([num_freed, *(sum(one.first_blocks) for one in running(engine))])
        poison_free_blocks(engine)
    return texts, num_freed
