"""Runs unmodified clients and tests of public backends against servers of the layouts.

    python tests/compat/run.py --checkout DIR [--checkout DIR ...] [--write]

DIR is a checkout of triton-inference-server/vllm_backend, or of tensorrtllm_backend at a version
that has inflight_batcher_llm/client (0.19 or earlier). The scripts run in a copy. Some of them have
the address localhost:8001 and the model vllm_opt fixed: those need that port. It ends with a table
of clients, layouts and results, which --write writes to docs/reference/compatibility.md; status 1
if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from failpoint import failpoint
from supervised import Serving, serve

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
HEADER = """# Compatibility

Unmodified clients and tests of vllm_backend and of tensorrtllm_backend 0.19, run by
`tests/compat/run.py --write` against `inflight serve`: with the small model in layout vllm, and the
echo engine in layout tensorrtllm.
"""
FOOTER = """The clients of pytriton 0.7 run as tests: DecoupledModelClient in
`tests/integration/test_layout_vllm.py`; ModelClient, AsyncioModelClient and FuturesModelClient in
`tests/integration/test_unary.py`.

Not run: accuracy_test.py (needs vLLM itself); vllm_backend_test.py, vllm_metrics_test.py and the
rest of additional_outputs_test.py and enabled_stream_test.py (expect outputs of OPT-125m, or the
text of an error); request_cancellation_test.py (reads vLLM's log); check_health_test.py (lists the
model repository, which `inflight serve` restricts); the tests of LoRA and of several GPUs; and
end_to_end_test.py (needs a data set).
"""
PORT = 8001
TIMEOUT_S = 300
IDS = [504, 3575, 282, 905, 600, 700, 800, 900]
# Of 1458 combinations of its flags. Not return_finish_reason, nor return_logprobs with logprobs:
# they expect 16 tokens, as OPT-125m gives, and the small model ends earlier.
COMBINATIONS = (
    "True-True-None-2-True-None",
    "True-True-True-None-True-False",
    "None-None-None-None-None-None",
    "False-False-False-0-False-False",
)


@dataclass(frozen=True)
class Script:
    """A run of a script.

    Attributes:
        name: for the table.
        file: in the checkout.
        arguments: @grpc@ is the server's address.
        expected: text of its output if it passes, besides the exit status 0.
        needs_port: whether it has the address and the model of the server fixed.
        is_pytest: run it by pytest.
    """

    name: str
    file: str
    arguments: tuple[str, ...] = ()
    expected: str = ""
    needs_port: bool = False
    is_pytest: bool = False


_SAMPLE = ("-u", "@grpc@", "-m", "vllm_opt", "--input-prompts", "prompts.txt")
VLLM = (
    Script("samples/client.py", "samples/client.py", _SAMPLE, "PASS: vLLM example"),
    Script(
        "samples/client.py, streaming",
        "samples/client.py",
        (*_SAMPLE, "--streaming-mode", "--exclude-inputs-in-outputs"),
        "PASS: vLLM example",
    ),
    Script(
        "additional_outputs_test.py, 8 combinations of flags",
        "ci/L0_additional_outputs_vllm/additional_outputs_test.py",
        ("-k", " or ".join(COMBINATIONS)),
        needs_port=True,
        is_pytest=True,
    ),
    Script(
        "enabled_stream_test.py, several prompts",
        "ci/L0_backend_vllm/enabled_stream/enabled_stream_test.py",
        ("VLLMTritonStreamTest.test_vllm_model_enabled_stream",),
        needs_port=True,
    ),
)

_END_TO_END = "inflight_batcher_llm/client/end_to_end_grpc_client.py"
_TEXT = ("-u", "@grpc@", "-p", "one two three four", "-o", "4", "--end-id", "2", "--pad-id", "2")
# The engine repeats the prompt.
_CHECKED = ("--check-outputs", "--expected-outputs", '["one two three four"]')
_IDS_CLIENT = "inflight_batcher_llm/client/inflight_batcher_llm_client.py"
_IDS = (
    *("-u", "@grpc@", "--input-tokens-csv", "input.csv", "--output-tokens-csv", "output.csv"),
    *("--request-output-len", str(len(IDS)), "--pad-id", "2", "--check-output"),
)
TENSORRTLLM = (
    *(
        Script(f"end_to_end_grpc_client.py, {model}", _END_TO_END, (*_TEXT, "--model-name", model))
        for model in ("ensemble", "tensorrt_llm_bls")
    ),
    Script("end_to_end_grpc_client.py, output", _END_TO_END, (*_TEXT, *_CHECKED)),
    Script("end_to_end_grpc_client.py, streaming", _END_TO_END, (*_TEXT, *_CHECKED, "-S")),
    Script(
        "end_to_end_grpc_client.py, options",
        _END_TO_END,
        (
            *(
                *_TEXT,
                "-S",
                "--stop-words",
                " four",
                "--bad-words",
                "hello",
                "--temperature",
                "0.5",
            ),
            *("--repetition-penalty", "1.1", "--frequency-penalty", "0.1"),
            *("--return-log-probs", "--embedding-bias-words", "hello"),
            *("--embedding-bias-weights", "1.5"),
        ),
    ),
    Script(
        "end_to_end_grpc_client.py, 2 sequences",
        _END_TO_END,
        (*_TEXT, *_CHECKED, "--num-return-sequences", "2"),
    ),
    Script("inflight_batcher_llm_client.py, streaming", _IDS_CLIENT, (*_IDS, "-S")),
    Script(
        "inflight_batcher_llm_client.py, stop request",
        _IDS_CLIENT,
        (
            *("-u", "@grpc@", "--input-tokens-csv", "input.csv", "-S", "--request-id", "1"),
            *("--request-output-len", "1500", "--stop-after-ms", "300"),
        ),
        "cancellation response",
    ),
    Script(
        "inflight_batcher_llm_client.py, cancel",
        _IDS_CLIENT,
        (
            *("-u", "@grpc@", "--input-tokens-csv", "input.csv", "-S", "--request-id", "1"),
            *("--request-output-len", "1500", "--stop-after-ms", "300"),
            "--stop-via-request-cancel",
        ),
        "Request is cancelled",
    ),
)
UNARY = (Script("inflight_batcher_llm_client.py, unary", _IDS_CLIENT, _IDS),)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, action="append", required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results: list[tuple[str, str, str]] = []
    for checkout in arguments.checkout:
        for layout, scripts, unary in _suites(checkout):
            results += _run_suite(checkout, layout, scripts, unary)
    rows = [("Client", "Layout", "Result"), ("---", "---", "---"), *results]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    print(f"\n{table}")
    if arguments.write:
        PAGE.write_text(f"{HEADER}\n{table}\n{FOOTER}")
    return int(any(result.startswith("failed") for _, _, result in results))


def _suites(checkout: Path) -> list[tuple[str, tuple[Script, ...], bool]]:
    if (checkout / VLLM[0].file).is_file():
        return [("vllm", VLLM, False)]
    if (checkout / _END_TO_END).is_file():
        return [("tensorrtllm", TENSORRTLLM, False), ("tensorrtllm", UNARY, True)]
    raise SystemExit(f"{checkout}: has no clients of vllm_backend or tensorrtllm_backend")


def _run_suite(
    checkout: Path, layout: str, scripts: tuple[Script, ...], unary: bool
) -> list[tuple[str, str, str]]:
    title = f"{layout} --unary" if unary else layout
    with (
        tempfile.TemporaryDirectory(prefix="compat-") as folder,
        _server(Path(folder, "server"), layout, unary) as serving,
    ):
        copy = Path(folder, "checkout")
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
        return [(one.name, title, _run(one, copy, serving)) for one in scripts]


@contextlib.contextmanager
def _server(folder: Path, layout: str, unary: bool) -> Iterator[Serving]:
    def prepare(models: Path) -> None:
        if layout == "vllm":
            (models / "vllm_model").rename(models / "vllm_opt")
        for path in models.glob("*/config.pbtxt") if unary else ():
            path.write_text(path.read_text().replace("decoupled: true", "decoupled: false"))

    folder.mkdir()
    port = str(PORT) if layout == "vllm" and _is_free(PORT) else "0"
    device = "cpu" if layout == "vllm" else "echo"
    options = ("--grpc-port", port)
    # Slower than the clients that cancel.
    with (
        failpoint("slow", 5) if device == "echo" else contextlib.nullcontext(),
        serve(folder, device, *options, prepare=prepare, layout=layout) as serving,
    ):
        yield serving


def _run(script: Script, checkout: Path, serving: Serving) -> str:
    if script.needs_port and not serving.grpc.endswith(f":{PORT}"):
        return f"not run: port {PORT} is in use"
    path = checkout / script.file
    for name, ids in (("input.csv", IDS), ("output.csv", IDS + IDS)):
        (path.parent / name).write_text(",".join(map(str, ids)))
    runner = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if script.is_pytest else []
    arguments = [one.replace("@grpc@", serving.grpc) for one in script.arguments]
    try:
        done = subprocess.run(
            [sys.executable, *runner, path.name, *arguments],
            cwd=path.parent,
            timeout=TIMEOUT_S,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return f"failed: not finished after {TIMEOUT_S} s"
    # The clients print an error of the server, and go on.
    is_clean = "Received an error from server" not in done.stdout
    if done.returncode == 0 and is_clean and script.expected in done.stdout:
        return "passed"
    print(f"{script.name}:\n{done.stdout[-3000:]}", file=sys.stderr)
    return f"failed: status {done.returncode}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


if __name__ == "__main__":
    sys.exit(main())
