"""What both clients share: settings, and requests as messages. It does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import grpc

from inflight_client import address, credentials, errors
from inflight_client.calls import server, tokens
from inflight_client.calls.flow import Flow
from inflight_client.calls.retries import DEFAULT_RETRIES, Retries, checked_retries
from inflight_client.layouts import detection, native
from inflight_client.layouts.layout import Generation, Layout, Prompt, Target
from inflight_client.options import Message, num_outputs

DEFAULT_URL = address.DEFAULT_URL
LayoutName = Literal["native", "tensorrtllm", "vllm"]
Build = Callable[[], Generation]
T = TypeVar("T")

# Makes Triton end a stream with an error status code instead of a message in a successful stream.
_METADATA = (("triton_grpc_error", "true"),)


class Settings(TypedDict, total=False):
    """Settings of a client; all of them are optional."""

    layout: LayoutName | None
    """How the server names its models and tensors: `native` (the default), `tensorrtllm`, `vllm`,
    or None to find out with the first request."""
    generate_model: str
    """Name of the model for prompts; the layout's by default."""
    chat_model: str
    """Name of the ensemble for messages. The other layouts have none of their own, but a server may
    have one besides."""
    version: int | None
    """Of the models, if the server has several; None for the highest."""
    timeout: float | None
    """Seconds for each request as a whole, retries included; None for no limit."""
    max_retries: int
    """How often a request is sent again that failed before its first delta because the server was
    unavailable or the connection failed; 2 by default."""
    api_key: str | None
    """Of a server with keys."""
    ca_file: str | None
    """Connect with TLS, and trust the authorities of this PEM file."""


class BaseClient:
    """Settings and messages of `Client` and `AsyncClient`, which document the arguments."""

    def __init__(self, url: str = DEFAULT_URL, **settings: Unpack[Settings]) -> None:
        for name in settings:
            if name not in Settings.__annotations__:
                raise TypeError(f"{type(self).__name__}() has no argument {name!r}")
        self.url = address.checked_url(url)
        self._layout = detection.named(settings.get("layout", detection.NATIVE.name))
        self._generate_model = settings.get("generate_model", "")
        self._chat_model = settings.get("chat_model", "")
        self._version = _checked_version(settings.get("version"))
        self._timeout = address.checked_timeout(settings.get("timeout"))
        self._max_retries = checked_retries(settings.get("max_retries", DEFAULT_RETRIES))
        self._authorization = credentials.authorization(settings.get("api_key"))
        self._metadata = (*_METADATA, *self._authorization)
        self._credentials = credentials.of_channel(settings.get("ca_file"))

    @property
    def generate_model(self) -> str:
        """Name of the model for prompts; before the layout is known, the native one."""
        return self._generate_model or (self._layout or detection.NATIVE).models[0]

    @property
    def chat_model(self) -> str:
        """Name of the ensemble for messages."""
        return self._chat_model or native.CHAT

    def _generation(self, prompt: Prompt, stream: bool, options: Mapping[str, Any]) -> Generation:
        layout = self._layout or detection.NATIVE
        target = Target(self.generate_model, self._version)
        return layout.generate(target, prompt, stream, options)

    def _chat(
        self, messages: Sequence[Message], stream: bool, options: Mapping[str, Any]
    ) -> Generation:
        layout = self._layout or detection.NATIVE
        if layout is not detection.NATIVE and not self._chat_model:
            raise errors.InvalidRequest(
                f"chat: the layout {layout.name} has no model for messages; set chat_model to an "
                "ensemble of this server with the input messages, or complete a prompt"
            )
        return native.chat(Target(self.chat_model, self._version), messages, stream, options)

    def _detect(self) -> Flow[Layout]:
        """Finds the layout, if it is not known, and its models."""
        if self._layout is None:
            found = yield from server.models(detection.MODELS, self._timeout)
            ready = [one.name for one in found if one.is_ready]
            layout, model = detection.detected(ready)
            self._generate_model = self._generate_model or model
            if native.CHAT in ready:
                self._chat_model = self._chat_model or native.CHAT
            self._layout = layout
        return self._layout

    def _server_live(self) -> Flow[bool]:
        return server.is_live(self._timeout)

    def _server_ready(self) -> Flow[bool]:
        return server.is_ready(self._timeout)

    def _model_ready(self, name: str) -> Flow[bool]:
        return server.is_model_ready(name, self._version, self._timeout)

    def _models(self) -> Flow[list[server.Model]]:
        known = {*detection.MODELS, *tokens.MODELS, "llm", self.generate_model, self.chat_model}
        return server.models(known, self._timeout)

    def _model_metadata(self, name: str) -> Flow[server.ModelMetadata]:
        return server.metadata(name, self._version, self._timeout)

    def _tokenize(
        self, prompt: str | Sequence[Message], options: Mapping[str, Any]
    ) -> Flow[list[int]]:
        return tokens.tokenize(prompt, options, self._version, self._retries())

    def _detokenize(self, ids: Sequence[int]) -> Flow[str]:
        return tokens.detokenize(ids, self._version, self._retries())

    def _describe(self) -> Flow[tokens.ModelDescription]:
        return tokens.describe(self._version, self._retries())

    def _retries(self) -> Retries:
        return Retries(self._max_retries, self._timeout)

    def _to_error(self, error: grpc.RpcError, timeout: float | None = None) -> errors.ClientError:
        hint = f"url is {self.url}; it must be {address.WANTED}"
        return errors.from_rpc(error, hint, timeout if self._timeout is None else self._timeout)


def refuse_several(options: Mapping[str, Any], remedy: str) -> None:
    """Raises InvalidRequest: several outputs, of a method that returns one."""
    if (n := num_outputs(options)) > 1:
        raise errors.InvalidRequest(
            f"n: {n} outputs requested, but this method returns one; use {remedy}"
        )


def _checked_version(version: int | None) -> str:
    """As it is sent. Raises InvalidRequest: it is not one."""
    if version is None:
        return ""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise errors.InvalidRequest(f"version: is {version!r}; allowed: 0 or more, or None")
    return str(version)
