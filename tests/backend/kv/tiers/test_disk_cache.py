"""A file keeps KV blocks by hash over restarts, and never returns one that is not as it was."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inflight.errors import ConfigError
from inflight.kv.block_pool import BlockPool
from inflight.kv.tiers.disk_cache import DiskCache, Ended
from inflight.kv.tiers.host_cache import HostCache, HostTier
from waiting import wait_until

BLOCK_BYTES = 5000
NUM_HOST_SLOTS = 8


def _key(number: int) -> bytes:
    return bytes([number]) * 32


def _content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


class _Disk:
    """A cache on disk with its host memory."""

    def __init__(self, folder: Path, num_slots: int = 4, fingerprint: str = "f") -> None:
        self.memory = np.zeros((NUM_HOST_SLOTS, BLOCK_BYTES), np.uint8)
        self.cache = DiskCache(folder, fingerprint, num_slots * BLOCK_BYTES, self.memory)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.memory[0] = _content(number)
            self.cache.write(_key(number), 0)
            assert self.ended() == [Ended(_key(number), 0, False, True)]

    def ended(self) -> list[Ended]:
        found: list[Ended] = []
        wait_until(lambda: found.extend(self.cache.take_ended()) or not self.cache.has_work)
        return found

    def reads(self, number: int) -> bool:
        """Whether a block comes back as it was."""
        self.memory[1] = 0
        self.cache.read(_key(number), 1)
        (one,) = self.ended()
        assert one == Ended(_key(number), 1, True, one.is_ok)
        assert not one.is_ok or (self.memory[1] == _content(number)).all()
        return one.is_ok


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[_Disk]:
    one = _Disk(tmp_path)
    yield one
    one.cache.close()


def test_a_block_comes_back_as_it_was(disk: _Disk) -> None:
    disk.write(1, 2)
    assert disk.reads(1)
    assert disk.reads(2)
    assert (disk.cache.num_written, disk.cache.num_read) == (2, 2)


def test_the_least_recently_used_block_is_replaced(disk: _Disk) -> None:
    disk.write(1, 2, 3, 4)
    assert disk.reads(1)
    disk.write(5)
    assert [_key(number) in disk.cache for number in range(1, 6)] == [True, False, True, True, True]
    assert len(disk.cache) == 4


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    first = _Disk(tmp_path)
    first.write(1, 2, 3, 4, 5)  # 1 was replaced
    first.cache.close()
    second = _Disk(tmp_path)
    assert _key(1) not in second.cache
    assert all(second.reads(number) for number in (2, 3, 4, 5))
    second.write(6)  # in place of 2, the least recently used one, whose slot is not free
    second.cache.close()
    third = _Disk(tmp_path)
    assert all(third.reads(number) for number in (3, 4, 5, 6))
    third.cache.close()


def test_a_process_that_was_killed_loses_nothing_that_was_written(tmp_path: Path) -> None:
    first = _Disk(tmp_path)
    first.write(1, 2)
    index = tmp_path / "f" / "index"
    content = index.read_bytes()
    first.cache.close()
    index.write_bytes(content + content[:17])  # a torn record
    second = _Disk(tmp_path)
    assert second.reads(1)
    assert second.reads(2)
    second.cache.close()


def test_a_changed_block_is_not_returned(tmp_path: Path) -> None:
    first = _Disk(tmp_path)
    first.write(1, 2)
    first.cache.close()
    with open(tmp_path / "f" / "blocks", "r+b") as file:
        file.seek(100)
        file.write(b"\0\1\2")
    second = _Disk(tmp_path)
    assert not second.reads(1)
    assert _key(1) not in second.cache
    assert second.cache.num_corrupt == 1
    assert second.reads(2)
    second.cache.close()


def test_a_smaller_file_keeps_what_fits(tmp_path: Path) -> None:
    first = _Disk(tmp_path)
    first.write(1, 2, 3, 4)
    first.cache.close()
    second = _Disk(tmp_path, num_slots=2)
    assert len(second.cache) == 2
    assert all(second.reads(number) for number in (1, 2))
    second.cache.close()


def test_models_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = _Disk(tmp_path), _Disk(tmp_path, fingerprint="g")
    first.write(1)
    assert _key(1) not in second.cache
    first.cache.close()
    second.cache.close()


def test_one_engine_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    first = _Disk(tmp_path)
    with pytest.raises(ConfigError, match=r"another engine uses .*give each engine a folder"):
        _Disk(tmp_path)
    first.cache.close()
    _Disk(tmp_path).cache.close()


def test_only_the_user_can_read_it(disk: _Disk, tmp_path: Path) -> None:
    disk.write(1)
    home = tmp_path / "f"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in home.iterdir()} == {0o600}


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk_dir: .* cannot be used"):
        _Disk(tmp_path / "file")
    with pytest.raises(ConfigError, match="kv_disk_bytes: 0 bytes are not enough"):
        _Disk(tmp_path, num_slots=0)


def test_a_write_that_fails_loses_only_its_block(
    disk: _Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.pwrite", full)
        disk.cache.write(_key(1), 0)
        assert disk.ended() == [Ended(_key(1), 0, False, False)]
    assert _key(1) not in disk.cache
    disk.write(1, 2, 3, 4)
    assert disk.reads(1)


# ---------------------------------------------------------------- below host memory


def _host(disk: _Disk, pool: BlockPool) -> HostCache:
    return HostCache(HostTier(NUM_HOST_SLOTS // 4, disk=disk.cache), pool)


def _store(host: HostCache, pool: BlockPool, disk: _Disk, number: int) -> None:
    block = pool.allocate()
    pool.register(block, _key(number))
    pool.release([block])
    host.offer(block, _key(number))
    for store in host.plan_stores():
        disk.memory[store.slot] = _content(number)
        host.finish([store.ticket])

    def is_written() -> bool:
        host.plan_stores()
        return not host.has_work

    wait_until(is_written)


def test_what_host_memory_evicts_is_on_disk(disk: _Disk) -> None:
    pool = BlockPool(8, 4)
    host = _host(disk, pool)
    for number in (1, 2, 3):
        _store(host, pool, disk, number)
    assert _key(1) not in host
    assert all(_key(number) in disk.cache for number in (1, 2, 3))


def test_a_fetched_block_is_in_host_memory_as_it_was(disk: _Disk) -> None:
    pool = BlockPool(8, 4)
    host = _host(disk, pool)
    for number in (1, 2, 3):
        _store(host, pool, disk, number)
    pool.release([pool.allocate() for _ in range(pool.num_free)])  # evict all
    tried: set[bytes] = set()
    assert host.fetch([_key(1)], tried)
    wait_until(lambda: not host.fetch([_key(1)], tried))
    assert (disk.memory[host.hold(_key(1))] == _content(1)).all()


def test_a_block_is_fetched_once_for_a_request(disk: _Disk) -> None:
    """Otherwise one whose prefix exceeds host memory would wait for ever."""
    pool = BlockPool(8, 4)
    host = _host(disk, pool)
    for number in (1, 2, 3, 4):
        _store(host, pool, disk, number)
    pool.release([pool.allocate() for _ in range(pool.num_free)])
    tried: set[bytes] = set()
    chain = [_key(number) for number in (1, 2, 3, 4)]
    wait_until(lambda: not host.fetch(chain, tried))
    assert len(tried) <= 4


def test_a_block_that_cannot_be_read_is_not_waited_for(disk: _Disk, tmp_path: Path) -> None:
    pool = BlockPool(8, 4)
    host = _host(disk, pool)
    for number in (1, 2, 3):
        _store(host, pool, disk, number)
    pool.release([pool.allocate() for _ in range(pool.num_free)])
    (tmp_path / "f" / "blocks").write_bytes(b"")
    tried: set[bytes] = set()
    wait_until(lambda: not host.fetch([_key(1)], tried))
    assert _key(1) not in host
    assert len(host) + len(host._free) == host.num_slots
