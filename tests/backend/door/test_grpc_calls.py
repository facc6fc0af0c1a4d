"""Calls through the gRPC door, in front of a stand-in for Triton."""

import gzip
import os
import queue
import socket
import ssl
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from grpc_guard import OWN, READY, SERVICE, StandIn, opened
from grpc_stream import PROMPT, Stream, refused
from inflight.ipc.health import Health
from kserve import request, text
from waiting import PATIENCE_S, wait_until

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def stand_in():
    found = StandIn()
    yield found
    found.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory, stand_in):
    """A door with one worker."""
    folder = tmp_path_factory.mktemp("door")
    with opened(folder, stand_in.address, "--workers", "1", "--drain", "1") as door:
        yield door


@pytest.fixture(scope="module")
def impatient(tmp_path_factory, stand_in):
    """A door that soon gives up slow clients."""
    folder = tmp_path_factory.mktemp("impatient")
    limits = {"write_timeout_s": 2.0, "body_timeout_s": 2.0, "header_timeout_s": 2.0}
    with opened(folder, stand_in.address, "--workers", "1", "--drain", "1", **limits) as door:
        yield door


@pytest.fixture
def triton(stand_in):
    stand_in.received.clear()
    stand_in.cancelled.clear()
    stand_in.release.clear()
    return stand_in


@pytest.fixture
def door(shared, triton):
    shared.set_health(READY)
    return shared


def raw(door, method, data, **named):
    return door.channel.unary_unary(f"{SERVICE}/{method}")(data, **named)


# ---------------------------------------------------------------- what passes


def test_a_unary_request_reaches_triton_with_a_ticket(door, triton):
    message = request("tokenizer", PROMPT, id="7")
    answer = raw(door, "ModelInfer", message.SerializeToString())
    method, data, metadata = triton.received[0]
    assert method == f"{SERVICE}/ModelInfer" and answer == data
    found = service_pb2.ModelInferRequest.FromString(data)
    assert len(found.parameters.pop("inflight_ticket").string_param) == 16
    assert found == message
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


def check(door, service=b"", timeout=None):
    data = b"\x0a" + bytes([len(service)]) + service if service else b""
    return door.channel.unary_unary("/grpc.health.v1.Health/Check")(data, timeout=timeout)


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


def test_a_refusal_says_when_the_request_may_be_accepted(door):
    """As the header Retry-After does over HTTP; not if the request itself is at fault."""

    def retry_after(model, *inputs):
        with pytest.raises(grpc.RpcError) as caught:
            door.stub.ModelInfer(request(model, *inputs))
        metadata = dict(caught.value.trailing_metadata())
        assert metadata["x-request-id"]
        return metadata.get("retry-after")

    assert retry_after("busy", PROMPT) == "1"
    assert retry_after("path", PROMPT) is None
    assert retry_after("generate", PROMPT, PROMPT) is None
    door.set_health(Health(is_live=True, is_ready=False, reason="the engine restarts"))
    assert retry_after("generate", PROMPT) == "1"


# ---------------------------------------------------------------- cancels, deadlines, slow peers


def test_case_100_a_cancel_reaches_triton_at_once(door, triton):
    stream = Stream(door.stub)
    stream.ask("wait")
    stream.call.cancel()
    assert triton.cancelled.wait(PATIENCE_S)


def test_case_100_a_lost_connection_reaches_triton_at_once(door, triton):
    channel = grpc.insecure_channel(door.address, options=OWN)
    stream = Stream(service_pb2_grpc.GRPCInferenceServiceStub(channel))
    stream.ask("wait")
    channel.close()
    assert triton.cancelled.wait(PATIENCE_S)


def test_case_100_a_cancelled_unary_call_reaches_triton(door, triton):
    future = door.stub.ModelInfer.future(request("slow", PROMPT))
    wait_until(lambda: triton.received)
    future.cancel()
    assert triton.cancelled.wait(PATIENCE_S)


def test_case_101_a_half_closed_stream_goes_on(door, triton):
    stream = Stream(door.stub)
    stream.ask("wait", id="1")
    threading.Timer(0.3, triton.release.set).start()
    assert [answer.infer_response.raw_output_contents[0] for answer in stream.close()] == [b"all"]


