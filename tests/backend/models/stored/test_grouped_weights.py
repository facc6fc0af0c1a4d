"""Folders with weights in groups load whatever else they have, on CPUs and GPUs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3MoeConfig

import family
import family_gpu
import grouped_folders as folders
import latents
from family import relative_rms
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.errors import ConfigError
from inflight.models.loader import linear_names
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.matrix import QuantizedMatrix
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec
from kept_groups import KEPT_TOLERANCE

# Tokens have all experts, so that no choice changes where activations are rounded.
MOE = family.SHAPE | {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
}
LATENT = (
    family.SHAPE
    | latents.SHAPE
    | latents.EXPERTS
    | {"num_hidden_layers": 2, "num_experts_per_tok": latents.EXPERTS["n_routed_experts"]}
)
MODELS = {
    "experts": Qwen3MoeConfig(**MOE),
    "latent attention": DeepseekV3Config(**LATENT, pad_token_id=0, n_group=1, topk_group=1),
}


def in_4_bits(config: Any, folder: Path) -> tuple[Checkpoint, Checkpoint]:
    """A folder of 4 bits, also in the matrices that the model needs in others, and one with the
    same weights in 32."""
    source = family.write_folder(family.make(config), folder / "in")
    spec = read_spec(source)
    names = linear_names(spec)
    for name in folders.opened(source.path).shapes:
        if name.endswith("kv_b_proj.weight") or name == "lm_head.weight":
            names.add(name)
    quantize_folder(source.path, folder / "4", names, "int4")
    weights = folders.opened(folder / "4")
    tensors = {name: weights.read(name).contiguous() for name in weights.shapes}
    assert not torch.equal(
        tensors["lm_head.weight"], load_file(source.path / "model.safetensors")["lm_head.weight"]
    )
    save_file(tensors, source.path / "model.safetensors", {"format": "pt"})
    return Checkpoint(folder / "4", "huggingface"), source


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_logits_equal_those_of_the_dequantised_weights(tmp_path: Path, config: Any) -> None:
    found, plain = in_4_bits(config, tmp_path)
    texts = [family.tokens(), family.tokens(seed=2)]
    expected = family.our_logits(plain, texts, family.MIXED)
    exact = family.our_logits(found, texts, family.MIXED, quantization="none")
    for one, other in zip(exact, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    settings: list[Quantization] = ["auto", "int4"]
    for setting in settings:
        ours = family.our_logits(found, texts, family.MIXED, quantization=setting)
        assert relative_rms(torch.cat(ours), torch.cat(expected)) < KEPT_TOLERANCE


def test_the_decoder_of_gpus_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.qwen3(num_hidden_layers=4)
    source = family.write_folder(model, tmp_path / "in")
    quantize_folder(source.path, tmp_path / "4", linear_names(read_spec(source)), "int4")
    family_gpu.install(monkeypatch)
    ours = family_gpu.decoder(Checkpoint(tmp_path / "4", "huggingface"))
    family_gpu.check(ours, folders.with_weights(model, tmp_path / "4"))


def test_groups_and_scales_of_rows_may_be_mixed(tmp_path: Path) -> None:
    folders.write_mixed(tmp_path)
    q, gate = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    weights = folders.opened(tmp_path)
    assert isinstance(weights.read_matrix(q), QuantizedMatrix)
    assert isinstance(weights.read_matrix(gate), GroupedMatrix)
    shaped = folders.opened(tmp_path, "meta")
    without_memory = shaped.read_matrix(q)
    assert isinstance(without_memory, QuantizedMatrix) and without_memory.values.is_meta
    grouped = shaped.read_matrix(gate)
    assert isinstance(grouped, GroupedMatrix) and grouped.codes.is_meta
    model = folders.with_weights(folders.qwen3(), tmp_path)
    checkpoint = Checkpoint(tmp_path, "huggingface")
    family.check(checkpoint, model, quantization="none")


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_to_a_tensor_raises_no_other_error(tmp_path: Path, data: st.DataObject) -> None:
    """Left out, or with another type or shape, which a scale of FP8 may have."""
    tensors = _once(tmp_path)
    name = data.draw(st.sampled_from(sorted(tensors)))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.int32, torch.int64, torch.uint8, torch.int8, None])
    )
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    kept = {key: one for key, one in tensors.items() if key != name}
    if dtype is not None:
        kept[name] = torch.ones(shape, dtype=dtype)
    folders.save(kept, tmp_path)
    with contextlib.suppress(ConfigError):
        weights = folders.opened(tmp_path)
        for each in weights.shapes:
            weights.read_matrix(each)


_MIXED: dict[Path, dict[str, Tensor]] = {}


def _once(folder: Path) -> dict[str, Tensor]:
    if folder not in _MIXED:
        _MIXED[folder] = folders.write_mixed(folder)
    return _MIXED[folder]
