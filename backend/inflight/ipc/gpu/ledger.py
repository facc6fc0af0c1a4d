"""The budgets of all engines on a GPU, in a file that the engines of one user share.

An engine reserves its budget before it loads. Engines load one after another: what an engine will
take is then known before the next one counts what is left, so the order of their starts does not
matter. Entries of processes that have exited do not count.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from inflight.errors import ConfigError
from inflight.ipc.file_lock import file_lock
from inflight.ipc.processes import Process
from inflight.kv.budget import GPU_OVERHEAD_BYTES
from inflight.kv.gpu import Gpu

# An engine that exits, such as the predecessor of one that is restarted, frees its memory within
# this time.
PATIENCE_S = 5.0
_POLL_S = 0.1
_GIB = 1 << 30


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A budget.

    Attributes:
        pid, start_time: the engine's process (see `Process`).
        model: name of its model, for messages.
        num_bytes: its budget.
        state: an engine that is loading may still change its budget.
    """

    pid: int
    start_time: str
    model: str
    num_bytes: int
    state: Literal["loading", "ready"]

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start_time)


class Reservation:
    """The budget of the engine that this process loads; see `GpuLedger.reserve`."""

    def __init__(self, ledger: GpuLedger, model: str, process: Process) -> None:
        self._ledger = ledger
        self._model = model
        self._process = process

    def settle(self, num_bytes: int) -> None:
        """The engine has loaded, and this is its budget.

        Raises:
            ConfigError: the other engines leave less.
        """
        self.put(num_bytes, "ready")

    def put(self, num_bytes: int, state: Literal["loading", "ready"]) -> None:
        """Write the entry. Raises ConfigError: the other engines leave less."""
        ledger = self._ledger
        others = [one for one in ledger.entries() if one.process != self._process]
        if sum(one.num_bytes for one in others) + num_bytes > ledger.gpu.total_bytes:
            raise ConfigError(ledger.refusal(num_bytes, others))
        entry = Entry(
            pid=self._process.pid,
            start_time=self._process.start_time,
            model=self._model,
            num_bytes=num_bytes,
            state=state,
        )
        ledger.write([*others, entry])

    def withdraw(self) -> None:
        """Remove the entry."""
        ledger = self._ledger
        ledger.write([one for one in ledger.entries() if one.process != self._process])


class GpuLedger:
    """The budgets on one GPU.

    Args:
        folder: of all ledgers of this user.
        gpu: whose memory is shared.
        patience_s: how long to wait for memory of engines that exit.
    """

    def __init__(self, folder: Path, gpu: Gpu, patience_s: float = PATIENCE_S) -> None:
        self.gpu = gpu
        self._path = folder / f"{gpu.uuid}.json"
        self._patience_s = patience_s

    @contextlib.contextmanager
    def reserve(
        self,
        model: str,
        num_bytes: int,
        process: Process,
        on_wait: Callable[[list[str]], None] = lambda models: None,
    ) -> Iterator[Reservation]:
        """Reserve a budget and keep other engines from loading within the `with` block.

        The budget is withdrawn if the block raises.

        Args:
            model: name of the model, for messages.
            num_bytes: the expected budget.
            process: the engine's.
            on_wait: called several times a second, with the models that are loading before.

        Raises:
            ConfigError: the other engines, or other programs, leave less.
        """

        def wait() -> None:
            on_wait([one.model for one in self.entries() if one.state == "loading"])

        reservation = Reservation(self, model, process)
        with file_lock(self._path.with_suffix(".lock"), wait):
            self._reserve(reservation, num_bytes, wait)
            try:
                yield reservation
            except BaseException:  # re-raised; a budget without an engine would block others
                reservation.withdraw()
                raise

    def entries(self) -> list[Entry]:
        """The budgets of running engines."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=list[Entry])
        except (OSError, msgspec.DecodeError):  # none, or of another version
            return []
        return [one for one in found if one.process.is_running()]

    def write(self, entries: list[Entry]) -> None:
        """Replace the file at once: a reader sees the former entries or these. Only the engine that
        holds the lock writes."""
        new = self._path.with_suffix(f".{os.getpid()}")
        new.touch(mode=0o600)
        new.write_bytes(msgspec.json.encode(entries))
        new.replace(self._path)

    def refusal(self, num_bytes: int, others: list[Entry]) -> str:
        """The error for a budget that does not fit: names the GPU, its memory and the engines that
        have reserved it, and the settings to lower."""
        reserved = sum(one.num_bytes for one in others)
        left = max(0, self.gpu.total_bytes - reserved)
        names = ", ".join(f"{one.model} {_gib(one.num_bytes)}" for one in others)
        return (
            f"gpu_memory_utilization: the engine needs {_gib(num_bytes)} of {self._name}; allowed: "
            f"up to {_gib(left)}, as {names or 'no engine'} is reserved; lower "
            "gpu_memory_utilization or kv_cache_memory_bytes of one of the engines"
        )

    def _reserve(
        self, reservation: Reservation, num_bytes: int, on_wait: Callable[[], None]
    ) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                reservation.put(num_bytes, "loading")
                free = self.gpu.free_bytes() + GPU_OVERHEAD_BYTES  # this process has its context
                if free >= num_bytes:
                    return
                reservation.withdraw()
                raise ConfigError(
                    f"gpu_memory_utilization: the engine needs {_gib(num_bytes)} of {self._name}; "
                    f"allowed: up to {_gib(free)}, as other programs use the rest; end them, or "
                    "lower gpu_memory_utilization or kv_cache_memory_bytes"
                )
            except ConfigError:
                if time.monotonic() >= deadline:
                    raise
            on_wait()
            time.sleep(_POLL_S)

    @property
    def _name(self) -> str:
        return f"GPU {self.gpu.name} ({self.gpu.uuid[:12]}, {_gib(self.gpu.total_bytes)})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
