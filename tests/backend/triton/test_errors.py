"""An error is delayed until it is safe for tritonserver, and is never lost."""

import time

import pytest

import triton_python_backend_utils as pb_utils
from inflight.errors import CapacityError, RequestError
from inflight.triton.errors import EARLIEST_ERROR_S, DelayedErrors


@pytest.fixture
def errors():
    errors = DelayedErrors()
    yield errors
    errors.close()


def test_an_error_is_sent_once_its_request_is_old_enough(errors):
    sender = pb_utils.ResponseSender()
    sent = time.monotonic()
    errors.send(sender, RequestError("is empty", "text_input"))
    (response,) = sender.wait()
    assert time.monotonic() - sent >= EARLIEST_ERROR_S
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert response.error().message() == "text_input: is empty"
    assert sender.misuses == []


def test_due_responses_do_not_wait(errors):
    sent = []
    errors.when_due(time.monotonic() - EARLIEST_ERROR_S, lambda: sent.append(1))
    assert sent == [1]


def test_many_errors_wait_together_and_keep_their_order(errors):
    started, sent = time.monotonic(), []
    for number in range(1000):
        # None is due before the last one waits, even if this process is paused meanwhile.
        errors.when_due(started + 3.0, lambda number=number: sent.append(number))
    last = pb_utils.ResponseSender()
    errors.send(last, CapacityError("full"))
    last.wait()
    assert sent == list(range(1000))
    assert time.monotonic() - started < 1000 * EARLIEST_ERROR_S


def test_an_error_that_cannot_be_sent_does_not_affect_later_ones(errors, caplog, monkeypatch):
    monkeypatch.setattr("inflight.triton.errors.EARLIEST_ERROR_S", 1.0)  # none is due at once
    broken, fine = pb_utils.ResponseSender(), pb_utils.ResponseSender()
    broken.failures = 1
    for sender in (broken, fine):
        errors.send(sender, CapacityError("full"))
    assert fine.wait()[0].error().message() == "full"
    assert "an error could not be sent" in caplog.text


def test_closing_sends_what_waits_in_its_time():
    errors, sender = DelayedErrors(), pb_utils.ResponseSender()
    sent = time.monotonic()
    errors.send(sender, CapacityError("full"))
    errors.close()
    assert len(sender.responses) == 1
    assert time.monotonic() - sent >= EARLIEST_ERROR_S
