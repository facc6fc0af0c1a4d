"""Frames arrive whole or not at all, and nonsense ends the connection that it came from."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request import Candidate, FinishReason, Request, TokenEvent
from inflight.ipc import frames
from inflight.ipc.frames import MAX_FRAME, Connection
from inflight.sampling.params import SamplingParams
from metric_snapshots import empty, observed, with_values

FRAMES: list[frames.Frame] = [
    frames.Hello(frames.PROTOCOL, "front", 77),
    frames.Loading("weights", 0.5),
    frames.Welcome("smol", 49152, 2048, 100, 16, [2], 256, True),
    frames.LoadFailed("config", "model: /nope does not exist"),
    frames.Submit(
        Request(
            1 << 32 | 5,
            [1, 2, 3],
            SamplingParams(temperature=0.5, seed=2**64 - 1, stop_words=("\n", "ü")),
            cache_salt="tenant",
            acknowledged=True,
        ),
        arrived=12345.678,
    ),
    frames.Cancel(2**63),
    frames.Delivered([(1, 2), (3, 4)]),
    frames.Drain(),
    frames.GetStats(),
    frames.Stats(*range(12), [1, 2], [3, 4], [5, 6]),
    frames.GetMetrics(),
    observed(with_values(empty(), generation_tokens=3), "step_seconds", [0.1], "decode"),
    frames.Refused({"invalid": 2}),
    frames.StepEvents(
        [
            TokenEvent(1, [5], [4], 1, cumulative_logprob=-0.5),
            TokenEvent(2, position=9, trim=2, finish_reason=FinishReason.STOP),
            TokenEvent(3, error_kind="engine", error="it broke"),
            TokenEvent(
                4, [5], [], 1, candidates=[[Candidate(5, -0.5, 2, "é"), Candidate(1, -1, 1)]]
            ),
            TokenEvent(5, prompt_candidates=[[], [Candidate(5, -0.5, 2, "é")]]),
        ]
    ),
]


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    left, right = socket.socketpair()
    ends = Connection(left), Connection(right)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Connection]]:
    """A peer that sends bytes, and the end that reads them."""
    left, right = socket.socketpair()
    end = Connection(right)
    yield left, end
    left.close()
    end.close()


def framed(value: Any) -> bytes:
    body = value if isinstance(value, bytes) else msgspec.msgpack.encode(value)
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_arrives_as_it_was_sent(
    pair: tuple[Connection, Connection], frame: frames.Frame
) -> None:
    pair[0].send(frame)
    assert pair[1].receive() == frame


def test_every_kind_of_frame_is_tried_above() -> None:
    assert {type(frame) for frame in FRAMES} == set(get_args(frames.Frame))


def test_frames_keep_their_order(pair: tuple[Connection, Connection]) -> None:
    for frame in FRAMES:
        pair[0].send(frame)
    assert [pair[1].receive() for _ in FRAMES] == FRAMES


def test_both_directions_at_once(pair: tuple[Connection, Connection]) -> None:
    """More than the socket holds each way: neither end may wait for the other to read first."""
    big = frames.Delivered([(i, i) for i in range(100_000)])
    received: list[frames.Frame | None] = []
    readers = [
        threading.Thread(target=lambda end=end: received.append(end.receive())) for end in pair
    ]
    writers = [threading.Thread(target=end.send, args=(big,)) for end in pair]
    for thread in readers + writers:
        thread.start()
    for thread in readers + writers:
        thread.join(timeout=60)
    assert received == [big, big]


def test_the_end_of_the_peer_is_the_end(pair: tuple[Connection, Connection]) -> None:
    pair[0].send(frames.Drain())
    pair[0].close()
    assert pair[1].receive() == frames.Drain()
    assert pair[1].receive() is None


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 10])
def test_a_frame_cut_short_is_the_end(raw: tuple[socket.socket, Connection], cut: int) -> None:
    peer, end = raw
    peer.sendall(framed({"type": "cancel", "request_id": 1})[:cut])
    peer.close()
    assert end.receive() is None


def test_a_frame_in_crumbs_is_put_together(raw: tuple[socket.socket, Connection]) -> None:
    peer, end = raw

    def crumble() -> None:
        for byte in framed({"type": "cancel", "request_id": 1}):
            peer.sendall(bytes([byte]))

    thread = threading.Thread(target=crumble)
    thread.start()
    assert end.receive() == frames.Cancel(1)
    thread.join(timeout=60)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x82\xa4type\xa6cancel\xa1x\xdd\xff\xff\xff\xff",
        b"\x82\xa4type\xa6cancel\xa1x" + b"\x91" * 60_000 + b"\x01",
        [1],
        None,
        {},
        {"type": "of a later version"},
        {"type": 3},
        {"type": "cancel"},
        {"type": "cancel", "request_id": "1"},
        {"type": "cancel", "request_id": 1.5},
        {"type": "delivered", "progress": [[1]]},
        {"type": "submit", "request": {"request_id": 1, "prompt_ids": [1]}},
        {"type": "submit", "request": {"request_id": 1, "prompt_ids": ["a"], "params": {}}},
        {"type": "submit", "request": {"request_id": 1, "prompt_ids": [], "params": {"top_p": 9}}},
        {"type": "step", "events": [{"request_id": 1, "finish_reason": "bored"}]},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_invalid_frame_is_a_value_error(
    raw: tuple[socket.socket, Connection], value: Any
) -> None:
    """One kind of error whatever was wrong, so that a reader's loop has one way to end."""
    peer, end = raw
    peer.sendall(framed(value))
    with pytest.raises(ValueError):
        end.receive()


def test_a_length_beyond_the_limit_is_not_read(raw: tuple[socket.socket, Connection]) -> None:
    peer, end = raw
    peer.sendall(struct.pack("<I", MAX_FRAME + 1))  # and no body: it must not be waited for
    with pytest.raises(ValueError, match=f"allowed: {MAX_FRAME}"):
        end.receive()


def test_a_frame_beyond_the_limit_is_not_sent(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    with pytest.raises(ValueError, match="allowed: 100"):
        pair[0].send(frames.Delivered([(i, i) for i in range(100)]))
    pair[0].send(frames.Drain())
    assert pair[1].receive() == frames.Drain(), "nothing of the long one was sent"


def test_sending_to_a_closed_peer_is_an_os_error(pair: tuple[Connection, Connection]) -> None:
    pair[1].close()
    with pytest.raises(OSError):
        pair[0].send(frames.Drain())


def test_closing_wakes_a_reader(pair: tuple[Connection, Connection]) -> None:
    received: list[frames.Frame | None] = []
    reader = threading.Thread(target=lambda: received.append(pair[0].receive()))
    reader.start()
    pair[0].close()
    reader.join(timeout=60)
    assert received == [None]
    pair[0].close()  # a second time does nothing


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=60))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    left, right = socket.socketpair()
    end = Connection(right)
    try:
        left.sendall(framed(body))
        with pytest.raises(ValueError):
            end.receive()
    finally:
        left.close()
        end.close()
