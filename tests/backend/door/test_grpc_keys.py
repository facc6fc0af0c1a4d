"""The gRPC door of a server with keys."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2

from grpc_guard import READY, SERVICE, Door, StandIn, opened
from inflight.access.key import KeyLimits
from inflight.door.grpc.routes import CLOSED
from inflight_client import Client, Unavailable
from keys import KeyDesk, desk
from kserve import request, text
from waiting import PATIENCE_S, wait_until

CODE = grpc.StatusCode
PROMPT = text("A prompt")
METHODS = sorted(
    {
        *CLOSED, "ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelReady",
        "ModelInfer", "RepositoryIndex", "Nothing", "serverlive", "ServerLive/",
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyDesk]:
    with desk(tmp_path_factory.mktemp("keys")) as found:
        yield found


@pytest.fixture(scope="module")
def triton() -> Iterator[StandIn]:
    found = StandIn()
    yield found
    found.close()


@pytest.fixture(scope="module")
def door(
    tmp_path_factory: pytest.TempPathFactory, keys: KeyDesk, triton: StandIn
) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    options = ("--workers", "2", "--drain", "1", *keys.options)
    with opened(folder, triton.address, *options) as found:
        yield found


@pytest.fixture(scope="module")
def key(keys: KeyDesk) -> str:
    return keys.issue()


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


def status(call: Any) -> tuple[grpc.StatusCode, str]:
    """Of a unary call; OK if it succeeds."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return CODE.OK, ""


def raw(door: Door, method: str, data: bytes, secret: str | None = None) -> Any:
    path = method if method.startswith("/") else f"{SERVICE}/{method}"
    metadata = bearer(secret) if secret is not None else None
    return status(
        lambda: door.channel.unary_unary(path)(data, metadata=metadata, timeout=PATIENCE_S)
    )


def infer(door: Door, secret: str, model: str = "tokenizer") -> Any:
    return raw(door, "ModelInfer", request(model, PROMPT).SerializeToString(), secret)


@pytest.mark.parametrize("method", METHODS)
def test_20_every_method_needs_a_key(door: Door, triton: StandIn, method: str) -> None:
    triton.received.clear()
    code, details = raw(door, method, b"")
    assert code is CODE.UNAUTHENTICATED
    assert "no valid API key" in details
    assert triton.received == []


@pytest.mark.parametrize("path", ["/x/y", "//inference.GRPCInferenceService/ServerLive", "/a"])
def test_20_odd_paths_need_a_key(door: Door, path: str) -> None:
    assert raw(door, path, b"")[0] is CODE.UNAUTHENTICATED


def test_20_a_stream_needs_a_key_before_its_first_message(door: Door) -> None:
    never: queue.Queue[None] = queue.Queue()
    call = door.stub.ModelStreamInfer(iter(never.get, None), timeout=PATIENCE_S)
    assert status(lambda: next(call))[0] is CODE.UNAUTHENTICATED
    never.put(None)


def test_probes_need_no_key(door: Door) -> None:
    assert door.stub.ServerLive(service_pb2.ServerLiveRequest()).live
    assert door.stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert raw(door, "/grpc.health.v1.Health/Check", b"")[0] is CODE.OK


def test_a_key_opens_the_methods(door: Door, key: str) -> None:
    message = request("tokenizer", PROMPT).SerializeToString()
    for metadata in (
        (("authorization", f"bearer {key}"),),
        (("x-api-key", key),),
        (("Authorization".lower(), f"Bearer {key}"), ("x-tenant", "other")),
    ):
        assert door.channel.unary_unary(f"{SERVICE}/ModelInfer")(message, metadata=metadata)
    assert raw(door, "RepositoryModelLoad", b"", key)[0] is CODE.PERMISSION_DENIED
    assert raw(door, "Nothing", b"", key)[0] is CODE.UNIMPLEMENTED


def test_21_bad_credentials_are_refused(door: Door, key: str) -> None:
    for metadata in (
        (("authorization", ""),),
        (("authorization", key),),
        (("authorization", f"Basic {key}"),),
        (("authorization", f"Bearer {key}x"),),
        (("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")),
        (("authorization", f"Bearer {key}"), ("x-api-key", key)),
        (("x-api-key-bin", key.encode()),),
    ):
        call = door.channel.unary_unary(f"{SERVICE}/ModelInfer")
        code, details = status(lambda c=call, m=metadata: c(b"", metadata=m))
        assert code is CODE.UNAUTHENTICATED, metadata
        assert key not in details


