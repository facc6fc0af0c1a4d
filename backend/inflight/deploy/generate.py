"""Generates files from the tables of request options, settings and metrics: `make generate`.

    python -m inflight.deploy.generate [--check]

The tables are `SamplingParams` and `RequestOptions` (see `sampling.options`), and `EngineConfig`
and `SpeculativeConfig` (see `config.Setting`), and `FAMILIES` and `SERVER_FAMILIES`. Some files are
generated whole; in others, written by hand, the lines between "begin generated: NAME" and "end
generated: NAME" are. A test compares the files with the tables, so a change of a table needs
`make generate`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from inflight import config
from inflight.deploy.server_families import SERVER_FAMILIES
from inflight.engine.metrics.families import FAMILIES, Family
from inflight.errors import ConfigError
from inflight.sampling.options import MAX_STRING_BYTES, OptionField
from inflight.sampling.params import SAMPLING_OPTIONS, SamplingParams
from inflight.triton import contract
from inflight.triton.dialects import option_values
from inflight.triton.request_options import OPTIONS, REQUEST_OPTIONS
from inflight_kernels.ops.sampling import ROW_PARAMS

_HEADER = "Written by `make generate`; do not edit."


def root() -> Path:
    """The checkout.

    Raises:
        ConfigError: this is an installed package.
    """
    found = Path(__file__).parents[3]
    if not (found / "pyproject.toml").is_file():
        raise ConfigError(f"{found}: is not a checkout of inflight; run `make generate` in one")
    return found


def generated() -> dict[str, str]:
    """The expected content of each generated file, by its path in the checkout.

    Raises:
        ConfigError: a file lacks a block.
    """
    texts = {path: write() for path, write in _FILES.items()}
    for path, blocks in _BLOCKS.items():
        text = (root() / path).read_text()
        for name, write in blocks.items():
            text = _with_block(path, text, name, write())
        texts[path] = text
    return texts


def main(arguments: list[str]) -> int:
    stale = []
    for path, text in generated().items():
        file = root() / path
        if not file.is_file() or file.read_text() != text:
            stale.append(path)
            if "--check" not in arguments:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    for path in stale:
        print(path)
    return 1 if stale and "--check" in arguments else 0


def _with_block(path: str, text: str, name: str, lines: Iterable[str]) -> str:
    """The text with the lines of a block replaced."""
    pattern = rf"(?<=begin generated: {name})([^\n]*\n).*?(?=[^\n]*end generated: {name}\b)"
    body = "".join(f"{line}\n" for line in lines)
    text, count = re.subn(pattern, lambda found: found[1] + body, text, flags=re.DOTALL)
    if count != 1:
        raise ConfigError(f"{path}: has {count} blocks {name!r}; allowed: one")
    return text


def _filled(template: str, **texts: str) -> str:
    """A template with each @name@ replaced by its text."""
    for name, text in texts.items():
        template = template.replace(f"@{name}@", text)
    return template


# ---------------------------------------------------------------- config.pbtxt


def _config_inputs() -> list[str]:
    lines = [
        f'  {{ name: "{one.name}" data_type: TYPE_{one.datatype} dims: [ {one.dims} ] '
        "optional: true }"
        for one in contract.OPTIONS
    ]
    return [f"{line}," for line in lines[:-1]] + lines[-1:]  # a list has no trailing comma


def _config_input_maps() -> list[str]:
    return [
        f'    input_map {{ key: "{one.name}" value: "{one.name}" }}' for one in contract.OPTIONS
    ]


# ---------------------------------------------------------------- the client

_CLIENT_TYPES: dict[tuple[type, bool], str] = {
    (int, False): "int",
    (float, False): "float",
    (bool, False): "bool",
    (str, False): "str",
    (int, True): "Sequence[int]",
    (str, True): "Sequence[str]",
    (tuple, True): "Mapping[int, float]",
}

_CLIENT = f'''"""The options of a generation, and the datatypes of their tensors.

{_HEADER}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Options(TypedDict, total=False):
    """Options of a generation; omitted ones use the server's defaults.

    The server checks the ranges; its error names the option.

    logit_bias is token id -> bias. It is sent as the two tensors `logit_bias_ids` and
    `logit_bias_values`. sampling_parameters and guided_decoding_guide are sent as strings; a
    mapping, or a guide given as a list, is encoded as JSON.
    """

@OPTIONS@


