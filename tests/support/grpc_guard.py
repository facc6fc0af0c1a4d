"""The gRPC door as a process, and a stand-in for Triton behind it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
from tritonclient.grpc import service_pb2, service_pb2_grpc

import lasting_health
from inflight.ipc.health import Health
from waiting import PATIENCE_S

READY = Health(is_live=True, is_ready=True, models=["generate"])
SERVICE = "/inference.GRPCInferenceService"
# What waits for the test waits longer than the test does for anything.
RELEASE_S = 4 * PATIENCE_S


class Door:
    """A door under test.

    Attributes:
        address: host:port of the clients' side.
        process: its first process.
    """

    def __init__(self, folder: Path, upstream: str, *options: str, **limits: Any) -> None:
        self._file = folder / "health.json"
        lasting_health.write(self._file, READY)
        command = [sys.executable, "-m", "inflight.door.grpc_door", "--listen", "127.0.0.1:0"]
        command += ["--upstream", upstream, "--health", str(self._file)]
        command += ["--limits", msgspec.json.encode(limits).decode(), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[1]
        self.channel = grpc.insecure_channel(self.address, options=OWN)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def workers(self) -> list[int]:
        """PIDs of its workers."""
        pid = self.process.pid
        return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def set_health(self, value: Health | None) -> None:
        """What the supervisor would write; None for a supervisor that is gone."""
        if value is None:
            self._file.unlink()
        else:
            lasting_health.write(self._file, value)
        time.sleep(0.15)  # workers remember it for a tenth of a second

    def close(self) -> None:
        self.channel.close()
        self.process.terminate()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


@contextlib.contextmanager
def opened(folder: Path, upstream: str, *options: str, **limits: Any) -> Iterator[Door]:
    door = Door(folder, upstream, *options, **limits)
    try:
        yield door
    finally:
        door.close()


def answered(request_id: str, is_final: bool, data: bytes = b"", num_outputs: int = 1) -> bytes:
    """A ModelStreamInferResponse."""
    message = service_pb2.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = "generate", request_id
    response.parameters["triton_final_response"].bool_param = is_final
    for _ in range(num_outputs):
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(data)
    return bytes(message.SerializeToString())


class StandIn:
    """Answers each request as scripted by its model's name, and records what it has received.

    Attributes:
        received: method, message and metadata of each request.
        cancelled: set when a client's call has ended, before its time or not.
        num_streams: that are open.
        release: lets requests of `wait` finish.
    """

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.received: list[tuple[str, bytes, dict[str, str]]] = []
        self.cancelled = threading.Event()
        self.num_streams = 0
        self._lock = threading.Lock()
        self.release = threading.Event()
        self.num_sent = 0
        self.address = address
        self._pool = ThreadPoolExecutor(48)
        self.start()

    def start(self) -> None:
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_Handlers(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address)}"
        self._server.start()

    def stop(self) -> None:
        """As if it had ended; it can start again."""
        self._server.stop(0).wait(PATIENCE_S)

    def close(self) -> None:
        self.release.set()
        self.stop()
        self._pool.shutdown()

    def _stream_ended(self) -> None:
        with self._lock:
            self.num_streams -= 1
        self.cancelled.set()

    def unary(self, method: str, data: bytes, context: Any) -> bytes:
        self.received.append((method, data, dict(context.invocation_metadata())))
        message = service_pb2.ModelInferRequest.FromString(data)
        if message.model_name == "slow":
            context.add_callback(self.cancelled.set)
            self.release.wait(RELEASE_S)
        if message.model_name == "path":
            context.abort(grpc.StatusCode.INTERNAL, "cannot open /dev/shm/triton_python_region_1")
        if message.model_name == "busy":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the queue is full; try again later")
        return data

    def stream(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with self._lock:
            self.num_streams += 1
        context.add_callback(self._stream_ended)
        for data in requests:
            self.received.append((method, data, dict(context.invocation_metadata())))
            message = service_pb2.ModelInferRequest.FromString(data)
            yield from self._answers(message, context)

    def _answers(self, message: Any, context: Any) -> Iterator[bytes]:
        if message.model_name == "wait":
            yield answered(message.id, False, b"first")
            self.release.wait(RELEASE_S)
        if message.model_name == "endless":
            while context.is_active():
                self.num_sent += 1
                yield answered(message.id, False, b"x" * 10_000)
        if message.model_name == "path":
            error = service_pb2.ModelStreamInferResponse(error_message="no /dev/shm/triton_x/y")
            error.infer_response.id = message.id
            yield bytes(error.SerializeToString())
            return
        if message.model_name == "silent-end":
            yield answered(message.id, False, b"all")
            if message.parameters["triton_enable_empty_final_response"].bool_param:
                yield answered(message.id, True, num_outputs=0)
            return
        yield answered(message.id, True, b"all")


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(
                lambda requests, context: self._stand_in.stream(method, requests, context)
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda data, context: self._stand_in.unary(method, data, context)
        )
