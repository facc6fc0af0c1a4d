"""The prefix cache's third tier: KV blocks in a file, which outlives the engine.

    blocks      the blocks, in slots
    index       a record for each block that was written: slot, checksum, hash; the last one of a
                slot counts

The index is append-only, and a record is written after its block. A process that is killed may lose
the blocks it was writing, and no others: a block without a complete record is ignored, and a block
that was overwritten without a new record fails its checksum. Both files are of one model with one
layout of its KV cache, in a folder named by its fingerprint; other models have folders of their
own. One engine at a time uses it.

Reads and writes are done by threads. They copy between the file and slots of host memory, which
`HostCache` keeps from being reused meanwhile.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.errors import ConfigError

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<IIB33s")
"""Slot, checksum, length of the hash, hash."""

_THREADS = 2
_MAX_IN_FLIGHT = 64
"""Reads and writes: more would wait in memory for the disk."""


class _Place(NamedTuple):
    """Where a block is in the file, and the checksum of its bytes."""

    slot: int
    checksum: int


class Ended(NamedTuple):
    """A read or write that has ended.

    Attributes:
        key: hash of the block.
        host_slot: in host memory.
        is_read: whether it was read.
        is_ok: whether the bytes are what they should be.
    """

    key: bytes
    host_slot: int
    is_read: bool
    is_ok: bool


class DiskCache:
    """KV blocks in a file, by block hash. Eviction is LRU.

    Args:
        folder: of all models; made if it does not exist.
        fingerprint: of the model and the layout of its blocks: a name for its folder.
        num_bytes: of the file.
        memory: [slots, bytes of a block] of host memory.

    Attributes:
        num_slots: blocks that the file holds.
        num_written, num_read: blocks so far.
        num_corrupt: blocks that did not match their checksums.

    Raises:
        ConfigError: the folder cannot be used, or another engine uses it, or no block fits.
    """

    def __init__(
        self, folder: Path, fingerprint: str, num_bytes: int, memory: npt.NDArray[np.uint8]
    ) -> None:
        self.num_slots = num_bytes // memory.shape[1]
        if not self.num_slots:
            raise ConfigError(
                f"kv_disk_bytes: {num_bytes} bytes are not enough; one KV block of this model "
                f"takes {memory.shape[1]} bytes"
            )
        self.num_written = self.num_read = self.num_corrupt = 0
        self._memory = memory
        self._places: OrderedDict[bytes, _Place] = OrderedDict()  # least recently used first
        self._writing: dict[bytes, int] = {}  # slots in the file
        self._num_reads = 0
        self._files: list[int] = []
        self._ended: deque[tuple[Ended, int]] = deque()  # with the checksum of what was written
        try:
            home = folder / fingerprint
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            fcntl.flock(self._open(home / "lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blocks = self._open(home / "blocks")
            self._read_index(home / "index")
            self._write_index(home / "index")
        except BlockingIOError:
            self._close_files()
            raise ConfigError(
                f"kv_disk_dir: another engine uses {home}; give each engine a folder of its own"
            ) from None
        except OSError as error:
            self._close_files()
            raise ConfigError(
                f"kv_disk_dir: {folder} cannot be used ({error.strerror}); allowed: a folder that "
                "can be written to"
            ) from None
        self._threads = ThreadPoolExecutor(_THREADS, "kv-disk")

    def __len__(self) -> int:
        """Blocks in the file."""
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    @property
    def is_busy(self) -> bool:
        """Whether no further read or write is accepted now."""
        return self._num_reads + len(self._writing) >= _MAX_IN_FLIGHT

    @property
    def has_work(self) -> bool:
        """Whether reads or writes are in flight."""
        return bool(self._num_reads or self._writing)

    def write(self, key: bytes, host_slot: int) -> None:
        """Start to write a block that is neither here nor being written; `is_busy` is False."""
        slot = self._take_slot()
        self._writing[key] = slot
        self._threads.submit(self._write, key, host_slot, slot)

    def read(self, key: bytes, host_slot: int) -> None:
        """Start to read a block that is here; `is_busy` is False."""
        self._places.move_to_end(key)
        self._num_reads += 1
        self._threads.submit(self._read, key, host_slot, self._places[key])

    def take_ended(self) -> list[Ended]:
        """The reads and writes that have ended since the last call."""
        ended = []
        while self._ended:
            one, checksum = self._ended.popleft()
            if one.is_read:
                self._num_reads -= 1
                self._end_read(one)
            else:
                self._end_write(one, checksum)
            ended.append(one)
        return ended

    def close(self) -> None:
        """Wait for what is in flight, and release the files; a second time does nothing."""
        self._threads.shutdown()
        self.take_ended()
        self._close_files()

    def _end_read(self, one: Ended) -> None:
        if one.is_ok:
            self.num_read += 1
        elif self._places.pop(one.key, None) is not None:
            # Its slot is not used again before a restart: it may be a bad one.
            self.num_corrupt += 1
            logger.warning("a KV block on disk does not match its checksum; it is computed again")

    def _end_write(self, one: Ended, checksum: int) -> None:
        slot = self._writing.pop(one.key)
        if not one.is_ok:
            self._free.append(slot)
            return
        self._places[one.key] = place = _Place(slot, checksum)
        os.write(self._index, _record(one.key, place))
        self.num_written += 1

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        return self._places.popitem(last=False)[1].slot

    def _write(self, key: bytes, host_slot: int, slot: int) -> None:
        """In a thread."""
        row = self._memory[host_slot]
        checksum, is_ok = zlib.crc32(row), True
        try:
            is_ok = os.pwrite(self._blocks, row, slot * len(row)) == len(row)
        except OSError as error:  # a full disk, say: the block is lost, nothing else
            logger.warning("a KV block cannot be written to disk (%s)", error.strerror)
            is_ok = False
        self._ended.append((Ended(key, host_slot, False, is_ok), checksum))

    def _read(self, key: bytes, host_slot: int, place: _Place) -> None:
        """In a thread."""
        row = self._memory[host_slot]
        try:
            count = os.preadv(self._blocks, [row], place.slot * len(row))
            is_ok = count == len(row) and zlib.crc32(row) == place.checksum
        except OSError:
            is_ok = False
        self._ended.append((Ended(key, host_slot, True, is_ok), 0))

    def _open(self, path: Path, flags: int = 0) -> int:
        self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600))
        return self._files[-1]

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _read_index(self, path: Path) -> None:
        """Fill `_places` and `_free` from the records of an earlier process."""
        content = path.read_bytes() if path.exists() else b""
        by_slot: dict[int, tuple[bytes, _Place]] = {}
        whole = len(content) // _RECORD.size * _RECORD.size
        for slot, checksum, length, key in _RECORD.iter_unpack(content[:whole]):
            by_slot.pop(slot, None)  # so that the order is that of the last records
            if slot < self.num_slots:
                by_slot[slot] = key[:length], _Place(slot, checksum)
        for key, place in by_slot.values():
            self._places[key] = place
        used = {place.slot for place in self._places.values()}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def _write_index(self, path: Path) -> None:
        """Write the records of what is there, and open the index for more."""
        fresh = path.with_suffix(".new")
        fresh.write_bytes(b"".join(_record(key, place) for key, place in self._places.items()))
        fresh.chmod(0o600)
        fresh.replace(path)
        self._index = self._open(path, os.O_APPEND)


def _record(key: bytes, place: _Place) -> bytes:
    return _RECORD.pack(place.slot, place.checksum, len(key), key)
