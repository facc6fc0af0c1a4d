"""The messages of the KServe v2 and gRPC health protocols, as far as the door looks at them.

They are built from tables, in a pool of their own: tritonclient's generated classes would import
numpy, and the door needs other views of the same bytes (`Outline`, `StreamResponse`). All names and
numbers are those of Triton's grpc_service.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inflight.door"
_TYPES = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _TYPES.TYPE_BOOL,
    "int32": _TYPES.TYPE_INT32,
    "int64": _TYPES.TYPE_INT64,
    "uint32": _TYPES.TYPE_UINT32,
    "uint64": _TYPES.TYPE_UINT64,
    "float": _TYPES.TYPE_FLOAT,
    "double": _TYPES.TYPE_DOUBLE,
    "string": _TYPES.TYPE_STRING,
    "bytes": _TYPES.TYPE_BYTES,
}
# A type is a scalar, a message of this table, `*` for repeated, or `map` for parameters by name.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Contents": {
        "bool_contents": (1, "*bool"),
        "int_contents": (2, "*int32"),
        "int64_contents": (3, "*int64"),
        "uint_contents": (4, "*uint32"),
        "uint64_contents": (5, "*uint64"),
        "fp32_contents": (6, "*float"),
        "fp64_contents": (7, "*double"),
        "bytes_contents": (8, "*bytes"),
    },
    "Input": {
        "name": (1, "string"),
        "datatype": (2, "string"),
        "shape": (3, "*int64"),
        "parameters": (4, "map"),
        "contents": (5, "Contents"),
    },
    "Output": {"name": (1, "string"), "parameters": (2, "map")},
    "InferRequest": {
        "model_name": (1, "string"),
        "model_version": (2, "string"),
        "id": (3, "string"),
        "parameters": (4, "map"),
        "inputs": (5, "*Input"),
        "outputs": (6, "*Output"),
        "raw_input_contents": (7, "*bytes"),
    },
    # An InferRequest whose parts stay bytes: two bytes of input would become 80 bytes of message.
    "Outline": {
        "parameters": (4, "*bytes"),
        "inputs": (5, "*bytes"),
        "outputs": (6, "*bytes"),
        "raw_input_contents": (7, "*bytes"),
    },
    "RequestId": {"id": (3, "string")},
    "InferResponse": {"id": (3, "string"), "parameters": (4, "map"), "outputs": (5, "*bytes")},
    "StreamResponse": {"error_message": (1, "string"), "infer_response": (2, "InferResponse")},
    # Responses about a model, as far as they name it.
    "Named": {"name": (1, "string")},
    "ModelMetadata": {"name": (1, "string"), "versions": (2, "*string")},
    "ModelConfig": {"config": (1, "Named")},
    "ModelStatistics": {"model_stats": (1, "*Named")},
    "NamedResponse": {"model_name": (1, "string")},
    "NamedStreamResponse": {"error_message": (1, "string"), "infer_response": (2, "NamedResponse")},
    # Of a model, or of a repository in the index.
    "NameRequest": {"name": (1, "string"), "version": (2, "string")},
    "IndexRequest": {"repository_name": (1, "string"), "ready": (2, "bool")},
    "IndexEntry": {"name": (1, "string"), "version": (2, "string"), "state": (3, "string")},
    "IndexResponse": {"models": (1, "*IndexEntry")},
    "EmptyRequest": {},
    "ReadyResponse": {"ready": (1, "bool")},
    "HealthRequest": {"service": (1, "string")},
    "HealthResponse": {"status": (1, "int32")},  # an enum, which has the same wire format
}
# Alternatives of InferParameter.
_PARAMETER = {
    "bool_param": (1, "bool"),
    "int64_param": (2, "int64"),
    "string_param": (3, "string"),
    "double_param": (4, "double"),
    "uint64_param": (5, "uint64"),
}


def _declare_parameter(file: descriptor_pb2.FileDescriptorProto) -> None:
    message = file.message_type.add(name="Parameter")
    message.oneof_decl.add(name="choice")
    for name, (number, kind) in _PARAMETER.items():
        message.field.add(
            name=name,
            number=number,
            type=_SCALARS[kind],
            label=_TYPES.LABEL_OPTIONAL,
            oneof_index=0,
        )


def _declare_map(message: descriptor_pb2.DescriptorProto) -> str:
    """Declare the entries of the map `parameters`; returns their type."""
    entry = message.nested_type.add(name="ParametersEntry")
    entry.options.map_entry = True
    optional = _TYPES.LABEL_OPTIONAL
    entry.field.add(name="key", number=1, type=_TYPES.TYPE_STRING, label=optional)
    entry.field.add(
        name="value",
        number=2,
        type=_TYPES.TYPE_MESSAGE,
        type_name=f".{_PACKAGE}.Parameter",
        label=optional,
    )
    return f".{_PACKAGE}.{message.name}.ParametersEntry"


def _declare(file: descriptor_pb2.FileDescriptorProto, name: str) -> None:
    message = file.message_type.add(name=name)
    for field_name, (number, kind) in _MESSAGES[name].items():
        field = message.field.add(name=field_name, number=number)
        repeated = kind == "map" or kind.startswith("*")
        field.label = _TYPES.LABEL_REPEATED if repeated else _TYPES.LABEL_OPTIONAL
        kind = kind.removeprefix("*")
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
            continue
        field.type = _TYPES.TYPE_MESSAGE
        field.type_name = _declare_map(message) if kind == "map" else f".{_PACKAGE}.{kind}"


def _classes() -> dict[str, Any]:
    # proto3 checks that strings are UTF-8, as Triton's parser does.
    file = descriptor_pb2.FileDescriptorProto(
        name="inflight/door.proto", package=_PACKAGE, syntax="proto3"
    )
    _declare_parameter(file)
    for name in _MESSAGES:
        _declare(file, name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {}
    for name in _MESSAGES:
        descriptor = pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
        found[name] = message_factory.GetMessageClass(descriptor)
    return found


_CLASSES = _classes()
InferRequest = _CLASSES["InferRequest"]
Outline = _CLASSES["Outline"]
RequestId = _CLASSES["RequestId"]
StreamResponse = _CLASSES["StreamResponse"]
ModelMetadata = _CLASSES["ModelMetadata"]
ModelConfig = _CLASSES["ModelConfig"]
ModelStatistics = _CLASSES["ModelStatistics"]
NamedResponse = _CLASSES["NamedResponse"]
NamedStreamResponse = _CLASSES["NamedStreamResponse"]
NameRequest = _CLASSES["NameRequest"]
IndexRequest = _CLASSES["IndexRequest"]
IndexResponse = _CLASSES["IndexResponse"]
EmptyRequest = _CLASSES["EmptyRequest"]
ReadyResponse = _CLASSES["ReadyResponse"]
HealthRequest = _CLASSES["HealthRequest"]
HealthResponse = _CLASSES["HealthResponse"]
