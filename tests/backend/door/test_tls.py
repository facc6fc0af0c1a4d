"""Both doors with TLS, in front of stand-ins for Triton."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

import certificates
from certificates import Certificates
from grpc_guard import Door, StandIn, opened
from http_door import BODY, EVENT, IMPATIENT, Running, a_door
from inflight.access.tls import TlsFiles
from inflight.door.certificate import REREAD_S
from inflight_client import Client, InvalidRequest
from kserve import request, text
from waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=["server", "mutual"])
def is_mutual(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "mutual")


@pytest.fixture(scope="module")
def options(made: Certificates, is_mutual: bool) -> tuple[str, ...]:
    return (*made.options, "--tls-client-ca", str(made.ca)) if is_mutual else made.options


@pytest.fixture(scope="module")
def http_door(
    tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]
) -> Iterator[Running]:
    with a_door(tmp_path_factory.mktemp("http"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def grpc_door(tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]) -> Iterator[Door]:
    triton = StandIn()
    folder = tmp_path_factory.mktemp("grpc")
    started = ("--workers", "1", "--drain", "1", *options)
    with opened(folder, triton.address, *started) as door:
        yield door
    triton.close()


@pytest.fixture(scope="module", params=["http", "grpc"])
def impatient(
    tmp_path_factory: pytest.TempPathFactory,
    options: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> Iterator[Running | Door]:
    """A door that soon gives up slow clients."""
    folder = tmp_path_factory.mktemp("impatient")
    if request.param == "http":
        with a_door(folder, *options, limits=IMPATIENT) as running:
            yield running
    else:
        with opened(folder, "127.0.0.1:1", *options, header_timeout_s=1.0) as door:
            yield door


def post(door: Running, context: ssl.SSLContext, route: str = "echo/generate") -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(door.address, context=context, timeout=PATIENCE_S)
    try:
        connection.request("POST", f"/v2/models/{route}", BODY)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def secure(door: Door, made: Certificates, pair: tuple[Path, Path] | None = None) -> grpc.Channel:
    cert, key = (path.read_bytes() for path in pair) if pair is not None else (None, None)
    credentials = grpc.ssl_channel_credentials(made.ca.read_bytes(), key, cert)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.secure_channel(door.address, credentials, options=options)


def infer(channel: grpc.Channel) -> Any:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    return stub.ModelInfer(request("tokenizer", text("x")), timeout=PATIENCE_S)


def test_https_serves_responses_and_streams(
    http_door: Running, made: Certificates, is_mutual: bool
) -> None:
    context = made.context(made.client if is_mutual else None)
    assert post(http_door, context) == (200, BODY.replace(b": ", b":"))
    status, events = post(http_door, context, "stream/generate_stream")
    assert status == 200 and events.count(b"data: ") == 3


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_old_versions_are_refused(
    http_door: Running, grpc_door: Door, version: ssl.TLSVersion, kind: str
) -> None:
    address = http_door.address if kind == "http" else grpc_door.address
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
        context.wrap_socket(plain),
    ):
        pass


def test_plain_http_on_the_tls_port_is_closed(http_door: Running, made: Certificates) -> None:
    reply = http_door.raw(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"HTTP/1.1 200" not in reply
    assert http_door.process.poll() is None


@pytest.mark.parametrize("pause_s", [None, 0.5], ids=["silent", "slow"])
def test_104_a_slow_handshake_is_closed(impatient: Running | Door, pause_s: float | None) -> None:
    """A client that sends nothing, or a byte twice a second."""
    host, _, port = impatient.address.rpartition(":")
    hello = b"\x16\x03\x01\x02\x00" + bytes(512)  # a record, of which most never comes
    started = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain:
        plain.settimeout(pause_s or PATIENCE_S)
        for number in range(len(hello)):
            with contextlib.suppress(TimeoutError):
                try:
                    if not plain.recv(4096):
                        break
                except ConnectionError:
                    break
            assert pause_s is not None and time.monotonic() - started < PATIENCE_S
            with contextlib.suppress(OSError):  # closed; found by the next read
                plain.send(hello[number : number + 1])
    assert time.monotonic() - started >= 0.9


def test_https_needs_the_clients_certificate_if_so_configured(
    http_door: Running, made: Certificates, is_mutual: bool
) -> None:
    for client in (None, made.stranger):
        if is_mutual:
            with pytest.raises((ssl.SSLError, OSError)):
                post(http_door, made.context(client))
        else:
            assert post(http_door, made.context(client))[0] == 200


def test_grpc_serves_with_tls(grpc_door: Door, made: Certificates, is_mutual: bool) -> None:
    with secure(grpc_door, made, made.client if is_mutual else None) as channel:
        assert isinstance(infer(channel), service_pb2.ModelInferResponse)


def test_the_bundled_client_connects_with_tls(
    grpc_door: Door, made: Certificates, is_mutual: bool
) -> None:
    if not is_mutual:
        with Client(grpc_door.address, ca_file=str(made.ca)) as client:
            assert client.is_ready()
    with pytest.raises(InvalidRequest, match="ca_file: none: No such file"):
        Client(grpc_door.address, ca_file="none")
    with pytest.raises(InvalidRequest, match="api_key: allowed"):
        Client(grpc_door.address, api_key="a b")


def test_grpc_needs_the_clients_certificate_if_so_configured(
    grpc_door: Door, made: Certificates, is_mutual: bool
) -> None:
    with secure(grpc_door, made, made.stranger if is_mutual else None) as channel:
        if is_mutual:
            with pytest.raises(grpc.RpcError) as refused:
                infer(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        else:
            infer(channel)


def test_plain_grpc_on_the_tls_port_is_refused(grpc_door: Door) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    with (
        grpc.insecure_channel(grpc_door.address, options=options) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        infer(channel)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def renew(files: TlsFiles, folder: Path) -> Certificates:
    """Replace a door's files by those of another authority; returns them."""
    new = certificates.make(folder)
    os.replace(new.server.cert, files.cert)
    os.replace(new.server.key, files.key)
    return new


