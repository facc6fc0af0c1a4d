"""A model's metrics, over the engines that run for it one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from inflight.core.model_version import public_name
from inflight.engine.metrics.snapshot import Labels, Metrics, Totals
from inflight.errors import EngineError
from inflight.ipc.engine_client import EngineClient, engine_config_path


class ModelMetrics(NamedTuple):
    """The metrics of a model, and the labels of its series."""

    labels: Labels
    metrics: Metrics


class MetricsSource:
    """Reads a model's metrics from its engine. One thread at a time may call it.

    Args:
        model: the model's folder.
        client: the attached engine; None while there is none.
    """

    def __init__(self, model: Path, client: Callable[[], EngineClient | None]) -> None:
        self._model = model
        self._client = client
        self._totals = Totals()
        self._labels: Labels = {}

    def read(self) -> ModelMetrics | None:
        """The metrics now: counters count from the first engine on, and without an engine the
        gauges are those of an idle one. None before the first engine."""
        client = self._client()
        found = None
        if client is not None:
            self._labels = self._labels or self._labels_of(client)
            with contextlib.suppress(EngineError):  # it has exited, or is being replaced
                found = self._totals.add(client.metrics())
        found = found or self._totals.without_engine()
        return None if found is None else ModelMetrics(self._labels, found)

    def _labels_of(self, client: EngineClient) -> Labels:
        return {
            "model_name": client.welcome.model_name,
            "engine": "0",
            "model": public_name(self._model.name),
            "version": engine_config_path(self._model).parent.name,
        }
