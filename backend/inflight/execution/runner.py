"""How a batch runs on a device: the seam between the scheduler's counts and a model's numbers.

Importing this module does not import torch; the runner that needs it is loaded when it is built.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from inflight.checkpoint.locate import Checkpoint
from inflight.config import GPU_BLOCK_SIZES, GPU_CAPABILITY, GPU_HEAD_DIMS, EngineConfig
from inflight.core.batch import Batch, CompletedStep, StepOutput
from inflight.core.sequence import Sequence
from inflight.errors import ConfigError
from inflight.execution.drafters.registry import find_method
from inflight.models.config import ModelConfig, read_config
from inflight.scheduling.draft_budget import StepCosts

Progress = Callable[[str, float], None]


class PendingStep(Protocol):
    """A batch that was launched."""

    def result(self) -> StepOutput:
        """Wait for the step and return what it chose; called once, oldest step first.

        What fails for one sequence alone is in the output's `errors`; an exception means that the
        runner itself is broken.
        """


class Runner(Protocol):
    """Turns batches into tokens.

    Attributes:
        num_blocks: KV blocks in its pool.
        block_size: tokens per block.
        vocab_size: token ids are below it.
        max_rows: rows of logits in a step. Each sequence takes one and each draft another one;
            prompts whose log-probabilities are wanted share what is left.
        steps_ahead: steps that may be launched before the result of the one before them is taken.
            With 0 the host knows all tokens of a batch that it launches.
        step_costs: what steps take, if it has a drafter; None if it has none, and then no chunk may
            have drafts.
        supports_host_drafts: whether chunks of sequences that need the host may have drafts.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_rows: int
    steps_ahead: int
    step_costs: StepCosts | None
    supports_host_drafts: bool

    def launch(self, batch: Batch) -> PendingStep:
        """Copy the batch's blocks, draft tokens, compute the batch's, choose the next ones.

        Batches are computed in the order of their launches. All that a step needs of its sequences
        (tokens, block tables) is read here: the host goes on to change them.

        Raises:
            Exception: the runner is broken, as in `PendingStep.result`.
        """

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: drop what is kept of it; idempotent."""


class ResolvedDevice(NamedTuple):
    """Settings that name a device, and where that is, in words: and why not on a GPU."""

    config: EngineConfig
    where: str


def resolve_device(config: EngineConfig, checkpoint: Checkpoint) -> ResolvedDevice:
    """The settings with a device in the place of `auto`, and what follows from it.

    A GPU is taken where nothing is in its way.

    Raises:
        ConfigError: the checkpoint is damaged or of an unsupported kind, or the settings do not go
            together on that device.
    """
    if config.device != "auto":
        return ResolvedDevice(
            config, {"cpu": "CPU", "cuda": "GPU"}.get(config.device, config.device)
        )
    obstacle = _gpu_obstacle(config, checkpoint)
    placed = msgspec.structs.replace(config, device="cpu" if obstacle else "cuda")
    return ResolvedDevice(placed, f"CPU: {obstacle}" if obstacle else "GPU")


def _gpu_obstacle(config: EngineConfig, checkpoint: Checkpoint) -> str | None:
    """Why a model does not run on a GPU of this machine; None if it does."""
    _prepare_openmp()
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < GPU_CAPABILITY:
        needed = ".".join(map(str, GPU_CAPABILITY))
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, not {needed}"
    if not _has_compiler():
        return _NO_COMPILER
    if config.dtype not in ("auto", "bfloat16"):
        return f"dtype is {config.dtype}, and GPUs support bfloat16 only"
    if config.block_size not in GPU_BLOCK_SIZES:
        return f"block_size is {config.block_size}, and on a GPU one of {GPU_BLOCK_SIZES}"
    head_dim = read_config(checkpoint).head_dim
    if head_dim not in GPU_HEAD_DIMS:
        return f"there is no kernel for head_dim {head_dim}"
    return None


_NO_COMPILER = (
    "the compiler of the kernels is missing; run in the repository: pip install -e '.[cuda]'"
)


def _has_compiler() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("cuda", "cuda.core"))


def _prepare_openmp() -> None:
    # Read by OpenMP when torch is loaded. Its threads spin between two ops by default, and a core
    # that spins is taken from tritonserver: with one busy neighbour on two cores, a step took
    # 440 ms, with a short spin 60 ms.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def build(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress
) -> tuple[Runner, ModelConfig]:
    """Load a model onto the device that the settings name.

    Args:
        config: the engine's settings, after `resolve_device`.
        checkpoint: the model's files.
        progress: called with what is loading and the fraction of it that is there, in [0, 1].

    Raises:
        ConfigError: the checkpoint is damaged or of an unsupported kind, or the settings ask for
            more than it or this machine can do.
    """
    model = read_config(checkpoint)
    model.max_model_len(config)  # refused before anything is loaded
    if config.speculative_config is not None:
        find_method(config.speculative_config)
    checkpoint = dataclasses.replace(checkpoint, random_weights=config.random_weights)
    if config.device == "echo":
        progress("weights", 1.0)
        return EchoRunner(config, model), model
    _prepare_openmp()
    if config.device == "cuda":
        if not _has_compiler():
            raise ConfigError(f"device: {_NO_COMPILER}")
        from inflight.execution.cuda_runner import CudaRunner

        return CudaRunner(config, checkpoint, model, progress), model
    from inflight.execution.cpu_runner import CpuRunner

    return CpuRunner(config, checkpoint, model, progress), model


class EchoRunner:
    """Answers each prompt with itself, then an end-of-sequence token; computes nothing.

    Where that token is not wanted (none is known, ignore_eos, before min_tokens) the prompt starts
    over.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self.num_blocks = model.num_blocks(config)
        self.block_size = config.block_size
        self.vocab_size = model.vocab_size
        self.max_rows = config.max_num_batched_tokens
        self.steps_ahead = 0
        self.step_costs: StepCosts | None = None
        self.supports_host_drafts = False

    def launch(self, batch: Batch) -> CompletedStep:
        token_ids = [[_echo(chunk.sequence)] if chunk.samples else [] for chunk in batch.chunks]
        return CompletedStep(StepOutput(token_ids, [[0.0] * len(ids) for ids in token_ids]))

    def forget(self, sequence: Sequence) -> None:
        pass


def _echo(sequence: Sequence) -> int:
    index = sequence.num_output_tokens
    prompt = sequence.request.prompt_ids
    params = sequence.request.params
    if (
        index >= len(prompt)
        and sequence.eos_token_ids
        and not params.ignore_eos
        and index >= params.min_tokens
    ):
        return min(sequence.eos_token_ids)
    return prompt[index % len(prompt)]
