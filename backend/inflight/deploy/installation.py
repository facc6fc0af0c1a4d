"""Finds tritonserver and prepares it to run this backend with this Python.

Three parts must match: the server, the stub (a small program linked against one minor version of
Python, in which Triton runs a Python model) and the backend directory. Nothing is started here, and
nothing of Triton is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import inflight
from inflight.deploy.checks.triton_version import NUMPY_2, TritonVersion, version_of
from inflight.errors import ConfigError

SERVER_VARIABLE = "INFLIGHT_TRITONSERVER"
SYSTEM_SERVER = Path("/opt/tritonserver/bin/tritonserver")
STUB = "triton_python_backend_stub"
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_MODEL = "from inflight.triton.model import TritonPythonModel as TritonPythonModel\n"


@dataclass(frozen=True, slots=True)
class Installation:
    """A tritonserver and its Python backend.

    Attributes:
        server: the executable.
        python_backend: the folder with libtriton_python.so and triton_python_backend_utils.py.
        stub: the program that runs Python models, linked against this minor version of Python.
        libraries: a folder that must be on LD_LIBRARY_PATH, if any.
        origin: how it was found, for display.
    """

    server: Path
    python_backend: Path
    stub: Path
    libraries: Path | None
    origin: str

    @property
    def is_wheel(self) -> bool:
        """Whether it is the tritonserver 2.51 of the nvidia-pytriton wheel."""
        return self.libraries is not None

    @property
    def version(self) -> TritonVersion | None:
        """None if it is not known."""
        return version_of(self.server, is_wheel=self.is_wheel)


def find() -> Installation:
    """The first of: $INFLIGHT_TRITONSERVER, tritonserver on PATH, that of an NGC container, that of
    the nvidia-pytriton wheel.

    Raises:
        ConfigError: none found, or the one found is incomplete.
    """
    named = os.environ.get(SERVER_VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigError(f"{SERVER_VARIABLE}={named} is not an executable file")
        return _installed(path, SERVER_VARIABLE)
    on_path = shutil.which("tritonserver")
    if on_path:
        return _installed(Path(on_path), "PATH")
    if SYSTEM_SERVER.exists():
        return _installed(SYSTEM_SERVER, str(SYSTEM_SERVER.parent))
    wheel = _wheel_root()
    if wheel is not None:
        return _in_wheel(wheel)
    raise ConfigError(
        f"tritonserver not found (searched ${SERVER_VARIABLE}, PATH, {SYSTEM_SERVER} and the "
        "nvidia-pytriton wheel); run in the repository: pip install -e '.[triton]'"
    )


def backend_directory(installation: Installation, cache: Path | None = None) -> Path:
    """A folder for `--backend-directory` with Triton's Python backend and this one.

    It is created once per combination of server, Python and checkout.

    Args:
        cache: where to create it; None for ~/.cache/inflight/backends.

    Raises:
        ConfigError: the folder cannot be written.
    """
    ours = _our_backend()
    parts = (str(installation.python_backend), str(installation.stub), str(ours), sys.prefix)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    root = cache or _cache_directory() / "backends"
    target = root / key
    if (target / "complete").exists() and (target / "python" / STUB).exists():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        _fill(scratch, installation, ours)
        shutil.rmtree(target, ignore_errors=True)
        # A concurrent process creates the same folder: either one is fine.
        with contextlib.suppress(OSError):
            scratch.rename(target)
        shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or root}: cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to a writable folder"
        ) from None
    return target


def environment(installation: Installation, backends: Path) -> dict[str, str]:
    """The environment for tritonserver. The stub embeds the `python3` found first on PATH and takes
    site-packages from there; it ignores PYTHONPATH."""
    variables = dict(os.environ)
    variables["PATH"] = os.pathsep.join((str(python_directory()), variables.get("PATH", "")))
    libraries = [str(backends / "lib")]
    if installation.libraries is not None:
        libraries.append(str(installation.libraries))
    if variables.get("LD_LIBRARY_PATH"):
        libraries.append(variables["LD_LIBRARY_PATH"])
    variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    variables.pop("PYTHONHOME", None)
    return variables


def python_directory() -> Path:
    """The folder of this interpreter's `python3`."""
    return Path(sys.prefix, "bin")


