"""Ports are checked before anything starts, and held until it listens."""

import socket

import pytest

from inflight.deploy.ports import HeldPorts
from inflight.errors import ConfigError

HOST = "127.0.0.1"
FREE = (0, 0, 0)


def test_a_taken_port_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*--grpc-port"):
            HeldPorts(HOST, (0, port, 0))


def test_all_taken_ports_are_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        ports = (one.getsockname()[1], 0, other.getsockname()[1])
        with pytest.raises(ConfigError) as found:
            HeldPorts(HOST, ports)
    text = str(found.value)
    assert all(f"127.0.0.1:{port} cannot be used" in text for port in (ports[0], ports[2]))
    assert text.endswith("free ones: --http-port 0 --metrics-port 0")


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_an_invalid_port_is_rejected(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--metrics-port: {port} is out of range; allowed: 1 to"):
        HeldPorts(HOST, (0, 0, port))


def test_a_port_is_not_given_twice() -> None:
    with pytest.raises(ConfigError, match="--http-port and --grpc-port are both 4711"):
        HeldPorts(HOST, (4711, 4711, 0))


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_a_host_that_is_not_ours_is_not_taken_for_a_taken_port(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host: {host} is not an address of this machine"):
        HeldPorts(host, FREE)


def test_free_ports_are_different_ones() -> None:
    with HeldPorts(HOST, FREE) as held:
        assert len(set(held.numbers)) == 3


def test_a_held_port_is_neither_a_free_one_nor_one_of_an_outgoing_connection() -> None:
    with HeldPorts(HOST, FREE) as held, socket.create_server((HOST, 0)) as peer:
        for port in held.numbers:
            with socket.socket() as client, pytest.raises(OSError, match="in use"):
                client.bind((HOST, port))
        with HeldPorts(HOST, FREE) as others:
            assert not set(held.numbers) & set(others.numbers)
        with socket.create_connection(peer.getsockname()) as connection:
            assert connection.getsockname()[1] not in held.numbers


def test_the_server_that_a_port_is_held_for_can_listen_on_it() -> None:
    with HeldPorts(HOST, (0,)) as held:
        address = HOST, held.numbers[0]
        # It sets SO_REUSEADDR.
        with socket.create_server(address) as server, socket.create_connection(address, 5):
            server.accept()[0].close()
        with socket.create_server(address, reuse_port=True):  # another start, as the gRPC door
            pass


def test_a_released_port_can_be_taken_by_anybody() -> None:
    held = HeldPorts(HOST, (0,))
    held.release()
    with socket.socket() as other:
        other.bind((HOST, held.numbers[0]))
