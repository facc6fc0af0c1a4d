"""`inflight chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from inflight.cli.chat.answer import Answer, accept_any_bytes, end_line, write_stdout
from inflight.ipc import health
from inflight_client import Cancelled, Client, ClientError, Message, Options, Unavailable

HELP = """\
/clear  new conversation            /stats  latency and throughput of the last reply
/model  list the chat models        /model NAME  go on with another one
/help   this list                   /bye    leave (also /quit, Ctrl-D)
Ctrl-C cancels the current reply. \"\"\" begins and ends a message of several lines."""
QUOTES = '"""'
CHAT = "chat"


def chat_models(names: Sequence[str]) -> list[str]:
    """Those of a server's models that are chat ensembles, by their names."""
    return [name for name in names if name == CHAT or name.endswith(f"_{CHAT}")]


def models_of_server(url: str) -> list[str]:
    """The chat models of a server of this user on this machine; empty for other servers.

    Args:
        url: host:port of its gRPC endpoint.
    """
    address = url.replace("localhost:", "127.0.0.1:")
    for found in health.of_servers().values():
        if found.endpoints.get("grpc") == address:
            return chat_models(found.models)
    return []


class Conversation:
    """Turns read from standard input until /bye or its end.

    Args:
        connect: a client of a chat model, by its name; the conversation closes it.
        model: to begin with, by its name or its prefix.
        options: of each request.
        system: the system message, if any.
    """

    def __init__(
        self, connect: Callable[[str], Client], model: str, options: Options, system: str | None
    ) -> None:
        self._connect = connect
        self._chat_model = model
        self._client = connect(model)
        self._options = options
        self._start: list[Message] = [_message("system", system)] if system else []
        self._messages = list(self._start)
        self._last: Answer | None = None
        self._attended = sys.stdin.isatty()
        self._went_well = True
        # Text of the user or the server is printed verbatim: no markup.
        self._console = Console(
            stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": lambda argument: self._clear(),
            "/stats": lambda argument: self._stats(),
            "/help": lambda argument: self._console.print(HELP),
            "/model": self._model,
        }

    def run(self) -> bool:
        """
        Returns:
            False if a turn failed and standard input is not a terminal.

        Raises:
            ClientError: the server cannot be reached at the start, or the model is not ready.
            InflightError: standard output cannot be written.
        """
        try:
            return self._run()
        finally:
            self._client.close()

    def _run(self) -> bool:
        self._select_first()
        accept_any_bytes()
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  - adds editing and history to input()
        self._console.print(f"connected to {self._client.url}; /help lists the commands")
        while True:
            try:
                text, is_quoted = self._read()
            except EOFError:
                return self._went_well
            except KeyboardInterrupt:
                self._console.print("\n/bye or Ctrl-D leaves")
                continue
            name, _, argument = text.partition(" ")
            if is_quoted or not text.startswith("/"):
                if text:
                    self._turn(text)
            elif text in ("/bye", "/quit", "/exit"):
                return self._went_well
            elif name in self._commands and (not argument or name == "/model"):
                self._commands[name](argument.strip())
            else:
                self._console.print(f"{text} is not a command; /help lists them")

    def _select_first(self) -> None:
        """Raises ClientError: the model is not ready."""
        name = self._ready_model(self._chat_model)
        if name is None:
            raise Unavailable(
                f"model {self._chat_model!r} is not ready at {self._client.url}: not on the "
                "server, or still loading; select another with --model"
            )
        if name != self._chat_model:
            self._select(name)

    def _ready_model(self, name: str) -> str | None:
        """The chat model of a name or a prefix; None if there is none, or it is not ready."""
        names = (name, f"{name}_{CHAT}")
        return next((one for one in names if self._client.is_model_ready(one)), None)

    def _select(self, name: str) -> None:
        self._client.close()
        self._chat_model = name
        self._client = self._connect(name)

    def _read(self) -> tuple[str, bool]:
        """The next message, and whether it was in triple quotes, in which commands are text."""
        line = self._line("> ").strip()
        if not line.startswith(QUOTES):
            return line, False
        text = line.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self._line("... ")
        return text.rstrip().removesuffix(QUOTES).strip("\n"), True

    def _line(self, prompt: str) -> str:
        # Not "": even an empty prompt is written to standard output, which may fail.
        return input(prompt) if self._attended else input()

    def _clear(self) -> None:
        self._messages = list(self._start)
        self._console.print("new conversation")

    def _stats(self) -> None:
        self._console.print(self._last.summary() if self._last else "no reply yet")

    def _model(self, name: str) -> None:
        """List the chat models, or go on with another one, by its name or its prefix."""
        client = self._client
        if not name:
            for one in models_of_server(client.url) or [self._chat_model]:
                self._console.print(f"{'*' if one == self._chat_model else ' '} {one}")
            return
        try:
            found = self._ready_model(name)
        except ClientError as error:
            self._console.print(f"error: {error}")
            return
        if found is None:
            self._console.print(f"model {name} is not ready; /model lists the models")
            return
        self._select(found)
        self._console.print(f"model {found}")

    def _turn(self, text: str) -> None:
        answer = self._reply([*self._messages, _message("user", text)])
        if answer is None:
            self._went_well = self._attended
            return
        # A cancelled reply is kept: the next turn may refer to it.
        self._messages += [_message("user", text), _message("assistant", answer.text)]
        self._last = answer

    def _reply(self, messages: list[Message]) -> Answer | None:
        """One reply, or None if the request failed."""
        answer = Answer()
        try:
            with self._client.chat_stream(messages, **self._options) as stream:
                answer.read(stream, write_stdout)
        except (KeyboardInterrupt, Cancelled):
            self._console.print("\n(cancelled)")
        except ClientError as error:
            end_line(answer)
            self._console.print(f"error: {error}")
            return None
        else:
            write_stdout("\n")
        return answer


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