# KServe's names of the datatypes. Where dims are [-1] there are lists in `Options`.
DATATYPES: dict[str, str] = {{
@DATATYPES@
}}
'''


def _client_options() -> str:
    fields: list[str] = []
    datatypes: list[str] = []
    for field in OPTIONS:
        kind = field.option.client
        if kind == "":
            continue
        fields += _client_field(
            field.name, kind or _CLIENT_TYPES[field.kind, field.is_list], field.option.meaning
        )
        for name, datatype in field.tensors:
            if name in field.option.aliases:
                fields += _client_field(
                    name, _CLIENT_TYPES[field.kind, False], f"Another name of `{field.name}`."
                )
            elif name != field.name:
                item = {"INT32": "int", "FP32": "float"}[datatype]
                fields += _client_field(name, f"Sequence[{item}]", f"See `{field.name}`.")
            datatypes.append(f'    "{name}": "{_kserve(datatype)}",')
    return _filled(_CLIENT, OPTIONS="\n".join(fields), DATATYPES="\n".join(datatypes))


def _client_field(name: str, kind: str, meaning: str) -> list[str]:
    """A field and, as its docstring, the first sentence of its meaning."""
    sentence = re.split(r"(?<=\.) (?=[A-Z0-9`-])", meaning)[0]
    lines = textwrap.wrap(f'"""{sentence}"""', 96)
    if len(lines) > 1:
        lines = [*textwrap.wrap(f'"""{sentence}', 96), '"""']
    return [f"    {name}: {kind}", *(f"    {line}" for line in lines)]


def _kserve(datatype: str) -> str:
    return "BYTES" if datatype == "STRING" else datatype


# ---------------------------------------------------------------- the kernels

_C_TYPES = {"<u8": "unsigned long long", "<f4": "float", "<i4": "int"}

_ROW_PARAMS_HEADER = f"""\
// Sampling parameters of a row of logits: ROW_PARAMS of ops/sampling.py as the kernels read it.
// {_HEADER}
#pragma once

struct RowParams {{
@FIELDS@
}};
static_assert(sizeof(RowParams) == @SIZE@, "as the host writes it");

constexpr int ROW_PARAMS_WORDS = sizeof(RowParams) / sizeof(int);
constexpr int ROW_PARAMS_SLOT = @SLOT@;  // the word of `slot`

__device__ inline bool has_penalties(const RowParams& params) {{
    return @PENALTIES@;
}}

// Whether a row has filters that need more than its maximum and its bound.
__device__ inline bool has_rare_filters(const RowParams& params) {{
    return @RARE_FILTERS@;
}}

// A word of a row's parameters, or its default if it belongs to a rare filter.
__device__ inline int without_rare_filters(int word, int value) {{
    switch (word) {{
@DEFAULTS@
        default: return value;
    }}
}}
"""


def _row_params_header() -> str:
    names = ROW_PARAMS.names or ()
    fields = [f"    {_C_TYPES[ROW_PARAMS[name].str]} {name};" for name in names]
    rare = [field for field in SAMPLING_OPTIONS if field.option.stage == "rare filter"]
    penalties = [field for field in SAMPLING_OPTIONS if field.option.stage == "penalty"]
    defaults = [
        f"        case {_word(field.name)}: return {_bits(field)};  // {field.name}"
        for field in rare
    ]
    return _filled(
        _ROW_PARAMS_HEADER,
        FIELDS="\n".join(fields),
        SIZE=str(ROW_PARAMS.itemsize),
        SLOT=str(_word("slot")),
        PENALTIES=_any_set(penalties),
        RARE_FILTERS=_any_set(rare),
        DEFAULTS="\n".join(defaults),
    )


def _word(name: str) -> int:
    assert ROW_PARAMS.fields is not None
    return int(ROW_PARAMS.fields[name][1]) // 4


def _literal(field: OptionField) -> str:
    return f"{field.default}f" if field.kind is float else str(field.default)


def _bits(field: OptionField) -> str:
    literal = _literal(field)
    return f"__float_as_int({literal})" if field.kind is float else literal


def _any_set(fields: list[OptionField]) -> str:
    return " ||\n           ".join(f"params.{field.name} != {_literal(field)}" for field in fields)


# ---------------------------------------------------------------- reference pages


def _table(titles: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return ["", *(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines), ""]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _type(tensor: contract.Tensor) -> str:
    return tensor.datatype if tensor.dims == 1 else f"{tensor.datatype}[{tensor.dims}]"


def _option_rows(fields: Iterable[OptionField]) -> list[list[str]]:
    tensors = {tensor.name: tensor for tensor in contract.OPTIONS}
    rows = []
    for field in fields:
        own = [tensors[name] for name, _ in field.tensors]
        rows.append(
            [
                _code(tensor.name for tensor in own),
                ", ".join(dict.fromkeys(map(_type, own))),
                _cell(_default(field)),
                _cell(_allowed(field)),
                _cell(field.option.meaning),
                _code(field.vllm_keys),
            ]
        )
    return rows


_OPTION_TITLES = ["Input", "Type", "Default", "Allowed", "Meaning", "Key in `sampling_parameters`"]


def _steps() -> list[str]:
    """The numbered list in the docstring of `SamplingParams`."""
    lines = textwrap.dedent(SamplingParams.__doc__ or "").splitlines()
    return ["", *(line.strip() for line in lines if re.match(r"\s*\d+\. ", line)), ""]


def _sampling_options() -> list[str]:
    return _table(_OPTION_TITLES, _option_rows(SAMPLING_OPTIONS))


def _request_options() -> list[str]:
    return _table(_OPTION_TITLES, _option_rows(REQUEST_OPTIONS))


def _default(field: OptionField) -> str:
    if field.option.default:
        return field.option.default
    if field.default == ():
        return "none"
    return f"`{json.dumps(field.default)}`"


def _allowed(field: OptionField) -> str:
    option = field.option
    if field.is_list:
        what = f"strings of 1 to {MAX_STRING_BYTES} bytes" if field.kind is str else "token ids"
        biases = f", biases in {option.interval}" if option.interval else ""
        return f"up to {option.max_items} {what}{biases}"
    if option.allowed or option.interval:
        return option.allowed or option.interval
    return "a token id" if option.token_ids else ""


def _tensor_rows(tensors: Iterable[contract.Tensor]) -> Callable[[], list[str]]:
    rows = [[f"`{one.name}`", _type(one), _cell(one.meaning)] for one in tensors]
    return lambda: _table(["Tensor", "Type", "Meaning"], rows)


def _other_keys() -> list[str]:
    rows = [
        [f"`{key}`", _code(json.dumps(value) for value in values)]
        for key, values in option_values.IGNORED.items()
    ]
    return _table(["Key", "Accepted at"], rows)


def _settings(kind: type[msgspec.Struct]) -> Callable[[], list[str]]:
    return lambda: _table(
        ["Setting", "Allowed", "Default", "Meaning", "Former name"],
        [_setting_row(field) for field in msgspec.structs.fields(kind)],
    )


def _setting_row(field: msgspec.structs.FieldInfo) -> list[str]:
    setting = config.setting(field)
    default = setting.default or _setting_default(field)
    former = _code([setting.former]) if setting.former else ""
    allowed = config.allowed_values(field.type)
    return [f"`{field.name}`", _cell(allowed), _cell(default), _cell(setting.meaning), former]


def _setting_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if by_device := config.device_defaults(field.name):
        return "; ".join(f"`{value}` on {device}" for device, value in by_device.items())
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def _metrics(*kinds: str) -> Callable[[], list[str]]:
    rows = [_metric_row(one) for one in FAMILIES if one.kind in kinds]
    return lambda: _table(["Name", "Meaning", "Own labels", "vLLM", "TensorRT-LLM backend"], rows)


def _metric_row(family: Family) -> list[str]:
    labels = [
        f"`{label}`: {_code(dict.fromkeys(values[place] for values in family.values))}"
        for place, label in enumerate(family.labels)
    ]
    labels += [f"`{label}`" for label, _ in family.facts]
    vllm = _code(one.name for one in family.aliases if one.flavour == "vllm")
    trtllm = _code(
        one.name + "{" + ", ".join(f'{name}="{value}"' for name, value in one.labels) + "}"
        for one in family.aliases
        if one.flavour == "trtllm"
    )
    return [f"`{family.name}`", _cell(family.meaning), "; ".join(labels), vllm, trtllm]


def _server_metrics() -> list[str]:
    rows = [
        [f"`{one.name}`", one.kind, _cell(one.meaning), _code(one.labels)]
        for one in SERVER_FAMILIES
    ]
    return _table(["Name", "Type", "Meaning", "Labels"], rows)


def _metric_buckets() -> list[str]:
    rows = [
        [f"`{one.name}`", ", ".join(f"{bound:g}" for bound in one.bounds)]
        for one in FAMILIES
        if one.bounds
    ]
    return _table(["Histogram", "Upper bounds of the buckets"], rows)


# ---------------------------------------------------------------- what is written

_FILES: dict[str, Callable[[], str]] = {
    "client/inflight_client/option_table.py": _client_options,
    "kernels/inflight_kernels/csrc/sampling/row_params.cuh": _row_params_header,
}
"""Files that are generated whole."""

_ENSEMBLE = {"option inputs": _config_inputs, "option input maps": _config_input_maps}
_BLOCKS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "ensembles/generate/config.pbtxt": _ENSEMBLE,
    "ensembles/chat/config.pbtxt": _ENSEMBLE,
    "model_repository/llm/config.pbtxt": {"option inputs": _config_inputs},
    "backend/inflight/_repository/layouts/unary/completion/config.pbtxt": {
        "option inputs": _config_inputs
    },
    "docs/reference/options.md": {
        "prompts": _tensor_rows([*contract.TEXT_PROMPT, *contract.CHAT_PROMPT]),
        "steps": _steps,
        "sampling options": _sampling_options,
        "request options": _request_options,
        "outputs": _tensor_rows(contract.MODELS["generate"].outputs),
        "llm inputs": _tensor_rows(
            one for one in contract.MODELS["llm"].inputs if one not in contract.OPTIONS
        ),
        "llm outputs": _tensor_rows(
            one
            for one in contract.MODELS["llm"].outputs
            if one not in contract.MODELS["generate"].outputs
        ),
        "other keys": _other_keys,
    },
    "docs/reference/metrics.md": {
        "gauges": _metrics("gauge"),
        "counters": _metrics("counter"),
        "histograms": _metrics("histogram"),
        "server": _server_metrics,
        "buckets": _metric_buckets,
    },
    "docs/reference/settings.md": {
        "engine settings": _settings(config.EngineConfig),
        "speculative settings": _settings(config.SpeculativeConfig),
    },
}
"""Files with generated blocks, and the generator of each block."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
