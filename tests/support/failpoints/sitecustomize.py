"""Failures of an engine process, for tests that put this folder on PYTHONPATH.

FAILPOINT is `KIND:NUMBER`, or several of these with commas. `abort`, `segfault` and `raise` end the
engine in the step that runs a prompt with this token id; `leak` keeps so many bytes for each
request; with `slow`, a step takes so many milliseconds, as one on a GPU does, without using a core;
with `load`, loading pauses five times for so many milliseconds, or for ever while the file
FAILPOINT_STALLS exists.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

NUM_PAUSES = 5
_KEPT: list[bytes] = []


def fail(kind: str) -> None:
    if kind == "abort":
        os.abort()
    if kind == "segfault":
        ctypes.string_at(0)
    raise RuntimeError("a failpoint")


def pause_while_loading(number: int) -> None:
    from inflight.execution import factory

    build = factory.build

    def slow_build(config: Any, checkpoint: Any, progress: Any) -> Any:
        for place in range(NUM_PAUSES):
            progress("pausing", place / NUM_PAUSES)
            time.sleep(number / 1e3)
            while os.path.exists(os.environ["FAILPOINT_STALLS"]):
                time.sleep(0.1)
        return build(config, checkpoint, progress)

    factory.build = slow_build


def install(kind: str, number: int) -> None:
    from inflight.engine.engine import Engine
    from inflight.execution.echo_runner import EchoRunner

    if kind == "load":
        pause_while_loading(number)
        return
    launch, submit = EchoRunner.launch, Engine.submit

    def crashing_launch(self: Any, batch: Any) -> Any:
        if any(number in chunk.sequence.request.prompt_ids for chunk in batch.chunks):
            fail(kind)
        return launch(self, batch)

    def slow_launch(self: Any, batch: Any) -> Any:
        time.sleep(number / 1e3)
        return launch(self, batch)

    def leaking_submit(self: Any, request: Any, arrived: float | None = None) -> None:
        _KEPT.append(os.urandom(number))
        submit(self, request, arrived)

    if kind == "leak":
        Engine.submit = leaking_submit  # type: ignore[method-assign]
    elif kind == "slow":
        EchoRunner.launch = slow_launch  # type: ignore[method-assign]
    else:
        EchoRunner.launch = crashing_launch  # type: ignore[method-assign]


if "inflight.ipc.engine_main" in sys.orig_argv and "FAILPOINT" in os.environ:
    for one in os.environ["FAILPOINT"].split(","):
        what, _, value = one.partition(":")
        install(what, int(value))
