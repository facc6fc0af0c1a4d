"""The command `inflight`. Each command imports what it needs when it runs: `--help` stays fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight.cli import keys as key_commands
from inflight.cli import options
from inflight.cli.option_groups import expand_groups

EXIT_FAILED = 1
EXIT_USAGE = 2

DEMO_QUESTION = "Write one sentence about why the sky is blue."


def _status_and_hint(error: Exception) -> tuple[int | None, str]:
    """Exit status and hint for an error of this package; None for others."""
    from inflight.errors import InflightError, RequestError

    if isinstance(error, InflightError):
        return (EXIT_USAGE if isinstance(error, RequestError) else EXIT_FAILED), ""
    if "inflight_client" not in sys.modules:
        return None, ""
    from inflight_client import ClientError, ConnectionFailed, InvalidRequest, TimedOut

    if isinstance(error, InvalidRequest):
        return EXIT_USAGE, ""
    if isinstance(error, ConnectionFailed):
        return EXIT_FAILED, "start a server with `inflight serve`, or set --url"
    if isinstance(error, TimedOut):
        return EXIT_FAILED, "set by --timeout; no limit without it"
    return (EXIT_FAILED if isinstance(error, ClientError) else None), ""


app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="An LLM backend for NVIDIA Triton Inference Server.",
)
repo = typer.Typer(no_args_is_help=True, help="Model repositories.")
tokenizer = typer.Typer(no_args_is_help=True, help="The tokenizer of a served model.")
model_commands = typer.Typer(
    no_args_is_help=True, help="Checkpoints, and the models of a running server."
)
bench = typer.Typer(no_args_is_help=True, help="Measurements of an engine or a running server.")
app.add_typer(repo, name="repo")
app.add_typer(tokenizer, name="tokenizer")
app.add_typer(bench, name="bench")
app.add_typer(model_commands, name="model")
app.add_typer(key_commands.app, name="key")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"inflight {version('inflight-triton')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
@expand_groups
def serve(
    address: options.AddressOptions,
    gateway: options.GatewayOptions,
    models: options.ServedModels,
    server: options.ServerOptions,
    access: options.AccessFiles,
    telemetry: options.TelemetryOptions,
) -> None:
    """Start tritonserver with the ensembles and serve until Ctrl-C, which drains."""
    from inflight.cli import serve as serving
    from inflight.door import tracing
    from inflight.supervision.options import ServeOptions
    from inflight.supervision.supervisor import Supervisor

    if telemetry.otlp_endpoint:
        tracing.check_endpoint(telemetry.otlp_endpoint)
    serving.set_log_format(telemetry.log_format)
    chosen = ServeOptions(
        host=address.host,
        ports=address.ports,
        gateway_port=gateway.port,
        gateway_workers=gateway.gateway_workers,
        strict_params=gateway.strict_params,
        page=gateway.page,
        log_file=server.log_file,
        drain_s=server.drain,
        min_free_memory=server.min_free_memory,
        grpc_guard=server.grpc_guard,
        busy_poll_ms=server.busy_poll,
        metrics_compat=server.metrics_compat,
        controlled=serving.controlled_models(server.model_control, server.load_model),
        access=serving.access_of(access),
        otlp_endpoint=telemetry.otlp_endpoint,
    )
    with serving.repositories(models, _settings(models.set_)) as found:
        if server.dry_run:
            from inflight.cli.inspection import command

            raise typer.Exit(0 if command.dry_run(found, chosen.controlled) else EXIT_FAILED)
        status = serving.run(Supervisor(found, chosen), verbose=telemetry.verbose)
    raise typer.Exit(status)


@app.command()
@expand_groups
def gateway(
    triton: Annotated[
        list[str],
        typer.Option(metavar="HOST:PORT", help="HTTP port of a Triton server; repeatable."),
    ],
    chosen: options.GatewayProcess,
) -> None:
    """Serve OpenAI's API in front of Triton servers that run already, until Ctrl-C."""
    from inflight.cli import gateway

    raise typer.Exit(gateway.run(triton, chosen))


@app.command()
def openapi(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there, not to stdout.")
    ] = None,
    with_keys: Annotated[
        bool, typer.Option("--with-keys", help="As of a server with keys: with security schemes.")
    ] = False,
) -> None:
    """Print the OpenAPI document of the gateway, as `GET /openapi.json` returns it."""
    import json

    from inflight.door.gateway.openapi.document import document
    from inflight.errors import ConfigError

    text = json.dumps(document(with_keys), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(f"{text}\n")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written ({error.strerror})") from None


@app.command()
@expand_groups
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    sampling: options.SamplingOptions,
    connection: options.GenerateConnection,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print latency and throughput to stderr.")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.")
    ] = False,
) -> None:
    """Continue a prompt; the text streams to stdout."""
    import json

    from inflight.cli.chat import answer as answers
    from inflight_client import ClientError

    answers.accept_any_bytes()
    text = sys.stdin.read() if prompt == "-" else prompt
    answer = answers.Answer()
    try:
        with connection.client() as client, client.stream(text, **sampling.given()) as stream:
            answer.read(stream, (lambda text: None) if json_ else answers.write_stdout)
    except ClientError:
        if not json_:
            answers.end_line(answer)
        raise
    if json_:
        figures = ("text", "finish_reason", "num_input_tokens", "num_output_tokens")
        result = {name: getattr(answer, name) for name in (*figures, "ttft_s", "duration_s")}
        answers.write_stdout(json.dumps(result, ensure_ascii=False) + "\n")
    else:
        answers.write_stdout("\n")
    if stats:
        typer.echo(answer.summary(), err=True)


