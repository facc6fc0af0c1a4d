"""Runs tritonserver as a child process: start, wait for its models, drain, stop."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from inflight import log
from inflight.deploy import installation
from inflight.deploy.file_limit import raise_file_limit
from inflight.deploy.log_files import default_log_file
from inflight.deploy.ports import HeldPorts
from inflight.deploy.tritonserver.api import TritonApi
from inflight.deploy.tritonserver.command import Command
from inflight.deploy.tritonserver.endpoints import DEFAULT_HOST, DEFAULT_PORTS, Endpoints
from inflight.deploy.tritonserver.engines import attach_all, end_engine, num_in_flight
from inflight.deploy.tritonserver.failures import NO_SHARED_MEMORY, load_failures
from inflight.deploy.tritonserver.stubs import Stubs
from inflight.errors import CapacityError, ConfigError, EngineError, InflightError
from inflight.ipc import engine_client
from inflight.ipc.frames import Loading
from inflight.ipc.owner import SUPERVISOR, Owner
from inflight.ipc.processes import Process, how_it_exited
from inflight.ipc.runtime_folder import remove_folder_of
from inflight.ipc.shared_memory import region_prefix, remove_regions
from inflight.sandbox.process import start_process

DEFAULT_DRAIN_S = 30.0

# Tokens that the engine has sent still pass the front, the detokenizer and the network.
SETTLE_S = 0.7
# An idle tritonserver ends its stubs within 2 s; with an open idle gRPC stream it never exits.
TRITON_EXIT_S = 4.0
CHILDREN_EXIT_S = 5.0
POLL_S = 0.1

OnProgress = Callable[[str, Loading], None]


class Server:
    """A tritonserver with this backend, as a child that does not outlive the starting thread.

    As a context manager it starts, waits until all models are ready, and stops at the end:

        with Server(repository.shipped(), ports=(0, 0, 0)) as server:
            client = Client(server.endpoints.grpc)

    Args:
        repositories: model repositories; model names must be unique across all of them.
        host: address to listen on, or one each for HTTP, gRPC and metrics.
        ports: of HTTP, gRPC and metrics; 0 picks a free one.
        log_file: for the output of tritonserver and the models; None for one in ~/.local/state.
        drain_s: how long `stop` waits for requests in flight.
        owner: of the engines, if they are to outlive tritonserver; None: tritonserver itself.
        environment: further variables for tritonserver and its stubs.
        controls_models: whether models are loaded and unloaded while it runs.

    Attributes:
        loaded: with `controls_models`, the names of the models that it loads at its next start, in
            an order in which no model needs a later one; None for all.
        region_prefix: of the names of its stubs' shared memory.
    """

    def __init__(  # settings, by keyword alone
        self,
        repositories: Sequence[Path],
        *,
        host: str | tuple[str, str, str] = DEFAULT_HOST,
        ports: tuple[int, int, int] = DEFAULT_PORTS,
        log_file: Path | None = None,
        drain_s: float = DEFAULT_DRAIN_S,
        owner: Owner | None = None,
        environment: Mapping[str, str] | None = None,
        controls_models: bool = False,
    ) -> None:
        self.repositories = [Path(path).resolve() for path in repositories]
        self._hosts = (host, host, host) if isinstance(host, str) else host
        self.drain_s = drain_s
        self._ports = ports
        self._held_ports: HeldPorts | None = None
        self._log_file = log_file
        self._owner = owner
        self._further = dict(environment or {})
        self._controls_models = controls_models
        self.loaded: list[str] | None = None
        self._admin_key = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0  # of what this tritonserver has logged
        self._failures: dict[str, InflightError] = {}
        self._stubs = Stubs()
        self.region_prefix = f"{region_prefix(os.getpid())}{secrets.token_hex(4)}_"

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:  # re-raised; Ctrl-C must not leave a tritonserver behind
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(
            *(f"{host}:{port}" for host, port in zip(self._hosts, self._ports, strict=True))
        )

    @property
    def api(self) -> TritonApi:
        """Triton's own API."""
        return TritonApi(self._hosts[0], self._ports[0], self._admin_key)

    @property
    def log_file(self) -> Path:
        return self._log_file or default_log_file(self._ports[0])

    @property
    def pid(self) -> int:
        """PID of tritonserver.

        Raises:
            EngineError: it was not started.
        """
        return self._running().pid

    @property
    def models_with_engine(self) -> list[Path]:
        """The folders of the models that have an engine, as far as they are to be loaded."""
        return [
            model
            for path in self.repositories
            for model in sorted(path.iterdir())
            if any(model.glob("*/engine.json"))
            and (self.loaded is None or model.name in self.loaded)
        ]

    def engine_socket(self, model: Path) -> Path:
        """The socket of a model's engine."""
        return engine_client.socket_path(model, self._owner.pid if self._owner else self.pid)

    def _sockets(self) -> dict[str, Path]:
        return {model.name: self.engine_socket(model) for model in self.models_with_engine}

    def check_repositories(self) -> None:
        """Raises ConfigError: a repository is missing or empty."""
        create = "create one with `inflight repo init`"
        for path in self.repositories:
            if not path.is_dir():
                raise ConfigError(f"repository {path} is not a folder; {create}")
            if not any(child.is_dir() for child in path.iterdir()):
                raise ConfigError(f"repository {path} has no models; {create}")

    def start(self) -> None:
        """Start tritonserver; returns immediately. After `kill` it starts again, on the same ports.

        Raises:
            ConfigError: no tritonserver, incompatible Python, port in use, or invalid repository.
            CapacityError: see `start_process`.
        """
        if self.is_running():
            raise EngineError("the server was already started")
        self.check_repositories()
        log.level()  # these validate them here, where the user sees the error
        log.formatter()
        raise_file_limit()
        found = installation.find()
        installation.check_python(found)
        backends = installation.backend_directory(found)
        self.hold_ports()
        with self.open_log(anew=self._owner is None and self._process is None) as output:
            self._log_begin = output.tell()
            self._process = start_process(
                self._command().line(found.server, backends),
                env=self._environment(found, backends),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal must reach only this process, which drains first.
                start_new_session=True,
            )

    def wait_ready(
        self,
        timeout: float | None = None,
        on_progress: OnProgress = lambda model, loading: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Wait until all models are ready; returns their names.

        Args:
            timeout: seconds; None waits as long as tritonserver runs.
            on_progress: called with a model's name and its engine's progress, on other threads.
            on_poll: called several times a second.

        Raises:
            ConfigError: a model cannot be loaded, with the reason.
            EngineError: tritonserver exited for another reason, or not ready in time.
        """
        process = self._running()
        stop_watching = threading.Event()
        for model in self.models_with_engine:
            arguments = (model, stop_watching, on_progress)
            threading.Thread(target=self._watch, args=arguments, name="watch", daemon=True).start()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self.is_ready():
                if process.poll() is not None:
                    raise self._why_it_ended()
                if deadline is not None and time.monotonic() > deadline:
                    raise EngineError(f"not ready within {timeout:g} s; log: {self.log_file}")
                on_poll()
                time.sleep(POLL_S)
        finally:
            stop_watching.set()
        return self.models()

    def is_ready(self) -> bool:
        """Whether tritonserver responds and all its models are loaded."""
        return self.api.probe() == 200

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def hold_ports(self) -> None:
        """Replace each port 0 by a free one and hold all of them; `start` does that, too.

        Raises:
            ConfigError: see `HeldPorts`.
        """
        if self._held_ports is None:
            self._held_ports = HeldPorts(self._hosts, self._ports)
            http, grpc, metrics = self._held_ports.numbers
            self._ports = http, grpc, metrics

    def release_ports(self) -> None:
        """It will not start again on the same ports."""
        if self._held_ports is not None:
            self._held_ports.release()
            self._held_ports = None

    def stubs(self) -> list[Process]:
        """The processes of the models; they are remembered (see `Stubs`)."""
        return self._stubs.find(self.pid)

    def exit_status(self) -> int | None:
        """Of tritonserver, negative for a signal; None while it runs."""
        return self._running().poll()

    def lacks_shared_memory(self) -> bool:
        """Whether there was none for a model's process since the last start, by the log."""
        try:
            with open(self.log_file, "rb") as log:
                if log.seek(0, os.SEEK_END) < self._log_begin:
                    self._log_begin = 0  # it was capped
                log.seek(self._log_begin)
                return NO_SHARED_MEMORY.search(log.read()) is not None
        except OSError:
            return False

    def models(self) -> list[str]:
        """Names of the models that are ready."""
        return self.api.models()

    def forget_stubs(self) -> list[Process]:
        """The remembered stubs that have exited; they are forgotten."""
        return self._stubs.forget_ended()

    def devices(self) -> dict[str, str]:
        """Description of the device of each model with an engine, by model name."""
        engines = attach_all(self._sockets())
        for engine in engines.values():
            engine.close()
        return {name: engine.welcome.device for name, engine in engines.items()}

    def drain(
        self,
        on_waiting: Callable[[int], None] = lambda num_in_flight: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> int:
        """Reject new requests and wait for those in flight, for at most `drain_s`.

        This must precede SIGTERM: after the signal tritonserver 2.51 rejects the next step of an
        ensemble request in flight, and its stream hangs.

        Args:
            on_waiting: called with the number of requests in flight whenever it changes.
            on_poll: called several times a second.

        Returns:
            The number of requests still in flight at the end.
        """
        deadline = time.monotonic() + self.drain_s
        engines = list(attach_all(self._sockets()).values())
        for engine in engines:
            engine.drain()
        before, now = -1, 0
        try:
            while engines and self.is_running():
                now = sum(num_in_flight(engine) for engine in engines)
                if now != before:
                    on_waiting(now)
                if now == 0 or time.monotonic() > deadline:
                    break
                before = now
                on_poll()
                time.sleep(POLL_S)
        except InflightError:
            pass  # an engine died, and its requests in flight have failed
        finally:
            for engine in engines:
                engine.close()
        if before > 0 and now == 0:
            time.sleep(SETTLE_S)
        return now

    def stop(self, on_waiting: Callable[[int], None] = lambda num_in_flight: None) -> int:
        """Drain and end tritonserver and its engines; returns the number of aborted requests."""
        if self._process is None:
            return 0
        num_cut = self.drain(on_waiting)
        self.end()
        return num_cut

    def end(self) -> None:
        """End tritonserver and its engines in order, without waiting for requests."""
        stubs = self.stubs()
        if self.is_running():
            self._running().send_signal(signal.SIGTERM)
            self._wait_until_unloaded(stubs)
        self._end(CHILDREN_EXIT_S)

    def kill(self) -> None:
        """End tritonserver, its stubs and its engines immediately, if they run."""
        if self._process is not None:
            self._end(0.0)

    def _wait_until_unloaded(self, stubs: list[Process]) -> None:
        """After SIGTERM, wait up to TRITON_EXIT_S for tritonserver or for all its stubs to exit.

        Triton ends its stubs once no request is in flight, and polls them once a second. After that
        it only closes idle connections, so it need not be waited for.
        """
        deadline = time.monotonic() + TRITON_EXIT_S
        while self.is_running() and time.monotonic() < deadline:
            if stubs and not any(stub.is_running() for stub in stubs):
                return
            time.sleep(0.05)

    def _end(self, patience_s: float) -> None:
        process = self._running()
        self.stubs()
        if process.poll() is None:
            process.kill()
        process.wait()
        if self._owner is None:
            for model in self.models_with_engine:
                end_engine(self.engine_socket(model))
        # The stubs detect that their server has exited, remove their shared memory and exit.
        self._stubs.find_left(self.region_prefix)
        self._stubs.end(patience_s)
        remove_regions(self.region_prefix)
        if self._owner is None:
            remove_folder_of(process.pid)
            self.release_ports()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until tritonserver exits; returns its exit status, or None after `timeout`."""
        try:
            return self._running().wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def open_log(self, *, anew: bool) -> BinaryIO:
        """The log file, which several processes append to; anew: emptied.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            return open(self.log_file, "wb" if anew else "ab")
        except OSError as error:
            raise ConfigError(
                f"log file {self.log_file} cannot be written ({error.strerror}); choose another "
                "file with --log-file, or another folder for all logs with XDG_STATE_HOME"
            ) from None

    def _command(self) -> Command:
        return Command(
            self.repositories,
            self._hosts,
            self._ports,
            self.region_prefix,
            self._admin_key,
            self._controls_models,
            self.loaded,
        )

    def _environment(self, found: installation.Installation, backends: Path) -> dict[str, str]:
        variables = installation.environment(found, backends)
        variables.pop(SUPERVISOR, None)
        variables |= self._further
        if self._owner is not None:
            variables[SUPERVISOR] = str(self._owner.pid)
        return variables

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise EngineError("the server was not started")
        return self._process

    def _watch(self, model: Path, stop: threading.Event, on_progress: OnProgress) -> None:
        path = self.engine_socket(model)
        while not stop.wait(POLL_S):
            try:
                engine = engine_client.attach(
                    path,
                    "observer",
                    on_loading=lambda loading: on_progress(model.name, loading),
                )
            except CapacityError:
                continue  # not started by the front yet
            except InflightError as error:
                self._failures[model.name] = error
            else:
                engine.close()
            return

    def _why_it_ended(self) -> InflightError:
        for name, error in self._failures.items():
            return ConfigError(f"model {name}: {error}")
        log = self.log_file.read_text(errors="replace")
        reasons = load_failures(log)
        if reasons:
            return ConfigError("\n".join(reasons))
        return EngineError(f"{self.how_it_ended()}; log: {self.log_file}")

    def how_it_ended(self) -> str:
        """A message with its exit status, or the signal that ended it."""
        return f"tritonserver {how_it_exited(self._running().returncode)}"
