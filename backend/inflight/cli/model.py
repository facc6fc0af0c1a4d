"""`inflight model`: loads, unloads and lists the models of a running server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.ipc import control
from inflight.ipc.control import ListModels, LoadModel, Models, ModelStatus, Progress, UnloadModel


def load(name: str, settings: Mapping[str, Any], *, port: int | None, as_json: bool) -> None:
    """Raises InflightError: it cannot be loaded."""
    _change(LoadModel(control.check_name(name), dict(settings)), port, as_json)


def unload(name: str, *, port: int | None, as_json: bool) -> None:
    """Raises InflightError: it is not loaded, or cannot be unloaded."""
    _change(UnloadModel(control.check_name(name)), port, as_json)


def show(*, port: int | None, as_json: bool) -> None:
    """Raises ConfigError: there is no server with model control, or there are several."""
    _write(control.call(control.find_server(port), ListModels()), as_json)


def _change(request: LoadModel | UnloadModel, port: int | None, as_json: bool) -> None:
    path = control.find_server(port)
    console = Console(stderr=True)
    with console.status("") as status:

        def on_progress(progress: Progress) -> None:
            status.update(Text(f"{progress.what} {progress.fraction:.0%}"))

        found = control.call(path, request, on_progress)
    _write(found, as_json)


def _write(found: Models, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for title in (
        "MODEL",
        "VERSION",
        "STATE",
        "CHECKPOINT",
        "DEVICE",
        "KV BLOCKS FREE",
        "REQUESTS",
    ):
        table.add_column(title)
    for one in found.models:
        table.add_row(*(Text(cell) for cell in _cells(one)))
    Console().print(table)


def _cells(one: ModelStatus) -> tuple[str, ...]:
    if not one.num_blocks:
        return one.name, one.version, one.state, "", "", "", ""
    requests = f"{one.num_running} running, {one.num_waiting} waiting"
    blocks = f"{one.num_free_blocks} of {one.num_blocks}"
    return one.name, one.version, one.state, one.checkpoint, one.device, blocks, requests
