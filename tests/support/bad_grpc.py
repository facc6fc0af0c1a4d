"""Messages that the gRPC door refuses: catalogue number and what is wrong -> bytes, error text."""

from __future__ import annotations

import struct
from typing import Any

from kserve import request, tensor, text

PROMPT = text("A prompt")
Case = tuple[bytes, str]


def message(*inputs: Any, model: str = "generate", **fields: Any) -> bytes:
    return bytes(request(model, *inputs, **fields).SerializeToString())


def of_input(datatype: str, shape: list[int], raw: bytes, name: str = "input_ids") -> bytes:
    return message((name, datatype, shape, raw), model="llm")


def changed(change: Any) -> bytes:
    """A good request after a change of its message."""
    found = request("generate", PROMPT)
    change(found)
    return bytes(found.SerializeToString())


def _typed_and_raw(found: Any) -> None:
    found.inputs[0].contents.bytes_contents.append(b"z")


def _typed_wrong_field(found: Any) -> None:
    del found.raw_input_contents[:]
    found.inputs[0].contents.int_contents.append(1)


def _typed_too_many(found: Any) -> None:
    del found.raw_input_contents[:]
    found.inputs[0].contents.bytes_contents.extend([b"a", b"b"])


def _typed_range(found: Any) -> None:
    del found.raw_input_contents[:]
    found.inputs[0].datatype = "INT8"
    found.inputs[0].contents.int_contents.append(128)


def _typed_half(found: Any) -> None:
    del found.raw_input_contents[:]
    found.inputs[0].datatype = "BF16"
    found.inputs[0].contents.fp32_contents.append(1.0)


def _empty_parameter(found: Any) -> None:
    found.parameters["x"].Clear()


def _negative_timeout(found: Any) -> None:
    found.parameters["timeout"].int64_param = -5


def _text_timeout(found: Any) -> None:
    found.parameters["timeout"].string_param = "soon"


def _priority(found: Any) -> None:
    found.parameters["priority"].uint64_param = 2**63 - 1


def _final_text(found: Any) -> None:
    found.parameters["triton_enable_empty_final_response"].string_param = "yes"


def _output(**parameters: Any) -> Any:
    def change(found: Any) -> None:
        output = found.outputs.add(name="text_output")
        for key, value in parameters.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(output.parameters[key], kind, value)

    return change


def _shared_input(found: Any) -> None:
    found.inputs[0].parameters["shared_memory_region"].string_param = "triton_python_region"
    del found.raw_input_contents[:]


def _input_parameter(found: Any) -> None:
    found.inputs[0].parameters["binary_data_size"].int64_param = -1


def _outputs(count: int, name: str = "text_output") -> Any:
    return lambda found: [found.outputs.add(name=name) for _ in range(count)]


def _parameters(found: Any) -> None:
    for index in range(65):
        found.parameters[f"p{index}"].int64_param = index


# Groups, which no field of the protocol is, inside each other.
NESTED_GROUPS = b"\x7b" * 100_000 + b"\x7c" * 100_000
STRINGS = struct.pack("<I1sI1s", 1, b"a", 1, b"b")
INVALID_UTF8 = b"\x0a\x02\xff\xfe"

