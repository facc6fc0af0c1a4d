"""A stub that exits is a fault, unless its model is being changed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.deploy.tritonserver.server import Server
from inflight.ipc.heartbeat import Heartbeat
from inflight.ipc.owner import Owner
from inflight.ipc.processes import Process
from inflight.ipc.runtime_folder import folder_of
from inflight.supervision.triton_child import TritonChild
from waiting import has_arguments, wait_until

_PROGRAM = "import sys; sys.stdin.read()"


class FakeServer(Server):
    """A server that always answers; its stubs are processes with the arguments of Triton's."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder], controls_models=True)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.loaded = []

    def start_stub(self, model: str) -> None:
        arguments = [f"/models/{model}/1/model.py", "region", "1", "1", str(os.getpid()), "x", "y"]
        self.children[model] = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments, f"{model}_0_0"], stdin=subprocess.PIPE
        )
        wait_until(lambda: has_arguments(self.children[model].pid, *arguments, f"{model}_0_0"))
        assert self.loaded is not None
        self.loaded = [*self.loaded, model]

    def end_stub(self, model: str) -> None:
        child = self.children.pop(model)
        child.kill()
        child.communicate()

    def stubs(self) -> list[Process]:
        found = [Process.find(child.pid) for child in self.children.values()]
        return [one for one in found if one is not None]

    def exit_status(self) -> int | None:
        return None

    def is_running(self) -> bool:
        return True

    @property
    def api(self) -> FakeServer:
        return self

    def probe(self) -> int:
        return 200


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    # `python -c PROGRAM` takes the places of the program's name.
    monkeypatch.setattr("inflight.supervision.triton_child._MODEL_PATH", 3)
    monkeypatch.setattr("inflight.supervision.triton_child._INSTANCE", 10)
    found = FakeServer(tmp_path)
    found.start_stub("llm")
    found.start_stub("two_llm")
    yield found
    for model in list(found.children):
        found.end_stub(model)


@pytest.fixture
def child(server: FakeServer) -> Iterator[TritonChild]:
    found = TritonChild(server, Owner(os.getpid(), is_supervisor=True))
    wait_until(lambda: found.is_ready)
    yield found
    found.close()


def test_a_probe_need_not_be_awaited(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.supervision.triton_child.PROBE_INTERVAL_S", 600.0)
    child = TritonChild(server, Owner(os.getpid(), is_supervisor=True))
    assert not child.is_ready
    child.probe_now()
    wait_until(lambda: child.is_ready)
    child.close()


def test_a_stub_that_exits_is_a_problem(server: FakeServer, child: TritonChild) -> None:
    assert child.problem() == ""
    server.end_stub("llm")
    assert child.problem() == "lost a model's process"


def test_a_stub_that_hangs_is_named_and_says_where(
    server: FakeServer,
    child: TritonChild,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pid = server.children["two_llm"].pid
    folder = folder_of(os.getpid())
    Heartbeat(folder / f"stub-{pid}.beat").beat(-2.0)

    def stacks_of(stub: Process, path: Path) -> list[str]:
        assert (stub.pid, path) == (pid, folder / f"stub-{pid}.stacks")
        return ["Thread 1:", "  in execute"]

    monkeypatch.setattr("inflight.supervision.triton_child.stacks_of", stacks_of)
    assert child.problem() == "", "it is given the time of a beat more"
    monkeypatch.setattr("inflight.ipc.heartbeat.INTERVAL_S", 0.0)
    assert child.problem().startswith(
        "has a process that hangs, of the model two_llm: a beat is 2."
    )
    assert caplog.messages == ["two_llm: Thread 1:", "two_llm:   in execute"]
    caplog.clear()
    monkeypatch.setattr("inflight.supervision.triton_child.stacks_of", lambda *_: [])
    assert child.problem()
    assert caplog.messages == ["two_llm: it is stopped, or no thread of it runs"]


def test_only_the_stubs_of_changing_models_may_exit(server: FakeServer, child: TritonChild) -> None:
    with child.changing(["two_llm"]) as stubs:
        assert [one.pid for one in stubs] == [server.children["two_llm"].pid]
        server.end_stub("two_llm")
        assert child.problem() == ""
        server.start_stub("two_llm")
        server.end_stub("llm")
        assert child.problem() == "lost a model's process"
        server.start_stub("llm")
    assert child.problem() == ""
    server.end_stub("two_llm")
    assert child.problem() == "lost a model's process", "the new one is watched"


def test_a_replaced_stub_may_exit_later(server: FakeServer, child: TritonChild) -> None:
    """It still finishes requests when the change is over."""
    with child.changing(["two_llm"]):
        server.children["former"] = server.children.pop("two_llm")
        time.sleep(0.05)  # start times have a resolution of 10 ms
        server.start_stub("two_llm")
    server.end_stub("former")
    assert child.problem() == ""


def test_a_stub_of_an_unloaded_model_may_exit_later(server: FakeServer, child: TritonChild) -> None:
    with child.changing(["two_llm"]):
        server.loaded = ["llm"]
    server.end_stub("two_llm")
    assert child.problem() == ""


def test_a_change_may_end_while_the_stubs_are_checked(
    server: FakeServer, child: TritonChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check reads the stubs of before the change, one of which has exited since."""
    change = contextlib.ExitStack()
    change.enter_context(child.changing(["two_llm"]))
    server.end_stub("two_llm")
    server.start_stub("two_llm")

    def overdue_s(heartbeat: Path) -> float:
        change.close()
        return 0.0

    monkeypatch.setattr("inflight.ipc.heartbeat.overdue_s", overdue_s)
    assert child.problem() == ""
    server.end_stub("two_llm")
    assert child.problem() == "lost a model's process"
