"""Requests that the HTTP door refuses, by catalogue number and what is wrong."""

from __future__ import annotations

import json
from typing import Any

from http_door import BODY, GET, head, sized

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
