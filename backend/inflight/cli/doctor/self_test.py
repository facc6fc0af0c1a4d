"""`inflight doctor --self-test`: starts a server, sends it requests, stops it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inflight.cli import top
from inflight.cli.doctor.check import Check
from inflight.cli.server_process import ServerProcess
from inflight.deploy.checks.triton_version import TESTED, TritonVersion
from inflight.deploy.log_files import state_folder
from inflight.errors import EngineError, InflightError
from inflight.ipc.health import Health
from inflight_client import Client, ClientError, InvalidRequest

# Since the start: until the server is ready, until the last request, until the server has stopped.
READY_BY_S = 42.0
ANSWERED_BY_S = 50.0
STOPPED_BY_S = 58.0
DRAIN_S = 2.0
POLL_S = 0.1

PROMPT = "The capital of France is"
NUM_TOKENS = 8
# Long enough not to end before it is cancelled; must fit into the model's context.
CANCELLED_TOKENS = 256
BAD_TEMPERATURE = -1.0


_SEE_LOG = "see the log self-test.log in ~/.local/state/inflight"


class Failed(Exception):
    """A request was not answered as it should be."""


def examine(
    repositories: Sequence[Path] | None = None,
    on_check: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """All checks, up to the first one without which the others mean nothing.

    Args:
        repositories: model repositories to serve; None for the demo model.
        on_check: called with what is checked next.
    """
    log_file = state_folder() / "self-test.log"
    arguments = [f"--drain={DRAIN_S:g}", f"--log-file={log_file}"]
    arguments += [f"--repository={path}" for path in repositories or ()]
    checks: list[Check] = []
    try:
        with ServerProcess(arguments) as server:
            on_check("start")
            started = time.monotonic()
            health = server.wait_ready(READY_BY_S)
            models = ", ".join(health.models)
            checks.append(Check("start", "ok", f"{_seconds_since(started)}: {models}"))
            checks += Requests(health, started + ANSWERED_BY_S).checks(on_check)
            on_check("stop")
            checks.append(_stop(server, started + STOPPED_BY_S - time.monotonic()))
    except InflightError as error:
        checks.append(Check("start", "broken", str(error), f"{_SEE_LOG}, or run: inflight serve"))
    return checks


def _stop(server: ServerProcess, timeout_s: float) -> Check:
    started = time.monotonic()
    try:
        status = server.stop(timeout_s)
    except EngineError as error:
        return Check("stop", "broken", str(error), _SEE_LOG)
    if status:
        return Check("stop", "broken", f"exit status {status} after SIGTERM", _SEE_LOG)
    return Check("stop", "ok", _seconds_since(started))


class Requests:
    """Requests to a server, each a check.

    Args:
        health: the server's.
        deadline: of all requests, in time.monotonic().
    """

    def __init__(self, health: Health, deadline: float) -> None:
        self._http = health.endpoints["http"]
        self._grpc = health.endpoints["grpc"]
        self._metrics = f"http://{health.endpoints['engine_metrics']}/metrics"
        self._deadline = deadline
        self._ensemble = next(
            (name for name in health.models if name == "generate" or name.endswith("_generate")), ""
        )

    def checks(self, on_check: Callable[[str], None]) -> Iterator[Check]:
        steps: dict[str, Callable[[], str]] = {"Triton": self._version, "metrics": self._scrape}
        if self._ensemble:
            steps |= {
                "HTTP": self._http_unary,
                "HTTP stream": self._http_stream,
                "HTTP error": self._http_error,
                "gRPC": self._grpc_unary,
                "gRPC stream": self._grpc_stream,
                "gRPC error": self._grpc_error,
                "cancel": self._cancel,
            }
        for name, step in steps.items():
            on_check(name)
            started = time.monotonic()
            try:
                found = step()
            except (Failed, ClientError, InflightError, OSError, http.client.HTTPException) as why:
                yield Check(name, "broken", str(why) or type(why).__name__, _SEE_LOG)
            else:
                yield Check(name, "ok", f"{found} in {_seconds_since(started)}")
        if not self._ensemble:
            yield Check("requests", "note", "no ensemble `generate`", "the model has no tokenizer")

    # Over HTTP

    def _version(self) -> str:
        body = self._ask("GET", "/v2", None)
        version = TritonVersion.parse(str(json.loads(body).get("version", "")))
        if version is None:
            raise Failed(f"/v2 has no version: {_cut(body)}")
        tested = "" if version[:2] == TESTED[:2] else f" (tested: {TESTED})"
        return f"{version}{tested}"

    def _http_unary(self) -> str:
        body = self._ask("POST", self._path("generate"), _inputs())
        answer = json.loads(body)
        if not answer.get("text_output"):
            raise Failed(f"no text_output: {_cut(body)}")
        return _tokens(answer.get("num_output_tokens"))

    def _http_stream(self) -> str:
        body = self._ask("POST", self._path("generate_stream"), _inputs(stream=True))
        lines = [line for line in body.decode().splitlines() if line.startswith("data:")]
        events = [json.loads(line.removeprefix("data:")) for line in lines]
        failure = next((one["error"] for one in events if "error" in one), None)
        if failure is not None:
            raise Failed(str(failure))
        if not "".join(str(one.get("text_output", "")) for one in events):
            raise Failed(f"no text in {len(events)} events")
        return f"{len(events)} events"

    def _http_error(self) -> str:
        inputs = _inputs(temperature=BAD_TEMPERATURE)
        body = self._ask("POST", self._path("generate"), inputs, status=400)
        return _names_the_tensor(str(json.loads(body).get("error", "")))

    def _path(self, verb: str) -> str:
        return f"/v2/models/{self._ensemble}/{verb}"

    def _ask(self, method: str, path: str, inputs: Any, *, status: int = 200) -> bytes:
        """A response's body. Raises Failed: it has another status."""
        connection = http.client.HTTPConnection(self._http, timeout=self._seconds_left())
        try:
            body = None if inputs is None else json.dumps(inputs)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            found = response.read()
        finally:
            connection.close()
        if response.status != status:
            raise Failed(f"status {response.status}, expected {status}: {_cut(found)}")
        return found

    # Over gRPC

    def _client(self) -> Client:
        return Client(self._grpc, generate_model=self._ensemble, timeout=self._seconds_left())

    def _grpc_unary(self) -> str:
        with self._client() as client:
            found = client.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        if not found.text:
            raise Failed("no text_output")
        return _tokens(found.num_output_tokens)

    def _grpc_stream(self) -> str:
        with (
            self._client() as client,
            client.stream(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True) as stream,
        ):
            deltas = list(stream)
        if not "".join(delta.text for delta in deltas):
            raise Failed(f"no text in {len(deltas)} responses")
        return f"{len(deltas)} responses"

    def _grpc_error(self) -> str:
        with self._client() as client:
            try:
                client.generate(PROMPT, max_tokens=1, temperature=BAD_TEMPERATURE)
            except InvalidRequest as error:
                return _names_the_tensor(str(error))
        raise Failed(f"temperature {BAD_TEMPERATURE:g} was accepted")

    def _cancel(self) -> str:
        """Leave a stream after its first response: the engine aborts the request and is idle."""
        before = _num_aborted(top.scrape(self._metrics))
        with (
            self._client() as client,
            client.stream(PROMPT, max_tokens=CANCELLED_TOKENS, ignore_eos=True) as stream,
        ):
            next(stream)
        while True:
            now = top.scrape(self._metrics)
            if _num_aborted(now) > before and not top.num_in_flight(now):
                break
            if time.monotonic() + POLL_S > self._deadline:
                raise Failed("the engine did not abort the request")
            time.sleep(POLL_S)
        return "the engine is idle"

    # Metrics

    def _scrape(self) -> str:
        num_series = sum(map(len, top.scrape(self._metrics).models.values()))
        return f"{num_series} series"

    def _seconds_left(self) -> float:
        """Raises Failed: none."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise Failed(f"not done {ANSWERED_BY_S:g} s after the server was started")
        return seconds


def _num_aborted(found: top.Scrape) -> float:
    key = "request_success_total", ("abort",)
    return sum(series.get(key, 0.0) for series in found.models.values())


def _inputs(**options: Any) -> dict[str, Any]:
    return {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}


def _names_the_tensor(error: str) -> str:
    """The error. Raises Failed: it does not name the tensor at fault."""
    if "temperature" not in error:
        raise Failed(f"the error does not name the tensor `temperature`: {error}")
    return f"refused ({error})"


def _tokens(count: Any) -> str:
    if count != NUM_TOKENS:
        raise Failed(f"{count} output tokens, expected {NUM_TOKENS}")
    return f"{count} tokens"


def _cut(body: bytes) -> str:
    return body[:200].decode(errors="replace")


def _seconds_since(started: float) -> str:
    return f"{time.monotonic() - started:.2f} s"
