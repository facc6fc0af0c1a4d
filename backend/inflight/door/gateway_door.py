"""The process of a gateway of its own: `python -m inflight.door.gateway_door`.

It serves OpenAI's API in front of one supervised tritonserver, beside the HTTP door's process, or
of any number of Triton servers. It ends with its parent; SIGTERM ends it once the requests in
flight have their answers.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inflight.door import process
from inflight.door.gateway import site
from inflight.door.gateway.triton import Triton, bearer
from inflight.door.health_file import HealthFile
from inflight.door.http import busy_poll
from inflight.door.http.upstream import Upstream
from inflight.door.process import Common, Site
from inflight.door.remote_health import RemoteHealth

API_KEY_VARIABLE = "INFLIGHT_API_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit status."""
    return process.run(_parser().parse_args(arguments), _sites)


def _sites(common: Common) -> list[Site]:
    options = common.options
    # Not an argument: those of a process are for all users to see.
    api_key = os.environ.get(API_KEY_VARIABLE, "")
    tritons = []
    watches = []
    for address in options.upstream:
        upstream = Upstream(*address)
        if options.health is not None:
            health = HealthFile(options.health)
            tritons.append(Triton(upstream, health, options.health.parent))
            continue
        remote = RemoteHealth(Upstream(*address), bearer(api_key))
        watches.append(remote.watch)
        tritons.append(Triton(upstream, remote, api_key=api_key))
    polling = busy_poll.BusyPoll(options.busy_poll / 1e3)
    place = site.Place(options.listen, options.gateway_shared, options.counts)
    made = site.gateway_site(common, place, tritons, polling)
    return [replace(made, tasks=tuple(watches))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inflight.door.gateway_door", description=__doc__)
    process.add_options(parser)
    process.add_gateway_options(parser)
    parser.add_argument(
        "--upstream",
        type=process.address,
        action="append",
        required=True,
        metavar="HOST:PORT",
        help="HTTP port of a Triton server; repeatable",
    )
    parser.add_argument(
        "--health", type=Path, metavar="FILE", help="of the supervised server; default: ask it"
    )
    parser.add_argument(
        "--busy-poll", type=float, default=busy_poll.default_s() * 1e3, metavar="MILLISECONDS"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
