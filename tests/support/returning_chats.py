"""Chats that come back when the pool has lost their KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.sampling.params import SamplingParams
from waiting import wait_until

NUM_CHATS, NUM_TURNS = 6, 3


def turn(
    number: int, chats: list[list[int]], prompt_tokens: int = 30, **params: Any
) -> list[Request]:
    """The requests of the next turn of each chat: the conversation so far, and a new message.

    Args:
        number: of the turn, from 0 on.
        chats: the tokens of each chat so far, which those of its user are added to.
        prompt_tokens: of the first turn.
        params: of sampling.
    """
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9} | params
    width = int(greedy.get("beam_width", 1))
    requests = []
    for index, chat in enumerate(chats):
        chat += [
            (31 * index + 7 * j + 5 * number) % 150 + 3
            for j in range(6 if number else prompt_tokens)
        ]
        first_id = (number * NUM_CHATS + index) * width
        requests.append(
            Request(
                first_id,
                list(chat),
                SamplingParams(**greedy),
                output_ids=tuple(range(first_id, first_id + width)),
            )
        )
    return requests


@torch.inference_mode()
def poison_pool(engine: Engine) -> None:
    """NaN in all blocks, and nothing of them in the prefix cache: only host memory is left."""
    runner: Any = engine.runner
    scheduler = engine.scheduler
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    scheduler.stored(runner.take_stored())
    pool = scheduler._pool
    blocks = [pool.allocate() for _ in range(pool.num_free)]
    assert len(blocks) == pool.num_blocks
    pool.release(blocks)
    caches = (
        [data for cache in runner._caches for data in cache.data]
        if hasattr(runner, "_caches")
        else runner._steps.caches
    )
    for data in caches:
        data.fill_(torch.nan if data.is_floating_point() else 255)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def chat(
    engine: Engine,
    poisons: bool,
    between: Callable[[Engine], Engine] = lambda engine: engine,
    **params: Any,
) -> list[dict[int, list[int]]]:
    """The outputs of all turns of all chats.

    Args:
        engine: of the first turn.
        poisons: whether the pool is poisoned after each turn.
        between: the engine of the next turn.
        params: see `turn`.
    """
    chats: list[list[int]] = [[] for _ in range(NUM_CHATS)]
    outputs = []
    for number in range(NUM_TURNS):
        requests = turn(number, chats, **params)
        outputs.append(generate(engine, requests))
        for request, said in zip(requests, chats, strict=True):
            said += outputs[-1][request.request_id]
        if poisons:
            poison_pool(engine)
        engine = between(engine)
    return outputs


class Restarts:
    """`between` of `chat`: an engine of its own for each turn, which reads from disk what those
    before it wrote.

    Args:
        make: makes an engine with the same folder.

    Attributes:
        num_read: blocks that the engines so far have read.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self.num_read = 0

    def __call__(self, engine: Engine) -> Engine:
        end_storing(engine)
        host = engine.scheduler.host_cache
        assert host is not None
        assert host.disk is not None
        self.num_read += host.disk.num_read
        host.disk.close()
        return self._make()


def end_storing(engine: Engine) -> None:
    """Let an idle engine copy its blocks to all tiers."""

    def is_done() -> bool:
        assert engine.sweep() == []
        return not engine.is_storing

    wait_until(is_done)
