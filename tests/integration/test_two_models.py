"""One server answers for the demo model and for Gemma, each in its own form."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma
import supervised
from inflight.deploy import repository
from supervised import SMOLLM2, Serving

END_OF_TURN = "106"  # its id, which the file does not name as an end
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = [pytest.mark.gemma, pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = str(gemma.checkpoint().path)

    def prepare(models: Path) -> None:
        shutil.rmtree(models)
        for name, model in (("small", SMOLLM2), ("gemma", path)):
            settings = {"num_blocks": 256, "num_threads": 1}
            made = repository.init(model, models, name=name, settings=settings)
            assert f"{name}_chat" in made.models

    folder = tmp_path_factory.mktemp("two")
    with supervised.serve(folder, "cpu", "--gateway-port", "0", prepare=prepare) as found:
        yield found


def completion(server: Serving, model: str, **fields: Any) -> Any:
    """Status 200 and the response of OpenAI's API."""
    connection = http.client.HTTPConnection(server.gateway, timeout=120)
    body = {"model": model, "temperature": 0, **fields}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        found = json.loads(response.read())
        assert response.status == 200, found
        return found
    finally:
        connection.close()


def test_each_answers_under_its_name(server: Serving) -> None:
    small = completion(server, "small_llm", prompt="The capital of France is", max_tokens=8)
    large = completion(server, "gemma_llm", prompt="The quick brown fox", max_tokens=8)
    assert "Paris" in small["choices"][0]["text"]
    assert "jumps over the lazy dog" in large["choices"][0]["text"]


def test_each_chats_in_its_own_form(server: Serving) -> None:
    for model in ("small_llm", "gemma_llm"):
        (choice,) = completion(server, model, messages=QUESTION, max_tokens=24)["choices"]
        text = choice["message"]["content"]
        assert text.strip() and "_turn>" not in text and "<|im_" not in text


def test_the_end_of_a_turn_ends_an_output_of_gemma(server: Serving) -> None:
    found = completion(
        server, "gemma_llm", messages=QUESTION, max_tokens=24, logit_bias={END_OF_TURN: 100}
    )
    (choice,) = found["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")


def test_gemma_s_outputs_keep_to_a_schema(server: Serving) -> None:
    properties = {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema["additionalProperties"] = False
    guide = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    fields = {"messages": QUESTION, "max_tokens": 64, "response_format": guide}
    (choice,) = completion(server, "gemma_llm", **fields)["choices"]
    found = json.loads(choice["message"]["content"])
    assert set(found) == set(properties) and found["city"] in ("Paris", "Rome")


def test_the_command_chats_with_the_model_it_names(server: Serving) -> None:
    command = [sys.executable, "-m", "inflight.cli.app", "chat", "--url", server.grpc]
    done = subprocess.run(
        [*command, "--model", "gemma", "--temperature", "0", "--max-tokens", "24"],
        input="What is the capital of France?\n/model small\nAnd of Italy?\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "model small_chat" in done.stderr
    assert len(done.stdout.strip()) > 0
