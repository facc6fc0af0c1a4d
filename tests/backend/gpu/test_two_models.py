"""Two engines share a GPU, each within its budget, in any order of start.

The engines are processes, as in production, with ledgers of their own: other tests may use the same
GPU at the same time. So memory is counted in the ledger and per process (NVML), never as what the
GPU has free.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiny
from inflight.core.request import Request, TokenEvent
from inflight.errors import ConfigError
from inflight.ipc import engine_client
from inflight.ipc.engine_client import EngineClient
from inflight.ipc.gpu.ledger import Entry, GpuLedger
from inflight.ipc.owner import Owner
from inflight.ipc.runtime_folder import gpu_folder
from inflight.kv.budget import GPU_OVERHEAD_BYTES
from inflight.kv.gpu import CurrentGpu
from inflight.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MIB = 1 << 20
POOL_BYTES = 128 * MIB
START_S = 240.0
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
LAYERS = {"one": 3, "two": 2}


class Engines:
    """Engine processes of two models, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = Owner(os.getpid(), is_supervisor=True)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.clients: dict[str, EngineClient] = {}
        self._events: dict[str, list[TokenEvent]] = {}
        for name, num_layers in LAYERS.items():
            tiny.write_llama(
                folder / f"{name}-checkpoint",
                dtype=torch.bfloat16,
                num_hidden_layers=num_layers,
                **SHAPE,
            )
            self.set(name, kv_cache_memory_bytes=POOL_BYTES)

    def set(self, name: str, **settings: object) -> None:
        path = self._folder / name / "1" / "engine.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        engine = {
            "model": str(self._folder / f"{name}-checkpoint"),
            "device": "cuda",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
        }
        path.write_text(json.dumps(engine | settings))

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def start(self, *names: str) -> None:
        """Start them at once and wait until all are ready. Raises ConfigError: one cannot load."""
        for name in names:
            with open(self._folder / f"{name}.log", "ab") as log:
                self._processes[name] = engine_client.start_engine(
                    self._folder / name, self._owner, log
                )
        for name in names:
            self._attach(name)

    def _attach(self, name: str) -> None:
        process = self._processes[name]
        events = self._events[name] = []
        path = engine_client.socket_path(self._folder / name, self._owner.pid)
        deadline = time.monotonic() + START_S
        while True:
            try:
                client = engine_client.attach(path, "front", on_events=events.extend)
                self.clients[name] = client
                return
            except engine_client.CapacityError:
                log_text = (self._folder / f"{name}.log").read_text(errors="replace")
                assert process.poll() is None and time.monotonic() < deadline, log_text[-3000:]
                time.sleep(0.1)

    def answer(self, name: str) -> list[int]:
        """The greedy continuation of a prompt."""
        client, events = self.clients[name], self._events[name]
        params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        request_id = client.new_request_id()
        client.submit(Request(request_id, [5, 6, 7, 8], params))
        deadline = time.monotonic() + 60
        while True:
            own = [one for one in list(events) if one.request_id == request_id]
            assert [one.error for one in own if one.error is not None] == []
            if own and own[-1].is_last:
                return [token for one in own for token in one.token_ids]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self, name: str) -> None:
        self.clients.pop(name).close()
        self._processes[name].terminate()
        self._processes[name].wait(30)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found = Engines(tmp_path)
    yield found
    found.close()


def entries() -> dict[str, Entry]:
    found = GpuLedger(gpu_folder(), CurrentGpu()).entries()
    return {one.model.partition(" ")[0]: one for one in found}


def used_bytes(pid: int) -> int | None:
    """GPU memory of a process; None if it has none, or if NVML sees other pids than we do."""
    if shutil.which("nvidia-smi") is None:
        return None
    text = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    for line in text.splitlines():
        found, _, mib = line.partition(",")
        if found.strip() == str(pid) and mib.strip().isdigit():
            return int(mib) * MIB
    return None


def check_both_serve(engines: Engines) -> None:
    found = entries()
    assert set(found) == set(LAYERS)
    for name, entry in found.items():
        assert entry.state == "ready"
        assert entry.pid == engines.pid(name)
        assert POOL_BYTES + GPU_OVERHEAD_BYTES < entry.num_bytes < 2 * GPU_OVERHEAD_BYTES
        used = used_bytes(entry.pid)
        assert used is None or used <= entry.num_bytes
    answers = {name: engines.answer(name) for name in LAYERS}
    assert all(len(tokens) == 16 for tokens in answers.values())
    assert answers == {name: engines.answer(name) for name in LAYERS}


@pytest.mark.parametrize("order", [["one", "two"], ["two", "one"]])
def test_two_engines_start_one_after_the_other(engines: Engines, order: list[str]) -> None:
    for name in order:
        engines.start(name)
    check_both_serve(engines)


def test_two_engines_start_at_once(engines: Engines) -> None:
    """The one that gets the lock second waits; its socket is open meanwhile."""
    engines.start(*LAYERS)
    check_both_serve(engines)


def test_budgets_that_do_not_fit_together_are_refused(engines: Engines) -> None:
    """The refused engine takes nothing, and the other one serves on."""
    engines.start("one")
    before = engines.answer("one")
    total = CurrentGpu().total_bytes
    # It would fit alone, but not beside the other one.
    pool = total - 2 * GPU_OVERHEAD_BYTES - POOL_BYTES // 2
    engines.set("two", kv_cache_memory_bytes=pool)
    with pytest.raises(ConfigError) as caught:
        engines.start("two")
    text = str(caught.value)
    assert CurrentGpu().name in text and "one (" in text and "kv_cache_memory_bytes" in text
    assert set(entries()) == {"one"}
    assert engines.answer("one") == before


def test_memory_is_free_when_an_engine_has_stopped(engines: Engines) -> None:
    """Its entry is gone, it holds no memory, and another one may have as much."""
    engines.start("one")
    engines.start("two")
    pid = engines.pid("one")
    engines.stop("one")
    assert set(entries()) == {"two"}
    assert used_bytes(pid) in (None, 0)
    engines.start("one")
    check_both_serve(engines)


def test_a_stopped_engine_leaves_the_gpu_as_it_was(engines: Engines) -> None:
    """Within 64 MiB, in one of the runs of two minutes: other tests may allocate in between."""
    engines.start("two")  # what the driver keeps for the first process of a GPU
    differences = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        before = CurrentGpu().free_bytes()
        engines.start("one")
        engines.stop("one")
        differences.append(abs(CurrentGpu().free_bytes() - before))
        if differences[-1] <= 64 * MIB:
            return
    pytest.fail(f"bytes that differ: {differences}")
