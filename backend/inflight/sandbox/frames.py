"""Frames on a pipe: a length of four bytes, then the body."""

from __future__ import annotations

import os
import select
import time

HEADER_BYTES = 4


def write(fd: int, body: bytes, deadline: float | None = None) -> None:
    """Write a frame.

    Args:
        fd: non-blocking if there is a deadline.
        deadline: in time.monotonic().

    Raises:
        TimeoutError: the other side does not read.
        OSError: it is gone.
    """
    data = memoryview(len(body).to_bytes(HEADER_BYTES, "big") + body)
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            _wait(fd, select.POLLOUT, deadline)


def read(fd: int) -> bytes | None:
    """The next frame of a trusted side; None at the end."""
    header = _read(fd, HEADER_BYTES)
    return None if header is None else _read(fd, int.from_bytes(header, "big"))


def read_within(fd: int, deadline: float, max_bytes: int) -> bytes:
    """The next frame of an untrusted side.

    Raises:
        TimeoutError: it is not complete in time.
        EOFError: it does not come, or is larger than max_bytes.
    """
    data = bytearray()
    while True:
        size = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
        if size > HEADER_BYTES + max_bytes:
            raise EOFError
        if len(data) >= HEADER_BYTES and len(data) >= size:
            return bytes(data[HEADER_BYTES:size])
        _wait(fd, select.POLLIN, deadline)
        part = os.read(fd, 1 << 20)
        if not part:
            raise EOFError
        data += part


def _read(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _wait(fd: int, event: int, deadline: float | None) -> None:
    poll = select.poll()  # not select, which knows no file descriptors beyond 1023
    poll.register(fd, event)
    left = None if deadline is None else (deadline - time.monotonic()) * 1e3
    if left is not None and (left <= 0 or not poll.poll(left)):
        raise TimeoutError
    if left is None:
        poll.poll()
