"""Checks whether this machine can serve."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from inflight import config
from inflight.checkpoint.locate import locate
from inflight.cli.doctor.check import Check
from inflight.cli.options import HOST
from inflight.deploy import installation, repository
from inflight.deploy.checks.triton_version import TESTED, TritonVersion
from inflight.deploy.ports import HeldPorts
from inflight.errors import ConfigError
from inflight_kernels.runtime import architectures

SUPPORTED_PYTHON = ((3, 11), (3, 12))
# Docker's default is 64 MB; each instance of a Python model takes 1 MB initially and more with long
# prompts.
SMALL_SHM_BYTES = 128 << 20
# The demo model in float32, its KV cache of 1 GiB, and the processes around it.
SMALL_MEMORY_BYTES = 3 << 30
COMMAND_TIMEOUT_S = 20


class GpuFacts(msgspec.Struct, frozen=True):
    """torch's description of the first GPU; no name if there is none."""

    name: str = ""
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    has_kernels: bool = False


_GPU_CODE = """
import importlib.util, json, torch
if torch.cuda.is_available():
    device = torch.cuda.get_device_properties(0)
    print(json.dumps({
        "name": device.name,
        "memory_bytes": device.total_memory,
        "capability": [device.major, device.minor],
        "has_kernels": all(importlib.util.find_spec(name) for name in ("cuda", "cuda.core")),
    }))
"""


def examine(ports: Sequence[int], host: str = HOST) -> list[Check]:
    """All checks, in the order in which to fix problems.

    Args:
        ports: of HTTP, gRPC, Triton's metrics, the engines' metrics and the gateway, which should
            be free.
        host: on which a server would listen.
    """
    return [
        check_python(sys.version_info[:2]),
        check_numpy(_numpy_of_the_stub(), _triton_version() or TESTED),
        *check_triton(),
        _version_of("torch", "pip install torch"),
        check_model(),
        check_ports(ports, host),
        check_shm(_shm_bytes()),
        check_memory(_memory_bytes()),
        check_gpu(_gpu()),
        _threads(),
        _glibc(),
        _perf_analyzer(),
    ]


def check_python(version: tuple[int, ...]) -> Check:
    found = f"{version[0]}.{version[1]} in {sys.prefix}"
    if version in SUPPORTED_PYTHON:
        return Check("Python", "ok", found)
    return Check("Python", "broken", found, "use Python 3.11 or 3.12")


def check_numpy(version: str, triton: TritonVersion = TESTED) -> Check:
    """The numpy that Triton's stub will import."""
    if not version[:1].isdigit():
        return Check("numpy", "broken", version, "run: pip install 'numpy>=1.26,<2'")
    try:
        installation.check_numpy(version, triton)
    except ConfigError as error:
        return Check("numpy", "broken", version, str(error))
    return Check("numpy", "ok", f"{version}, as Triton's stub will see it")


def check_triton() -> Iterator[Check]:
    """Check that the server starts, and that the stub finds its libraries."""
    try:
        found = installation.find()
        installation.check_python(found)
        backends = installation.backend_directory(found)
    except ConfigError as error:
        yield Check("tritonserver", "broken", "not usable", str(error))
        return
    environment = installation.environment(found, backends)
    yield _runs(
        "tritonserver",
        [str(found.server), "--help"],
        environment,
        f"{found.server} ({found.origin})",
        "reinstall it: pip install --force-reinstall --no-deps nvidia-pytriton==0.7.0",
    )
    yield check_stub(backends / "python" / installation.STUB, environment)
    yield check_version(found.version)


def check_version(version: TritonVersion | None) -> Check:
    """Whether it is the version that this release is tested with."""
    name = "Triton version"
    if version is None:
        found, mend = "unknown", f"inflight is tested with {TESTED}"
    elif version[:2] == TESTED[:2]:
        return Check(name, "ok", str(version))
    else:
        found, mend = str(version), f"inflight is tested with {TESTED}"
    return Check(name, "note", found, f"{mend}; run: inflight doctor --self-test")


def check_stub(stub: Path, environment: dict[str, str]) -> Check:
    """Check that the dynamic loader resolves the stub's libraries, above all libpython."""
    name = f"stub for Python {installation.PYTHON_VERSION}"
    output = _output(["ldd", str(stub)], environment)
    linked = re.search(r"libpython(\d+\.\d+)", output)
    if linked and linked[1] != installation.PYTHON_VERSION:
        return Check(name, "broken", f"{stub} is for Python {linked[1]}", f"use Python {linked[1]}")
    missing = [line.split()[0] for line in output.splitlines() if "not found" in line]
    if not missing:
        return Check(name, "ok", str(stub))
    mend = "install the missing libraries"
    if any(library.startswith("libpython") for library in missing):
        mend = (
            "use a Python built with a shared library (as by distributions and conda), or install "
            f"the package with it: apt-get install lib"
            f"python{installation.PYTHON_VERSION}"
        )
    return Check(name, "broken", f"{stub} does not find {', '.join(missing)}", mend)


