"""The architectures that kernels are compiled for, and the GPUs that run their code.

Without imports: a machine that lacks CUDA's packages can ask as well.
"""

from __future__ import annotations

ARCHITECTURES = {8: "sm_80", 9: "sm_90a", 10: "sm_100", 11: "sm_110", 12: "sm_120"}
"""Major version of the compute capability -> architecture, as NVRTC calls it.

Code for x.0 runs on every x.y, so one architecture per major version is enough: sm_80 is for Ampere
and Ada, sm_100 and sm_120 for Blackwell, sm_110 for Thor. It is not enough to have the oldest one,
since no GPU runs machine code of another major version. The `a` of sm_90a ties code to 9.0, and is
needed for wgmma and setmaxnreg; no kernel uses what other architectures have of that kind.
"""

SUPPORTED = f"{min(ARCHITECTURES)}.x to {max(ARCHITECTURES)}.x"
"""Compute capabilities of supported GPUs, for messages."""

Capability = tuple[int, int]
"""Compute capability of a GPU: major and minor version."""


def architecture(capability: Capability) -> str | None:
    """The architecture whose code such a GPU runs; None if it is not supported."""
    major, _ = capability
    return ARCHITECTURES.get(major)


def launches_dependents(capability: Capability) -> bool:
    """Whether such a GPU supports programmatic dependent launch."""
    return capability >= (9, 0)


def has_wgmma(capability: Capability) -> bool:
    """Whether such a GPU runs the kernels for Hopper alone. No later one has wgmma."""
    return capability == (9, 0)