def test_the_account_is_the_keys_whatever_the_client_sends(
    keys: KeyDesk, door: Door, triton: StandIn
) -> None:
    made, secret = keys.issue_key("acme")
    triton.received.clear()
    assert infer(door, secret)[0] is CODE.OK
    _, data, metadata = triton.received[0]
    sent = service_pb2.ModelInferRequest.FromString(data)
    assert sent.parameters["inflight_account"].string_param == f"acme/{made.id}"
    assert "authorization" not in metadata
    message = request("tokenizer", PROMPT)
    message.parameters["inflight_account"].string_param = "other/1"
    code, details = raw(door, "ModelInfer", message.SerializeToString(), secret)
    assert (code, details) == (
        CODE.INVALID_ARGUMENT,
        "inflight_account: is reserved for the server; allowed: other names",
    )


def test_other_models_are_unknown_to_a_key(keys: KeyDesk, door: Door, triton: StandIn) -> None:
    secret = keys.issue(models=("tokenizer",))
    triton.received.clear()
    assert infer(door, secret, "other")[0] is CODE.NOT_FOUND
    for name in ("ModelMetadata", "ModelConfig", "ModelReady", "ModelStatistics"):
        message = service_pb2.ModelMetadataRequest(name="other").SerializeToString()
        assert raw(door, name, message, secret)[0] is CODE.NOT_FOUND, name
    assert raw(door, "ModelStatistics", b"", secret)[0] is CODE.INVALID_ARGUMENT
    assert triton.received == []
    index = door.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), metadata=bearer(secret))
    assert list(index.models) == []
    assert infer(door, secret)[0] is CODE.OK


def test_a_key_allows_all_versions_of_its_models(
    keys: KeyDesk, door: Door, triton: StandIn
) -> None:
    versions = {"tokenizer": [1, 2], "other": [3]}
    door.set_health(msgspec.structs.replace(READY, versions=versions))
    try:
        secret = keys.issue(models=("tokenizer",))
        triton.received.clear()
        assert infer(door, secret)[0] is CODE.OK
        about = service_pb2.ModelMetadataRequest(name="tokenizer", version="1")
        assert raw(door, "ModelReady", about.SerializeToString(), secret)[0] is CODE.OK
        names = [
            service_pb2.ModelInferRequest.FromString(triton.received[0][1]).model_name,
            service_pb2.ModelMetadataRequest.FromString(triton.received[1][1]).name,
        ]
        assert names == ["tokenizer@2", "tokenizer@1"]
        for name, words in (("tokenizer", "no version 9; allowed: 1, 2"), ("other", "tokenizer")):
            about = service_pb2.ModelMetadataRequest(name=name, version="9")
            for method in ("ModelMetadata", "ModelReady"):
                code, details = raw(door, method, about.SerializeToString(), secret)
                assert code is CODE.NOT_FOUND and words in details
        assert len(triton.received) == 2
    finally:
        door.set_health(READY)


class Stream:
    """An open ModelStreamInfer."""

    def __init__(self, door: Door, secret: str) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self.call = door.stub.ModelStreamInfer(
            iter(self._requests.get, None), metadata=bearer(secret), timeout=2 * PATIENCE_S
        )

    def ask(self, model: str = "generate") -> str:
        """The error, if any."""
        self._requests.put(request(model, PROMPT))
        return str(next(self.call).error_message)

    def close(self) -> None:
        self._requests.put(None)


def test_a_key_revoked_during_a_stream_starts_no_further_request(keys: KeyDesk, door: Door) -> None:
    made, secret = keys.issue_key()
    stream = Stream(door, secret)
    assert stream.ask() == ""
    keys.revoke(made)
    assert "no valid API key" in stream.ask()
    stream.close()