def check_model() -> Check:
    """The checkpoint that the shipped repository serves."""
    try:
        engine = config.load(repository.shipped()[0] / "llm" / "1" / "engine.json")
        checkpoint = locate(engine.model)
    except ConfigError as error:
        return Check(
            "model", "note", str(error), "serve another model: inflight serve --model PATH"
        )
    return Check("model", "ok", f"{checkpoint.name} ({engine.model})")


def check_ports(ports: Sequence[int], host: str = HOST) -> Check:
    """See `examine`; a port 0 is always free."""
    try:
        HeldPorts(host, ports).release()
    except ConfigError as error:
        return Check("ports", "note", "taken", str(error))
    return Check("ports", "ok", f"{', '.join(str(port) for port in ports if port)} are free")


def check_shm(size: int) -> Check:
    found = f"{size >> 20} MiB"
    if size >= SMALL_SHM_BYTES:
        return Check("/dev/shm", "ok", found)
    return Check(
        "/dev/shm",
        "broken",
        f"{found}: tensors are passed through it, and requests fail when it is full",
        "start the container with --shm-size=1g, or: mount -o remount,size=1g /dev/shm",
    )


def check_memory(available: int) -> Check:
    found = f"{available / (1 << 30):.1f} GiB available"
    if available >= SMALL_MEMORY_BYTES:
        return Check("memory", "ok", found)
    mend = "free some, or lower kv_cache_memory_bytes in engine.json (1 GiB by default)"
    return Check("memory", "note", found, mend)


def check_gpu(found: GpuFacts) -> Check:
    """Check whether `"device": "cuda"` would work; a machine without a GPU is fine."""
    if not found.name:
        return Check("GPU", "note", "none found by torch", "engines run on the CPU")
    shown = f"{found.name}, {found.memory_bytes / (1 << 30):.0f} GiB"
    if architectures.architecture(found.capability) is None:
        capability = ".".join(map(str, found.capability))
        mend = f"engines run on the CPU: the kernels support {architectures.SUPPORTED}"
        return Check("GPU", "note", f"{shown}, compute capability {capability}", mend)
    if not found.has_kernels:
        mend = "to use it, in the repository: pip install -e '.[cuda]'"
        return Check("GPU", "note", f"{shown}; the kernel compiler is missing", mend)
    return Check("GPU", "ok", shown)


def _gpu() -> GpuFacts:
    # In a subprocess: importing torch takes seconds, and a driver may hang.
    output = _output([sys.executable, "-c", _GPU_CODE], dict(os.environ)).strip().splitlines()
    try:
        return msgspec.json.decode(output[-1] if output else "", type=GpuFacts)
    except msgspec.DecodeError:
        return GpuFacts()


def _triton_version() -> TritonVersion | None:
    try:
        return installation.find().version
    except ConfigError:  # reported by `check_triton`
        return None


def _numpy_of_the_stub() -> str:
    # The stub ignores PYTHONPATH, so its numpy may differ from this process's.
    code = "import numpy; print(numpy.__version__)"
    python = installation.python_directory() / "python3"
    lines = _output([str(python), "-E", "-c", code], dict(os.environ)).strip().splitlines()
    return lines[-1] if lines else "not installed"


def _version_of(package: str, mend: str) -> Check:
    try:
        return Check(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Check(package, "broken", "not installed", f"run: {mend}")


def _threads() -> Check:
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {all_cores} cores"
    if usable > 1:
        return Check("threads", "ok", found)
    return Check("threads", "note", found, "slow: the engine and tritonserver share one core")


def _glibc() -> Check:
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split("."))) >= (2, 34):
        return Check("libc", "ok", f"glibc {version}")
    found = f"{name or 'unknown'} {version}"
    return Check("libc", "note", found, "the tritonserver of nvidia-pytriton needs glibc 2.34")


def _perf_analyzer() -> Check:
    path = shutil.which("perf_analyzer")
    if path:
        return Check("perf_analyzer", "ok", path)
    return Check(
        "perf_analyzer", "note", "not on PATH", "only load tests need it; see docs/deployment.md"
    )


def _shm_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def _memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _runs(
    name: str, command: list[str], environment: dict[str, str], found: str, mend: str
) -> Check:
    output = _output(command, environment)
    if "Usage" in output:
        return Check(name, "ok", found)
    reason = (output.strip().splitlines() or ["no output"])[-1]
    return Check(name, "broken", f"{found} does not run: {reason}", mend)


def _output(command: list[str], environment: dict[str, str]) -> str:
    """A command's output, or the error if it cannot run."""
    try:
        return subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_TIMEOUT_S,
            text=True,
            errors="replace",
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
