"""The gRPC door as a process, in front of a stand-in for Triton."""

import gzip
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from grpc_guard import OWN, READY, SERVICE, Door, StandIn, opened
from inflight.ipc.health import Health
from inflight.ipc.metrics import request_counts
from kserve import request, text
from otlp_collector import attributes, collecting

CODE = grpc.StatusCode
PROMPT = text("A prompt")
DRAIN_S = 3.0
EXIT_S = 5.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A door with one worker and short limits."""
    triton = StandIn()
    folder = tmp_path_factory.mktemp("door")
    limits = {"write_timeout_s": 2.0, "body_timeout_s": 2.0, "header_timeout_s": 2.0}
    with opened(folder, triton.address, "--workers", "1", "--drain", "1", **limits) as door:
        yield door, triton
    triton.close()


@pytest.fixture
def door(shared):
    found, triton = shared
    found.set_health(READY)
    triton.received.clear()
    triton.cancelled.clear()
    triton.release.clear()
    return found


@pytest.fixture
def triton(shared):
    return shared[1]


@pytest.fixture
def alone(tmp_path):
    """A door of its own, which the test stops."""
    triton = StandIn()
    door = Door(tmp_path, triton.address, "--workers", "2", "--drain", str(DRAIN_S))
    yield door, triton
    door.close()
    triton.close()


class Stream:
    """An open ModelStreamInfer."""

    def __init__(self, stub, *metadata):
        self._requests = queue.Queue()
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), metadata=metadata)

    def ask(self, model="generate", *inputs, **fields):
        self.send(request(model, *(inputs or (PROMPT,)), **fields))
        return next(self.call)

    def send(self, message):
        self._requests.put(message)

    def close(self):
        """End the client's part."""
        self._requests.put(None)
        return list(self.call)

    def status(self):
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                next(self.call)
        self._requests.put(None)
        return caught.value.code(), caught.value.details()


def refused(function, *arguments, **named):
    with pytest.raises(grpc.RpcError) as caught:
        function(*arguments, **named)
    return caught.value.code(), caught.value.details()


def raw(door, method, data, **named):
    return door.channel.unary_unary(f"{SERVICE}/{method}")(data, **named)


# ---------------------------------------------------------------- what passes


def test_a_unary_request_reaches_triton_as_it_was(door, triton):
    message = request("tokenizer", PROMPT, id="7").SerializeToString()
    assert raw(door, "ModelInfer", message) == message
    method, data, metadata = triton.received[0]
    assert method == f"{SERVICE}/ModelInfer" and data == message
    assert len(metadata["x-request-id"]) == 16


def test_a_stream_is_relayed_in_both_directions(door, triton):
    stream = Stream(door.stub)
    for number in ("1", "2"):
        response = stream.ask(id=number).infer_response
        assert response.id == number
        assert response.raw_output_contents[0] == b"all"
    assert stream.close() == []
    assert len(triton.received) == 2


def test_triton_is_asked_to_mark_the_end_and_the_client_gets_what_it_asked_for(door):
    asked = {"triton_enable_empty_final_response": True}
    stream = Stream(door.stub)
    assert stream.ask("silent-end", id="1", parameters=asked).infer_response.outputs
    last = next(stream.call).infer_response
    assert not last.outputs and last.parameters["triton_final_response"].bool_param
    assert stream.ask("silent-end", id="2").infer_response.outputs
    assert stream.close() == []


def test_only_tritons_metadata_is_passed_on(door, triton):
    metadata = (("triton_grpc_error", "true"), ("authorization", "secret"), ("x-request-id", "x"))
    stream = Stream(door.stub, *metadata)
    stream.ask()
    stream.close()
    found = triton.received[0][2]
    assert found["triton_grpc_error"] == "true"
    assert "authorization" not in found and found["x-request-id"] != "x"


def test_case_97_the_same_id_twice_at_once(door):
    first, second = Stream(door.stub), Stream(door.stub)
    assert first.ask("wait", id="1").infer_response.id == "1"
    assert second.ask(id="1").infer_response.id == "1"
    first.call.cancel()
    assert second.ask(id="1").infer_response.id == "1"
    second.close()


# ---------------------------------------------------------------- routes and health


@pytest.mark.parametrize("name", ["RepositoryModelLoad", "SystemSharedMemoryRegister"])
def test_case_107_what_can_change_the_server_is_closed(door, triton, name):
    code, details = refused(raw, door, name, b"")
    assert code is CODE.PERMISSION_DENIED
    assert details.startswith(f"{name}: is closed; allowed: ")
    assert not triton.received


