"""Killing the engine process fails only the requests in flight."""

import os
import signal
import socket
import struct
import threading
import time

import pytest

from inflight.ipc import engine_client
from kserve import Refused, Stream, ask, request, tensor, text
from serving import serve

pytestmark = pytest.mark.integration

ENDLESS = (
    tensor("stream", "BOOL", True),
    tensor("ignore_eos", "BOOL", True),
    tensor("max_tokens", "INT32", 8000),
)


@pytest.fixture
def triton(tmp_path):
    yield from serve(tmp_path, "cpu")


def engine_pid(triton):
    path = engine_client.socket_path(triton.log.parent / "models" / "llm", triton.server.pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid


def test_a_killed_engine_fails_what_is_in_flight_once_and_comes_back(triton):
    messages = [
        request("llm", tensor("input_ids", "INT32", [504, 3575, 282]), *ENDLESS),
        request("generate", text("The capital of"), *ENDLESS),
        request("generate", text("The capital of"), *ENDLESS[1:]),  # not streamed
    ]
    errors = []

    def read(stream):
        try:
            for _ in stream:
                pass
        except Refused as refused:
            errors.append(str(refused))

    threads = [
        threading.Thread(target=read, args=(Stream(triton.grpc, message),)) for message in messages
    ]
    for thread in threads:
        thread.start()
    triton.wait_for(lambda stats: stats.num_running == 3 and stats.num_output_tokens > 30, 10)

    os.kill(engine_pid(triton), signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - killed < 2
    assert len(errors) == 3
    assert all("the engine exited while it processed this request" in error for error in errors)

    while True:
        try:
            (answer,) = ask(
                triton.grpc, request("generate", text("x"), tensor("max_tokens", "INT32", 2))
            )
            break
        except Refused as refused:
            assert "the engine is restarting" in str(refused)
            assert time.monotonic() - killed < 30
            time.sleep(0.1)
    assert answer["finish_reason"] in ("stop", "length")

    # The detokenizer found the new engine too: else this stream would be taken for abandoned.
    tokens = tensor("max_tokens", "INT32", 100)
    answers = ask(triton.grpc, request("generate", text("x"), *ENDLESS[:2], tokens))
    assert sum(answer["num_output_tokens"] for answer in answers) == 100

    # Nothing of the failed requests is left in Triton: it can end in order.
    os.kill(triton.server.pid, signal.SIGTERM)
    assert triton.server.wait(10) == 0
