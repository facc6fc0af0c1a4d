"""Each failed check reports the problem and how to fix it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import fake_tritonserver
from inflight.cli.doctor import machine as doctor
from inflight.deploy import installation


@pytest.mark.parametrize("version", [(3, 10), (3, 13)])
def test_a_python_without_a_stub_is_broken(version: tuple[int, int]) -> None:
    assert doctor.check_python(version).status == "broken"
    assert doctor.check_python((3, 12)).status == "ok"


@pytest.mark.parametrize(
    ("version", "status"), [("1.26.4", "ok"), ("2.4.0", "broken"), ("not installed", "broken")]
)
def test_the_numpy_of_the_stub_must_be_older_than_2(version: str, status: str) -> None:
    check = doctor.check_numpy(version)
    assert check.status == status
    assert ("numpy" in check.mend) == (status == "broken")


def test_dockers_shared_memory_is_too_small() -> None:
    check = doctor.check_shm(64 << 20)
    assert check.status == "broken"
    assert "--shm-size" in check.mend
    assert doctor.check_shm(1 << 30).status == "ok"


def test_a_taken_port_is_a_note_with_the_flag_to_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for place, flag in (
            (0, "--http-port"),
            (3, "--engine-metrics-port"),
            (4, "--gateway-port"),
        ):
            ports = [0] * 5
            ports[place] = port
            check = doctor.check_ports(ports)
            assert check.status == "note"
            assert f"127.0.0.1:{port} cannot be used" in check.mend
            assert f"{flag} 0" in check.mend


def test_little_memory_is_a_note() -> None:
    assert doctor.check_memory(1 << 30).status == "note"
    assert doctor.check_memory(64 << 30).status == "ok"


def test_a_tritonserver_that_does_not_run_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = fake_tritonserver.install(tmp_path / "triton", lines=("no libfoo.so",), status=127)
    monkeypatch.setenv(installation.SERVER_VARIABLE, str(server))
    first = next(iter(doctor.check_triton()))
    assert first.status == "broken"
    assert "no libfoo.so" in first.found


def test_no_tritonserver_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(installation.SERVER_VARIABLE, str(tmp_path / "nowhere"))
    (check,) = doctor.check_triton()
    assert check.status == "broken"
    assert installation.SERVER_VARIABLE in check.mend


def test_a_stub_without_libpython_says_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = f"libpython{installation.PYTHON_VERSION}.so.1.0"
    output = f"\t{library} => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n"
    monkeypatch.setattr(doctor, "_output", lambda command, environment: output)
    check = doctor.check_stub(tmp_path / "stub", {})
    assert check.status == "broken"
    assert f"does not find {library}" in check.found
    assert "libpython" in check.mend


def test_a_stub_for_another_python_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = "\tlibpython3.10.so.1.0 => /lib/libpython3.10.so.1.0 (0x1)\n"
    monkeypatch.setattr(doctor, "_output", lambda command, environment: output)
    check = doctor.check_stub(tmp_path / "stub", {})
    assert check.status == "broken"
    assert "for Python 3.10" in check.found


def test_this_machine_is_examined_to_the_end() -> None:
    checks = doctor.examine((0, 0, 0, 0, 0))
    assert len({check.name for check in checks}) == len(checks) >= 10
    assert [check.name for check in checks if check.status == "broken"] == []
    assert all(check.mend for check in checks if check.status != "ok")
    assert checks[0].name == "Python"


def test_a_gpu_is_optional_and_missing_parts_are_reported() -> None:
    assert doctor.check_gpu(doctor.GpuFacts()).status == "note"
    fine = doctor.GpuFacts("H200", 140 << 30, (9, 0), has_kernels=True)
    assert doctor.check_gpu(fine).status == "ok"
    without = doctor.check_gpu(doctor.GpuFacts("H200", 140 << 30, (9, 0)))
    assert "pip install -e '.[cuda]'" in without.mend
    old = doctor.check_gpu(doctor.GpuFacts("T4", 15 << 30, (7, 5), has_kernels=True))
    assert "7.5" in old.found and "8.x to 12.x" in old.mend
    new = doctor.GpuFacts("B200", 178 << 30, (10, 0), has_kernels=True)
    assert doctor.check_gpu(new).status == "ok"