@pytest.mark.parametrize("method", ["/a/b", f"{SERVICE}/Nothing", "/", "/inference/../x"])
def test_an_unknown_method_is_refused(door, method):
    code, details = refused(door.channel.unary_unary(method), b"")
    assert code is CODE.UNIMPLEMENTED
    assert details.startswith("the method is unknown") or code is CODE.UNIMPLEMENTED


def check(door, service=b""):
    data = b"\x0a" + bytes([len(service)]) + service if service else b""
    return door.channel.unary_unary("/grpc.health.v1.Health/Check")(data)


SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def test_probes_tell_what_the_supervisor_wrote(door, triton):
    assert door.stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert check(door) == check(door, b"generate") == SERVING
    index = door.stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())
    assert [(model.name, model.state) for model in index.models] == [("generate", "READY")]
    door.set_health(Health(is_live=True, is_ready=False, reason="the engine restarts"))
    assert door.stub.ServerLive(service_pb2.ServerLiveRequest()).live
    assert not door.stub.ServerReady(service_pb2.ServerReadyRequest()).ready
    assert not door.stub.ModelReady(service_pb2.ModelReadyRequest(name="generate")).ready
    assert check(door) == NOT_SERVING
    assert refused(check, door, b"unknown")[0] is CODE.NOT_FOUND
    door.set_health(None)
    assert not door.stub.ServerLive(service_pb2.ServerLiveRequest()).live
    assert not triton.received


def test_a_watch_is_told_of_changes(door):
    call = door.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
    assert next(call) == SERVING
    door.set_health(Health(is_live=True, is_ready=False, reason="x"))
    assert next(call) == NOT_SERVING
    call.cancel()


def test_case_106_requests_are_refused_while_the_server_is_not_ready(door, triton):
    door.set_health(Health(is_live=True, is_ready=False, reason="the engine restarts"))
    message = request("generate", PROMPT, id="4")
    expected = "the server is not ready: the engine restarts; try again later"
    assert refused(door.stub.ModelInfer, message) == (CODE.UNAVAILABLE, expected)
    stream = Stream(door.stub)
    answer = stream.ask(id="4")
    assert answer.error_message == expected and answer.infer_response.id == "4"
    door.set_health(READY)
    assert stream.ask(id="5").infer_response.id == "5"
    stream.close()
    assert len(triton.received) == 1


# ---------------------------------------------------------------- refusals


def test_a_bad_message_of_a_stream_is_answered_and_the_stream_goes_on(door, triton):
    stream = Stream(door.stub)
    answer = stream.ask("generate", PROMPT, PROMPT, id="9")
    assert answer.error_message == "text_input: is twice in inputs; allowed: once"
    assert answer.infer_response.id == "9"
    assert stream.ask(id="10").infer_response.id == "10"
    answer = stream.ask("generate", PROMPT, PROMPT, id="11")
    assert answer.error_message
    stream.close()
    assert len(triton.received) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_with_triton_grpc_error_it_ends_the_stream(door, is_first):
    stream = Stream(door.stub, ("triton_grpc_error", "true"))
    if not is_first:
        stream.ask()
    stream.send(request("generate", PROMPT, PROMPT))
    code, details = stream.status()
    assert code is CODE.INVALID_ARGUMENT
    assert details == "text_input: is twice in inputs; allowed: once"


def test_case_53_a_large_message_is_refused(door, triton):
    message = request("generate", text("a" * (5 << 20)))
    assert refused(door.stub.ModelInfer, message)[0] is CODE.RESOURCE_EXHAUSTED
    stream = Stream(door.stub)
    stream.send(message)
    assert stream.status()[0] is CODE.RESOURCE_EXHAUSTED
    assert not triton.received


def test_case_09_compressed_messages_are_refused(door, triton):
    message = request("generate", text("a" * 100_000))
    code, _ = refused(door.stub.ModelInfer, message, compression=grpc.Compression.Gzip)
    assert code is CODE.UNIMPLEMENTED
    assert not triton.received
    assert gzip  # the codec exists here


def test_case_12_large_metadata_is_refused(door):
    metadata = (("x-large", "a" * (64 << 10)),)
    code, _ = refused(raw, door, "ServerLive", b"", metadata=metadata)
    assert code is CODE.RESOURCE_EXHAUSTED


def test_errors_show_no_paths(door):
    code, details = refused(door.stub.ModelInfer, request("path", PROMPT))
    assert code is CODE.INTERNAL and details == "the server failed to run the request"
    stream = Stream(door.stub)
    assert stream.ask("path").error_message == "the server failed to run the request"
    stream.close()


def test_tritons_own_errors_are_passed_on(door):
    expected = (CODE.UNAVAILABLE, "the queue is full; try again later")
    assert refused(door.stub.ModelInfer, request("busy", PROMPT)) == expected


