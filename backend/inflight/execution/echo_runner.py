"""A runner that computes nothing, to test everything around an engine."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.core.batch import Batch, CompletedStep, StepOutput
from inflight.core.sequence import Sequence
from inflight.execution.drafters.drafter_spec import kv_layout
from inflight.execution.runner import HostMemory
from inflight.kv.budget import num_kv_blocks
from inflight.kv.layout import KVTables
from inflight.models.spec import ModelSpec
from inflight.scheduling.draft_budget import StepCosts


class EchoRunner:
    """Echoes each prompt, then an end-of-sequence token; computes nothing.

    Where no such token can be used (unknown, ignore_eos, before min_tokens) the prompt repeats.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        layout = kv_layout(spec, None, config.dtype)
        self.num_blocks = num_kv_blocks(config, layout.block_bytes(config.block_size))
        self.block_size = config.block_size
        self.kv_tables = KVTables(layout.tables, config.block_size)
        self.host_memory: HostMemory | None = None
        self.vocab_size = spec.vocab_size
        self.max_rows = config.max_num_batched_tokens
        self.steps_ahead = 0
        self.step_costs: StepCosts | None = None
        self.supports_host_drafts = False
        self.gpu_budget_bytes = 0

    def launch(self, batch: Batch) -> CompletedStep:
        token_ids = [[_echo(chunk.sequence)] if chunk.samples else [] for chunk in batch.chunks]
        return CompletedStep(StepOutput(token_ids, [[0.0] * len(ids) for ids in token_ids]))

    def take_stored(self) -> list[int]:
        return []

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
