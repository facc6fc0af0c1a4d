"""Response queues keep order, lose nothing, end once, and coalesce pending responses."""

import itertools
import queue
import random
import threading
import time

import pytest

from inflight.core.request import FinishReason, TokenEvent
from inflight.errors import EngineError
from inflight.triton.response_queue import ResponseQueue, SenderPool, Sweep
from waiting import PATIENCE_S, wait_until


class ResponseSink:
    def __init__(self, pause=0.0):
        self.events = []
        self.responses = []
        self.abandoned = 0
        self.pause = pause
        self.failing = False
        self.ended = threading.Event()

    def send(self, events, is_final):
        if self.failing:
            raise RuntimeError("no shared memory left")
        time.sleep(self.pause)
        self.responses.append(([event.request_id for event in events], is_final))
        self.events += events
        if is_final:
            self.ended.set()

    def abandon(self):
        self.abandoned += 1


def token(position, last=False, output=1):
    reason = FinishReason.STOP if last else None
    return TokenEvent(output, [position], [position - 1], position, finish_reason=reason)


def test_events_that_waited_leave_as_one():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, True, queue.SimpleQueue())
    for position in (1, 2, 3):
        response_queue.post(token(position))
    response_queue.flush()
    assert sink.events == [TokenEvent(1, [1, 2, 3], [0], 3)]


def test_a_mailbox_waits_in_its_queue_once():
    shard = queue.SimpleQueue()
    response_queue = ResponseQueue(ResponseSink(), True, shard)
    for position in (1, 2, 3):
        response_queue.post(token(position))
    assert shard.qsize() == 1
    response_queue.flush()
    response_queue.post(token(4))
    assert shard.qsize() == 2


def test_without_a_stream_there_is_one_response_at_the_end():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, False, queue.SimpleQueue())
    for position in (1, 2):
        response_queue.post(token(position))
        response_queue.flush()
    assert sink.events == []
    response_queue.post(token(3, last=True))
    response_queue.flush()
    assert sink.events == [TokenEvent(1, [1, 2, 3], [0], 3, finish_reason=FinishReason.STOP)]


def test_undelivered_responses_hold_the_next_ones_back_together():
    shard, sink = queue.SimpleQueue(), ResponseSink()
    response_queue = ResponseQueue(sink, True, shard, max_undelivered=1)
    for position in (1, 2, 3):
        response_queue.post(token(position))
        response_queue.flush()
    assert [e.token_ids for e in sink.events] == [[1]]
    response_queue.delivered(1)
    assert shard.qsize() > 0
    response_queue.flush()
    assert [e.token_ids for e in sink.events] == [[1], [2, 3]]


def test_the_last_response_waits_for_no_delivery():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, True, queue.SimpleQueue(), max_undelivered=1)
    response_queue.post(token(1))
    response_queue.flush()
    response_queue.post(token(2))
    response_queue.flush()
    response_queue.post(token(3, last=True))
    response_queue.flush()
    assert [e.token_ids for e in sink.events] == [[1], [2, 3]]


def test_nothing_follows_the_last_event():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, True, queue.SimpleQueue())
    response_queue.post(token(1, last=True))
    response_queue.post(token(2))
    response_queue.flush()
    response_queue.flush()
    assert [event.position for event in sink.events] == [1]


def test_several_outputs_stream_separately_and_end_together():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, True, queue.SimpleQueue(), num_outputs=3)
    for event in (token(1), token(1, output=2), token(2), token(1, True, output=3)):
        response_queue.post(event)
    response_queue.flush()
    assert sink.responses == [([1], False), ([2], False), ([3], False)]
    assert [event.token_ids for event in sink.events] == [[1, 2], [1], [1]]
    response_queue.post(token(3, True))
    response_queue.flush()
    response_queue.post(token(2, True, output=2))
    response_queue.flush()
    assert sink.responses[3:] == [([1], False), ([2], True)]
    assert response_queue.closed


def test_outputs_that_end_together_are_final_once():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, True, queue.SimpleQueue(), num_outputs=2)
    response_queue.post(token(1, True, output=2))
    response_queue.post(token(1, True))
    response_queue.flush()
    assert sink.responses == [([2], False), ([1], True)]


