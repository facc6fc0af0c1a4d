"""A head's numbers are those of its published form, in either form of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny
from eagle3_reference import Head
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.decoder_cpu import Decoder as Target
from inflight.models.decoder_cpu import TableInputs
from inflight.models.eagle3 import UNDRAFTABLE
from inflight.models.eagle3 import Head as Model
from inflight.models.eagle3_spec import read_eagle3_spec
from inflight.models.registry import read_spec
from inflight_kernels.torch_ops.transformer import AttentionPlan

DRAFT_VOCAB_SIZE = 60
LAYERS = {"num_hidden_layers": 7}
SETTINGS = tiny.SETTINGS | LAYERS
MAX_LEN = 32
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny.write_llama(tmp_path_factory.mktemp("target"), **LAYERS)


@pytest.fixture(scope="module")
def target(target_checkpoint: Checkpoint) -> Target:
    config = read_spec(target_checkpoint)
    return Target(target_checkpoint, config, torch.float32, MAX_LEN, lambda what, done: None)


def load(checkpoint: Checkpoint, target: Target) -> Model:
    config = read_eagle3_spec(checkpoint, target.spec)
    weights = target.weights
    return Model(checkpoint, config, weights, torch.float32, MAX_LEN, lambda what, done: None)


def run(model: Model, features: torch.Tensor, followers: list[int], cuts: list[int]) -> Any:
    """A text in parts over a cache of small blocks in no order: hidden states and logits."""
    cache = tiny.make_cache(model.spec.layer, 16, 4)
    table = np.array([[9, 2, 14, 0, 7]])
    states = []
    for first, end in zip([0, *cuts], [*cuts, len(followers)], strict=True):
        positions = torch.arange(first, end)
        slots = torch.from_numpy(table[0])[positions // 4] * 4 + positions % 4
        plan = AttentionPlan(table, np.array([0, end - first]), np.array([end]), 4)
        hidden = model.fuse(features[first:end])
        tokens = torch.tensor(followers[first:end])
        with torch.inference_mode():
            states.append(model.forward(tokens, hidden, positions, slots, plan, cache))
    whole = torch.cat(states)
    return whole, model.logits(whole)


@pytest.mark.parametrize("norms", [(), ("norm_before_fc",), ("fc_norm", "norm_output")], ids=str)
@pytest.mark.parametrize("form", ["its authors'", "speculators"])
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 11]])
def test_numbers_are_those_of_the_published_form(
    tmp_path: Path, target: Target, form: str, cuts: list[int], norms: tuple[str, ...]
) -> None:
    head = tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE)
    if norms:
        head = tiny.with_norms(head, norms[0])
    flags = dict.fromkeys(norms, True)
    settings = SETTINGS | flags | {"norm_before_residual": form == "speculators"}
    write = tiny.write_speculators if form == "speculators" else tiny.write_eagle3
    model = load(write(tmp_path, head, **flags), target)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(17, 3 * 64, generator=generator)
    followers = torch.randint(0, 160, (17,), generator=generator).tolist()
    states, logits = run(model, features, followers, cuts)

    book = Head(head, settings, target.weights.embedding.table)
    expected = book(book.fuse(features), torch.tensor(followers))
    torch.testing.assert_close(states.double(), expected, rtol=1e-4, atol=1e-4)
    targets = torch.arange(DRAFT_VOCAB_SIZE) + head["d2t"]
    scores = book.scores(expected)
    torch.testing.assert_close(logits[:, targets].double(), scores, rtol=1e-4, atol=1e-4)
    others = torch.ones(160, dtype=torch.bool).index_fill_(0, targets, False)
    assert (logits[:, others] == UNDRAFTABLE).all()


def test_missing_head_tensors_are_shared_with_the_target(tmp_path: Path, target: Target) -> None:
    head = tiny.random_head(SETTINGS, 160)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del head[name]
    model = load(tiny.write_eagle3(tmp_path, head), target)
    assert model._weights.head is target.weights.head
    assert model._weights.embedding is target.weights.embedding
    assert model._weights.targets is None


def test_a_heads_own_embedding_is_used(tmp_path: Path, target: Target) -> None:
    own = torch.randn(160, 64)
    head = tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE) | {"embed_tokens.weight": own}
    model = load(tiny.write_eagle3(tmp_path, head), target)
    assert torch.equal(model._weights.embedding.table, own)


def test_features_are_the_inputs_of_layers(target: Target, target_checkpoint: Checkpoint) -> None:
    from transformers import AutoModelForCausalLM

    tokens = [5, 17, 99, 3, 150, 42]
    peer = AutoModelForCausalLM.from_pretrained(target_checkpoint.path, dtype=torch.float32)
    with torch.inference_mode():
        states = peer(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    target.set_aux_layers((6, 0, 3))
    try:
        rows = torch.arange(6)
        plan = AttentionPlan(np.array([[0, 1]]), np.array([0, 6]), np.array([6]), 4)
        cache = tiny.make_cache(target.spec, 2, 4)
        with torch.inference_mode():
            tables = [TableInputs(rows, plan)]
            target.forward(torch.tensor(tokens), rows, tables, rows[:0], cache)
        expected = torch.cat([states[tap][0] for tap in (6, 0, 3)], -1)
        torch.testing.assert_close(target.features, expected, rtol=1e-4, atol=1e-4)
    finally:
        target.set_aux_layers(())


def read(folder: Path, **changes: Any) -> Any:
    model = read_spec(tiny.write_llama(folder / "t", num_hidden_layers=7))
    head = tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE)
    return read_eagle3_spec(tiny.write_eagle3(folder / "h", head, **changes), model)


@pytest.mark.parametrize(
    ("changes", "aux_layers"),
    [
        ({}, (2, 3, 4)),
        ({TAPS_KEY: [1, 4, 7]}, (1, 4, 7)),
        ({"eagle_config": {TAPS_KEY: [0, 3, 6]}}, (1, 4, 7)),  # whose output it is
        ({TAPS_KEY: [2, 3], "eagle_config": {TAPS_KEY: [0, 3, 6]}}, (2, 3)),
        ({"eagle_config": {TAPS_KEY: [3, 5, 7]}}, (3, 5, 7)),  # no layer has the number 7
        ({"eagle_config": {TAPS_KEY: []}}, (2, 3, 4)),
    ],
)
def test_the_layers_that_a_head_sees(
    tmp_path: Path, changes: dict[str, Any], aux_layers: tuple[int, ...]
) -> None:
    assert read(tmp_path, **changes).aux_layers == aux_layers


@pytest.mark.parametrize(
    ("changes", "norms", "norm_output"),
    [
        ({}, (), False),
        ({"norm_before_fc": True}, (("input_norm", 192),), False),
        ({"eagle_config": {"norm_before_fc": True}}, (("input_norm", 192),), False),
        ({"fc_norm": True, TAPS_KEY: [1, 4]}, (("fc_norm.0", 64), ("fc_norm.1", 64)), False),
        ({"norm_output": True, "norm_before_fc": False}, (), True),
    ],
    ids=str,
)
def test_the_norms_that_a_head_has(
    tmp_path: Path,
    changes: dict[str, Any],
    norms: tuple[tuple[str, int], ...],
    norm_output: bool,
) -> None:
    found = read(tmp_path, **changes)
    assert (found.feature_norms, found.norm_output) == (norms, norm_output)


def test_a_head_of_llama_may_have_the_settings_of_gpt_oss(tmp_path: Path) -> None:
    """As those of SpecForge."""
    experts = {"num_local_experts": 16, "experts_per_token": 4}
    found = read(tmp_path, model_type="gpt_oss", **experts)
    assert found.layer.layers[0].dense_mlp.width == SETTINGS["intermediate_size"]


def test_an_eagle3_head_always_has_one_layer(tmp_path: Path) -> None:
    config = read(tmp_path, num_hidden_layers=40)
    assert config.layer.num_layers == 1
    assert config.draft_vocab_size == DRAFT_VOCAB_SIZE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is not an EAGLE-3 head"),
        ({"speculators_model_type": "eagle"}, "is not an EAGLE-3 head"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised EAGLE-3 heads are not"),
        ({"vocab_size": 150}, "vocab_size: 150; it must equal that of the model, 160"),
        ({"target_hidden_size": 32}, "trained for hidden_size 32; the model has 64"),
        ({"draft_vocab_size": 161}, "draft_vocab_size: 161; allowed: up to vocab_size"),
        ({TAPS_KEY: [1, 8]}, ".1, 8. are not layers of the model; allowed: 0 to 7"),
        ({TAPS_KEY: "all"}, "all are not layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"attention_bias": True}, "attention_bias: true is not supported"),
        ({"model_type": "qwen3"}, "the architecture 'qwen3' is not supported"),
        (
            {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLMEagle3"]},
            "the architecture 'gpt_oss' is not supported",
        ),
        ({"norm_before_fc": True, "fc_norm": True}, "both are true; allowed: one of them"),
        ({"norm_before_fc": "yes"}, "norm_before_fc: 'yes'; allowed: true, false"),
    ],
)
def test_incompatible_drafters_are_rejected(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fc.weight", None, "missing tensors: fc.weight"),
        ("d2t", None, "missing tensors: d2t"),
        ("lm_head.weight", None, "missing tensors: lm_head.weight"),
        ("fc.bias", torch.zeros(64), "unexpected tensors .*: fc.bias"),
        ("input_norm.weight", torch.ones(192), "unexpected tensors .*: input_norm.weight"),
        ("norm.weight", torch.zeros(32), r"norm.weight \[32\], expected \[64\]"),
        ("d2t", torch.full((DRAFT_VOCAB_SIZE,), 150), "d2t maps to tokens 150 to 209"),
    ],
)
def test_damaged_weights_are_refused(
    tmp_path: Path, target: Target, name: str, value: torch.Tensor | None, words: str
) -> None:
    head = tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE)
    checkpoint = tiny.write_eagle3(tmp_path, head, draft_vocab_size=DRAFT_VOCAB_SIZE)
    if value is None:
        del head[name]
    else:
        head[name] = value
    save_file(
        {key: each.contiguous() for key, each in head.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=words):
        load(checkpoint, target)


def test_a_file_is_no_head(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match=r"a folder with a config\.json"):
        read_eagle3_spec(Checkpoint(tmp_path / "x.gguf", "gguf"), target.spec)
