"""Runs unmodified clients and tests of public backends against servers of the layouts.

    python tests/compat/run.py --checkout DIR [--checkout DIR ...] [--write]

DIR is a checkout of triton-inference-server/vllm_backend, or of tensorrtllm_backend at a version
that has inflight_batcher_llm/client (0.19 or earlier). The scripts run in a copy. Those of
vllm_backend have the addresses localhost:8001 and localhost:8002 and the model vllm_opt fixed, so
these ports must be free. It ends with a table of clients, layouts and results, which --write writes
to docs/reference/compatibility.md; status 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import compatibility_page
import tiny
from compatibility_page import Row
from failpoint import failpoint
from inflight.checkpoint.locate import locate
from inflight.text.tokenizer import export
from supervised import SMOLLM2, Serving, serve

PORT, METRICS_PORT = 8001, 8002
TIMEOUT_S = 600
IDS = [504, 3575, 282, 905, 600, 700, 800, 900]


@dataclass(frozen=True)
class Script:
    """A run of a script.

    Attributes:
        name: for the table.
        file: in the checkout.
        arguments: @grpc@ is the server's address.
        expected: text of its output if it passes, besides the exit status 0.
        is_pytest: run it by pytest.
        lacking: for the table.
        log: the file beside it in which it looks for the server's log.
    """

    name: str
    file: str
    arguments: tuple[str, ...] = ()
    expected: str = ""
    is_pytest: bool = False
    lacking: str = ""
    log: str = ""


@dataclass(frozen=True)
class Suite:
    """Scripts that share a server.

    Attributes:
        title: the layout and options, for the table.
        layout, unary: of the model repository.
        device: `cpu` runs the small model, `random` one of random weights, `echo` repeats prompts.
        options: of `inflight serve`.
        scripts: in this order.
    """

    title: str
    layout: str
    device: str
    scripts: tuple[Script, ...]
    options: tuple[str, ...] = ()
    unary: bool = False


_SAMPLE = ("-u", "@grpc@", "-m", "vllm_opt", "--input-prompts", "prompts.txt")
VLLM = (
    Script(
        "request_cancellation_test.py",
        "ci/L0_backend_vllm/request_cancellation/request_cancellation_test.py",
        log="request_cancellation_server.log",
    ),
    Script("samples/client.py", "samples/client.py", _SAMPLE, "PASS: vLLM example"),
    Script(
        "samples/client.py, streaming",
        "samples/client.py",
        (*_SAMPLE, "--streaming-mode", "--exclude-inputs-in-outputs"),
        "PASS: vLLM example",
    ),
    Script(
        "enabled_stream_test.py, several prompts",
        "ci/L0_backend_vllm/enabled_stream/enabled_stream_test.py",
        ("VLLMTritonStreamTest.test_vllm_model_enabled_stream",),
    ),
    Script(
        "enabled_stream_test.py, exclude_input_in_output_false",
        "ci/L0_backend_vllm/enabled_stream/enabled_stream_test.py",
        ("VLLMTritonStreamTest.test_vllm_model_enabled_stream_exclude_input_in_output_false",),
    ),
    Script(
        "vllm_metrics_test.py, no metrics unless enabled",
        "ci/L0_backend_vllm/metrics_test/vllm_metrics_test.py",
        ("VLLMTritonMetricsTest.test_vllm_metrics_disabled",),
    ),
)
GUARDED = (
    Script(
        "check_health_test.py, test_vllm_is_healthy",
        "ci/L0_check_health_vllm/check_health_test.py",
        ("-k", "test_vllm_is_healthy"),
        is_pytest=True,
        lacking="needs `--grpc-guard`: tritonserver's own index is restricted with model control",
    ),
)
ENDLESS = (
    Script(
        "vllm_metrics_test.py, test_vllm_metrics",
        "ci/L0_backend_vllm/metrics_test/vllm_metrics_test.py",
        ("VLLMTritonMetricsTest.test_vllm_metrics",),
        lacking="expects the counts of OPT-125m's tokenizer: run with one that gives the same",
    ),
    Script(
        "additional_outputs_test.py, 1458 combinations of flags",
        "ci/L0_additional_outputs_vllm/additional_outputs_test.py",
        expected="1458 passed",
        is_pytest=True,
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


SUITES = {
    "vllm_backend": (
        Suite("vllm", "vllm", "cpu", VLLM, ("--metrics-port", str(METRICS_PORT))),
        Suite("vllm --grpc-guard", "vllm", "cpu", GUARDED, ("--grpc-guard",)),
        # The endpoint that is as of the scrape: Triton's is a second old.
        Suite(
            "vllm --metrics-compat vllm",
            "vllm",
            "random",
            ENDLESS,
            ("--metrics-compat", "vllm", "--engine-metrics-port", str(METRICS_PORT)),
        ),
    ),
    "tensorrtllm_backend": (
        Suite("tensorrtllm", "tensorrtllm", "echo", TENSORRTLLM),
        Suite("tensorrtllm --unary", "tensorrtllm", "echo", UNARY, unary=True),
    ),
}
_OPT = "expects the text of OPT-125m"
_LOADS = "loads models over gRPC, which is closed; `inflight model` loads and unloads them"
NOT_RUN = {
    "vllm_backend": {
        "accuracy_test.py": "compares with vLLM itself",
        "check_health_test.py, test_vllm_not_healthy": "replaces a method of vLLM's engine",
        "enabled_stream_test.py, exclude_input_in_output_default": _OPT,
        "multi_lora_test.py": "LoRA is not supported",
        "vllm_backend_test.py, test_exclude_input_in_output (3 tests)": _OPT,
        "vllm_backend_test.py, the other 3 tests": _LOADS,
        "vllm_metrics_test.py, test_custom_sampling_params": "`vllm:request_params_n` is missing",
        "vllm_metrics_test.py, test_vllm_metrics_refused": "metrics cannot be switched off",
        "vllm_multi_gpu_test.py": "needs several GPUs",
    },
    "tensorrtllm_backend": {
        "e2e_grpc_speculative_decoding_client.py": "draft tokens of the client are not supported",
        "end_to_end_test.py": "needs a data set",
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, action="append", required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for checkout in arguments.checkout:
        backend = _backend(checkout)
        version = _version(checkout)
        for suite in SUITES[backend]:
            rows += [
                Row(f"{backend}: {script.name}", version, suite.title, result, script.lacking)
                for script, result in _run_suite(checkout, suite)
            ]
        rows += [
            Row(f"{backend}: {name}", version, SUITES[backend][0].title, f"not run: {reason}")
            for name, reason in NOT_RUN[backend].items()
        ]
    print(f"\n{compatibility_page.table(rows)}")
    if arguments.write:
        compatibility_page.write("scripts", rows)
    return int(any(row.result.startswith("failed") for row in rows))


def _backend(checkout: Path) -> str:
    for backend, suites in SUITES.items():
        if (checkout / suites[0].scripts[0].file).is_file():
            return backend
    raise SystemExit(f"{checkout}: has no clients of {' or '.join(SUITES)}")


def _version(checkout: Path) -> str:
    """The commit and its date."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h, %cs"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run_suite(checkout: Path, suite: Suite) -> list[tuple[Script, str]]:
    """Each script and its result."""
    with (
        tempfile.TemporaryDirectory(prefix="compat-") as folder,
        _server(Path(folder, "server"), suite) as serving,
    ):
        copy = Path(folder, "checkout")
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
        return [(one, _run(one, copy, serving)) for one in suite.scripts]


