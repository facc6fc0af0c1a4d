"""The gateway as a part of a process: what it serves, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.door import process
from inflight.door.gateway.app import GatewayProtocol, make
from inflight.door.gateway.gateway import Gateway, Policy
from inflight.door.gateway.page.page import Page
from inflight.door.gateway.triton import Triton
from inflight.door.http.busy_poll import BusyPoll
from inflight.door.http.upstream import Upstream
from inflight.door.process import Common, Site
from inflight.ipc.control import SOCKET
from inflight.ipc.metrics.mapped_counter import MappedCounter
from inflight.ipc.metrics.request_counts import IGNORED_SUFFIX, RequestCounts


@dataclass(frozen=True, slots=True)
class Place:
    """Where a gateway listens, and what it counts.

    Attributes:
        is_shared: other processes listen on the same port.
        counts: the file of its requests by status; None for none.
    """

    address: tuple[str, int]
    is_shared: bool = False
    counts: Path | None = None


def gateway_site(
    common: Common, place: Place, tritons: Sequence[Triton], busy_poll: BusyPoll | None = None
) -> Site:
    """Raises ConfigError, or OSError: it cannot listen there."""
    options = common.options
    metrics = options.gateway_metrics
    policy = Policy(limits=options.limits, is_strict=options.strict_params)
    counts = place.counts
    ignored = MappedCounter(counts.with_suffix(IGNORED_SUFFIX)) if counts is not None else None
    made = make(
        Gateway(tritons, policy, busy_poll, ignored, common.tracing),
        metrics=Upstream(*metrics) if metrics is not None else None,
        control_socket=None if counts is None else counts.with_name(SOCKET),
        admission=common.access.admission("gateway"),
        counts=RequestCounts(counts) if counts is not None else None,
        has_access_log=options.access_log,
        page=Page() if options.page else None,
    )
    listener = process.listen(*place.address, is_shared=place.is_shared)
    return Site(made, listener, GatewayProtocol)