CASES: dict[str, Case] = {
    "case-23-path": (message(PROMPT, model="../../etc"), "model_name: allowed"),
    "case-23-empty": (message(PROMPT, model=""), "model_name: allowed"),
    "case-23-long": (message(PROMPT, model="m" * 129), "model_name: allowed"),
    "case-24-negative": (changed(lambda m: setattr(m, "model_version", "-1")), "model_version: al"),
    "case-24-letters": (changed(lambda m: setattr(m, "model_version", "abc")), "model_version: al"),
    "case-24-long": (changed(lambda m: setattr(m, "model_version", "1" * 30)), "model_version: al"),
    "case-27-twice": (message(PROMPT, PROMPT), "text_input: is twice in inputs; allowed: once"),
    "case-27-many": (
        message(*(tensor(f"t{index}", "INT32", 1) for index in range(65))),
        "inputs: has 65 entries; allowed: up to 64",
    ),
    "case-29-unknown": (of_input("XX", [1], b"1234"), "input_ids: datatype is unknown"),
    "case-29-empty": (of_input("", [1], b"1234"), "input_ids: datatype is unknown"),
    "case-30-rank": (of_input("INT32", [1] * 9, b"1234"), "input_ids: has 9 dimensions"),
    "case-31-data": (of_input("INT32", [0], b"1234"), "input_ids: raw_input_contents has 4 bytes"),
    "case-32-negative": (of_input("INT32", [-1], b"1234"), "input_ids: shape: a dimension is -1"),
    "case-33-overflow": (of_input("INT32", [2**62, 8], b"1234"), "input_ids: shape: a dimension"),
    "case-33-product": (of_input("INT32", [2**20, 2**20], b"1234"), "input_ids: shape: has 10995"),
    "case-33-zero": (of_input("INT32", [2**62, 4, 0], b""), "input_ids: shape: a dimension is 46"),
    "case-34-2-40": (of_input("INT32", [2**40], b"1234"), "input_ids: shape: a dimension is 1099"),
    "case-35-short": (of_input("INT32", [3], b"1234"), "has 4 bytes; allowed: 12, for 3 elements"),
    "case-35-long": (of_input("INT32", [1], b"12345678"), "has 8 bytes; allowed: 4"),
    "case-35-typed": (changed(_typed_too_many), "text_input: contents has 2 elements; allowed: 1"),
    "case-35-nothing": (
        changed(lambda m: m.ClearField("raw_input_contents")),
        "text_input: contents has 0 elements; allowed: 1",
    ),
    "case-36-surplus": (
        changed(lambda m: m.raw_input_contents.append(b"more")),
        "raw_input_contents: has 2 entries for 1 inputs",
    ),
    "case-37-mixed": (changed(_typed_and_raw), "text_input: has contents and raw_input_contents"),
    "case-38-prefix": (of_input("BYTES", [1], b"\0\0\0\x80x"), "ends within string 0 of 1"),
    "case-39-cut": (of_input("BYTES", [1], b"\1\0"), "ends within string 0 of 1"),
    "case-39-second": (of_input("BYTES", [2], STRINGS[:7]), "ends within string 1 of 2"),
    "case-40-two-strings": (of_input("BYTES", [1], STRINGS), "has 5 bytes after its last string"),
    "case-40-many": (
        of_input("BYTES", [70_000], b"\0\0\0\0" * 70_000),
        "has 70000 strings; allowed",
    ),
    "case-42-int8": (changed(_typed_range), "text_input: a value does not fit INT8"),
    "case-43-field": (changed(_typed_wrong_field), "contents has int_contents; allowed for BYTES"),
    "case-43-bf16": (changed(_typed_half), "BF16 in contents; allowed: in raw_input_contents"),
    "case-45-parameter": (changed(_input_parameter), "text_input: has parameters; allowed: none"),
    "case-46-input": (changed(_shared_input), "text_input: shared memory is closed"),
    "case-46-output": (
        changed(_output(shared_memory_region="triton_python_region", shared_memory_byte_size=64)),
        "text_output: shared memory is closed",
    ),
    "case-47-twice": (changed(_outputs(2)), "text_output: is twice in outputs; allowed: once"),
    "case-47-20000": (changed(_outputs(20_000)), "outputs: has 20000 entries; allowed: up to 64"),
    "case-47-unnamed": (changed(_outputs(1, "")), "outputs: allowed: names of 1 to 128"),
    "case-48-classification": (
        changed(_output(classification=1)),
        "text_output: classification is not supported",
    ),
    "case-48-2-31": (
        changed(_output(classification=2**31)),
        "text_output: classification is not supported",
    ),
    "case-50-reserved": (
        message(PROMPT, parameters={"triton_x": 1}),
        "triton_x: is reserved for the server",
    ),
    "case-50-account": (
        message(PROMPT, parameters={"inflight_account": "a/1"}),
        "inflight_account: is reserved for the server",
    ),
    "case-50-final": (
        message(PROMPT, parameters={"triton_final_response": True}),
        "triton_final_response: is reserved for the server",
    ),
    "case-50-final-text": (
        changed(_final_text),
        "triton_enable_empty_final_response: allowed",
    ),
    "case-50-empty": (changed(_empty_parameter), "parameters: x: has no value"),
    "case-50-name": (message(PROMPT, parameters={"a\nb": 1}), "parameters: allowed: keys of 1"),
    "case-50-many": (changed(_parameters), "parameters: has 65 entries; allowed: up to 64"),
    "case-51-timeout": (changed(_negative_timeout), "timeout: allowed: an integer from 0"),
    "case-51-text": (changed(_text_timeout), "timeout: allowed: an integer from 0"),
    "case-51-priority": (changed(_priority), "priority: allowed: an integer from 0"),
    "case-52-sequence": (
        message(PROMPT, parameters={"sequence_id": -7}),
        "sequence_id: allowed: an integer from 0",
    ),
    "case-56-model": (INVALID_UTF8, "request: is not a message of the protocol"),
    "case-56-parameter": (
        message(PROMPT) + b"\x22\x07\x0a\x01k\x12\x02\x1a\xff",
        "request: is not a message of the protocol",
    ),
    "case-97-control": (message(PROMPT, id="a\nb"), "id: allowed: up to 256 printable"),
    "case-97-long": (message(PROMPT, id="a" * 257), "id: allowed: up to 256 printable"),
    "wire-random": (bytes(range(7, 256)), "request: is not a message of the protocol"),
    "wire-cut": (message(PROMPT)[:-3], "request: is not a message of the protocol"),
    "wire-groups": (NESTED_GROUPS, "request: is not a message of the protocol"),
    "wire-inputs": (b"\x2a\x00" * (1 << 20), "inputs: has 1048576 entries; allowed: up to 64"),
    "wire-raw": (b"\x3a\x00" * (1 << 20), "raw_input_contents: has 1048576 entries"),
    "wire-empty": (b"", "model_name: allowed"),
}
