"""The config.pbtxt files of the layouts match the tensors of their dialects."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import inflight
from inflight.triton.completion.native import Native
from inflight.triton.completion.vllm import Vllm

ROOT = Path(inflight.__file__).parent / "_repository" / "layouts"
MODELS = {path.parent.name: path for path in ROOT.glob("*/*/config.pbtxt")}


def config(name):
    return text_format.Parse(MODELS[name].read_text(), model_config_pb2.ModelConfig())


def declared(tensors):
    types = model_config_pb2.DataType.Name
    return [(t.name, types(t.data_type).removeprefix("TYPE_"), list(t.dims)) for t in tensors]


# With a table of tensors; the others are in tests/backend/triton/tensorrtllm.
COMPLETIONS = {"completion": Native.contract, "vllm_model": Vllm.contract}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_tensors_are_those_of_the_dialect(name):
    found = config(name)
    contract = COMPLETIONS[name]
    for tensors, table in ((found.input, contract.inputs), (found.output, contract.outputs)):
        assert declared(tensors) == [(one.name, one.datatype, [one.dims]) for one in table]
    assert all(tensor.optional for tensor in found.input), "an error names what is missing"


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_a_version_and_runs_on_the_cpu(name):
    found = config(name)
    assert found.backend == "inflight"
    assert [path.name for path in MODELS[name].parent.iterdir() if path.is_dir()] == ["1"]
    kinds = [group.kind for group in found.instance_group]
    assert kinds == [model_config_pb2.ModelInstanceGroup.KIND_CPU]


def test_only_the_unary_model_is_not_decoupled():
    policies = {name: config(name).model_transaction_policy.decoupled for name in COMPLETIONS}
    assert [name for name, decoupled in policies.items() if not decoupled] == ["completion"]
