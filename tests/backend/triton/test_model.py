"""The model class that Triton loads; its config selects the front."""

import importlib.util
import json
from pathlib import Path

import pytest

import triton_python_backend_utils as pb_utils
from inflight import errors
from inflight.triton import errors as triton_errors
from inflight.triton import sibling
from inflight.triton.completion import front
from inflight.triton.model import TritonPythonModel

ROOT = Path(__file__).parents[3]


def arguments(name="tokenizer", **parameters):
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_config": json.dumps(config),
        "model_repository": str(ROOT / "model_repository" / name),
    }


def test_the_backend_directory_serves_the_class():
    spec = importlib.util.spec_from_file_location("model", ROOT / "backend" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TritonPythonModel is TritonPythonModel


def test_a_role_picks_the_front():
    model = TritonPythonModel()
    model.initialize(arguments(role="tokenizer", llm="llm"))
    assert model.execute([]) == []
    model.finalize()


@pytest.mark.parametrize("policy", [None, {}, {"decoupled": False}, {"decoupled": True}])
def test_a_front_gets_the_transaction_policy(monkeypatch, policy):
    given = arguments(role="completion", llm="llm")
    config = json.loads(given["model_config"]) | {"model_transaction_policy": policy}
    found = {}
    monkeypatch.setattr(
        front, "CompletionFront", lambda folder, parameters: found.update(parameters)
    )
    TritonPythonModel().initialize({**given, "model_config": json.dumps(config)})
    assert found["decoupled"] == ("true" if policy and policy.get("decoupled") else "false")


def test_a_complete_config_stays_as_it_is():
    config = object()
    assert TritonPythonModel.auto_complete_config(config) is config


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "config.pbtxt: the parameter 'role' is ''; allowed: llm, tokenizer, "),
        ({"role": "tokeniser"}, "did you mean 'tokenizer'?"),
        ({"role": "tokenizer"}, "the parameter 'llm' is ''; it must name the folder"),
    ],
)
def test_a_load_failure_is_reported_to_triton(parameters, message):
    with pytest.raises(pb_utils.TritonModelException) as caught:
        TritonPythonModel().initialize(arguments(**parameters))
    assert message in str(caught.value)


def test_tritonserver_alone_serves_the_highest_version(tmp_path):
    """Its fronts would share the engine of the highest one."""
    for version in ("2", "10"):
        (tmp_path / "llm" / version).mkdir(parents=True)
        (tmp_path / "llm" / version / "engine.json").write_text('{"model": "x"}')
    given = {**arguments(role="llm"), "model_repository": str(tmp_path / "llm")}
    words = "version 2 of llm is not the highest, 10: a version_policy .* `inflight serve`"
    with pytest.raises(pb_utils.TritonModelException, match=words):
        TritonPythonModel().initialize({**given, "model_version": "2"})
    for version in ("10", "11"):  # without an engine.json, 11 is none of ours
        sibling.check_version(tmp_path / "llm", version)


def test_a_model_that_did_not_load_can_be_finalized():
    TritonPythonModel().finalize()


def test_every_error_of_ours_has_a_code_of_tritons():
    for kind, cls in errors._BY_KIND.items():
        assert cls in triton_errors._CODES
        found = triton_errors.triton_error(errors.from_kind(kind, "why"))
        assert found.message() == "why"
        assert found.code() == getattr(pb_utils.TritonError, triton_errors._CODES[cls])
