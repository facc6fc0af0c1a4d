"""Weights are read as written, from either format, and a wrong set is rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from transformers import GptOssConfig

import family
import tiny
import tiny_gguf
from inflight.checkpoint.locate import Checkpoint
from inflight.checkpoint.safetensors import read_folder
from inflight.errors import ConfigError
from inflight.models.layers.rope import inverse_frequencies
from inflight.models.loader import weight_shapes
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.floats import E2M1
from inflight.models.quantization.matrix import Matrix
from inflight.models.registry import read_spec
from inflight.models.spec import RopeSpec
from inflight.models.stored.weights import StoredWeights, Weights, open_weights


def open_all(checkpoint: Checkpoint) -> Weights:
    config = read_spec(checkpoint)
    return open_weights(checkpoint, config, weight_shapes(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_of_each_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    expected = tiny.random_weights(tiny.SETTINGS)
    weights = open_all(tiny.write_llama(tmp_path, expected, shards=2, dtype=dtype))
    for name, tensor in expected.items():
        got = weights.read(name)
        assert got.dtype == dtype
        assert torch.equal(got, tensor.to(dtype))


def test_data_at_an_odd_place_is_read(tmp_path: Path) -> None:
    """The format promises no alignment."""
    expected = tiny.random_weights(tiny.SETTINGS)
    checkpoint = tiny.write_llama(tmp_path, expected)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    path.write_bytes(
        (size + 1).to_bytes(8, "little") + content[8 : 8 + size] + b" " + content[8 + size :]
    )
    weights = open_all(checkpoint)
    assert all(torch.equal(weights.read(name), tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
)
def test_gguf_of_each_type_is_read(tmp_path: Path, kind: Kind) -> None:
    original = tiny.random_weights(tiny.SETTINGS | {"attention_bias": True, "mlp_bias": True})
    weights = open_all(tiny_gguf.write_gguf(tmp_path / "x.gguf", kind, original))
    heads = {"q_proj": tiny.SETTINGS["num_attention_heads"]}
    heads["k_proj"] = tiny.SETTINGS["num_key_value_heads"]
    for name, tensor in tiny_gguf.rounded(original, kind).items():
        expected = tensor.numpy()
        if name.split(".")[-2] in heads:  # the loader puts them in order
            expected = tiny_gguf.pairs_from_halves(expected, heads[name.split(".")[-2]])
        assert np.array_equal(weights.read(name).numpy(), expected), name


@pytest.mark.parametrize(
    "kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL]
)
def test_gguf_types_that_only_llama_cpp_writes_are_read(tmp_path: Path, kind: Kind) -> None:
    """Random bytes: each is some number in these types."""
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    original = tiny.random_weights(tiny.SETTINGS | changes)
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", weights=original, **changes).path
    config = read_spec(Checkpoint(path, "gguf"))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (256, 256 // block * size), dtype=np.uint8)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "llama")
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = open_weights(Checkpoint(tmp_path / "y.gguf", "gguf"), config, weight_shapes(config))
    got = weights.read("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(got.numpy(), gguf.dequantize(data, kind))
    assert got.unique().numel() > 10


def test_an_unsupported_gguf_type_is_rejected_by_name(tmp_path: Path) -> None:
    values = np.zeros((96, 64), np.float64)
    original = tiny.random_weights(tiny.SETTINGS)
    name = "model.layers.1.mlp.up_proj.weight"
    del original[name]
    checkpoint = tiny_gguf.write_gguf(
        tmp_path / "x.gguf", weights=original, extra={"blk.1.ffn_up.weight": values}
    )
    with pytest.raises(ConfigError, match="the type F64"):
        open_all(checkpoint).read(name)


def test_the_demo_formats_give_one_text(tmp_path: Path) -> None:
    """The same weights as GGUF and as safetensors: the same tokens, biases and all."""
    biased = {"attention_bias": True, "mlp_bias": True}
    original = tiny.random_weights(tiny.SETTINGS | biased)
    kept = tiny_gguf.rounded(original, Kind.Q8_0)
    folder = tiny.write_llama(tmp_path / "hf", kept, **biased)
    file = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q8_0, original)
    texts = [
        tiny.generate(
            tiny.make_runner(checkpoint), [tiny.make_sequence([5, 9, 77], list(range(12)))], 30
        )
        for checkpoint in (folder, file)
    ]
    assert texts[0] == texts[1]


def test_llama3_scaling_in_a_gguf_file_is_that_of_the_settings(tmp_path: Path) -> None:
    llama3 = RopeSpec(10000.0, "llama3", 8.0, 64)
    plain, _ = inverse_frequencies(RopeSpec(10000.0), 16, 256)
    scaled, _ = inverse_frequencies(llama3, 16, 256)
    checkpoint = tiny_gguf.write_gguf(
        tmp_path / "x.gguf", extra={"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    )
    rope = read_spec(checkpoint).layers[0].attention.rope
    np.testing.assert_allclose(inverse_frequencies(rope, 16, 256)[0], scaled, rtol=1e-6)
    open_all(checkpoint)  # and is not an unexpected tensor


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            RopeSpec(1e4, "linear", 2.0),
        ),
        ({"rope.scale_linear": 4.0}, RopeSpec(1e4, "linear", 4.0)),
        ({"rope.scaling.type": "none"}, RopeSpec(1e4)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            RopeSpec(1e4, "yarn", 4.0, 64, attention_factor=1.1386294361119891),
        ),
    ],
)
def test_scaling_in_a_gguf_file_is_read(
    tmp_path: Path, metadata: dict[str, Any], rope: RopeSpec
) -> None:
    spec = read_spec(tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata=metadata))
    assert spec.layers[0].attention.rope == rope


def test_a_gguf_file_is_read_in_full(tmp_path: Path) -> None:
    config = read_spec(tiny_gguf.write_gguf(tmp_path / "x.gguf"))
    assert (config.vocab_size, config.num_layers) == (160, 2)
    assert config.layers[0].attention.head_dim == 16
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 3), 1)
    assert not config.tie_word_embeddings
    assert not config.layers[0].attention.qkv_bias


def test_experts_in_a_family_of_dense_models_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_gguf.write_gguf(
        tmp_path / "x.gguf", architecture="qwen2", metadata={"expert_count": 8}
    )
    with pytest.raises(ConfigError, match=r"expert_count: 8: mixtures of .* qwen2; allowed: 0"):
        read_spec(checkpoint)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 8}, "expert_used_count"),
        ({"rope.dimension_count": 7}, "RoPE rotates 7 of 16 columns"),
        ({"attention.value_length": 32}, "attention.value_length"),
        ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv: varies by layer"),
        ({"rope.scaling.type": "longrope"}, "'longrope'"),
        ({"block_count": None}, "block_count"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_spec(tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata=metadata))


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"rope_freqs.weight": np.ones(5, np.float32)}, "5 scaling factors for 8"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "not positive"),
        ({"rope_freqs.weight": np.ones(8, np.float16)}, "F16; allowed: F32"),
        (
            {"rope_factors_long.weight": np.ones(8, np.float32)},
            "rope_factors_short.weight is missing",
        ),
    ],
)
def test_bad_rotary_factors_are_refused(
    tmp_path: Path, extra: dict[str, np.ndarray], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_spec(tiny_gguf.write_gguf(tmp_path / "x.gguf", extra=extra))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.SETTINGS)
    for layer in (0, 1):
        for name in ("q", "k"):
            del weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
    with pytest.raises(ConfigError) as caught:
        open_all(tiny.write_llama(tmp_path, weights))
    assert "llama: missing tensors: model.layers.0.self_attn.q_proj.weight" in str(caught.value)
    assert "and 1 more" in str(caught.value)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.SETTINGS)
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    with pytest.raises(
        ConfigError, match=r"unexpected tensors .*: model\.layers\.0\.self_attn\.q_norm"
    ):
        open_all(tiny.write_llama(tmp_path, weights))


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.SETTINGS)
    weights["model.norm.weight"] = torch.ones(63)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight \[63\], expected \[64\]"):
        open_all(tiny.write_llama(tmp_path, weights))


def test_more_layers_than_settings_say_are_refused(tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.SETTINGS)
    with pytest.raises(ConfigError, match=r"unexpected tensors .*: model\.layers\.1\."):
        open_all(tiny.write_llama(tmp_path, weights, num_hidden_layers=1))


def test_derived_tensors_may_be_in_the_file(tmp_path: Path) -> None:
    """Rotary frequencies of old checkpoints; an output layer that is tied all the same."""
    weights = tiny.random_weights(tiny.SETTINGS)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    checkpoint = tiny.write_llama(tmp_path, weights, tie_word_embeddings=True)
    assert "lm_head.weight" in open_all(checkpoint).shapes


def test_weights_stay_when_their_file_goes(tmp_path: Path) -> None:
    """A file that is overwritten under a running engine must not change what it answers."""
    checkpoint = tiny.write_llama(tmp_path)
    runner = tiny.make_runner(checkpoint)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        file.seek(8 + size)
        file.write(b"\0" * max(e["data_offsets"][1] for n, e in header.items() if n[0] != "_"))
    (text,) = tiny.generate(runner, [tiny.make_sequence([5, 9, 77], list(range(12)))], 10)
    fresh = tiny.make_runner(tiny.write_llama(tmp_path / "again"))
    assert text == tiny.generate(fresh, [tiny.make_sequence([5, 9, 77], list(range(12)))], 10)[0]


# ---------------------------------------------------------------- drawn weights

OF_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}


def drawn_gpt_oss(folder: Path, quantization: dict[str, str] | None) -> Checkpoint:
    """Its config, with random weights."""
    settings = GptOssConfig(**family.SHAPE | OF_GPT_OSS, sliding_window=family.WINDOW).to_dict()
    settings["architectures"] = ["GptOssForCausalLM"]
    if quantization is not None:
        settings["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings))
    return Checkpoint(folder, "huggingface", random_weights=True)


def is_of_expert(name: str) -> bool:
    return ".mlp.experts." in name and name.endswith(".weight")


def test_experts_of_folders_in_mxfp4_are_drawn_in_codes(tmp_path: Path) -> None:
    checkpoint = drawn_gpt_oss(tmp_path, {"quant_method": "mxfp4"})
    weights, again = open_all(checkpoint), open_all(checkpoint)
    assert any(is_of_expert(name) for name in weights.shapes)
    for name, shape in weights.shapes.items():
        found = weights.read_matrix(name)
        assert found.shape == shape
        if not is_of_expert(name):
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, weights.read(name)), name
            continue
        assert isinstance(found, GroupedMatrix)
        assert (found.bits, found.group, found.zero) == (4, 32, 0)
        assert found.minimums is None and found.columns is None
        assert found.levels is not None and torch.equal(found.levels, E2M1)
        assert set(found.codes.flatten().tolist()) == set(range(16))
        values = found.dequantized()
        assert abs(float(values.std()) - 0.023) < 0.002 and abs(float(values.mean())) < 0.002
        same = again.read_matrix(name)
        assert isinstance(same, GroupedMatrix) and torch.equal(same.codes, found.codes)
    experts = [one.codes for one in map(weights.read_matrix, weights.shapes) if is_grouped(one)]
    assert not any(torch.equal(experts[0], other) for other in experts[1:])


def is_grouped(one: Matrix) -> TypeGuard[GroupedMatrix]:
    return isinstance(one, GroupedMatrix)


def test_without_memory_drawn_experts_are_of_the_same_kinds(tmp_path: Path) -> None:
    checkpoint = drawn_gpt_oss(tmp_path, {"quant_method": "mxfp4"})
    spec, weights = read_spec(checkpoint), open_all(checkpoint)
    without_memory = open_weights(checkpoint, spec, weight_shapes(spec), "meta")
    for name in weights.shapes:
        found, shaped = weights.read_matrix(name), without_memory.read_matrix(name)
        assert shaped.shape == found.shape
        assert isinstance(shaped, GroupedMatrix) == isinstance(found, GroupedMatrix), name
        if isinstance(found, GroupedMatrix):
            assert isinstance(shaped, GroupedMatrix) and shaped.codes.is_meta
            assert shaped.kind == found.kind and shaped.scales.shape == found.scales.shape
        else:
            assert isinstance(shaped, torch.Tensor) and shaped.is_meta


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8"}], ids=["none", "fp8"])
def test_experts_of_other_folders_are_drawn_in_16_bits(
    tmp_path: Path, quantization: dict[str, str] | None
) -> None:
    weights = open_all(drawn_gpt_oss(tmp_path, quantization))
    for name in filter(is_of_expert, weights.shapes):
        found = weights.read_matrix(name)
        assert isinstance(found, torch.Tensor) and found.dtype == torch.bfloat16


# ---------------------------------------------------------------- stacks


def test_stacked_matrices_are_tensors_of_their_own(tmp_path: Path) -> None:
    stack = torch.randn(3, 4, 5)
    save_file(
        {"a.experts.weight": stack, "b.weight": torch.zeros(4, 5)}, tmp_path / "model.safetensors"
    )
    stored = StoredWeights(read_folder(tmp_path))
    assert stored.shapes == {f"a.experts.{i}.weight": (4, 5) for i in range(3)} | {
        "b.weight": (4, 5)
    }
    for index in range(3):
        assert torch.equal(stored.read(f"a.experts.{index}.weight"), stack[index])


@pytest.mark.parametrize("shape", [(5000, 1, 1), (0, 4, 5), (3, 0, 5)])
def test_a_stack_that_no_model_has_keeps_its_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """So that it is refused under this name, and costs no memory for each matrix."""
    save_file({"a.experts.weight": torch.zeros(shape)}, tmp_path / "model.safetensors")
    assert StoredWeights(read_folder(tmp_path)).shapes == {"a.experts.weight": shape}
