"""The gRPC door as a process: the end of Triton, signals, workers, TLS, counts."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from grpc_guard import Door, StandIn, opened
from grpc_stream import PROMPT, Stream, refused
from inflight.deploy.ports import HeldPorts
from inflight.ipc.metrics import request_counts
from kserve import request
from otlp_collector import attributes, collecting
from waiting import PATIENCE_S, wait_until

CODE = grpc.StatusCode
DRAIN_S = 3.0
# Below the time in which the door finds out by itself that Triton does not answer.
NOTICED_S = 20.0


@pytest.fixture
def alone(tmp_path):
    """A door of its own, which the test stops."""
    with a_door(tmp_path, DRAIN_S) as found:
        yield found


@contextlib.contextmanager
def a_door(folder, drain_s):
    triton = StandIn()
    door = Door(folder, triton.address, "--workers", "2", "--drain", str(drain_s))
    yield door, triton
    door.close()
    triton.close()


def test_triton_lost_in_mid_stream_ends_the_stream(alone):
    door, triton = alone
    stream = Stream(door.stub)
    stream.ask("wait")
    started = time.monotonic()
    threading.Thread(target=triton.close).start()
    code, details = stream.status()
    assert time.monotonic() - started < NOTICED_S
    expected = "the server was lost while it ran the request; send the request again"
    assert (code, details) == (CODE.UNAVAILABLE, expected)
    assert refused(door.stub.ModelInfer, request("x", PROMPT)) == (CODE.UNAVAILABLE, expected)


def test_a_triton_that_was_started_again_is_found_within_a_second(alone):
    """Or a bit more, at the best of some times: a busy machine delays all of it."""
    door, triton = alone
    found = [found_again_after(door, triton)]
    while found[-1] > 1.5 and len(found) < 5:
        found.append(found_again_after(door, triton))
    assert found[-1] <= 1.5, found


def found_again_after(door, triton):
    """Seconds until the door serves again, after two without Triton."""
    message = request("tokenizer", PROMPT)
    door.stub.ModelInfer(message)
    triton.stop()
    held = HeldPorts("127.0.0.1", (int(triton.address.rpartition(":")[2]),))
    assert refused(door.stub.ModelInfer, message)[0] is CODE.UNAVAILABLE
    time.sleep(2.0)
    triton.start()
    held.release()
    started = time.monotonic()
    wait_until(lambda: serves(door, message))
    return time.monotonic() - started


def serves(door, message):
    try:
        door.stub.ModelInfer(message)
    except grpc.RpcError:
        return False
    return True


def test_sigterm_ends_idle_streams_and_lets_busy_ones_finish(tmp_path):
    with a_door(tmp_path, 4 * PATIENCE_S) as (door, triton):
        idle, busy, new = Stream(door.stub), Stream(door.stub), Stream(door.stub)
        idle.ask()
        busy.ask("wait", id="1")
        started = time.monotonic()
        door.process.terminate()
        assert idle.status()[0] is CODE.UNAVAILABLE
        assert new.status()[0] is CODE.UNAVAILABLE
        busy.send(request("generate", PROMPT, id="2"))
        assert "shutting down" in next(busy.call).error_message
        triton.release.set()
        assert next(busy.call).infer_response.raw_output_contents[0] == b"all"
        code, details = busy.status()
        assert code is CODE.UNAVAILABLE and details.startswith("the server is shutting down")
        assert door.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - started < 4 * PATIENCE_S, "not the time of the drain"


def test_sigterm_with_endless_work_exits_when_the_drain_is_over(alone):
    door, _ = alone
    busy, slow = Stream(door.stub), Stream(door.stub)
    busy.ask("wait")
    slow.send(request("endless", PROMPT))
    started = time.monotonic()
    door.process.terminate()
    assert door.process.wait(PATIENCE_S) == 0
    assert time.monotonic() - started > DRAIN_S - 0.5
    assert busy.status()[0] is CODE.UNAVAILABLE
    slow.call.cancel()


def test_sigint_is_ignored_and_a_dead_worker_is_replaced(alone):
    door, _ = alone
    door.process.send_signal(signal.SIGINT)
    before = door.workers()
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(set(door.workers()) - set(before)) == 2)
    call = door.stub.ServerReady
    assert call(service_pb2.ServerReadyRequest(), wait_for_ready=True, timeout=PATIENCE_S).ready


def test_workers_end_with_the_door(alone):
    door, _ = alone
    workers = door.workers()
    door.process.kill()
    door.process.wait()
    wait_until(lambda: not any(is_running(pid) for pid in workers))


def test_the_door_ends_with_its_parent(tmp_path):
    command = ["-m", "inflight.door.grpc_door", "--listen", "127.0.0.1:0"]
    command += ["--upstream", "127.0.0.1:1", "--health", str(tmp_path / "x"), "--workers", "1"]
    code = f"""if True:
        import subprocess, sys
        door = subprocess.Popen([sys.executable, *{command!r}], stdout=subprocess.PIPE)
        door.stdout.readline()
        print(door.pid)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wait_until(lambda: not is_running(int(done.stdout)))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.alone
