"""Each GPU gets machine code that it runs, and is given no instructions that it lacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda.bindings import nvrtc

from inflight_kernels.ops.linear import gemm, skinny_gemm
from inflight_kernels.runtime import launch
from inflight_kernels.runtime.architectures import ARCHITECTURES, Capability, architecture

# Capability, architecture, programmatic dependent launch, Hopper's kernels.
GPUS = [
    ((8, 0), "sm_80", False, False),
    ((8, 6), "sm_80", False, False),
    ((8, 9), "sm_80", False, False),
    ((9, 0), "sm_90a", True, True),
    ((10, 0), "sm_100", True, False),
    ((10, 3), "sm_100", True, False),
    ((11, 0), "sm_110", True, False),
    ((12, 0), "sm_120", True, False),
    ((12, 1), "sm_120", True, False),
]


@pytest.fixture
def capability(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Capability]:
    """That of an absent GPU."""
    cached = (launch._capability, launch._architecture, launch.is_hopper)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: request.param)
    for function in cached:
        function.cache_clear()
    yield request.param
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize(("capability", "arch", "pdl", "hopper"), GPUS, indirect=["capability"])
def test_the_capability_decides(
    capability: Capability, arch: str, pdl: bool, hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch._architecture() == architecture(capability) == arch
    assert launch.supports_pdl() == pdl
    assert launch.is_hopper() == hopper
    monkeypatch.setattr(gemm, "num_multiprocessors", lambda: 132)
    assert skinny_gemm.prefers(1, 4096, 4096) == hopper
    assert gemm.prefers(4096, 28672, 4096, True, False) == hopper


@pytest.mark.parametrize("capability", [(7, 5), (13, 0), (20, 1)], indirect=True)
def test_an_older_or_unknown_gpu_is_refused(capability: Capability) -> None:
    assert architecture(capability) is None
    version = ".".join(map(str, capability))
    with pytest.raises(
        RuntimeError, match=rf"capability {version}; .* support 8\.x to 12\.x\. Use"
    ):
        launch._architecture()


def test_the_compiler_knows_all_architectures() -> None:
    _, known = nvrtc.nvrtcGetSupportedArchs()
    assert {int(arch.strip("sm_a")) for arch in ARCHITECTURES.values()} <= set(known)


def test_an_architecture_is_the_first_of_its_major_version() -> None:
    """Its code runs on all later ones of that version."""
    for major, arch in ARCHITECTURES.items():
        assert arch.rstrip("a") == f"sm_{major}0"
