"""The files in examples/deployment are valid, and name flags, paths and metrics that exist."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

import helm
from inflight.cli import options
from inflight.cli.app import app
from inflight.deploy.metrics import PATH as METRICS_PATH
from inflight.deploy.server_families import SERVER_FAMILIES
from inflight.engine.metrics.families import FAMILIES, published
from inflight.supervision.options import DEFAULT_DRAIN_S

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "deployment"
CHART = FOLDER / "chart"
COMPOSE = FOLDER / "compose" / "compose.yaml"
DOCKERFILES = sorted(FOLDER.glob("*Dockerfile"))
TEXTS = [path for path in sorted(FOLDER.rglob("*")) if path.is_file()]
YAML = [path for path in TEXTS if path.suffix == ".yaml" and "templates" not in path.parts]

KUBERNETES = "1.31"
GRACE_S = 15  # after the drain, for tritonserver and the engines
HTTP, GRPC, GATEWAY = options.HTTP_PORT, options.GRPC_PORT, options.GATEWAY_PORT
METRICS, ENGINE_METRICS = options.METRICS_PORT, options.ENGINE_METRICS_PORT
LIVE, READY = "/v2/health/live", "/v2/health/ready"
# Kinds of the custom resources, whose schemas Kubernetes does not have.
CUSTOM = {"ServiceMonitor", "ScaledObject", "ServingRuntime", "InferenceService"}

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hpa": {"autoscaling": {"kind": "hpa"}, "replicaCount": 3},
    "keda": {"autoscaling": {"kind": "keda"}, "serviceMonitor": {"enabled": True}},
    "full": {
        "model": {
            "name": "acme/tiny-GGUF",
            "gguf": "q4_k_m",
            "tokenSecret": {"name": "hub"},
            "settings": {"max_num_seqs": 128, "device": "cuda"},
        },
        "drainSeconds": 120,
        "preStopSeconds": 10,
        "extraArgs": ["--min-free-memory=512"],
        "extraEnv": [{"name": "HF_ENDPOINT", "value": "http://mirror"}],
        "extraVolumes": [{"name": "keys", "secret": {"secretName": "keys"}}],
        "extraVolumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}],
        "modelsVolume": {"emptyDir": None, "persistentVolumeClaim": {"claimName": "models"}},
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
        "priorityClassName": "high",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    },
    "path": {
        "model": {"name": "/models/tiny", "pull": False},
        "podDisruptionBudget": {"enabled": False},
    },
}


@functools.cache
def rendered(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects of the chart by kind and name."""
    objects = helm.render(CHART, VALUES[name])
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = rendered(name)["Deployment", "qwen-inflight"]["spec"]["template"][
        "spec"
    ]
    return found


def manifests(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


@functools.cache
def flags(command: str) -> set[str]:
    """Options of a command of `inflight`."""
    group: Any = typer.main.get_command(app)
    return {
        flag for one in group.commands[command].params for flag in (*one.opts, *one.secondary_opts)
    }


# Where `inflight serve` is run: by the chart with these values, or in these files.
COMMANDS = [*VALUES, *(path.name for path in DOCKERFILES), "compose", "kserve"]


def arguments_of(where: str) -> list[str]:
    """The arguments of `inflight serve` in one of COMMANDS."""
    found: list[str]
    if where in VALUES:
        found = pod(where)["containers"][0]["args"]
    elif where == "compose":
        found = yaml.safe_load(COMPOSE.read_text())["services"]["inflight"]["command"]
    elif where == "kserve":
        found = runtime()["args"]
    else:
        (text,) = (path.read_text() for path in DOCKERFILES if path.name == where)
        entry = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
        command = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
        assert entry and command
        program, serve, *arguments = json.loads(entry[1])
        assert (program, serve) == ("inflight", "serve")
        found = arguments + json.loads(command[1])
    return found


def runtime() -> dict[str, Any]:
    """The container of KServe's runtime."""
    found: dict[str, Any] = manifests(FOLDER / "kserve" / "serving-runtime.yaml")[0]["spec"]
    return dict(found["containers"][0])


def drain_s(arguments: list[str]) -> float:
    text = " ".join(arguments)
    found = re.search(r"--drain[ =](\d+)", text)
    return float(found[1]) if found else DEFAULT_DRAIN_S


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(FOLDER)))
def test_yaml_is_valid(path: Path) -> None:
    assert manifests(path)