def test_the_door_starts_within_a_second_and_imports_nothing_heavy(tmp_path):
    triton = StandIn()
    started = time.monotonic()
    with opened(tmp_path, triton.address, "--workers", "1"):
        assert time.monotonic() - started < 2.0  # 1 s on an idle machine
    triton.close()
    code = "import inflight.door.grpc.worker, sys; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "nowhere"], "allowed: host:port"),
        (["--listen", "192.0.2.1:1"], "--listen: 192.0.2.1:1: "),
        (["--limits", "{"], "--limits: "),
        (["--tls-cert", "x"], "--tls-cert and --tls-key: one is missing"),
    ],
)
def test_bad_options_end_the_door(options, message):
    command = [sys.executable, "-m", "inflight.door.grpc_door", "--listen", "127.0.0.1:0"]
    command += ["--upstream", "127.0.0.1:1", "--health", "x", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert message in done.stderr and "Traceback" not in done.stderr


def test_tls(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    command += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    subprocess.run(command.split(), capture_output=True, check=True)
    triton = StandIn()
    files = ["--tls-cert", str(certificate), "--tls-key", str(key)]
    with opened(tmp_path, triton.address, "--workers", "1", *files) as door:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        port = door.address.rsplit(":", 1)[1]
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        code, _ = refused(
            door.stub.ServerReady, service_pb2.ServerReadyRequest(), timeout=PATIENCE_S
        )
        assert code is CODE.UNAVAILABLE
    triton.close()


def test_calls_are_counted_by_status_over_all_workers_and_probes_are_not(tmp_path):
    triton = StandIn()
    counts = ("--workers", "2", "--counts", str(tmp_path / "grpc.requests"))
    with opened(tmp_path, triton.address, *counts) as door:
        door.stub.ModelInfer(request("echo", PROMPT))
        assert refused(door.stub.ModelInfer, request("busy", PROMPT))[0] is CODE.UNAVAILABLE
        assert door.stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        stream = Stream(door.stub)
        stream.ask("wait")
        stream.call.cancel()
        assert triton.cancelled.wait(PATIENCE_S)
    triton.close()
    expected = {"OK": 1, "UNAVAILABLE": 1, "CANCELLED": 1}
    assert request_counts.read(tmp_path, "grpc") == expected


def test_spans_of_calls_reach_the_collector(tmp_path):
    triton = StandIn()
    context = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
    with collecting() as collector:
        options = ("--workers", "1", "--drain", "1", "--otlp-endpoint", collector.url)
        with opened(tmp_path, triton.address, *options) as door:
            door.stub.ModelInfer(request("echo", PROMPT), metadata=context)
            assert refused(door.stub.ModelInfer, request("busy", PROMPT))[0] is CODE.UNAVAILABLE
        spans = {attributes(one)["gen_ai.request.model"]: one for one in collector.wait_for(2)}
    triton.close()
    assert spans["echo"].trace_id.hex() == "a" * 32
    assert spans["echo"].parent_span_id.hex() == "b" * 16
    assert attributes(spans["echo"])["inflight.status"] == "OK"
    assert "gen_ai.server.time_to_first_token" in attributes(spans["echo"])
    assert attributes(spans["busy"])["error.type"] == "UNAVAILABLE"
