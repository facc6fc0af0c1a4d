"""`inflight chat`: a conversation in the terminal; shows and times replies."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from inflight.errors import InflightError
from inflight_client import (
    Cancelled,
    Client,
    ClientError,
    Message,
    Options,
    TextStream,
    Unavailable,
)

HELP = """\
/clear  new conversation            /stats  latency and throughput of the last reply
/help   this list                   /quit   leave (or Ctrl-D)
Ctrl-C cancels the current reply."""


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


def run(client: Client, options: Options, system: str | None) -> bool:
    """Read turns from standard input until /quit or its end.

    Returns:
        False if a turn failed and standard input is not a terminal.

    Raises:
        ClientError: the server cannot be reached at the start, or the model is not ready.
        InflightError: standard output cannot be written.
    """
    _check_ready(client)
    accept_any_bytes()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  - adds editing and history to input()
    # Text of the user or the server is printed verbatim: no markup.
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"connected to {client.url}; /help lists the commands")
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    last: Answer | None = None
    attended = sys.stdin.isatty()
    # Not "": even an empty prompt is written to standard output, which may fail.
    prompt = ["> "] if attended else []
    went_well = True
    while True:
        try:
            line = input(*prompt).strip()
        except EOFError:
            return went_well
        except KeyboardInterrupt:
            console.print("\n/quit or Ctrl-D leaves")
            continue
        match line:
            case "":
                pass
            case "/quit" | "/exit":
                return went_well
            case "/clear":
                messages = list(start)
                console.print("new conversation")
            case "/stats":
                console.print(last.summary() if last else "no reply yet")
            case "/help":
                console.print(HELP)
            case _ if line.startswith("/"):
                console.print(f"{line} is not a command; /help lists them")
            case _:
                answer = _turn(client, [*messages, _message("user", line)], options, console)
                if answer is None:
                    went_well = attended
                else:
                    # A cancelled reply is kept: the next turn may refer to it.
                    messages += [_message("user", line), _message("assistant", answer.text)]
                    last = answer


def _check_ready(client: Client) -> None:
    if not client.is_model_ready(client.chat_model):
        raise Unavailable(
            f"model {client.chat_model!r} is not ready at {client.url}: not on the server, or "
            "still loading; select another with --model"
        )


def _turn(
    client: Client, messages: list[Message], options: Options, console: Console
) -> Answer | None:
    """One reply, or None if the request failed."""
    answer = Answer()
    try:
        with client.chat_stream(messages, **options) as stream:
            answer.read(stream, write_stdout)
    except (KeyboardInterrupt, Cancelled):
        console.print("\n(cancelled)")
    except ClientError as error:
        end_line(answer)
        console.print(f"error: {error}")
        return None
    else:
        write_stdout("\n")
    return answer


def _drop_stdout() -> None:
    """Discard its buffer, which Python would try to write again at exit."""
    with contextlib.suppress(OSError):  # replaced by an object without a file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
