"""`inflight serve` as PID 1 of a container, and as a service of systemd."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervised import serve
from waiting import wait_until_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "examples" / "inflight.service"
# A new PID namespace with a /proc of its own, as a container has.
UNSHARE = ("unshare", "--map-root-user", "--fork", "--pid", "--mount-proc", "--kill-child")


def test_as_pid_1_it_serves_reaps_and_stops_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        # Many containers forbid namespaces to all but privileged users; nothing else can make a
        # PID 1. tests/backend/supervision/test_orphans.py tests reaping without one.
        pytest.skip("PID namespaces are not permitted here")
    # Folders of other servers would look abandoned: their pids are not in this namespace.
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with serve(tmp_path, "echo", prefix=UNSHARE) as serving:
        (first,) = serving.process.children()
        status = Path(f"/proc/{first.pid}/status").read_text()
        assert next(line for line in status.splitlines() if "NSpid" in line).split()[-1] == "1"
        canary = serving.canary()
        regions = serving.regions()
        assert len(regions) == 4
        # Its stubs lose their parent, and PID 1 is the next one.
        with serving.restarting("tritonserver"):
            psutil.Process(serving.pid_of("tritonserver")).kill()
        serving.wait_until_serving(canary)
        serving.wait_until(lambda: serving.health()[0] == 200)
        serving.wait_until(lambda: zombies(first) == [])
        children, regions = serving.children(), regions | serving.regions()
        first.send_signal(signal.SIGTERM)
        assert serving.process.wait(60) == 0
    wait_until_ended(children)
    assert not [path for path in regions if path.exists()]
    assert not list((tmp_path / "run").glob("*/*")), "no folder of a server"


def zombies(process: psutil.Process) -> list[int]:
    return [
        child.pid
        for child in process.children(recursive=True)
        if child.status() == psutil.STATUS_ZOMBIE
    ]


def test_systemd_hears_that_it_is_ready_works_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with serve(tmp_path, "echo") as serving:
            assert systemd.recv(1024) == b"READY=1"
            assert serving.canary()
            received = [systemd.recv(1024) for _ in range(3)]
            assert set(received) == {b"WATCHDOG=1"}
            serving.process.send_signal(signal.SIGTERM)
            while (message := systemd.recv(1024)) == b"WATCHDOG=1":
                pass
            assert message == b"STOPPING=1"
            assert serving.process.wait(60) == 0


def test_the_unit_is_valid(tmp_path: Path) -> None:
    text = UNIT.read_text()
    for line in ("Type=notify", "WatchdogSec=30", "KillMode=mixed", "LimitCORE=0"):
        assert line in text.splitlines()
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        # Only systems that boot with systemd have it. The lines that matter were checked above, and
        # test_systemd_hears_that_it_is_ready_works_and_stops tests the protocol without it.
        pytest.skip("systemd-analyze is not installed")
    command = Path(sys.executable).with_name("inflight")
    unit = tmp_path / "inflight.service"
    unit.write_text(
        text.replace("/opt/inflight/.venv/bin/inflight", str(command)).replace(
            "User=inflight\n", ""
        )
    )
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "inflight.service" in line]
    assert done.returncode == 0 and ours == [], done.stderr