def test_case_105_deadlines_are_passed_on(door, triton):
    call = door.stub.ModelInfer
    for timeout in (0.5, 5.0, 50.0):  # until it is enough to reach Triton
        assert refused(call, request("slow", PROMPT), timeout=timeout)[0] is CODE.DEADLINE_EXCEEDED
        if triton.received:
            break
    assert triton.cancelled.wait(PATIENCE_S)
    assert refused(call, request("slow", PROMPT), timeout=0.0001)[0] is CODE.DEADLINE_EXCEEDED


def test_case_102_a_client_that_does_not_read_is_cut_off(impatient, triton):
    started = time.monotonic()
    slow = Stream(impatient.stub)
    slow.send(request("endless", PROMPT))
    other = Stream(impatient.stub)
    while not triton.cancelled.wait(0.1):
        assert other.ask(id="1").infer_response.id == "1"
        assert time.monotonic() - started < PATIENCE_S
    assert time.monotonic() - started > 1.5
    code, details = slow.status()
    assert code is CODE.RESOURCE_EXHAUSTED and "not read for 2 s" in details
    other.close()


def test_case_13_a_request_that_never_comes_is_given_up(impatient):
    requests = queue.Queue()
    call = impatient.channel.stream_unary(f"{SERVICE}/ModelInfer").future(iter(requests.get, None))
    with pytest.raises(grpc.RpcError) as caught:
        call.result(timeout=PATIENCE_S)
    assert caught.value.code() is CODE.DEADLINE_EXCEEDED
    requests.put(None)


# ---------------------------------------------------------------- connections


def test_case_104_bytes_of_other_protocols_are_survived(door):
    context = ssl.create_default_context()
    with pytest.raises(OSError), connect(door) as plain:
        context.wrap_socket(plain, server_hostname="localhost")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000, os.urandom(5000)):
        with connect(door) as plain:
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
    with connect(door) as plain:
        plain.sendall(PREFACE)
        try:
            for index in range(5000):
                stream = 2 * index + 1
                reset = frame(RST_STREAM, 0, stream, b"\0\0\0\x08")
                plain.sendall(frame(HEADERS, 4, stream, block) + reset)
        except OSError:
            pass  # the server has closed the connection
    assert check(door, timeout=PATIENCE_S) == SERVING


def test_the_headers_of_the_rapid_reset_are_a_call(door):
    with connect(door) as plain:
        message = b"\0\0\0\0\0"
        live = call_headers(f"{SERVICE}/ServerLive")
        plain.sendall(PREFACE + frame(HEADERS, 4, 1, live) + frame(0, 1, 1, message))
        found = b""
        while b"\0\0\0\0\x02\x08\x01" not in found:  # live: true
            found += plain.recv(4096)


def test_case_104_many_bare_connections_are_survived_and_closed(impatient):
    sockets = [connect(impatient) for _ in range(300)]
    assert check(impatient) == SERVING
    wait_until(lambda: is_closed(sockets[0]))
    for one in sockets:
        one.close()
    assert check(impatient) == SERVING


def is_closed(connection):
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def connect(door):
    host, port = door.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), PATIENCE_S)


def test_connections_above_the_limit_are_closed(tmp_path, triton):
    options = ("--workers", "1")
    with opened(tmp_path, triton.address, *options, max_connections=20) as door:
        assert check(door) == SERVING
        sockets = [connect(door) for _ in range(40)]
        wait_until(lambda: sum(is_closed(one) for one in sockets) >= 20)
        assert check(door) == SERVING
        for one in sockets:
            one.close()


def test_case_103_an_idle_stream_is_closed_and_one_with_a_request_is_not(tmp_path, triton):
    options = ("--workers", "1")
    with opened(tmp_path, triton.address, *options, stream_idle_timeout_s=4.0) as door:
        unused, used, busy = (Stream(door.stub) for _ in range(3))
        assert used.ask(id="1").infer_response.id == "1"
        busy.ask("wait", id="2")
        for stream in (unused, used):
            code, details = stream.status()
            assert code is CODE.UNAVAILABLE and "no request for 4 s" in details
        triton.release.set()
        assert next(busy.call).infer_response.id == "2", "its request was in flight all the time"
        busy.close()
