"""`inflight run`: a server of its own, and a conversation with it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from inflight.cli.chat.conversation import Conversation, chat_models
from inflight.cli.options import ServedModels
from inflight.cli.serve import model_of
from inflight.cli.server_process import ServerProcess
from inflight.errors import ConfigError, EngineError
from inflight.ipc.health import UNKNOWN, Health
from inflight_client import Client, Options

STOP_S = 10.0


def run(models: ServedModels, options: Options, system: str | None) -> bool:
    """Start a server on free ports, chat until /bye, and stop it.

    Returns:
        See `Conversation.run`.

    Raises:
        ConfigError: the model cannot chat.
        EngineError: the server does not start.
        ClientError, InflightError: see `Conversation.run`.
    """
    console = Console(stderr=True)
    with ServerProcess([*arguments_of(models), "--drain=0"]) as server:
        with console.status("starting the server") as status:

            def show(health: Health) -> None:
                if health != UNKNOWN:
                    status.update(Text(health.reason))

            health = server.wait_ready(None, show)
        names = chat_models(health.models)
        if not names:
            raise ConfigError(
                "the model has no chat template; use `inflight serve` and `inflight generate`"
            )
        url = health.endpoints["grpc"]
        conversation = Conversation(
            lambda name: Client(url, chat_model=name), names[0], options, system
        )
        went_well = conversation.run()
        with console.status("stopping the server"):
            try:
                server.stop(STOP_S)
            except EngineError as error:  # killed: nothing is in flight
                console.print(Text(str(error)))
    return went_well


def arguments_of(models: ServedModels) -> list[str]:
    """Of `inflight serve`, for the same models."""
    model = model_of(models)
    return [
        *([f"--model={model}"] if model is not None else []),
        *(f"--set={pair}" for pair in models.set_ or ()),
        *([f"--layout={models.layout}"] if models.layout != "native" else []),
        *(["--unary"] if models.unary else []),
        *(f"--repository={path}" for path in models.repository or ()),
    ]
