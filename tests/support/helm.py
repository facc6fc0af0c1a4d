"""Helm's own engine, in a process of its own: its Go runtime handles signals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_RENDER = """
import json, sys
import helm_python as helm
path, values = sys.argv[1], json.loads(sys.argv[2])
with helm.Chart.load(path) as chart:
    chart.validate_schema(values)
    print(json.dumps(chart.render(values, name="qwen", namespace="llms")))
"""
_LINT = """
import json, sys
import helm_python as helm
print(json.dumps(helm.lint(sys.argv[1]), default=str))
"""


class HelmError(Exception):
    """What Helm says."""


def render(chart: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a release `qwen` in the namespace `llms`.

    Raises:
        HelmError: the values or the templates are not valid.
    """
    manifests = _run(_RENDER, str(chart), json.dumps(values))
    texts = [text for name, text in manifests.items() if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def lint(chart: Path) -> Any:
    """Helm's findings."""
    return _run(_LINT, str(chart))


def _run(code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise HelmError(done.stderr)
    return json.loads(done.stdout)
