"""Selects and builds the runner of an engine.

Importing this module does not import torch; runners are imported when they are built.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from inflight.checkpoint import manifest
from inflight.checkpoint.locate import Checkpoint
from inflight.config import GPU_BLOCK_SIZES, EngineConfig
from inflight.errors import ConfigError
from inflight.execution.drafters.drafter_spec import kv_layout
from inflight.execution.drafters.registry import find_drafter, find_method
from inflight.execution.echo_runner import EchoRunner
from inflight.execution.runner import Runner
from inflight.kv.budget import gpu_budget_bytes
from inflight.kv.gpu import CurrentGpu, Gpu
from inflight.kv.layout import KVTables
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.quantization.choice import (
    GpuFormat,
    check_setting,
    gpu_format,
    kept_in_layers,
    num_quantized_on_gpu,
    rounds_weights,
)
from inflight.models.quantization.grouped_memory import record_bits
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight_kernels.runtime import architectures
from inflight_kernels.runtime.host_process import limit_spinning

Progress = Callable[[str, float], None]

logger = logging.getLogger(__name__)


class ResolvedDevice(NamedTuple):
    """Settings with a concrete device, and a description of it: if a CPU, why not a GPU."""

    config: EngineConfig
    where: str


def resolve_device(config: EngineConfig, checkpoint: Checkpoint) -> ResolvedDevice:
    """The settings with `auto` replaced by a device, and the defaults that depend on it.

    Uses a GPU if it can run the model.

    Raises:
        ConfigError: the checkpoint is corrupt or not supported, or the settings cannot be combined
            on that device.
    """
    if config.device != "auto":
        return ResolvedDevice(
            config, {"cpu": "CPU", "cuda": "GPU"}.get(config.device, config.device)
        )
    obstacle = _gpu_obstacle(config, checkpoint)
    placed = msgspec.structs.replace(config, device="cpu" if obstacle else "cuda")
    return ResolvedDevice(placed, f"CPU: {obstacle}" if obstacle else "GPU")


def _gpu_obstacle(config: EngineConfig, checkpoint: Checkpoint) -> str | None:
    """Why a model cannot run on a GPU of this machine; None if it can."""
    limit_spinning()
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    obstacle = _capability_obstacle()
    if obstacle is not None:
        return obstacle
    if not _has_compiler():
        return _NO_COMPILER
    if config.dtype not in ("auto", "bfloat16"):
        return f"dtype is {config.dtype}, and GPUs support bfloat16 only"
    if config.block_size not in GPU_BLOCK_SIZES:
        return f"block_size is {config.block_size}, and GPUs support {GPU_BLOCK_SIZES}"
    spec = read_spec(checkpoint)
    is_hopper = architectures.has_wgmma(torch.cuda.get_device_capability())
    return gpu_obstacle(spec, spec.max_model_len(config), is_hopper)


def _capability_obstacle() -> str | None:
    """Why the kernels do not run on torch's GPU; None if they do, and if there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    if architectures.architecture(capability) is not None:
        return None
    has, supported = ".".join(map(str, capability)), architectures.SUPPORTED
    return f"the GPU has compute capability {has}; the kernels support {supported}"


_NO_COMPILER = "the kernel compiler is missing; run in the repository: pip install -e '.[cuda]'"


def _has_compiler() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("cuda", "cuda.core"))


def gpu_of(config: EngineConfig) -> Gpu | None:
    """The GPU that an engine will run on; None for a CPU, and if torch finds no GPU.

    config: after `resolve_device`.
    """
    if config.device != "cuda":
        return None
    limit_spinning()
    import torch

    return CurrentGpu() if torch.cuda.is_available() else None


def expected_budget_bytes(config: EngineConfig, checkpoint: Checkpoint, total_bytes: int) -> int:
    """The budget of an engine on a GPU, before it is loaded; a drafter's weights are not counted.

    Args:
        config: the engine's settings, after `resolve_device`.
        checkpoint: the model's files.
        total_bytes: of the GPU.

    Raises:
        ConfigError: the checkpoint is corrupt or not supported, or the budget is too small.
    """
    spec = read_spec(checkpoint)
    weight_bytes = gpu_weight_bytes(config, checkpoint, spec)
    layout = kv_layout(spec, find_drafter(config, checkpoint, spec), config.kv_dtype)
    block_bytes = layout.block_bytes(config.block_size)
    max_blocks = KVTables(layout.tables, config.block_size).num_blocks(spec.max_model_len(config))
    return gpu_budget_bytes(config, total_bytes, weight_bytes, block_bytes, max_blocks)


