"""Options of the commands, with their help: fields of groups (`option_groups`) and single ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from inflight_client import Client, Options

# Repeated here because importing serve for them would slow down --help.
HTTP_PORT, GRPC_PORT, METRICS_PORT, ENGINE_METRICS_PORT = 8000, 8001, 8002, 8003
GATEWAY_PORT = 9000
HOST = "127.0.0.1"
METRICS_URL = f"http://{HOST}:{ENGINE_METRICS_PORT}/metrics"
DRAIN_S = 30.0
MIN_FREE_MEMORY = 256
URL = f"{HOST}:{GRPC_PORT}"

Model = Annotated[
    str,
    typer.Option(help="A .gguf file, a Hugging Face folder, package:NAME, or a name; see `pull`."),
]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a Hugging Face folder, package:NAME, or a name; see `pull`.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting of engine.json; repeatable."
    ),
]
Layout = Annotated[
    str,
    typer.Option(help="Names and tensors of the models: native, vllm or tensorrtllm."),
]
Unary = Annotated[
    bool,
    typer.Option("--unary", help="One response per request, for /infer and unary gRPC."),
]
Ensemble = Annotated[str, typer.Option(help="Name of the ensemble.")]
ChatEnsemble = Annotated[
    str, typer.Option(help="Name of the ensemble, or its prefix: one for one_chat.")
]
ModelName = Annotated[
    str,
    typer.Argument(
        help="Name of the model with the engine, such as llm; llm@2 for one of several versions."
    ),
]
ServerPort = Annotated[
    int | None, typer.Option("--port", help="HTTP port of the server, if there are several.")
]
ModelJson = Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")]
FreePort = Annotated[int, typer.Option(help="0 picks a free port.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Of a generation."""

    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of output tokens.")] = None
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most probable tokens.")] = (
        None
    )
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling: cumulative probability.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Minimum probability, relative to the top token.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same output.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None

    def given(self) -> Options:
        """Those of the command line, for the client."""
        found: Options = {}
        if self.max_tokens is not None:
            found["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            found["temperature"] = self.temperature
        if self.top_k is not None:
            found["top_k"] = self.top_k
        if self.top_p is not None:
            found["top_p"] = self.top_p
        if self.min_p is not None:
            found["min_p"] = self.min_p
        if self.seed is not None:
            found["seed"] = self.seed
        if self.stop:
            found["stop_words"] = self.stop
        return found


Timeout = Annotated[
    float | None, typer.Option(help="Seconds per request, above 0; no limit by default.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="INFLIGHT_API_KEY", show_envvar=True, help="Of a server with --keys."),
]
CaFile = Annotated[
    str | None,
    typer.Option(envvar="INFLIGHT_CA_FILE", help="Of a server with TLS: PEM file to trust."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """Which ensemble of which server, and how to reach it."""

    url: Annotated[str, typer.Option(envvar="INFLIGHT_URL", help="gRPC address, host:port.")] = URL
    model: Ensemble
    timeout: Timeout = None
    api_key: ApiKey = None
    ca_file: CaFile = None

    def client(self, model: str = "") -> Client:
        """A client of this ensemble, or of another one, whichever of its methods is used.

        Raises:
            InvalidRequest: an option is out of its range.
        """
        from inflight_client import Client

        return Client(
            self.url,
            generate_model=model or self.model,
            chat_model=model or self.model,
            timeout=self.timeout,
            api_key=self.api_key,
            ca_file=self.ca_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConnection(ConnectionOptions):
    """Of `generate`."""

    model: Ensemble = "generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConnection(ConnectionOptions):
    """Of `chat`."""

    model: ChatEnsemble = "chat"


# Of `serve`

GatewayPort = Annotated[int, typer.Option(help="OpenAI's API; 0 picks a free port.")]
GatewayWorkers = Annotated[
    int, typer.Option(min=1, max=64, help="Processes that serve OpenAI's API.")
]
StrictParams = Annotated[
    bool,
    typer.Option("--strict-params", help="Refuse unknown fields of OpenAI's API, not ignore them."),
]
Page = Annotated[
    bool | None,
    typer.Option(
        "--page/--no-page",
        help="Serve the chat page beside OpenAI's API. Default: on loopback alone.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """OpenAI's API of a server."""

    gateway_port: GatewayPort = GATEWAY_PORT
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="Do not serve OpenAI's API.")] = (
        False
    )
    gateway_workers: GatewayWorkers = 1
    strict_params: StrictParams = False
    page: Page = None

    @property
    def port(self) -> int | None:
        """None for no gateway."""
        return None if self.no_gateway else self.gateway_port


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressOptions:
    """Where a server listens."""

    http_port: FreePort = HTTP_PORT
    grpc_port: FreePort = GRPC_PORT
    metrics_port: FreePort = METRICS_PORT
    engine_metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Metrics of the engines and the server, without tritonserver's; 0 picks a free "
            "port. Default: the one after --metrics-port.",
            show_default=False,
        ),
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on; see --keys.")] = HOST

    @property
    def ports(self) -> tuple[int, int, int, int]:
        """Of HTTP, gRPC, Triton's metrics and the engines' metrics; 0 picks a free one."""
        engine_metrics_port = self.engine_metrics_port
        if engine_metrics_port is None:
            engine_metrics_port = self.metrics_port and self.metrics_port + 1
        return self.http_port, self.grpc_port, self.metrics_port, engine_metrics_port


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProcess:
    """Of `gateway`."""

    port: GatewayPort = GATEWAY_PORT
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST
    strict_params: StrictParams = False
    page: Page = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Serve with TLS: the certificate's PEM file.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None
    drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for requests in flight.")
    ] = DRAIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """What to serve: a model with its settings, or repositories."""

    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A .gguf file, a Hugging Face folder, package:NAME, or the name of a model that "
            "was pulled. Default: the demo model.",
            show_default=False,
        ),
    ] = None
    model: Annotated[str | None, typer.Option(help="The same as MODEL.")] = None
    set_: Settings = None
    layout: Layout = "native"
    unary: Unary = False
    repository: Annotated[
        list[Path] | None,
        typer.Option(help="A model repository; repeatable. Default: those shipped with inflight."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server runs."""

    log_file: Annotated[Path | None, typer.Option(help="tritonserver's log file.")] = None
    drain: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for requests in flight.")
    ] = DRAIN_S
    min_free_memory: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MIB",
            help="Refuse new requests while less host memory is available; 0 never does.",
        ),
    ] = MIN_FREE_MEMORY
    metrics_compat: Annotated[
        str, typer.Option(help="Publish metrics under these names, too: vllm,trtllm.")
    ] = ""
    grpc_guard: Annotated[
        bool | None,
        typer.Option(
            "--grpc-guard/--no-grpc-guard",
            help="Check gRPC requests before Triton reads them. Default: beyond loopback, or with "
            "keys, TLS or several versions of a model.",
            show_default=False,
        ),
    ] = None
    busy_poll: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1000.0,
            metavar="MILLISECONDS",
            help="How long the HTTP door polls for an answer before it sleeps. Default: 20 with 8 "
            "cores and more, else 0.",
            show_default=False,
        ),
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show the models and whether they can be served."),
    ] = False
    model_control: Annotated[
        bool, typer.Option("--model-control", help="Let `inflight model` load and unload models.")
    ] = False
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="With --model-control: load only this model first; repeatable."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFiles:
    """Who may use a server."""

    keys: Annotated[
        Path | None,
        typer.Option(help="Refuse requests without a key of this file; see `inflight key`."),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Serve with TLS: the certificate's PEM file.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Require certificates of clients, of these authorities.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Traces and logs of a server."""

    otlp_endpoint: Annotated[
        str,
        typer.Option(help="Send a span per request there, by OTLP over HTTP; needs extra otel."),
    ] = ""
    log_format: Annotated[
        str | None,
        typer.Option(envvar="INFLIGHT_LOG_FORMAT", help="Of the log: text or json (one per line)."),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What `bench engine` runs."""

    model: Annotated[
        str, typer.Option(help="As for `serve`; random weights for a folder without any.")
    ]
    rows: Annotated[
        str,
        typer.Option(help="bs1, bs64, chat256, ..., start, all, or REQUESTSxINPUT/OUTPUT; by ','."),
    ] = "all"
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto"
    scale: Annotated[
        float,
        typer.Option(help="Factor for the rows' requests and lengths; of --poisson, lengths."),
    ] = 1
    runs: Annotated[int | None, typer.Option(help="Runs per row; the best one counts.")] = None
    set_: Settings = None
    profile: Annotated[
        Path | None, typer.Option(help="Profile steps instead of timing; output folder.")
    ] = None
    steps: Annotated[int, typer.Option(help="Decode steps to profile.")] = 20
    json_: Annotated[
        bool,
        typer.Option("--json", help="JSON on stdout: results so far, per row and at the end."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonOptions:
    """The open loop of `bench engine --poisson`."""

    poisson: Annotated[
        bool,
        typer.Option("--poisson", help="Instead of rows: latencies over the rate of arrivals."),
    ] = False
    rate: Annotated[
        str,
        typer.Option(
            metavar="RATE,...",
            help="Requests per second; auto or auto:FIRST searches the highest within the SLO.",
        ),
    ] = "auto"
    lengths: Annotated[
        str, typer.Option(help="Of requests: chat, rag, agents, or a file of JSON lines.")
    ] = "chat"
    requests: Annotated[
        int, typer.Option(min=1, help="Measured requests of a rate, or fewer in --duration.")
    ] = 1000
    duration: Annotated[float, typer.Option(min=0.1, help="Measured seconds of a rate.")] = 40.0
    ramp: Annotated[
        float, typer.Option(min=0.01, help="Seconds before the requests that are measured.")
    ] = 10.0
    slo_ttft_ms: Annotated[float, typer.Option(help="Bound on a request's TTFT.")] = 500.0
    slo_tpot_ms: Annotated[float, typer.Option(help="Bound on a request's TPOT.")] = 30.0
    seed: Annotated[int, typer.Option(help="Of lengths and arrival times.")] = 0
    html: Annotated[Path | None, typer.Option(help="Write a page of HTML with charts.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The server that `bench serve` measures, and how to reach it."""

    url: Annotated[
        str,
        typer.Option(
            help="Default: 127.0.0.1:8001 with grpc, http://127.0.0.1:9000 with openai.",
            show_default=False,
        ),
    ] = ""
    endpoint: Annotated[str, typer.Option(help="Protocol: grpc (Triton's) or openai.")] = "grpc"
    model: Annotated[
        str,
        typer.Option(
            help="Default: the ensemble generate (chat with --chat), or OpenAI's first model.",
            show_default=False,
        ),
    ] = ""
    chat: Annotated[bool, typer.Option("--chat", help="Send prompts as chats.")] = False
    timeout: Timeout = None
    api_key: ApiKey = None
    ca_file: CaFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What `bench serve` sends."""

    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Requests in flight, a level for each number. Default: 1,4,16,64.",
            show_default=False,
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,...",
            help="Instead: requests per second, at random times (Poisson). auto or auto:FIRST: the "
            "highest rate whose 99th percentiles are within --slo.",
        ),
    ] = None
    ramp: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="With --rate: seconds before the requests that are measured; it then goes on "
            "sending until they have ended.",
        ),
    ] = 0.0
    requests: Annotated[int | None, typer.Option(min=1, help="Requests per level.")] = None
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds per level. Default: 30, without --requests.",
            show_default=False,
        ),
    ] = None
    input_tokens: Annotated[
        str | None,
        typer.Option(metavar="MEAN[:SD]", help="Prompt lengths. Default: 128.", show_default=False),
    ] = None
    output_tokens: Annotated[
        str | None,
        typer.Option(metavar="MEAN[:SD]", help="Output lengths. Default: 64.", show_default=False),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(help="Instead: chat, rag, agents, or a file of JSON lines."),
    ] = None
    scale: Annotated[float, typer.Option(help="Factor for the lengths.")] = 1.0
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts have in common.")
    ] = 0
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Draw lengths until they fit. Default: the model's.")
    ] = None
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests before the first level, not measured.")
    ] = 4
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=MS,tpot=MS",
            help="Bounds of a good request: ttft, tpot (or itl), gap, e2e.",
        ),
    ] = None
    cost: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="PER_HOUR", help="Of the server: shows cost per tokens."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of lengths and arrival times.")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Where `bench serve` writes its results."""

    json_: Annotated[Path | None, typer.Option("--json", help="Write a JSON file.")] = None
    html: Annotated[Path | None, typer.Option(help="Write a page of HTML with charts.")] = None
