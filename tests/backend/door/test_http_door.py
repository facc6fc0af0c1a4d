"""The HTTP door in front of a scripted Triton.

The numbers are those of a catalogue of bad inputs for LLM servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jiter
import psutil
import pytest

from http_door import (
    BODY,
    EVENT,
    GENERATE,
    GET,
    LIMITS,
    Running,
    a_door,
    ask,
    head,
    post,
    receive,
    sized,
)
from inflight.deploy.file_limit import raise_file_limit
from inflight.ipc.metrics import request_counts
from otlp_collector import attributes, collecting


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with a_door(tmp_path_factory.mktemp("door")) as running:
        yield running


# case -> raw request, expected status. Nothing of it reaches Triton.
RAW = {
    "01-empty": (sized(b""), 400),
    "01-no-length": (head(), 400),
    "02-not-json": (sized(b"hello"), 400),
    "02-random": (sized(bytes(range(256))), 400),
    "02-cut": (sized(b'{"text_input": "x"'), 400),
    "02-bad-utf8": (sized(b'{"text_input": "\xff"}'), 400),
    "02-surrogate": (sized(b'{"text_input": "\\ud800"}'), 400),
    "02-trailing": (sized(BODY + b"x"), 400),
    "03-nested-1k": (sized(b'{"a":' * 1000 + b"1" + b"}" * 1000), 400),
    "03-nested-200k": (sized(b"[" * 200_000), 400),
    "03-nested-33": (sized(b'{"a":' + b"[" * 33 + b"]" * 33 + b"}"), 400),
    "04-array": (sized(b"[]"), 400),
    "04-number": (sized(b"5"), 400),
    "04-null": (sized(b"null"), 400),
    "04-string": (sized(b'"x"'), 400),
    "05-duplicate": (sized(b'{"text_input": "x", "text_input": "y"}'), 400),
    "05-duplicate-escaped": (sized(b'{"a": 1, "\\u0061": 2}'), 400),
    "06-content-length": (head(f"Content-Length: {(1 << 20) + 1}"), 413),
    "06-content-length-huge": (head("Content-Length: 99999999999999"), 413),
    "07-chunked": (
        head("Transfer-Encoding: chunked") + b"10000\r\n" + (b"x" * 65536 + b"\r\n10000\r\n") * 17,
        413,
    ),
    "09-gzip": (sized(b"\x1f\x8b", "Content-Encoding: gzip"), 415),
    "09-deflate": (sized(b"x", "Content-Encoding: deflate"), 415),
    "09-two-codings": (sized(b"x", "Content-Encoding: gzip, gzip"), 415),
    "10-broken-gzip": (sized(b"\x1f\x8bxx", "Content-Encoding: GZIP"), 415),
    "11-negative": (head("Content-Length: -5"), 400),
    "11-text": (head("Content-Length: abc"), 400),
    "11-nothing": (head("Content-Length:"), 400),
    "11-plus": (head("Content-Length: +5") + b"hello", 400),
    "11-double": (head("Content-Length: 5", "Content-Length: 6") + b"hello", 400),
    "11-list": (head("Content-Length: 5, 5") + b"hello", 400),
    "11-with-te": (head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
    "11-te-with-length": (
        head("Transfer-Encoding: chunked", "Content-Length: 5") + b"0\r\n\r\n",
        400,
    ),
    "11-te-other": (head("Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n", 400),
    "11-te-identity": (head("Transfer-Encoding: identity") + b"0\r\n\r\n", 400),
    "11-te-twice": (
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        400,
    ),
    "11-chunk-size": (head("Transfer-Encoding: chunked") + b"zz\r\nhello\r\n0\r\n\r\n", 400),
    "11-chunk-negative": (head("Transfer-Encoding: chunked") + b"-1\r\nhello\r\n0\r\n\r\n", 400),
    "11-huge": (head("Content-Length: 99999999999999999999999"), 400),
    "11-bare-lf": (b"POST /v2/models/echo/generate HTTP/1.1\nHost: x\n\n", 400),
    "11-folded": (head("X-A: b\r\n c"), 400),
    "11-space-before-colon": (head("Content-Length : 5") + b"hello", 400),
    "12-header-1-mb": (head("X-A: " + "a" * (1 << 20)), 431),
    "12-header-20-kb": (head("X-A: " + "a" * 20_000), 431),
    "12-headers-1000": (head(*(f"X-{i}: a" for i in range(1000))), 431),
    "12-headers-101": (head(*(f"X-{i}: a" for i in range(101))), 431),
    "12-url-1-mb": (head(start=GET.format("/v2/" + "a" * (1 << 20))), 431),
    "14-host-query": (head(start="GET /v2 HTTP/1.1\r\nHost: x/?a=\r\n"), 400),
    "14-host-fragment": (head(start="GET /v2 HTTP/1.1\r\nHost: x/#\r\n"), 400),
    "14-host-empty": (head(start="GET /v2 HTTP/1.1\r\nHost:\r\n"), 400),
    "14-host-twice": (head(start="GET /v2 HTTP/1.1\r\nHost: x\r\nHost: x\r\n"), 400),
    "14-host-missing": (head(start="GET /v2 HTTP/1.1\r\n"), 400),
    "14-host-user": (head(start="GET /v2 HTTP/1.1\r\nHost: a@b\r\n"), 400),
    "14-absolute": (head(start=GET.format("http://y/v2")), 400),
    "15-two-slashes": (head(start=GET.format("//v2")), 404),
    "15-slashes-inside": (head(start=GET.format("/v2//models/echo")), 404),
    "15-dots": (head(start=GET.format("/v2/models/../logging")), 404),
    "15-encoded-dots": (head(start=GET.format("/v2/models/%2e%2e/logging")), 404),
    "15-semicolon": (head(start=GET.format("/v2;x")), 404),
    "15-double-encoding": (head(start=GET.format("/v2/models/%252e%252e/config")), 404),
    "15-encoded-slash": (head(start=GET.format("/v2/models%2fecho/config")), 404),
    "15-encoded-letter": (head(start=GET.format("/v2/%6dodels/echo")), 404),
    "15-nul": (head(start=GET.format("/v2/models/a%00b/config")), 404),
    "15-trailing-slash": (head(start=GET.format("/v2/")), 404),
    "15-case": (head(start=GET.format("/V2")), 404),
    "15-backslash": (head(start=GET.format("/v2\\models")), 404),
    "15-metrics": (head(start=GET.format("/metrics")), 404),
    "15-root": (head(start=GET.format("/")), 404),
    "16-get-generate": (head(start=GET.format("/v2/models/echo/generate")), 405),
    "16-post-ready": (
        head("Content-Length: 0", start="POST /v2/health/ready HTTP/1.1\r\nHost: x\r\n"),
        405,
    ),
    "16-delete": (head(start="DELETE /v2 HTTP/1.1\r\nHost: x\r\n"), 405),
    "16-options": (head(start="OPTIONS /v2 HTTP/1.1\r\nHost: x\r\n"), 405),
    "16-head-generate": (
        head(start="HEAD /v2/models/echo/generate HTTP/1.1\r\nHost: x\r\n"),
        405,
    ),
    "16-unknown-method": (head(start="BREW /v2 HTTP/1.1\r\nHost: x\r\n"), 400),
    "16-connect": (head(start="CONNECT x:80 HTTP/1.1\r\nHost: x\r\n"), 400),
    "16-upgrade": (head("Connection: Upgrade", "Upgrade: websocket"), 400),
    "17-multipart": (sized(BODY, "Content-Type: multipart/form-data; boundary=x"), 415),
    "17-xml": (sized(BODY, "Content-Type: application/xml"), 415),
    "17-text": (sized(BODY, "Content-Type: text/plain"), 415),
    "17-form-no-json": (
        sized(b"a=b&c=d", "Content-Type: application/x-www-form-urlencoded"),
        400,
    ),
    "18-bad-version": (b"GET /v2 HTTP/3.7\r\nHost: x\r\n\r\n", 400),
    "18-http-2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "18-tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "18-garbage": (b"\x00\xff\r\n\r\n", 400),
    "18-reply": (b"HTTP/1.1 200 OK\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", RAW)
def test_bad_http(door: Running, case: str) -> None:
    request, status = RAW[case]
    before = len(door.triton.bodies)
    reply = door.answer(request)
    assert int(reply.split(b" ", 2)[1]) == status, reply
    check_error(reply)
    assert [path for path, _ in door.triton.bodies[before:] if "config" not in path] == []
    assert post(door, BODY)[0] == 200


def check_error(reply: bytes) -> None:
    """One JSON object with one sentence that names nothing of the server."""
    top, _, body = reply.partition(b"\r\n\r\n")
    assert b"application/json" in top
    if body:
        error = json.loads(body)["error"]
        assert not re.search(r"0x|Traceback|\.py|/tmp|127\.0|pid", error), error


def infer(**fields: Any) -> dict[str, Any]:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    return {"inputs": [tensor], **fields}


def tensor(datatype: str, data: Any, shape: Any = (1,), **fields: Any) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"inputs": [{"name": "t", "datatype": datatype, "shape": shape, "data": data, **fields}]}


def output(**fields: Any) -> dict[str, Any]:
    return infer(outputs=[{"name": "o", **fields}])


PROMPT = {"text_input": "x"}
LITERAL = '{"inputs":[{"name":"t","datatype":"FP32","shape":[1],"data":[%s]}]}'

# case -> route, body, what the error names
TENSORS: dict[str, tuple[str, Any, str]] = {
    "25-no-inputs": ("infer", {}, "inputs is missing"),
    "25-inputs-object": ("infer", {"inputs": {}}, "inputs: is an object"),
    "25-input-number": ("infer", {"inputs": [5]}, "inputs[0]: is an integer"),
    "25-no-name": ("infer", {"inputs": [{"datatype": "BYTES", "shape": [1]}]}, "name is missing"),
    "26-unknown-field": ("infer", infer(imputs=[]), "'imputs'"),
    "26-tensor-field": ("infer", tensor("BYTES", ["x"], extra=1), "'extra'"),
    "27-twice": ("infer", {"inputs": infer()["inputs"] * 2}, "'text_input' occurs twice"),
    "27-many": ("infer", {"inputs": infer()["inputs"] * 65}, "inputs: has 65 entries"),
    "28-dtype": ("generate", {"text_input": 5}, "text_input: has 5; allowed: strings"),
    "29-dtype-unknown": ("infer", tensor("XX", [1]), "t: datatype is unknown"),
    "29-dtype-number": ("infer", tensor(5, [1]), "t: datatype is unknown"),  # type: ignore[arg-type]
    "30-rank-99": ("infer", tensor("INT32", [1], [1] * 99), "t.shape: is wrong"),
    "30-rank-data": ("infer", tensor("INT32", [[[[[[[[[1]]]]]]]]]), "t.data: is nested too deeply"),
    "30-rank-mixed": ("infer", tensor("INT32", [[1], 2], (2,)), "mixes arrays and values"),
    "32-negative": ("infer", tensor("INT32", [1], (-1,)), "t.shape: has a size out of range"),
    "32-negative-two": ("infer", tensor("INT32", [1], (-1, -1)), "t.shape"),
    "32-float": ("infer", tensor("INT32", [1], (1.0,)), "t.shape"),
    "32-text": ("infer", tensor("INT32", [1], ("1",)), "t.shape"),
    "33-overflow": ("infer", tensor("INT32", [1], (2**62, 8)), "t.shape"),
    "33-product": ("infer", tensor("INT32", [1], (2**30, 2**30)), "t.shape: has too many"),
    "34-dim-2-40": ("infer", tensor("INT32", [1], (2**40,)), "t.shape: has a size out of range"),
    "34-dim-2-64": ("infer", tensor("INT32", [1], (2**64,)), "t.shape: has a size out of range"),
    "35-short": ("infer", tensor("INT32", [1], (3,)), "t: data has 1 elements; allowed: 3"),
    "35-long": ("infer", tensor("INT32", [1, 2]), "t: data has 2 elements; allowed: 1"),
    "35-no-data": (
        "infer",
        {"inputs": [{"name": "t", "datatype": "INT32", "shape": [1]}]},
        "t: data is missing",
    ),
    "40-two-strings": ("infer", tensor("BYTES", ["a", "b"]), "t: data has 2 elements"),
    "42-2-40": ("generate", {**PROMPT, "max_tokens": 2**40}, "max_tokens: 1099511627776 is out"),
    "42-2-31": ("generate", {**PROMPT, "max_tokens": [2**31]}, "max_tokens: 2147483648 is out"),
    "42-nested": ("generate", {**PROMPT, "parameters": {"max_tokens": 2**40}}, "parameters.max_t"),
    "42-2-64": ("generate", {**PROMPT, "seed": 2**64}, "seed: 18446744073709551616 is out of"),
    "42-negative": ("generate", {**PROMPT, "seed": -1}, "seed: -1 is out of range"),
    "42-4000-digits": (
        "generate",
        f'{{"text_input": "x", "seed": {"9" * 4000}}}'.encode(),
        "seed: a number out of range is out of range",
    ),
    "42-5000-digits": ("generate", f'{{"seed": {"9" * 5000}}}'.encode(), "body: is not valid JSON"),
    "42-parameter": ("generate", {**PROMPT, "other": 2**63}, "other: is out of range"),
    "42-infer": ("infer", tensor("INT32", [2**40]), "t.data: 1099511627776 is out of range"),
    "42-int8": ("infer", tensor("INT8", [128]), "t.data: 128 is out of range"),
    "42-uint8": ("infer", tensor("UINT8", [-1]), "t.data: -1 is out of range"),
    "42-fp32": ("infer", tensor("FP32", [1e39]), "t.data: 1e+39 is out of range"),
    "42-fp16": ("infer", tensor("FP16", [1.0]), "t.data: has 1.0; allowed: binary data"),
    "43-float": ("generate", {**PROMPT, "max_tokens": 1.5}, "max_tokens: has 1.5; allowed: int"),
    "43-whole-float": ("generate", {**PROMPT, "max_tokens": 2.0}, "max_tokens: has 2.0"),
    "43-string": ("generate", {**PROMPT, "max_tokens": "5"}, "max_tokens: has a string"),
    "43-bool": ("generate", {**PROMPT, "max_tokens": True}, "max_tokens: has true"),
    "43-null": ("generate", {**PROMPT, "max_tokens": None}, "max_tokens: has null"),
    "43-int-for-bool": ("generate", {**PROMPT, "stream": 1}, "stream: has 1; allowed: true and fa"),
    "43-hot": ("generate", {**PROMPT, "temperature": "hot"}, "temperature: has a string"),
    "43-object": ("generate", {**PROMPT, "max_tokens": {"a": 1}}, "max_tokens: is nested"),
    "43-nested": ("generate", {**PROMPT, "stop_words": [["a"]]}, "stop_words: is nested"),
    "43-infer-bool": ("infer", tensor("INT32", [True]), "t.data: has true"),
    "43-infer-float": ("infer", tensor("INT64", [1.0]), "t.data: has 1.0"),
    "43-infer-null": ("infer", tensor("BYTES", [None]), "t.data: has null"),
    "43-infer-object": ("infer", tensor("BYTES", [{}]), "t.data: has an object"),
    "44-nan": ("infer", (LITERAL % "NaN").encode(), "body: is not valid JSON"),
    "44-infinity": ("infer", (LITERAL % "-Infinity").encode(), "body: is not valid JSON"),
    "44-1e999": ("infer", (LITERAL % "1e999").encode(), "t.data: a number out of range is out"),
    "44-generate-nan": ("generate", b'{"temperature": NaN}', "body: is not valid JSON"),
    "44-generate-1e999": ("generate", b'{"temperature": 1e999}', "temperature: a number out of"),
    "45-size-negative": (
        "infer",
        {"inputs": [{"name": "t", "datatype": "INT32", "shape": [1],
                     "parameters": {"binary_data_size": -1}}]},
        "t.parameters.binary_data_size: does not fit",
    ),
    "45-size-2-40": (
        "infer",
        {"inputs": [{"name": "t", "datatype": "INT32", "shape": [1],
                     "parameters": {"binary_data_size": 2**40}}]},
        "t.parameters.binary_data_size: does not fit",
    ),
    "45-size-text": (
        "infer",
        {"inputs": [{"name": "t", "datatype": "INT32", "shape": [1],
                     "parameters": {"binary_data_size": "4"}}]},
        "t.parameters.binary_data_size: does not fit",
    ),
    "45-both": (
        "infer",
        tensor("INT32", [1], parameters={"binary_data_size": 4}),
        "t: has both data and binary_data_size",
    ),
    "46-input": (
        "infer",
        tensor("INT32", [1], parameters={"shared_memory_region": "r"}),
        "shared_memory_region: shared memory is closed",
    ),
    "46-output": ("infer", output(parameters={"shared_memory_region": "r"}), "is closed"),
    "46-output-offset": ("infer", output(parameters={"shared_memory_offset": 2**63}), "is closed"),
    "47-twice": ("infer", infer(outputs=[{"name": "o"}] * 2), "outputs: 'o' occurs twice"),
    "47-20k": ("infer", infer(outputs=[{"name": "o"}] * 20_000), "outputs: has 20000 entries"),
    "47-no-name": ("infer", infer(outputs=[{}]), "outputs[0]: name is missing"),
    "48-classification": ("infer", output(parameters={"classification": 2**31}), "is closed"),
    "48-classification-1": ("infer", output(parameters={"classification": 1}), "'classification'"),
    "48-binary-number": ("infer", output(parameters={"binary_data": 1}), "allowed: true or false"),
    "50-reserved": ("infer", infer(parameters={"triton_x": 1}), "triton_x: is reserved"),
    "50-reserved-generate": ("generate", {**PROMPT, "triton_x": 1}, "triton_x: is reserved"),
    "50-account": ("infer", infer(parameters={"inflight_account": "a/1"}), "account: is reserved"),
    "50-account-generate": (
        "generate",
        {**PROMPT, "parameters": {"inflight_account": "a/1"}},
        "inflight_account: is reserved",
    ),
    "50-object": ("infer", infer(parameters={"a": {}}), "parameters.a: is an object"),
    "50-object-generate": ("generate", {**PROMPT, "extra": {"a": {"b": 1}}}, "extra: is an object"),
    "50-many": ("infer", infer(parameters={f"p{i}": 1 for i in range(65)}), "has 65 parameters"),
    "50-many-generate": (
        "generate",
        {**PROMPT, **{f"p{i}": 1 for i in range(65)}},
        "body: has 65 parameters; allowed: up to 64",
    ),
    "50-null": ("generate", {**PROMPT, "extra": None}, "extra: is null"),
    "50-array": ("generate", {**PROMPT, "extra": [1]}, "extra: is an array"),
    "50-parameters": ("generate", {**PROMPT, "parameters": 5}, "parameters: is an integer"),
    "50-parameters-array": ("infer", infer(parameters=[]), "parameters: is an array"),
    "50-long-name": ("generate", {**PROMPT, "a" * 300: 1}, "has a bad name"),
    "50-control-name": ("generate", {**PROMPT, "a\r\nb": 1}, "body: has a bad name"),
    "50-id": ("infer", infer(id=5), "id: is an integer"),
    "51-timeout": ("infer", infer(parameters={"timeout": -5}), "parameters.timeout: is out of ra"),
    "51-timeout-text": ("infer", infer(parameters={"timeout": "5"}), "timeout: is a string"),
    "51-timeout-generate": ("generate", {**PROMPT, "timeout": -5}, "timeout: is out of range"),
    "51-priority": ("infer", infer(parameters={"priority": 2**63 - 1}), "priority: is out"),
    "51-priority-negative": ("infer", infer(parameters={"priority": -1}), "priority: is out of"),
    "52-sequence-id": ("infer", infer(parameters={"sequence_id": 2**64}), "sequence_id: is out of"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_bad_http_tensor(door: Running, case: str) -> None:
    route, body, named = TENSORS[case]
    before = len(door.triton.bodies)
    status, reply = post(door, body, f"echo/{route}")
    assert status == 400, reply
    assert named in json.loads(reply)["error"]
    assert [path for path, _ in door.triton.bodies[before:] if "config" not in path] == []


def binary(json_part: dict[str, Any], data: bytes) -> tuple[bytes, str]:
    encoded = json.dumps(json_part).encode()
    return encoded + data, str(len(encoded))


def raw_tensor(datatype: str, size: int, shape: list[int]) -> dict[str, Any]:
    fields = {"name": "t", "datatype": datatype, "shape": shape}
    return {"inputs": [{**fields, "parameters": {"binary_data_size": size}}]}


# case -> tensor, its data, what the error names
BINARY = {
    "35-short": (raw_tensor("INT32", 4, [2]), b"1234", "allowed: 8, as in shape"),
    "36-extra": (raw_tensor("INT32", 4, [1]), b"1234more", "body: has 4 bytes after the tensors"),
    "38-prefix": (raw_tensor("BYTES", 5, [1]), b"\0\0\0\x80x", "t: string 0 is longer"),
    "39-cut": (raw_tensor("BYTES", 2, [1]), b"\1\0", "t: the length of string 0 is cut off"),
    "40-two-strings": (raw_tensor("BYTES", 10, [1]), b"\1\0\0\0a" * 2, "t: has 2 strings"),
    "45-size": (raw_tensor("INT32", 8, [2]), b"1234", "does not fit the body; allowed: up to 4"),
    "19-surplus": (infer(), b"more", "body: has 4 bytes after the tensors"),
}


@pytest.mark.parametrize("case", BINARY)
def test_bad_http_binary(door: Running, case: str) -> None:
    json_part, data, named = BINARY[case]
    body, length = binary(json_part, data)
    status, reply = post(door, body, "echo/infer", Inference_Header_Content_Length=length)
    assert status == 400
    assert named in json.loads(reply)["error"]


@pytest.mark.parametrize("length", ["-5", str(2**64), "abc", "0", "99999", "1e1", "0x5"])
def test_bad_http_header_length(door: Running, length: str) -> None:
    """Case 19."""
    body = json.dumps(infer()).encode()
    status, reply = post(door, body, "echo/infer", Inference_Header_Content_Length=length)
    assert status == 400
    assert "Inference-Header-Content-Length" in reply


@pytest.mark.parametrize("version", ["-1", "abc", "1.5", "9" * 30, "+1"])
def test_bad_http_version(door: Running, version: str) -> None:
    """Case 24."""
    assert ask(door, "GET", f"/v2/models/echo/versions/{version}")[0] == 404
    assert post(door, BODY, f"echo/versions/{version}/generate")[0] == 404


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_bad_http_23_unknown_model(door: Running, route: str) -> None:
    status, reply = post(door, BODY, f"unknown/{route}")
    assert status == 404
    assert "unknown model" in reply


@pytest.mark.parametrize(
    "path",
    [
        "/v2/systemsharedmemory/status",
        "/v2/systemsharedmemory/region/r/register",
        "/v2/cudasharedmemory/region/r/unregister",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/echo/trace/setting",
        "/v2/repository/models/echo/load",
        "/v2/repository/models/echo/unload",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_rest_of_triton_is_closed(door: Running, method: str, path: str) -> None:
    status, _, reply = ask(door, method, path, b"{}" if method == "POST" else None)
    assert status == 403
    assert "closed" in json.loads(reply)["error"]


# What is served


def test_a_body_is_rebuilt(door: Running) -> None:
    """Triton reads the bytes that were checked, however the client had written them."""
    body = b'{ "text_input" : "a\\u0062\\n\\u00e9", "max_tokens": 5, "temperature": 1e0 }'
    status, reply = post(door, body)
    assert status == 200
    assert reply == '{"text_input":"ab\\né","max_tokens":5,"temperature":1.0}'


def test_nested_data_reaches_triton_flat(door: Running) -> None:
    status, reply = post(door, tensor("INT32", [[1, 2], [3, 4]], (2, 2)), "echo/infer")
    assert status == 200
    assert json.loads(reply)["inputs"][0]["data"] == [1, 2, 3, 4]


def test_binary_data_is_passed_on(door: Running) -> None:
    data = b"\1\0\0\0a" + b"\2\0\0\0bc"
    body, length = binary(raw_tensor("BYTES", len(data), [2]), data)
    status, _, reply = ask(
        door, "POST", "/v2/models/echo/infer", body, Inference_Header_Content_Length=length
    )
    assert status == 200
    assert reply.endswith(data)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/octet-stream",
                                  "application/x-www-form-urlencoded"])  # fmt: skip
def test_content_types_of_json(door: Running, kind: str) -> None:
    """curl -d sends JSON as a form."""
    assert post(door, BODY, Content_Type=kind)[0] == 200


def test_chunked_bodies_and_expect_are_served(door: Running) -> None:
    chunks = b"5\r\n" + BODY[:5] + b"\r\n" + b"%x\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\n\r\n"
    assert b" 200 OK" in door.raw(head("Transfer-Encoding: chunked") + chunks)
    with door.connect() as sock:
        sock.sendall(head(f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert b" 200 OK" in receive(sock)


def test_expect_with_a_large_body_is_refused_before_it_comes(door: Running) -> None:
    reply = door.raw(head("Content-Length: 99999999", "Expect: 100-continue"))
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in reply.lower()


def test_08_a_flood_of_one_byte_chunks_is_refused_in_flat_memory(door: Running) -> None:
    before = door.rss()
    with door.connect() as sock:
        sock.sendall(head("Transfer-Encoding: chunked"))
        with contextlib.suppress(OSError):
            for _ in range(60):
                sock.sendall(b"1\r\nx\r\n" * 30_000)
        reply = receive(sock)
    assert reply == b"" or b" 413 " in reply
    assert door.rss() - before < 16 << 20


@pytest.mark.parametrize("sent", [b"GET /", GENERATE.encode(), b"POST /v2 HTTP/1.1\r\nX-A: "])
def test_13_a_slow_head_gets_408(door: Running, sent: bytes) -> None:
    with door.connect() as sock:
        sock.sendall(sent)
        started = time.monotonic()
        reply = b""
        while not reply and time.monotonic() - started < 10:
            sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                reply = sock.recv(1000)
            with contextlib.suppress(OSError):
                sock.sendall(b"a")
        assert b" 408 " in reply
        assert time.monotonic() - started < 5


def test_13_empty_lines_do_not_keep_a_connection(door: Running) -> None:
    with door.connect() as sock:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 10:
                sock.sendall(b"\r\n")
                time.sleep(0.1)
        assert time.monotonic() - started < 6


def test_13_a_slow_body_gets_408(door: Running) -> None:
    with door.connect() as sock:
        sock.sendall(head("Content-Length: 10") + b"{")
        assert b" 408 " in receive(sock, 5.0)


def test_13_a_silent_connection_is_closed(door: Running) -> None:
    with door.connect() as sock:
        sock.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(10) == b""


def test_18_pipelined_requests_are_answered_in_order(door: Running) -> None:
    requests = b"".join(sized(b'{"text_input": "%d"}' % i) for i in range(20))
    reply = door.raw(requests)
    assert re.findall(rb'"text_input":"(\d+)"', reply) == [b"%d" % i for i in range(20)]


def test_18_what_follows_a_request_does_not_disturb_its_answer(door: Running) -> None:
    reply = door.raw(sized(BODY) + b"\x00garbage\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200 OK")
    assert b'{"text_input":"x"}' in reply
    assert b'"error"' not in reply.split(b'{"text_input":"x"}')[0]


def test_18_http_1_0_is_answered_and_closed(door: Running) -> None:
    reply = door.raw(
        head(f"Content-Length: {len(BODY)}", start=GENERATE.replace("1.1", "1.0")) + BODY
    )
    assert b" 200 OK" in reply
    assert b"connection: close" in reply.lower()


def test_head_has_no_body(door: Running) -> None:
    status, _, body = ask(door, "HEAD", "/v2")
    assert (status, body) == (200, b"")


@pytest.mark.parametrize("value", ["a" * 10_000, "other-user"])
def test_22_requests_have_ids_of_the_door(door: Running, value: str) -> None:
    _, headers, _ = ask(door, "GET", "/v2/health/ready", X_Request_Id=value)
    assert re.fullmatch("[0-9a-f]{16}", headers["x-request-id"])


@pytest.mark.parametrize("value", ["a\rX: b", "a\nX: b\x00", "\x1b[31mred", "a\x00b"])
def test_22_control_characters_in_a_header_are_refused(door: Running, value: str) -> None:
    reply = door.raw(head(f"X-Request-Id: {value}", start=GET.format("/v2")))
    assert b" 400 " in reply.split(b"\r\n")[0]


# Health


def test_probes_are_answered_from_the_health_file(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        assert ask(door, "GET", "/v2/health/ready")[0] == 200
        assert ask(door, "GET", "/v2/models/echo/ready")[0] == 200
        assert ask(door, "GET", "/v2/models/unknown/ready")[0] == 404
        door.set(is_ready=False, reason="the engine of llm restarts")
        status, headers, reply = ask(door, "GET", "/v2/health/ready")
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(reply) == {"error": "the engine of llm restarts"}
        assert ask(door, "GET", "/v2/health/live")[0] == 200
        assert ask(door, "GET", "/v2/models/echo/ready")[0] == 503
        assert post(door, BODY) == (503, '{"error":"the engine of llm restarts"}')
        door.set(is_ready=False, is_live=False)
        assert ask(door, "GET", "/v2/health/live")[0] == 503
        door.set(is_ready=True)
        assert post(door, BODY)[0] == 200
        assert not any("health" in path for path, _ in door.triton.bodies)


def test_the_index_is_that_of_the_health_file(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        door.models = ["llm"]
        door.set(is_ready=True)
        status, _, reply = ask(door, "POST", "/v2/repository/index", b"{}")
        assert status == 200
        assert json.loads(reply) == [{"name": "llm", "version": "1", "state": "READY"}]
        assert ask(door, "POST", "/v2/repository/index", b"[")[0] == 400


def test_without_a_supervisor_nothing_is_ready(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        door.is_supervised = False
        time.sleep(0.1)  # for a file that is being written
        door.health.unlink()
        time.sleep(0.2)
        assert ask(door, "GET", "/v2/health/live")[0] == 503
        assert post(door, BODY)[0] == 503


# Triton's answers


def test_events_are_passed_on(door: Running) -> None:
    status, headers, reply = ask(door, "POST", "/v2/models/stream/generate_stream", BODY)
    assert status == 200
    assert headers["content-type"] == "text/event-stream"
    assert reply == EVENT * 3


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Unable to parse 'data': attempt to access JSON non-number as double", 400),
        ("unexpected shape for input 'x' for model 'y'", 400),
        ("inference input 'x' data-type is 'INT32', but model expects 'BYTES'", 400),
        ("Request for unknown model: 'x' is not found", 404),
        ("5 requests are waiting (max_waiting is 4); retry later", 503),
        ("the engine exited while it processed this request; retry it", 503),
        ("Exceeds maximum queue size", 503),
        ("failed to allocate memory", 500),
    ],
)
def test_errors_of_triton_get_a_fitting_status(door: Running, text: str, status: int) -> None:
    found, headers, reply = ask(door, "POST", "/v2/models/blamed/generate", {"text_input": text})
    assert found == status
    assert json.loads(reply)["error"] == text
    assert ("retry-after" in headers) == (status == 503)


def test_errors_of_triton_name_nothing_of_the_server(door: Running) -> None:
    text = "failed at /opt/x/model.py:5, region triton_python_backend_shm_1, address 0x7f00aa11"
    _, reply = post(door, {"text_input": text}, "blamed/generate")
    assert not re.search(r"/opt|\.py|shm|0x", reply)


def test_full_shared_memory_is_503(door: Running) -> None:
    text = (
        "in ensemble 'chat', Failed to increase the shared memory pool size for key "
        "'triton_python_backend_shm_region_1a1f-47be' to 1048576 bytes. If you are running Triton "
        "inside docker, use '--shm-size' flag. Error: No space left on device"
    )
    status, headers, reply = ask(door, "POST", "/v2/models/blamed/generate", {"text_input": text})
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(reply)["error"] == (
        "the server has too little free shared memory for the request; retry later, or send a "
        "shorter request"
    )


def test_a_connection_lost_before_the_answer_is_503(door: Running) -> None:
    status, headers, _ = ask(door, "POST", "/v2/models/drop/generate", BODY)
    assert (status, headers["retry-after"]) == (503, "1")


def test_a_stream_whose_triton_is_lost_ends_with_an_error(door: Running) -> None:
    _, _, reply = ask(door, "POST", "/v2/models/half/generate_stream", BODY)
    first, last = reply.decode().strip().split("\n\n")
    assert first == EVENT.decode().strip()
    assert "error" in json.loads(last.removeprefix("data: "))


def test_half_an_answer_is_503(door: Running) -> None:
    assert post(door, {"text_input": "json"}, "half/generate")[0] == 503


def test_no_triton_is_503(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        door.triton.shutdown()
        door.triton.server_close()
        assert post(door, BODY)[0] == 503
        assert ask(door, "GET", "/v2/models/echo")[0] == 503


def wait_for(door: Running, num_lost: int) -> None:
    deadline = time.monotonic() + 10
    while door.triton.num_lost < num_lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("route", ["slow/generate", "slow/infer", "endless/generate_stream"])
@pytest.mark.parametrize("leave", ["close", "half-close", "pipelined"])
def test_a_client_that_leaves_closes_the_connection_to_triton(
    door: Running, route: str, leave: str
) -> None:
    before, asked = door.triton.num_lost, len(door.triton.bodies)
    with door.connect() as sock:
        body = json.dumps(infer()).encode() if "infer" in route else BODY
        request = sized(body).replace(b"echo/generate", route.encode(), 1)
        sock.sendall(request + (sized(BODY) if leave == "pipelined" else b""))
        deadline = time.monotonic() + 10
        while not any(route in path for path, _ in door.triton.bodies[asked:]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if leave == "half-close":
            sock.shutdown(socket.SHUT_WR)
            wait_for(door, before + 1)
    wait_for(door, before + 1)


def test_a_client_that_does_not_read_is_cut_off_in_bounded_memory(door: Running) -> None:
    before, rss = door.triton.num_lost, door.rss()
    with door.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"text_input": "wide"}'
        sock.sendall(sized(body).replace(b"echo/generate", b"endless/generate_stream", 1))
        wait_for(door, before + 1)
        assert door.rss() - rss < 16 << 20


# The process


def test_connections_over_the_limit_are_refused(tmp_path: Path) -> None:
    with a_door(tmp_path, limits={"max_connections": 5}) as door, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(door.connect())
        time.sleep(0.1)
        reply = door.raw(head(start=GET.format("/v2/health/live")))
        assert b" 503 " in reply
        assert b"retry-after: 1" in reply.lower()


def test_a_door_without_descriptors_recovers(tmp_path: Path) -> None:
    """Connections beyond its limit of open files are closed; later ones are served."""
    raise_file_limit()  # of this process
    limits = {**LIMITS, "max_connections": 4096, "idle_timeout_s": 60.0}
    limited = ("prlimit", "--nofile=1024:1024")
    with a_door(tmp_path, limits=limits, prefix=limited) as door, contextlib.ExitStack() as held:
        for _ in range(1200):
            held.enter_context(door.connect())
        with pytest.raises(OSError):
            ask(door, "GET", "/v2/health/live")
        held.close()
        until = time.monotonic() + 20
        while True:
            try:
                assert post(door, BODY)[0] == 200
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.1)
        assert door.process.poll() is None


def test_bodies_of_all_requests_are_bounded_together(tmp_path: Path) -> None:
    limits = {"max_buffered_bytes": 100_000}
    with a_door(tmp_path, limits=limits) as door, door.connect() as first:
        first.sendall(head("Content-Length: 90000") + b"x" * 80_000)
        time.sleep(0.2)
        assert post(door, BODY)[0] == 200
        assert post(door, b"x" * 50_000)[0] == 503
        first.close()
        time.sleep(0.2)
        assert post(door, b"x" * 50_000)[0] == 400


def test_sigterm_lets_requests_in_flight_finish(tmp_path: Path) -> None:
    with a_door(tmp_path, "--drain", "10") as door, door.connect() as sock:
        sock.sendall(sized(BODY).replace(b"echo/generate", b"endless/generate_stream", 1))
        assert sock.recv(100)
        idle = door.connect()
        door.process.send_signal(signal.SIGINT)
        door.process.send_signal(signal.SIGTERM)
        assert receive(idle) == b""
        idle.close()
        assert door.process.poll() is None
        with pytest.raises(OSError):
            door.connect()
        assert sock.recv(100)
        sock.close()
        assert door.process.wait(5) == 0


def test_sigterm_ends_what_is_not_over_in_time(tmp_path: Path) -> None:
    with a_door(tmp_path, "--drain", "1") as door, door.connect() as sock:
        sock.sendall(sized(BODY).replace(b"echo/generate", b"endless/generate_stream", 1))
        assert sock.recv(100)
        door.process.send_signal(signal.SIGTERM)
        assert door.process.wait(6) == 0


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    program = """if True:
        import os, subprocess, sys, time
        command = [sys.executable, "-m", "inflight.door.http_door", *sys.argv[1:]]
        door = subprocess.Popen([*command, "--parent", str(os.getpid())])
        print(door.pid, flush=True)
        time.sleep(60)
    """
    options = ["--listen", "127.0.0.1:0", "--upstream", "127.0.0.1:9", "--health", str(tmp_path)]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *options], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 20
    while not child.net_connections():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.wait(5)


def test_it_starts_without_heavy_imports() -> None:
    program = (
        "import sys; import inflight.door.http_door; "
        "print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_access_log_has_no_prompts(tmp_path: Path) -> None:
    with a_door(tmp_path, "--access-log") as door:
        post(door, {"text_input": "a secret"})
        ask(door, "GET", "/v2/models/%0a%1b/config")
        door.process.send_signal(signal.SIGTERM)
        assert door.process.stdout is not None
        lines = door.process.stdout.read().splitlines()
    records = [json.loads(line) for line in lines]
    assert [one["status"] for one in records] == [200, 404]
    assert "secret" not in "".join(lines)
    assert os.fspath(tmp_path) not in "".join(lines)


@pytest.mark.alone
def test_a_body_of_many_values_delays_no_other_request(tmp_path: Path) -> None:
    """Checked on the event loop, it delays probes by the time of the whole check: three to five
    times that of the parser, which does not yield."""
    body = json.dumps({"text_input": [{}] * 1_000_000}).encode()
    started = time.monotonic()
    jiter.from_json(body)
    parser_s = time.monotonic() - started
    with a_door(tmp_path, limits={}) as door:
        found: list[tuple[int, str]] = []
        sender = threading.Thread(target=lambda: found.append(post(door, body)))
        sender.start()
        delays = []
        while sender.is_alive():
            started = time.monotonic()
            assert ask(door, "GET", "/v2/health/live")[0] == 200
            delays.append(time.monotonic() - started)
        sender.join()
    assert found[0][0] == 400 and "text_input: is nested" in found[0][1]
    assert max(delays) < 2 * parser_s + 0.03


def test_requests_are_counted_by_status_and_probes_are_not(tmp_path: Path) -> None:
    counts = ("--counts", str(tmp_path / "http.requests"))
    with a_door(tmp_path, *counts) as door:
        assert post(door, {"text_input": "x"})[0] == 200
        assert post(door, b"{")[0] == 400
        assert ask(door, "GET", "/nothing")[0] == 404
        assert ask(door, "GET", "/v2/health/ready")[0] == 200
    assert request_counts.read(tmp_path, "http") == {"200": 1, "400": 1, "404": 1}


def test_spans_reach_the_collector(tmp_path: Path) -> None:
    with collecting() as collector:
        with a_door(tmp_path, "--otlp-endpoint", collector.url) as door:
            assert post(door, {"text_input": "xyzzy"})[0] == 200
            door.process.terminate()
            assert door.process.wait(20) == 0
        (span,) = collector.wait_for(1)
    found = attributes(span)
    assert found["gen_ai.request.model"] == "echo" and found["inflight.status"] == "200"
    assert b"xyzzy" not in b"".join(collector.bodies)
