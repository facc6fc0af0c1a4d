"""Mixtures of experts that keep codes with scales of groups on a GPU, against transformers in
float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig

import family
import grouped_folders
from family_gpu import TEXTS
from guarded import relative_error
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, Quantization
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.models.decoder_cuda import Decoder
from inflight.models.experts_cuda import CudaExperts
from inflight.models.layers.weights import MoeWeights
from inflight.sampling.params import SamplingParams
from inflight_kernels.ops.linear.grouped_rows import GroupedRows
from mixed_step import EVERY_ROW, make_model, run

pytestmark = pytest.mark.gpu

# Tokens have all experts, so that rounding chooses no other ones.
SHAPE = family.SHAPE | {
    "hidden_size": 288,
    "intermediate_size": 160,
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
    "pad_token_id": 0,
    "sliding_window": family.WINDOW,
}
CUDA = torch.device("cuda")


def _experts(model: Decoder) -> CudaExperts:
    mlp = model.weights.layers[0].mlp
    assert isinstance(mlp, MoeWeights)
    experts: CudaExperts = mlp.experts
    return experts


def _made(folder: Path) -> tuple[Checkpoint, Any]:
    model = family.make(GptOssConfig(**SHAPE), deviation=0.1).bfloat16().float()
    model.set_experts_implementation("eager")
    with torch.no_grad():  # as in test_families.py
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 0.25
    grouped_folders.write_mxfp4(model, folder, largest=-4)
    return Checkpoint(folder, "huggingface"), model.double()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_gpt_oss_in_mxfp4_is_as_exact_as_in_16_bits(tmp_path: Path, batch_invariant: bool) -> None:
    checkpoint, model = _made(tmp_path)
    expected = torch.cat([family.reference_logits(model, text) for text in TEXTS]).to(CUDA)

    def logits(quantization: Quantization) -> tuple[Decoder, Tensor]:
        ours = make_model(checkpoint, torch.bfloat16, CUDA, batch_invariant, quantization)
        return ours, run(ours, EVERY_ROW)[0][: len(expected)].double()

    (kept, found), (wide, exact) = logits("auto"), logits("none")
    assert isinstance(_experts(kept).gate_up, GroupedRows)
    assert isinstance(_experts(wide).gate_up, Tensor)
    # All values of MXFP4 are numbers of bfloat16: only activations are rounded, as often as there.
    assert relative_error(found, expected) < 1.5 * relative_error(exact, expected) < 0.05


def test_decoding_in_mxfp4_keeps_to_the_most_probable_tokens(tmp_path: Path) -> None:
    checkpoint, model = _made(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", num_blocks=256, max_num_seqs=8, max_model_len=128
    )
    runner, spec = runners.build(config, checkpoint, lambda what, fraction: None)
    engine = Engine(config, runner, spec.max_model_len(config), ())
    prompts = [family.tokens(5 + 4 * index, seed=index) for index in range(5)]
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = generate(engine, [Request(i, ids, greedy) for i, ids in enumerate(prompts)])
    for index, prompt in enumerate(prompts):
        logits = family.reference_logits(model, prompt + outputs[index])
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(outputs[index])[:, None]).squeeze(1)
        gaps = (logits.amax(1) - chosen) / logits.std()
        assert gaps.max() < 0.3, gaps