def libpython() -> Path | None:
    """This interpreter's shared library; None if it was built without one."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    folder = sysconfig.get_config_var("LIBDIR")
    if not folder or ".so" not in name:
        return None
    path = Path(folder, name)
    return path if path.exists() else None


def check_python(installation: Installation) -> None:
    """
    Raises:
        ConfigError: the stub would not find a compatible `python3` or numpy.
    """
    if not (python_directory() / "python3").exists():
        raise ConfigError(
            f"{python_directory()}/python3 does not exist, so Triton's stub would run another "
            "Python; use a virtual environment made by `python3 -m venv`"
        )
    if installation.version is not None:
        check_numpy(importlib.metadata.version("numpy"), installation.version)


def check_numpy(version: str, triton: TritonVersion) -> None:
    """
    Raises:
        ConfigError: this Triton's Python backend passes corrupt tensors to this numpy.
    """
    if int(version.split(".", 1)[0]) >= 2 and not NUMPY_2.holds(triton):
        raise ConfigError(
            f"numpy {version} is installed, but the Python backend of Triton {triton} silently "
            "passes corrupt tensors to numpy 2; run: pip install 'numpy<2'"
        )


def _installed(server: Path, origin: str) -> Installation:
    server = server.resolve()
    backend = server.parent.parent / "backends" / "python"
    stub = backend / STUB
    for needed in (backend / "libtriton_python.so", stub):
        if not needed.exists():
            raise ConfigError(
                f"{server} (from {origin}) has no Python backend: {needed} does not exist"
            )
    return Installation(server, backend, stub, None, origin)


def _wheel_root() -> Path | None:
    # Not imported: pytriton would import its own server, proxies and loggers.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _in_wheel(package: Path) -> Installation:
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / PYTHON_VERSION / STUB
    if not stub.exists():
        found = sorted(path.name for path in (root / "python_backend_stubs").glob("3.*"))
        raise ConfigError(
            f"the nvidia-pytriton wheel has no stub for Python {PYTHON_VERSION}; "
            f"it has {', '.join(found) or 'none'}"
        )
    server = root / "bin" / "tritonserver"
    if not os.access(server, os.X_OK):
        raise ConfigError(
            f"{server} is missing or not executable; run: pip install --force-reinstall --no-deps "
            "nvidia-pytriton==0.7.0"
        )
    return Installation(
        server,
        root / "backends" / "python",
        stub,
        package.parent / "nvidia_pytriton.libs",
        "the nvidia-pytriton wheel",
    )


def _our_backend() -> Path | None:
    # A checkout's backend/ is a complete backend; a wheel has only the package.
    folder = Path(inflight.__file__).resolve().parent.parent
    return folder if (folder / "model.py").exists() else None


def _fill(directory: Path, installation: Installation, ours: Path | None) -> None:
    python = directory / "python"
    python.mkdir()
    # Copies: Triton rejects a backend library whose real path is outside the backend's folder.
    for file in installation.python_backend.iterdir():
        if file.is_file() and file.name != STUB:
            shutil.copy2(file, python)
    shutil.copy2(installation.stub, python)
    # The system's search may find another libpython of the same minor version first, whose patch
    # version does not match this interpreter's standard library. A folder with this one file,
    # because all of LIBDIR on LD_LIBRARY_PATH would expose more libraries than intended.
    (directory / "lib").mkdir()
    own = libpython()
    if own is not None:
        (directory / "lib" / own.name).symlink_to(own)
    if ours is not None:
        (directory / "inflight").symlink_to(ours, target_is_directory=True)
    else:
        (directory / "inflight").mkdir()
        (directory / "inflight" / "model.py").write_text(_MODEL)
    (directory / "complete").touch()


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "inflight")
