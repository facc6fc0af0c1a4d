"""`inflight serve`: runs a server in the foreground, shows its state and handles signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from inflight import log
from inflight.access import audit, tls
from inflight.access.options import AccessOptions
from inflight.cli.options import AccessFiles, ServedModels
from inflight.deploy import repository
from inflight.deploy.model_group import ALL_MODELS
from inflight.deploy.ports import is_loopback
from inflight.deploy.tritonserver.server import POLL_S
from inflight.supervision.notify import notify
from inflight.supervision.orphans import adopt_orphans, kill_children
from inflight.supervision.supervisor import Supervisor


def set_log_format(name: str | None) -> None:
    """Set the log format of all processes. Raises ConfigError: the format is unknown."""
    if name is not None:
        os.environ[log.FORMAT_VARIABLE] = name
        log.formatter()


def controlled_models(model_control: bool, names: list[str] | None) -> Sequence[str] | None:
    """As in `ServeOptions`, from --model-control and --load-model."""
    if names and not model_control:
        raise typer.BadParameter("--load-model requires --model-control")
    return (names or ALL_MODELS) if model_control else None


def model_of(models: ServedModels) -> str | None:
    """The model to serve; None for what the repositories have."""
    if models.checkpoint is not None and models.model is not None:
        raise typer.BadParameter("MODEL and --model are the same; give one of them")
    return models.checkpoint if models.checkpoint is not None else models.model


@contextlib.contextmanager
def repositories(models: ServedModels, settings: dict[str, Any]) -> Iterator[list[Path]]:
    """The model repositories to serve; one for a model, with these settings, lasts for the `with`
    block. Settings, or a layout, without a model or a repository are for the demo model.

    Raises:
        ConfigError: the model or a setting is not supported.
    """
    given, model = models.repository, model_of(models)
    is_default = not settings and models.layout == "native" and not models.unary
    if given and model is not None:
        raise typer.BadParameter("MODEL and --repository are mutually exclusive")
    if given and settings:
        raise typer.BadParameter(
            "--set requires a MODEL; a repository has its settings in engine.json"
        )
    if given and not is_default:
        raise typer.BadParameter("--layout and --unary require a MODEL; a repository has a layout")
    if model is None and is_default:
        yield given or repository.shipped()
        return
    if model is None:
        model = repository.shipped_model()
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        made = repository.init(
            model, Path(folder), settings=settings, layout=models.layout, unary=models.unary
        )
        for note in made.notes:
            typer.echo(note, err=True)
        yield [made.path]


def access_of(files: AccessFiles) -> AccessOptions:
    """Of the options of the command line. Raises ConfigError: some of them are missing."""
    paths = (files.tls_cert, files.tls_key, files.tls_client_ca)
    found = tls.chosen(*(str(path) if path is not None else None for path in paths))
    if files.keys is None:
        return AccessOptions(tls=found)
    return AccessOptions(keys=str(files.keys), audit=str(audit.default_path()), tls=found)


def exposure(address: str, access: AccessOptions) -> str:
    """A warning about a server that others can use; empty if there is no reason for one.

    Args:
        address: host:port that it listens on.
    """
    host = address.rpartition(":")[0]
    if is_loopback(host):
        return ""
    if access.keys is None:
        return f"all who can reach {host} can use the server; restrict it with --keys"
    if access.tls is None:
        return "keys are sent without encryption; use --tls-cert, or a proxy that ends TLS"
    return ""


def run(supervisor: Supervisor, *, verbose: bool = False) -> int:
    """Serve until Ctrl-C or SIGTERM, which drain; a second one stops immediately.

    Returns:
        The exit status: 0 after a requested stop.

    Raises:
        InflightError: the server does not start, with the reason.
    """
    adopt_orphans()
    with _Signals() as signals, _log_to(supervisor.log_file):
        follower = _Follower(supervisor.log_file) if verbose else None
        try:
            return _serve(supervisor, signals)
        finally:
            supervisor.kill()
            kill_children()
            if follower is not None:
                follower.close()


def _serve(supervisor: Supervisor, signals: _Signals) -> int:
    from inflight.cli.display import Display

    display = Display()
    with display.loading() as on_progress:
        models = supervisor.start(on_progress)
    signals.count_only()
    exposed = exposure(supervisor.endpoints.http, supervisor.options.access)
    if exposed:
        display.warning(exposed)
    display.ready(
        supervisor.endpoints,
        models,
        supervisor.devices(),
        supervisor.log_file,
        supervisor.options.access,
        has_page=supervisor.options.serves_page,
    )
    notify("READY=1")
    while signals.count == 0:
        health = supervisor.poll()
        display.health(health)
        if health.is_live:
            notify("WATCHDOG=1")
        time.sleep(POLL_S)
    signals.raise_on_next()
    notify("STOPPING=1")
    display.stopping()
    try:
        num_cut = supervisor.stop(display.waiting)
    except KeyboardInterrupt:
        display.stopped_at_once()
    else:
        display.stopped(num_cut)
    return 0


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Write what the supervisor reports into the server's log; `Display` shows the outcome."""
    logging.raiseExceptions = False  # a full disk is no reason for tracebacks on the terminal
    handler = logging.FileHandler(path)
    handler.setFormatter(log.formatter("supervisor:"))
    logger = logging.getLogger("inflight.supervisor")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


class _Signals:
    """Counts SIGINT and SIGTERM; raises before the server is ready, and from the second one on."""

    def __init__(self) -> None:
        self.count = 0
        self._raise = True
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def count_only(self) -> None:
        self._raise = False

    def raise_on_next(self) -> None:
        self._raise = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._raise:
            raise KeyboardInterrupt


class _Follower:
    """Prints a file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _follow(self) -> None:
        with open(self._path, errors="replace") as file:
            while True:
                ended = self._done.wait(POLL_S)
                sys.stderr.write(file.read())
                sys.stderr.flush()
                if ended:
                    return
