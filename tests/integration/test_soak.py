"""Mixed load leaves nothing behind: no sequence, no block, no process, no open file, no thread, no
shared memory; and no memory, on a supervised server that computes nothing.

With the model on a CPU, memory is recorded by process, but not bounded: that of the engine grows.
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
from failpoint import set_failpoint
from inflight.engine.stats import Stats
from kserve import Refused, Stream, ask, request, tensor, text
from serving import Triton, serve
from soak import Load, Usage, slope, usage
from supervised import Serving
from supervised import serve as serve_supervised

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
    cpu.wait_until_idle()
    assert {tritonserver, *tritonserver.children(recursive=True)} == set(processes)
    assert rows[-1]["fds"] - rows[0]["fds"] < MAX_MORE_FDS
    long_results.write("soak-model", f"soak, {CLIENTS} clients", rows)


# Of each process, over the second half of the requests.
MAX_BYTES_PER_REQUEST = 1024.0
LEAKED_BYTES_PER_REQUEST = 4096
# The door keeps a connection to Triton for each client at a time, and rarely all are busy at once.
MAX_MORE = CLIENTS
MAX_ROUNDS = 3
SETTLES_S = 60.0
# Streams that are left are still running then, and cost little until they are cancelled.
STEP_MS = 2
SANDBOXES = ("encoding_server ", "jinja_sandbox ")


def memory_slopes(samples: list[tuple[int, dict[str, Usage]]]) -> dict[str, float]:
    """Bytes per request over the second half of the samples, by process."""
    half = samples[len(samples) // 2 :]
    names = set.intersection(*(set(processes) for _, processes in half))
    return {
        name: slope([(done, processes[name].rss) for done, processes in half]) for name in names
    }


def leaks(samples: list[tuple[int, dict[str, Usage]]]) -> dict[str, float]:
    """The processes whose memory grows faster than allowed."""
    found = memory_slopes(samples)
    return {name: value for name, value in found.items() if value > MAX_BYTES_PER_REQUEST}


def left_behind(serving: Serving, before: dict[str, Usage]) -> list[str]:
    """What runs or is held that was not before; waits until there is nothing."""
    deadline = time.monotonic() + SETTLES_S
    while found := [*_busy(serving.stats()), *_more(before, usage(serving))]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return found


def _busy(stats: Stats) -> Iterator[str]:
    if stats.num_running + stats.num_waiting + stats.num_suspended:
        yield "requests"
    if stats.num_free_blocks != stats.num_blocks:
        yield "KV blocks"


def _more(before: dict[str, Usage], now: dict[str, Usage]) -> Iterator[str]:
    yield from before.keys() - now.keys()
    # A pool starts a sandbox when all others are busy.
    yield from (name for name in now.keys() - before.keys() if not name.startswith(SANDBOXES))
    for name in before.keys() & now.keys():
        held, has = before[name], now[name]
        if has.fds > held.fds + MAX_MORE or has.threads > held.threads + MAX_MORE:
            yield f"{name}: {held}, now {has}"


def soak(serving: Serving, num_first: int, number: int) -> tuple[Load, list[dict[str, Any]]]:
    """Send requests; returns the load, and a row for each process."""
    canary = serving.canary()
    load = Load(serving)
    load.run(num_first)
    before, regions = usage(serving), serving.regions()
    # On a busy machine, the queues of a process may grow late; a leak goes on.
    for _ in range(MAX_ROUNDS):
        samples = load.run(number)
        if not leaks(samples):
            break
    assert leaks(samples) == {}
    assert left_behind(serving, before) == []
    assert serving.regions() == regions and len(regions) == 4
    assert serving.canary() == canary
    assert load.num_cancelled > 0.15 * load.num_done
    after, slopes = usage(serving), memory_slopes(samples)
    return load, [
        {
            "process": name.rpartition(" ")[0],
            "bytes_per_request": round(slopes[name]),
            "rss_mib": [held.rss >> 20, after[name].rss >> 20],
            "fds": [held.fds, after[name].fds],
            "threads": [held.threads, after[name].threads],
        }
        for name, held in before.items()
    ]


@pytest.mark.parametrize(
    ("num_first", "number"), [(500, 1200), pytest.param(800, 2400, marks=pytest.mark.long)]
)
def test_many_requests_leave_nothing_behind(
    num_first: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_failpoint(monkeypatch, "slow", STEP_MS)
    with serve_supervised(tmp_path, "echo", "--grpc-guard") as serving:
        soak(serving, num_first, number)
        log = serving.log.read_text(errors="replace")
    assert "Traceback" not in log and "lighthouse" not in log


def test_a_planted_leak_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_failpoint(monkeypatch, "slow", STEP_MS)
    set_failpoint(monkeypatch, "leak", LEAKED_BYTES_PER_REQUEST)
    with serve_supervised(tmp_path, "echo", "--grpc-guard") as serving:
        load = Load(serving)
        load.run(300)
        found = leaks(load.run(500))
    assert [name for name in found if name.startswith("engine_main ")], found


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_20000_requests_leave_nothing_behind(tmp_path: Path) -> None:
    with serve_supervised(tmp_path, "echo", "--grpc-guard") as serving:
        load, rows = soak(serving, 1000, 20_000)
    counts = {"requests": load.num_done, "cancelled": load.num_cancelled, **load.done}
    long_results.write("soak", "soak, supervised echo engine, both doors", [counts, *rows])
