"""The process of the HTTP door: `python -m inflight.door.http_door`.

It stands between clients and a tritonserver that only this machine can reach. With `--gateway`, it
serves OpenAI's API at another address, in the same event loop. It ends with its parent; SIGTERM
ends it once the requests in flight have their answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from inflight.door import process
from inflight.door.http import app, busy_poll
from inflight.door.http.gate import Gate
from inflight.door.http.upstream import Upstream
from inflight.door.process import Common, Site
from inflight.ipc.metrics.request_counts import SUFFIX, RequestCounts


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit status."""
    return process.run(_parser().parse_args(arguments), _sites)


def _sites(common: Common) -> list[Site]:
    options = common.options
    admission = common.access.admission("http")
    upstream = Upstream(*options.upstream)
    metrics = Upstream(*options.metrics) if options.metrics is not None else None
    door = app.Door(upstream, options.health, options.limits, metrics, options.busy_poll / 1e3)
    made = app.make(
        door,
        has_access_log=options.access_log,
        gate=Gate(admission) if admission is not None else None,
        counts=RequestCounts(options.counts) if options.counts is not None else None,
        tracing=common.tracing,
    )
    sites = [Site(made, process.listen(*options.listen))]
    if options.gateway is not None:
        from inflight.door.gateway.site import Place, gateway_site
        from inflight.door.gateway.triton import Triton

        counts = options.health.with_name("gateway" + SUFFIX)
        place = Place(options.gateway, options.gateway_shared, counts)
        triton = Triton(door.upstream, door.health, options.health.parent)
        sites.append(gateway_site(common, place, [triton], door.busy_poll))
    return sites


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inflight.door.http_door", description=__doc__)
    process.add_options(parser)
    parser.add_argument("--upstream", type=process.address, required=True, metavar="HOST:PORT")
    parser.add_argument("--health", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--metrics", type=process.address, metavar="HOST:PORT", help="for admins' keys"
    )
    parser.add_argument(
        "--busy-poll", type=float, default=busy_poll.default_s() * 1e3, metavar="MILLISECONDS"
    )
    parser.add_argument("--gateway", type=process.address, metavar="HOST:PORT")
    process.add_gateway_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
