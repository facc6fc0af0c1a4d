"""Shows and times streamed replies."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.errors import InflightError
from inflight_client import TextStream


@dataclass(slots=True)
class Answer:
    """A streamed reply with its timing; times are seconds since the request.

    Attributes:
        ttft_s: time to the first text; None before it.
        duration_s: time to the last response.
        finish_reason: None if it was cancelled.
    """

    text: str = ""
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float | None = None
    duration_s: float = 0.0
    _first_tokens: int = field(default=0, repr=False)

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first response: decode throughput."""
        if self.ttft_s is None or self.duration_s <= self.ttft_s:
            return None
        return (self.num_output_tokens - self._first_tokens) / (self.duration_s - self.ttft_s)

    def read(self, stream: TextStream, show: Callable[[str], None]) -> None:
        """Read a stream to its end, showing each piece of text.

        Raises:
            ClientError: the request failed; the text received before it is kept.
        """
        started = time.monotonic()
        for delta in stream:
            self.duration_s = time.monotonic() - started
            self.num_input_tokens = delta.num_input_tokens
            self.num_output_tokens += delta.num_output_tokens
            self.finish_reason = delta.finish_reason
            self.text += delta.text
            if self.ttft_s is None and delta.num_output_tokens:
                self.ttft_s = self.duration_s
                self._first_tokens = delta.num_output_tokens
            show(delta.text)

    def summary(self) -> str:
        parts = [f"{self.num_input_tokens} tokens in", f"{self.num_output_tokens} out"]
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s * 1000:.0f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        parts.append(self.finish_reason or "cancelled")
        return ", ".join(parts)


def write_stdout(text: str) -> None:
    """Write and flush.

    Raises:
        InflightError: the write failed, as on a full disk. BrokenPipeError is passed on: the
            command ends quietly.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        raise InflightError(f"standard output cannot be written: {error.strerror}") from None


def end_line(answer: Answer) -> None:
    """Start a new line unless the reply ended with one."""
    if answer.text and not answer.text.endswith("\n"):
        write_stdout("\n")


def accept_any_bytes() -> None:
    """Decode invalid UTF-8 from standard input to lone surrogates, which the client rejects; the
    following lines can still be read."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _drop_stdout() -> None:
    """Discard its buffer, which Python would try to write again at exit."""
    with contextlib.suppress(OSError):  # replaced by an object without a file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
