"""Imported before torch by scripts that run an engine on a CPU, as engine processes begin."""

from inflight_kernels.runtime.host_process import limit_spinning

limit_spinning()
