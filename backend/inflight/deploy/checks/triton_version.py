"""Which facts about Triton hold from which version on.

The versions are those of the first release branch that contains the change, by the histories of
Triton's repositories `server`, `core` and `python_backend`. Only `TESTED` runs in the tests.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

VERSION_FILE = "TRITON_VERSION"
"""In the root folder of a Triton container's server."""
VERSION_VARIABLE = "TRITON_SERVER_VERSION"
"""Set in Triton containers."""
CONTAINER_ROOT = Path("/opt/tritonserver")


class TritonVersion(NamedTuple):
    """Of tritonserver, such as 2.51.0; `NGC` releases are YY.MM."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> TritonVersion | None:
        """None if it is not a version. A suffix such as `dev` is ignored."""
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
        return cls(*(int(part or 0) for part in found.groups())) if found else None

    def __str__(self) -> str:
        return ".".join(map(str, self))


TESTED = TritonVersion(2, 51)
"""Of the wheel nvidia-pytriton 0.7.0."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What holds from a version on.

    Attributes:
        since: the first version.
        release: its container, as YY.MM.
        text: what holds.
    """

    since: TritonVersion
    release: str
    text: str

    def holds(self, version: TritonVersion) -> bool:
        return version >= self.since


NUMPY_2 = Fact(
    TritonVersion(2, 52), "24.11", "Python models may use numpy 2 (pybind11 2.12 in the stub)"
)
PYTHON_3_12 = Fact(
    TritonVersion(2, 53), "24.12", "the container's Python is 3.12, before it was 3.10"
)
RESPONSE_PARAMETERS = Fact(
    TritonVersion(2, 55), "25.02", "responses of Python models may have parameters"
)
JSON_DEPTH = Fact(TritonVersion(2, 58), "25.05", "deeply nested JSON is refused by tritonserver")
HEAP_BODIES = Fact(TritonVersion(2, 62), "25.10", "HTTP bodies are no longer read onto the stack")
ENSEMBLE_LIMIT = Fact(
    TritonVersion(2, 63), "25.11", "ensembles have the parameter `max_inflight_requests`"
)
DEAD_STUBS = Fact(
    TritonVersion(2, 64), "25.12", "requests to a stub that has died fail instead of hanging"
)
MODEL_READINESS = Fact(
    TritonVersion(2, 67), "26.03", "a Python model may define `is_ready()` for its readiness"
)
STREAM_RACE = Fact(
    TritonVersion(2, 67), "26.03", "a race between concurrent streamed responses is fixed"
)
DEAD_STUB_READINESS = Fact(
    TritonVersion(2, 68), "26.04", "a server with a dead stub is not ready; it does not restart it"
)
RESERVED_PARAMETERS = Fact(
    TritonVersion(2, 69), "26.05", "Triton's reserved parameters in requests are refused"
)

FACTS = (
    NUMPY_2,
    PYTHON_3_12,
    RESPONSE_PARAMETERS,
    JSON_DEPTH,
    HEAP_BODIES,
    ENSEMBLE_LIMIT,
    DEAD_STUBS,
    MODEL_READINESS,
    STREAM_RACE,
    DEAD_STUB_READINESS,
    RESERVED_PARAMETERS,
)


def version_of(server: Path, *, is_wheel: bool) -> TritonVersion | None:
    """The version of an installed tritonserver, which is not started; None if it is not known.

    Args:
        server: the executable.
        is_wheel: it is that of the nvidia-pytriton wheel.
    """
    if is_wheel:
        return TESTED
    root = server.parent.parent
    try:
        return TritonVersion.parse((root / VERSION_FILE).read_text())
    except OSError:
        named = os.environ.get(VERSION_VARIABLE, "") if root == CONTAINER_ROOT else ""
        return TritonVersion.parse(named)
