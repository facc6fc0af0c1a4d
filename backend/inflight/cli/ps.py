"""`inflight ps`: the running servers of this user."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.cli import top
from inflight.errors import EngineError
from inflight.ipc import health
from inflight.ipc.health import UNKNOWN, Health
from inflight.ipc.processes import Process

State = Literal["ready", "not ready", "failing", "no answer"]

PLAIN_WIDTH = 1000  # unfolded lines, for other programs
_STYLES: dict[State, str] = {
    "ready": "green",
    "not ready": "yellow",
    "failing": "red",
    "no answer": "red",
}


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server; of one without an answer, only the pid is known.

    Attributes:
        pid: of `inflight serve`, or of a tritonserver that runs without it.
        state: `failing` if only a restart can help; `no answer` if its supervisor hangs, or if it
            is a tritonserver without one.
        reason: why it is not ready; empty if it is.
        http, grpc, metrics, engine_metrics, gateway: host:port; the last is of OpenAI's API.
        models: those that are ready.
        uptime_s: seconds since its start.
        in_flight: requests that run, wait or are suspended; None if the metrics do not answer.
    """

    pid: int
    state: State
    reason: str = ""
    http: str = ""
    grpc: str = ""
    metrics: str = ""
    engine_metrics: str = ""
    gateway: str = ""
    models: list[str] = []
    uptime_s: float
    in_flight: int | None = None


def running() -> list[RunningServer]:
    """The running servers of this user, by pid."""
    return [_server(pid, found) for pid, found in sorted(health.of_servers().items())]


def show(servers: Sequence[RunningServer], *, as_json: bool) -> None:
    """Print a table, or JSON for programs."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(servers).decode() + "\n")
        return
    if not servers:
        Console(stderr=True).print("no server runs; start one with `inflight serve`")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("PID", "STATE", "HTTP", "GRPC", "OPENAI", "METRICS", "UP", "IN FLIGHT", "MODELS"):
        table.add_column(title, overflow="fold")
    for one in servers:
        table.add_row(*_cells(one))
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(table)


def _server(pid: int, found: Health) -> RunningServer:
    process = Process.find(pid)
    uptime_s = process.age_s() if process is not None else 0.0
    if found == UNKNOWN:
        return RunningServer(pid=pid, state="no answer", reason=UNKNOWN.reason, uptime_s=uptime_s)
    state: State = "ready" if found.is_ready else "not ready" if found.is_live else "failing"
    return RunningServer(
        pid=pid,
        state=state,
        reason=found.reason,
        models=found.models,
        uptime_s=uptime_s,
        in_flight=_in_flight(found.endpoints.get("engine_metrics", "")),
        **found.endpoints,
    )


def _in_flight(address: str) -> int | None:
    try:
        found = top.scrape(f"http://{address}/metrics")
    except EngineError:
        return None
    return top.num_in_flight(found)


def _cells(one: RunningServer) -> tuple[Text | str, ...]:
    state = Text(one.state, style=_STYLES[one.state])
    models = Text(", ".join(one.models) or one.reason)
    in_flight = "" if one.in_flight is None else str(one.in_flight)
    up = duration(one.uptime_s)
    addresses = one.http, one.grpc, one.gateway, one.engine_metrics
    return str(one.pid), state, *addresses, up, in_flight, models


def duration(seconds: float) -> str:
    """In its two largest units, such as `2h 5m`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
