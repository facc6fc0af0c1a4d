"""A process that dies or hangs is replaced, and its clients get an error at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import long_results
from failpoint import failpoint
from inflight.ipc.heartbeat import stacks_of
from inflight.ipc.processes import Process
from inflight.supervision.keeper import STABLE_S
from kserve import Refused, Stream, ask, generate, request, tensor, text
from supervised import Serving, serve
from waiting import wait_until_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STREAMS = 32
STEP_MS = 4
LONG_PROMPT = "The prefix cache has whole blocks only, so this prompt is longer. " * 4
# Until streams have ended: of a server that dies, and of one that stops, which takes a while to be
# noticed.
ENDS_S = {signal.SIGKILL: 2.0, signal.SIGSTOP: 8.0}

# What fails, how, and seconds until it is serving again.
LONG_FAULTS = [
    ("engine", signal.SIGKILL, 3.0 + 6.0),  # 3 s and the time to load
    ("llm", signal.SIGKILL, 6.0),
    ("engine", signal.SIGSTOP, 5.0 + 3.0 + 6.0),
    ("tritonserver", signal.SIGKILL, 6.0),
    ("tritonserver", signal.SIGSTOP, 5.0 + 6.0),
    ("llm", signal.SIGSTOP, 5.0 + 6.0),
    ("detokenizer", signal.SIGKILL, 6.0),
    ("tokenizer", signal.SIGKILL, 6.0),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(tmp_path_factory.mktemp("supervised"), "cpu") as serving:
        yield serving


@pytest.fixture
def serving(server: Serving) -> Iterator[Serving]:
    """It is ready."""
    server.wait_until(lambda: server.health()[0] == 200, 60)
    yield server


def complete(serving: Serving, prompt: str) -> int:
    """Answer a prompt; returns how many of its tokens were in the prefix cache."""
    before = serving.stats().num_cached_tokens
    ask(serving.grpc, request("generate", text(prompt), tensor("max_tokens", "INT32", 1)))
    return serving.stats().num_cached_tokens - before


# The gate of every change runs on machines of any speed.
SLOW = 3.0
FAULTS = [(what, how, SLOW * seconds) for what, how, seconds in LONG_FAULTS[:2]]

VICTIMS = ("engine", "tritonserver", "http", "llm", "detokenizer", "tokenizer", "chat_tokenizer")
WAYS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
NUM_KILLS = 200


def fault_id(fault: tuple[str, signal.Signals, float]) -> str:
    return f"{fault[0]}-{fault[1].name}-{fault[2]:.0f}s"


class Streams:
    """Endless streams, each on a connection of its own, and how each ended."""

    def __init__(self, address: str, number: int, topic: str = "number") -> None:
        self.errors: list[str] = []
        self.num_begun = 0
        self._address = address
        self._topic = topic
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def wait_until_begun(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while self.num_begun < number:
            assert not self.errors and time.monotonic() < deadline, (self.num_begun, self.errors)
            time.sleep(0.02)

    def wait(self, timeout: float) -> bool:
        """Whether all have ended in time."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _read(self, number: int) -> None:
        inputs = [tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True)]
        inputs.append(tensor("max_tokens", "INT32", 1500))
        message = request("generate", text(f"Tell me about the {self._topic} {number}."), *inputs)
        try:
            for place, _ in enumerate(Stream(self._address, message)):
                if place == 0:
                    with self._lock:
                        self.num_begun += 1
        except Refused as refused:
            with self._lock:
                self.errors.append(str(refused))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("what", "how", "serving_s"),
    [
        *(pytest.param(*fault, id=fault_id(fault)) for fault in FAULTS),
        *(
            pytest.param(*fault, id=fault_id(fault), marks=pytest.mark.long)
            for fault in LONG_FAULTS
        ),
    ],
)
def test_a_fault_ends_streams_with_an_error_and_is_repaired(
    serving: Serving, what: str, how: signal.Signals, serving_s: float
) -> None:
    serving.wait_until_stable(what)
    canary = serving.canary()
    complete(serving, LONG_PROMPT)
    engine, regions = serving.pid_of("engine"), serving.regions()
    assert len(regions) == 4 and {oct(path.stat().st_mode) for path in regions} == {"0o100600"}
    num_children = len(serving.children())
    streams = Streams(serving.grpc, STREAMS)
    streams.wait_until_begun(STREAMS)
    os.kill(serving.pid_of(what), how)
    happened = time.monotonic()
    assert streams.wait(SLOW * ENDS_S[how])
    ended_s = time.monotonic() - happened
    assert len(streams.errors) == STREAMS, "each ended with an error, once"
    serving.wait_until_serving(canary)
    assert time.monotonic() - happened < serving_s
    if (what, how, serving_s) in LONG_FAULTS:
        assert ended_s < ENDS_S[how]
    serving.wait_until(lambda: serving.health()[0] == 200, 5)
    serving.wait_until(lambda: len(serving.children()) == num_children, 10)
    assert not [path for path in regions - serving.regions() if path.exists()]
    if (what, how) == ("llm", signal.SIGSTOP):
        log = serving.log.read_text(errors="replace")
        assert "supervisor: llm: it is stopped" in log
        assert "has a process that hangs, of the model llm" in log
    if what == "engine":
        assert serving.pid_of("engine") != engine
    else:
        assert serving.pid_of("engine") == engine
        assert complete(serving, LONG_PROMPT) > 0, "the prefix cache is warm"