def test_each_request_of_a_stream_counts(keys: KeyDesk, door: Door) -> None:
    secret = keys.issue(limits=KeyLimits(requests_per_minute=3))
    stream = Stream(door, secret)
    errors = [stream.ask() for _ in range(5)]
    stream.close()
    assert errors[:3] == [""] * 3
    assert all(
        "requests_per_minute: the key has reached its limit of 3" in one for one in errors[3:]
    )


def test_clients_read_when_a_limit_allows_the_next_request(keys: KeyDesk, door: Door) -> None:
    secret = keys.issue(limits=KeyLimits(requests_per_minute=1))
    assert infer(door, secret)[0] is CODE.OK
    with pytest.raises(grpc.RpcError) as refused:
        door.stub.ModelInfer(request("tokenizer", PROMPT), metadata=bearer(secret))
    seconds = int(dict(refused.value.trailing_metadata())["retry-after"])
    assert 1 <= seconds <= 60
    with (
        Client(door.address, api_key=secret, max_retries=0) as client,
        pytest.raises(Unavailable, match=r"requests_per_minute: .* retry in \d+ s") as raised,
    ):
        client.generate("A prompt")
    assert raised.value.retry_after is not None
    assert 1 <= raised.value.retry_after <= seconds


def test_limits_hold_for_all_workers_together(keys: KeyDesk, door: Door) -> None:
    """Each connection lands on one of two workers."""
    made, secret = keys.issue_key(limits=KeyLimits(requests_per_minute=10))
    codes = []
    for _ in range(24):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(door.address, options=options) as channel:
            call = channel.unary_unary(f"{SERVICE}/ModelInfer")
            data = request("tokenizer", PROMPT).SerializeToString()
            codes.append(status(lambda c=call, d=data: c(d, metadata=bearer(secret)))[0])
    assert codes.count(CODE.OK) == 10
    assert codes.count(CODE.RESOURCE_EXHAUSTED) == 14
    events = [json.loads(line) for line in keys.audit.read_text().splitlines()]
    assert {event["peer"].split(":")[0] for event in events} >= {"ipv4"}
    assert sum(event.get("key") == made.id for event in events) == 14


def test_concurrent_requests_are_limited_and_given_back(keys: KeyDesk, door: Door) -> None:
    secret = keys.issue(limits=KeyLimits(concurrent_requests=1))
    stream = Stream(door, secret)
    stream._requests.put(request("endless", PROMPT))
    next(stream.call)
    code, details = infer(door, secret)
    assert code is CODE.RESOURCE_EXHAUSTED
    assert details == "concurrent_requests: the key has reached its limit of 1; retry in 1 s"
    stream.call.cancel()
    wait_until(lambda: infer(door, secret)[0] is CODE.OK)
    for _ in range(3):  # each gives back what it took
        assert infer(door, secret)[0] is CODE.OK


def test_a_door_does_not_start_with_a_broken_keys_file(tmp_path: Path, triton: StandIn) -> None:
    (tmp_path / "keys.json").write_text("[]")
    command = [sys.executable, "-m", "inflight.door.grpc_door", "--listen", "127.0.0.1:0"]
    command += ["--upstream", triton.address, "--health", str(tmp_path / "health.json")]
    command += ["--keys", str(tmp_path / "keys.json"), "--accounts", str(tmp_path / "no.sock")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "keys.json: is not a keys file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_103_a_key_has_so_many_streams_and_another_key_its_own(
    tmp_path: Path, keys: KeyDesk, triton: StandIn, key: str
) -> None:
    options = ("--workers", "1", "--drain", "1", *keys.options)
    with opened(tmp_path, triton.address, *options, max_streams_per_key=3) as door:
        held = [Stream(door, key) for _ in range(3)]
        assert [one.ask() for one in held] == [""] * 3
        more = Stream(door, key)
        code, details = status(lambda: next(more.call))
        more.close()
        assert code is CODE.RESOURCE_EXHAUSTED
        assert details == (
            "stream: the key has 3 open streams; allowed: 3; close some, or send several requests "
            "on one"
        )
        other = Stream(door, keys.issue())
        assert other.ask() == ""
        held[0].close()
        assert list(held[0].call) == []
        another = Stream(door, key)
        assert another.ask() == ""
        for one in (other, another, *held[1:]):
            one.close()
