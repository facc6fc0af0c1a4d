"""The config.pbtxt files match the table of tensors, and the ensembles are wired correctly."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from inflight.ipc.engine_client import engine_config_path
from inflight.triton.contract import MODELS
from inflight.triton.model import _ROLES

ROOT = Path(__file__).parents[3]
REPOSITORIES = (ROOT / "model_repository", ROOT / "ensembles")
FOLDERS = {path.parent.name: path.parent for r in REPOSITORIES for path in r.glob("*/config.pbtxt")}
ENSEMBLES = ("generate", "chat")


def config(name):
    text = (FOLDERS[name] / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def declared(tensors):
    types = model_config_pb2.DataType.Name
    return [(t.name, types(t.data_type).removeprefix("TYPE_"), list(t.dims)) for t in tensors]


def tabled(tensors):
    return [(tensor.name, tensor.datatype, [tensor.dims]) for tensor in tensors]


def test_the_repositories_hold_the_models_of_the_table():
    assert set(FOLDERS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_table(name):
    found = config(name)
    assert declared(found.input) == tabled(MODELS[name].inputs)
    assert declared(found.output) == tabled(MODELS[name].outputs)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_optional_where_leaving_them_out_is_allowed_or_gets_an_answer(name):
    """An ensemble whose first step lacks its only input ends with an empty success, unless that
    input is optional: then the step runs, and its error names the missing input."""
    must_be_there = {"llm": {"input_ids"}, "detokenizer": {"detokenize_ids", "detokenize_state"}}
    required = {tensor.name for tensor in config(name).input if not tensor.optional}
    assert required == must_be_there.get(name, set())


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_its_folders(name):
    found = config(name)
    assert found.name in ("", name)
    versions = [path for path in FOLDERS[name].iterdir() if path.is_dir()]
    assert [path.name for path in versions] == ["1"]
    if name in ENSEMBLES:
        assert found.platform == "ensemble"
    else:
        assert found.backend == "inflight"
        assert found.parameters["role"].string_value == name
        assert [group.kind for group in found.instance_group] == [
            model_config_pb2.ModelInstanceGroup.KIND_CPU
        ]


def test_every_role_is_shipped():
    layouts = (ROOT / "backend/inflight/_repository/layouts").glob("*/*/config.pbtxt")
    parameters = [
        text_format.Parse(path.read_text(), model_config_pb2.ModelConfig()).parameters
        for path in layouts
    ]
    roles = {one["role"].string_value for one in parameters}
    assert set(_ROLES) == set(MODELS) - set(ENSEMBLES) | roles


def test_the_model_is_named_once():
    assert engine_config_path(FOLDERS["llm"]).parent.name == "1"
    for name in ("tokenizer", "chat_tokenizer", "detokenizer"):
        assert config(name).parameters["llm"].string_value == "llm"
    named = list(ROOT.glob("model_repository/*/*/engine.json"))
    assert named == [FOLDERS["llm"] / "1" / "engine.json"]


@pytest.mark.parametrize("name", ENSEMBLES)
def test_a_tokenizer_distinguishes_an_ensemble_from_a_client(name):
    """A client that names no outputs asks for all of them."""
    tokenizer = config(name).ensemble_scheduling.step[0]
    outputs = {tensor.name for tensor in MODELS[tokenizer.model_name].outputs}
    assert outputs - set(tokenizer.output_map) - {"description"} == {"num_input_tokens"}


def test_only_the_llm_is_decoupled():
    decoupled = {name for name in MODELS if config(name).model_transaction_policy.decoupled}
    assert decoupled == {"llm"}


def test_the_detokenizer_keeps_the_order_of_responses():
    """One instance without batching does; several without preserve_ordering would not."""
    found = config("detokenizer")
    assert found.max_batch_size > 1
    assert not found.HasField("dynamic_batching")
    assert sum(group.count for group in found.instance_group) == 1
    ragged = {tensor.name for tensor in found.input if tensor.allow_ragged_batch}
    assert ragged == {"detokenize_ids", "detokenize_state"}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_an_ensemble_only_wires_same_names(name):
    for step in config(name).ensemble_scheduling.step:
        for maps in (step.input_map, step.output_map):
            assert all(key == value for key, value in maps.items())


@pytest.mark.parametrize("name", ENSEMBLES)
def test_an_ensemble_feeds_every_input_of_every_step(name):
    """An option that is declared but not wired would be accepted and ignored."""
    found = config(name)
    there = {tensor.name for tensor in found.input}
    for step in found.ensemble_scheduling.step:
        inputs = {tensor.name for tensor in MODELS[step.model_name].inputs}
        # The tokenizer describes the model to clients that call it by itself.
        assert set(step.input_map) == inputs - {"describe"}
        assert set(step.input_map) <= there
        there |= set(step.output_map)
    assert {tensor.name for tensor in found.output} <= there
    used = {key for step in found.ensemble_scheduling.step for key in step.input_map}
    assert {tensor.name for tensor in found.input} <= used
