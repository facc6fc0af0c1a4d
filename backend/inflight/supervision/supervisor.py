"""Keeps a server running: tritonserver, the engines and the doors, each replaced when it exits or
hangs. The engines, and with them the prefix cache, outlive tritonserver.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from inflight.access import ledger
from inflight.core.model_version import split_version
from inflight.deploy.catalog import Catalog
from inflight.deploy.checks.engine import check_engine
from inflight.deploy.core_dumps import forbid_core_dumps
from inflight.deploy.file_limit import raise_file_limit
from inflight.deploy.log_files import cap_log, default_log_file
from inflight.deploy.metrics import MetricsServer
from inflight.deploy.model_group import ALL_MODELS
from inflight.deploy.ports import HeldPorts
from inflight.deploy.tritonserver.endpoints import Endpoints
from inflight.deploy.tritonserver.server import OnProgress, Server
from inflight.engine.metrics.families import COMPAT_VARIABLE, parse_compat
from inflight.errors import EngineError
from inflight.ipc import health
from inflight.ipc.cleanup import janitor
from inflight.ipc.control import SOCKET
from inflight.ipc.gpu import power
from inflight.ipc.health import Health
from inflight.ipc.owner import Owner
from inflight.ipc.runtime_folder import folder_of, remove_abandoned, remove_folder_of
from inflight.supervision.doors import DoorChild
from inflight.supervision.engine_set import EngineSet
from inflight.supervision.host_memory import HostMemory
from inflight.supervision.keeper import Child, Keeper
from inflight.supervision.models.control_socket import ControlSocket
from inflight.supervision.models.fleet import ServerFleet
from inflight.supervision.models.main_thread import MainThread
from inflight.supervision.models.model_control import ModelControl
from inflight.supervision.options import ServeOptions
from inflight.supervision.orphans import reap_orphans
from inflight.supervision.server_metrics import ServerMetrics
from inflight.supervision.service_child import ServiceChild, close_all
from inflight.supervision.triton_child import TritonChild

logger = logging.getLogger("inflight.supervisor")

MAX_START_RETRIES = 2
HEALTH_INTERVAL_S = 0.5
START_POLL_S = 0.02  # the users of a server wait for its start
# Requests in flight have ended by then, or their time is over.
DOOR_DRAIN_S = 1.0
LOOPBACK = "127.0.0.1"
ACCOUNTS_SOCKET = "accounts.sock"


class Supervisor:
    """A server in the foreground: `start`, then `poll` several times a second, then `stop`.

    HTTP always passes a door. gRPC passes one if the server listens beyond loopback or checks who
    its clients are; otherwise clients reach tritonserver itself.

    Args:
        repositories: model repositories; model names must be unique across all of them.
        options: see `ServeOptions`.

    Attributes:
        options: as given.
        endpoints: the clients' addresses.
        health: as last written.

    Raises:
        ConfigError: a port is in use, the host is not an address of this machine, or an option is
            not supported.
    """

    def __init__(self, repositories: Sequence[Path], options: ServeOptions | None = None) -> None:
        self.options = options = options or ServeOptions()
        options.check()
        owner = Owner(os.getpid(), is_supervisor=True)
        remove_abandoned()
        raise_file_limit()
        forbid_core_dumps()
        host = options.host
        # With keys, the HTTP door serves metrics, to admins.
        metrics_host = host if options.access.keys is None else LOOPBACK
        has_gateway = options.gateway_port is not None
        hosts = (host, host, metrics_host, metrics_host, host)[: 4 + has_gateway]
        self._held_ports = HeldPorts(hosts, options.all_ports)
        ports = self._held_ports.numbers
        self.endpoints = Endpoints(*(f"{a}:{port}" for a, port in zip(hosts, ports, strict=True)))
        self.log_file = options.log_file or default_log_file(ports[0])
        compat = options.metrics_compat
        self._folder = folder_of(owner.pid)
        self._catalog = Catalog(repositories, self._folder / "versions")
        has_versions = bool(self._catalog.versioned)
        guards_grpc = options.guards_grpc(has_versions=has_versions)
        self._server = Server(
            self._catalog.repositories,
            host=(LOOPBACK, LOOPBACK if guards_grpc else host, metrics_host),
            ports=(0, 0 if guards_grpc else ports[1], ports[2]),
            log_file=self.log_file,
            drain_s=options.drain_s,
            owner=owner,
            environment={COMPAT_VARIABLE: compat} if compat else {},
            controls_models=options.controlled is not None or has_versions,
        )
        self._server.check_repositories()
        self._triton = TritonChild(self._server, owner)
        self._main = MainThread()
        self._engines = EngineSet(owner, self.log_file, are_replaced=options.controlled is not None)
        self._models: list[str] = []
        self._versions: dict[str, list[int]] = {}
        self._control: ControlSocket | None = None
        self._fleet = self._begin_control()
        self._add_engines()
        self._accountants = [self._accountant()] if options.access.keys is not None else []
        self._doors = [self._door(kind) for kind in ("http", "grpc")[: 1 + guards_grpc]]
        workers = range(1, options.gateway_workers if has_gateway else 1)
        self._doors += [self._door("gateway", number) for number in workers]
        children: list[Child] = [*self._accountants, self._triton, *self._doors]
        self._own_keepers = [Keeper(child) for child in children]
        gpu = power.find_gpu()
        self._meter = power.PowerMeter(gpu) if gpu is not None else None
        self._memory = HostMemory(options.min_free_memory << 20)
        self._was_short = False
        self._metrics = self._make_metrics()
        self._metrics_address = metrics_host, ports[3]
        self._metrics_server: MetricsServer | None = None
        self._server.open_log(anew=True).close()
        self._janitor: subprocess.Popen[bytes] | None = None
        self._is_draining = False
        self._written_at = 0.0
        self._health_problem = ""
        self.health = health.UNKNOWN

    @property
    def _keepers(self) -> list[Keeper]:
        return [*self._engines.keepers, *self._own_keepers]

    @property
    def num_restarts(self) -> dict[str, int]:
        """By the child's name."""
        return {keeper.child.name: keeper.num_restarts for keeper in self._keepers}

    def start(self, on_progress: OnProgress = lambda model, loading: None) -> list[str]:
        """Start everything; returns the names of the models once all are ready.

        Args:
            on_progress: called with a model's name and its engine's progress, on other threads.

        Raises:
            InflightError: something does not start, with the reason.
        """
        self._server.hold_ports()
        self._metrics_server = MetricsServer(self._metrics_address, self._metrics.render)
        if self._meter is not None:
            self._meter.start()
        self._janitor = janitor.start(self._folder)
        for keeper in self._keepers:
            keeper.start()
        self._set_models(self._wait_until_loaded(on_progress))
        self._triton.probe_now()
        for door in self._doors:
            door.wait_until_it_listens()
        while not self._is_up:
            self.poll()
            time.sleep(START_POLL_S)
        self.poll()
        if self._fleet is not None and self.options.controlled is not None:
            control = ModelControl(self._catalog, self._fleet, self._folder, self._server.drain_s)
            self._control = ControlSocket(self._folder / SOCKET, control, self.endpoints.http)
        return self._models

    def _wait_until_loaded(self, on_progress: OnProgress) -> list[str]:
        """The models of tritonserver once it has loaded them.

        One that a signal ends is started again: Triton 2.51 can abort while the processes of its
        models start ("lock_exception", seen under load).
        """
        (keeper,) = (one for one in self._own_keepers if one.child is self._triton)
        while True:
            try:
                return self._server.wait_ready(on_progress=on_progress, on_poll=self._poll_start)
            except EngineError:
                status = self._server.exit_status()
                if status is None or status >= 0 or keeper.num_restarts == MAX_START_RETRIES:
                    raise
                keeper.poll()

    def _poll_start(self) -> None:
        """Raises EngineError: an engine does not load, in time."""
        self._write_health()
        for engine in self._engines.serving:
            stalled = engine.why_stalled()
            if stalled:
                raise EngineError(f"{engine.name} {stalled}; log: {self.log_file}")

    def poll(self) -> Health:
        """Replace what has failed; returns the current health."""
        self._main.make_calls()
        for keeper in self._keepers:
            keeper.poll()
        own = {keeper.child.pid for keeper in self._keepers} | self._engines.pids
        reap_orphans(own | ({self._janitor.pid} if self._janitor is not None else set()))
        self._watch_memory()
        found = self._assess()
        self._metrics.observe(found)
        if self._is_up:  # also while memory is short
            for keeper in self._keepers:
                keeper.serves()
        if found != self.health or time.monotonic() - self._written_at > HEALTH_INTERVAL_S:
            self._write_health()
            cap_log(self._server.log_file)
        return found

    def _watch_memory(self) -> None:
        """Have the engines refuse requests while memory is short: not all pass a door."""
        if not self._memory.poll():
            return
        shortage = self._memory.shortage
        if bool(shortage) != self._was_short:
            logger.error("%s", shortage or "enough memory is available again")
        if shortage or self._was_short:
            for engine in self._engines.serving:
                if engine.client is not None:
                    engine.client.drain(shortage)
        self._was_short = bool(shortage)

    def stop(self, on_waiting: Callable[[int], None] = lambda num_in_flight: None) -> int:
        """Drain and end everything; returns the number of aborted requests."""
        self._is_draining = True
        self._main.close()
        self._write_health()
        num_cut = self._server.drain(on_waiting, self._write_health)
        close_all(self._doors)
        self._triton.close()
        self._server.end()
        self._engines.end_all()
        close_all(self._accountants)  # after the last report of usage
        self._leave()
        return num_cut

    def kill(self) -> None:
        """End everything immediately."""
        self._triton.close()
        self._main.close()
        for keeper in self._own_keepers:
            keeper.stop()
        self._engines.kill_all()
        self._leave()

    def _leave(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None
        self._metrics.close()
        if self._meter is not None:
            self._meter.close()
        self._server.release_ports()
        self._held_ports.release()
        remove_folder_of(os.getpid())
        process, self._janitor = self._janitor, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def devices(self) -> dict[str, str]:
        """Description of the device of each model with an engine, by model name."""
        return {
            engine.model.name: engine.client.welcome.device
            for engine in self._engines.serving
            if engine.client is not None
        }

    def _add_engines(self) -> None:
        """Raises ConfigError: one of them cannot load."""
        for model in self._server.models_with_engine:
            check_engine(model)
            self._engines.add(model)

    def _begin_control(self) -> ServerFleet | None:
        """None if Triton loads all models itself. Raises ConfigError: the repositories lack one
        of the models to load."""
        names = self.options.controlled
        if names is None and not self._catalog.versioned:
            return None
        fleet = ServerFleet(
            self._engines,
            self._triton,
            self._server,
            self._main,
            self._catalog.others,
            self._set_models,
            self._write_health,
        )
        fleet.set_loaded(self._catalog.select(ALL_MODELS if names is None else names))
        return fleet

    def _set_models(self, names: list[str]) -> None:
        """Of the models in Triton that clients can reach."""
        versions: dict[str, list[int]] = {name: [] for name in self._catalog.versioned}
        models = set()
        for name in names:
            model, version = split_version(name)
            models.add(model)
            if version is not None:
                versions[model] = sorted([*versions.get(model, []), version])
        self._models, self._versions = sorted(models), versions

    def _make_metrics(self) -> ServerMetrics:
        return ServerMetrics(
            lambda: self._keepers,
            lambda: self._engines.serving,
            self._folder,
            parse_compat(self.options.metrics_compat, "--metrics-compat"),
            self._memory,
            self._meter,
        )

    def _accountant(self) -> ServiceChild:
        options = ("--listen", self._folder / ACCOUNTS_SOCKET, "--ledger", ledger.default_path())
        return ServiceChild(
            "the accountant",
            "inflight.access.accountant",
            heartbeat=self._folder / "accountant.beat",
            log_file=self.log_file,
            options=[str(option) for option in options],
        )

    def _door(self, kind: str, number: int = 0) -> DoorChild:
        access = self.options.access
        if access.keys is not None:
            accounts = str(self._folder / ACCOUNTS_SOCKET)
            access = msgspec.structs.replace(access, accounts=accounts)
        options = ["--drain", str(DOOR_DRAIN_S), *access.arguments()]
        if kind == "http" and access.keys is not None:
            options += ["--metrics", self.endpoints.engine_metrics]
        if kind != "grpc":
            options += self._gateway_options(kind)
        if kind != "grpc" and self.options.busy_poll_ms is not None:
            options += ["--busy-poll", str(self.options.busy_poll_ms)]
        if self.options.otlp_endpoint:
            options += ["--otlp-endpoint", self.options.otlp_endpoint]
        return DoorChild(
            kind,
            listen=getattr(self.endpoints, kind),
            upstream=lambda: getattr(self._server.endpoints, "grpc" if kind == "grpc" else "http"),
            health_file=self._health_file,
            log_file=self.log_file,
            options=options,
            number=number,
        )

    def _gateway_options(self, kind: str) -> list[str]:
        """Of a process with a gateway; the HTTP door's serves it beside its own address."""
        if not self.endpoints.gateway:
            return []
        found = ["--gateway-metrics", self.endpoints.engine_metrics]
        if kind == "http":
            found += ["--gateway", self.endpoints.gateway]
        if self.options.gateway_workers > 1:
            found.append("--gateway-shared")
        if self.options.strict_params:
            found.append("--strict-params")
        if self.options.serves_page:
            found.append("--page")
        return found

    @property
    def _health_file(self) -> Path:
        return self._folder / health.HEALTH_FILE

    def _write_health(self) -> None:
        self.health = self._assess()
        self._written_at = time.monotonic()
        problem = ""
        try:
            health.write(self._health_file, self.health)
        except OSError as error:  # not ready after a while, for readers; it may recover
            problem = f"the health cannot be written: {error.strerror}"
        if problem and problem != self._health_problem:
            logger.error("%s", problem)
        self._health_problem = problem

    @property
    def _is_up(self) -> bool:
        """Whether all models are loaded."""
        return self._triton.is_ready and all(
            one.client is not None for one in self._engines.serving
        )

    def _assess(self) -> Health:
        failing = [keeper for keeper in self._keepers if keeper.is_failing]
        reasons = [
            f"{keeper.child.name} {keeper.problem}" for keeper in self._keepers if keeper.problem
        ]
        if self._is_draining:
            reasons = ["the server is stopping"]
        elif not reasons:
            reasons = [
                f"{one.name} {why}" for one in self._engines.serving if (why := one.why_unavailable)
            ]
            if not self._triton.is_ready:
                reasons.append("tritonserver is starting")
        if not reasons and self._memory.shortage:
            reasons = [self._memory.shortage]
        is_ready = self._is_up and not self._is_draining and not self._memory.shortage
        return Health(
            is_live=not failing,
            is_ready=is_ready,
            reason="" if is_ready else "; ".join(reasons),
            models=self._models if is_ready else [],
            versions=self._versions,
            endpoints=asdict(self.endpoints),
        )