def trusts(address: str, made: Certificates) -> bool:
    """Whether a new handshake has a certificate of this authority."""
    host, _, port = address.rpartition(":")
    context = made.context()
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host):
                return True
        except ssl.SSLCertVerificationError:
            return False


def stays(address: str, made: Certificates) -> None:
    """Its certificate is in use for longer than changes are looked for."""
    until = time.monotonic() + 1.5 * REREAD_S
    while time.monotonic() < until:
        assert trusts(address, made)


def test_the_http_door_takes_a_new_certificate_and_keeps_its_streams(tmp_path: Path) -> None:
    old = certificates.make(tmp_path / "old")
    with a_door(tmp_path, *old.options) as door:
        connection = http.client.HTTPSConnection(
            door.address, context=old.context(), timeout=PATIENCE_S
        )
        connection.request("POST", "/v2/models/endless/generate_stream", BODY)
        response = connection.getresponse()
        assert response.read(len(EVENT)) == EVENT
        Path(old.server.cert).write_text("broken")
        stays(door.address, old)
        new = renew(old.server, tmp_path / "new")
        wait_until(lambda: trusts(door.address, new))
        assert not trusts(door.address, old)
        assert post(door, new.context()) == (200, BODY.replace(b": ", b":"))
        assert response.read(3 * len(EVENT)) == 3 * EVENT, "an open stream goes on"
        connection.close()


def test_the_grpc_door_takes_a_new_certificate_and_keeps_its_streams(tmp_path: Path) -> None:
    old, triton = certificates.make(tmp_path / "old"), StandIn()
    started = ("--workers", "1", "--drain", "1", *old.options)
    with opened(tmp_path, triton.address, *started) as door, secure(door, old) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(
            iter([request("endless", text("x"), id="1")]), timeout=2 * PATIENCE_S
        )
        next(stream)
        Path(old.server.cert).write_text("broken")
        stays(door.address, old)
        new = renew(old.server, tmp_path / "new")
        wait_until(lambda: trusts(door.address, new))
        with secure(door, new) as another:
            infer(another)
        with secure(door, old) as another, pytest.raises(grpc.RpcError) as caught:
            infer(another)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for _ in range(3):
            next(stream)
        stream.cancel()
    triton.close()
