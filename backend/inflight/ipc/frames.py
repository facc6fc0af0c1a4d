"""The frames between an engine process and its peers, on a unix socket.

A frame is a length (4 bytes, little endian) and a msgpack map with a type tag. Nothing is pickled,
nothing longer than MAX_FRAME is read, and an unknown tag only closes the connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct

import msgspec

from inflight.core.request import Request, TokenEvent
from inflight.engine.metrics.snapshot import Metrics
from inflight.engine.stats import Stats
from inflight.errors import InflightError

PROTOCOL = 10
MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First frame of a peer. role: `front` keeps the engine alive; `detokenizer` sends Delivered
    frames; `observer` only watches. Neither of the last two keeps the engine alive."""

    protocol: int
    role: str
    pid: int


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """The engine is not ready yet; fraction in [0, 1]."""

    what: str
    fraction: float


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The engine is ready.

    device: where the model runs and, if on a CPU, why not on a GPU. special_tokens: ids by text.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    default_max_tokens: int
    has_tokenizer: bool
    device: str = ""
    special_tokens: dict[str, int] = {}


class LoadFailed(msgspec.Struct, tag="load_failed", frozen=True):
    """The engine could not start: an error of errors.from_kind(kind, message)."""

    kind: str
    message: str


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """arrived: at the front, in time.monotonic(), which all processes of a machine share."""

    request: Request
    arrived: float | None = None


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    request_id: int


class Delivered(msgspec.Struct, tag="delivered", frozen=True):
    """A detokenizer delivered text of these requests: (request_id, position) each.

    The engine forwards it to the fronts of these requests.
    """

    progress: list[tuple[int, int]]


class GetStats(msgspec.Struct, tag="get_stats", frozen=True):
    pass


class GetMetrics(msgspec.Struct, tag="get_metrics", frozen=True):
    pass


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A front has refused so many requests, by kind of error; only counted."""

    counts: dict[str, int]


STOPPING = "the server is stopping; send the request to another server"


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Reject new requests for this reason, finish those in flight."""

    reason: str = STOPPING


class StepEvents(msgspec.Struct, tag="step", frozen=True):
    """All events of one step for one front."""

    events: list[TokenEvent]


Frame = (
    Hello
    | Loading
    | Welcome
    | LoadFailed
    | Submit
    | Cancel
    | Delivered
    | Drain
    | GetStats
    | Stats
    | GetMetrics
    | Metrics
    | Refused
    | StepEvents
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class Connection:
    """One end of the socket. One thread may call `send`, and one `receive`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = sock.makefile("rb", buffering=1 << 16)

    def send(self, frame: Frame) -> None:
        """Raises OSError if the peer has disconnected, ValueError if the frame is too long."""
        body = _encoder.encode(frame)
        if len(body) > MAX_FRAME:
            raise ValueError(f"a frame of {len(body)} bytes; allowed: {MAX_FRAME}")
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Frame | None:
        """The next frame, or None if the peer has disconnected.

        Raises:
            ValueError: the peer sent an invalid frame, or a value out of bounds.
        """
        head = self._stream.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes; allowed: {MAX_FRAME}")
        body = self._stream.read(length)
        if len(body) < length:
            return None
        try:
            frame: Frame = _decoder.decode(body)  # msgspec's errors are ValueErrors
        except (InflightError, RecursionError) as error:
            raise ValueError(f"not a frame: {error}") from None
        return frame

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer may have closed first
            self._sock.shutdown(socket.SHUT_RDWR)
        # The shutdown wakes a reader in another thread, so this does not wait for it.
        self._stream.close()
        self._sock.close()
