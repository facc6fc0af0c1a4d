"""Points of the security checklist that need a server (docs/reliability.md has the list).

The server's own processes run under `python -O`: what they refuse does not depend on assertions.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import msgspec
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from inflight.ipc import engine_client
from inflight.ipc.frames import PROTOCOL, Hello
from kserve import Refused, ask, post, request, text
from soak import BAD_BODIES, BAD_INPUTS, Load, usage
from supervised import Serving, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SECRET = "xylophone-7491"
FORGED = f"{SECRET}\x1b[31m\r\n2026-01-01 ERROR supervisor: forged\x00"
# Paths, addresses in memory, tracebacks, names of shared memory.
INTERNAL = re.compile(
    r"(/[\w.-]+){2,}|0x[0-9a-f]{4,}|Traceback|\.py\b|triton_[0-9a-z]+|std::|\bpid\b"
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONOPTIMIZE", "1")
        options = ("--grpc-guard", "--gateway-port", "0")
        with serve(tmp_path_factory.mktemp("security"), "echo", *options) as server:
            yield server


def processes(serving: Serving) -> list[psutil.Process]:
    return [serving.process, *serving.children()]


def metrics_address(serving: Serving) -> str:
    found = re.search(r"metrics\s+http://(\S+)/metrics", serving.shown.read_text())
    assert found is not None
    return found.group(1)


def is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def refusals(serving: Serving) -> Iterator[str]:
    """Error texts, over both protocols."""
    for body in (*BAD_BODIES, json.dumps({"text_input": FORGED, "top_k": -7})):
        yield post(serving.http, "generate", "generate", body)[1]
    for route in (f"/v2/models/{SECRET}", "/v2/models/..%2f..%2fetc/ready", "/v2/repository/index"):
        with socket.create_connection(("127.0.0.1", port(serving.http)), 60) as sock:
            sock.sendall(f"GET {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            yield sock.makefile("rb").read().decode().partition("\r\n\r\n")[2]
    for inputs in BAD_INPUTS:
        with pytest.raises(Refused) as refused:
            ask(serving.grpc, request("generate", *inputs))
        yield str(refused.value)
    with pytest.raises(Refused) as refused:
        ask(serving.grpc, request("generate", text("x"), id=FORGED))
    yield str(refused.value)


def test_02_only_the_clients_ports_listen_and_on_loopback(serving: Serving) -> None:
    listening = [
        (one.laddr.ip, one.laddr.port)
        for process in processes(serving)
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert all(is_loopback(ip) for ip, _ in listening), listening
    metrics = urlsplit(serving.engine_metrics).port
    doors = {port(serving.http), port(serving.grpc), port(serving.gateway), metrics}
    assert doors <= {number for _, number in listening}
    # Those of tritonserver: HTTP and gRPC for the doors, and metrics.
    triton = psutil.Process(serving.pid_of("tritonserver")).net_connections("inet")
    inner = {one.laddr.port for one in triton if one.status == psutil.CONN_LISTEN}
    assert {number for _, number in listening} == doors | inner and len(inner) == 3


def test_02_unix_sockets_are_for_their_owner_alone(serving: Serving) -> None:
    path = engine_client.socket_path(serving.models / "llm", serving.process.pid)
    sockets = [one for one in path.parent.iterdir() if stat.S_ISSOCK(one.lstat().st_mode)]
    assert path in sockets
    assert {stat.S_IMODE(one.lstat().st_mode) for one in sockets} == {0o600}
    assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in serving.regions()} == {0o600}


def test_12_no_process_connects_beyond_the_machine(serving: Serving) -> None:
    remotes: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(Load(serving).run, 300)
        while not load.done():
            for process in processes(serving):
                remotes |= {one.raddr.ip for one in process.net_connections("inet") if one.raddr}
        load.result()
    assert remotes and all(map(is_loopback, remotes)), remotes


def test_12_a_server_works_without_a_network(tmp_path: Path) -> None:
    unshare = ["unshare", "--map-root-user", "--net"]
    if shutil.which("ip") is None or subprocess.run([*unshare, "true"], check=False).returncode:
        # Many containers forbid namespaces to all but privileged users.
        # test_12_no_process_connects_beyond_the_machine tests the same claim by the sockets of all
        # processes.
        pytest.skip("network namespaces are not permitted here")
    (tmp_path / "run").mkdir(mode=0o700)
    done = subprocess.run(
        [*unshare, sys.executable, str(SUPPORT / "isolated_network.py"), str(tmp_path)],
        cwd=tmp_path,
        # Assertions of the helpers count.
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "PYTHONOPTIMIZE": ""},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "The canary sings." in done.stdout and "finish_reason" in done.stdout


def test_13_no_process_may_dump_core(serving: Serving) -> None:
    limits = {process.pid: process.rlimit(psutil.RLIMIT_CORE) for process in processes(serving)}
    assert len(limits) > 8 and set(limits.values()) == {(0, 0)}


def test_14_errors_show_nothing_internal(serving: Serving) -> None:
    texts = list(refusals(serving))
    assert len(texts) > 15 and all(texts)
    assert [one for one in texts if INTERNAL.search(one)] == []


def test_15_logs_and_metrics_hold_no_texts_of_clients(serving: Serving) -> None:
    """Points 15 and 20."""
    body = {"text_input": FORGED, "max_tokens": 5}
    assert post(serving.http, "generate", "generate", body)[0] == 200
    assert ask(serving.grpc, request("generate", text(SECRET)))
    list(refusals(serving))
    log = serving.log.read_text() + serving.shown.read_text()
    assert SECRET not in log and "forged" not in log
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", serving.log.read_text())
    with urllib.request.urlopen(f"http://{metrics_address(serving)}/metrics", timeout=60) as found:
        metrics = found.read().decode()
    assert "inflight_prompt_tokens_total" in metrics
    assert SECRET not in metrics


def test_16_model_control_is_closed(serving: Serving) -> None:
    for route in ("unload", "load"):
        address = f"http://{serving.http}/v2/repository/models/llm/{route}"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address, data=b"{}", timeout=60)
    with grpc.insecure_channel(serving.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="llm"))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert serving.canary()


def test_17_fuzzed_frames_cost_their_sender_the_connection(serving: Serving) -> None:
    canary, engine = serving.canary(), serving.pid_of("engine")
    path = engine_client.socket_path(serving.models / "llm", serving.process.pid)
    before = usage(serving)
    generator = random.Random(5)
    hello = msgspec.msgpack.encode(Hello(PROTOCOL, "front", 1))
    for _ in range(300):
        body = bytearray(generator.choice([hello, generator.randbytes(generator.randint(1, 200))]))
        for _ in range(generator.randint(0, 4)):
            body[generator.randrange(len(body))] = generator.randrange(256)
        length = generator.choice([len(body), len(body), len(body) + 3, 1 << 31, 0])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(60)
            peer.connect(str(path))
            peer.sendall(struct.pack("<I", length) + bytes(body))
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 16):
                pass
    assert serving.pid_of("engine") == engine
    assert serving.canary() == canary
    name = next(one for one in before if one.startswith("engine_main "))
    serving.wait_until(lambda: usage(serving)[name].fds <= before[name].fds + 2)
    assert usage(serving)[name].threads <= before[name].threads + 2
