"""Frames arrive whole, in time, or not at all."""

import os
import time
from collections.abc import Iterator

import pytest

from inflight.sandbox import frames


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:  # closed by the test
            continue


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 4000])
def test_a_frame_arrives_as_it_was_written(pipe: tuple[int, int], body: bytes) -> None:
    reader, writer = pipe
    frames.write(writer, body)
    frames.write(writer, body)
    assert frames.read(reader) == body
    assert frames.read_within(reader, time.monotonic() + 60, len(body)) == body


def test_the_end_is_none(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"\0\0\0\5ab")
    os.close(writer)
    assert frames.read(reader) is None
    assert frames.read(reader) is None


def test_an_untrusted_side_cannot_end_within_a_frame(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"\0\0\0\5ab")
    os.close(writer)
    with pytest.raises(EOFError):
        frames.read_within(reader, time.monotonic() + 60, 10)


def test_a_frame_that_is_too_large_is_not_read(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, b"\xff\xff\xff\xff")
    with pytest.raises(EOFError):
        frames.read_within(reader, time.monotonic() + 60, 1 << 20)


def test_a_side_that_hangs_times_out(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with pytest.raises(TimeoutError):
        frames.read_within(reader, time.monotonic() + 0.05, 10)
    os.write(writer, b"\0\0\0\5a")
    with pytest.raises(TimeoutError):
        frames.read_within(reader, time.monotonic() + 0.05, 10)
    with pytest.raises(TimeoutError):
        frames.write(writer, b"x" * (1 << 20), time.monotonic() + 0.05)
