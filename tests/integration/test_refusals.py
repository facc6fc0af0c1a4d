"""Any invalid request yields an error for its sender and does not harm the server.

If a client requests status codes, tritonserver 2.51 can crash on an error that comes too soon after
its request (see triton/errors.py). So a plain client requests them here, on one channel. The
server has just started and runs on one core, where it crashed soonest: within 15 rejected requests,
by an ensemble's first step, by a later step, or by a model that was called directly. The statuses
are those of the version in which it crashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

import long_results
import small_checkpoint
from serving import CANARY, Triton, serve

pytestmark = pytest.mark.integration

STATUS_CODES = {"triton_grpc_error": "true"}
MAX_PROMPT_BYTES = 4096
SIDE_BY_SIDE = 16

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content == "refuse" %}{{ raise_exception("no such talk") }}{% endif -%}
{%- if message.content == "fail" %}{{ 1 // 0 }}{% endif -%}
{%- if message.content == "grow" %}{{ "x" * 10000000 }}{% endif -%}
<|im_start|>{{ message.role }}
{{ message.content | lower }}<|im_end|>
{% endfor -%}
"""


@dataclass(frozen=True)
class Kind:
    """A request to `model` that is rejected, and the error text."""

    model: str
    inputs: dict[str, list[Any]]
    message: str


def prompt(text: bytes, message: str) -> Kind:
    return Kind(
        "generate", {"text_input": [text]}, f"in ensemble 'generate', text_input: {message}"
    )


def chat(text: str | bytes, message: str) -> Kind:
    encoded = text if isinstance(text, bytes) else text.encode()
    return Kind("chat", {"messages": [encoded]}, f"in ensemble 'chat', messages{message}")


def user_message(content: str, message: str) -> Kind:
    return chat(json.dumps([{"role": "user", "content": content}]), message)


MANY = f"{MAX_PROMPT_BYTES + 1} bytes are too many; allowed: {MAX_PROMPT_BYTES}"
PARAMETER = "(the parameter max_prompt_bytes of the tokenizer's config.pbtxt)"
ALLOWED = "allowed: an array of 1 to 512 objects with role and content"
CONTENT = 'allowed: a string, or an array of {"type": "text", "text": string}'
ROLES = "system, developer, user, assistant, tool"

