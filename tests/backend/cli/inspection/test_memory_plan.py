"""The plan is what an engine does at its start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import tiny
from inflight.checkpoint.locate import locate
from inflight.cli.inspection.memory_plan import MemoryPlan, plan_memory, shortage, size
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.execution import factory
from inflight.models.registry import read_spec

NUM_PARAMETERS = 1000
GIB = 1 << 30
GPT_OSS_120B = Path(__file__).parents[4] / "benchmarks/models/gpt-oss-120b-mxfp4"


class FakeGpu:
    uuid = "GPU-0"
    name = "a GPU"
    total_bytes = 8 * GIB

    def free_bytes(self) -> int:
        return self.total_bytes


def config(path: Path, **settings: object) -> EngineConfig:
    return msgspec.convert({"model": str(path), "device": "cpu"} | settings, EngineConfig)


def plan(path: Path, **settings: object) -> MemoryPlan:
    checkpoint = tiny.write_llama(path)
    return plan_memory(config(path, **settings), checkpoint, read_spec(checkpoint), NUM_PARAMETERS)


def test_a_plan_for_a_cpu_has_the_pool_of_its_engine(tmp_path: Path) -> None:
    found = plan(tmp_path, kv_cache_memory_bytes=1 << 20, block_size=4)
    runner = tiny.make_runner(
        tiny.write_llama(tmp_path), kv_cache_memory_bytes=1 << 20, num_blocks=None
    )
    assert found.num_blocks == runner.num_blocks
    assert found.num_tokens == 4 * runner.num_blocks
    assert found.weight_bytes == 4 * NUM_PARAMETERS  # float32
    assert found.max_model_len == 256
    assert found.num_full_sequences == runner.num_blocks // 64


def test_quantised_values_take_4_bytes_on_a_cpu(tmp_path: Path) -> None:
    settings = {"num_blocks": 64, "dtype": "bfloat16"}
    assert plan(tmp_path, **settings).weight_bytes == 2 * NUM_PARAMETERS
    spec = read_spec(tiny.write_llama(tmp_path))
    quantised = spec.num_layers * spec.matrix_elements_per_layer
    found = plan(tmp_path, **settings, quantization="int8").weight_bytes
    assert found == 2 * NUM_PARAMETERS + 2 * quantised


def test_a_drafters_kv_counts(tmp_path: Path) -> None:
    tiny.write_llama(tmp_path / "draft", num_hidden_layers=1)
    drafter = {"method": "draft_model", "model": str(tmp_path / "draft")}
    settings = {"kv_cache_memory_bytes": 1 << 20, "block_size": 4}
    alone = plan(tmp_path / "x", **settings)
    assert plan(tmp_path / "x", **settings, speculative_config=drafter).num_blocks == (
        alone.num_blocks * 2 // 3
    )


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_a_plan_for_a_gpu_is_the_budget_that_an_engine_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    def resolved(found: EngineConfig, checkpoint: object) -> factory.ResolvedDevice:
        return factory.ResolvedDevice(msgspec.structs.replace(found, device="cuda"), "GPU")

    monkeypatch.setattr(factory, "resolve_device", resolved)
    monkeypatch.setattr(factory, "gpu_of", lambda found: FakeGpu())
    found = plan(tmp_path, device="auto", quantization=quantization)
    on_gpu = config(tmp_path, device="cuda", quantization=quantization)
    checkpoint = tiny.write_llama(tmp_path)
    spec = read_spec(checkpoint)
    in_8_bits = {"none": 0, "fp8": spec.num_layers * spec.matrix_elements_per_layer}[quantization]
    assert found.weight_bytes == 2 * (spec.matrix_elements - in_8_bits) + in_8_bits
    assert found.on_gpu and found.dtype == "bfloat16"
    assert found.total_bytes == factory.expected_budget_bytes(on_gpu, checkpoint, 8 * GIB)
    assert found.num_full_sequences == found.max_num_seqs == 256


@pytest.mark.parametrize(("quantization", "in_8_bits"), [("none", 0), ("int8", 1), ("fp8", 1)])
def test_gpus_that_dequantise_need_memory_for_one_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, in_8_bits: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    checkpoint = tiny.write_llama(tmp_path)
    spec = read_spec(checkpoint)
    mlp, attention = spec.layers[0].mlp, spec.layers[0].attention
    rows = max(2 * mlp.width, attention.q_width + 2 * attention.kv_width)
    saved = spec.num_layers * spec.matrix_elements_per_layer - 2 * rows * spec.hidden_size
    on_gpu = config(tmp_path, device="cuda", quantization=quantization)
    found = factory.gpu_weight_bytes(on_gpu, checkpoint, spec)
    assert found == 2 * spec.matrix_elements - in_8_bits * saved


def test_codes_of_4_bits_and_memory_for_one_matrix_count_on_gpus(tmp_path: Path) -> None:
    """With scales and minimums of 16 bits for each 32 columns, and rows padded to 128."""
    checkpoint = tiny.write_llama(tmp_path)
    spec = read_spec(checkpoint)
    linear = spec.num_layers * spec.matrix_elements_per_layer
    down = spec.num_layers * 64 * 96
    on_gpu = config(tmp_path, device="cuda", quantization="int4")
    codes = 5 * (2 * (linear - down) + down * 4 // 3) // 8
    largest = 2 * 64 * 96  # gate and up
    assert factory.gpu_weight_bytes(on_gpu, checkpoint, spec) == (
        2 * (spec.matrix_elements - linear) + codes + 2 * largest
    )
    dequantised = config(tmp_path, device="cuda", quantization="none")
    assert factory.gpu_weight_bytes(dequantised, checkpoint, spec) == 2 * spec.matrix_elements


def test_gpt_oss_120b_fits_on_a_gpu_of_80_gb_in_codes() -> None:
    """Its experts have 4 bits a value, a scale of 16 bits for each group of 32, and rows of 2880
    columns that are padded to 2944."""
    checkpoint = locate(str(GPT_OSS_120B))
    spec = read_spec(checkpoint)
    settings = {"device": "cuda", "random_weights": True}
    in_codes = config(GPT_OSS_120B, **settings)
    experts = 36 * 128 * 3 * 2880 * 2880
    expected = 2 * (spec.matrix_elements - experts) + experts * 9 // 16 * 46 // 45
    expected += 2 * 2 * 2880 * 2880  # gate and up of an expert, the largest matrix
    found = factory.gpu_weight_bytes(in_codes, checkpoint, spec)
    assert found == expected < 72e9
    dequantised = config(GPT_OSS_120B, **settings, quantization="none")
    assert factory.gpu_weight_bytes(dequantised, checkpoint, spec) == 2 * spec.matrix_elements


def test_settings_that_the_model_does_not_allow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 257"):
        plan(tmp_path, max_model_len=257)
    with pytest.raises(ConfigError, match="one block of this model takes"):
        plan(tmp_path, kv_cache_memory_bytes=1)


def test_engines_must_fit_into_the_machine_together(tmp_path: Path) -> None:
    found = plan(tmp_path, num_blocks=16)
    one = msgspec.structs.replace(found, weight_bytes=3 * GIB, kv_bytes=GIB, machine_bytes=7 * GIB)
    assert shortage([one]) == ""
    assert "8.00 GiB are needed, and the host has available 7.00 GiB" in shortage([one, one])
    gpu = msgspec.structs.replace(one, on_gpu=True)
    assert shortage([one, gpu]) == ""
    assert "the GPU has 7.00 GiB; lower gpu_memory_utilization" in shortage([gpu, gpu])
    assert shortage([msgspec.structs.replace(one, machine_bytes=None)] * 9) == ""


def test_sizes_are_short() -> None:
    assert [size(one) for one in (1536, 5 << 20, 3 << 29)] == ["1.5 KiB", "5 MiB", "1.50 GiB"]
