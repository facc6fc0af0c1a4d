"""Qwen 3's mixtures of experts have the logits of transformers, in folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Qwen3MoeConfig

import family
from inflight.errors import ConfigError
from inflight.models.registry import read_spec
from inflight.models.spec import MlpSpec, MoeSpec

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


class TestQwen3Moe(family.Suite):
    config = Qwen3MoeConfig
    variants: ClassVar = {
        "default": EXPERTS,
        "biased": EXPERTS | {"attention_bias": True, "tie_word_embeddings": True},
    }
    stands_for_others = True
    architecture = "qwen3moe"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        # llama.cpp's converter does not write expert_weights_norm; without it, they are normalised.
        return {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
    ],
)
def test_some_layers_are_dense(tmp_path: Path, changes: dict[str, Any], sparse: list[bool]) -> None:
    settings = {"pad_token_id": 0, **family.SHAPE, **EXPERTS, **changes}
    model = family.make(Qwen3MoeConfig(**settings))
    checkpoint = family.write_folder(model, tmp_path)
    found = [isinstance(layer.mlp, MoeSpec) for layer in read_spec(checkpoint).layers]
    assert found == sparse
    family.check(checkpoint, model)


@pytest.mark.parametrize(
    "changes",
    [{"norm_topk_prob": False}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 8}],
    ids=["not normalised", "one expert", "all experts"],
)
def test_routing_is_that_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = family.make(Qwen3MoeConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS, **changes}))
    family.check(family.write_folder(model, tmp_path / "folder"), model)
    metadata = TestQwen3Moe().metadata(model.config)
    metadata["expert_weights_norm"] = model.config.norm_topk_prob
    family.check(family.write_gguf(model, tmp_path / "x.gguf", "qwen3moe", **metadata), model)


def test_both_names_of_the_number_of_experts_mean_the_same(tmp_path: Path) -> None:
    """num_experts in the files of the hub, num_local_experts in those of transformers 5."""
    checkpoint = _folder(tmp_path)
    path = tmp_path / "config.json"
    spec, settings = read_spec(checkpoint), json.loads(path.read_text())
    assert "num_experts" not in settings
    settings["num_experts"] = settings.pop("num_local_experts")
    path.write_text(json.dumps(settings))
    assert read_spec(checkpoint) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9; allowed: up to the number of exp"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers: 'all'; allowed: a list of layers"),
        ({"num_local_experts": 2**31 - 1}, "2147483647 experts; allowed: up to 4096"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'; allowed: silu"),
        ({"moe_intermediate_size": 16}, "tensors whose shape does not match the config"),
        ({"num_local_experts": 7}, r"unexpected tensors .*experts\.7\."),
        ({"num_local_experts": 9}, r"missing tensors: .*experts\.8\."),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2: not known for the family qwen3_moe"),
    ],
)
def test_settings_that_contradict_the_weights_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint = _folder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        family.our_logits(checkpoint, [family.tokens()], family.AT_ONCE[:1])


def test_the_elements_of_all_experts_are_counted(tmp_path: Path) -> None:
    spec = read_spec(_folder(tmp_path))
    moe = spec.layers[0].mlp
    assert moe == MoeSpec(MlpSpec(32), num_experts=8, top_k=3, renormalize=True)
    assert moe.matrix_elements(64) == 8 * 3 * 32 * 64 + 8 * 64
    assert moe.largest_matrix_elements(64) == 2 * 32 * 64


def _folder(path: Path) -> Any:
    model = family.make(Qwen3MoeConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS}))
    return family.write_folder(model, path)
