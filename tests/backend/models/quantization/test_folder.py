"""Folders with weights of 8 bits load; dequantised, they compute what transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, Phi3Config, Qwen3Config

import family
import latents
from inflight.checkpoint.locate import Checkpoint
from inflight.cli.inspection.summary import summarize
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models.loader import weight_shapes
from inflight.models.quantization.folder import dequantize
from inflight.models.quantization.matrix import DTYPES, QuantizedMatrix, quantize
from inflight.models.registry import read_spec
from inflight.models.stored.weights import Weights, open_weights

LINEAR = re.compile(r"model\.layers\.\d+\..*proj\.weight")
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def opened(folder: Path) -> Weights:
    spec = read_spec(Checkpoint(folder, "huggingface"))
    return open_weights(Checkpoint(folder, "huggingface"), spec, weight_shapes(spec))


def qwen3(**changes: Any) -> Any:
    return family.make(Qwen3Config(**family.SHAPE | changes))


# ---------------------------------------------------------------- by the reference package


def write_by_reference(config: Any, folder: Path, kind: str, strategy: str, form: str) -> Any:
    """Write a model whose linear layers, but for the head, are quantised by compressed-tensors.

    Returns:
        The model with the weights that the package dequantises, and products in float32.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model, dequantized = family.make(config), family.make(config)
    more = {"block_structure": [32, 32]} if strategy == "block" else {}
    weights = QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=True, **more)
    activations = QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)
    group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"group_0": group},
            ignore=["lm_head"],
            quant_method="compressed-tensors",
            format=form,
        ),
    )
    most = 448 if kind == "float" else 127
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight = module.weight.data
        if strategy == "tensor":
            largest = weight.abs().amax().view(1)
        elif strategy == "channel":
            largest = weight.abs().amax(1, keepdim=True)
        else:
            n, k = weight.shape
            largest = weight.view(n // 32, 32, k // 32, 32).abs().amax((1, 3))
        module.weight_scale.data = (largest / most).to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    tensors = model.state_dict()
    dequantized.load_state_dict({name: tensors[name] for name in dequantized.state_dict()})
    return dequantized


@pytest.mark.parametrize(
    ("kind", "strategy", "form", "stored"),
    [
        ("float", "tensor", "float-quantized", "F8_E4M3"),
        ("float", "channel", "float-quantized", "F8_E4M3"),
        ("float", "block", "float-quantized", "F8_E4M3"),
        ("int", "tensor", "int-quantized", "I8"),
        ("int", "channel", "int-quantized", "I8"),
    ],
)
@pytest.mark.parametrize(
    "config",
    [Qwen3Config(**family.SHAPE), Phi3Config(**family.SHAPE | {"head_dim": 16}, pad_token_id=0)],
    ids=["qwen3", "phi3 (fused)"],
)
def test_logits_equal_those_of_the_weights_that_the_reference_dequantises(
    tmp_path: Path, config: Any, kind: str, strategy: str, form: str, stored: str
) -> None:
    before = family.make(config).state_dict()
    model = write_by_reference(config, tmp_path, kind, strategy, form)
    changed = [name for name in before if not torch.equal(before[name], model.state_dict()[name])]
    assert len(changed) == len([name for name in before if LINEAR.fullmatch(name)])
    checkpoint = Checkpoint(tmp_path, "huggingface")
    family.check(checkpoint, model, quantization="none" if strategy != "block" else "auto")
    types = summarize(EngineConfig(model=str(tmp_path), device="cpu"), checkpoint)
    assert types.stored_types[stored] == len(changed)
    assert types.quantization is not None and "(compressed-tensors)" in types.quantization


# ---------------------------------------------------------------- other writers


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    matrix = quantize(weight, DTYPES["fp8"])
    return matrix.values, matrix.scales[:, None]


def by_block(weight: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """As DeepSeek: blocks at the end may be smaller."""
    n, k = weight.shape
    rows, columns = -(-n // size), -(-k // size)
    scale, values = torch.empty(rows, columns), torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            scale[i, j] = weight[part].abs().max() / 448
            values[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    return values, scale


def write(
    model: Any, folder: Path, config: dict[str, Any], quantize: Quantize, suffix: str
) -> dict[str, Tensor]:
    """Write a folder whose linear layers are quantised; all its tensors."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if LINEAR.fullmatch(name)]:
        values, scale = quantize(tensors[name])
        tensors |= {name: values, name.removesuffix("weight") + suffix: scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SCALE = "weight_scale"
BLOCKS = FP8 | {"weight_block_size": [128, 128]}


def test_blocks_of_128_may_be_smaller_at_the_end(tmp_path: Path) -> None:
    model = qwen3(hidden_size=192, intermediate_size=320)
    tensors = write(model, tmp_path, BLOCKS, by_block, "weight_scale_inv")
    assert tensors["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 3)
    weights = opened(tmp_path)
    for name, weight in model.state_dict().items():
        found = weights.read(name)
        if LINEAR.fullmatch(name):
            # e4m3 has three bits of mantissa: half a step is a sixteenth.
            assert ((found - weight).abs() <= weight.abs() / 16 + 1e-4).all()
            assert not torch.equal(found, weight)
            weight.copy_(found)
        else:
            assert torch.equal(found, weight)
    family.check(Checkpoint(tmp_path, "huggingface"), model)


@pytest.mark.parametrize(
    ("config", "quantize", "suffix"),
    [(FP8, by_row, SCALE), (BLOCKS, by_block, "weight_scale_inv")],
    ids=["rows", "blocks"],
)
def test_matrices_that_make_keys_and_values_of_latents_are_dequantised(
    tmp_path: Path, config: dict[str, Any], quantize: Quantize, suffix: str
) -> None:
    """As DeepSeek V3's files quantise them."""
    settings = {"pad_token_id": 0, **family.SHAPE, **latents.SHAPE, **latents.EXPERTS}
    model = family.make(DeepseekV3Config(**settings, n_group=1, topk_group=1))
    folder, whole = Checkpoint(tmp_path / "8", "huggingface"), tmp_path / "32"
    write(model, folder.path, config, quantize, suffix)
    weights = opened(folder.path)
    model.save_pretrained(whole)
    tensors = {name: weights.read(name).contiguous() for name in weights.shapes}
    up = "model.layers.1.self_attn.kv_b_proj.weight"
    assert not torch.equal(tensors[up], load_file(whole / "model.safetensors")[up])
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    texts = [family.tokens(), family.tokens(seed=2)]
    expected = family.our_logits(Checkpoint(whole, "huggingface"), texts, family.MIXED)
    found = family.our_logits(folder, texts, family.MIXED, quantization="none")
    torch.testing.assert_close(found, expected)


def test_fbgemm_has_a_scale_for_each_row(tmp_path: Path) -> None:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    model = qwen3()
    tensors = write(model, tmp_path, config, by_row, SCALE)
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (64, 1)
    weights, before = opened(tmp_path), model.state_dict()
    for name in before:
        step = before[name].abs() / 16 + 1e-4
        assert ((weights.read(name) - before[name]).abs() <= step).all()


def test_scales_of_activations_and_of_the_kv_cache_are_not_needed(tmp_path: Path) -> None:
    """As ModelOpt writes them."""
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    model = qwen3()
    tensors = write(model, tmp_path, config, by_tensor, "weight_scale")
    expected = {name: opened(tmp_path).read(name) for name in model.state_dict()}
    for name in list(tensors):
        if LINEAR.fullmatch(name):
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    for layer in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.k_proj.k_scale"] = tensors[f"{prefix}.v_proj.v_scale"] = torch.ones(1)
        tensors[f"{prefix}.k_scale"] = torch.ones(1)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    weights = opened(tmp_path)
    assert all(torch.equal(weights.read(name), expected[name]) for name in expected)


def test_layers_may_keep_16_bits(tmp_path: Path) -> None:
    model = qwen3()
    tensors = write(model, tmp_path, FP8, by_tensor, "weight_scale")
    plain = "model.layers.1.self_attn.q_proj"
    del tensors[f"{plain}.weight_scale"]
    tensors[f"{plain}.weight"] = model.state_dict()[f"{plain}.weight"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    weights = opened(tmp_path)
    assert weights.read(f"{plain}.weight").dtype == torch.bfloat16
    assert weights.read("model.layers.1.self_attn.k_proj.weight").dtype == torch.float32


@pytest.mark.parametrize("quantize", [by_tensor, by_row])
def test_a_matrix_is_handed_on_as_it_is_stored(tmp_path: Path, quantize: Quantize) -> None:
    tensors = write(qwen3(), tmp_path, FP8, quantize, SCALE)
    weights = opened(tmp_path)
    for name, stored in tensors.items():
        if name.endswith(SCALE):
            continue
        found = weights.read_matrix(name)
        if not LINEAR.fullmatch(name):
            assert isinstance(found, Tensor) and torch.equal(found, stored)
            continue
        assert isinstance(found, QuantizedMatrix)
        assert torch.equal(found.values.view(torch.uint8), stored.view(torch.uint8))
        scales = tensors[name.removesuffix("weight") + SCALE]
        assert torch.equal(found.scales, scales.flatten().expand(len(stored)))
        assert torch.equal(found.dequantized(), weights.read(name))


def test_matrices_without_memory_have_the_formats_of_the_folder(tmp_path: Path) -> None:
    write(qwen3(), tmp_path, FP8, by_row, SCALE)
    checkpoint = Checkpoint(tmp_path, "huggingface")
    spec = read_spec(checkpoint)
    weights = open_weights(checkpoint, spec, weight_shapes(spec), "meta")
    stored = opened(tmp_path)
    for name in weights.shapes:
        found, expected = weights.read_matrix(name), stored.read_matrix(name)
        assert type(found) is type(expected) and found.shape == expected.shape
        if isinstance(found, QuantizedMatrix):
            assert found.values.is_meta and found.scales.is_meta
            assert isinstance(expected, QuantizedMatrix)
            assert (found.dtype, found.scales.shape) == (expected.dtype, expected.scales.shape)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (3, 1)])
def test_one_scale_of_all_values_or_of_each_row(shape: tuple[int, ...]) -> None:
    values = torch.tensor([[1, -2], [3, 4], [-128, 127]], dtype=torch.int8)
    scale = torch.arange(1.0, 1 + torch.zeros(shape).numel()).view(shape)
    expected = values.float() * scale.flatten()[:, None]
    assert torch.equal(dequantize(values, scale, None), expected.expand(3, 2))


def test_each_block_has_its_scale() -> None:
    values = torch.ones(5, 7, dtype=torch.int8)
    scale = torch.arange(1.0, 10.0).view(3, 3)
    found = dequantize(values, scale, (2, 3))
    for row in range(5):
        assert found[row].tolist() == [scale[row // 2, column // 3] for column in range(7)]


# ---------------------------------------------------------------- damaged folders

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{DOWN}_scale": None},
            f"'{DOWN}' is quantised (F8_E4M3) and has no scales; expected {DOWN}_scale",
        ),
        (
            {f"{DOWN}_scale": torch.ones(96)},
            f"scales of '{DOWN}' [64, 96] have the shape [96]; expected [64, 1] or [64] or",
        ),
        (
            {f"{DOWN}_scale": torch.ones(1, 2)},
            f"scales of '{DOWN}' [64, 96] have the shape [1, 2]",
        ),
        ({f"{DOWN}_scale": torch.tensor(torch.inf)}, f"scales of '{DOWN}' are not finite"),
        (
            {DOWN: torch.ones(64, 96, dtype=torch.int8)},
            f"'{DOWN}' has the type I8; config.json names the format FP8, in which weights have "
            "F8_E4M3",
        ),
        (
            {"model.norm.weight_zero_point": torch.ones(1)},
            "unexpected tensors for this architecture: model.norm.weight_zero_point",
        ),
        ({DOWN: torch.ones(64, 90).to(torch.float8_e4m3fn)}, f"{DOWN} [64, 90], expected [64, 96]"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors = write(qwen3(), tmp_path, FP8, by_tensor, "weight_scale") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(message)):
        opened(tmp_path).read(DOWN)


def test_scales_of_blocks_must_be_those_of_the_blocks(tmp_path: Path) -> None:
    write(qwen3(), tmp_path, BLOCKS, by_tensor, "weight_scale_inv")
    with pytest.raises(ConfigError, match=r"have the shape \[\]; expected \[1, 1\]"):
        opened(tmp_path)


def test_8_bits_without_a_format_in_config_json_are_refused(tmp_path: Path) -> None:
    write(qwen3(), tmp_path, {}, by_tensor, "weight_scale")
    with pytest.raises(ConfigError, match="has the type F8_E4M3; allowed: F32, F16, BF16"):
        opened(tmp_path)