def test_several_outputs_without_a_stream_are_one_response():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, False, queue.SimpleQueue(), num_outputs=2)
    for event in (token(1), token(1, output=2), token(2, True, output=2), token(2)):
        response_queue.post(event)
        response_queue.flush()
    assert sink.responses == []
    response_queue.post(token(3, True))
    response_queue.flush()
    assert sink.responses == [([1, 2], True)]
    assert [event.token_ids for event in sink.events] == [[1, 2, 3], [1, 2]]


def test_the_failure_of_one_output_ends_all():
    sink = ResponseSink()
    response_queue = ResponseQueue(sink, False, queue.SimpleQueue(), num_outputs=2)
    response_queue.post(token(1, True))
    response_queue.post(TokenEvent.failed(2, EngineError("broken")))
    response_queue.post(token(2))
    response_queue.flush()
    assert sink.responses == [([2], True)]
    assert "broken" in sink.events[0].error


def test_a_failed_send_abandons_the_request_once(caplog):
    sink = ResponseSink()
    sink.failing = True
    response_queue = ResponseQueue(sink, True, queue.SimpleQueue())
    for position in (1, 2):
        response_queue.post(token(position))
        response_queue.flush()
    assert sink.abandoned == 1
    assert sink.events == []
    assert "a response could not be sent" in caplog.text


def test_streams_keep_their_order_under_load():
    """200 streams of 50 tokens over 4 threads, posted from one reader as an engine would."""
    senders = SenderPool(4)
    outlets = [ResponseSink(pause=0.0002) for _ in range(200)]
    mailboxes = [senders.response_queue(sink, stream=True) for sink in outlets]
    for position in range(1, 51):
        random.Random(position).shuffle(mailboxes)
        for response_queue in mailboxes:
            response_queue.post(token(position, last=position == 50))
    for sink in outlets:
        assert sink.ended.wait(PATIENCE_S)
        ids = [id_ for event in sink.events for id_ in event.token_ids]
        assert ids == list(range(1, 51))
    assert sum(len(sink.events) for sink in outlets) < 200 * 50, "nothing was coalesced"
    senders.close()


def test_closing_sends_what_is_pending():
    senders = SenderPool(1)
    sink = ResponseSink(pause=0.01)
    response_queue = senders.response_queue(sink, stream=True)
    for position in range(1, 5):
        response_queue.post(token(position, last=position == 4))
    senders.close()
    assert sink.events[-1].is_last


@pytest.mark.alone
def test_a_sweep_takes_a_tenth_of_the_time_at_most():
    looks = []

    def look():
        looks.append(time.monotonic())
        time.sleep(0.02)
        return True

    sweep = Sweep(look, interval=0.001)
    time.sleep(0.7)
    sweep.close()
    assert 2 <= len(looks) <= 4
    assert min(b - a for a, b in itertools.pairwise(looks)) >= 0.2


def test_a_sweep_survives_an_exception(caplog):
    looks = []

    def look():
        looks.append(1)
        raise RuntimeError("the stub is going down")

    sweep = Sweep(look, interval=0.005)
    wait_until(lambda: len(looks) > 1)
    sweep.close()


def test_a_sweep_with_nothing_to_look_at_waits_until_it_is_woken():
    looks = threading.Semaphore(0)

    def look():
        looks.release()
        return False

    sweep = Sweep(look, interval=0.001)
    assert looks.acquire(timeout=PATIENCE_S)
    assert not looks.acquire(timeout=0.1)
    sweep.wake()
    assert looks.acquire(timeout=PATIENCE_S)
    sweep.close()


def test_a_sweep_that_is_woken_while_it_looks_looks_again():
    looks = []
    is_looking, may_end = threading.Event(), threading.Event()

    def look():
        looks.append(1)
        is_looking.set()
        may_end.wait(PATIENCE_S)
        return False

    sweep = Sweep(look, interval=0.001)
    assert is_looking.wait(PATIENCE_S)
    sweep.wake()
    may_end.set()
    wait_until(lambda: len(looks) == 2)
    sweep.close()
    assert len(looks) == 2
