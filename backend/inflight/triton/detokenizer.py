"""Ids to text: a pure function of its inputs, so that any instance can process any response.

It also reports to the engine what Triton does not report to the running steps of an ensemble:
delivered responses and cancelled clients. With dynamic batching a cancelled request's responses are
dropped before they arrive here; the engine then notices the missing acknowledgements.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import triton_python_backend_utils as pb_utils
from inflight.errors import EngineError, InflightError, RequestError
from inflight.ipc.engine_client import EngineClient, attach, engine_sockets
from inflight.text.detokenize import KEPT, Detokenizer
from inflight.triton import contract, protocol
from inflight.triton.errors import DelayedErrors
from inflight.triton.sibling import llm_directory, load_tokenizer
from inflight.triton.stub import owner

logger = logging.getLogger(__name__)

ATTACH_PAUSE_S = 0.2
# A detokenizer that is loaded while requests run must not miss their deliveries.
FIRST_ATTACH_S = 2.0
CLOSE_S = 0.2
# `is_cancelled` is a round trip through Triton's shared memory. So it is not polled for every
# response of a fast stream, and polling takes at most about a tenth of the time.
CANCEL_INTERVAL_S = 0.01
CANCEL_POLL_BACKOFF = 9.0
# Streams whose last poll is remembered; a forgotten one is merely polled again at once.
MAX_POLLED = 4096
MAX_VOCAB_SIZE = 1 << 24


class DetokenizerFront:
    """Triton's model `detokenizer`.

    Args:
        directory: the model's folder; its sibling `llm` is in the same repository.
        parameters: of config.pbtxt; `llm` names the sibling.

    Raises:
        ConfigError: the sibling or its tokenizer is missing.
    """

    def __init__(self, directory: Path, parameters: Mapping[str, str]) -> None:
        llm = llm_directory(directory, parameters)
        self._detokenizer = Detokenizer(load_tokenizer(llm))
        self._reports = DeliveryReports(llm)
        self._errors = DelayedErrors()
        self._polled_at: OrderedDict[int, float] = OrderedDict()  # oldest poll first
        self._next_poll_at = 0.0

    def execute(self, requests: list[Any]) -> list[Any]:
        """A response to each request, or None if an error follows."""
        responses: list[Any] = []
        progress = []
        for request in requests:
            try:
                texts, delivered = self._texts(request)
                if delivered:
                    self._poll_cancellation(request, delivered[0][0])
            except InflightError as error:
                self._errors.send(request.get_response_sender(), error)
                responses.append(None)
                continue
            except Exception:  # fails this request, not the others of the batch
                logger.exception("a response could not be detokenized")
                failure = EngineError("the response could not be detokenized")
                self._errors.send(request.get_response_sender(), failure)
                responses.append(None)
                continue
            encoded = np.array([[text.encode() for text in texts]], object)
            output = pb_utils.Tensor("text_output", encoded)
            responses.append(pb_utils.InferenceResponse([output]))
            progress += delivered
        self._reports.send(progress)
        return responses

    def finalize(self) -> None:
        self._errors.close()
        self._reports.close()

    def _texts(self, request: Any) -> tuple[list[str], list[tuple[int, int]]]:
        """The text of each output in a response, and the delivered (request id, position), without
        those of id 0, which is no request."""
        ids = _row(request, contract.DETOKENIZE_IDS)
        state = _row(request, contract.DETOKENIZE_STATE)
        if not state:
            _raise_error_of_llm(request)
        size = contract.DETOKENIZE_STATE_SIZE
        has_kept = self._check_range(ids)
        texts = []
        delivered = []
        first = 0
        if not state or len(state) % size:
            raise RequestError(
                f"has {len(state)} values; allowed: {size} for each output",
                contract.DETOKENIZE_STATE.name,
            )
        for place in range(0, len(state), size):
            count, width, trim, final, request_id, position = state[place : place + size]
            own = ids[first : first + count]
            if not 0 <= width <= count == len(own) or trim < 0:
                raise RequestError("does not fit detokenize_ids", contract.DETOKENIZE_STATE.name)
            first += count
            new = own[width:]
            delta = self._detokenizer.delta_with_kept if has_kept else self._detokenizer.delta
            texts.append(delta(own[:width], new, final=bool(final), trim=trim))
            if request_id:
                delivered.append((request_id, position))
        return texts, delivered

    def _check_range(self, ids: list[int]) -> bool:
        """Check that all are token ids; returns whether special tokens are marked as kept."""
        # The model's vocabulary may be larger than the tokenizer's, which skips unknown ids.
        highest = self._reports.vocab_size - 1
        if ids and not 0 <= min(ids) <= max(ids) <= highest:
            plain = [id_ - KEPT if id_ < 0 else id_ for id_ in ids]
            if 0 <= min(plain) <= max(plain) <= highest:
                return True
            wrong = next(
                id_ for id_, one in zip(ids, plain, strict=True) if not 0 <= one <= highest
            )
            raise RequestError(
                f"{wrong} is not a token id of this model; allowed: 0 to {highest}",
                contract.DETOKENIZE_IDS.name,
            )
        return False

    def _poll_cancellation(self, request: Any, request_id: int) -> None:
        now = time.monotonic()
        if now < max(self._next_poll_at, self._polled_at.get(request_id, 0.0) + CANCEL_INTERVAL_S):
            return
        self._polled_at[request_id] = now
        self._polled_at.move_to_end(request_id)
        if len(self._polled_at) > MAX_POLLED:
            self._polled_at.popitem(last=False)
        if request.is_cancelled():
            self._reports.cancel(request_id)
        answered = time.monotonic()
        self._next_poll_at = answered + CANCEL_POLL_BACKOFF * (answered - now)


class DeliveryReports:
    """Reports deliveries to the engines of a model: to one, or to both while one replaces the
    other, since a stream goes on with the engine on which it began. An engine ignores the requests
    of the other one. Reports never block, and are dropped while there is no engine. Waits at first
    until it is attached to the engines that have loaded.
    """

    def __init__(self, llm: Path) -> None:
        self._llm = llm
        self._vocab_size = MAX_VOCAB_SIZE
        self._lock = threading.Lock()
        self._attached: dict[Path, tuple[EngineClient, threading.Event]] = {}  # with its loss
        self._clients: tuple[EngineClient, ...] = ()  # of `_attached`, to be read without the lock
        self._closing = threading.Event()
        self._threads: dict[Path, threading.Thread] = {}
        tried = [self._start_attaching(path) for path in engine_sockets(llm, owner().pid)]
        deadline = time.monotonic() + FIRST_ATTACH_S
        for one in tried:
            one.wait(max(0.0, deadline - time.monotonic()))
        self._thread = threading.Thread(target=self._keep_attached, name="reports", daemon=True)
        self._thread.start()

    @property
    def vocab_size(self) -> int:
        """Of the model; the largest possible one before an engine was found."""
        return self._vocab_size

    def send(self, progress: list[tuple[int, int]]) -> None:
        if progress:
            for client in self._clients:
                client.delivered(progress)

    def cancel(self, request_id: int) -> None:
        for client in self._clients:
            client.cancel(request_id)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            attached = list(self._attached.values())
        for client, lost in attached:
            lost.set()
            client.close()
        for thread in (self._thread, *self._threads.values()):
            thread.join(CLOSE_S)  # one may wait for an engine that loads

    def _keep_attached(self) -> None:
        # The model `llm` may load after this one, and its engine may be restarted or replaced.
        while not self._closing.wait(ATTACH_PAUSE_S):
            for path in engine_sockets(self._llm, owner().pid):
                if path not in self._threads or not self._threads[path].is_alive():
                    self._start_attaching(path)

    def _start_attaching(self, path: Path) -> threading.Event:
        """Attach to an engine on a thread; the event is set once it has, unless the engine still
        loads or does not answer."""
        tried = threading.Event()
        thread = threading.Thread(
            target=self._attach, args=(path, tried), name="reports-attach", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # tried again
            tried.set()
        else:
            self._threads[path] = thread
        return tried

    def _attach(self, path: Path, tried: threading.Event) -> None:
        """Attach to an engine, and wait until it is lost."""
        lost = threading.Event()
        try:
            client = attach(
                path, "detokenizer", on_lost=lost.set, on_loading=lambda loading: tried.set()
            )
        except InflightError:
            tried.set()
            return
        with self._lock:
            if self._closing.is_set():
                client.close()
                return
            self._vocab_size = client.welcome.vocab_size
            self._attached[path] = client, lost
            self._clients = tuple(one for one, _ in self._attached.values())
        tried.set()
        lost.wait()
        with self._lock:
            del self._attached[path]
            self._clients = tuple(one for one, _ in self._attached.values())


def _raise_error_of_llm(request: Any) -> None:
    """Raise the error that the model `llm` has left to this one, if it is one."""
    found = pb_utils.get_input_tensor_by_name(request, contract.DETOKENIZE_ERROR.name)
    if found is not None:
        raise protocol.read_error(contract.DETOKENIZE_ERROR, found.as_numpy().reshape(-1))


def _row(request: Any, tensor: contract.Tensor) -> list[int]:
    """A tensor of shape [1, N]: the model is batched, and each request is a batch of one."""
    found = pb_utils.get_input_tensor_by_name(request, tensor.name)
    if found is None:
        raise RequestError("is missing", tensor.name)
    array = found.as_numpy()
    if array.ndim != 2 or array.shape[0] != 1:
        raise RequestError(f"has shape {list(array.shape)}; allowed: [1, N]", tensor.name)
    values: list[int] = array[0].tolist()
    return values
