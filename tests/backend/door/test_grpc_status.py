"""Statuses name the remedy, and no internal details."""

import grpc
import pytest

from inflight.door.grpc import status
from inflight.door.grpc.status import Code
from inflight.errors import CapacityError, EngineError, RequestError


@pytest.mark.parametrize(
    "text",
    [
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:36973: Failed to "
        "connect to remote host: Connection refused",
        "Stream removed (Socket closed)",
        "Socket closed",
        "recvmsg:Connection reset by peer",
        "Cancelling all calls",
        "GOAWAY received",
    ],
)
def test_a_lost_connection_is_one_sentence(text):
    assert status.of_triton(Code.UNAVAILABLE, text).text == status.LOST


@pytest.mark.parametrize(
    "text",
    [
        "Stream removed (Failed parsing HTTP/2 (integer overflow in hpack integer decoding))",
        "Received RST_STREAM with error code 2",
        "Internal error from Core",
    ],
)
@pytest.mark.parametrize("code", [Code.INTERNAL, Code.UNKNOWN, Code.UNAVAILABLE])
def test_a_malformed_response_is_a_lost_connection(code, text):
    assert status.of_triton(code, text) == status.Status(Code.UNAVAILABLE, status.LOST)


@pytest.mark.parametrize(
    "text",
    [
        "Failed to open region triton_python_backend_shm_region_0c1",
        "cannot open /dev/shm/x",
        "File /opt/tritonserver/backends/x.py, line 5",
        "Traceback (most recent call last)",
    ],
)
def test_texts_of_the_inside_are_replaced(text):
    assert status.of_triton(Code.INTERNAL, text).text == status.FAILED


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: -2 is out of range; allowed: [-1, 2147483647]",
        "in ensemble 'generate', text_input: is empty; allowed: at least one character",
        "Request for unknown model: 'a/b' is not found",
        "the queue is full (10/10); try again later",
    ],
)
def test_other_texts_are_passed_on(text):
    assert status.of_triton(Code.UNAVAILABLE, text).text == text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("x"), Code.INVALID_ARGUMENT),
        (CapacityError("x"), Code.UNAVAILABLE),
        (EngineError("x"), Code.INTERNAL),
        (status.Refused(Code.PERMISSION_DENIED, "x"), Code.PERMISSION_DENIED),
    ],
)
def test_errors_have_a_code(error, code):
    assert status.of(error) == status.Status(code, "x")


def test_an_unexpected_error_shows_nothing():
    assert status.of(KeyError("/etc/x")) == status.Status(grpc.StatusCode.INTERNAL, status.FAILED)


def test_full_shared_memory_is_a_reason_to_retry():
    text = (
        "Failed to increase the shared memory pool size for key "
        "'triton_python_backend_shm_region_1' to 1048576 bytes. Error: No space left on device"
    )
    found = status.of_triton(Code.INTERNAL, text)
    assert found.code is Code.UNAVAILABLE and "too little free shared memory" in found.text
    assert status.clean(text) == found.text


@pytest.mark.parametrize("code", [Code.CANCELLED, Code.INTERNAL])
def test_a_missed_deadline_has_grpcs_code_for_it(code):
    text = (
        "in ensemble 'generate', deadline_ms: the request was not complete 50 ms after its arrival "
        "(it had 3 output tokens); allow it more time, or send it when the load is lower"
    )
    assert status.of_triton(code, text) == status.Status(Code.DEADLINE_EXCEEDED, text)
    assert status.of_triton(code, text).metadata == ()


def test_a_refusal_may_say_when_to_retry():
    found = status.of_triton(Code.UNAVAILABLE, "9 requests are waiting; retry in 17 s")
    assert found.metadata == (("retry-after", "17"),)
    assert status.of_triton(Code.UNAVAILABLE, "retry later").metadata == (("retry-after", "1"),)
