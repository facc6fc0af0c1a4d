"""Options of the commands, with their help; typer reads them from the signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Repeated here because importing serve for them would slow down --help.
HTTP_PORT, GRPC_PORT, METRICS_PORT, ENGINE_METRICS_PORT = 8000, 8001, 8002, 8003
HOST = "127.0.0.1"
METRICS_URL = f"http://{HOST}:{ENGINE_METRICS_PORT}/metrics"
DRAIN_S = 30.0
MIN_FREE_MEMORY = 256
URL = f"{HOST}:{GRPC_PORT}"

Model = Annotated[str, typer.Option(help="A .gguf file, a Hugging Face folder, or package:NAME.")]
Url = Annotated[str, typer.Option(envvar="INFLIGHT_URL", help="gRPC address, host:port.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="INFLIGHT_API_KEY", show_envvar=True, help="Of a server with --keys."),
]
CaFile = Annotated[
    str | None,
    typer.Option(envvar="INFLIGHT_CA_FILE", help="Of a server with TLS: PEM file to trust."),
]
Timeout = Annotated[
    float | None, typer.Option(help="Seconds per request, above 0; no limit by default.")
]
MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of output tokens.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling: cumulative probability.")]
MinP = Annotated[float | None, typer.Option(help="Minimum probability, relative to the top token.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same output.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting of engine.json; repeatable."
    ),
]
ModelName = Annotated[str, typer.Argument(help="Name of the model with the engine, such as llm.")]
ServerPort = Annotated[
    int | None, typer.Option("--port", help="HTTP port of the server, if there are several.")
]
ModelJson = Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")]

# Of `serve`

FreePort = Annotated[int, typer.Option(help="0 picks a free port.")]
EngineMetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Metrics of the engines and the server, without tritonserver's; 0 picks a free "
        "port. Default: the one after --metrics-port.",
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; see --keys.")]
OneModel = Annotated[
    str | None,
    typer.Option(help="Serve this model: a .gguf file, a Hugging Face folder, package:NAME."),
]
Repositories = Annotated[
    list[Path] | None,
    typer.Option(help="A model repository; repeatable. Default: those shipped with inflight."),
]
LogFile = Annotated[Path | None, typer.Option(help="tritonserver's log file.")]
Drain = Annotated[float, typer.Option(min=0.0, help="Seconds to wait for requests in flight.")]
MetricsCompat = Annotated[
    str, typer.Option(help="Publish metrics under these names, too: vllm,trtllm.")
]
GrpcGuard = Annotated[
    bool | None,
    typer.Option(
        "--grpc-guard/--no-grpc-guard",
        help="Check gRPC requests before Triton reads them. Default: beyond loopback.",
        show_default=False,
    ),
]
ModelControl = Annotated[
    bool, typer.Option("--model-control", help="Let `inflight model` load and unload models.")
]
LoadModels = Annotated[
    list[str] | None,
    typer.Option(help="With --model-control: load only this model first; repeatable."),
]
KeysFile = Annotated[
    Path | None,
    typer.Option(help="Refuse requests without a key of this file; see `inflight key`."),
]
TlsCert = Annotated[Path | None, typer.Option(help="Serve with TLS: the certificate's PEM file.")]
TlsKey = Annotated[Path | None, typer.Option(help="The certificate's private key.")]
TlsClientCa = Annotated[
    Path | None, typer.Option(help="Require certificates of clients, of these authorities.")
]
MinFreeMemory = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="MIB",
        help="Refuse new requests while less host memory is available; 0 never does.",
    ),
]
OtlpEndpoint = Annotated[
    str,
    typer.Option(help="Send a span per request there, by OTLP over HTTP; needs extra otel."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(envvar="INFLIGHT_LOG_FORMAT", help="Of the log: text or json (one per line)."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")]

# Of `bench engine`

BenchModel = Annotated[
    str, typer.Option(help="As for `serve`; random weights for a folder without any.")
]
BenchRows = Annotated[
    str,
    typer.Option(help="bs1, bs64, chat256, ..., start, all, or REQUESTSxINPUT/OUTPUT; by ','."),
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
Scale = Annotated[float, typer.Option(help="Factor for the rows' requests and lengths.")]
Runs = Annotated[int | None, typer.Option(help="Runs per row; the best one counts.")]
Profile = Annotated[
    Path | None, typer.Option(help="Profile steps instead of timing; output folder.")
]
Steps = Annotated[int, typer.Option(help="Decode steps to profile.")]
BenchJson = Annotated[
    bool,
    typer.Option("--json", help="JSON on stdout: results so far, per row and at the end."),
]