# Each group has a fresh server.
KINDS = {
    "generate": {
        "empty": prompt(b"", "is empty; allowed: at least one character"),
        "missing": Kind("generate", {}, "in ensemble 'generate', text_input: is missing"),
        "utf-8": prompt(b"ok\xff\xfe", "is not valid UTF-8 (at byte 2)"),
        "too long": prompt(b"x" * (MAX_PROMPT_BYTES + 1), f"{MANY} {PARAMETER}"),
    },
    "chat": {
        "empty": chat("", ": is empty; allowed: at least one character"),
        "missing": Kind("chat", {}, "in ensemble 'chat', messages: is missing"),
        "utf-8": chat(b"[\xff]", ": is not valid UTF-8 (at byte 1)"),
        "too long": chat("x" * (MAX_PROMPT_BYTES + 1), f": {MANY} {PARAMETER}"),
        "not JSON": chat(
            "[",
            f": not valid JSON (Expecting value: line 1 column 2 (char 1)); {ALLOWED}",
        ),
        "no list": chat("{}", f": an object; {ALLOWED}"),
        "no messages": chat("[]", f": 0 messages; {ALLOWED}"),
        "no role": chat(
            '[{"content": "x"}]', "[0]: role is missing; allowed: an object with role and content"
        ),
        "unknown role": chat(
            '[{"role": "wizard", "content": "x"}]', f"[0].role: 'wizard'; allowed: {ROLES}"
        ),
        "unknown key": chat(
            '[{"role": "user", "content": "x", "colour": "y"}]',
            "[0]: unknown key 'colour'; allowed: role, content, name, tool_calls, tool_call_id, "
            "reasoning_content, reasoning",
        ),
        "no content": chat(
            '[{"role": "user", "content": null}]',
            f"[0].content: null; {CONTENT}; null only of an assistant with tool_calls or "
            "reasoning_content",
        ),
        "surrogate": chat(
            '[{"role": "user", "content": "\\ud800"}]',
            "[0].content: lone surrogate at character 0; allowed: text that is valid in UTF-8",
        ),
        "template refuses": user_message(
            "refuse", ": the model's chat template rejected the messages: no such talk"
        ),
        "template fails": user_message(
            "fail", ": the model's chat template failed on the messages (ZeroDivisionError)"
        ),
        "template out of bounds": user_message(
            "grow",
            ": the model's chat template produces a text that is too long; "
            "allowed: 1048576 characters",
        ),
        "template makes a marker": user_message(
            "<|IM_END|>",
            ": with this text the model's chat template would produce additional special tokens",
        ),
    },
    "other steps and direct calls": {
        "top_k": Kind(
            "generate",
            {"text_input": [b"x"], "top_k": [-7]},
            "in ensemble 'generate', top_k: -7 is out of range; allowed: [-1, 2147483647]",
        ),
        "prompt and top_k": Kind(  # the tokenizer comes first
            "generate",
            {"text_input": [b""], "top_k": [-7]},
            "in ensemble 'generate', text_input: is empty; allowed: at least one character",
        ),
        "llm": Kind(
            "llm", {"input_ids": []}, "input_ids: the prompt has no tokens; allowed: at least 1"
        ),
        "tokenizer": Kind(
            "tokenizer",
            {"text_input": [b""]},
            "text_input: is empty; allowed: at least one character",
        ),
        "chat_tokenizer": Kind(
            "chat_tokenizer", {"messages": [b"[]"]}, f"messages: 0 messages; {ALLOWED}"
        ),
        "detokenizer": Kind(
            "detokenizer",
            {"detokenize_ids": [[1]], "detokenize_state": [[5]]},
            "detokenize_state: has 1 values; allowed: 6 for each output",
        ),
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose chat template rejects some messages."""
    folder = tmp_path_factory.mktemp("checkpoint")
    small_checkpoint.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def one_core(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Triton]:
    """A fresh server on one core."""

    def prepare(models: Path) -> None:
        path = models / "llm" / "1" / "engine.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model": str(checkpoint)}))
        for name in ("tokenizer", "chat_tokenizer"):
            with (models / name / "config.pbtxt").open("a") as config:
                config.write(
                    'parameters { key: "max_prompt_bytes" '
                    f'value {{ string_value: "{MAX_PROMPT_BYTES}" }} }}\n'
                )

    with contextlib.contextmanager(serve)(
        tmp_path_factory.mktemp("refusals"), "echo", prepare
    ) as server:
        # Afterwards, as it loads twice as fast on two.
        one = {min(os.sched_getaffinity(0))}
        tritonserver = psutil.Process(server.server.pid)
        for process in (tritonserver, *tritonserver.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, one)
        yield server


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    """The refusals of the full counts."""
    yield from long_results.collected("refusals", "refusals")


def infer_input(name: str, values: list[Any]) -> Any:
    strings = name in ("text_input", "messages")
    wide = name == "detokenize_state"
    array = np.array(values, object if strings else np.int64 if wide else np.int32)
    datatype = "BYTES" if strings else "INT64" if wide else "INT32"
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


async def answer_to(client: Any, kind: Kind) -> tuple[str, str]:
    """Status and text of the answer to one request on a stream of its own."""
    inputs = [infer_input(name, values) for name, values in kind.inputs.items()]

    async def messages() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": kind.model, "inputs": inputs}

    try:
        stream = client.stream_infer(messages(), stream_timeout=60, headers=STATUS_CODES)
        async for _, error in stream:
            return "OK", str(error)
        return "OK", "nothing"
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details()


async def ask(address: str, kind: Kind, count: int, side_by_side: int) -> Counter[tuple[str, str]]:
    """The answers to `count` requests on one channel."""
    answers: Counter[tuple[str, str]] = Counter()
    left = iter(range(count))
    async with triton_aio.InferenceServerClient(address) as client:

        async def one_after_another() -> None:
            for _ in left:
                answers[await answer_to(client, kind)] += 1

        await asyncio.gather(*(one_after_another() for _ in range(side_by_side)))
    return answers


@pytest.mark.parametrize(
    ("one_core", "kind"),
    [
        pytest.param(group, kind, id=f"{group}: {name}")
        for group, kinds in KINDS.items()
        for name, kind in kinds.items()
    ],
    indirect=["one_core"],
    scope="module",
)
@pytest.mark.parametrize(
    "count", [100, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_a_refusal_costs_an_error_and_never_the_server(
    request: pytest.FixtureRequest,
    one_core: Triton,
    results: list[dict[str, Any]],
    kind: Kind,
    count: int,
) -> None:
    num_alone = count // 20
    started = time.monotonic()
    answers = asyncio.run(ask(one_core.grpc, kind, num_alone, side_by_side=1))
    answers += asyncio.run(ask(one_core.grpc, kind, count - num_alone, SIDE_BY_SIDE))
    seconds = time.monotonic() - started
    assert answers == {("INVALID_ARGUMENT", kind.message): count}
    assert one_core.canary() == CANARY
    one_core.wait_until_idle()
    if request.node.get_closest_marker("long"):
        results.append(
            {
                "refused": request.node.callspec.id.rpartition(": ")[2],
                "model": kind.model,
                "refusals": count,
                "one_after_another": num_alone,
                "status": "INVALID_ARGUMENT",
                "text": kind.message,
                "seconds": round(seconds, 1),
            }
        )
