"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before anything imports torch: the suite runs beside servers of its own (see runner.build).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
