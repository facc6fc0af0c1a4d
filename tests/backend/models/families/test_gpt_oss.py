"""gpt-oss's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import GptOssConfig

import family
import family_engine
import tiny
from inflight.config import SpeculativeConfig
from inflight.errors import ConfigError
from inflight.models.registry import read_spec

ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
    "rope_theta": 150000.0,
}
EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": family.WINDOW,
    "rope_parameters": ROPE,
}


class TestGptOss(family.Suite):
    config = GptOssConfig
    variants: ClassVar = {
        "default": EXPERTS,
        "tied": EXPERTS | {"attention_bias": False, "tie_word_embeddings": True},
    }
    stands_for_others = True
    architecture = "gpt-oss"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": ROPE["factor"],
            "rope.scaling.original_context_length": ROPE["original_max_position_embeddings"],
            "attention.sliding_window": config.sliding_window,
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
        }


def test_layers_can_all_have_full_attention(tmp_path: Path) -> None:
    model = _model(layer_types=["full_attention"] * 4)
    family.check(family.write_folder(model, tmp_path), model)


def test_sinks_change_what_a_model_predicts(tmp_path: Path) -> None:
    """The lower they are, the closer attention comes to that without."""
    model, found = _model(), {}
    for sink in (-1e4, 0.0, 1e4):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(sink)
        checkpoint = family.write_folder(model, tmp_path / str(sink))
        family.check(checkpoint, model)
        found[sink] = family.our_logits(checkpoint, [family.tokens()] * 2, family.MIXED)[0]
    assert not torch.allclose(found[0.0], found[-1e4], atol=1e-2)
    assert not torch.allclose(found[0.0], found[1e4], atol=1e-2)


@pytest.mark.parametrize("norms", [("norm_before_fc",), ("fc_norm", "norm_output")], ids=str)
def test_its_heads_of_speculators_leave_no_trace_in_greedy_texts(
    tmp_path: Path, norms: tuple[str, ...]
) -> None:
    model = _model()
    head = tiny.with_norms(tiny.random_head(tiny.SETTINGS, draft_vocab_size=60), norms[0])
    flags = dict.fromkeys(norms, True) | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    tiny.write_speculators(tmp_path / "head", head, **flags)
    engine = family_engine.make_engine(
        family.write_folder(model, tmp_path / "model"),
        SpeculativeConfig(method="eagle3", default=3, model=str(tmp_path / "head")),
    )
    family_engine.check_texts(engine, model, model.config.vocab_size)
    assert engine.stats().num_drafted_tokens > 0


def test_large_gates_are_clamped(tmp_path: Path) -> None:
    model = _model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj_bias.mul_(60)
    family.check(family.write_folder(model, tmp_path), model)


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_another_gate_is_refused(tmp_path: Path, key: str, value: float) -> None:
    config = GptOssConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS, key: value})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{key}: {value}; allowed: "):
        read_spec(family.Checkpoint(tmp_path, "huggingface"))


def test_a_bias_of_experts_that_is_missing_is_named(tmp_path: Path) -> None:
    model = _model()
    del model.model.layers[1].mlp.experts.down_proj_bias
    checkpoint = family.write_folder(model, tmp_path)
    with pytest.raises(ConfigError, match=r"missing tensors: .*layers\.1\..*down_proj\.0\.bias"):
        family.our_logits(checkpoint, [family.tokens()], family.AT_ONCE[:1])


def _model(**changes: Any) -> Any:
    return family.make(GptOssConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS, **changes}))
