"""Mailboxes keep order, lose nothing, end once, and coalesce what waited."""

import itertools
import queue
import random
import threading
import time

import pytest

from inflight.core.request import FinishReason, TokenEvent
from inflight.errors import EngineError
from inflight.triton.response_queue import Mailbox, Senders, Sweep


class Outlet:
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
    outlet = Outlet()
    mailbox = Mailbox(outlet, True, queue.SimpleQueue())
    for position in (1, 2, 3):
        mailbox.post(token(position))
    mailbox.flush()
    assert outlet.events == [TokenEvent(1, [1, 2, 3], [0], 3)]


def test_a_mailbox_waits_in_its_queue_once():
    shard = queue.SimpleQueue()
    mailbox = Mailbox(Outlet(), True, shard)
    for position in (1, 2, 3):
        mailbox.post(token(position))
    assert shard.qsize() == 1
    mailbox.flush()
    mailbox.post(token(4))
    assert shard.qsize() == 2


def test_without_a_stream_there_is_one_response_at_the_end():
    outlet = Outlet()
    mailbox = Mailbox(outlet, False, queue.SimpleQueue())
    for position in (1, 2):
        mailbox.post(token(position))
        mailbox.flush()
    assert outlet.events == []
    mailbox.post(token(3, last=True))
    mailbox.flush()
    assert outlet.events == [TokenEvent(1, [1, 2, 3], [0], 3, finish_reason=FinishReason.STOP)]


def test_undelivered_responses_hold_the_next_ones_back_together():
    shard, outlet = queue.SimpleQueue(), Outlet()
    mailbox = Mailbox(outlet, True, shard, max_on_the_way=1)
    for position in (1, 2, 3):
        mailbox.post(token(position))
        mailbox.flush()
    assert [e.token_ids for e in outlet.events] == [[1]]
    mailbox.delivered(1)
    assert shard.qsize() > 0
    mailbox.flush()
    assert [e.token_ids for e in outlet.events] == [[1], [2, 3]]


def test_the_last_response_waits_for_no_delivery():
    outlet = Outlet()
    mailbox = Mailbox(outlet, True, queue.SimpleQueue(), max_on_the_way=1)
    mailbox.post(token(1))
    mailbox.flush()
    mailbox.post(token(2))
    mailbox.flush()
    mailbox.post(token(3, last=True))
    mailbox.flush()
    assert [e.token_ids for e in outlet.events] == [[1], [2, 3]]


def test_nothing_follows_the_last_event():
    outlet = Outlet()
    mailbox = Mailbox(outlet, True, queue.SimpleQueue())
    mailbox.post(token(1, last=True))
    mailbox.post(token(2))
    mailbox.flush()
    mailbox.flush()
    assert [event.position for event in outlet.events] == [1]


def test_several_outputs_stream_apart_and_end_together():
    outlet = Outlet()
    mailbox = Mailbox(outlet, True, queue.SimpleQueue(), num_outputs=3)
    for event in (token(1), token(1, output=2), token(2), token(1, True, output=3)):
        mailbox.post(event)
    mailbox.flush()
    assert outlet.responses == [([1], False), ([2], False), ([3], False)]
    assert [event.token_ids for event in outlet.events] == [[1, 2], [1], [1]]
    mailbox.post(token(3, True))
    mailbox.flush()
    mailbox.post(token(2, True, output=2))
    mailbox.flush()
    assert outlet.responses[3:] == [([1], False), ([2], True)]
    assert mailbox.closed


def test_outputs_that_end_together_are_final_once():
    outlet = Outlet()
    mailbox = Mailbox(outlet, True, queue.SimpleQueue(), num_outputs=2)
    mailbox.post(token(1, True, output=2))
    mailbox.post(token(1, True))
    mailbox.flush()
    assert outlet.responses == [([2], False), ([1], True)]


def test_several_outputs_without_a_stream_are_one_response():
    outlet = Outlet()
    mailbox = Mailbox(outlet, False, queue.SimpleQueue(), num_outputs=2)
    for event in (token(1), token(1, output=2), token(2, True, output=2), token(2)):
        mailbox.post(event)
        mailbox.flush()
    assert outlet.responses == []
    mailbox.post(token(3, True))
    mailbox.flush()
    assert outlet.responses == [([1, 2], True)]
    assert [event.token_ids for event in outlet.events] == [[1, 2, 3], [1, 2]]


def test_the_failure_of_one_output_ends_all():
    outlet = Outlet()
    mailbox = Mailbox(outlet, False, queue.SimpleQueue(), num_outputs=2)
    mailbox.post(token(1, True))
    mailbox.post(TokenEvent.failed(2, EngineError("broken")))
    mailbox.post(token(2))
    mailbox.flush()
    assert outlet.responses == [([2], True)]
    assert "broken" in outlet.events[0].error


def test_a_failed_send_abandons_the_request_once(caplog):
    outlet = Outlet()
    outlet.failing = True
    mailbox = Mailbox(outlet, True, queue.SimpleQueue())
    for position in (1, 2):
        mailbox.post(token(position))
        mailbox.flush()
    assert outlet.abandoned == 1
    assert outlet.events == []
    assert "a response could not be sent" in caplog.text


def test_streams_keep_their_order_under_load():
    """200 streams of 50 tokens over 4 threads, posted from one reader as an engine would."""
    senders = Senders(4)
    outlets = [Outlet(pause=0.0002) for _ in range(200)]
    mailboxes = [senders.mailbox(outlet, stream=True) for outlet in outlets]
    for position in range(1, 51):
        random.Random(position).shuffle(mailboxes)
        for mailbox in mailboxes:
            mailbox.post(token(position, last=position == 50))
    for outlet in outlets:
        assert outlet.ended.wait(10)
        ids = [id_ for event in outlet.events for id_ in event.token_ids]
        assert ids == list(range(1, 51))
    assert sum(len(outlet.events) for outlet in outlets) < 200 * 50, "nothing was coalesced"
    senders.close()


def test_closing_sends_what_is_pending():
    senders = Senders(1)
    outlet = Outlet(pause=0.01)
    mailbox = senders.mailbox(outlet, stream=True)
    for position in range(1, 5):
        mailbox.post(token(position, last=position == 4))
    senders.close()
    assert outlet.events[-1].is_last


@pytest.mark.alone
def test_a_sweep_takes_a_tenth_of_the_time_at_most():
    looks = []

    def look():
        looks.append(time.monotonic())
        time.sleep(0.02)

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
    time.sleep(0.1)
    sweep.close()
    assert len(looks) > 1
