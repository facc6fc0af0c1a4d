"""Models of a running server as they are loaded and unloaded, seen by their clients."""

from __future__ import annotations

import threading
import time

import psutil

from inflight.ipc import control
from inflight.ipc.control import ListModels, Models, ModelStatus
from inflight.ipc.runtime_folder import folder_of
from inflight.supervision.server_metrics import NUM_READERS
from kserve import Refused, Stream, request, tensor, text
from supervised import Serving
from waiting import wait_until

STREAMS = 4
# Of an engine without a model: each response of a stream costs the test's cores a millisecond.
STEP_MS = 50
NUM_TOKENS = 12


def change(serving: Serving, message: control.Request) -> Models:
    return control.call(folder_of(serving.process.pid) / control.SOCKET, message)


def states(serving: Serving) -> dict[str, ModelStatus]:
    return {one.name: one for one in change(serving, ListModels()).models}


class Streams:
    """Streams of an ensemble, one after another on each of some threads, until they are stopped.

    Attributes:
        errors: of streams that did not end in order.
        num_ended: streams that did, with all their tokens.
        gaps: seconds between the responses of a stream.
    """

    def __init__(
        self, serving: Serving, ensemble: str, num_tokens: int = NUM_TOKENS, version: str = ""
    ) -> None:
        self.errors: list[str] = []
        self.num_ended = 0
        self.gaps: list[float] = []
        self._serving = serving
        self._ensemble = ensemble
        self._version = version
        self._num_tokens = num_tokens
        self._is_stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def wait_until_ended(self, number: int) -> None:
        wait_until(lambda: self.num_ended >= number or self.errors)

    def stop(self) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join()

    def take_gaps(self) -> list[float]:
        with self._lock:
            found, self.gaps = self.gaps, []
        return found

    def _run(self) -> None:
        inputs = [tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True)]
        inputs.append(tensor("max_tokens", "INT32", self._num_tokens))
        message = request(self._ensemble, text("word " * 50), *inputs, version=self._version)
        while not self._is_stopping.is_set():
            num_tokens = 0
            try:
                before = None
                for response in Stream(self._serving.grpc, message):
                    now = time.monotonic()
                    if before is not None:
                        with self._lock:
                            self.gaps.append(now - before)
                    before = now
                    num_tokens += response["num_output_tokens"]
                assert num_tokens == self._num_tokens, num_tokens
            except (Refused, AssertionError) as error:
                with self._lock:
                    self.errors.append(str(error))
                return
            with self._lock:
                self.num_ended += 1


EXACT = ("processes", "regions", "files")
_SETTLED = 3
_PAUSE_S = 0.25


def footprint(serving: Serving) -> dict[str, int]:
    """What a model that has come and gone must leave as it was, once nothing ends any more."""
    samples = [_sample(serving)]

    def is_settled() -> bool:
        time.sleep(_PAUSE_S)
        samples.append(_sample(serving))
        last = samples[-_SETTLED:]
        return len(last) == _SETTLED and all(
            one[name] == last[0][name] for one in last for name in EXACT
        )

    wait_until(is_settled)
    return samples[-1]


def _sample(serving: Serving) -> dict[str, int]:
    tritonserver = psutil.Process(serving.pid_of("tritonserver"))
    return {
        "processes": len(serving.children()),
        "regions": len(serving.regions()),
        "files": sum(1 for _ in folder_of(serving.process.pid).rglob("*")),
        "tritonserver_fds": tritonserver.num_fds(),
        "tritonserver_threads": tritonserver.num_threads(),
        "tritonserver_mib": tritonserver.memory_info().rss >> 20,
        "supervisor_fds": serving.process.num_fds(),
        "supervisor_threads": serving.process.num_threads(),
        "supervisor_mib": serving.process.memory_info().rss >> 20,
    }


def check_footprint(first: dict[str, int], last: dict[str, int]) -> None:
    assert {name: last[name] for name in EXACT} == {name: first[name] for name in EXACT}
    for name in ("tritonserver_fds", "tritonserver_threads", "supervisor_fds"):
        assert last[name] <= first[name] + 4, (first, last)
    # Those that read metrics are started as they are needed.
    assert last["supervisor_threads"] <= first["supervisor_threads"] + NUM_READERS, (first, last)
    assert last["supervisor_mib"] <= first["supervisor_mib"] + 16, (first, last)
    assert last["tritonserver_mib"] <= first["tritonserver_mib"] + 32, (first, last)
