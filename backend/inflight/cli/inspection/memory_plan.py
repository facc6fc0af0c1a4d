"""How an engine would use the memory of this machine, by the same rules as at its start."""

from __future__ import annotations

import msgspec

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.deploy.checks.device import check_device
from inflight.errors import ConfigError
from inflight.execution import factory
from inflight.execution.drafters.drafter_spec import kv_layout
from inflight.execution.drafters.registry import find_drafter
from inflight.kv.budget import GPU_OVERHEAD_BYTES, gpu_pool_bytes, num_kv_blocks
from inflight.kv.layout import KVTables
from inflight.models.loader import linear_shapes
from inflight.models.quantization.choice import (
    kept_in_layers,
    kept_outside_layers,
    num_quantized,
)
from inflight.models.spec import ModelSpec
from inflight.supervision.host_memory import HostMemory

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one engine.

    Attributes:
        device: what the model would run on; if a CPU, why not a GPU.
        on_gpu: whether it is a GPU.
        dtype: of weights and activations.
        kv_dtype: of keys and values.
        weight_bytes: of the weights, without those of a drafter.
        overhead_bytes: of a GPU's context, kernels and graphs.
        block_size: tokens per kernel block.
        num_blocks: KV blocks in the pool.
        kv_bytes: of the pool, with the KV of a drafter.
        num_tokens: of the longest sequence that the pool holds.
        frees_windows: whether blocks outside sliding windows are freed.
        max_model_len: prompt and output of a request together, in tokens.
        num_full_sequences: sequences of max_model_len tokens that the pool holds at once; blocks
            that no sliding window reaches are freed.
        max_num_seqs: sequences in one step, at most.
        machine_bytes: of the GPU's memory, or of the host memory that is available now; None if
            the system does not report it.
    """

    device: str
    on_gpu: bool
    dtype: str
    kv_dtype: str
    weight_bytes: int
    overhead_bytes: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    num_tokens: int
    frees_windows: bool
    max_model_len: int
    num_full_sequences: int
    max_num_seqs: int
    machine_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.overhead_bytes


def plan_memory(
    config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec, num_parameters: int
) -> MemoryPlan:
    """The plan for an engine with these settings.

    Args:
        config: the engine's settings; `auto` is resolved for this machine.
        checkpoint: the model's files.
        spec: of the model.
        num_parameters: of the model.

    Raises:
        ConfigError: the engine cannot run on its device, or not even one KV block fits.
    """
    check_device(config)
    max_model_len = spec.max_model_len(config)
    config, where = factory.resolve_device(config, checkpoint)
    source = find_drafter(config, checkpoint, spec)
    layout = kv_layout(spec, source, config.kv_dtype)
    tables = KVTables(layout.tables, config.block_size)
    block_bytes = layout.block_bytes(config.block_size)
    if source is not None:
        block_bytes += source.block_bytes(config, config.kv_dtype)
    gpu = factory.gpu_of(config)
    if gpu is not None:
        weight_bytes = factory.gpu_weight_bytes(config, checkpoint, spec)  # as before a start
        sizes = (gpu.total_bytes, weight_bytes, block_bytes, tables.num_blocks(max_model_len))
        num_blocks = num_kv_blocks(config, block_bytes, gpu_pool_bytes(config, *sizes))
        machine_bytes: int | None = gpu.total_bytes
    elif config.device == "cuda":
        raise ConfigError("device: is cuda, but torch finds no GPU; allowed here: auto, cpu")
    else:
        weight_bytes = 0
        if config.device != "echo":
            weight_bytes = host_weight_bytes(config, checkpoint, spec, num_parameters)
        num_blocks = num_kv_blocks(config, block_bytes)
        machine_bytes = _available_bytes()
    return MemoryPlan(
        device=where,
        on_gpu=gpu is not None,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        weight_bytes=weight_bytes,
        overhead_bytes=GPU_OVERHEAD_BYTES if gpu is not None else 0,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        num_tokens=tables.max_tokens(num_blocks),
        frees_windows=tables.frees_windows,
        max_model_len=max_model_len,
        num_full_sequences=tables.max_sequences(num_blocks, max_model_len),
        max_num_seqs=config.max_num_seqs,
        machine_bytes=machine_bytes,
    )


def host_weight_bytes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    num_parameters: int,
    keeps_groups: bool = True,
) -> int:
    """Of a model on a CPU, where values of 8 bits with scales of rows are kept in float32.

    Args:
        config: the engine's settings, their dtype resolved for a CPU.
        checkpoint: the model's files.
        spec: of the model.
        num_parameters: of the model.
        keeps_groups: see `choice.linear_format`.

    Raises:
        ConfigError: see `choice.num_quantized`.
    """
    item_bytes, quantization = _ITEM_BYTES[config.dtype], config.quantization
    in_8_bits = num_quantized(checkpoint, spec, quantization)
    num_bytes = item_bytes * num_parameters + (_ITEM_BYTES["float32"] - item_bytes) * in_8_bits
    shapes = linear_shapes(spec)
    for kept in (
        kept_in_layers(checkpoint, spec, shapes, quantization, keeps_groups=keeps_groups),
        kept_outside_layers(checkpoint, spec, quantization, keeps_groups=keeps_groups),
    ):
        num_bytes += kept.num_bytes - item_bytes * kept.num_values
    return num_bytes


def shortage(plans: list[MemoryPlan]) -> str:
    """Why engines with these plans do not fit into this machine together; empty if they do."""
    for on_gpu in (False, True):
        chosen = [plan for plan in plans if plan.on_gpu is on_gpu]
        known = [plan.machine_bytes for plan in chosen if plan.machine_bytes is not None]
        needed = sum(plan.total_bytes for plan in chosen)
        if known and needed > min(known):
            place = "the GPU has" if on_gpu else "the host has available"
            setting = "gpu_memory_utilization" if on_gpu else "kv_cache_memory_bytes"
            return (
                f"memory: {size(needed)} are needed, and {place} {size(min(known))}; lower "
                f"{setting}, or choose a smaller model or another machine"
            )
    return ""


def size(num_bytes: int) -> str:
    """A number of bytes, such as `1.5 GiB`."""
    if num_bytes < 1 << 20:
        return f"{num_bytes / (1 << 10):.1f} KiB"
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"


def _available_bytes() -> int | None:
    memory = HostMemory(0)
    memory.poll()
    return memory.available_bytes
