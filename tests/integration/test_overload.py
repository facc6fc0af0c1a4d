"""A server with three times the requests that it takes refuses the surplus, and serves the rest as
fast as before."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import long_results
import overload as benchmark
from failpoint import FOLDER, failpoint
from kserve import Refused, ask, post, request, tensor, text
from supervised import Serving, serve

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(240)]

# The time of a step, not that of the machine, bounds what the server takes.
STEP_MS = 40
RUNNING, WAITING = 8, 8
NUM_TOKENS = 5
# As many as the server takes at an instant, whichever of them runs.
PEAK = RUNNING
OVERLOAD = 3 * (RUNNING + WAITING)
# A client that is refused tries again, as Retry-After says.
PAUSE_S = 1.0
REFUSED = "requests are waiting"
SHORT_S, LONG_S = 3.0, 60.0
NORMAL_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with failpoint("slow", STEP_MS):
        folder = tmp_path_factory.mktemp("overload")
        with serve(folder, "echo", max_num_seqs=RUNNING, max_waiting=WAITING) as found:
            yield found


class Load:
    """Clients that each send one request after another, for some seconds.

    Attributes:
        latencies: seconds of the requests that were served.
        refusals: seconds until a refusal.
        texts: of refusals, and how often.
    """

    def __init__(self, serving: Serving, num_clients: int, seconds: float) -> None:
        self.latencies: list[float] = []
        self.refusals: list[float] = []
        self.texts: Counter[str] = Counter()
        self.seconds = seconds
        self._serving = serving
        self._lock = threading.Lock()
        self._until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._run) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def goodput(self) -> float:
        """Requests served per second."""
        return len(self.latencies) / self.seconds

    def _run(self) -> None:
        tokens = tensor("max_tokens", "INT32", NUM_TOKENS)
        message = request("generate", text("one two three four five six seven eight nine"), tokens)
        while time.monotonic() < self._until:
            started = time.monotonic()
            try:
                (answer,) = ask(self._serving.grpc, message)
                assert answer["num_output_tokens"] == NUM_TOKENS
                took, refusal = time.monotonic() - started, ""
            except Refused as error:
                took, refusal = time.monotonic() - started, str(error)
            with self._lock:
                (self.refusals if refusal else self.latencies).append(took)
                self.texts.update([refusal] if refusal else [])
            if refusal:
                time.sleep(PAUSE_S)


def overload(serving: Serving, seconds: float) -> dict[str, float]:
    """A load that the server takes, three times as much, and the first one again."""
    peak = Load(serving, PEAK, seconds)
    assert peak.refusals == []
    over = Load(serving, OVERLOAD, seconds)
    ended = time.monotonic()
    normal = Load(serving, PEAK, SHORT_S)
    assert normal.refusals == []
    assert over.refusals
    assert all(REFUSED in refusal for refusal in over.texts), over.texts
    assert over.goodput >= 0.9 * peak.goodput
    # One queue's length is ahead of a request, and one is running.
    assert statistics.median(over.latencies) <= 3 * statistics.median(peak.latencies)
    # No refused request waits for a place.
    assert statistics.median(over.refusals) <= statistics.median(over.latencies)
    while statistics.median(normal.latencies) > 1.5 * statistics.median(peak.latencies):
        assert time.monotonic() - ended < NORMAL_WITHIN_S + SHORT_S
        normal = Load(serving, PEAK, SHORT_S)
    return {
        "clients": OVERLOAD,
        "peak_per_s": round(peak.goodput, 1),
        "goodput_per_s": round(over.goodput, 1),
        "refused": len(over.refusals),
        "refused_median_ms": round(1e3 * statistics.median(over.refusals), 1),
        "peak_median_ms": round(1e3 * statistics.median(peak.latencies), 1),
        "overload_median_ms": round(1e3 * statistics.median(over.latencies), 1),
        "after_median_ms": round(1e3 * statistics.median(normal.latencies), 1),
    }


def test_the_surplus_is_refused_and_the_rest_is_served_as_before(serving: Serving) -> None:
    print(overload(serving, SHORT_S))


def test_a_refusal_over_http_is_503_with_a_retry(serving: Serving) -> None:
    statuses: Counter[int] = Counter()
    replies: list[str] = []
    lock = threading.Lock()

    def send() -> None:
        inputs = {"text_input": "one two three four five six seven eight nine", "max_tokens": 8}
        status, reply = post(serving.http, "generate", "generate", inputs)
        with lock:
            statuses[status] += 1
            if status != 200:
                replies.append(reply)

    threads = [threading.Thread(target=send) for _ in range(OVERLOAD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 503} and statuses[200] >= RUNNING
    assert all(REFUSED in reply and "retry" in reply for reply in replies), replies


def test_poisson_arrivals_at_three_times_the_peak_leave_the_goodput(tmp_path: Path) -> None:
    """The benchmark of it, with perf_analyzer's open loop over gRPC streams."""
    written = tmp_path / "result.json"
    folders = [str(FOLDER), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(folders),
        "FAILPOINT": f"slow:{STEP_MS}",
    }
    done = subprocess.run(
        [
            *(sys.executable, benchmark.__file__, "--device", "echo", "--seconds", "6"),
            *("--probes", "5", "--output", str(NUM_TOKENS), "--result", str(written)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(written.read_text())["rows"]
    (over,) = (row for row in rows if row["row"] == "overload")
    assert over["refused"] > over["seconds"] * over["sent_per_s"] / 2
    assert over["verdict"] == "must", over
    assert over["ready_checks"] > 3
    # A refusal waits for the end of a step.
    assert over["refusal_p50_ms"] < over["ttft_p50_ms"] / 2, over


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_minute_of_overload_changes_nothing(serving: Serving) -> None:
    engine = serving.pid_of("engine")
    row = overload(serving, LONG_S)
    assert serving.pid_of("engine") == engine
    long_results.write("overload", "three times the requests that a server takes", [row])
