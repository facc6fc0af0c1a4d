"""Minutes of mixed load leave nothing behind: no sequence, no block, no process, no open file.

Memory is recorded by process, but not bounded: that of the engine still grows.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import long_results
from kserve import Refused, Stream, ask, request, tensor, text
from serving import Triton, serve

pytestmark = pytest.mark.integration

MINUTES = 5
CLIENTS = 8
NUM_BLOCKS = 160  # of 16 tokens; each takes 0.7 MiB
MAX_MORE_FDS = 16

STREAMED = tensor("stream", "BOOL", True)
WORDS = ("a lighthouse", "seven ducks", "the last train", "rain", "Ünïcödé", "🦆")


def complete(triton: Triton, generator: random.Random) -> None:
    prompt = " ".join(generator.choices(WORDS, k=generator.randint(1, 40)))
    inputs = [text(prompt), tensor("max_tokens", "INT32", generator.randint(1, 24))]
    if generator.random() < 0.5:
        inputs.append(tensor("temperature", "FP32", 0.8))
    if generator.random() < 0.7:
        inputs.append(STREAMED)
    answers = ask(triton.grpc, request("generate", *inputs))
    assert answers[-1]["finish_reason"] in ("stop", "length")


def leave(triton: Triton, generator: random.Random) -> None:
    endless = (STREAMED, tensor("ignore_eos", "BOOL", True), tensor("max_tokens", "INT32", 500))
    stream = Stream(triton.grpc, request("generate", text("Once upon a time"), *endless))
    for _ in range(generator.randint(0, 5)):
        stream.next()
    generator.choice([stream.cancel, stream.hang_up])()


def be_refused(triton: Triton, generator: random.Random) -> None:
    wrong = generator.choice(
        [(text(""),), (text("x"), tensor("top_k", "INT32", -7)), (text(b"\xff\xfe"),)]
    )
    with pytest.raises(Refused):
        ask(triton.grpc, request("generate", *wrong))


ACTIONS = {complete: 6, leave: 2, be_refused: 2}


def memory_mib(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes) >> 20


@pytest.fixture
def cpu(tmp_path: Path) -> Iterator[Triton]:
    """A server of its own with a small KV pool, whose memory the first minute touches wholly."""

    def shrink_pool(models: Path) -> None:
        path = models / "llm" / "1" / "engine.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_blocks": NUM_BLOCKS}))

    yield from serve(tmp_path, "cpu", shrink_pool)


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 240)
def test_minutes_of_mixed_load_leave_nothing_behind(cpu: Triton) -> None:
    tritonserver = psutil.Process(cpu.server.pid)
    processes = sorted(
        [tritonserver, *tritonserver.children(recursive=True)],
        key=lambda process: "inflight.ipc.engine_main" in process.cmdline(),
    )  # the engine is the last one
    canary = cpu.canary()
    done: Counter[str] = Counter()
    is_over = threading.Event()

    def client(seed: int) -> None:
        generator = random.Random(seed)
        while not is_over.is_set():
            (action,) = generator.choices([*ACTIONS], [*ACTIONS.values()])
            action(cpu, generator)
            done[action.__name__] += 1

    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, seed) for seed in range(CLIENTS)]
        try:
            for minute in range(1, MINUTES + 1):
                time.sleep(60)
                rows.append(
                    {
                        "minute": minute,
                        **done,
                        "rss_mib": memory_mib(processes),
                        "engine_rss_mib": memory_mib(processes[-1:]),
                        "fds": sum(process.num_fds() for process in processes),
                    }
                )
                assert cpu.canary() == canary
        finally:
            is_over.set()
        for one in clients:
            one.result()
    cpu.wait_until_idle(30)
    assert {tritonserver, *tritonserver.children(recursive=True)} == set(processes)
    assert rows[-1]["fds"] - rows[0]["fds"] < MAX_MORE_FDS
    long_results.write("soak", f"soak, {CLIENTS} clients", rows)