# ---------------------------------------------------------------- cancels, deadlines, slow peers


def test_case_100_a_cancel_reaches_triton_at_once(door, triton):
    stream = Stream(door.stub)
    stream.ask("wait")
    stream.call.cancel()
    assert triton.cancelled.wait(1.0)


def test_case_100_a_lost_connection_reaches_triton_at_once(door, triton):
    channel = grpc.insecure_channel(door.address, options=OWN)
    stream = Stream(service_pb2_grpc.GRPCInferenceServiceStub(channel))
    stream.ask("wait")
    channel.close()
    assert triton.cancelled.wait(1.0)


def test_case_100_a_cancelled_unary_call_reaches_triton(door, triton):
    future = door.stub.ModelInfer.future(request("slow", PROMPT))
    while not triton.received:
        time.sleep(0.01)
    future.cancel()
    assert triton.cancelled.wait(1.0)


def test_case_101_a_half_closed_stream_goes_on(door, triton):
    stream = Stream(door.stub)
    stream.ask("wait", id="1")
    threading.Timer(0.3, triton.release.set).start()
    assert [answer.infer_response.raw_output_contents[0] for answer in stream.close()] == [b"all"]


def test_case_105_deadlines_are_passed_on(door, triton):
    started = time.monotonic()
    call = door.stub.ModelInfer
    assert refused(call, request("slow", PROMPT), timeout=0.5)[0] is CODE.DEADLINE_EXCEEDED
    assert triton.cancelled.wait(1.0)
    assert time.monotonic() - started < 2.0
    assert refused(call, request("slow", PROMPT), timeout=0.0001)[0] is CODE.DEADLINE_EXCEEDED


def test_case_102_a_client_that_does_not_read_is_cut_off(door, triton):
    slow = Stream(door.stub)
    slow.send(request("endless", PROMPT))
    other = Stream(door.stub)
    started = time.monotonic()
    while not triton.cancelled.wait(0.1):
        assert other.ask(id="1").infer_response.id == "1"
        assert time.monotonic() - started < 10
    assert time.monotonic() - started > 1.5
    code, details = slow.status()
    assert code is CODE.RESOURCE_EXHAUSTED and "not read for 2 s" in details
    other.close()


def test_case_13_a_request_that_never_comes_is_given_up(door):
    requests = queue.Queue()
    call = door.channel.stream_unary(f"{SERVICE}/ModelInfer").future(iter(requests.get, None))
    with pytest.raises(grpc.RpcError) as caught:
        call.result(timeout=10)
    assert caught.value.code() is CODE.DEADLINE_EXCEEDED
    requests.put(None)


# ---------------------------------------------------------------- connections


def test_case_104_bytes_of_other_protocols_are_survived(door):
    context = ssl.create_default_context()
    with pytest.raises(OSError), socket.create_connection(address(door), 5) as plain:
        context.wrap_socket(plain, server_hostname="localhost")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000, os.urandom(5000)):
        with socket.create_connection(address(door), 5) as plain:
            plain.sendall(data)
    assert check(door) == SERVING


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
HEADERS, RST_STREAM = 1, 3


def frame(kind, flags, stream, payload):
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def call_headers(path):
    """Of a gRPC call, in HPACK."""
    texts = ((b"\x44", path), (b"\x41", "x"), (b"\x5f", "application/grpc"))
    block = b"\x83\x86"  # :method POST, :scheme http
    for name, value in texts:
        block += name + bytes([len(value)]) + value.encode()
    return block + b"\x40\x02te\x08trailers"


@pytest.mark.parametrize("method", ["ServerLive", "ModelStreamInfer"])
def test_case_104_a_rapid_reset_is_survived(door, method):
    """Thousands of calls, each reset at once."""
    block = call_headers(f"{SERVICE}/{method}")
    with socket.create_connection(address(door), 5) as plain:
        plain.sendall(PREFACE)
        try:
            for index in range(5000):
                stream = 2 * index + 1
                reset = frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
                plain.sendall(frame(HEADERS, 4, stream, block) + reset)
        except OSError:
            pass  # the server has closed the connection
    started = time.monotonic()
    assert check(door) == SERVING
    assert time.monotonic() - started < 5


def test_the_headers_of_the_rapid_reset_are_a_call(door):
    with socket.create_connection(address(door), 5) as plain:
        message = b"\0\0\0\0\0"
        live = call_headers(f"{SERVICE}/ServerLive")
        plain.sendall(PREFACE + frame(HEADERS, 4, 1, live) + frame(0, 1, 1, message))
        found = b""
        while b"\0\0\0\0\x02\x08\x01" not in found:  # live: true
            found += plain.recv(4096)


