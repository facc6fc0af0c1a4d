"""Files generated from the tables of options and settings match `make generate`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec
import pytest

from inflight import config
from inflight.deploy import generate
from inflight.errors import ConfigError
from inflight.sampling.options import Option, option_fields
from inflight.sampling.params import SAMPLING_OPTIONS, SamplingParams
from inflight.triton import contract
from inflight.triton.request_options import OPTIONS
from inflight_kernels.ops.sampling import ROW_PARAMS
from inflight_kernels.torch_ops.sampling import Filters, Penalties


@pytest.mark.parametrize("path", [*generate._FILES, *generate._BLOCKS])
def test_a_generated_file_is_up_to_date(path: str) -> None:
    assert (generate.root() / path).read_text() == generate.generated()[path], "run make generate"


def test_a_stale_file_is_named_and_written(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in generate.generated().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(generate, "root", lambda: tmp_path)
    assert generate.main(["--check"]) == 0
    stale = tmp_path / "model_repository/llm/config.pbtxt"
    current = stale.read_text()
    stale.write_text(current.replace("min_p", "max_p"))
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "model_repository/llm/config.pbtxt\n"
    assert generate.main([]) == 0
    assert stale.read_text() == current


def test_a_file_without_its_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="x: has 0 blocks 'inputs'; allowed: one"):
        generate._with_block("x", "text", "inputs", [])


def test_text_outside_a_block_is_preserved() -> None:
    text = "# by hand\n# begin generated: a (x)\nold\n# end generated: a\n# by hand too\n"
    found = generate._with_block("x", text, "a", ["new", "lines"])
    assert found == text.replace("old\n", "new\nlines\n")


def test_each_option_and_setting_has_a_meaning() -> None:
    meanings = [field.option.meaning for field in OPTIONS]
    for kind in (config.EngineConfig, config.SpeculativeConfig):
        meanings += [config.setting(field).meaning for field in msgspec.structs.fields(kind)]
    assert all(meaning.endswith(".") for meaning in meanings)


def test_a_new_sampling_option_reaches_every_file_from_its_entry_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class More(SamplingParams, frozen=True):
        new_p: Annotated[float, Option("Keep few tokens.", low=0.0, high=1.0)] = 0.5

    field = option_fields(More)[-1]
    assert (field.name, field.kind, field.default) == ("new_p", float, 0.5)
    (tensor,) = contract.tensors_of(field)
    assert (tensor.name, tensor.datatype, tensor.dims) == ("new_p", "FP32", 1)
    monkeypatch.setattr(generate, "OPTIONS", (*OPTIONS, field))
    monkeypatch.setattr(generate, "SAMPLING_OPTIONS", (*SAMPLING_OPTIONS, field))
    monkeypatch.setattr(contract, "OPTIONS", (*contract.OPTIONS, tensor))
    texts = generate.generated()
    line = '  { name: "new_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true }\n'
    wired = '    input_map { key: "new_p" value: "new_p" }\n'
    for name in ("generate", "chat"):
        assert line in texts[f"ensembles/{name}/config.pbtxt"]
        assert wired in texts[f"ensembles/{name}/config.pbtxt"]
    assert line in texts["model_repository/llm/config.pbtxt"]
    client = texts["client/inflight_client/option_table.py"]
    assert '    new_p: float\n    """Keep few tokens."""\n' in client
    assert '    "new_p": "FP32",\n' in client
    row = "| `new_p` | FP32 | `0.5` | [0.0, 1.0] | Keep few tokens. | `new_p` |"
    assert row in texts["docs/reference/options.md"].splitlines()


def test_row_params_are_options_with_the_same_defaults() -> None:
    defaults = {field.name: field.default for field in SAMPLING_OPTIONS}
    for kind in (Filters, Penalties):
        for field in dataclasses.fields(kind):
            assert (field.name, field.default) == (field.name, defaults[field.name])
    staged = {field.name for field in SAMPLING_OPTIONS if field.option.stage}
    assert staged <= set(ROW_PARAMS.names or ())
