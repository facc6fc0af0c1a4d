"""The command line of tritonserver, and what starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Stack of each thread of tritonserver. Its HTTP server (2.51) reads a body with a form content
# type, as from curl -d, onto the stack: with the usual 8 MB, a body of 5 MB crashed the server.
# Only used pages take memory.
STACK_BYTES = 128 << 20

# Instead of a preexec_fn, which is not safe in a process with threads. PR_SET_PDEATHSIG is 1: the
# kernel kills tritonserver when the thread that started it ends for any reason.
_LAUNCHER = """\
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the starting process has exited")
soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
wanted = int(sys.argv[2])
if hard != resource.RLIM_INFINITY:
    wanted = min(wanted, hard)
if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
os.execv(sys.argv[3], sys.argv[3:])
"""

_KINDS = ("http", "grpc", "metrics")
ADMIN_HEADER = "inflight-admin"
"""A request with this header and the admin key may load models."""


@dataclass(frozen=True, slots=True)
class Command:
    """Settings of a tritonserver.

    Attributes:
        repositories: model repositories.
        hosts, ports: of HTTP, gRPC and metrics.
        region_prefix: of the names of its stubs' shared memory.
        admin_key: see `ADMIN_HEADER`.
        controls_models: whether models are loaded and unloaded while it runs.
        loaded: with `controls_models`, the models of its start; None for all.
    """

    repositories: Sequence[Path]
    hosts: tuple[str, str, str]
    ports: tuple[int, int, int]
    region_prefix: str
    admin_key: str
    controls_models: bool
    loaded: Sequence[str] | None

    def line(self, server: Path, backends: Path) -> list[str]:
        """The command line that starts a server which does not outlive the starting thread.

        Args:
            server: tritonserver's program.
            backends: the folder of its backends.
        """
        return [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER),
            *(str(os.getpid()), str(STACK_BYTES), str(server)),
            *self._arguments(backends),
        ]

    def _arguments(self, backends: Path) -> Iterator[str]:
        for path in self.repositories:
            yield f"--model-repository={path}"
        yield f"--backend-directory={backends}"
        yield f"--backend-config=python,shm-region-prefix-name={self.region_prefix}"
        for kind, host, port in zip(_KINDS, self.hosts, self.ports, strict=True):
            yield f"--{kind}-address={host}"
            yield f"--{kind}-port={port}"
        # What no client of an LLM needs and every client could harm the server with: regions of
        # shared memory, log settings, traces, loading and unloading.
        closed = "shared-memory,model-repository,logging,trace"
        yield f"--http-restricted-api={closed}:{ADMIN_HEADER}={self.admin_key}"
        yield f"--grpc-restricted-protocol={closed}:{ADMIN_HEADER}={self.admin_key}"
        yield "--allow-gpu-metrics=false"
        if self.controls_models:
            yield "--model-control-mode=explicit"
            # Else the server would not be ready while one of its models loads, or cannot load.
            # Without that, it answers once the models of its start are loaded.
            yield "--strict-readiness=false"
            for name in self.loaded if self.loaded is not None else ["*"]:
                yield f"--load-model={name}"
        else:
            yield "--model-control-mode=none"
        # The config.pbtxt files are complete; auto-completion would start every stub twice.
        yield "--disable-auto-complete-config"
        yield "--log-format=ISO8601"
        # No --grpc-max-connection-age: it would abort healthy streams that run longer. Its purpose,
        # exiting while idle streams are open, is handled by `Server.stop`.
