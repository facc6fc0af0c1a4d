"""What all fronts of an engine share: requests in, responses out; they compute nothing.

`execute` checks and forwards. The engine's events go through response queues to sender threads. A
periodic sweep polls Triton for cancelled requests, off the token path.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import triton_python_backend_utils as pb_utils
from inflight.core.request import FinishReason, TokenEvent
from inflight.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    InflightError,
    RequestError,
    from_kind,
)
from inflight.ipc.engine_client import EngineClient, attach_front
from inflight.ipc.metrics.usage import ACCOUNT, UsageReporter, tenant_of, usage_path
from inflight.ipc.runtime_folder import folder_of
from inflight.ipc.sockets.disconnects import TICKET, DisconnectListener
from inflight.triton import contract, protocol
from inflight.triton.contract import Array
from inflight.triton.dialects import request_parameters
from inflight.triton.errors import DelayedErrors, triton_error
from inflight.triton.metrics import MetricsPublisher
from inflight.triton.response_queue import ResponseQueue, SenderPool, Sweep
from inflight.triton.stub import owner

logger = logging.getLogger(__name__)

DEFAULT_SENDER_THREADS = 8
# Of an ensemble's request without a stream that passed no door: if its client leaves, nobody says.
DEFAULT_UNWATCHED_TIMEOUT_S = 600
CANCEL_INTERVAL_S = 0.02
# One being detokenized and one queued: the detokenizer never idles, and what arrives meanwhile is
# coalesced.
MAX_UNDELIVERED = 2
RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# See `ResponseWriter.fail`. For an ensemble that does not map detokenize_error.
ERROR_DELAY_S = 0.05


class ResponseBuilder(Protocol):
    """Builds the responses of a request.

    Attributes:
        num_responses: without a stream.
    """

    num_responses: int

    def responses(
        self, events: list[TokenEvent], request_ids: list[int]
    ) -> list[Mapping[str, Array]]:
        """The tensors of one response, or of several in order, by name.

        Args:
            events: of different outputs; none has an error.
            request_ids: in the engine, of the outputs in order.
        """


class Call(NamedTuple):
    """A request that was read, before it has an id.

    Attributes:
        generation: for the engine.
        builder: of its responses.
    """

    generation: protocol.Generation
    builder: ResponseBuilder


class ResponseWriter:
    """Writes the responses of one client's request.

    Args:
        sender: Triton's response sender.
        requested_outputs: names of the outputs requested by the client or the ensemble.
        call: the parsed request; None if it could not be read.
        empty_final: end with a response that has the final flag alone.

    Attributes:
        arrived: arrival time of the request, in time.monotonic().
        request_ids: in the engine, of the outputs in order.
        cancel: cancels all of them there.
        detokenized: a detokenizer receives the responses.
        name: the client's id of the request; empty without one.
        account: on which it runs; empty if the server has no keys.
        ticket: of the door that passed it; empty without a door.
        deadline: in time.monotonic(), of a request whose client's disconnect cannot be noticed.
        log_prefix: of the log lines of a cancellation by the client; empty for none.
    """

    def __init__(
        self,
        sender: Any,
        requested_outputs: frozenset[str],
        call: Call | None,
        empty_final: bool = False,
    ) -> None:
        self._sender = sender
        self._requested_outputs = requested_outputs
        self._builder = call.builder if call is not None else None
        self._empty_final = empty_final
        self._sent_at = 0.0
        self.arrived = time.monotonic()
        self.request_ids: list[int] = []
        self.cancel: Callable[[], None] = _nothing
        self.detokenized = call is not None and call.generation.detokenized
        self.name = ""
        self.account = ""
        self.ticket = ""
        self.deadline = math.inf
        self.log_prefix = ""
        self._is_cancellation_logged = False

    def send(self, events: list[TokenEvent], is_final: bool) -> None:
        if self._is_cancellation_logged and events[-1].finish_reason == FinishReason.CANCELLED:
            logger.info("%s Successfully cancelled the request %s", self.log_prefix, self.name)
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        error = events[0].error
        if error is not None:
            if len(self.request_ids) > 1:
                self.cancel()  # the other outputs are not needed any more
            self.fail(from_kind(events[0].error_kind or "", error))
            return
        assert self._builder is not None
        *earlier, last = self._builder.responses(events, self.request_ids)
        for arrays in earlier:
            self._sender.send(self._response(arrays))
        if is_final and self._empty_final:
            self._sender.send(self._response(last))
            self._sender.send(flags=flags)
        else:
            self._sender.send(self._response(last), flags=flags)
        self._sent_at = time.monotonic()

    def fail(self, error: InflightError) -> None:
        """Send an error as the final response.

        Triton 2.51 never releases an ensemble request that fails while an earlier response of it is
        in a later step, and then cannot shut down in order. So the detokenizer responds with the
        error, after what it still has of the stream.
        """
        response = pb_utils.InferenceResponse(error=triton_error(error))
        if self.detokenized and self._sent_at:
            if contract.DETOKENIZE_ERROR.name in self._requested_outputs:
                response = self._response(protocol.failure(error))
            else:
                time.sleep(max(0.0, self._sent_at + ERROR_DELAY_S - time.monotonic()))
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, arrays: Mapping[str, Array]) -> Any:
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, array)
                for name, array in arrays.items()
                if name in self._requested_outputs
            ]
        )

    def abandon(self) -> None:
        self.cancel()
        # If the final response failed half-way, the sender is closed already.
        with contextlib.suppress(Exception):
            self.fail(EngineError("the response could not be sent"))

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def log_cancellation(self) -> None:
        """The client cancelled the request, or left: whoever notices it first says so."""
        if self.log_prefix and not self._is_cancellation_logged:
            self._is_cancellation_logged = True
            logger.info("%s Cancelling the request %s", self.log_prefix, self.name)


class EngineFront(ABC):
    """A front that is attached to an engine. A subclass reads requests and forms responses.

    Args:
        directory: the model's folder with its engine.json.
        parameters: of config.pbtxt; `sender_threads`, `unwatched_timeout_s`, `metrics_compat` and
            `empty_final` are used, and `decoupled`, Triton's transaction policy.

    Raises:
        InflightError: the engine cannot load, with the reason.
    """

    cancel_log_prefix = ""
    """See `ResponseWriter`."""

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        self._directory = directory
        self._owner = owner()
        self._lock = threading.Lock()
        self._client: EngineClient | None = None
        self._attachment = 0
        self._in_flight: dict[int, tuple[ResponseQueue, ResponseWriter]] = {}
        self._closing = threading.Event()
        self._senders = SenderPool(
            _number(parameters, "sender_threads", DEFAULT_SENDER_THREADS, 64)
        )
        self._unwatched_timeout_s = _number(
            parameters, "unwatched_timeout_s", DEFAULT_UNWATCHED_TIMEOUT_S, 10**6
        )
        self._is_decoupled = parameters.get("decoupled", "true") == "true"
        self._empty_final = self._is_decoupled and parameters.get("empty_final") == "true"
        self._errors = DelayedErrors()
        self._usage = UsageReporter(usage_path(folder_of(self._owner.pid)))
        self._disconnects = DisconnectListener(folder_of(self._owner.pid), self._on_disconnect)
        self._connect()
        self._sweep = Sweep(self._sweep_cancelled, CANCEL_INTERVAL_S)
        self._metrics = MetricsPublisher(directory, self._owner, lambda: self._client, parameters)

    @abstractmethod
    def read(
        self, inputs: Mapping[str, Array], parameters: dict[str, Any], limits: protocol.Limits
    ) -> Call:
        """Parse a request.

        Args:
            inputs: its tensors by name; not kept.
            parameters: Triton's request parameters, without those of the doors.
            limits: of the engine.

        Raises:
            RequestError: invalid request.
        """

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Reject a request before anything else, whatever the engine does.

        Raises:
            InflightError: the reason.
        """
        return

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Accept requests; each gets its final response later, from a sender thread."""
        for request in requests:
            sender = request.get_response_sender()
            requested_outputs = frozenset(request.requested_output_names())
            try:
                self._accept(request, sender, requested_outputs)
            except InflightError as error:
                self._refuse(sender, requested_outputs, error)
            except Exception:  # fails only this request; raising would fail the whole batch
                logger.exception("a request could not be read")
                self._refuse(
                    sender, requested_outputs, EngineError("the request could not be read")
                )
        return None if self._is_decoupled else [None] * len(requests)

    def finalize(self) -> None:
        self._closing.set()
        self._disconnects.close()
        self._sweep.close()
        self._metrics.close()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        self._fail_all()
        self._errors.close()
        self._senders.close()
        self._usage.close()

    def _accept(self, request: Any, sender: Any, requested_outputs: frozenset[str]) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self.check(inputs)
        parameters = request_parameters.decode(request.parameters())
        account = str(parameters.pop(ACCOUNT, ""))
        ticket = str(parameters.pop(TICKET, ""))
        client = self._client
        if client is None:
            raise CapacityError("the engine is restarting; retry in a moment")
        welcome = client.welcome
        limits = protocol.Limits(welcome.vocab_size, welcome.max_model_len, welcome.special_tokens)
        call = self.read(inputs, parameters, limits)
        generation = call.generation
        if not self._is_decoupled and call.builder.num_responses > 1:
            raise RequestError(
                f"{generation.n} outputs are as many responses, and this model sends one "
                "(decoupled: false); allowed: 1",
                "num_return_sequences",
            )
        if account:
            generation = generation.of_tenant(tenant_of(account))
        writer = ResponseWriter(sender, requested_outputs, call, self._empty_final)
        writer.account, writer.ticket, writer.name = account, ticket, request.request_id()
        writer.log_prefix = self.cancel_log_prefix
        num_outputs = generation.best_of
        watched = generation.detokenized and generation.stream and num_outputs == 1
        response_queue = self._senders.response_queue(
            writer, generation.stream, MAX_UNDELIVERED if watched else None, num_outputs
        )
        # Under the lock: either the loss of the engine fails this request, or the request finds
        # the engine lost.
        with self._lock:
            if self._client is not client:
                raise CapacityError("the engine is restarting; retry in a moment")
            writer.request_ids = [client.new_request_id() for _ in range(num_outputs)]
            writer.cancel = functools.partial(self._forget, client, writer.request_ids)
            for request_id in writer.request_ids:
                self._in_flight[request_id] = (response_queue, writer)
            for request in generation.requests(writer.request_ids):
                client.submit(request)
        if account:
            self._usage.add(account, len(generation.prompt_ids), 0)
        if not (ticket or generation.stream):
            writer.deadline = writer.arrived + self._unwatched_timeout_s
        if ticket and self._disconnects.has_left(ticket):
            self._on_disconnect([ticket])
        self._sweep.wake()

    def _forget(self, client: EngineClient, request_ids: list[int]) -> None:
        for request_id in request_ids:
            if self._in_flight.pop(request_id, None) is not None:
                client.cancel(request_id)

    def cancel_named(self, name: str, account: str) -> None:
        """Cancel the requests of an account with this id of the client; they end as usual."""
        client = self._client
        for request_id, (_, writer) in list(self._in_flight.items()):
            if name and (writer.name, writer.account) == (name, account) and client is not None:
                client.cancel(request_id)

    def _on_disconnect(self, tickets: Collection[str]) -> None:
        """Cancel the requests of clients that have left; their responses end as usual."""
        client = self._client
        for request_id, (_, writer) in list(self._in_flight.items()):
            if writer.ticket in tickets and client is not None:
                writer.log_cancellation()
                client.cancel(request_id)

    def _refuse(self, sender: Any, requested_outputs: frozenset[str], error: InflightError) -> None:
        self._metrics.refused(error.kind)
        writer = ResponseWriter(sender, requested_outputs, None)
        response_queue = self._senders.response_queue(writer, stream=True)
        self._post(response_queue, writer, TokenEvent.failed(0, error))

    def _post(
        self, response_queue: ResponseQueue, writer: ResponseWriter, event: TokenEvent
    ) -> None:
        if event.error is None:
            response_queue.post(event)
        else:
            self._errors.when_due(writer.arrived, lambda: response_queue.post(event))

    def _on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.is_last:
                entry = self._in_flight.pop(event.request_id, None)
                if entry is not None and entry[1].account:
                    self._usage.add(entry[1].account, 0, event.position)
                    self._sweep.wake()
            else:
                entry = self._in_flight.get(event.request_id)
            if entry is not None:
                self._post(*entry, event)

    def _on_delivered(self, progress: list[tuple[int, int]]) -> None:
        for request_id, position in progress:
            entry = self._in_flight.get(request_id)
            if entry is not None:
                entry[0].delivered(position)

    def _sweep_cancelled(self) -> bool:
        """Returns whether there may be more to do later."""
        # An ensemble's cancellation is not visible to its running steps, so those are not polled.
        # The engine notices that a stream is not acknowledged, and doors report disconnects.
        self._usage.report_if_due()
        client, now = self._client, time.monotonic()
        for request_id, (response_queue, writer) in list(self._in_flight.items()):
            if client is None:
                continue
            if writer.detokenized:
                if now > writer.deadline:
                    client.cancel(request_id)
                continue
            if response_queue.lock.acquire(blocking=False):
                try:
                    if not response_queue.closed and writer.is_cancelled():
                        writer.log_cancellation()
                        client.cancel(request_id)
                finally:
                    response_queue.lock.release()
        return bool(self._in_flight) or self._usage.is_unreported

    def _connect(self) -> None:
        with self._lock:
            self._attachment += 1
            attachment = self._attachment
        client = attach_front(
            self._directory,
            self._owner,
            self._on_events,
            lambda: self._on_lost(attachment),
            self._on_delivered,
        )
        with self._lock:
            if self._attachment != attachment:
                client.close()
                raise EngineError("the engine exited right after it started")
            self._client = client

    def _on_lost(self, attachment: int) -> None:
        with self._lock:
            if self._attachment != attachment or self._closing.is_set():
                return
            self._attachment += 1
            was_attached, self._client = self._client is not None, None
        self._fail_all()
        if was_attached:
            thread = threading.Thread(target=self._reconnect, name="reconnect", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system refuses a thread: that of the lost engine is free
                self._reconnect()

    def _reconnect(self) -> None:
        attempt = 0
        while not self._closing.wait(RESTART_BACKOFF_S[min(attempt, len(RESTART_BACKOFF_S) - 1)]):
            try:
                return self._connect()
            except InflightError as error:
                logger.error("the engine could not be started again: %s", error)
            attempt += 1

    def _fail_all(self) -> None:
        error = CapacityError("the engine exited while it processed this request; retry it")
        while self._in_flight:
            try:
                request_id, (response_queue, writer) = self._in_flight.popitem()
            except KeyError:
                return
            self._post(response_queue, writer, TokenEvent.failed(request_id, error))


def _nothing() -> None:
    """Nothing to cancel yet."""


def _number(parameters: Mapping[str, str], name: str, default: int, high: int) -> int:
    text = parameters.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= high:
        raise ConfigError(f"config.pbtxt: {name} is {text!r}; allowed: 1 to {high}")
    return int(text)
