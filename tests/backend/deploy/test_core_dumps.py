"""No process of a server leaves a core dump."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, resource, subprocess, sys
from inflight.deploy.core_dumps import forbid_core_dumps
forbid_core_dumps()
code = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
sys.stdout.write(subprocess.check_output([sys.executable, "-c", code], text=True))
"""


def test_children_inherit_the_limit() -> None:
    found = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True)
    assert found.strip() == "(0, 0)"