def test_helm_finds_nothing_to_complain_about() -> None:
    found = helm.lint(CHART)
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("name", VALUES)
def test_objects_are_those_of_kubernetes(name: str) -> None:
    for (kind, _), one in rendered(name).items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_runtimes_container_is_one_of_kubernetes() -> None:
    spec = manifests(FOLDER / "kserve" / "serving-runtime.yaml")[0]["spec"]
    found = {"containers": spec["containers"], "volumes": spec["volumes"]}
    metadata = {"name": "inflight"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": found}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 2},
        {"autoscaling": {"kind": "vpa"}},
        {"drainSeconds": "30s"},
        {"model": {}, "modle": {}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        helm.render(CHART, values)


def test_every_flag_exists() -> None:
    known = flags("serve")
    assert len(set(COMMANDS)) == len(VALUES) + len(DOCKERFILES) + 2
    for where in COMMANDS:
        words = [word for word in arguments_of(where) if word.startswith("--")]
        named = [word.partition("=")[0] for word in words]
        assert set(named) <= known, where
    pull = pod("full")["initContainers"][0]
    assert pull["command"] == ["inflight", "pull", "acme/tiny-GGUF"]
    assert pull["args"] == ["--gguf", "q4_k_m"] and "--gguf" in flags("pull")


def test_settings_and_further_arguments_are_passed_on() -> None:
    arguments = pod("full")["containers"][0]["args"]
    assert {'--set=device="cuda"', "--set=max_num_seqs=128", "--min-free-memory=512"} <= set(
        arguments
    )
    assert "initContainers" not in pod("path")
    assert "--model=/models/tiny" in pod("path")["containers"][0]["args"]


@pytest.mark.parametrize("name", VALUES)
def test_a_pods_grace_period_covers_the_drain(name: str) -> None:
    found = pod(name)
    (container,) = found["containers"]
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    expected = drain_s(container["args"]) + int(seconds) + GRACE_S
    assert found["terminationGracePeriodSeconds"] == expected


def test_other_grace_periods_cover_the_drain() -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["inflight"]
    assert service["stop_grace_period"] == f"{drain_s(service['command']) + GRACE_S:g}s"
    predictor = manifests(FOLDER / "kserve" / "serving-runtime.yaml")[1]["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] == drain_s(runtime()["args"]) + GRACE_S
    for path in DOCKERFILES:
        found = re.search(r"--stop-timeout (\d+)", path.read_text())
        assert found and int(found[1]) == drain_s(arguments_of(path.name)) + GRACE_S


@pytest.mark.parametrize("name", VALUES)
def test_ports_and_probes_are_the_servers(name: str) -> None:
    (container,) = pod(name)["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {
        "http": HTTP,
        "grpc": GRPC,
        "openai": GATEWAY,
        "triton-metrics": METRICS,
        "metrics": ENGINE_METRICS,
    }
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert (probes["startup"]["path"], probes["liveness"]["path"]) == (LIVE, LIVE)
    assert probes["readiness"]["path"] == READY
    services = [one for (kind, _), one in rendered(name).items() if kind == "Service"]
    for service in services:
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
    reachable = {port["port"] for port in services[0]["spec"]["ports"]}
    assert reachable == {HTTP, GRPC, GATEWAY}  # metrics have no authentication


def test_the_paths_of_probes_are_routes_of_the_door() -> None:
    source = (ROOT / "backend" / "inflight" / "door" / "http" / "app.py").read_text()
    assert f'Route("{LIVE}"' in source and f'Route("{READY}"' in source
    for path in DOCKERFILES:
        assert f"http://127.0.0.1:{HTTP}{LIVE}" in path.read_text()
        assert re.search(rf"^EXPOSE {HTTP} {GRPC} {GATEWAY}$", path.read_text(), re.MULTILINE)


def test_compose_publishes_the_ports_of_clients() -> None:
    published_ports = yaml.safe_load(COMPOSE.read_text())["services"]["inflight"]["ports"]
    assert published_ports == [f"127.0.0.1:{port}:{port}" for port in (HTTP, GRPC, GATEWAY)]


@pytest.mark.parametrize("where", COMMANDS)
def test_no_two_ports_are_the_same(where: str) -> None:
    ports = {
        "http": HTTP,
        "grpc": GRPC,
        "metrics": METRICS,
        "engine-metrics": ENGINE_METRICS,
        "gateway": GATEWAY,
    }
    text = " ".join(arguments_of(where))
    for name in ports:
        found = re.search(rf"--{name}-port[ =](\d+)", text)
        if found is not None:
            ports[name] = int(found[1])
    assert len(set(ports.values())) == len(ports)


def test_kserves_ports_are_those_of_its_arguments() -> None:
    container = runtime()
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert f"--http-port={ports['http1']}" in container["args"]
    assert f"--grpc-port={ports['h2c']}" in container["args"]
    assert f"--gateway-port={ports['openai']}" in container["args"]
    annotations = manifests(FOLDER / "kserve" / "serving-runtime.yaml")[0]["spec"]["annotations"]
    port = annotations["prometheus.kserve.io/port"]
    assert f"--engine-metrics-port={port}" in container["args"]
    assert annotations["prometheus.kserve.io/path"] == METRICS_PATH
    for kind, path in (("startup", LIVE), ("liveness", LIVE), ("readiness", READY)):
        probe = container[f"{kind}Probe"]["httpGet"]
        assert (probe["path"], probe["port"]) == (path, ports["http1"])


@pytest.mark.parametrize("container", ["chart", "pull", "kserve"])
def test_containers_have_few_rights(container: str) -> None:
    found = pod("defaults")
    chosen = {
        "chart": found["containers"][0],
        "pull": found["initContainers"][0],
        "kserve": runtime(),
    }[container]
    context = {**found["securityContext"], **chosen["securityContext"]}
    if container == "kserve":
        context = chosen["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] == 10001
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert any(one["mountPath"] == "/tmp" for one in chosen["volumeMounts"])


def test_tensors_have_shared_memory() -> None:
    (shm,) = (one for one in pod("defaults")["volumes"] if one["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert yaml.safe_load(COMPOSE.read_text())["services"]["inflight"]["shm_size"] == "1g"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_metric_exists(path: Path) -> None:
    known = {*published(), *(one.name for one in (*FAMILIES, *SERVER_FAMILIES))}
    for name in re.findall(r"\binflight_[a-z_]+[a-z]\b|\bvllm:[a-z_]+\b", path.read_text()):
        assert name in known, name


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_pods_are_scaled_by_their_queue_and_their_blocks(name: str) -> None:
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[name]
    scaler = rendered(name)[kind, "qwen-inflight"]
    text = json.dumps(scaler)
    assert "inflight_num_requests_waiting" in text and "inflight_kv_cache_usage_perc" in text
    assert scaler["spec"]["scaleTargetRef"]["name"] == "qwen-inflight"
    assert "replicas" not in rendered(name)["Deployment", "qwen-inflight"]["spec"]
    assert rendered("defaults")["Deployment", "qwen-inflight"]["spec"]["replicas"] == 1
    if name == "keda":
        assert 'namespace=\\"llms\\", service=\\"qwen-inflight-metrics\\"' in text


def test_metrics_are_scraped_where_they_are() -> None:
    monitor = rendered("keda")["ServiceMonitor", "qwen-inflight"]["spec"]
    service = rendered("keda")["Service", "qwen-inflight-metrics"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    main = rendered("keda")["Service", "qwen-inflight"]["metadata"]["labels"]
    assert not monitor["selector"]["matchLabels"].items() <= main.items()
    names = {port["name"] for port in service["spec"]["ports"]}
    assert {one["port"] for one in monitor["endpoints"]} == names
    assert {one["path"] for one in monitor["endpoints"]} == {METRICS_PATH}
    jobs = yaml.safe_load((FOLDER / "compose" / "prometheus.yaml").read_text())["scrape_configs"]
    assert [job["static_configs"][0]["targets"] for job in jobs] == [
        [f"inflight:{ENGINE_METRICS}"],
        [f"inflight:{METRICS}"],
    ]
    pool = yaml.safe_load((FOLDER / "gateway-api" / "inferencepool-values.yaml").read_text())
    extension = pool["inferenceExtension"]["flags"]
    assert extension["model-server-metrics-port"] == ENGINE_METRICS
    assert extension["model-server-metrics-path"] == METRICS_PATH
    labels = pool["inferencePool"]["modelServers"]["matchLabels"]
    template = rendered("defaults")["Deployment", "qwen-inflight"]["spec"]["template"]
    assert labels.items() <= template["metadata"]["labels"].items()
    assert pool["inferencePool"]["targetPorts"] == [{"number": GATEWAY}]


def test_files_that_compose_mounts_exist() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    build = services["inflight"]["build"]
    context = (COMPOSE.parent / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    mounts = [one for service in services.values() for one in service.get("volumes", ())]
    sources = [one.split(":")[0] for one in mounts if one.startswith(".")]
    assert len(sources) == 4
    for source in sources:
        assert (COMPOSE.parent / source).exists(), source
    provider = yaml.safe_load((FOLDER / "compose" / "grafana" / "dashboards.yaml").read_text())
    (path,) = (one["options"]["path"] for one in provider["providers"])
    assert any(f":{path}:" in one for one in mounts)


def test_the_chart_is_of_this_version() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert project and chart["appVersion"] == project[1]
    assert runtime()["image"] == f"inflight:{project[1]}"