@app.command()
def top(
    url: Annotated[
        str,
        typer.Option(
            envvar="INFLIGHT_METRICS_URL",
            help="Metrics endpoint; a plain tritonserver has port 8002.",
        ),
    ] = options.METRICS_URL,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one reading and exit.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="For programs: JSON lines.")] = False,
) -> None:
    """Show what a running server does: requests, tokens/s, KV use, latencies."""
    from inflight.cli import top as tops

    raise typer.Exit(tops.run(url, interval_s=interval, once=once, as_json=json_))


@app.command()
def ps(
    json_: Annotated[bool, typer.Option("--json", help="For programs: a JSON list.")] = False,
) -> None:
    """Show the running servers of this user: pid, ports, models, health, requests in flight."""
    from inflight.cli import ps as servers

    servers.show(servers.running(), as_json=json_)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="ORGANISATION/NAME, or with @REVISION.")],
    dir_: Annotated[
        Path | None, typer.Option("--dir", help="Folder; default: the Hugging Face cache.")
    ] = None,
    gguf: Annotated[
        str, typer.Option(metavar="PATTERN", help="One GGUF file, such as Q4_K_M or '*-q8_0*'.")
    ] = "",
) -> None:
    """Download a model from the Hugging Face hub; `serve` finds it by its name."""
    from inflight.cli.checkpoints import pull as pulls

    pulls.run(model, dir_, gguf)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or a model's name.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="fp8|int8|int4", help="Of the weights.")
    ] = "fp8",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a model's checkpoint with linear layers of 8 bits, in half the space, or of 4."""
    from inflight.cli.checkpoints import quantize as writing

    writing.run(model, target, format_, as_json=json_)


@app.command()
def usage(
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    since: Annotated[str, typer.Option(help="Only from this day on: YYYY-MM-DD, in UTC.")] = "",
    ledger: Annotated[
        Path | None, typer.Option(help="Default: ~/.local/state/inflight/usage.sqlite.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show requests and tokens by day, tenant and key, as `serve --keys` has recorded them."""
    from inflight.cli import usage as usages

    usages.show(ledger, tenant=tenant, since=since, as_json=json_)


@app.command()
@expand_groups
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    sampling: options.SamplingOptions,
    connection: options.ChatConnection,
) -> None:
    """Chat with the model. /help lists the commands; Ctrl-C cancels the current reply."""
    from inflight.cli.chat.conversation import Conversation

    found = Conversation(connection.client, connection.model, sampling.given(), system)
    if not found.run():
        raise typer.Exit(EXIT_FAILED)


@app.command()
@expand_groups
def run(
    *,
    models: options.ServedModels,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    sampling: options.SamplingOptions,
) -> None:
    """Start a server as `serve` does, on free ports, and chat with the model until /bye."""
    from inflight.cli.chat import run as runs

    if not runs.run(models, sampling.given(), system):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = DEMO_QUESTION,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of output tokens.")] = 64,
) -> None:
    """Start a server on free ports, ask one question, show the answer, stop."""
    import tempfile

    from inflight.cli.chat.answer import Answer, write_stdout
    from inflight.cli.display import Display
    from inflight.deploy import repository
    from inflight.deploy.tritonserver.server import Server
    from inflight_client import Client

    display = Display()
    with tempfile.TemporaryDirectory(prefix="inflight-demo-") as folder:
        server = Server(
            repository.shipped(), ports=(0, 0, 0), log_file=Path(folder, "tritonserver.log")
        )
        server.start()
        try:
            with display.loading() as on_progress:
                server.wait_ready(on_progress=on_progress)
            typer.echo(f"> {question}")
            answer = Answer()
            with (
                Client(server.endpoints.grpc) as client,
                client.chat_stream(
                    [{"role": "user", "content": question}], max_tokens=max_tokens
                ) as stream,
            ):
                answer.read(stream, write_stdout)
            typer.echo(f"\n\n{answer.summary()}")
            server.stop()
        finally:
            server.kill()


@app.command()
@expand_groups
def doctor(
    address: options.AddressOptions,
    gateway_port: options.GatewayPort = options.GATEWAY_PORT,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Start a server on free ports and send it requests.")
    ] = False,
    repository: Annotated[
        list[Path] | None, typer.Option(help="For --self-test, instead of the demo model.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the checks as a JSON list.")] = False,
) -> None:
    """Check whether this machine can serve, and show how to fix problems."""
    from rich.console import Console

    from inflight.cli.doctor import check, machine
    from inflight.cli.doctor import self_test as server

    if repository and not self_test:
        raise typer.BadParameter("--repository requires --self-test")
    results = machine.examine((*address.ports, gateway_port), address.host)
    if self_test and all(one.status != "broken" for one in results):
        with Console(stderr=True).status("") as status:
            results += server.examine(repository, lambda name: status.update(f"self-test: {name}"))
    if json_:
        typer.echo(check.to_json(results))
    else:
        check.show(results)
    broken = any(one.status == "broken" for one in results)
    raise typer.Exit(EXIT_FAILED if broken else 0)