@pytest.mark.alone
@pytest.mark.parametrize("model", ["llm", "tokenizer", "detokenizer"])
def test_a_process_of_a_model_says_where_its_threads_are(serving: Serving, model: str) -> None:
    """As the supervisor asks one that hangs; here it goes on."""
    canary = serving.canary()
    stub = Process.find(serving.pid_of(model))
    assert stub is not None
    found = stacks_of(stub, serving.runtime_folder / f"stub-{stub.pid}.stacks")
    assert any(re.search(r"File .*heartbeat\.py.* in beat$", line) for line in found), found
    serving.wait_until_serving(canary)
    assert serving.pid_of(model) == stub.pid


@pytest.mark.alone
def test_a_door_that_dies_is_replaced_and_its_streams_are_cancelled(serving: Serving) -> None:
    serving.wait_until_stable("http")
    connection = http.client.HTTPConnection(serving.http, timeout=60)
    options = {"max_tokens": 8000, "ignore_eos": True, "stream": True}
    body = json.dumps({"text_input": "Tell me about doors.", **options})
    connection.request("POST", "/v2/models/generate/generate_stream", body)
    with contextlib.closing(connection), connection.getresponse() as response:
        assert response.readline().startswith(b"data: ")
        assert serving.stats().num_running == 1
        os.kill(serving.pid_of("http"), signal.SIGKILL)
        serving.wait_until(lambda: serving.stats().num_running == 0, SLOW * 2.0)
    assert serving.wait_until(lambda: serving.health()[0] == 200, 30) < 20.0


@pytest.mark.alone
def test_readiness_tells_the_truth_while_an_engine_is_replaced(serving: Serving) -> None:
    serving.wait_until_stable("engine")
    assert serving.health()[0] == 200
    os.kill(serving.pid_of("engine"), signal.SIGKILL)
    took = serving.wait_until(lambda: serving.health()[0] == 503, 5)
    assert took < 3.0
    assert "is loading" not in serving.health()[1]
    # Its connections are closed before it has exited.
    serving.wait_until(lambda: "llm was killed by SIGKILL" in serving.health()[1], 1)
    with pytest.raises(Refused, match="503"):
        generate(serving.http, "generate", text_input="x", max_tokens=1)
    serving.wait_until(lambda: serving.health()[0] == 200, 30)
    assert generate(serving.http, "generate", text_input="x", max_tokens=1)["finish_reason"]


def is_replaced(serving: Serving, what: str, victim: int) -> bool:
    try:
        return serving.pid_of(what) != victim
    except LookupError:
        return False


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(7200)
def test_random_kills_are_repaired_without_a_hand(tmp_path: Path) -> None:
    generator = random.Random(7)
    rows: list[dict[str, Any]] = []
    with serve(tmp_path, "echo") as server:
        canary, num_children = server.canary(), len(server.children())
        for number in range(1, NUM_KILLS + 1):
            what, how = generator.choice(VICTIMS), generator.choice(WAYS)
            # Other prompts each time: those of two engines that aborted are quarantined.
            streams = Streams(server.grpc, 8, f"kill {number} and the number")
            streams.wait_until_begun(8)
            time.sleep(generator.random())
            victim = server.pid_of(what)
            os.kill(victim, how)
            happened = time.monotonic()
            # One that is not needed for the canary may be missed a little later than that.
            server.wait_until(
                lambda what=what, victim=victim: is_replaced(server, what, victim), 60
            )
            all_ended = streams.wait(30)
            server.wait_until_serving(canary, 90)
            serving_s = time.monotonic() - happened
            server.wait_until(lambda: server.health()[0] == 200, 30)
            server.wait_until(lambda: len(server.children()) == num_children, 10)
            rows.append(
                {
                    "kill": number,
                    "what": what,
                    "how": how.name,
                    "serving_s": round(serving_s, 2),
                    "all_streams_ended": all_ended,
                    "regions": len(server.regions()),
                    "fds": server.process.num_fds(),
                    "rss_mib": server.process.memory_info().rss >> 20,
                }
            )
            time.sleep(STABLE_S + 0.5)
    assert all(row["all_streams_ended"] for row in rows)
    assert {row["regions"] for row in rows} == {4}
    assert rows[-1]["fds"] <= rows[0]["fds"] + 4
    long_results.write("random-kills", "random kills of a supervised server", rows)


def test_a_drain_finishes_streams_and_leaves_nothing(tmp_path: Path) -> None:
    # On a busy machine, the reader would get all of a faster engine's tokens at once.
    with failpoint("slow", STEP_MS), serve(tmp_path, "echo", "--drain", "60") as server:
        regions = server.regions()
        idle = Stream(server.grpc, request("generate", text("x"), tensor("max_tokens", "INT32", 1)))
        idle.next()
        children = server.children()
        inputs = [tensor("stream", "BOOL", True), tensor("max_tokens", "INT32", 500)]
        busy = Stream(server.grpc, request("generate", text("word " * 600), *inputs))
        first = busy.next()["num_output_tokens"]
        server.process.send_signal(signal.SIGTERM)
        rest = sum(response["num_output_tokens"] for response in busy)
        assert first < 500 and first + rest == 500
        assert server.process.wait(60) == 0
        idle.hang_up()
    wait_until_ended(children)
    assert not [path for path in regions if path.exists()]


@pytest.mark.parametrize("stops_engine", [False, True])
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path, stops_engine: bool) -> None:
    with serve(tmp_path, "echo") as server:
        children = server.children()
        assert len(children) >= 7
        if stops_engine:
            os.kill(server.pid_of("engine"), signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        wait_until_ended(children)
