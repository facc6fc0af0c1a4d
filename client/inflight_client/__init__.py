"""gRPC client for inflight's ensembles.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        with client.chat_stream([{"role": "user", "content": "Hello!"}]) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio.

It shares the wire format with the server but no code, so it works on any machine that reaches it.
"""

from inflight_client.async_client import AsyncClient as AsyncClient
from inflight_client.base import Settings as Settings
from inflight_client.calls.server import Model as Model
from inflight_client.calls.server import ModelMetadata as ModelMetadata
from inflight_client.calls.server import TensorMetadata as TensorMetadata
from inflight_client.calls.tokens import ModelDescription as ModelDescription
from inflight_client.client import Client as Client
from inflight_client.completion import Candidate as Candidate
from inflight_client.completion import Completion as Completion
from inflight_client.completion import Delta as Delta
from inflight_client.errors import Cancelled as Cancelled
from inflight_client.errors import ClientError as ClientError
from inflight_client.errors import ConnectionFailed as ConnectionFailed
from inflight_client.errors import InvalidRequest as InvalidRequest
from inflight_client.errors import ServerError as ServerError
from inflight_client.errors import TimedOut as TimedOut
from inflight_client.errors import Unavailable as Unavailable
from inflight_client.option_table import Options as Options
from inflight_client.options import ChatOptions as ChatOptions
from inflight_client.options import Message as Message
from inflight_client.options import PromptOptions as PromptOptions
from inflight_client.stream import AsyncTextStream as AsyncTextStream
from inflight_client.stream import TextStream as TextStream

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Cancelled",
    "Candidate",
    "ChatOptions",
    "Client",
    "ClientError",
    "Completion",
    "ConnectionFailed",
    "Delta",
    "InvalidRequest",
    "Message",
    "Model",
    "ModelDescription",
    "ModelMetadata",
    "Options",
    "PromptOptions",
    "ServerError",
    "Settings",
    "TensorMetadata",
    "TextStream",
    "TimedOut",
    "Unavailable",
]