@repo.command("init")
def repo_init(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")],
    model: options.Model,
    name: Annotated[
        str, typer.Option(help="Prefix of the models' names, for several models in one server.")
    ] = "",
    set_: options.Settings = None,
    layout: options.Layout = "native",
    unary: options.Unary = False,
) -> None:
    """Write a model repository that serves a checkpoint."""
    from inflight.deploy import repository

    made = repository.init(
        model, directory, name=name, settings=_settings(set_), layout=layout, unary=unary
    )
    typer.echo(f"wrote {made.path}: {', '.join(made.models)}")
    for note in made.notes:
        typer.echo(note, err=True)
    typer.echo(f"next: inflight serve --repository {made.path}", err=True)


@tokenizer.command("export")
def tokenizer_export(
    directory: Annotated[Path, typer.Argument(help="Where to write it.")],
    model: Annotated[
        str | None, typer.Option(help="As for `serve`. Default: the shipped model.")
    ] = None,
) -> None:
    """Write the tokenizer as a Hugging Face folder, for tools that count tokens themselves."""
    from inflight import config
    from inflight.checkpoint.locate import locate
    from inflight.deploy import repository
    from inflight.text.tokenizer import export

    if model is None:
        model = config.load(repository.shipped()[0] / "llm" / "1" / "engine.json").model
    export(locate(model), directory)
    typer.echo(f"wrote {directory}")


@model_commands.command("show")
def model_show(
    checkpoint: options.Checkpoint,
    set_: options.Settings = None,
    json_: options.ModelJson = False,
) -> None:
    """Show what is understood of a checkpoint, and the memory that it takes here; loads nothing."""
    from inflight.cli.inspection import command

    command.show(checkpoint, _settings(set_), as_json=json_)


@model_commands.command("load")
def model_load(
    name: options.ModelName,
    set_: options.Settings = None,
    port: options.ServerPort = None,
    json_: options.ModelJson = False,
) -> None:
    """Load a model, or replace it; requests of the former one finish."""
    from inflight.cli import model

    model.load(name, _settings(set_), port=port, as_json=json_)


@model_commands.command("unload")
def model_unload(
    name: options.ModelName, port: options.ServerPort = None, json_: options.ModelJson = False
) -> None:
    """Finish a model's requests and unload it."""
    from inflight.cli import model

    model.unload(name, port=port, as_json=json_)


@model_commands.command("list")
def model_list(port: options.ServerPort = None, json_: options.ModelJson = False) -> None:
    """Show the models of a running server."""
    from inflight.cli import model

    model.show(port=port, as_json=json_)


@bench.command("engine")
@expand_groups
def bench_engine(chosen: options.BenchOptions, open_loop: options.PoissonOptions) -> None:
    """Benchmark the engine in this process: throughput, latency, startup; or profile a step."""
    from inflight_kernels.runtime.host_process import limit_spinning

    limit_spinning()
    if open_loop.poisson:
        if chosen.profile is not None or chosen.runs is not None:
            raise typer.BadParameter("--profile and --runs are for rows, not for --poisson")
        from inflight.cli.bench.poisson import command as poisson

        raise typer.Exit(poisson.run(chosen, open_loop, _settings(chosen.set_)))
    if open_loop != options.PoissonOptions():
        raise typer.BadParameter("an option of an open loop is given without --poisson; add it")
    from inflight.cli.bench import command

    command.run(chosen, _settings(chosen.set_))


@bench.command("serve")
@expand_groups
def bench_serve(
    target: options.TargetOptions,
    load: options.LoadOptions,
    reports: options.ReportOptions,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="BEFORE AFTER", help="Instead: compare two --json files."),
    ] = None,
) -> None:
    """Load a running server and report latency, throughput and goodput as its clients see them."""
    from inflight.cli.bench.serving import command

    if compare is not None:
        command.compare(*compare, reports)
        return
    raise typer.Exit(command.run(target, load, reports))


def _settings(pairs: list[str] | None) -> dict[str, Any]:
    """Parse KEY=VALUE pairs; VALUE is JSON if it parses, otherwise a string."""
    import json

    settings: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {pair}: expected KEY=VALUE")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


def main() -> None:
    """Run the command; errors of this package print one line and a hint, and exit with 1 or 2."""
    try:
        app()
    except Exception as error:
        status, hint = _status_and_hint(error)
        if status is None:
            raise
        plain = bool(os.environ.get("NO_COLOR"))
        typer.secho(
            "error: ", fg="red", bold=True, nl=False, err=True, color=False if plain else None
        )
        typer.echo(str(error), err=True)
        if hint:
            typer.echo(f"hint: {hint}", err=True)
        sys.exit(status)


if __name__ == "__main__":
    main()
