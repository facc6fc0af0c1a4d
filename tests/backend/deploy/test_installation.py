"""Finding and preparing tritonserver, on fake installations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fake_tritonserver
from inflight.deploy import installation
from inflight.deploy.checks.triton_version import TESTED
from inflight.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(installation.SERVER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(installation, "SYSTEM_SERVER", tmp_path / "opt" / "bin" / "tritonserver")
    monkeypatch.setattr(installation, "_wheel_root", lambda: None)


def wheel(root: Path, python: str = installation.PYTHON_VERSION) -> Path:
    package = root / "site-packages" / "pytriton"
    fake_tritonserver.install(package / "tritonserver")
    stub = package / "tritonserver" / "python_backend_stubs" / python / installation.STUB
    stub.parent.mkdir(parents=True)
    stub.write_text(f"stub for {python}")
    return package


def test_the_variable_comes_before_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path = fake_tritonserver.install(tmp_path / "one")
    named = fake_tritonserver.install(tmp_path / "two")
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert installation.find().server == on_path
    monkeypatch.setenv(installation.SERVER_VARIABLE, str(named))
    assert installation.find().server == named


def test_a_container_comes_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = wheel(tmp_path)
    monkeypatch.setattr(installation, "_wheel_root", lambda: package)
    found = installation.find()
    assert found.is_wheel
    assert found.libraries == tmp_path / "site-packages" / "nvidia_pytriton.libs"
    system = fake_tritonserver.install(tmp_path / "opt")
    assert installation.find().server == system
    assert not installation.find().is_wheel


def test_nothing_found_says_where_it_looked_and_what_to_run() -> None:
    with pytest.raises(ConfigError, match=r"PATH.*pip install -e '\.\[triton\]'"):
        installation.find()


def test_a_server_without_a_python_backend_is_refused_by_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = fake_tritonserver.install(tmp_path / "one")
    (tmp_path / "one" / "backends" / "python" / installation.STUB).unlink()
    monkeypatch.setenv(installation.SERVER_VARIABLE, str(server))
    with pytest.raises(ConfigError, match=installation.STUB):
        installation.find()


def test_a_variable_that_names_no_program_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(installation.SERVER_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="not an executable file"):
        installation.find()


def test_a_wheel_without_a_stub_for_this_python_names_those_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = wheel(tmp_path, python="3.8")
    monkeypatch.setattr(installation, "_wheel_root", lambda: package)
    with pytest.raises(ConfigError, match=r"it has 3\.8"):
        installation.find()


def test_the_backend_directory_holds_tritons_backend_and_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = wheel(tmp_path)
    monkeypatch.setattr(installation, "_wheel_root", lambda: package)
    backends = installation.backend_directory(installation.find(), tmp_path / "cache")
    python = backends / "python"
    assert (python / installation.STUB).read_text() == f"stub for {installation.PYTHON_VERSION}"
    # Triton rejects a backend library whose real path is elsewhere.
    assert (python / "libtriton_python.so").resolve().parent == python.resolve()
    model = (backends / "inflight" / "model.py").read_text()
    assert "from inflight.triton.model import TritonPythonModel" in model


def test_from_a_wheel_of_ours_the_backend_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = fake_tritonserver.install(tmp_path / "opt")
    monkeypatch.setattr(installation, "_our_backend", lambda: None)
    found = installation.find()
    assert found.server == server
    backends = installation.backend_directory(found, tmp_path / "cache")
    files = [path.name for path in (backends / "inflight").iterdir()]
    assert files == ["model.py"]


def test_the_backend_directory_is_made_once_and_mended_when_broken(tmp_path: Path) -> None:
    fake_tritonserver.install(tmp_path / "opt")
    found = installation.find()
    first = installation.backend_directory(found, tmp_path / "cache")
    made = (first / "complete").stat().st_mtime_ns
    again = installation.backend_directory(found, tmp_path / "cache")
    assert again == first
    assert (again / "complete").stat().st_mtime_ns == made
    (first / "python" / installation.STUB).unlink()
    assert installation.backend_directory(found, tmp_path / "cache") == first
    assert (first / "python" / installation.STUB).exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    fake_tritonserver.install(tmp_path / "opt")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        installation.backend_directory(installation.find(), tmp_path / "file")


def test_the_stub_finds_this_interpreter_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_tritonserver.install(tmp_path / "opt")
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    environment = installation.environment(installation.find(), tmp_path / "backends")
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.prefix, "bin"))
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep)[0] == str(tmp_path / "backends/lib")
    assert "PYTHONHOME" not in environment


@pytest.mark.parametrize("version", ["2.0.0", "2.4.1"])
def test_numpy_2_is_refused_for_triton_2_51(version: str) -> None:
    with pytest.raises(ConfigError, match="numpy<2"):
        installation.check_numpy(version, TESTED)
    installation.check_numpy("1.26.4", TESTED)


def test_finding_the_wheel_does_not_import_it() -> None:
    """Importing pytriton starts loggers and proxies of its own."""
    code = (
        "import sys; from inflight.deploy import installation; installation._wheel_root();"
        " print('pytriton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
