"""Copies of KV blocks between a GPU and host memory, beside the steps.

Loads and stores have a stream each, so that both directions of the bus are used at once:

    loads     wait for the steps before, which may read what the target block held, and for stores
              to the slots that they read
    stores    wait for loads from the slots that they overwrite; their blocks were filled by steps
              whose results are known
    a step    waits for the loads before it, and for its own if it reads them

No step waits for a store: the scheduler lets nobody write to a block that is being stored.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch

from inflight.core.batch import Batch
from inflight.errors import ConfigError
from inflight.kv.tiers.host_blocks import BlockPart, HostBlocks
from inflight_kernels.runtime import host_memory
from inflight_kernels.runtime.host_memory import HostMemoryError, Rows


class HostTransfers:
    """Launches the loads and stores of batches.

    Args:
        parts: of a block in the pool.
        num_bytes: of host memory.

    Attributes:
        blocks: the host memory.

    Raises:
        ConfigError: see `HostBlocks`; or the system does not let that much memory be page-locked.
    """

    def __init__(self, parts: Sequence[BlockPart], num_bytes: int) -> None:
        self.blocks = HostBlocks(parts, num_bytes)
        try:
            host_memory.lock_pages(self.blocks.memory)
        except HostMemoryError as error:
            raise ConfigError(
                f"kv_host_memory_bytes: {num_bytes} bytes cannot be page-locked ({error}); lower "
                "it, or raise the limit of locked memory (ulimit -l)"
            ) from None
        # It keeps the memory until then. A process that ends has no use for it.
        weakref.finalize(self, host_memory.unlock_pages, self.blocks.memory).atexit = False
        self._parts = parts
        self._addresses = [part.data.data_ptr() for part in parts]
        self._loading = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._storing = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._loaded: torch.cuda.Event | None = None
        self._stored: torch.cuda.Event | None = None
        self._in_flight: deque[tuple[torch.cuda.Event, list[int]]] = deque()

    def launch(self, batch: Batch) -> None:
        """Launch the copies of a batch before its step, which is launched on the current stream."""
        step = torch.cuda.current_stream()
        if self._loaded is not None:
            step.wait_event(self._loaded)
            self._loaded = None
        if batch.loads:
            self._loading.wait_stream(step)
            if self._stored is not None:
                self._loading.wait_event(self._stored)
            with torch.cuda.stream(self._loading):
                for slot, block in batch.loads:
                    self._copy(slot, block, is_load=True)
                self._loaded = _recorded()
            self._storing.wait_event(self._loaded)
            if batch.reads_loads:
                step.wait_event(self._loaded)
                self._loaded = None
        if batch.stores:
            with torch.cuda.stream(self._storing):
                for _, block, slot in batch.stores:
                    self._copy(slot, block, is_load=False)
                self._stored = _recorded()
            tickets = [store.ticket for store in batch.stores]
            self._in_flight.append((self._stored, tickets))

    def take_stored(self) -> list[int]:
        """Tickets of the stores that have ended since the last call."""
        tickets: list[int] = []
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            tickets += self._in_flight.popleft()[1]
        return tickets

    def _copy(self, slot: int, block: int, *, is_load: bool) -> None:
        memory = self.blocks.memory
        slot_address = memory.data_ptr() + slot * memory.shape[1]
        for part, address in zip(self._parts, self._addresses, strict=True):
            row_bytes = part.row_bytes
            device = Rows(address + block * row_bytes, part.data.shape[1] * row_bytes)
            host = Rows(slot_address + part.start, row_bytes)
            if is_load:
                host_memory.to_device(host, device, row_bytes, part.num_rows)
            else:
                host_memory.to_host(device, host, row_bytes, part.num_rows)


def _recorded() -> torch.cuda.Event:
    """An event at the end of the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
