"""Triton's metrics port shows what the engine did."""

import contextlib
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from attached_front import Front
from failpoint import failpoint
from inflight.cli.top import sample_name
from inflight.engine.metrics.families import FAMILIES, published
from inflight.ipc.owner import Owner
from inflight.ipc.shared_memory import regions_of
from kserve import Refused, ask, request, tensor, text
from serving import serve
from waiting import PATIENCE_S, wait_until_ended

pytestmark = pytest.mark.integration

# After its server; a stub has 4.5 s to end by itself.
ENDS_S = 10.0
COMPAT = """
parameters { key: "metrics_compat" value { string_value: "vllm,trtllm" } }
"""


@pytest.fixture
def triton(tmp_path):
    def publish_aliases(models):
        with open(models / "llm" / "config.pbtxt", "a") as file:
            file.write(COMPAT)

    yield from serve(tmp_path, "echo", publish_aliases)


@pytest.fixture
def slow_triton(tmp_path):
    """Whose requests run on until the end of the test."""
    with failpoint("slow", 50):
        yield from serve(tmp_path, "echo")


def scrape(triton):
    """(name, own labels but those of every series) -> value, of the model `llm`."""
    url = f"http://{triton.server.endpoints.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        shown = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(shown):
        for sample in family.samples:
            if not sample.name.startswith("nv_inference"):
                labels = dict(sample.labels)
                for label in ("model_name", "engine", "model", "version"):
                    labels.pop(label, None)
                found[sample_name(sample.name), tuple(sorted(labels.items()))] = sample.value
    return found


def value(shown, name, **labels):
    return shown.get((name, tuple(sorted(labels.items()))), 0.0)


def wait_until(triton, check):
    """The first scrape that passes a check, which asserts: series are published one by one, and the
    port opens after a server is ready."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            shown = scrape(triton)
            check(shown)
            return shown
        except (AssertionError, urllib.error.URLError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def generate(triton, prompt, num_tokens):
    options = (
        tensor("max_tokens", "INT32", num_tokens),
        tensor("ignore_eos", "BOOL", True),
        tensor("stream", "BOOL", True),
    )
    prompt_ids = tensor("input_ids", "INT32", prompt)
    answers = ask(triton.grpc, request("llm", prompt_ids, *options))
    assert sum(answer["num_output_tokens"] for answer in answers) == num_tokens


def kill_engine(triton):
    (engine,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if "inflight.ipc.engine_main" in (process.info["cmdline"] or [])
        and str(triton.server.pid) in process.info["cmdline"]
    )
    os.kill(engine.pid, signal.SIGKILL)


def suspend_in_update(server, stubs, front):
    """Suspend a server in the middle of an update that keeps its stub's interpreter's lock: of a
    gauge. One of a counter, which may happen to be under way, does not, so that is let through."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        server.suspend()
        # A request that runs, and that the suspended server has no part in, so that the next update
        # begins with a gauge.
        front.submit([504] * 10, max_tokens=8000, ignore_eos=True)
        if any(waits_for_lock(stub.pid) for stub in stubs * 2):
            return
        server.resume()
        time.sleep(1.0)
    pytest.fail("no update waits")


def waits_for_lock(pid):
    """Whether a thread of a process waits for the interpreter's lock: it then wakes every 5 ms,
    where a stub's threads wake some ten times a second in all."""
    before = num_wakes(pid)
    time.sleep(1.0)
    return num_wakes(pid) - before > 50


def num_wakes(pid):
    count = 0
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has ended
            count += int(path.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


def check_series(shown, names):
    assert set(names) <= {name for name, _ in shown}


def check_totals(shown, num_requests, num_prompt, num_output):
    name = "inflight_request_success_total"
    assert value(shown, name, finished_reason="length") == num_requests
    assert value(shown, "inflight_prompt_tokens_total") == num_prompt
    assert value(shown, "inflight_generation_tokens_total") == num_output
    for stem in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert value(shown, f"inflight_{stem}_count") == num_requests
        assert value(shown, f"inflight_{stem}_bucket", le="+Inf") == num_requests
    gaps = value(shown, "inflight_inter_token_latency_seconds_count")
    assert gaps == num_output - num_requests
    assert value(shown, "inflight_request_prompt_tokens_sum") == num_prompt
    assert value(shown, "inflight_request_generation_tokens_sum") == num_output


def test_totals_are_right_and_survive_a_killed_engine(triton):
    for number in range(1, 6):
        generate(triton, [504 + number] * 10 * number, 20 * number)
    shown = wait_until(triton, lambda shown: check_totals(shown, 5, 150, 300))
    shown = wait_until(triton, lambda shown: check_series(shown, published(["vllm", "trtllm"])))
    assert value(shown, "vllm:generation_tokens_total") == 300
    kv = {"kv_cache_block_type": "max"}
    assert value(shown, "nv_trt_llm_kv_cache_block_metrics", **kv) == 1024

    kill_engine(triton)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            generate(triton, [600] * 10, 7)
            break
        except Refused:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    later = wait_until(triton, lambda shown: check_totals(shown, 6, 160, 307))
    assert value(later, "inflight_engine_up") == 1
    assert value(later, "inflight_engine_restarts_total") == 1
    gauges = {family.name for family in FAMILIES if family.kind == "gauge"}
    for key, before in shown.items():
        if key[0].startswith("inflight_") and key[0] not in gauges:
            assert later[key] >= before, key


def test_refusals_are_counted_by_kind(triton):
    refused = {"error_kind": "invalid", "by": "front"}
    with pytest.raises(Refused):
        ask(triton.grpc, request("llm", tensor("input_ids", "INT32", [-1])))
    with pytest.raises(Refused):
        ask(triton.grpc, request("generate", text("x"), tensor("top_p", "FP32", 7.0)))

    def check(shown):
        assert value(shown, "inflight_requests_refused_total", **refused) == 2

    wait_until(triton, check)


def test_a_stub_that_updates_metrics_does_not_outlive_its_server(slow_triton):
    """It waits for the answer to a gauge's new value, and no thread of Python can run."""
    wait_until(slow_triton, lambda shown: check_series(shown, published()))
    server = psutil.Process(slow_triton.server.pid)
    children = server.children(recursive=True)
    # This remembers them, and so ends those that hang, should this test fail.
    regions = [path for stub in slow_triton.server.stubs() for path in regions_of(stub)]
    assert len(regions) >= 3 and all(path.exists() for path in regions)
    owner = Owner(server.pid, is_supervisor=False)
    front = Front(slow_triton.log.parent / "models" / "llm", owner)
    suspend_in_update(server, slow_triton.server.stubs(), front)

    killed = time.monotonic()
    server.kill()
    slow_triton.server.wait()
    wait_until_ended(children)
    passed_s = time.monotonic() - killed
    assert passed_s < ENDS_S
    assert not [path for path in regions if path.exists()]
    front.client.close()
