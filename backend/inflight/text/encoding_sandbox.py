"""A tokenizer in a sandbox, for what may be slow or large: long texts, and unknown tokenizers.

An untrusted tokenizer.json can have regular expressions that backtrack without end, and rules
that expand a text without bound; the library then panics, or aborts its process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import msgspec
import tokenizers

from inflight.errors import RequestError
from inflight.sandbox.messages import Cause, Limits
from inflight.sandbox.pool import SandboxPool
from inflight.sandbox.process import LimitExceeded, SandboxProcess

MAX_IDS = 1 << 21
MAX_CPU_S = 0.8
LIMITS = Limits(cpu_s=MAX_CPU_S, wall_s=3.0, memory=1 << 30, is_closed=True)
_MAX_ID_BYTES = 5
_EXCEEDED: dict[Cause, str] = {
    "time": f"takes the tokenizer too long; allowed: {MAX_CPU_S} s of CPU time",
    "memory": f"needs too much memory in the tokenizer; allowed: {LIMITS.memory >> 20} MiB",
    "stack": "makes the tokenizer recurse too deeply",
}


class Source(msgspec.Struct, frozen=True):
    """The setup: the tokenizer as tokenizer.json, and its markers."""

    text: str
    markers: dict[str, int]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A job; the attributes are those of `Tokenizer.encode`."""

    text: str
    add_special_tokens: bool


class Pieces(msgspec.Struct, frozen=True, tag="pieces"):
    """A job; the attributes are those of `Tokenizer.encode_pieces`."""

    pieces: list[str | int]


class Ids(msgspec.Struct, frozen=True, tag="ids"):
    """The ids."""

    ids: list[int]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """What is wrong with the text."""

    message: str


class EncodingSandbox:
    """The sandboxes of a tokenizer, started on first use. Thread-safe.

    Args:
        backend: the library's tokenizer.
        markers: see `Encoder`.
    """

    def __init__(self, backend: tokenizers.Tokenizer, markers: dict[str, int]) -> None:
        def setup() -> bytes:
            return msgspec.msgpack.encode(Source(backend.to_str(), markers))

        def sandbox() -> SandboxProcess:
            max_bytes = MAX_IDS * _MAX_ID_BYTES + 1024
            module = "inflight.text.encoding_server"
            return SandboxProcess(module, "tokenizer", LIMITS, setup, max_bytes)

        self._pool = SandboxPool(sandbox, size=2)
        weakref.finalize(self, self._pool.close)

    def warm(self) -> None:
        """Start a sandbox.

        Raises:
            EngineError: it does not start.
        """
        self._pool.warm()

    def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Ids of a text.

        Raises:
            RequestError: the tokenizer fails on it, or it exceeds the limits.
            EngineError: there is no sandbox.
        """
        return self._ask(Text(text, add_special_tokens), param)

    def encode_pieces(self, pieces: Sequence[str | int], param: str) -> list[int]:
        """Ids of pieces; see `Tokenizer.encode_pieces`.

        Raises:
            As `encode`.
        """
        return self._ask(Pieces(list(pieces)), param)

    def _ask(self, job: Text | Pieces, param: str) -> list[int]:
        try:
            frame = self._pool.run(msgspec.msgpack.encode(job))
            answer = msgspec.msgpack.decode(frame, type=Ids | Refusal)
        except LimitExceeded as error:
            raise RequestError(f"the text {_EXCEEDED[error.cause]}", param) from None
        except msgspec.DecodeError:
            raise RequestError("the model's tokenizer failed on the text", param) from None
        if isinstance(answer, Refusal):
            raise RequestError(answer.message, param)
        return answer.ids
