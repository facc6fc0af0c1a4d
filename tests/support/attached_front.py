"""A front that is attached to a real engine process, without tritonserver."""

from __future__ import annotations

import json
import os
import queue
from pathlib import Path

from inflight.core.request import Request, TokenEvent
from inflight.ipc import engine_client
from inflight.ipc.engine_client import EngineClient
from inflight.ipc.owner import Owner
from inflight.sampling.params import SamplingParams
from waiting import PATIENCE_S

UNSUPERVISED = Owner(os.getpid(), is_supervisor=False)


def write_config(directory: Path, **settings: object) -> None:
    (directory / "1").mkdir(parents=True, exist_ok=True)
    (directory / "1" / "engine.json").write_text(json.dumps(settings))


class Front:
    """An attached front that collects its events."""

    def __init__(self, model_directory: Path, owner: Owner = UNSUPERVISED) -> None:
        self.events: queue.Queue[TokenEvent | None] = queue.Queue()
        self.delivered: queue.Queue[tuple[int, int]] = queue.Queue()
        self.client: EngineClient = engine_client.attach_front(
            model_directory,
            owner,
            self._take,
            lambda: self.events.put(None),
            lambda progress: [self.delivered.put(one) for one in progress],
        )

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events.put(event)

    def submit(self, prompt: list[int], **params: object) -> int:
        request_id = self.client.new_request_id()
        self.client.submit(Request(request_id, prompt, SamplingParams(**params)))  # type: ignore[arg-type]
        return request_id

    def finish(self, request_id: int) -> list[TokenEvent]:
        """This request's events up to its last."""
        mine = []
        while not mine or not mine[-1].is_last:
            event = self.events.get(timeout=PATIENCE_S)
            assert event is not None, "the engine went away"
            if event.request_id == request_id:
                mine.append(event)
        return mine

    def ends(self, count: int) -> dict[int, TokenEvent]:
        """The next `count` last events, by request."""
        found: dict[int, TokenEvent] = {}
        while len(found) < count:
            event = self.events.get(timeout=30)
            assert event is not None, "the engine went away"
            if event.is_last:
                found[event.request_id] = event
        return found


def running_engines(model_directory: Path) -> list[int]:
    path = str(engine_client.socket_path(model_directory, os.getpid()))
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if path.encode() in command:
            found.append(int(process.name))
    return found