def test_case_104_many_bare_connections_are_survived_and_closed(door):
    sockets = [socket.create_connection(address(door), 5) for _ in range(300)]
    assert check(door) == SERVING
    assert closes(sockets[0], 6)
    for one in sockets:
        one.close()
    assert check(door) == SERVING


def closes(connection, seconds):
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def address(door):
    host, port = door.address.rsplit(":", 1)
    return host, int(port)


def test_connections_above_the_limit_are_closed(tmp_path, triton):
    options = ("--workers", "1")
    with opened(tmp_path, triton.address, *options, max_connections=20) as door:
        assert check(door) == SERVING
        sockets = [socket.create_connection(address(door), 5) for _ in range(40)]
        assert sum(closes(one, 0.2) for one in sockets) >= 20
        assert check(door) == SERVING
        for one in sockets:
            one.close()


def test_case_103_an_idle_stream_is_closed_and_one_with_a_request_is_not(tmp_path, triton):
    options = ("--workers", "1")
    with opened(tmp_path, triton.address, *options, stream_idle_timeout_s=1.0) as door:
        unused, used, busy = (Stream(door.stub) for _ in range(3))
        assert used.ask(id="1").infer_response.id == "1"
        busy.ask("wait", id="2")
        for stream in (unused, used):
            code, details = stream.status()
            assert code is CODE.UNAVAILABLE and "no request for 1 s" in details
        triton.release.set()
        assert next(busy.call).infer_response.id == "2", "its request was in flight all the time"
        busy.close()


# ---------------------------------------------------------------- processes


def test_triton_lost_in_mid_stream_ends_the_stream(alone):
    door, triton = alone
    stream = Stream(door.stub)
    stream.ask("wait")
    started = time.monotonic()
    threading.Thread(target=triton.close).start()
    code, details = stream.status()
    assert time.monotonic() - started < 1.0
    expected = "the server was lost while it ran the request; send the request again"
    assert (code, details) == (CODE.UNAVAILABLE, expected)
    assert refused(door.stub.ModelInfer, request("x", PROMPT)) == (CODE.UNAVAILABLE, expected)


def test_a_triton_that_was_started_again_is_found_within_a_second(alone):
    door, triton = alone
    message = request("tokenizer", PROMPT)
    door.stub.ModelInfer(message)
    triton.close()
    assert refused(door.stub.ModelInfer, message)[0] is CODE.UNAVAILABLE
    time.sleep(2.0)
    again = StandIn(triton.address)
    try:
        started = time.monotonic()
        while True:
            try:
                door.stub.ModelInfer(message)
                break
            except grpc.RpcError:
                assert time.monotonic() - started < 1.5
                time.sleep(0.05)
    finally:
        again.close()


def test_sigterm_ends_idle_streams_and_lets_busy_ones_finish(alone):
    door, triton = alone
    idle, busy, new = Stream(door.stub), Stream(door.stub), Stream(door.stub)
    idle.ask()
    busy.ask("wait", id="1")
    started = time.monotonic()
    door.process.terminate()
    assert idle.status()[0] is CODE.UNAVAILABLE
    assert new.status()[0] is CODE.UNAVAILABLE
    assert time.monotonic() - started < 1.0
    busy.send(request("generate", PROMPT, id="2"))
    assert "shutting down" in next(busy.call).error_message
    triton.release.set()
    assert next(busy.call).infer_response.raw_output_contents[0] == b"all"
    code, details = busy.status()
    assert code is CODE.UNAVAILABLE and details.startswith("the server is shutting down")
    assert door.process.wait(EXIT_S) == 0
    assert time.monotonic() - started < DRAIN_S


def test_sigterm_with_endless_work_exits_when_the_drain_is_over(alone):
    door, _ = alone
    busy, slow = Stream(door.stub), Stream(door.stub)
    busy.ask("wait")
    slow.send(request("endless", PROMPT))
    started = time.monotonic()
    door.process.terminate()
    assert door.process.wait(DRAIN_S + EXIT_S) == 0
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
    deadline = time.monotonic() + 10
    while len(door.workers()) < 2 or set(before) & set(door.workers()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    call = door.stub.ServerReady
    assert call(service_pb2.ServerReadyRequest(), wait_for_ready=True, timeout=10).ready


def test_workers_end_with_the_door(alone):
    door, _ = alone
    workers = door.workers()
    door.process.kill()
    door.process.wait()
    deadline = time.monotonic() + 2
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
    deadline = time.monotonic() + 2
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
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
        code, _ = refused(door.stub.ServerReady, service_pb2.ServerReadyRequest(), timeout=5)
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
        assert triton.cancelled.wait(5.0)
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
