"""An endpoint for Prometheus with the metrics of all engines, apart from Triton's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from inflight.engine.metrics.snapshot import Published, publish
from inflight.ipc.metrics.source import ModelMetrics

PATH = "/metrics"
READ_TIMEOUT_S = 5.0
# How often its thread looks whether to stop; socketserver's half a second would delay each stop.
STOP_POLL_S = 0.1
_TOTAL = "_total"


class MetricsCollector(Collector):
    """Shows snapshots as Prometheus's families.

    Args:
        models: their metrics.
        flavours: whose aliases are shown, too.
        further: samples of other families.
    """

    def __init__(
        self,
        models: Iterable[ModelMetrics],
        flavours: frozenset[str],
        further: Iterable[Published] = (),
    ) -> None:
        self._models = list(models)
        self._flavours = flavours
        self._further = list(further)

    def collect(self) -> Iterator[Metric]:
        """Each name once, with the series of all models."""
        families: dict[str, Metric] = {}
        for one in self._published():
            # Its writer appends the suffix of counters.
            name = one.name.removesuffix(_TOTAL) if one.kind == "counter" else one.name
            family = families.setdefault(one.name, Metric(name, one.meaning, one.kind))
            for suffix, labels, value in one.samples:
                family.add_sample(one.name + suffix, labels, value)
        yield from families.values()

    def _published(self) -> Iterator[Published]:
        yield from self._further
        for labels, metrics in self._models:
            yield from publish(metrics, labels, self._flavours)


def render(
    models: Iterable[ModelMetrics],
    flavours: frozenset[str] = frozenset(),
    further: Iterable[Published] = (),
) -> bytes:
    """The metrics of models, and further families, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(models, flavours, further))
    return generate_latest(registry)


class MetricsServer:
    """Serves what a function returns at /metrics, until `close`.

    Args:
        address: to listen on; port 0 picks a free one.
        collect: returns the text; called by one thread at a time.

    Attributes:
        address: it listens on.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: tuple[str, int], collect: Callable[[], bytes]) -> None:
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_TIMEOUT_S  # of a client that does not finish its request

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != PATH:
                    self.send_error(404, f"allowed: {PATH}")
                    return
                with lock:
                    text = collect()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def version_string(self) -> str:
                return "inflight"

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not logged."""

        self._server = ThreadingHTTPServer(address, Handler)
        self._server.daemon_threads = True
        host, port = self._server.server_address[:2]
        self.address = str(host), int(port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
