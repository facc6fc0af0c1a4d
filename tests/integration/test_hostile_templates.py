"""Behind a real tritonserver, an untrusted checkpoint fails its own requests only."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tokenizers

import small_checkpoint
from kserve import Refused, generate
from serving import Triton, serve

# Less than a second if the machine has nothing else to do. Some requests may be delayed.
SOON_S = 5.0

pytestmark = pytest.mark.integration

# Each depends on the message, or Jinja would compute it when it compiles the template.
BOMBS = {
    "sum": "{{ ([[1] * 1000] * (100000 + n)) | sum(start=[]) | length }}",
    "format": "{{ '%1000000000d' | format(n) }}",
    "replace": "{{ ('a' * 1000000 * n) | replace('a', 'b' * 1000000) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99) %}{{ 'a' * 100000 * n }}{% endfor %}",
}
TEMPLATE = (
    "{% for message in messages %}{% set n = message.content | length %}"
    + "".join(
        f"{{% if message.content == '{name}' %}}{bomb}{{% endif %}}" for name, bomb in BOMBS.items()
    )
    + "[{{ message.content }}]{% endfor %}"
)
EXPANDED = "\u2318"
"""A character that the tokenizer's normalizer makes a megabyte of."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    small_checkpoint.write(checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    path = str(checkpoint / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.normalizer = tokenizers.normalizers.Replace(EXPANDED, "b" * (1 << 20))
    backend.save(path)

    def prepare(models: Path) -> None:
        settings = models / "llm" / "1" / "engine.json"
        read = json.loads(settings.read_text())
        settings.write_text(json.dumps(read | {"model": str(checkpoint)}))

    yield from serve(tmp_path_factory.mktemp("hostile"), "echo", prepare)


def chat(server: Triton, content: str) -> str:
    messages = json.dumps([{"role": "user", "content": content}])
    answer = generate(server.http, "chat", messages=messages, max_tokens=16)
    return str(answer["text_output"])


def stub_memory(server: Triton) -> dict[int, int]:
    """pid -> bytes of the stubs; their sandboxes are children of theirs."""
    return {
        process.pid: process.memory_info().rss - process.memory_info().shared
        for process in psutil.Process(server.server.pid).children()
    }


def check_canaries(server: Triton) -> None:
    assert chat(server, "Still here.") == "[Still here.]"
    assert server.canary() == "The canary sings."


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_a_template_is_refused(server: Triton, name: str) -> None:
    check_canaries(server)
    before = stub_memory(server)
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(Refused, match="messages: the model's chat template"):
            chat(server, name)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < SOON_S
    after = stub_memory(server)
    assert set(after) == set(before)
    assert all(after[pid] - before[pid] < 20 << 20 for pid in before)
    check_canaries(server)


def test_a_bomb_in_a_tokenizer_is_refused(server: Triton) -> None:
    check_canaries(server)
    before = stub_memory(server)
    seconds: list[float] = []
    while not seconds or (seconds[-1] >= SOON_S and len(seconds) < 3):
        started = time.monotonic()
        with pytest.raises(Refused, match=r"text_input: the text (takes|needs)"):
            generate(server.http, "generate", text_input=EXPANDED * 1000, max_tokens=1)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < SOON_S
    assert set(stub_memory(server)) == set(before)
    check_canaries(server)


def test_prompts_do_not_wait_for_a_bomb_in_a_template(server: Triton) -> None:
    ended = threading.Event()

    def bombs() -> None:
        while not ended.is_set():
            with pytest.raises(Refused):
                chat(server, "loops")

    thread = threading.Thread(target=bombs)
    thread.start()
    try:
        seconds = []
        for _ in range(20):
            started = time.monotonic()
            assert server.canary() == "The canary sings."
            seconds.append(time.monotonic() - started)
        assert sorted(seconds)[10] < 1.0
    finally:
        ended.set()
        thread.join()
    check_canaries(server)
