"""Output of `inflight serve`: progress bars and a table on a terminal, otherwise plain lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.access.options import AccessOptions
from inflight.deploy.tritonserver.endpoints import Endpoints
from inflight.ipc.frames import Loading
from inflight.ipc.health import Health

# Number of progress lines per model if the output is not a terminal.
PLAIN_STEPS = 4


class Display:
    """Writes to standard error; standard output is for results."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._was_ready = True

    @contextlib.contextmanager
    def loading(self) -> Iterator[Callable[[str, Loading], None]]:
        """A callback that shows the progress of each model."""
        if self._console.is_terminal:
            with self._bars() as show:
                yield show
        else:
            self._console.print("starting tritonserver")
            yield self._lines()

    def ready(
        self,
        endpoints: Endpoints,
        models: list[str],
        devices: dict[str, str],
        log_file: Path,
        access: AccessOptions = AccessOptions(),  # noqa: B008  (immutable)
        *,
        has_page: bool = False,
    ) -> None:
        """Show endpoints, models and devices, and the next command."""
        address = endpoints.engine_metrics
        scheme = "http" if access.tls is None else "https"
        rows = {
            "OpenAI": f"{scheme}://{endpoints.gateway}/v1" if endpoints.gateway else "",
            "chat": f"{scheme}://{endpoints.gateway}/" if endpoints.gateway and has_page else "",
            "HTTP": f"{scheme}://{endpoints.http}",
            "gRPC": endpoints.grpc,
            "metrics": f"http://{endpoints.metrics}/metrics",
            "engines": f"http://{address}/metrics" if address else "",
            "models": ", ".join(models),
            "device": "; ".join(_of_each(devices)),
            "keys": access.keys or "",
            "log": str(log_file),
        }
        with self._console:  # one write: who waits for READY finds the addresses, too
            self._console.print("[bold green]READY[/]")
            for name, value in rows.items():
                if value:
                    self._line(value, f"[bold]{name:<9}[/]")
            if "chat" in models:
                self._line(f"next: inflight chat --url {endpoints.grpc}")
            elif "generate" in models:
                command = f'inflight generate --url {endpoints.grpc} "The capital of France is"'
                self._line(f"next: {command}")
            self._line("Ctrl-C drains and stops")

    def health(self, health: Health) -> None:
        """Tell when the server has become unready, and when it is ready again."""
        if health.is_ready != self._was_ready:
            self._was_ready = health.is_ready
            if health.is_ready:
                self._line("ready again")
            else:
                self.error(f"not ready: {health.reason}")

    def warning(self, text: str) -> None:
        self._line(text, "[bold yellow]warning:[/] ")

    def stopping(self) -> None:
        self._console.print("stopping: new requests are rejected; Ctrl-C again stops immediately")

    def waiting(self, num_in_flight: int) -> None:
        if num_in_flight:
            self._console.print(f"in flight: {num_in_flight}", highlight=False)

    def stopped(self, num_cut: int) -> None:
        self._console.print(f"stopped; aborted: {num_cut}" if num_cut else "stopped")

    def stopped_at_once(self) -> None:
        self._console.print("stopped immediately; requests in flight were aborted")

    def error(self, text: str) -> None:
        self._line(text, "[bold red]error:[/] ")

    def _line(self, text: str, label: str = "") -> None:
        # Not wrapped, for copying to other terminals. Only the label is markup.
        self._console.print(label + escape(text), highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _bars(self) -> Iterator[Callable[[str, Loading], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            tasks = {"": progress.add_task("starting tritonserver", total=None)}

            def show(model: str, loading: Loading) -> None:
                if model not in tasks:
                    progress.update(tasks[""], visible=False)
                    tasks[model] = progress.add_task(escape(model), total=1.0)
                progress.update(
                    tasks[model],
                    completed=loading.fraction,
                    description=escape(f"{model}: {loading.what}"),
                )

            yield show

    def _lines(self) -> Callable[[str, Loading], None]:
        shown: dict[str, int] = {}

        def show(model: str, loading: Loading) -> None:
            step = int(loading.fraction * PLAIN_STEPS)
            if step > shown.get(model, -1):
                shown[model] = step
                self._console.print(escape(f"{model}: {loading.what} ({loading.fraction:.0%})"))

        return show


def _of_each(devices: dict[str, str]) -> list[str]:
    """One device for all, or one per model."""
    if len(set(devices.values())) <= 1:
        return list(devices.values())[:1]
    return [f"{model}: {device}" for model, device in devices.items()]
