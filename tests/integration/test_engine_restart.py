"""Killing the engine process fails only the requests in flight."""

import json
import os
import signal
import socket
import struct
import threading
import time

import psutil
import pytest

import long_results
import small_checkpoint
from failpoint import failpoint
from inflight.ipc import engine_client
from kserve import Refused, Stream, ask, request, tensor, text
from serving import serve

pytestmark = pytest.mark.integration

NUM_KILLS = 20

ENDLESS = (
    tensor("stream", "BOOL", True),
    tensor("ignore_eos", "BOOL", True),
    tensor("max_tokens", "INT32", 8000),
)


# As of a model on a GPU; without it, the tiny one's streams end soon.
STEP_MS = 10


@pytest.fixture
def triton(tmp_path):
    yield from serve(tmp_path, "cpu")


@pytest.fixture
def tiny_triton(tmp_path):
    """With a model whose engine is loaded at once."""

    def prepare(models):
        path = models / "llm" / "1" / "engine.json"
        model = {"model": str(small_checkpoint.write(tmp_path / "small")), "random_weights": True}
        path.write_text(json.dumps(json.loads(path.read_text()) | model))

    with failpoint("slow", STEP_MS):
        yield from serve(tmp_path, "cpu", prepare)


def engine_pid(triton):
    path = engine_client.socket_path(triton.log.parent / "models" / "llm", triton.server.pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid


def reader(triton, message, errors):
    """A thread that reads the responses to a request, and adds the error that ends them."""
    stream = Stream(triton.grpc, message)

    def read():
        try:
            for _ in stream:
                pass
        except Refused as refused:
            errors.append(str(refused))

    return threading.Thread(target=read)


def kill_engine_in_flight(triton):
    """Kill the engine with three requests in flight; each must fail, once.

    Returns:
        (seconds until all had failed, seconds until the server answered again)
    """
    messages = [
        request("llm", tensor("input_ids", "INT32", [504, 3575, 282]), *ENDLESS),
        request("generate", text("The capital of"), *ENDLESS),
        request("generate", text("The capital of"), *ENDLESS[1:]),  # not streamed
    ]
    errors = []
    threads = [reader(triton, message, errors) for message in messages]
    before = triton.stats().num_output_tokens
    for thread in threads:
        thread.start()
    triton.wait_for(lambda stats: stats.num_running == 3 and stats.num_output_tokens > before + 30)

    os.kill(engine_pid(triton), signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(60)
    failed_s = time.monotonic() - killed
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
            assert time.monotonic() - killed < 90
            time.sleep(0.1)
    assert answer["finish_reason"] in ("stop", "length")
    serving_s = time.monotonic() - killed
    triton.attach()

    # The detokenizer found the new engine too: else this stream would be taken for abandoned.
    tokens = tensor("max_tokens", "INT32", 100)
    answers = ask(triton.grpc, request("generate", text("x"), *ENDLESS[:2], tokens))
    assert sum(answer["num_output_tokens"] for answer in answers) == 100
    return failed_s, serving_s


def end_in_order(triton):
    """Nothing of the failed requests is left in Triton."""
    os.kill(triton.server.pid, signal.SIGTERM)
    assert triton.server.wait(60) == 0


def test_a_killed_engine_fails_what_is_in_flight_once_and_comes_back(tiny_triton):
    kill_engine_in_flight(tiny_triton)
    end_in_order(tiny_triton)


def test_a_stream_whose_detokenizer_is_behind_when_the_engine_is_killed_is_released(tiny_triton):
    """Triton never releases a request that fails while a response of it is in a later step."""
    errors = []
    message = request("generate", text("The capital of"), *ENDLESS)
    thread = reader(tiny_triton, message, errors)
    thread.start()
    tiny_triton.wait_for(lambda stats: stats.num_output_tokens > 5)
    (detokenizer,) = (
        one
        for one in psutil.Process(tiny_triton.server.pid).children()
        if any("/detokenizer/" in argument for argument in one.cmdline())
    )
    detokenizer.suspend()
    try:
        time.sleep(10 * STEP_MS / 1000)  # then it has a response of the stream
        os.kill(engine_pid(tiny_triton), signal.SIGKILL)
        time.sleep(0.5)  # a front that sends the error itself has sent it
    finally:
        detokenizer.resume()
    thread.join(60)
    assert len(errors) == 1
    assert "the engine exited while it processed this request" in errors[0]
    end_in_order(tiny_triton)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_engine_comes_back_each_time_it_is_killed(triton):
    tritonserver = psutil.Process(triton.server.pid)
    rows = []
    for number in range(1, NUM_KILLS + 1):
        failed_s, serving_s = kill_engine_in_flight(triton)
        assert failed_s < 2
        rows.append(
            {
                "kill": number,
                "failed_s": round(failed_s, 2),
                "serving_again_s": round(serving_s, 2),
                "tritonserver_rss_mib": tritonserver.memory_info().rss >> 20,
                "tritonserver_fds": tritonserver.num_fds(),
                "stubs": len(tritonserver.children()),
            }
        )
    assert rows[-1]["tritonserver_fds"] <= rows[1]["tritonserver_fds"] + 4
    assert rows[-1]["stubs"] == rows[0]["stubs"]
    end_in_order(triton)
    long_results.write("engine-kills", "kills of the engine", rows)
