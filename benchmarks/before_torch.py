"""Imported before torch by scripts that run an engine on a CPU, as engine processes begin."""

from inflight.core.openmp import limit_spinning

limit_spinning()
