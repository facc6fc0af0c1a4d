"""Engines on one GPU reserve their budgets, whatever the order in which they start."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.ipc.gpu.ledger import GpuLedger
from inflight.ipc.processes import Process
from inflight.kv.budget import GPU_OVERHEAD_BYTES
from waiting import PATIENCE_S, wait_until

GIB = 1 << 30
TOTAL = 24 * GIB


class FakeGpu:
    """A GPU of 24 GiB; `used` of it by other programs."""

    uuid = "GPU-12345678-aaaa"
    name = "Fake 24"
    total_bytes = TOTAL

    def __init__(self) -> None:
        self.used = GPU_OVERHEAD_BYTES

    def free_bytes(self) -> int:
        return TOTAL - self.used


class Engines:
    """Processes in whose names budgets are reserved."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self) -> Process:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self._children.append(child)
        found = Process.find(child.pid)
        assert found is not None
        return found

    def kill(self, process: Process) -> None:
        (child,) = (one for one in self._children if one.pid == process.pid)
        child.kill()
        child.communicate()

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate()


@pytest.fixture
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


def ledger(folder: Path, patience_s: float = 0.0, gpu: FakeGpu | None = None) -> GpuLedger:
    return GpuLedger(folder, gpu or FakeGpu(), patience_s)


def start(ledger: GpuLedger, model: str, gib: float, process: Process) -> None:
    with ledger.reserve(model, int(gib * GIB), process) as reservation:
        reservation.settle(int(gib * GIB))


def budgets(ledger: GpuLedger) -> dict[str, float]:
    return {one.model: one.num_bytes / GIB for one in ledger.entries()}


@pytest.mark.parametrize("order", list(itertools.permutations(["one", "two", "three"])))
def test_the_order_of_starts_does_not_matter(
    tmp_path: Path, engines: Engines, order: tuple[str, ...]
) -> None:
    sizes = {"one": 16.0, "two": 5.0, "three": 3.0}
    for model in order:
        start(ledger(tmp_path), model, sizes[model], engines.start())
    assert budgets(ledger(tmp_path)) == sizes


def test_simultaneous_starts_load_one_after_another(tmp_path: Path, engines: Engines) -> None:
    """None sees the expected budget of another that is loading; all fit in the end."""
    loading, most = 0, 0
    errors: list[ConfigError] = []
    waits: list[list[str]] = []

    def load(model: str, process: Process) -> None:
        nonlocal loading, most
        try:
            found = ledger(tmp_path).reserve(model, 14 * GIB, process, waits.append)
            with found as reservation:
                loading += 1
                most = max(most, loading)
                # Who waits reports it repeatedly, at first perhaps before this one is listed.
                wait_until(lambda: any(len(models) == 1 for models in waits))
                loading -= 1
                reservation.settle(3 * GIB)  # less than was expected
        except ConfigError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=load, args=(f"m{index}", engines.start())) for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, errors) == (1, [])
    assert budgets(ledger(tmp_path)) == {f"m{index}": 3.0 for index in range(4)}
    assert {state.state for state in ledger(tmp_path).entries()} == {"ready"}
    assert any(len(models) == 1 for models in waits), "who waits sees what is loading"


def test_a_refusal_names_the_gpu_who_has_reserved_it_and_what_to_set(
    tmp_path: Path, engines: Engines
) -> None:
    start(ledger(tmp_path), "one (Llama)", 16, engines.start())
    start(ledger(tmp_path), "two (Qwen)", 4, engines.start())
    with pytest.raises(ConfigError) as caught:
        start(ledger(tmp_path), "three", 4.5, engines.start())
    assert str(caught.value) == (
        "gpu_memory_utilization: the engine needs 4.50 GiB of GPU Fake 24 (GPU-12345678, "
        "24.00 GiB); allowed: up to 4.00 GiB, as one (Llama) 16.00 GiB, two (Qwen) 4.00 GiB is "
        "reserved; lower gpu_memory_utilization or kv_cache_memory_bytes of one of the engines"
    )
    assert set(budgets(ledger(tmp_path))) == {"one (Llama)", "two (Qwen)"}


def test_an_engine_that_needs_more_than_expected_is_refused(
    tmp_path: Path, engines: Engines
) -> None:
    start(ledger(tmp_path), "one", 16, engines.start())
    with (
        pytest.raises(ConfigError, match=r"allowed: up to 8\.00 GiB"),
        ledger(tmp_path).reserve("two", 2 * GIB, engines.start()) as reservation,
    ):
        reservation.settle(9 * GIB)
    assert budgets(ledger(tmp_path)) == {"one": 16.0}


def test_an_engine_that_has_exited_has_no_budget(tmp_path: Path, engines: Engines) -> None:
    first = engines.start()
    start(ledger(tmp_path), "one", 20, first)
    engines.kill(first)
    assert budgets(ledger(tmp_path)) == {}
    start(ledger(tmp_path), "two", 20, engines.start())
    assert budgets(ledger(tmp_path)) == {"two": 20.0}


def test_an_engine_that_dies_while_it_loads_stops_nobody(tmp_path: Path, engines: Engines) -> None:
    """The kernel releases its lock, and its entry does not count."""
    program = (
        "import sys, time; from pathlib import Path; from inflight.ipc.file_lock import file_lock\n"
        "with file_lock(Path(sys.argv[1])): print('locked', flush=True); time.sleep(600)"
    )
    path = tmp_path / "GPU-12345678-aaaa.lock"
    child = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"locked\n"
    done = threading.Event()

    def load() -> None:
        start(ledger(tmp_path), "two", 20, engines.start())
        done.set()

    threading.Thread(target=load, daemon=True).start()
    assert not done.wait(0.5)
    child.kill()
    child.communicate()
    assert done.wait(PATIENCE_S)


def test_the_successor_of_an_engine_waits_for_its_memory(tmp_path: Path, engines: Engines) -> None:
    first = engines.start()
    start(ledger(tmp_path), "one", 20, first)
    threading.Timer(0.4, engines.kill, (first,)).start()
    start(ledger(tmp_path, patience_s=PATIENCE_S), "one", 20, engines.start())
    assert budgets(ledger(tmp_path)) == {"one": 20.0}


def test_memory_of_other_programs_is_not_reserved(tmp_path: Path, engines: Engines) -> None:
    gpu = FakeGpu()
    gpu.used = 10 * GIB
    with pytest.raises(ConfigError, match=r"up to 15\.00 GiB, as other programs use the rest"):
        start(ledger(tmp_path, gpu=gpu), "one", 16, engines.start())
    assert budgets(ledger(tmp_path)) == {}
    start(ledger(tmp_path, gpu=gpu), "one", 15, engines.start())


def test_a_broken_ledger_counts_as_empty(tmp_path: Path, engines: Engines) -> None:
    (tmp_path / "GPU-12345678-aaaa.json").write_text('[{"pid": ')
    start(ledger(tmp_path), "one", 16, engines.start())
    assert budgets(ledger(tmp_path)) == {"one": 16.0}
    assert (tmp_path / "GPU-12345678-aaaa.json").stat().st_mode & 0o777 == 0o600
