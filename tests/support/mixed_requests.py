"""Requests whose texts must not depend on how an engine got to compute them."""

from __future__ import annotations

from typing import Any

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine
from inflight.execution.factory import build
from inflight.sampling.params import SamplingParams

NUM_OUTPUT = 24


def make_engine(checkpoint: Checkpoint, kv_dtype: str, **changes: Any) -> Engine:
    """With small blocks, enough of them, and no prefix cache."""
    settings: dict[str, Any] = {
        "num_threads": 1,
        "block_size": 4,
        "num_blocks": 400,
        "enable_prefix_caching": False,
        "kv_cache_dtype": kv_dtype,
    }
    config = EngineConfig(model=str(checkpoint.path), **settings | changes)
    runner, _ = build(config, checkpoint, lambda what, done: None)
    return Engine(config, runner, 256, eos_token_ids=())


def asked(num_texts: int = 1, **params: Any) -> list[Request]:
    """Prompts of different lengths, some with a common beginning; so many texts of each."""
    common = [(13 * i + 5) % 160 for i in range(21)]
    prompts = [
        common[: 7 * (i % 4)] + [(31 * i + 7 * j + 3) % 160 for j in range(2 + 5 * i)]
        for i in range(8)
    ]
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_OUTPUT}
    return [
        Request(
            num_texts * i,
            prompt,
            SamplingParams(**greedy | params),
            output_ids=tuple(range(num_texts * i, num_texts * (i + 1))),
        )
        for i, prompt in enumerate(prompts)
    ]
