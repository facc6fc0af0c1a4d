"""Publishes an engine's metrics on Triton's metrics port.

Each call of Triton's metrics API is a message to the server and blocks. So histograms are counters
raised by what was added since the last time, once a second, on a thread of their own. Only values
that have changed are sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import triton_python_backend_utils as pb_utils
from inflight.engine.metrics.families import COMPAT_VARIABLE, parse_compat
from inflight.engine.metrics.snapshot import Labels, Published, publish
from inflight.ipc.engine_client import EngineClient, socket_path
from inflight.ipc.metrics.source import MetricsSource
from inflight.ipc.owner import Owner

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_CLOSE_S = 2.0


class Series:
    """The series that this process has created in Triton, and their values as sent.

    Only one process at a time may have a series: Triton removes it with the first of two that
    release it. A series that a process left behind when it died continues with its value.
    """

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._sent: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self, published: Published) -> None:
        """Set gauges, and raise counters to their values. A counter is never lowered."""
        is_gauge = published.kind == "gauge"
        # Last buckets first: a scrape in between sees no bucket that exceeds a wider one.
        for suffix, labels, value in reversed(published.samples):
            name = published.name + suffix
            key = name, tuple(labels.values())
            metric = self._metrics.get(key)
            if metric is None:
                metric = self._create(name, labels, published)
                self._metrics[key] = metric
                self._sent[key] = metric.value()
            sent = self._sent[key]
            if is_gauge and value != sent:
                metric.set(value)
            elif value > sent:
                metric.increment(value - sent)
            else:
                continue
            self._sent[key] = value

    def close(self) -> None:
        # Before its family: Triton reports an error otherwise.
        self._metrics.clear()
        self._families.clear()

    def _create(self, name: str, labels: Labels, published: Published) -> Any:
        if name not in self._families:
            is_gauge = published.kind == "gauge"
            kind = pb_utils.MetricFamily.GAUGE if is_gauge else pb_utils.MetricFamily.COUNTER
            self._families[name] = pb_utils.MetricFamily(
                name=name, description=published.meaning, kind=kind
            )
        return self._families[name].Metric(labels=labels)


class MetricsPublisher:
    """Publishes the metrics of a front's engine, unless another front of the model does.

    Args:
        model: the model's folder.
        owner: of the engine.
        client: the attached engine; None while there is none.
        parameters: of config.pbtxt; `metrics_compat` is used, by default COMPAT_VARIABLE, and
            `llm`: a front that names another model leaves publishing to the fronts of that one.

    Raises:
        ConfigError: `metrics_compat` has an unknown item.
    """

    def __init__(
        self,
        model: Path,
        owner: Owner,
        client: Callable[[], EngineClient | None],
        parameters: Mapping[str, str],
    ) -> None:
        compat = parameters.get("metrics_compat", os.environ.get(COMPAT_VARIABLE, ""))
        self._compat = parse_compat(compat, "config.pbtxt: metrics_compat")
        self._is_publisher = "llm" not in parameters
        self._client = client
        self._source = MetricsSource(model, client)
        # Held by the front that publishes; released when its process ends, however it ends.
        self._lock_file = socket_path(model, owner.pid).with_suffix(".metrics")
        self._lock: BinaryIO | None = None
        self._series = Series()
        self._refused: Counter[str] = Counter()  # that the engine does not know of, by kind
        self._refused_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def refused(self, kind: str) -> None:
        """The front has refused a request; kind: of the error. The engine counts them for all its
        fronts."""
        with self._refused_lock:
            self._refused[kind] += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(INTERVAL_S):
                self._publish()
        except Exception as error:  # Triton without metrics, or on its way out; serving goes on
            if not self._closing.is_set():
                logger.warning("no metrics are published from now on: %s", error)
        finally:
            self._series.close()
            if self._lock is not None:
                self._lock.close()

    def _publish(self) -> None:
        self._report_refused()
        found = self._source.read() if self._may_publish() else None
        if found is not None:
            for published in publish(found.metrics, found.labels, self._compat):
                self._series.publish(published)

    def _report_refused(self) -> None:
        client = self._client()
        if client is not None and self._refused:
            with self._refused_lock:
                refused, self._refused = self._refused, Counter()
            client.refused(dict(refused))

    def _may_publish(self) -> bool:
        """Whether this front is the one that publishes."""
        if self._lock is None and self._is_publisher:
            with contextlib.suppress(BlockingIOError), contextlib.ExitStack() as stack:
                file = stack.enter_context(open(self._lock_file, "ab"))
                os.fchmod(file.fileno(), 0o600)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stack.pop_all()
                self._lock = file
        return self._lock is not None
