"""An invalid drafter is rejected before anything is loaded; its memory is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.errors import ConfigError
from inflight.execution import factory as runners
from inflight.execution.cpu_runner import CpuRunner
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.drafters.registry import find_drafter, find_method, method_names
from inflight.models.registry import read_spec


@pytest.fixture
def target(tmp_path: Path) -> Checkpoint:
    return tiny.write_llama(tmp_path / "target", num_hidden_layers=4)


def config_of(target: Checkpoint, settings: dict[str, Any], **others: Any) -> EngineConfig:
    speculation = SpeculativeConfig(**settings)
    return EngineConfig(
        model=str(target.path),
        speculative_config=speculation,
        num_threads=1,
        block_size=4,
        **others,
    )


def found(target: Checkpoint, **settings: Any) -> DrafterSpec | None:
    return find_drafter(config_of(target, settings), target, read_spec(target))


def write_tokenizer(folder: Path, texts: list[str], special: str) -> None:
    model = tokenizers.models.WordLevel(
        {text: i for i, text in enumerate([*texts, special])}, unk_token=special
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens([special])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_every_method_has_an_entry() -> None:
    assert method_names() == ["draft_model", "eagle3", "ngram", "self", "suffix"]
    entries = {
        "draft_model": {"model": "m"},
        "eagle3": {"model": "m"},
        "ngram": {},
        "self": {"num_layers": 1},
        "suffix": {},
    }
    for name, required in entries.items():
        method = find_method(SpeculativeConfig(method=name, **required))  # type: ignore[arg-type]
        assert (method.requires_model, method.requires_num_layers) == (
            "model" in required,
            "num_layers" in required,
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"method": "foo"},
            "method: 'foo' is unknown; allowed: draft_model, eagle3, ngram, self, suffix$",
        ),
        ({"method": "N-gram"}, "method: 'N-gram' is unknown; .*; did you mean 'ngram'\\?"),
        ({"method": "../registry"}, "method: '../registry' is unknown"),
        ({"method": "eagle3"}, "model: is required by the method eagle3$"),
        ({"method": "draft_model"}, "model: is required by the method draft_model$"),
        ({"model": "x"}, "model: is not used by the method ngram$"),
        ({"method": "self"}, "num_layers: is required by the method self$"),
        ({"num_layers": 2}, "num_layers: is not used by the method ngram$"),
        ({"method": "suffix", "model": "x"}, "model: is not used by the method suffix$"),
        (
            {"suffix_decoding_max_cached_tokens": 9},
            "suffix_decoding_max_cached_tokens: is not used by the method ngram$",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "echo"])
def test_a_method_that_cannot_work_is_refused_at_the_start(
    target: Checkpoint, settings: dict[str, Any], message: str, device: Any
) -> None:
    config = config_of(target, settings, device=device)
    with pytest.raises(ConfigError, match=rf"^speculative_config\.{message}"):
        runners.build(config, target, lambda what, fraction: None)


def test_no_drafter(target: Checkpoint) -> None:
    config = EngineConfig(model=str(target.path))
    assert find_drafter(config, target, read_spec(target)) is None


def test_layers_that_the_model_has_not(target: Checkpoint) -> None:
    assert found(target, method="self", num_layers=4) is not None
    with pytest.raises(ConfigError, match=r"speculative_config\.num_layers: 5 .* allowed: 1 to 4"):
        found(target, method="self", num_layers=5)


def test_a_model_that_is_not_there(target: Checkpoint, tmp_path: Path) -> None:
    for drafter in ("draft_model", "eagle3"):
        with pytest.raises(
            ConfigError, match=r"^speculative_config\.model: /.*/none does not exist"
        ):
            found(target, method=drafter, model=str(tmp_path / "none"))


def test_another_vocabulary(target: Checkpoint, tmp_path: Path) -> None:
    tiny.write_llama(tmp_path / "small", vocab_size=159)
    with pytest.raises(
        ConfigError, match=r"^speculative_config\.model: .*159 tokens; .* the model's, of 160"
    ):
        found(target, method="draft_model", model=str(tmp_path / "small"))


def test_another_tokenizer(target: Checkpoint, tmp_path: Path) -> None:
    small = tiny.write_llama(tmp_path / "small", num_hidden_layers=1)
    write_tokenizer(target.path, ["a", "b", "c"], "<|end|>")
    assert found(target, method="draft_model", model=str(small.path)) is not None
    write_tokenizer(small.path, ["a", "b", "c"], "<eot>")  # special ones may have other names
    assert found(target, method="draft_model", model=str(small.path)) is not None
    write_tokenizer(small.path, ["a", "x", "c"], "<|end|>")
    with pytest.raises(ConfigError, match=r"a different tokenizer: its token 1 is 'x', .* is 'b'"):
        found(target, method="draft_model", model=str(small.path))


def test_a_damaged_head_is_named(target: Checkpoint, tmp_path: Path) -> None:
    head = tiny.random_head(tiny.SETTINGS, 60)
    checkpoint = tiny.write_eagle3(tmp_path / "head", head)
    (checkpoint.path / "config.json").write_text(json.dumps({"architectures": ["Llama"]}))
    with pytest.raises(
        ConfigError, match=r"^speculative_config\.model: .*config.json: .* is not an EAGLE-3 head"
    ):
        found(target, method="eagle3", model=str(checkpoint.path))


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "self", "draft_model", "eagle3"])
def test_model_and_drafter_share_the_memory(
    target: Checkpoint, tmp_path: Path, drafter: str
) -> None:
    """In proportion to what their blocks take, and a pass of the drafter has its measured cost."""
    small = tiny.write_llama(tmp_path / "small", num_hidden_layers=1)
    head = tiny.write_eagle3(tmp_path / "head", tiny.random_head(tiny.SETTINGS, 60))
    settings: dict[str, Any] = {"method": drafter}
    if drafter == "self":
        settings["num_layers"] = 2
    elif drafter not in ("ngram", "suffix"):
        settings["model"] = str((small if drafter == "draft_model" else head).path)
    layer_bytes = 2 * 4 * 2 * 16 * 4  # keys and values of 4 tokens, 2 heads of 16 floats
    config = config_of(target, settings, kv_cache_memory_bytes=100 * 4 * layer_bytes)
    runner = CpuRunner(config, target, read_spec(target), lambda what, fraction: None)
    own_layers = {"ngram": 0, "suffix": 0, "self": 0, "draft_model": 1, "eagle3": 1}[drafter]
    assert runner.num_blocks == 100 * 4 // (4 + own_layers)
    assert runner.drafter is not None
    assert [data.shape[:3] for cache in runner.drafter.caches for data in cache.data] == (
        [(1, 2, runner.num_blocks)] if own_layers else []
    )
    assert runner.step_costs is not None
    whole = runner.step_costs.verifying.seconds[0]
    if drafter in ("ngram", "suffix"):
        assert 0.0 <= runner.step_costs.draft_seconds < whole
    else:
        assert runner.step_costs.draft_seconds > 0.0
