"""A network between client and doors that is slow, resets connections or swallows them."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from grpc_guard import OWN, Door, StandIn, opened
from http_door import EVENT, LIMITS, Running, a_door, ask
from kserve import request, text
from tcp_proxy import TcpProxy, proxied
from waiting import PATIENCE_S, wait_until

DELAY_S = 0.05
WRITE_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def http_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {**LIMITS, "write_timeout_s": WRITE_TIMEOUT_S}
    with a_door(tmp_path_factory.mktemp("http"), limits=limits) as running:
        yield running


@pytest.fixture(scope="module")
def grpc_doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Door, StandIn]]:
    triton = StandIn()
    folder = tmp_path_factory.mktemp("grpc")
    options = ("--workers", "1", "--drain", "1")
    with opened(folder, triton.address, *options, write_timeout_s=WRITE_TIMEOUT_S) as door:
        yield door, triton
    triton.close()


@contextlib.contextmanager
def http_stream(proxy: TcpProxy, model: str, prompt: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(proxy.address, timeout=PATIENCE_S)
    body = json.dumps({"text_input": prompt})
    connection.request("POST", f"/v2/models/{model}/generate_stream", body)
    with contextlib.closing(connection), connection.getresponse() as response:
        yield response


def test_a_slow_network_delays_an_http_stream_and_loses_nothing(http_door: Running) -> None:
    with proxied(http_door.address) as proxy:
        proxy.delay_s = DELAY_S
        started = time.monotonic()
        with http_stream(proxy, "stream", "x") as response:
            assert response.status == 200 and response.read() == 3 * EVENT
        assert time.monotonic() - started >= 2 * DELAY_S


@pytest.mark.parametrize("fault", ["reset", "black hole"])
def test_an_http_stream_that_the_network_cuts_is_cancelled(http_door: Running, fault: str) -> None:
    num_lost = http_door.triton.num_lost
    # The client does not read all of it, so the door may already wait for it to do so.
    started = time.monotonic()
    with (
        proxied(http_door.address) as proxy,
        http_stream(proxy, "endless", "wide") as response,
    ):
        assert response.read(len(EVENT)) == EVENT
        if fault == "reset":
            proxy.reset()
        proxy.is_black_hole = True
        wait_until(lambda: http_door.triton.num_lost > num_lost)
        if fault == "black hole":
            assert time.monotonic() - started >= WRITE_TIMEOUT_S
    assert ask(http_door, "GET", "/v2/health/ready")[0] == 200


def begin_grpc(proxy: TcpProxy, model: str) -> tuple[grpc.Channel, Any]:
    channel = grpc.insecure_channel(proxy.address, options=OWN)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    message = request(model, text("x"), id="1")
    return channel, stub.ModelStreamInfer(iter([message]), timeout=2 * PATIENCE_S)


def test_a_slow_network_delays_a_grpc_stream_and_loses_nothing(
    grpc_doors: tuple[Door, StandIn],
) -> None:
    door, _ = grpc_doors
    with proxied(door.address) as proxy:
        proxy.delay_s = DELAY_S
        started = time.monotonic()
        channel, call = begin_grpc(proxy, "generate")
        answers = [one.infer_response.raw_output_contents[0] for one in call]
        assert answers == [b"all"]
        assert time.monotonic() - started >= 2 * DELAY_S
        channel.close()


@pytest.mark.parametrize("fault", ["reset", "black hole"])
def test_a_grpc_stream_that_the_network_cuts_is_cancelled(
    grpc_doors: tuple[Door, StandIn], fault: str
) -> None:
    door, triton = grpc_doors
    wait_until(lambda: triton.num_streams == 0)  # the end of an earlier stream sets it, too
    triton.cancelled.clear()
    with proxied(door.address) as proxy:
        started = time.monotonic()
        channel, call = begin_grpc(proxy, "endless")
        next(call)
        if fault == "reset":
            proxy.reset()
        proxy.is_black_hole = True
        assert triton.cancelled.wait(PATIENCE_S)
        if fault == "black hole":
            assert time.monotonic() - started >= WRITE_TIMEOUT_S
        channel.close()
    with proxied(door.address) as proxy:
        channel, call = begin_grpc(proxy, "generate")
        assert next(call).infer_response.id == "1"
        channel.close()
