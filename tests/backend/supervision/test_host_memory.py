"""Available memory, of the machine and of control groups, in a made-up file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.supervision.host_memory import HostMemory

MIB = 1 << 20


class Machine:
    """A /proc and a /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        (root / "proc/self").mkdir(parents=True)
        self.set_available(1000)

    def set_available(self, mib: int) -> None:
        text = f"MemTotal: 99999999 kB\nMemAvailable:    {mib << 10} kB\nBuffers: 1 kB\n"
        (self.root / "proc/meminfo").write_text(text)

    def set_group(self, path: str, limit: str, used: int = 0, inactive: int = 0) -> None:
        folder = self.root / "sys/fs/cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used * MIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive * MIB}\nslab 2\n")

    def memory(self, min_free_mib: int = 100) -> HostMemory:
        return HostMemory(min_free_mib * MIB, self.root, lambda: self.now)

    def poll(self, memory: HostMemory) -> str:
        self.now += 1.0
        memory.poll()
        return memory.shortage


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_memory_is_short_below_the_minimum_and_until_a_quarter_more_is_free(
    machine: Machine,
) -> None:
    memory = machine.memory()
    found = []
    for mib in (100, 99, 100, 124, 125, 100, 99):
        machine.set_available(mib)
        found.append(bool(machine.poll(memory)))
    assert found == [False, True, True, True, False, False, True]
    assert memory.shortage == (
        "the server is short of memory: 99 MiB are available, and it needs 100 MiB; retry later"
    )


def test_it_is_read_twice_a_second(machine: Machine) -> None:
    memory = machine.memory()
    machine.poll(memory)
    machine.set_available(1)
    machine.now += 0.4
    memory.poll()
    assert memory.available_bytes == 1000 * MIB
    machine.now += 0.2
    memory.poll()
    assert memory.available_bytes == MIB


def test_the_smallest_of_machine_and_groups_counts(machine: Machine) -> None:
    (machine.root / "proc/self/cgroup").write_text("3:memory:/v1\n0::/outer/inner\n")
    machine.set_group("/outer/inner", "max", used=5)
    machine.set_group("/outer", str(500 * MIB), used=450, inactive=20)
    memory = machine.memory()
    assert machine.poll(memory) and memory.available_bytes == 70 * MIB
    machine.set_group("/outer", str(2000 * MIB), used=450, inactive=20)
    assert not machine.poll(memory) and memory.available_bytes == 1000 * MIB


def test_the_group_of_a_container_is_the_root(machine: Machine) -> None:
    (machine.root / "proc/self/cgroup").write_text("0::/\n")
    machine.set_group("/", str(300 * MIB), used=250)
    memory = machine.memory()
    assert machine.poll(memory) and memory.available_bytes == 50 * MIB


@pytest.mark.parametrize("damage", ["missing", "odd"])
def test_a_system_that_does_not_report_it_is_not_short(machine: Machine, damage: str) -> None:
    (machine.root / "proc/self/cgroup").write_text("0::/\n")
    machine.set_group("/", "odd")
    if damage == "odd":
        (machine.root / "proc/meminfo").write_text("MemFree: 1 kB\n")
    else:
        (machine.root / "proc/meminfo").unlink()
    memory = machine.memory()
    assert machine.poll(memory) == "" and memory.available_bytes is None


def test_without_a_minimum_it_is_never_short(machine: Machine) -> None:
    machine.set_available(0)
    assert machine.poll(machine.memory(min_free_mib=0)) == ""
