"""Options of a server that depend on each other."""

from __future__ import annotations

import pytest

from inflight.errors import ConfigError
from inflight.supervision.options import ServeOptions


@pytest.mark.parametrize(
    ("options", "has_versions", "guards"),
    [
        (ServeOptions(), False, False),
        (ServeOptions(), True, True),
        (ServeOptions(host="0.0.0.0"), False, True),
        (ServeOptions(host="0.0.0.0", grpc_guard=False), False, False),
        (ServeOptions(grpc_guard=True), False, True),
    ],
)
def test_grpc_passes_a_door_where_it_has_to(
    options: ServeOptions, has_versions: bool, guards: bool
) -> None:
    assert options.guards_grpc(has_versions=has_versions) == guards


@pytest.mark.parametrize(
    ("options", "serves"),
    [
        (ServeOptions(), True),
        (ServeOptions(host="127.0.0.2"), True),
        (ServeOptions(host="0.0.0.0"), False),
        (ServeOptions(host="0.0.0.0", page=True), True),
        (ServeOptions(page=False), False),
    ],
)
def test_beyond_loopback_the_page_is_served_on_request(options: ServeOptions, serves: bool) -> None:
    assert options.serves_page == serves


def test_versions_are_found_by_doors_alone() -> None:
    with pytest.raises(ConfigError, match="--no-grpc-guard: cannot be combined with a version_po"):
        ServeOptions(grpc_guard=False).guards_grpc(has_versions=True)


def test_the_gateway_has_a_port_unless_it_is_off() -> None:
    assert ServeOptions().all_ports == (8000, 8001, 8002, 8003, 9000)
    assert ServeOptions(gateway_port=0).all_ports[4] == 0
    assert ServeOptions(gateway_port=None).all_ports == (8000, 8001, 8002, 8003)