@contextlib.contextmanager
def _server(folder: Path, suite: Suite) -> Iterator[Serving]:
    def prepare(models: Path) -> None:
        if suite.layout == "vllm":
            (models / "vllm_model").rename(models / "vllm_opt")
        for path in models.glob("*/config.pbtxt") if suite.unary else ():
            path.write_text(path.read_text().replace("decoupled: true", "decoupled: false"))

    folder.mkdir()
    options = suite.options
    if suite.layout == "vllm":
        _check_free(PORT, METRICS_PORT)
        options = (*options, "--grpc-port", str(PORT))
    is_echo = suite.device == "echo"
    is_random = suite.device == "random"
    model = str(_random_model(folder / "checkpoint")) if is_random else SMOLLM2
    chosen = {"prepare": prepare, "layout": suite.layout, "model": model}
    # Slower than the clients that cancel.
    with (
        failpoint("slow", 5) if is_echo else contextlib.nullcontext(),
        serve(folder, "echo" if is_echo else "cpu", *options, **chosen) as serving,
    ):
        yield serving


def _random_model(folder: Path) -> Path:
    """A model that does not end, and SmolLM2's tokenizer with a token before texts, as OPT's."""
    tiny.write_llama(folder, vocab_size=49_152, max_position_embeddings=2048)
    export(locate(SMOLLM2), folder / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).rename(folder / name)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    bos = "<|im_start|>"
    before = {"SpecialToken": {"id": bos, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [before, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"],
        "special_tokens": {bos: {"id": bos, "ids": [1], "tokens": [bos]}},
    }
    path.write_text(json.dumps(tokenizer), "utf-8")
    return folder


def _run(script: Script, checkout: Path, serving: Serving) -> str:
    path = checkout / script.file
    for name, ids in (("input.csv", IDS), ("output.csv", IDS + IDS)):
        (path.parent / name).write_text(",".join(map(str, ids)))
    if script.log:
        (path.parent / script.log).symlink_to(serving.log)
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


def _check_free(*ports: int) -> None:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise SystemExit(f"port {port} is in use; the scripts have it fixed") from None


if __name__ == "__main__":
    sys.exit(main())