def gpu_weight_bytes(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> int:
    """Of a model's weight matrices on a GPU: bfloat16, or in linear layers 8 bits or codes with
    scales of groups if they keep them. Those whose activations have 16 bits need the largest of
    them in bfloat16 as well.

    Raises:
        ConfigError: the setting `quantization` does not suit the checkpoint.
    """
    checkpoint = dataclasses.replace(checkpoint, random_weights=config.random_weights)
    found = gpu_linear_format(config, checkpoint)
    in_8_bits = num_quantized_on_gpu(checkpoint, spec, config.quantization, found)
    num_bytes = 2 * spec.matrix_elements - in_8_bits
    if found.keeps_groups:
        from inflight.models.loader import linear_shapes  # imports torch

        shapes, quantization = linear_shapes(spec), config.quantization
        kept = kept_in_layers(checkpoint, spec, shapes, quantization, bits_of=record_bits)
        num_bytes += kept.num_bytes - 2 * kept.num_values
    num_dequantized = found.weight_only + found.keeps_groups
    return num_bytes + 2 * num_dequantized * spec.largest_matrix_elements


def gpu_linear_format(config: EngineConfig, checkpoint: Checkpoint) -> GpuFormat:
    """How linear layers run on torch's GPU; on a Hopper GPU if there is none.

    Raises:
        ConfigError: the setting `quantization` does not suit the checkpoint.
    """
    import torch

    hopper = not torch.cuda.is_available() or architectures.has_wgmma(
        torch.cuda.get_device_capability()
    )
    return gpu_format(checkpoint, config.quantization, hopper)


def build(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress
) -> tuple[Runner, ModelSpec]:
    """Load a model onto the device of the settings.

    Args:
        config: the engine's settings, after `resolve_device`.
        checkpoint: the model's files.
        progress: called with what is loading and the loaded fraction, in [0, 1].

    Raises:
        ConfigError: the checkpoint is corrupt or not supported, or the settings exceed the limits
            of the model or of this machine.
    """
    _check_tiers(config)
    spec = read_spec(checkpoint)
    spec.max_model_len(config)  # rejected before anything is loaded
    if config.speculative_config is not None:
        find_method(config.speculative_config)
    if not config.random_weights:
        manifest.check(checkpoint, progress)
    checkpoint = dataclasses.replace(checkpoint, random_weights=config.random_weights)
    check_setting(checkpoint, config.quantization)
    if rounds_weights(checkpoint, config.quantization):
        logger.warning(
            "quantization: %s rounds weights to 4 bits as they are loaded, which changes outputs "
            "(lossy); a checkpoint that was calibrated for 4 bits changes less",
            config.quantization,
        )
    if config.device == "echo":
        progress("weights", 1.0)
        return EchoRunner(config, spec), spec
    limit_spinning()
    if config.device == "cuda":
        if not _has_compiler():
            raise ConfigError(f"device: {_NO_COMPILER}")
        obstacle = _capability_obstacle()
        if obstacle is not None:
            raise ConfigError(f"device: {obstacle}; set it to cpu, or use another GPU")
        from inflight.execution.cuda_runner import CudaRunner

        return CudaRunner(config, checkpoint, spec, progress), spec
    from inflight.execution.cpu_runner import CpuRunner
    from inflight_kernels.runtime.host_process import mapped_allocations

    with mapped_allocations():
        return CpuRunner(config, checkpoint, spec, progress), spec


def _check_tiers(config: EngineConfig) -> None:
    """Raises ConfigError: a tier of the prefix cache lacks the one above it, or a setting."""
    if config.kv_host_memory_bytes is not None and not config.enable_prefix_caching:
        raise ConfigError(
            "kv_host_memory_bytes: host memory is a tier of the prefix cache, which is off; set "
            "enable_prefix_caching, or leave kv_host_memory_bytes out"
        )
    if (config.kv_disk_dir is None) != (config.kv_disk_bytes is None):
        raise ConfigError("kv_disk_dir, kv_disk_bytes: set both of them, or neither")
    if config.kv_disk_dir is not None and config.kv_host_memory_bytes is None:
        raise ConfigError(
            "kv_disk_dir: blocks on disk are read into host memory; set kv_host_memory_bytes as "
            "well"
        )
